"""HTTP connections with bounds: how many, how long each may take, how much each may send.

One parser reads every request: llhttp through `httptools`, which the `serve` extra requires. It is
strict (a bare LF, Content-Length beside Transfer-Encoding and malformed chunks are errors) but has
no limits: it collects a header of any length, and trailers like headers. The limits are here, one
for each way to make the parser hold or do more than a request is worth:

- Data is fed in pieces no longer than `max_header_bytes`. What the parser buffers without
  completing anything (headers, part of a body, a message) is bounded by counting these pieces: the
  parser has no callback for "still reading the same header".
- Each completed header is counted when the parser reports it, by size and by number. Trailers count
  with the headers of their request and are then dropped, because nothing here reads them.
- The framing of chunks (sizes, extensions) may be as long as the content plus `max_header_bytes`.
  Otherwise a body of one-byte chunks with long extensions would pass the limit on its content.
- Pipelined requests that wait for the answer to an earlier one are counted as they begin, because
  each holds its parsed headers.

uvicorn waits forever for headers that arrive one byte at a time, for a client that never reads its
answer, and for a closed connection whose last bytes the client never takes. A connection records
since when it has been in such a state, and `sweep` aborts those that stay in it too long. One pass
per second over all connections takes the place of one timer per request: a deadline is precise to a
second, and costs a request two comparisons. A client that takes its answer, only slowly, gets the
same time again for each `MIN_TAKEN_BYTES`: an answer may be as large as 64 MiB.
"""

from __future__ import annotations

import asyncio
import fcntl
import termios
from array import array
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from packhorse.serve import logs
from packhorse.serve.failures import Failure
from packhorse.serve.memory import trim_memory
from packhorse.serve.settings import ServeSettings
from packhorse.serve.tracing import CURRENT, new_ids

SWEEP_SECONDS = 1.0
RECHECK_SECONDS = 0.1
TRIM_CONNECTIONS = 32  # after a peak of this many, free memory is returned to the system
MIN_TAKEN_BYTES = 1 << 16  # of its answer, within a deadline, by a client that gets more time
MAX_PIPELINED = 64  # requests per connection that wait for an answer
MAX_LINE_BYTES = 8192  # of the request target or of one header; also the limit of Apache and nginx
BAD_REQUEST = Failure(400, "this is not a valid HTTP/1.1 request")


def protocol(settings: ServeSettings) -> Any:
    """Return the factory that uvicorn calls for each connection."""
    return partial(BoundedConnection, settings)


class _Refused(Exception):
    """Raised in a callback of the parser to stop it; `refusal` has the response."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on size, number and time."""

    parser: Any

    def __init__(self, settings: ServeSettings, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.settings = settings
        self.refusal: Failure | None = None  # why the parser was stopped
        self.in_body = False  # the headers are complete, the message is not
        self.field_count = 0  # headers and trailers of this request
        self.field_bytes = 0
        self.content_bytes = 0  # of the body
        self.wire_bytes = 0  # of the body with the framing of its chunks
        self.pending_bytes = 0  # fed since the parser last completed anything
        self.progressed = False
        # Times at which the connection entered a state that must not last; None if not in it.
        self.headers_since: float | None = None  # it sends, or should send, headers
        self.unread_since: float | None = None  # the client does not read its answer
        self.closing_since: float | None = None
        self.unsent_bytes = 0  # of answers, when the last two were last renewed

    # Limits of size and number -----------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; on a violation answer with an error and close."""
        self._unset_keepalive_if_required()
        size = self.settings.max_header_bytes
        for offset in range(0, len(data), size):
            failure = self._feed(data[offset : offset + size])
            if failure is not None:
                return self._refuse(failure)
        if self.answering:
            self.headers_since = None
        elif self.headers_since is None:
            self.headers_since = self.loop.time()

    def _feed(self, piece: bytes) -> Failure | None:
        """Parse one piece of at most `max_header_bytes`; return a failure if it breaks a limit."""
        size = len(piece)
        was_in_body = self.in_body
        # Too many header lines without an end are refused before they are parsed. Otherwise a
        # thousand such connections at once would block the event loop for the time that a hundred
        # callbacks for each of them take.
        lines = 0 if was_in_body else piece.count(b"\n")
        if lines > self.settings.max_headers + 1 and b"\r\n\r\n" not in piece:
            return self._too_many_fields()
        self.progressed = False
        while piece:
            try:
                self.parser.feed_data(piece)
                break
            except httptools.HttpParserUpgrade as offer:
                # The upgrade is declined by answering in HTTP/1.1; the rest is the next request.
                piece = piece[offer.args[0] :]
            except httptools.HttpParserError:
                return self.refusal or BAD_REQUEST
        self.pending_bytes = 0 if self.progressed else self.pending_bytes + size
        if self.pending_bytes > self.settings.max_header_bytes:
            return self._fields_too_large("headers")
        if was_in_body and self.in_body:
            self.wire_bytes += size
            framing = self.wire_bytes - self.content_bytes
            if framing > self.content_bytes + self.settings.max_header_bytes:
                return Failure(400, "the chunks of the body are too small; send larger ones")
        return None

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} pipelined requests wait for an answer"
            self._stop(Failure(400, message))
        self.field_count = 0
        self.field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Called by the parser with a part of the request target."""
        super().on_url(url)
        self.field_bytes += len(url)
        if len(self.url) > MAX_LINE_BYTES:
            self._stop(Failure(414, f"the request target is longer than {MAX_LINE_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser with a header or, after the body, a trailer."""
        size = len(name) + len(value) + len(b": \r\n")
        self.field_count += 1
        self.field_bytes += size
        if size > MAX_LINE_BYTES:
            self._stop(Failure(431, f"a header is longer than {MAX_LINE_BYTES} bytes"))
        if self.field_count > self.settings.max_headers:
            self._stop(self._too_many_fields())
        if self.field_bytes > self.settings.max_header_bytes:
            self._stop(self._fields_too_large("headers and trailers"))
        if not self.in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser after the headers; refuses what servers read differently."""
        problem = self._ambiguity()
        if problem is not None:
            self._stop(Failure(400, problem))
        self.in_body = True
        self.progressed = True
        self.content_bytes = 0
        self.wire_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a part of the body."""
        self.progressed = True
        self.content_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser at the last byte of a request."""
        self.in_body = False
        self.progressed = True
        super().on_message_complete()

    def _ambiguity(self) -> str | None:
        """Describe what the parser accepts although servers disagree about its meaning.

        If a proxy and this server disagree about where a request ends, or which host it is for, one
        client can smuggle a request into the connection of another (RFC 9112, section 11.2).
        """
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
                    return "Transfer-Encoding must be chunked, and needs HTTP/1.1"
        if version not in ("1.0", "1.1"):
            return "only HTTP/1.0 and HTTP/1.1 are supported"
        if hosts != 1 and not (hosts == 0 and version == "1.0"):
            return "a request must have exactly one Host header"
        # After an upgrade the parser no longer reads what follows the headers as a body.
        if has_body and self.parser.should_upgrade():
            return "a request with a body cannot offer an Upgrade; send it as plain HTTP/1.1"
        return None

    def _fields_too_large(self, kind: str) -> Failure:
        limit = self.settings.max_header_bytes
        return Failure(431, f"the request has more than {limit} bytes of {kind}")

    def _too_many_fields(self) -> Failure:
        limit = self.settings.max_headers
        return Failure(431, f"the request has more than {limit} headers and trailers")

    def _stop(self, failure: Failure) -> None:
        self.refusal = failure
        raise _Refused

    def _refuse(self, failure: Failure) -> None:
        """Answer with an error and close the connection.

        If an earlier request of this connection still waits for its answer, the connection is only
        aborted: the client would take the error for that answer.
        """
        ids = new_ids()  # headers that are not understood have none
        current = CURRENT.set(ids)
        logs.LOGGER.debug("a connection was closed: %s", failure.message)
        CURRENT.reset(current)
        concerns_current = self.in_body and not self.pipeline and not self.cycle.response_started
        if self.answering and not concerns_current:
            return self.transport.abort()
        if self.answering:  # the application waits for the rest of this body; wake it
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = failure.body("")
        head = f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += f"x-request-id: {ids.request}\r\ntraceparent: {ids.traceparent}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    # Limits of time ----------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Start the clock for the first headers; abort if there are too many connections."""
        super().connection_made(transport)
        self.headers_since = self.loop.time()
        if len(self.connections) > self.settings.max_connections:
            transport.abort()

    def pause_writing(self) -> None:
        """Called by the transport when its buffer is full: the client does not read."""
        self.unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Called by the transport when the client reads again."""
        self.unread_since = None
        super().resume_writing()

    @property
    def answering(self) -> bool:
        """Whether a request with complete headers waits for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def expired(self, now: float) -> bool:
        """Return whether the connection has been in one of the bounded states for too long."""
        if self.transport.is_closing():
            self.closing_since = self.closing_since or now
        elif self.answering:
            self.headers_since = None
        self._renew(now)
        return (
            _over(self.headers_since, now, self.settings.receive_seconds)
            or _over(self.unread_since, now, self.settings.send_seconds)
            or _over(self.closing_since, now, self.settings.send_seconds)
        )

    def _renew(self, now: float) -> None:
        """Let the deadlines of a client that takes its answer begin again."""
        if self.unread_since is None and self.closing_since is None:
            self.unsent_bytes = 0
            return
        unsent = self.transport.get_write_buffer_size() + _queued_bytes(self.transport)
        if unsent > self.unsent_bytes:  # more was written
            self.unsent_bytes = unsent
        elif unsent <= self.unsent_bytes - MIN_TAKEN_BYTES:
            self.unsent_bytes = unsent
            self.unread_since = self.unread_since and now
            self.closing_since = self.closing_since and now


def _queued_bytes(transport: Any) -> int:
    """Return the bytes that the kernel holds until the client has received them; 0 if unknown.

    It takes more only when a third of its buffer, which may be megabytes, is free again.
    """
    queued = array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    except (OSError, AttributeError):
        return 0
    return queued[0]


async def sweep(connections: set[Any]) -> None:
    """Abort expired connections once per second, until cancelled.

    A connection must be expired in two checks. If this process was suspended or starved, deadlines
    have passed through no fault of the client; between the checks the event loop reads what arrived
    meanwhile. After a peak of connections, freed memory is returned to the system, because the C
    allocator would keep it.
    """
    peak = 0
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        expired = _expired(connections)
        await asyncio.sleep(RECHECK_SECONDS)
        for connection in expired & _expired(connections):
            connection.transport.abort()
        peak = max(peak, len(connections))
        if peak >= TRIM_CONNECTIONS and len(connections) < peak // 2:
            peak = len(connections)
            await asyncio.to_thread(trim_memory)


def _expired(connections: set[Any]) -> set[Any]:
    now = asyncio.get_running_loop().time()
    return {connection for connection in connections if connection.expired(now)}


def _over(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since > seconds
