"""The front of a server whose models run in replicas: it has the guard and forwards requests.

A request that passed the guard travels whole (`ForwardedRequest`) to a replica, which runs the
application over its models and returns the whole response (`ForwardedResponse`). So tokenization
scales with the replicas, no route has to be written twice, and this process needs no model. The
price is that a response is in memory twice on its way.

No request changes anything, so a request whose replica died is sent again. Not forever: a request
under which replicas keep dying may be what kills them, and must not reach them all. While no
replica can be reached, a request waits for up to `timeout` seconds. How many requests wait is
limited by the guard; those beyond get 429.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI

from packhorse.errors import PackhorseError, RunnerStopped
from packhorse.runtime.shares import Share
from packhorse.serve.app import create_base
from packhorse.serve.failures import ClientGone
from packhorse.serve.guard import Receive, Scope, Send
from packhorse.serve.hosting import ServedModel, ServedModels
from packhorse.serve.logs import LOGGER
from packhorse.serve.metrics import Metrics, RequestRecord, RunnerFigures
from packhorse.serve.settings import ServeSettings
from packhorse.serve.tracing import CURRENT, read_ids, replace_ids

MAX_DEATHS = 3  # of replicas under one request
RETRY_SECONDS = 0.05  # before a replica that could not be reached is tried again
TIMEOUT = 120.0  # seconds for an answer, including all attempts
# Always sent to the same replica: the page draws one engine over time, and numbers of several
# engines in turn would make no picture.
FIRST_REPLICA_PATHS = ("/engine",)
# Fields of `RequestRecord` that a replica fills in and this process reports.
RECORD_FIELDS = (
    "inputs",
    "tokens",
    "pack",
    "fingerprint",
    "ignored",
    "truncated",
    "offered",
    "task",
    "tokenize_seconds",
    "queue_seconds",
    "compute_seconds",
    "error",
)
# Not forwarded: this process has checked the key, and replicas have no use for it.
SECRET_HEADERS = (b"authorization", b"proxy-authorization", b"cookie")


class ReplicaDied(PackhorseError):
    """The replica ended while it was answering a request."""


class ReplicaAway(PackhorseError):
    """No replica, or not the chosen one, can be reached at the moment."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request on its way to a replica, without the key it came with."""

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    share: Share | None = None
    timeout: float = math.inf  # seconds; clocks of machines differ


@dataclass(frozen=True, slots=True)
class ForwardedResponse:
    """The response of a replica, and what its `RequestRecord` says about the request."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    route: str | None = None
    model: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)  # keys are RECORD_FIELDS


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What this process has to know about a replica's model; takes the place of its encoder."""

    name: str
    source: str
    heads: tuple[str, ...]
    labels: tuple[str, ...]
    device: str
    opened: float


# Sends a request to a replica; raises ReplicaDied and ReplicaAway.
Forward = Callable[[ForwardedRequest], Awaitable[ForwardedResponse]]


@dataclass
class ReplicaPool:
    """The replicas as this process sees them: two ways to send requests, and the newest figures."""

    to_any: Forward
    to_first: Forward  # always to the same replica, as long as it lives
    timeout: float = TIMEOUT
    figures: Sequence[RunnerFigures] = ()  # the newest, of all replicas
    last_answer: float = -math.inf  # `time.monotonic` when a model last ran
    last_warning: float = -math.inf  # `time.monotonic` when a lost replica was last logged

    async def send(self, request: ForwardedRequest) -> ForwardedResponse:
        """Return the response of a replica; if that one dies, of another."""
        try:
            async with asyncio.timeout(self.timeout):
                response = await self._send(request)
        except TimeoutError as error:
            raise RunnerStopped(f"no replica answered within {self.timeout:g} s") from error
        if response.record.get("pack"):  # an engine ran it
            self.last_answer = time.monotonic()
        return response

    async def _send(self, request: ForwardedRequest) -> ForwardedResponse:
        forward = self.to_first if request.path in FIRST_REPLICA_PATHS else self.to_any
        deaths = 0
        while deaths < MAX_DEATHS:
            try:
                return await forward(request)
            except ReplicaDied:
                deaths += 1
                self._warn()
            except ReplicaAway:
                self._warn()
                await asyncio.sleep(RETRY_SECONDS)
        raise RunnerStopped(f"{MAX_DEATHS} replicas died, one after the other, at this request")

    def _warn(self) -> None:
        """Log the loss of a replica once, not once per request that it was answering."""
        now = time.monotonic()
        if now - self.last_warning > 1:
            LOGGER.warning("a replica was lost; its requests are sent to another")
        self.last_warning = now


class RemoteRunner:
    """Takes the place of a runner for health checks and metrics; models run in the replicas."""

    alive = True  # a replica that dies is replaced, so this never ends for good

    def __init__(self, name: str, pool: ReplicaPool) -> None:
        self.name = name
        self.pool = pool

    def _figures(self) -> Iterable[RunnerFigures]:
        return (figures for figures in self.pool.figures if figures.labels["model"] == self.name)

    @property
    def waiting_tokens(self) -> int:
        """Tokens in the queues of all replicas."""
        return sum(figures.stats.waiting_tokens for figures in self._figures())

    def rate(self) -> float:
        """Return the tokens per second of all replicas."""
        return sum(figures.rate for figures in self._figures())

    def seconds_until_run(self) -> float:
        """Return in how many seconds what waits in all replicas will have run; 0: unknown."""
        rate = self.rate()
        return self.waiting_tokens / rate if rate else 0.0

    def idle_seconds(self) -> float:
        """Return the seconds since any model of any replica ran."""
        return time.monotonic() - self.pool.last_answer

    def submit(self, *_: Any) -> Future[None]:
        """Let a replica run the probe of /ready."""
        return asyncio.run_coroutine_threadsafe(self._probe(), asyncio.get_running_loop())

    async def _probe(self) -> None:
        if (await self.pool.send(ForwardedRequest("GET", "/ready"))).status != 200:
            raise RunnerStopped(f"a replica could not run {self.name}")

    def close(self, drain: bool = True) -> None:
        """Do nothing: the replicas end with the pool."""


def remote_models(cards: Iterable[ModelCard], pool: ReplicaPool) -> ServedModels:
    """Return the models of the replicas, as far as their names, tasks and state are needed here."""
    return ServedModels(
        [
            ServedModel(
                card.name,
                card.source,
                encoder=cast(Any, card),
                runner=cast(Any, RemoteRunner(card.name, pool)),
                dispatcher=cast(Any, None),  # requests are forwarded whole
                fingerprint_parts=cast(Any, None),
                opened=card.opened,
            )
            for card in cards
        ]
    )


def create(settings: ServeSettings, models: ServedModels, pool: ReplicaPool) -> FastAPI:
    """Return an application with its own health and metrics that forwards all other requests."""
    metrics = Metrics(models, lambda: pool.figures)
    app = create_base(settings, models, metrics, openapi_url=None)
    app.mount("/", ForwardingApp(pool, models))
    return app


class ForwardingApp:
    """An ASGI application that forwards every request to a replica."""

    def __init__(self, pool: ReplicaPool, models: ServedModels) -> None:
        self.pool = pool
        self.models = {model.name: model for model in models}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request; it is cancelled if its client disconnects."""
        request = await _read_request(scope, receive)
        answer = asyncio.ensure_future(self.pool.send(request))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((answer, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientGone("the client left before its answer was ready")
            response = await answer
        finally:
            answer.cancel()
            disconnect.cancel()
        self._update_record(scope, response)
        headers = list(response.headers)
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    def _update_record(self, scope: Scope, response: ForwardedResponse) -> None:
        """Let the guard report the request as if it had been answered here."""
        record: RequestRecord = scope["packhorse"]
        for name, value in response.record.items():
            setattr(record, name, value)
        record.model = self.models.get(response.model or "")
        if response.route is not None:
            scope["route"] = SimpleNamespace(path=response.route)


async def _read_request(scope: Scope, receive: Receive) -> ForwardedRequest:
    # The guard has received the whole body and delivers it in one message.
    body = (await receive()).get("body", b"")
    record: RequestRecord = scope["packhorse"]
    headers = [(name, value) for name, value in scope["headers"] if name not in SECRET_HEADERS]
    return ForwardedRequest(
        scope["method"],
        scope["path"],
        scope["query_string"],
        replace_ids(headers, record.ids),  # the replica's work is a child of this span
        body,
        record.share,
        record.deadline - time.monotonic(),
    )


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_forwarded(app: Any, request: ForwardedRequest) -> ForwardedResponse:
    """Run the application for a forwarded request, in the process that has the models."""
    record = RequestRecord(
        ids=read_ids(request.headers),
        share=request.share,
        deadline=time.monotonic() + request.timeout,
    )
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "headers": list(request.headers),
        "client": None,
        "server": None,
        "packhorse": record,
    }
    incoming = [{"type": "http.request", "body": request.body, "more_body": False}]
    messages: list[Any] = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        # Never completes: if the client disconnects, the front process cancels this whole call.
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        messages.append(message)

    current = CURRENT.set(record.ids)  # for the log
    try:
        await app(scope, receive, send)
    except Exception:
        if not messages:
            raise
        LOGGER.error("a request failed in the server", exc_info=True)
    finally:
        CURRENT.reset(current)
    start, *parts = messages
    return ForwardedResponse(
        start["status"],
        tuple(start["headers"]),
        b"".join(part.get("body", b"") for part in parts),
        getattr(scope.get("route"), "path", None),
        record.model.name if record.model else None,
        {name: getattr(record, name) for name in RECORD_FIELDS},
    )


def model_card(model: ServedModel) -> ModelCard:
    """Describe a model that is open in this process."""
    encoder = model.encoder
    return ModelCard(
        model.name,
        model.source,
        tuple(encoder.heads),
        tuple(encoder.labels),
        str(encoder.device),
        model.opened,
    )
