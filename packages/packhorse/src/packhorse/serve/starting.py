"""What a server does before and after its models load: check files, bind ports, say that it serves.

The supervisor of several processes needs this and no more, so nothing here imports torch or the web
framework: together they take seconds, for which the processes that need them would start later.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packhorse.errors import InputError, MissingExtra, PackhorseError
from packhorse.runtime.precision import load_ranges
from packhorse.serve import logs, unix_socket
from packhorse.serve.settings import ServeSettings

if TYPE_CHECKING:
    from packhorse.serve.telemetry import Telemetry

SIGNALS = (signal.SIGTERM, signal.SIGINT)
OTLP_PROTOCOL = "http/protobuf"
EXIT_CUT_SHORT = 1
EXIT_SECOND_SIGNAL = 143  # 128 + SIGTERM, as a shell reports it
# Of --metrics-port: probes and a few Prometheus servers; each gets an answer within seconds.
MAX_SIDE_CONNECTIONS = 64


class StartedModel(NamedTuple):
    """What is reported of a model when requests are answered."""

    name: str
    tasks: Sequence[str]
    device: str


# Host, port (empty and 0 for a Unix socket) and models.
Ready = Callable[[str, int, Sequence[StartedModel]], None]


class EngineDied(PackhorseError):
    """An engine ended by itself; the process has to be restarted."""

    exit_code = 70


class CutShort(PackhorseError):
    """Requests were still being answered when the time to drain was over."""

    exit_code = EXIT_CUT_SHORT


def check_files(settings: ServeSettings) -> None:
    """Raise `InputError` for a file of the settings that cannot be read, before models load."""
    if settings.token_ids:
        from packhorse.serve.dialects import token_ids

        token_ids.load_table(settings.token_ids)
    if settings.tls_cert:
        from packhorse.serve import tls

        tls.Certificate.of(settings)
    for entry in settings.calibration:
        load_ranges(Path(entry.rpartition("=")[2]))


def bind(settings: ServeSettings, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet; raises `InputError`."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, port))
    except OSError as error:
        bound.close()
        address = f"{settings.host}:{port}"
        raise InputError(f"cannot listen on {address}: {error.strerror or error}") from error
    return bound


def bind_ports(settings: ServeSettings) -> tuple[socket.socket, socket.socket | None]:
    """Return the sockets of --port and --metrics-port, the latter None if there is none.

    With --unix-socket the first is that, and there is no --port.
    """
    if settings.unix_socket:
        mode = int(settings.unix_socket_mode, 8)
        bound = unix_socket.bind(Path(settings.unix_socket), mode)
    else:
        bound = bind(settings, settings.port)
    if not settings.metrics_port:
        return bound, None
    try:
        side_bound = bind(port_settings(settings), settings.metrics_port)
    except InputError:
        bound.close()
        raise
    host, port, *_ = side_bound.getsockname()
    logs.LOGGER.info("health and metrics, without a key, on port %d of %s", port, host)
    return bound, side_bound


def report_ready(
    ready: Ready, settings: ServeSettings, bound: socket.socket, models: Sequence[StartedModel]
) -> None:
    """Log where the server listens and what it serves, and call `ready`."""
    for model in models:
        tasks = ", ".join(model.tasks)
        logs.LOGGER.info("%s on %s supports: %s", model.name, model.device, tasks)
    if settings.unix_socket:
        path = settings.unix_socket
        logs.LOGGER.info("serving on unix:%s", path, extra={"facts": {"unix_socket": path}})
        return ready("", 0, models)
    host, port, *_ = bound.getsockname()
    scheme = "https" if settings.tls_cert else "http"
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    facts = {"host": host, "port": port}
    logs.LOGGER.info("serving on %s://%s", scheme, address, extra={"facts": facts})
    ready(host, port, models)


def port_settings(settings: ServeSettings) -> ServeSettings:
    """Return the settings of --metrics-port: the server's, without keys and with smaller limits."""
    return replace(
        settings,
        host=settings.metrics_host or settings.host,
        port=settings.metrics_port,
        metrics_host="",
        metrics_port=0,
        grpc_port=0,
        unix_socket="",
        tls_cert="",
        tls_key="",
        keys=(),
        admin_key="",
        cors_origin=(),
        max_connections=min(MAX_SIDE_CONNECTIONS, settings.max_connections),
        max_concurrent_requests=MAX_SIDE_CONNECTIONS,
        max_body_bytes=1,
    )


@contextmanager
def open_telemetry(settings: ServeSettings) -> Iterator[Telemetry | None]:
    """Send traces and metrics during the block; the value is None if nobody wants them.

    The variables of OpenTelemetry may be set for all programs of a machine or a cluster, so they
    alone never keep the server from starting.
    """
    variables = [f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT" for kind in ("", "TRACES_", "METRICS_")]
    is_wanted = bool(settings.otlp_endpoint) or any(map(os.environ.get, variables))
    if not is_wanted or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield None
        return
    try:
        telemetry = _start_telemetry(settings)
    except (InputError, MissingExtra) as problem:
        if settings.otlp_endpoint:
            raise
        logs.LOGGER.warning("traces and metrics are not sent: %s", problem)
        yield None
        return
    try:
        yield telemetry
    finally:
        telemetry.close()


def _start_telemetry(settings: ServeSettings) -> Telemetry:
    sender = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or OTLP_PROTOCOL
    if sender != OTLP_PROTOCOL:
        raise InputError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {sender}, and this server sends {OTLP_PROTOCOL}; set "
            "it to that, and the endpoint to the port that the collector has for it, usually 4318"
        )
    try:
        from packhorse.serve.telemetry import Telemetry
    except ImportError as error:
        raise MissingExtra("opentelemetry-exporter-otlp-proto-common", "otel") from error
    return Telemetry(settings)
