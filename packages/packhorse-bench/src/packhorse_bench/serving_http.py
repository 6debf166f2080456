"""A small HTTP/1.1 client for load: kept-alive connections, one request on each at a time.

A load generator shares the machine with the server it measures, so time that it spends on a request
is missing from the server's figure. HTTP libraries spend about as much as a good server does; this
client writes bytes that were prepared beforehand, and of a response (RFC 9112) reads only the
status and the length. Responses need a Content-Length, as those of one JSON document have.

Every request is counted: one that finds no free connection waits for one with its clock running,
and one without a response after `timeout` seconds has failed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from packhorse.errors import RequestFailed

TIMEOUT = "timeout"
LOST = "connection lost"
NOT_HTTP = "answer not understood"
SWEEP_SECONDS = 0.02  # between two looks for requests that have timed out
OPEN_SECONDS = 30.0  # for all connections of a pool: a kernel tries again after 1, 3, 7 and 15


@dataclass(slots=True)
class PostRequest:
    """One request; its latency counts from `due`, when it should have been sent."""

    index: int  # of its text
    due: float  # of time.perf_counter
    message: bytes
    resent: bool = False  # sent a second time, because the server had closed the connection


# Called with the status as text ("200", "429") or with one of the words above.
Record = Callable[[PostRequest, str], None]


def post_message(path: str, body: bytes, host: str) -> bytes:
    """The bytes of a POST request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


def request_body(path: str, model: str, texts: str | Sequence[str]) -> bytes:
    """The JSON body for one text or several: TEI's if the path ends in /embed, else OpenAI's."""
    if path.endswith("/embed"):
        return json.dumps({"inputs": texts}).encode()
    return json.dumps({"model": model, "input": texts}).encode()


def parse_head(head: bytes) -> tuple[str, int, bool]:
    """Status, length of the body, and whether the server closes the connection after it."""
    first, *lines = head.split(b"\r\n")
    version, status, *_ = [*first.split(b" ", 2), b""]
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise ValueError("no status line")
    fields = {name.strip().lower(): value.strip() for name, _, value in map(_split_field, lines)}
    closes = fields.get(b"connection", b"").lower() == b"close"
    return status.decode("ascii"), int(fields[b"content-length"]), closes


def _split_field(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")


class ClientConnection(asyncio.Protocol):
    """One connection of a pool: writes a request, reads its response, reports to the pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport
        self.request: PostRequest | None = None
        self._head = b""  # of the response, as far as it has arrived
        self._body_left = -1  # bytes of the body still to come; -1 while the head is incomplete
        self._status = ""
        self._closes = False

    @property
    def answer_begun(self) -> bool:
        """Whether any byte of the response has arrived."""
        return self._body_left >= 0 or bool(self._head)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Report the connection as usable (called by asyncio)."""
        self.transport = cast("asyncio.Transport", transport)
        self.pool.connection_opened(self)

    def send(self, request: PostRequest) -> None:
        """Write the request; the pool is called when it ends."""
        self.request = request
        self._head = b""
        self._body_left = -1
        self.transport.write(request.message)

    def data_received(self, data: bytes) -> None:
        """Read a part of the response (called by asyncio)."""
        if self.request is None:  # bytes without a request
            return self.transport.abort()
        if self._body_left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            try:
                self._status, self._body_left, self._closes = parse_head(self._head[:end])
            except (ValueError, KeyError):
                return self.pool.request_ended(self, NOT_HTTP, close=True)
            data = self._head[end + 4 :]
        self._body_left = max(0, self._body_left - len(data))
        if self._body_left == 0:
            self.pool.request_ended(self, self._status, self._closes)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection, by the server or by us (called by asyncio)."""
        self.pool.connection_lost(self)


class Pool:
    """Up to `max_connections` connections to one port; further requests wait for a free one."""

    def __init__(
        self, host: str, port: int, max_connections: int, timeout: float, record: Record
    ) -> None:
        self.host = host
        self.port = port
        self.max_connections = max_connections
        self.timeout = timeout
        self.record = record
        self.waiting: deque[PostRequest] = deque()
        self.connections: set[ClientConnection] = set()
        self._free: list[ClientConnection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """Open all connections, so that no request waits for a handshake."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await asyncio.gather(*(self._open() for _ in range(self.max_connections)))
        except TimeoutError as error:
            raise RequestFailed(
                f"only {len(self.connections)} of {self.max_connections} connections to port "
                f"{self.port} could be opened within {OPEN_SECONDS:g} s"
            ) from error

    def push(self, request: PostRequest) -> None:
        """Send a request now, or when a connection is free."""
        if self._free:
            self._free.pop().send(request)
        else:
            self.waiting.append(request)
            self._open_more()

    def unanswered(self) -> Iterator[PostRequest]:
        """Requests without a response: waiting here, or sent."""
        yield from self.waiting
        yield from (connection.request for connection in self.connections if connection.request)

    @property
    def busy(self) -> bool:
        """Whether any request is without a response."""
        return next(self.unanswered(), None) is not None

    def connection_opened(self, connection: ClientConnection) -> None:
        """Use a new connection."""
        self.connections.add(connection)
        self._send_next(connection)

    def request_ended(self, connection: ClientConnection, status: str, close: bool = False) -> None:
        """Record a request's end, and use the connection for the next one."""
        # Send first, record then: bookkeeping must not delay the next request.
        request = connection.request
        connection.request = None
        if close:
            connection.transport.abort()
        else:
            self._send_next(connection)
        if request is not None:
            self.record(request, status)

    def connection_lost(self, connection: ClientConnection) -> None:
        """Forget a connection; send its request again if the server cannot have begun to answer it.

        A server may close an idle connection at the moment a request is written. Browsers send such
        a request once more, so that is no failure; a second time it is.
        """
        self.connections.discard(connection)
        if connection in self._free:
            self._free.remove(connection)
        request = connection.request
        connection.request = None
        if request is None or self._closed:
            return
        if request.resent or connection.answer_begun:
            self.record(request, LOST)
        else:
            request.resent = True
            self.waiting.appendleft(request)
            self._open_more()

    def sweep(self) -> None:
        """Fail requests that have timed out; call it every `SWEEP_SECONDS`.

        One sweep over all is cheaper than a timer per request.
        """
        before = time.perf_counter() - self.timeout
        late = [c for c in self.connections if c.request and c.request.due < before]
        for connection in late:
            self.request_ended(connection, TIMEOUT, close=True)
        while self.waiting and self.waiting[0].due < before:
            self.record(self.waiting.popleft(), TIMEOUT)
        self._open_more()

    async def close(self) -> None:
        """Close all connections, also those whose requests are unanswered."""
        self._closed = True
        for connection in list(self.connections):
            connection.transport.abort()
        for task in self._opening:
            task.cancel()
        await asyncio.sleep(0)  # lets asyncio call connection_lost

    def _send_next(self, connection: ClientConnection) -> None:
        if self.waiting:
            connection.send(self.waiting.popleft())
        else:
            self._free.append(connection)

    def _open_more(self) -> None:
        """Open connections for the waiting requests, up to the maximum."""
        to_open = min(len(self.waiting), self.max_connections - len(self.connections)) - len(
            self._opening
        )
        for _ in range(to_open):
            task = asyncio.get_running_loop().create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: ClientConnection(self), self.host, self.port)
        except OSError:  # not now; `sweep` tries again while a request waits
            return
