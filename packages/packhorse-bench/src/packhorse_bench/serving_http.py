"""A small HTTP/1.1 client for load: kept-alive connections, one request on each at a time.

A load generator shares the machine with the server it measures, so what it spends on a request is
taken from the figure. Libraries for HTTP spend about as much as a good server does; this one
writes bytes that were made beforehand and of the answer (RFC 9112) reads the status and the length,
nothing else. Answers must say their Content-Length, as every answer of one JSON document does.

Nothing that was asked is lost or left out: a request that finds no free connection waits for one
with its clock running, and one without an answer after `patience` seconds has failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

TIMEOUT = "timeout"
LOST = "connection lost"
NOT_HTTP = "answer not understood"
SWEEP_SECONDS = 0.02


@dataclass(slots=True)
class PostRequest:
    """One request; its clock runs from `due`."""

    place: int
    due: float  # of time.perf_counter
    message: bytes
    again: bool = False  # it was sent before, on a connection that was closed meanwhile


Record = Callable[
    [PostRequest, str], None
]  # the status as text ("200", "429") or one of the words above


def request(path: str, body: bytes, host: str) -> bytes:
    """A POST of JSON, ready to be written."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


def parse_head(head: bytes) -> tuple[str, int, bool]:
    """Status, length of the body, and does the server close the connection after it?"""
    first, *lines = head.split(b"\r\n")
    version, status, *_ = [*first.split(b" ", 2), b""]
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise ValueError("no status line")
    fields = {name.strip().lower(): value.strip() for name, _, value in map(_parted, lines)}
    closes = fields.get(b"connection", b"").lower() == b"close"
    return status.decode("ascii"), int(fields[b"content-length"]), closes


def _parted(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")


class ClientConnection(asyncio.Protocol):
    """One connection of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport
        self.ask: PostRequest | None = None
        self._head = b""  # of the answer: what came, the bytes to come of its body
        self._left = -1
        self._status = ""
        self._closes = False

    @property
    def begun(self) -> bool:
        """Did any of the answer come?"""
        return self._left >= 0 or bool(self._head)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be used."""
        self.transport = cast("asyncio.Transport", transport)
        self.pool.made(self)

    def send(self, ask: PostRequest) -> None:
        """Write the request; the pool is told of its end."""
        self.ask = ask
        self._head = b""
        self._left = -1
        self.transport.write(ask.message)

    def data_received(self, data: bytes) -> None:
        """A part of the answer."""
        if self.ask is None:  # nobody asked
            return self.transport.abort()
        if self._left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            try:
                self._status, self._left, self._closes = parse_head(self._head[:end])
            except (ValueError, KeyError):
                return self.pool.ended(self, NOT_HTTP, close=True)
            data = self._head[end + 4 :]
        self._left = max(0, self._left - len(data))
        if self._left == 0:
            self.pool.ended(self, self._status, self._closes)

    def connection_lost(self, exc: Exception | None) -> None:
        """By the server, or by us."""
        self.pool.lost(self)


class Pool:
    """At most `most` connections to one port; requests beyond these wait for a free one."""

    def __init__(self, port: int, most: int, patience: float, record: Record) -> None:
        self.port = port
        self.most = most
        self.patience = patience
        self.record = record
        self.waiting: deque[PostRequest] = deque()
        self.connections: set[ClientConnection] = set()
        self._free: list[ClientConnection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """All connections, before the clock runs."""
        await asyncio.gather(*(self._open() for _ in range(self.most)))

    def push(self, ask: PostRequest) -> None:
        """Send it now, or when a connection is free."""
        if self._free:
            self._free.pop().send(ask)
        else:
            self.waiting.append(ask)
            self._grow()

    def asked(self) -> Iterator[PostRequest]:
        """Requests without an answer."""
        yield from self.waiting
        yield from (connection.ask for connection in self.connections if connection.ask)

    @property
    def busy(self) -> bool:
        """Does any request wait for its answer?"""
        return next(self.asked(), None) is not None

    def made(self, connection: ClientConnection) -> None:
        """One more that can be used."""
        self.connections.add(connection)
        self._next(connection)

    def ended(self, connection: ClientConnection, status: str, close: bool = False) -> None:
        """Its answer is here; the next request goes out before this one is written down."""
        ask = connection.ask
        connection.ask = None
        if close:
            connection.transport.abort()
        else:
            self._next(connection)
        if ask is not None:
            self.record(ask, status)

    def lost(self, connection: ClientConnection) -> None:
        """A request that met a connection just being closed is sent once more, as browsers do."""
        self.connections.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
        ask = connection.ask
        connection.ask = None
        if ask is None or self._closed:
            return
        if ask.again or connection.begun:
            self.record(ask, LOST)
        else:
            ask.again = True
            self.waiting.appendleft(ask)
            self._grow()

    def sweep(self) -> None:
        """Give up those who waited too long; to be called every `SWEEP_SECONDS`."""
        before = time.perf_counter() - self.patience
        for connection in [
            connection
            for connection in self.connections
            if connection.ask and connection.ask.due < before
        ]:
            self.ended(connection, TIMEOUT, close=True)
        while self.waiting and self.waiting[0].due < before:
            self.record(self.waiting.popleft(), TIMEOUT)
        self._grow()

    async def close(self) -> None:
        """Hang up, whoever waits."""
        self._closed = True
        for connection in list(self.connections):
            connection.transport.abort()
        for task in self._opening:
            task.cancel()
        await asyncio.sleep(0)

    def _next(self, connection: ClientConnection) -> None:
        if self.waiting:
            connection.send(self.waiting.popleft())
        else:
            self._free.append(connection)

    def _grow(self) -> None:
        """Open as many as are waited for and may be."""
        to_open = min(len(self.waiting), self.most - len(self.connections)) - len(self._opening)
        for _ in range(to_open):
            task = asyncio.get_running_loop().create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: ClientConnection(self), "127.0.0.1", self.port)
        except OSError:  # not now; `sweep` tries again while anyone waits
            return
