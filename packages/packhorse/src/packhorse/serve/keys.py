"""API keys: the format of their lines, the client of a key, and reading the file again.

A line of a key file, or a part of PACKHORSE_API_KEY between commas, is one of

    3f8a…                  a key; it is named by its place, key1 for the first
    search: 3f8a…          a key with a name, which stands in metrics and logs
    nightly: 77c0… bulk    a key whose requests are in the lane `bulk` (`runtime.shares`)

Several keys of one name belong to one client, so that a key can be exchanged while both work. A
blank must follow the colon, because a key may contain colons.

On SIGHUP the file is read again. If it cannot be used, the keys stay, and one line of log says so
without the content of the file.

This module imports no torch and no web framework.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import signal
import stat
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from packhorse.errors import InputError

LOGGER = logging.getLogger(__name__)
LANES = ("interactive", "bulk")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# What keys without a name, and requests without a key, are called.
PLACE_NAME = re.compile(r"key[0-9]+|none")


class ApiKey(NamedTuple):
    """A key that opens the server; the key itself is not kept."""

    name: str
    digest: bytes
    bulk: bool = False


def api_keys(file: str, variable: str) -> tuple[str, ...]:
    """The lines of a key file, and the parts of the environment variable between its commas."""
    lines = _read_private(Path(file)).splitlines() if file else []
    entries = [" ".join(entry.split()) for entry in (*lines, *variable.split(","))]
    entries = [entry for entry in entries if entry and not entry.startswith("#")]
    if file and not entries:
        raise InputError(f"{file} holds no API key; write one per line")
    entries = list(dict.fromkeys(entries))
    parse_keys(entries)
    return tuple(entries)


def parse_keys(entries: Sequence[str]) -> tuple[ApiKey, ...]:
    """Return the keys that lines of `api_keys` describe; raises `InputError`.

    A message gives the number of a key only: neither the key nor what may be a part of it.
    """
    keys: dict[bytes, ApiKey] = {}
    lanes: dict[str, bool] = {}
    for number, entry in enumerate(entries, 1):
        name, secret, lane = _split(entry, number)
        if not (secret.isascii() and secret.isprintable()):
            raise InputError(f"API key {number} cannot be sent in a header; use ASCII, no blanks")
        key = ApiKey(name or f"key{number}", sha256(secret.encode()).digest(), lane == "bulk")
        if keys.setdefault(key.digest, key) != key:
            raise InputError(f"API key {number} is listed before, with another name or lane")
        if lanes.setdefault(key.name, key.bulk) != key.bulk:
            raise InputError(f"API key {number} has the name of one in the other lane")
    return tuple(keys.values())


def find_key(keys: Sequence[ApiKey], secret: bytes) -> ApiKey | None:
    """Return the key that a client sent, or None.

    It is compared with every key and in constant time, so that timing reveals nothing.
    """
    digest = sha256(secret).digest()
    matches = [hmac.compare_digest(digest, key.digest) for key in keys]
    return keys[matches.index(True)] if any(matches) else None


class KeyReloader:
    """Reads the key file again on SIGHUP, and passes the keys to `use`.

    Without a key file the signal keeps its meaning: a terminal that closes ends the server.
    """

    def __init__(
        self,
        file: str,
        kept: Sequence[str],
        use: Callable[[tuple[str, ...]], object] = parse_keys,
    ) -> None:
        """`kept` are keys from elsewhere, which stay; `use` gets all lines."""
        self.file = file
        self.kept = kept
        self.use = use
        self._is_early = False

    def wait(self) -> None:
        """Until there is an event loop, note the signal instead of ending by it."""
        if self.file:
            signal.signal(signal.SIGHUP, self._on_early_signal)

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reload on the signal from now on, and now if it has come already."""
        if self.file:
            loop.add_signal_handler(signal.SIGHUP, self.reload)
            if self._is_early:
                self.reload()

    def reload(self) -> None:
        """Read the file again; keep the keys if it cannot be used."""
        try:
            entries = tuple(dict.fromkeys((*api_keys(self.file, ""), *self.kept)))
            keys = parse_keys(entries)
        except InputError as error:
            LOGGER.error("the API keys stay as they were: %s", error)
            return
        self.use(entries)
        LOGGER.info("%d API keys were read again", len(keys))

    def _on_early_signal(self, *_: object) -> None:
        self._is_early = True


def _split(entry: str, number: int) -> tuple[str, str, str]:
    """Return the name, the key and the lane of a line."""
    words = entry.split()
    if len(words) == 1:
        if entry.endswith(":") and NAME.fullmatch(entry[:-1]):
            raise InputError(f"API key {number} is a name without a key; write NAME: KEY")
        return "", entry, ""
    name = words[0].removesuffix(":")
    lane = words[2] if len(words) == 3 else LANES[0]
    if not words[0].endswith(":") or len(words) > 3 or lane not in LANES:
        raise InputError(
            f"API key {number} has blanks; write KEY, NAME: KEY or NAME: KEY {'|'.join(LANES)}"
        )
    if not NAME.fullmatch(name) or PLACE_NAME.fullmatch(name):
        raise InputError(
            f"the name of API key {number} cannot be used; write up to 64 letters, digits, dots, "
            "dashes and underscores, but not none, key1, key2 …"
        )
    return name, words[1], lane


def _read_private(file: Path) -> str:
    """The text of a file that no other user may read."""
    try:
        with file.open(encoding="utf-8") as opened:
            # Of the open file, not of the path: nobody can exchange it between check and read.
            status = os.fstat(opened.fileno())
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    if not is_private(status.st_uid, status.st_mode, os.geteuid()):
        raise InputError(
            f"{file} holds API keys and other users can read or change it "
            f"(mode {stat.S_IMODE(status.st_mode):o}); chmod 600 it and own it"
        )
    return text


def is_private(owner: int, mode: int, user: int) -> bool:
    """May only the user, or root, use a file of this owner and mode?

    The rule is PostgreSQL's for its private key: the file belongs to the user and nobody else may
    use it; or it belongs to root, and its group may read it, as secrets are mounted in containers.
    """
    if owner == 0:
        return not mode & 0o037
    return owner == user and not mode & 0o077
