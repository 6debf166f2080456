"""A second port for operators: /health (also as /ping), /ready and /metrics, without the API key.

    async with metrics_port(app, settings, models, metrics, bound) as guard: ...

Probes and Prometheus have no key, and should not need one that also answers requests. The
application behind this port (`app.create_base`) has no other routes: nothing that reaches it can
run a model on texts, except the one token of /ready. It has a guard of its own, so that the Host
header is checked as on a server without keys (DNS rebinding), and connections, headers and times
are bounded as on the main port. A body is refused. It speaks HTTP without TLS, as probes do.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import uvicorn

from packhorse.serve.connections import protocol, sweep
from packhorse.serve.guard import Guard
from packhorse.serve.hosting import ServedModels
from packhorse.serve.metrics import Metrics
from packhorse.serve.settings import ServeSettings
from packhorse.serve.starting import port_settings

STARTED_SECONDS = 0.01  # between looks whether the port listens


@asynccontextmanager
async def metrics_port(
    app: Any,
    settings: ServeSettings,
    models: ServedModels,
    metrics: Metrics,
    bound: socket.socket,
) -> AsyncIterator[Guard]:
    """Serve `app`, made by `app.create_base`, on a bound socket while the block runs."""
    limits = port_settings(settings)
    guard = Guard(app, limits, models, metrics)
    server = _SideServer(
        uvicorn.Config(
            guard,
            http=protocol(limits),
            ws="none",
            lifespan="off",  # the main port's server ends the models
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=limits.max_connections,
            timeout_keep_alive=max(1, round(limits.idle_seconds)),
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    sweeping = asyncio.ensure_future(sweep(server.server_state.connections))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(STARTED_SECONDS)
        yield guard
    finally:
        sweeping.cancel()
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await serving


class _SideServer(uvicorn.Server):
    """A uvicorn server beside another in one event loop, which leaves signals to that one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
