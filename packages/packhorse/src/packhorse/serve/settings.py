"""How the server runs and what it allows: one flat, frozen value, read from four places.

    resolve(Path("serve.toml"), os.environ, {"port": 0})

A key has the same name everywhere: `max_body_bytes` in TOML, `PACKHORSE_SERVE_MAX_BODY_BYTES` in
the environment, `--max-body-bytes` on the command line; the later goes before the earlier. API keys
are the exception: they come from PACKHORSE_API_KEY or a file, never from a command line, which
every user of the machine can read. Every default is a bound: nothing a client sends or leaves
undone is unlimited. docs/limits.md tells what happens beyond each.

This module imports no torch and no web framework.
"""

from __future__ import annotations

import math
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from packhorse import toml
from packhorse.errors import InputError

PREFIX = "PACKHORSE_SERVE_"
KEY_VARIABLE = "PACKHORSE_API_KEY"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

MODELS, REQUESTS, NETWORK, LIMITS = "Models", "Requests", "Network", "Limits"
TIMES, LOGS, CLUSTER = "Times", "Logs", "Cluster"


def _key(default: Any, group: str, help: str, least: float | None = None) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "least": least})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the server can be told."""

    model: tuple[str, ...] = _key(
        (DEFAULT_MODEL,), MODELS, "A folder, file or hub id, or NAME=MODEL; may be repeated."
    )
    device: str = _key(
        "", MODELS, "cpu, cuda, cuda:1; default PACKHORSE_DEVICE, else the accelerator."
    )
    dtype: Literal["fp32", "bf16", "fp16", "auto"] | None = _key(
        None, MODELS, "Number format; default fp32 on a CPU, bf16 on CUDA."
    )
    kernel: str = _key("", MODELS, "Attention kernel; default the fastest here.")
    graphs: bool = _key(False, MODELS, "Compile; on CUDA replay as graphs.")
    invariant: bool = _key(False, MODELS, "The same bits for an input in every batch.")
    threads: int = _key(0, MODELS, "Threads that compute on a CPU; 0: its cores.", 0)
    batch_tokens: int = _key(0, MODELS, "Tokens a batch; 0: what suits the device.", 0)
    batch_wait_ms: float = _key(2.0, MODELS, "How long a request may wait for others to join.", 0)

    strict_fields: bool = _key(False, REQUESTS, "Refuse fields that a route does not know.")
    token_ids: str = _key(
        "", REQUESTS, "cl100k or cl100k=FILE: decode other token ids than the model's own."
    )

    host: str = _key("127.0.0.1", NETWORK, "Address to listen on.")
    port: int = _key(8080, NETWORK, "Port to listen on; 0: any that is free.", 0)
    insecure: bool = _key(False, NETWORK, "Serve the network without an API key.")
    api_key_file: str = _key("", NETWORK, "A file of API keys, one a line; read at the start.")
    cors_origin: tuple[str, ...] = _key(
        (), NETWORK, "An origin whose pages may call this server; may be repeated."
    )
    allow_host: tuple[str, ...] = _key(
        (), NETWORK, "A name this server has, for requests without an API key; may be repeated."
    )

    max_concurrent_requests: int = _key(512, LIMITS, "Requests that are worked on at once.", 1)
    max_connections: int = _key(2048, LIMITS, "Connections that are open at once.", 1)
    max_header_bytes: int = _key(16_384, LIMITS, "Bytes of a request's headers and trailers.", 1024)
    max_headers: int = _key(100, LIMITS, "Headers and trailers of a request.", 1)
    max_batch_inputs: int = _key(32, LIMITS, "Inputs (texts, documents) in one request.", 1)
    max_body_bytes: int = _key(2_000_000, LIMITS, "Bytes in the body of a request.", 1)
    max_buffered_bytes: int = _key(256 << 20, LIMITS, "Bytes of all bodies held at once.", 1)
    max_input_characters: int = _key(200_000, LIMITS, "Characters in one input.", 1)
    max_input_tokens: int = _key(0, LIMITS, "Tokens an input; 0: what the model takes.", 0)
    max_queue_tokens: int = _key(0, LIMITS, "Tokens that may wait; 0: 16 batches.", 0)
    max_queue_inputs: int = _key(4096, LIMITS, "Inputs that may wait.", 1)

    receive_seconds: float = _key(10.0, TIMES, "To receive the headers, and the body.", 0.01)
    send_seconds: float = _key(30.0, TIMES, "A client may leave an answer unread.", 0.01)
    idle_seconds: float = _key(30.0, TIMES, "A connection may be idle between requests.", 0.01)
    drain_seconds: float = _key(30.0, TIMES, "After SIGTERM for requests in flight.", 0)
    ready_seconds: float = _key(10.0, TIMES, "Age of a batch by which /ready is believed.", 0)

    log_format: Literal["plain", "json"] = _key("plain", LOGS, "Lines for people, or JSON lines.")
    log_level: Literal["debug", "info", "warning", "error"] = _key(
        "info", LOGS, "The least that is logged."
    )
    log_requests: bool = _key(False, LOGS, "A line for every request; never its texts.")

    engine: Literal["local", "ray"] = _key(
        "local", CLUSTER, "Where models run: in this process, or in replicas on a Ray cluster."
    )
    replicas: int = _key(1, CLUSTER, "Replicas at the start, and at least.", 1)
    max_replicas: int = _key(0, CLUSTER, "Replicas under load; 0: never more.", 0)
    ray_address: str = _key("", CLUSTER, "A running Ray cluster; default one of this machine.")

    # Never a flag and never in a file of settings: see `api_keys`.
    keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            least = each.metadata.get("least")
            value = getattr(self, each.name)
            if least is not None and not (math.isfinite(value) and value >= least):
                raise InputError(f"{each.name} is {value}; it must be {least:g} or more")
        if self.port > 65535:
            raise InputError(f"port is {self.port}; it must be 65535 or less")
        if not self.model:
            raise InputError("there is no model to serve; name one with --model")
        if self.engine != "ray" and (self.replicas > 1 or self.max_replicas or self.ray_address):
            raise InputError("--replicas, --max-replicas and --ray-address are for --engine ray")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise InputError(
                f"max_replicas is {self.max_replicas}; it must be at least replicas "
                f"({self.replicas}), or 0"
            )

    @property
    def is_local(self) -> bool:
        """Can nobody but this machine reach it?"""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def toml(self) -> str:
        """All but the keys, in the form of a file; comments say what a setting is for."""
        return toml.to_toml(self, KINDS)


# What can be said in a file, in the environment or by a flag.
# None stands for what was not said and is never said itself.
KINDS: dict[str, Any] = {
    name: get_args(kind)[0] if type(None) in get_args(kind) else kind
    for name, kind in get_type_hints(Settings).items()
    if name != "keys"
}


def resolve(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Defaults, what the file says over them, over that the environment, over that the flags."""
    environment = environment or {}
    values = _read(file) if file else {}
    for variable, text in environment.items():
        if variable.startswith(PREFIX):
            name = _known(variable.removeprefix(PREFIX).lower(), f"the environment's {variable}")
            values[name] = _value(name, _parsed(KINDS[name], text), variable)
    for name, value in (flags or {}).items():
        flag = f"--{name.replace('_', '-')}"
        values[name] = _value(_known(name, flag), value, flag)
    keys = api_keys(values.get("api_key_file", ""), environment.get(KEY_VARIABLE, ""))
    settings = Settings(**values, keys=keys)
    if not (settings.is_local or settings.keys or settings.insecure):
        raise InputError(
            f"{settings.host} can be reached by others and there is no API key; set {KEY_VARIABLE} "
            "or --api-key-file, or say --insecure to serve everyone"
        )
    return settings


def api_keys(file: str, variable: str) -> tuple[str, ...]:
    """The keys of a file, one a line, and those of the environment's variable, comma between."""
    lines = _secret(Path(file)).splitlines() if file else []
    found = [key.strip() for key in (*lines, *variable.split(","))]
    found = [key for key in found if key and not key.startswith("#")]
    if file and not found:
        raise InputError(f"{file} holds no API key; write one a line")
    for number, key in enumerate(found, 1):
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise InputError(f"API key {number} cannot be sent in a header; use ASCII, no blanks")
    return tuple(dict.fromkeys(found))


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error


def _secret(file: Path) -> str:
    """The text of a file that no other user may read."""
    try:
        with file.open(encoding="utf-8") as opened:
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

    As PostgreSQL has it for its private key: the file belongs to the user, and nobody else may use
    it; or it belongs to root, whose group may read it: so secrets are mounted into containers.
    """
    if owner == 0:
        return not mode & 0o037
    return owner == user and not mode & 0o077


def _read(file: Path) -> dict[str, Any]:
    try:
        said = tomllib.loads(_text(file))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not TOML: {error}") from error
    return {name: _value(_known(name, str(file)), said[name], str(file)) for name in said}


def _known(name: str, where: str) -> str:
    if name not in KINDS:
        near = get_close_matches(name, KINDS, 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{where}: there is no setting {name!r}{hint}")
    return name


def _value(name: str, value: Any, where: str) -> Any:
    """A value of TOML or of a flag, as the setting's kind."""
    kind = KINDS[name]
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        if all(isinstance(item, str) for item in items):
            return tuple(items)
        raise InputError(f"{where}: {name} must be a list of texts")
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        known = ", ".join(map(repr, get_args(kind)))
        raise InputError(f"{where}: {name} is {value!r:.80}; it can be {known}")
    if type(value) is kind or (kind is float and type(value) is int):
        return kind(value)
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    raise InputError(f"{where}: {name} is {value!r:.80}; it must be {words[kind]}")


def _parsed(kind: Any, text: str) -> Any:
    """What a variable's text says in this kind; itself where it says nothing, to be refused."""
    if get_origin(kind) is tuple:
        return [item.strip() for item in text.split(",") if item.strip()]
    if kind is bool:
        word = text.strip().lower()
        return word in TRUE if word in (*TRUE, *FALSE) else text
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text
