"""Connections that cannot hold the server up: how many, how long each takes, how much it sends.

One parser reads every request: llhttp through `httptools`, which the `serve` extra requires. It is
strict (a bare LF, Content-Length beside Transfer-Encoding and malformed chunks are errors) but it
sets no bounds: it collects a header of any length, and trailers like headers. The bounds are here:

- data is fed in pieces no longer than `max_header_bytes`, and what the parser may collect without
  completing anything (headers, part of a body, a message) is counted by these pieces;
- each completed line is counted when the parser reports it, by size and by number; trailers count
  with the headers of their request, and are then dropped: nobody here reads them;
- the framing of chunks (sizes, extensions) may be as long as the content plus `max_header_bytes`;
- requests that wait behind an unanswered one are counted as they begin.

uvicorn also waits for ever for headers that come a byte at a time, for an answer that is never
read, and for a closed connection whose last bytes nobody takes. A connection notes since when it
has been in such a state, and `sweep` ends those that are in it too long. One pass a second over all
connections instead of a timer for each request: a deadline is kept to a second, and costs a request
two comparisons.
"""

from __future__ import annotations

import asyncio
import ctypes
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from packhorse.serve import logs
from packhorse.serve.failures import Failure
from packhorse.serve.settings import Settings

SWEEP_SECONDS = 1.0
SECOND_LOOK = 0.1
CROWD = 256  # connections, after which memory is given back
LINGER_SECONDS = 5.0  # for the last bytes of a connection that was closed
MOST_PIPELINED = 64
MOST_LINE = 8192  # bytes of a request's target or of one header; also what Apache and nginx allow
BAD_REQUEST = Failure(400, "this is not a valid HTTP/1.1 request")


def protocol(settings: Settings) -> Any:
    """What uvicorn calls for each connection."""
    return partial(Connection, settings)


class _Refused(Exception):
    """Raised in a callback of the parser, to stop it."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds and clocks."""

    parser: Any

    def __init__(self, settings: Settings, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.settings = settings
        self.refusal: Failure | None = None  # why the parser was stopped
        self.in_body = False  # the headers are complete, the message is not
        self.fields = 0  # of this request: headers and trailers
        self.field_bytes = 0
        self.content_bytes = 0  # of its body, and with the chunks' framing:
        self.wire_bytes = 0
        self.silent_bytes = 0  # fed since the parser last completed anything
        self.progressed = False
        # Since when it is in a state that must not last:
        self.headers_since: float | None = (
            None  # it sends, or should send, the headers of a request
        )
        self.unread_since: float | None = None  # the answer is not read
        self.closing_since: float | None = None

    # Bounds ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what came; answer and close where it is refused."""
        self._unset_keepalive_if_required()
        size = self.settings.max_header_bytes
        for begin in range(0, len(data), size):
            failure = self._feed(data[begin : begin + size])
            if failure is not None:
                return self._refuse(failure)
        if self.answering:
            self.headers_since = None
        elif self.headers_since is None:
            self.headers_since = self.loop.time()

    def _feed(self, piece: bytes) -> Failure | None:
        size, was_in_body = len(piece), self.in_body
        # Lines and no end of them: refused unparsed, or a thousand such connections at once would
        # keep the others waiting for the time that a hundred callbacks for each of them take.
        lines = 0 if was_in_body else piece.count(b"\n")
        if lines > self.settings.max_headers + 1 and b"\r\n\r\n" not in piece:
            return self._too_many()
        self.progressed = False
        while piece:
            try:
                self.parser.feed_data(piece)
                break
            except httptools.HttpParserUpgrade as offer:
                # Declined by answering in HTTP/1.1; what follows is the next request.
                piece = piece[offer.args[0] :]
            except httptools.HttpParserError:
                return self.refusal or BAD_REQUEST
        self.silent_bytes = 0 if self.progressed else self.silent_bytes + size
        if self.silent_bytes > self.settings.max_header_bytes:
            return self._too_large("headers")
        if was_in_body and self.in_body:
            self.wire_bytes += size
            framing = self.wire_bytes - self.content_bytes
            if framing > self.content_bytes + self.settings.max_header_bytes:
                return Failure(400, "the body comes in chunks that are too small; send larger ones")
        return None

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if len(self.pipeline) >= MOST_PIPELINED:
            self._stop(Failure(400, f"more than {MOST_PIPELINED} requests wait for an answer"))
        self.fields = self.field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        super().on_url(url)
        self.field_bytes += len(url)
        if len(self.url) > MOST_LINE:
            self._stop(Failure(414, f"the request's target is longer than {MOST_LINE} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or after the body a trailer."""
        size = len(name) + len(value) + len(b": \r\n")
        self.fields += 1
        self.field_bytes += size
        if size > MOST_LINE:
            self._stop(Failure(431, f"a header is longer than {MOST_LINE} bytes"))
        if self.fields > self.settings.max_headers:
            self._stop(self._too_many())
        if self.field_bytes > self.settings.max_header_bytes:
            self._stop(self._too_large("headers and trailers"))
        if not self.in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """All headers are there; refuse what another server might read as another request."""
        problem = self._ambiguity()
        if problem is not None:
            self._stop(Failure(400, problem))
        self.in_body = self.progressed = True
        self.content_bytes = self.wire_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self.progressed = True
        self.content_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self.in_body, self.progressed = False, True
        super().on_message_complete()

    def _ambiguity(self) -> str | None:
        """What the parser lets pass although servers differ in what they make of it."""
        version = self.parser.get_http_version()
        hosts = 0
        has_body = False
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                has_body = True
            elif name == b"transfer-encoding":
                has_body = True
                if value.lower() != b"chunked" or version == "1.0":
                    return "the only Transfer-Encoding is chunked, and only with HTTP/1.1"
        if version not in ("1.0", "1.1"):
            return "only HTTP/1.0 and HTTP/1.1 are spoken here"
        if hosts != 1 and not (hosts == 0 and version == "1.0"):
            return "a request must have one Host header"
        # The parser takes what follows the headers for the other protocol, not for a body.
        if has_body and self.parser.should_upgrade():
            return "a request with a body cannot offer an Upgrade; send it as plain HTTP/1.1"
        return None

    def _too_large(self, what: str) -> Failure:
        most = self.settings.max_header_bytes
        return Failure(431, f"the request has more than {most} bytes of {what}")

    def _too_many(self) -> Failure:
        most = self.settings.max_headers
        return Failure(431, f"the request has more than {most} headers and trailers")

    def _stop(self, failure: Failure) -> None:
        self.refusal = failure
        raise _Refused

    def _refuse(self, failure: Failure) -> None:
        """Answer and close; only close where an answer would be taken for an earlier request's."""
        logs.LOGGER.debug("a connection was closed: %s", failure.message)
        mine = self.in_body and not self.pipeline and not self.cycle.response_started
        if self.answering and not mine:
            return self.transport.abort()
        if self.answering:  # the application waits for the rest of this body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = failure.body("")
        head = f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    # Clocks ------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Close at once where there are too many."""
        super().connection_made(transport)
        self.headers_since = self.loop.time()
        if len(self.connections) > self.settings.max_connections:
            transport.abort()

    def pause_writing(self) -> None:
        """The client does not read."""
        self.unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        self.unread_since = None
        super().resume_writing()

    @property
    def answering(self) -> bool:
        """Has it a request whose headers are complete?"""
        return self.cycle is not None and not self.cycle.response_complete

    def expired(self, now: float) -> bool:
        """Is it in a state that lasts too long?"""
        if self.transport.is_closing():
            self.closing_since = self.closing_since or now
        elif self.answering:
            self.headers_since = None
        return (
            _over(self.headers_since, now, self.settings.receive_seconds)
            or _over(self.unread_since, now, self.settings.send_seconds)
            or _over(self.closing_since, now, LINGER_SECONDS)
        )


async def sweep(connections: set[Any]) -> None:
    """End what has expired, once a second, for ever.

    Looked at twice: where this process got no time, what a client has sent meanwhile is read first.
    When a crowd has left, what it held goes back to the system: the allocator would keep it.
    """
    most = 0
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        expired = _expired(connections)
        await asyncio.sleep(SECOND_LOOK)
        for connection in expired & _expired(connections):
            connection.transport.abort()
        most = max(most, len(connections))
        if most >= CROWD and len(connections) < most // 2:
            most = len(connections)
            await asyncio.to_thread(_trim)


def _trim() -> None:
    """Give free pages back, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _expired(connections: set[Any]) -> set[Any]:
    now = asyncio.get_running_loop().time()
    return {connection for connection in connections if connection.expired(now)}


def _over(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since > seconds
