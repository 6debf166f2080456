"""The life of the server process: bind, load, serve, drain, exit.

The port is bound before the models are loaded, so that a port in use is reported at once, but
listened on only afterwards: whoever can connect gets an answer. SIGTERM while loading ends the
process at once, since there is nothing to lose. Later it drains: /health and new requests get 503,
requests in flight are finished, and the process exits with 0. A second signal ends it without
waiting.

When an engine dies (the device is lost), everything is answered with 503 for a few seconds, so that
whoever watches the server sees it, and then the process exits with 70: only a new process gets a
new device context.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from packhorse.serve import hosting, logs, tls
from packhorse.serve.app import create, create_metrics_app, guarded
from packhorse.serve.connections import protocol, sweep
from packhorse.serve.guard import Guard
from packhorse.serve.hosting import ServedModels
from packhorse.serve.keys import KeyReloader
from packhorse.serve.metrics_port import metrics_port
from packhorse.serve.settings import ServeSettings
from packhorse.serve.starting import (
    EXIT_SECOND_SIGNAL,
    SIGNALS,
    CutShort,
    EngineDied,
    Ready,
    StartedModel,
    bind,
    bind_ports,
    check_files,
    open_telemetry,
    report_ready,
)

if TYPE_CHECKING:
    from packhorse.serve.rpc.server import RpcServer

POLL_SECONDS = 0.1
MAX_BACKLOG = 2048  # connections that the kernel holds until they are accepted
# How long a thread that tokenizes or writes JSON keeps the interpreter from the event loop, which
# asks for it several times per request. Python's own turn of 5 ms makes those requests wait 20 ms.
TURN_SECONDS = 1e-3
DEAD_ENGINE_SECONDS = 3.0  # from the death of an engine to the exit of the process
EXTRA_FILES = 256  # open files besides connections: models, logs, what libraries open
OpenApp = Callable[[ServeSettings], AbstractContextManager[tuple[FastAPI, ServedModels]]]


@contextmanager
def local_app(settings: ServeSettings) -> Iterator[tuple[FastAPI, ServedModels]]:
    """Open the application with its models in this process; its lifespan closes them."""
    models = hosting.open_models(settings)
    yield create(settings, models), models


def run(settings: ServeSettings, ready: Ready, open_app: OpenApp = local_app) -> None:
    """Serve until a signal arrives; `ready` is called as soon as requests are answered."""
    logs.set_up(settings)
    sys.setswitchinterval(TURN_SECONDS)
    check_files(settings)
    raise_file_limit(settings)
    bound, side_bound = bind_ports(settings)
    grpc_bound = bind(settings, settings.grpc_port) if settings.grpc_port else None

    def leave(*_: Any) -> None:
        bound.close()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    reloader = KeyReloader(settings.api_key_file, settings.keys[settings.file_keys :])
    reloader.wait()
    with bound, open_app(settings) as (app, models), open_telemetry(settings) as telemetry:
        outer, guard = guarded(app)
        reloader.use = guard.use_keys
        if telemetry is not None:
            telemetry.observe(app.state.metrics.read_figures)
            guard.telemetry = telemetry
        gc.collect()
        gc.freeze()  # models and code live as long as the process; never scan them again
        started = [
            StartedModel(model.name, model.tasks, str(model.encoder.device)) for model in models
        ]
        report = partial(report_ready, ready, settings, bound, started)
        certificate = tls.Certificate.of(settings)
        config = configuration(outer, settings, certificate=certificate)
        if grpc_bound is not None:
            grpc_bound.close()  # gRPC binds by itself, and would listen from then on
        rpc = open_rpc(app, guard)
        side_port = None
        if side_bound is not None:
            side_app = create_metrics_app(app, guard)
            side_port = metrics_port(side_app, settings, models, app.state.metrics, side_bound)
        server = DrainingServer(
            config, guard, models, report, rpc=rpc, side_port=side_port, reloader=reloader
        )
        server.run(sockets=[bound])
    if server.engine_died:
        raise EngineDied("the engine died; see the log above, and restart the server")
    if server.unfinished:
        seconds = settings.drain_seconds
        raise CutShort(f"{server.unfinished} requests were not finished within {seconds:g} s")


def raise_file_limit(settings: ServeSettings) -> None:
    """Raise the limit on open files to what `max_connections` needs.

    Most systems start a process with a limit of about a thousand and let it ask for more. A
    connection beyond the limit would be neither accepted nor closed: it would wait in the backlog,
    and so would everyone behind it.
    """
    needed = settings.max_connections + EXTRA_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        message = "only %d files may be open, too few for --max-connections %d: see ulimit -n"
        logs.LOGGER.warning(message, soft, settings.max_connections)


def open_rpc(app: FastAPI, guard: Guard, share_port: bool = False) -> RpcServer | None:
    """Return the gRPC server beside this application; None without --grpc-port."""
    if not guard.settings.grpc_port:
        return None
    from packhorse.serve.rpc.server import RpcServer  # which needs the extra `grpc`

    return RpcServer(app, guard, share_port)


def configuration(
    app: Any,
    settings: ServeSettings,
    max_connections: int | None = None,
    certificate: tls.Certificate | None = None,
) -> uvicorn.Config:
    """Return uvicorn's configuration: our protocol and our limits, none of its own features.

    `max_connections` is that of all processes which listen on the same socket.
    """
    return uvicorn.Config(
        app,
        http=tls.protocol(settings, certificate) if certificate else protocol(settings),
        loop="asyncio" if certificate else "auto",  # uvloop reads too early, see `tls`
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=min(max_connections or settings.max_connections, MAX_BACKLOG),
        timeout_keep_alive=math.ceil(settings.idle_seconds),
        timeout_graceful_shutdown=1,  # uvicorn's own draining, after ours has ended
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that finishes requests in flight before it exits."""

    def __init__(
        self,
        config: uvicorn.Config,
        guard: Guard,
        models: ServedModels,
        report_ready: Callable[[], None],
        ends_with_engine: bool = True,
        rpc: RpcServer | None = None,
        side_port: AbstractAsyncContextManager[Guard] | None = None,
        reloader: KeyReloader | None = None,
    ) -> None:
        """Serve on the main port and, if there is one, on `side_port`.

        `ends_with_engine`: exit if an engine dies, because nobody would restart it.
        """
        super().__init__(config)
        self.rpc = rpc  # started, drained and stopped with this server
        self.side_port = side_port
        self.reloader = reloader
        self.ends_with_engine = ends_with_engine
        self.guard = guard
        self.models = models
        self.report_ready = report_ready
        self.engine_died = False
        self.unfinished = 0  # requests in flight when the time to drain was over
        self._tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `startup`; uvicorn would raise a signal again after its shutdown."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to exit; the second port answers until requests are drained."""
        if self.side_port is None:
            return await super().serve(sockets)
        async with self.side_port:
            await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, install signal handlers, start the background tasks, report readiness."""
        await super().startup(sockets)
        if self.rpc is not None:
            await self.rpc.start()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        if self.reloader is not None:
            self.reloader.listen(loop)
        self._tasks.append(loop.create_task(sweep(self.server_state.connections)))
        if self.ends_with_engine:
            self._tasks.append(loop.create_task(self._watch_engines()))
        self.report_ready()
        self.models.begin_preparing()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections; the application's lifespan then ends the engines."""
        for task in self._tasks:
            task.cancel()
        if self.rpc is not None:
            await self.rpc.stop()
        await super().shutdown(sockets)

    def _on_signal(self) -> None:
        if self.guard.draining:
            os._exit(EXIT_SECOND_SIGNAL)
        self.begin_draining()

    def begin_draining(self) -> None:
        """Refuse new requests, finish those in flight, and exit."""
        if self.guard.draining:
            return
        self.guard.draining = True
        if self.rpc is not None:
            self.rpc.begin_draining()
        logs.LOGGER.info("draining: %d requests in flight", self.guard.in_flight)
        self._tasks.append(asyncio.get_running_loop().create_task(self._drain()))

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.guard.settings.drain_seconds
        while self.guard.in_flight and loop.time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        self.unfinished = self.guard.in_flight
        self.should_exit = True

    async def _watch_engines(self) -> None:
        """Exit a few seconds after an engine has died, because it cannot be restarted."""
        while self.models.alive:
            await asyncio.sleep(POLL_SECONDS)
        logs.LOGGER.critical("an engine died; the server exits in %.0f s", DEAD_ENGINE_SECONDS)
        self.engine_died = True
        await asyncio.sleep(DEAD_ENGINE_SECONDS)
        self.should_exit = True
