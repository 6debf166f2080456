"""The settings of the server: one flat, frozen dataclass, checked on construction.

    resolve(Path("serve.toml"), os.environ, {"port": 0})

A setting has the same name everywhere: `max_body_bytes` in TOML, `PACKHORSE_SERVE_MAX_BODY_BYTES`
in the environment, `--max-body-bytes` on the command line; flags override the environment, which
overrides the file (`packhorse.settings`). API keys are the exception: they come from
PACKHORSE_API_KEY or from a file, never from a command line, which every user of the machine can
read. Every default is a bound: nothing that a client sends or leaves undone is unlimited.
docs/limits.md describes what happens beyond each.

This module imports no torch and no web framework.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from packhorse import settings
from packhorse.errors import InputError
from packhorse.serve.keys import api_keys, find_key, parse_keys
from packhorse.settings import setting

PREFIX = "PACKHORSE_SERVE_"
KEY_VARIABLE = "PACKHORSE_API_KEY"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

# Groups of settings, as help and printed TOML show them.
MODELS = "Models"
REQUESTS = "Requests"
NETWORK = "Network"
LIMITS = "Limits"
TIMES = "Times"
LOGS = "Logs"
CLUSTER = "Cluster"


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything that decides how the server runs."""

    model: tuple[str, ...] = setting(
        (DEFAULT_MODEL,),
        MODELS,
        "A folder, file or hub id, or NAME=MODEL; may be repeated.",
        flags=("-m",),
    )
    device: str = setting(
        "", MODELS, "cpu, cuda, cuda:1; default PACKHORSE_DEVICE, else the accelerator."
    )
    dtype: Literal["fp32", "bf16", "fp16", "int8", "float8", "auto"] | None = setting(
        None, MODELS, "Number format; default fp32 on a CPU, bf16 on CUDA."
    )
    kernel: str = setting("", MODELS, "Attention kernel; default the fastest here.")
    graphs: bool | None = setting(
        None,
        MODELS,
        "Compile for every size of batch, on CUDA replay as graphs; default on CUDA: replay small "
        "batches, compile nothing.",
        negative="--no-graphs",
    )
    invariant: bool = setting(False, MODELS, "The same bits for an input in every batch.")
    gelu: Literal["erf", "tanh"] | None = setting(
        None, MODELS, "Form of GELU of a TensorFlow model whose files do not show it."
    )
    ignore: tuple[str, ...] = setting(
        (), MODELS, "Ignore tensors of the file that match this pattern; may be repeated."
    )
    adapter: tuple[str, ...] = setting(
        (),
        MODELS,
        "A LoRA adapter as a model of its own: NAME=FOLDER for the first model, or "
        "MODEL:NAME=FOLDER; requests ask for MODEL:NAME; may be repeated.",
    )
    calibration: tuple[str, ...] = setting(
        (),
        MODELS,
        "Ranges for int8 and uint8 vectors: FILE.npy, or NAME=FILE.npy for one of several models; "
        "may be repeated.",
    )
    truncate_dim: int = setting(
        0,
        MODELS,
        "Keep this many numbers of each vector; 0: those that the model's folder names, else all.",
    )
    devices: tuple[str, ...] = setting(
        (),
        MODELS,
        "Devices with an engine process each, such as cuda:0,cuda:1; may be repeated.",
    )
    fronts: int | None = setting(
        None,
        MODELS,
        "Processes that speak HTTP, apart from the engines; 0: one process does everything; "
        "default: by device and cores.",
    )
    threads: int = setting(0, MODELS, "CPU threads for computing; 0: one per core.")
    gpu_memory: float = setting(
        0.0, MODELS, "GiB of a GPU's memory that models and batches may take; 0: all of it."
    )
    batch_tokens: int = setting(0, MODELS, "Tokens per batch; 0: chosen by device.")
    batch_wait_ms: float = setting(
        2.0, MODELS, "Milliseconds that a request may wait for others to join its batch."
    )

    strict_fields: bool = setting(False, REQUESTS, "Refuse fields that a route does not know.")
    auto_truncate: bool | None = setting(
        None,
        REQUESTS,
        "Truncate texts longer than the model takes, or refuse them, on all routes; "
        "default: as each route's own server does.",
        negative="--no-truncate",
    )
    token_ids: str = setting(
        "", REQUESTS, "cl100k or cl100k=FILE: decode token ids that are not the model's own."
    )

    host: str = setting("127.0.0.1", NETWORK, "Address to listen on.")
    port: int = setting(8080, NETWORK, "Port to listen on; 0: any that is free.", maximum=65535)
    grpc_port: int = setting(
        0, NETWORK, "Port for gRPC as text-embeddings-inference has it; 0: none.", maximum=65535
    )
    unix_socket: str = setting(
        "", NETWORK, "Path of a Unix socket to listen on, in place of --host and --port."
    )
    unix_socket_mode: str = setting(
        "600", NETWORK, "Mode of the socket's file: who may connect, as for chmod."
    )
    tls_cert: str = setting(
        "", NETWORK, "Certificate in PEM, with those between it and its root: serve HTTPS."
    )
    tls_key: str = setting("", NETWORK, "Its private key in PEM, which only you may read.")
    insecure: bool = setting(False, NETWORK, "Serve the network without an API key.")
    api_key_file: str = setting(
        "", NETWORK, "File of API keys, a KEY or NAME: KEY per line; SIGHUP has it read again."
    )
    admin_key_file: str = setting(
        "",
        NETWORK,
        "File of the key for /admin, whose routes change the served models; without it there are "
        "none.",
    )
    cors_origin: tuple[str, ...] = setting(
        (), NETWORK, "An origin whose pages may call this server; may be repeated."
    )
    allow_host: tuple[str, ...] = setting(
        (),
        NETWORK,
        "A host name of this server, for requests without an API key; may be repeated.",
    )
    metrics_port: int = setting(
        0,
        NETWORK,
        "A second port with /health, /ready and /metrics only, without the API key; 0: none.",
        maximum=65535,
    )
    metrics_host: str = setting(
        "", NETWORK, "Address that --metrics-port listens on; default: that of --host."
    )

    max_concurrent_requests: int = setting(512, LIMITS, "Requests processed at once.", minimum=1)
    max_connections: int = setting(2048, LIMITS, "Open connections.", minimum=1)
    max_header_bytes: int = setting(
        16_384, LIMITS, "Bytes of a request's headers and trailers.", minimum=1024
    )
    max_headers: int = setting(100, LIMITS, "Headers and trailers of a request.", minimum=1)
    max_batch_inputs: int = setting(
        2048, LIMITS, "Inputs (texts, documents) in one request.", minimum=1
    )
    max_request_tokens: int = setting(
        0, LIMITS, "Tokens in one request, after truncation; 0: 2,048 texts of 512 tokens."
    )
    max_body_bytes: int = setting(8_000_000, LIMITS, "Bytes in the body of a request.", minimum=1)
    max_body_values: int = setting(
        65_536, LIMITS, "JSON values (texts, token ids …) in the body of a request.", minimum=16
    )
    max_buffered_bytes: int = setting(
        256 << 20, LIMITS, "Bytes of all bodies held at once.", minimum=1
    )
    max_input_characters: int = setting(200_000, LIMITS, "Characters in one input.", minimum=1)
    max_input_tokens: int = setting(0, LIMITS, "Tokens per input; 0: what the model takes.")
    max_queue_tokens: int = setting(0, LIMITS, "Tokens that may wait; 0: 16 batches.")
    max_queue_inputs: int = setting(4096, LIMITS, "Inputs that may wait.", minimum=1)

    receive_seconds: float = setting(
        10.0, TIMES, "Time to receive the headers, and again the body.", minimum=0.01
    )
    send_seconds: float = setting(
        30.0, TIMES, "Time that a client may leave an answer unread.", minimum=0.01
    )
    idle_seconds: float = setting(
        30.0, TIMES, "Time that a connection may be idle between requests.", minimum=0.01
    )
    drain_seconds: float = setting(30.0, TIMES, "Time after SIGTERM for requests in flight.")
    request_timeout: float = setting(
        0.0, TIMES, "Seconds in which a request must be answered; 0: as the client says."
    )
    ready_seconds: float = setting(
        10.0, TIMES, "Age of a batch up to which /ready answers without running one."
    )

    log_format: Literal["plain", "json"] = setting(
        "plain", LOGS, "Lines for people, or JSON lines."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", LOGS, "The lowest level that is logged."
    )
    log_requests: bool = setting(False, LOGS, "A line for every request; never its texts.")

    otlp_endpoint: str = setting(
        "",
        LOGS,
        "Where traces and metrics are sent over OTLP/HTTP, such as http://localhost:4318; "
        "default OTEL_EXPORTER_OTLP_ENDPOINT, else nowhere.",
    )

    engine: Literal["local", "ray"] = setting(
        "local", CLUSTER, "Where models run: in this process, or in replicas on a Ray cluster."
    )
    replicas: int = setting(1, CLUSTER, "Replicas at the start, and at least.", minimum=1)
    max_replicas: int = setting(0, CLUSTER, "Replicas under load; 0: never more.")
    ray_address: str = setting("", CLUSTER, "A running Ray cluster; default one on this machine.")

    # Neither a flag nor in a file of settings: see `api_keys`.
    keys: tuple[str, ...] = field(default=(), repr=False)
    file_keys: int = 0  # so many of the keys, the first, are from the file
    admin_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        settings.check_bounds(self)
        self._check_network()
        names = tuple(name for entry in self.devices for name in entry.split(","))
        if "" in names:
            raise InputError(f"--devices {','.join(names)} has an empty name; write cuda:0,cuda:1")
        object.__setattr__(self, "devices", names)  # as `packhorse run --devices` takes them
        if not self.model:
            raise InputError("there is no model to serve; name one with --model")
        if self.engine != "ray" and (self.replicas > 1 or self.max_replicas or self.ray_address):
            raise InputError("--replicas, --max-replicas and --ray-address need --engine ray")
        if self.engine == "ray" and (self.fronts or self.devices):
            raise InputError("--fronts and --devices are for --engine local; Ray has --replicas")
        if self.engine == "ray" and self.grpc_port:
            raise InputError("--grpc-port is for --engine local; replicas on Ray answer HTTP alone")
        if self.grpc_port and self.grpc_port == self.port:
            raise InputError(f"--port and --grpc-port are both {self.port}; use two ports")
        if len(self.devices) > 1 and self.fronts == 0:
            raise InputError("several --devices need --fronts, or leave it out")
        if self.fronts and not hasattr(os, "memfd_create"):
            raise InputError("--fronts needs Linux: its processes share memory by memfd")
        if self.device and self.devices:
            raise InputError("--device and --devices both name devices; use one of them")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise InputError(
                f"max_replicas is {self.max_replicas}; it must be at least replicas "
                f"({self.replicas}), or 0"
            )

    def _check_network(self) -> None:
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise InputError(f"--otlp-endpoint is {self.otlp_endpoint}; it begins with http://")
        if self.admin_key_file and self.engine == "ray":
            raise InputError("--admin-key-file is for --engine local; Ray redeploys its replicas")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InputError("--tls-cert and --tls-key belong together; pass both")
        if self.unix_socket and self.tls_cert:
            raise InputError(
                "--unix-socket needs no TLS: what it carries does not leave this machine"
            )
        if not re.fullmatch("[0-7]{3}", self.unix_socket_mode):
            raise InputError(
                f"--unix-socket-mode is {self.unix_socket_mode}; use digits, as in 660"
            )
        if self.metrics_port and self.metrics_port in (self.port, self.grpc_port):
            raise InputError("--metrics-port must differ from --port and --grpc-port")
        if self.metrics_host and not self.metrics_port:
            raise InputError("--metrics-host needs --metrics-port")

    @property
    def is_local(self) -> bool:
        """Can nobody but this machine reach it?"""
        if self.unix_socket and not self.grpc_port:
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ServeSettings:
        """Return settings from their fields as JSON has them, with lists for tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**fields)

    def toml(self) -> str:
        """All settings but the API keys, as a file that `resolve` reads."""
        return settings.to_toml(self)


def resolve(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> ServeSettings:
    """The server's settings with its API keys; flags override the environment, that the file."""
    environment = environment or {}
    values = settings.from_toml(file) if file is not None else []
    values += settings.from_environment(environment, PREFIX)
    values += settings.from_flags(flags or {})
    resolved = settings.resolve(ServeSettings, values).settings
    file_keys = api_keys(resolved.api_key_file, "")
    keys = tuple(dict.fromkeys((*file_keys, *api_keys("", environment.get(KEY_VARIABLE, "")))))
    admin_key = _admin_key(resolved.admin_key_file)
    if admin_key and find_key(parse_keys(keys), admin_key.encode()):
        raise InputError("the key of --admin-key-file is an API key too; make another one for it")
    resolved = replace(resolved, keys=keys, file_keys=len(file_keys), admin_key=admin_key)
    if not (resolved.is_local or resolved.keys or resolved.insecure):
        raise InputError(
            f"{resolved.host} can be reached by others and there is no API key; set {KEY_VARIABLE} "
            "or --api-key-file, or pass --insecure to serve everyone"
        )
    return resolved


def _admin_key(file: str) -> str:
    """The key in the file of --admin-key-file; empty without one."""
    if not file:
        return ""
    keys = api_keys(file, "")
    if len(keys) != 1 or " " in keys[0]:
        raise InputError(f"{file} is not one key in one line; /admin has one, without a name")
    return keys[0]
