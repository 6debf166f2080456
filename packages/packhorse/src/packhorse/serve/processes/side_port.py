"""--metrics-port of a server of several processes, which the supervisor serves.

A module of its own, because it needs the web framework and torch, and the supervisor starts the
other processes before it imports them.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, Protocol, cast

from packhorse.serve.app import create_base
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.metrics import Metrics, merged_page
from packhorse.serve.metrics_port import metrics_port
from packhorse.serve.settings import ServeSettings


class StartedProcess(Protocol):
    """A front as the supervisor knows it."""

    ready_since: float


class Processes(Protocol):
    """What is asked of the supervisor."""

    settings: ServeSettings
    models: list[dict[str, Any]]

    @property
    def fronts(self) -> Mapping[int, StartedProcess]:
        """The fronts, by number."""
        ...

    @property
    def engines(self) -> Mapping[int, Any]:
        """The engines that are ready, by number."""
        ...

    async def check_ready(self) -> None:
        """Raise `RunnerStopped` unless a front can reach engines that ran a batch lately."""
        ...

    async def collect(self, message: dict[str, Any]) -> list[Any]:
        """Return the figures of all processes."""
        ...


class MetricsPort:
    """The server's state on --metrics-port: what the supervisor knows, and what the others reply.

    It takes the place of the models' runners for /health and /ready, and has the metrics of all
    processes.
    """

    def __init__(self, supervisor: Processes) -> None:
        self.supervisor = supervisor
        self.models = ServedModels(self._described(supervisor.models))
        self.requests = Metrics(self.models, list)  # of the requests to this port
        self.app = create_base(supervisor.settings, self.models, self.requests, openapi_url=None)
        self.app.state.others = self

    async def open(self, stack: AsyncExitStack, bound: socket.socket) -> None:
        """Listen until the stack is closed."""
        self.app.state.guard = await stack.enter_async_context(
            metrics_port(self.app, self.supervisor.settings, self.models, self.requests, bound)
        )

    def show(self, models: Sequence[Mapping[str, Any]]) -> None:
        """Report these models from now on."""
        self.models.serve(self._described(models))

    def begin_draining(self) -> None:
        """Report from now on that the server is shutting down."""
        if (guard := getattr(self.app.state, "guard", None)) is not None:  # else it never listened
            guard.draining = True

    @property
    def alive(self) -> bool:
        """Whether requests can be answered: by a front and an engine that have started."""
        fronts = self.supervisor.fronts.values()
        return bool(self.supervisor.engines) and any(front.ready_since for front in fronts)

    def idle_seconds(self) -> float:
        """Return infinity: fronts know when a model last ran, and are asked each time."""
        return math.inf

    def submit(self, *_: Any) -> Future[None]:
        """Let a front run the probe of /ready."""
        loop = asyncio.get_running_loop()
        return asyncio.run_coroutine_threadsafe(self.supervisor.check_ready(), loop)

    def seconds_until_run(self) -> float:
        """Return 0: no request waits for a model here."""
        return 0.0

    def close(self, drain: bool = True) -> None:
        """Do nothing: engines end when the supervisor says so."""

    async def engines(self, batches: int) -> list[dict[str, Any]]:
        """Return what the page shows of every engine; this port has no page."""
        message = {"what": "engines", "batches": batches}
        return [engine for part in await self.supervisor.collect(message) for engine in part]

    async def metrics(self) -> bytes:
        """Return the metrics of all processes."""
        return merged_page(await self.supervisor.collect({"what": "metrics"}))

    def _described(self, models: Sequence[Mapping[str, Any]]) -> list[ServedModel]:
        """Return models by name and tasks, which is all that is reported about them."""
        return [
            ServedModel(
                model["name"],
                model["source"],
                encoder=cast(Any, SimpleNamespace(**model)),
                runner=cast(Any, self),
                dispatcher=cast(Any, None),
                fingerprint_parts=cast(Any, None),
            )
            for model in models
        ]
