"""cl100k, the vocabulary of OpenAI's embedding models: token ids back to text.

Clients such as LangChain's OpenAIEmbeddings send ids of this vocabulary unless they are told not
to. tiktoken's table is a file of lines `base64 id`, known by its SHA-256; the server reads it from
disk and never fetches it. Decoding is joining bytes: neither tiktoken nor its rules are needed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from base64 import b64decode
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from packhorse.errors import InputError
from packhorse.serve.failures import TooLarge

NAME = "cl100k"
ADDRESS = "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
CACHED = hashlib.sha1(ADDRESS.encode()).hexdigest()  # as tiktoken names it in its cache
DIGEST = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
CACHES = ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")


class Table:
    """The bytes of each token."""

    def __init__(self, tokens: dict[int, bytes]) -> None:
        self.tokens = tokens

    def decode(self, ids: Sequence[int], most: int) -> str:
        """The text of these ids, of at most so many characters.

        Ids that were split within a character leave U+FFFD there, as with tiktoken.
        """
        try:
            parts = [self.tokens[id] for id in ids]
        except KeyError:
            raise InputError(f"a token id is none of {NAME}'s; send texts instead") from None
        if sum(map(len, parts)) > 4 * most:  # bytes, of which a character takes at most four
            raise TooLarge(f"an input has over {most} characters")
        return b"".join(parts).decode("utf-8", "replace")


def table(setting: str) -> Table | None:
    """The table that `--token-ids` names: of tiktoken's cache, or of a file after "="; or none."""
    name, _, file = setting.partition("=")
    if not name:
        return None
    if name != NAME:
        raise InputError(f"token_ids is {setting!r:.80}; it can be {NAME} or {NAME}=FILE")
    return _read(Path(file) if file else _cache() / CACHED)


def _cache() -> Path:
    """Where tiktoken keeps what it has fetched."""
    named = (os.environ[variable] for variable in CACHES if os.environ.get(variable))
    return Path(next(named, Path(tempfile.gettempdir()) / "data-gym-cache"))


@cache
def _read(file: Path) -> Table:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"{NAME}'s table cannot be read from {file}: {error.strerror}; fetch {ADDRESS} "
            f"and say --token-ids {NAME}=FILE, or set TIKTOKEN_CACHE_DIR to tiktoken's cache"
        ) from error
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise InputError(f"{file} is not {NAME}'s table: its SHA-256 differs; fetch it again")
    pairs = (line.split() for line in content.splitlines())
    return Table({int(id): b64decode(token) for token, id in pairs})
