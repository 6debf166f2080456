"""The door of a server whose models run elsewhere: the same guard and errors, requests passed on.

A request that the guard let in travels whole (`Question`) to a replica, which runs the application
over its models and gives the whole `Reply` back. So tokenizing scales with the replicas, every
route is there without being written twice, and the door knows no model. What it costs is that a
reply is held in memory twice on its way.

Every request only asks and changes nothing, so one whose replica died is asked again. Not for ever:
a request under which replicas keep dying may be what kills them, and must not go through them all.
While no replica can be reached a request waits, as long as `patience` says; how many wait is the
guard's limit, so those beyond get 429.
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
from packhorse.serve.app import shell
from packhorse.serve.failures import ClientGone
from packhorse.serve.guard import Receive, Scope, Send
from packhorse.serve.hosting import Hosted, Hosts
from packhorse.serve.logs import LOGGER
from packhorse.serve.metrics import Figures, Metrics, Seen
from packhorse.serve.settings import Settings

DEATHS = 3  # of replicas under one request
PAUSE = 0.05  # seconds before one that could not be reached is tried again
PATIENCE = 120.0  # seconds for an answer, whatever happens meanwhile
STEADY = ("/engine",)  # always of the same replica: what it draws goes on from call to call
# What a replica has seen of a request and the door tells: fields of Seen.
KEPT = ("inputs", "tokens", "pack", "ignored", "queue_seconds", "compute_seconds", "error")
SECRET = (b"authorization", b"proxy-authorization", b"cookie")


class ReplicaDied(PackhorseError):
    """The replica ended while it was at a request."""


class ReplicaAway(PackhorseError):
    """No replica could be reached, or this one not for now."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request as it travels; without the key it came with."""

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a replica answered, and what it has seen of the request."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    route: str | None = None
    model: str | None = None
    seen: Mapping[str, Any] = field(default_factory=dict)  # those of KEPT


@dataclass(frozen=True, slots=True)
class Card:
    """What the door has to know of a model. It stands where an encoder does."""

    name: str
    source: str
    heads: tuple[str, ...]
    labels: tuple[str, ...]
    device: str
    opened: float


Ask = Callable[[Question], Awaitable[Reply]]  # raises ReplicaDied, ReplicaAway


@dataclass
class Fleet:
    """The replicas, as the door sees them."""

    ask: Ask  # one of them
    ask_first: Ask  # always the same one, while it lives
    patience: float = PATIENCE
    figures: Sequence[Figures] = ()  # the newest that all replicas told
    answered: float = -math.inf  # when a model last ran, by `time.monotonic`
    warned: float = -math.inf  # when a loss was last logged

    async def send(self, question: Question) -> Reply:
        """The answer of a replica; if that dies, of another."""
        try:
            async with asyncio.timeout(self.patience):
                reply = await self._send(question)
        except TimeoutError as error:
            raise RunnerStopped(f"no replica answered within {self.patience:g} s") from error
        if reply.seen.get("pack"):  # it went through an engine
            self.answered = time.monotonic()
        return reply

    async def _send(self, question: Question) -> Reply:
        ask = self.ask_first if question.path in STEADY else self.ask
        deaths = 0
        while deaths < DEATHS:
            try:
                return await ask(question)
            except ReplicaDied:
                deaths += 1
                self._warn()
            except ReplicaAway:
                self._warn()
                await asyncio.sleep(PAUSE)
        raise RunnerStopped(f"{DEATHS} replicas died, one after the other, at this request")

    def _warn(self) -> None:
        """Once for a loss, not for all the requests that were there."""
        now = time.monotonic()
        if now - self.warned > 1:
            LOGGER.warning("a replica was lost; what it was at is asked of another")
        self.warned = now


class Far:
    """Stands where a runner does for those who ask how it does; what runs is in the replicas."""

    alive = True  # a replica that dies is replaced, so it never ends for good

    def __init__(self, name: str, fleet: Fleet) -> None:
        self.name, self.fleet = name, fleet

    def _mine(self) -> Iterable[Figures]:
        return (each for each in self.fleet.figures if each.labels["model"] == self.name)

    @property
    def waiting_tokens(self) -> int:
        """Of all replicas."""
        return sum(each.stats.waiting_tokens for each in self._mine())

    def rate(self) -> float:
        """Tokens a second, of all replicas."""
        return sum(each.rate for each in self._mine())

    def idle_seconds(self) -> float:
        """Since a model of the fleet answered."""
        return time.monotonic() - self.fleet.answered

    def submit(self, *_: Any) -> Future[None]:
        """The canary, sung by a replica."""
        return asyncio.run_coroutine_threadsafe(self._sing(), asyncio.get_running_loop())

    async def _sing(self) -> None:
        if (await self.fleet.send(Question("GET", "/ready"))).status != 200:
            raise RunnerStopped(f"a replica could not run {self.name}")

    def close(self, drain: bool = True) -> None:
        """The replicas end when the fleet is given up."""


def hosts(cards: Iterable[Card], fleet: Fleet) -> Hosts:
    """The models of the fleet, for whoever wants their names, tasks and state."""
    return Hosts(
        [
            Hosted(
                card.name,
                card.source,
                encoder=cast(Any, card),
                runner=cast(Any, Far(card.name, fleet)),
                opened=card.opened,
            )
            for card in cards
        ]
    )


def create(settings: Settings, models: Hosts, fleet: Fleet) -> FastAPI:
    """The application at the door: its own health and figures, and the way to the replicas."""
    app = shell(settings, models, Metrics(models, lambda: fleet.figures), openapi_url=None)
    app.mount("/", Door(fleet, models))
    return app


class Door:
    """An ASGI application that passes everything on."""

    def __init__(self, fleet: Fleet, models: Hosts) -> None:
        self.fleet, self.models = fleet, {each.name: each for each in models}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request there and back; given up when its client leaves."""
        question = await _question(scope, receive)
        asked = asyncio.ensure_future(self.fleet.send(question))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((asked, left), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ClientGone("the client left before its answer was ready")
            reply = await asked
        finally:
            asked.cancel()
            left.cancel()
        self._note(scope, reply)
        headers = list(reply.headers)
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    def _note(self, scope: Scope, reply: Reply) -> None:
        """The guard records the request as if it had been answered here."""
        seen: Seen = scope["packhorse"]
        for name, value in reply.seen.items():
            setattr(seen, name, value)
        seen.host = self.models.get(reply.model or "")
        if reply.route is not None:
            scope["route"] = SimpleNamespace(path=reply.route)


async def _question(scope: Scope, receive: Receive) -> Question:
    """The guard has received the body whole, and hands it over in one piece."""
    body = (await receive()).get("body", b"")
    headers = tuple((name, value) for name, value in scope["headers"] if name not in SECRET)
    return Question(scope["method"], scope["path"], scope["query_string"], headers, body)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(app: Any, question: Question) -> Reply:
    """Run the application over a question, where the models are."""
    seen = Seen()
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "method": question.method,
        "path": question.path,
        "raw_path": question.path.encode(),
        "query_string": question.query,
        "headers": list(question.headers),
        "client": None,
        "server": None,
        "packhorse": seen,
    }
    said: list[Any] = []
    waiting = [{"type": "http.request", "body": question.body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        return await asyncio.get_running_loop().create_future()  # a client that leaves cancels it

    async def send(message: Any) -> None:
        said.append(message)

    try:
        await app(scope, receive, send)
    except Exception:
        if not said:
            raise
        LOGGER.error("a request failed in the server", exc_info=True)
    body = b"".join(message.get("body", b"") for message in said[1:])
    return Reply(
        said[0]["status"],
        tuple(said[0]["headers"]),
        body,
        getattr(scope.get("route"), "path", None),
        seen.host.name if seen.host else None,
        {name: getattr(seen, name) for name in KEPT},
    )


def card(host: Hosted) -> Card:
    """Of a model that is open here."""
    encoder = host.encoder
    return Card(
        host.name,
        host.source,
        tuple(encoder.heads),
        tuple(encoder.labels),
        str(encoder.device),
        host.opened,
    )
