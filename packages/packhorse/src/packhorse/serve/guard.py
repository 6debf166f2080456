"""The outermost ASGI layer: API keys, Host header, body size and time, concurrent requests.

The key, the lane and the timeout of a request become its ticket here (`tickets`). Once there are
keys of several names, or requests in the lane bulk, places and bytes are divided between the
shares (`runtime.shares`), so that one client cannot take them all.

Nothing of the framework or of our handlers runs for a request that is refused here. A body is
received whole, counted as it arrives and against the clock, before the request counts as being
answered; so a slow client holds a connection and a few bytes, but no place among the concurrent
requests. That place is given back exactly once, however the request ends.

Every route needs the API key, unknown routes too; only /health and /ping are public. A key comes as
`Authorization: Bearer KEY`; a browser may send it as the password of Basic authentication, which is
how the page at / can be opened. A server without keys accepts only requests whose Host header names
it: otherwise a web page could reach it under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import binascii
import math
import re
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, cast

from packhorse.runtime.shares import FairLimit, Share
from packhorse.serve import logs
from packhorse.serve.failures import ClientGone, Failure
from packhorse.serve.hosting import ServedModels
from packhorse.serve.keys import ApiKey, find_key, parse_keys
from packhorse.serve.metrics import NO_KEY, UNMATCHED_ROUTE, Metrics, RequestRecord
from packhorse.serve.settings import ServeSettings
from packhorse.serve.tickets import is_bulk, read_timeout
from packhorse.serve.tracing import CURRENT, read_ids

if TYPE_CHECKING:
    from packhorse.serve.telemetry import Telemetry

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# A load balancer asks for health without a key.
PUBLIC_PATHS = ("/health", "/ping")
# Answered under any load and while draining: an operator needs them most when the server is full.
# None of them goes through a queue, except the one token that /ready may run.
UNLIMITED_PATHS = ("/health", "/ping", "/ready", "/metrics", "/engine")
ADMIN_PREFIX = "/admin/"  # of routes with a key of their own; see `admin`
BEARER = {"www-authenticate": 'Bearer realm="packhorse"'}
METHODS_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS", "DELETE")
# Sent with every refusal: the client may still be sending a body that nobody will read, so the
# connection cannot be used for another request.
CLOSE = {"connection": "close"}
HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:@/\[\]]+?)\.?)(?::[0-9]*)?")
FOREIGN_HOST = (
    "the Host header does not name this server; without an API key it only accepts requests to "
    "localhost, its own address and the names passed with --allow-host"
)
# Of a body, looked at by one call. Longer ones are looked at in a thread, slice by slice: one call
# for all of it would keep Python's global lock, and with it the event loop.
SLICE_BYTES = 1 << 18
# A list, an object or a field takes as long to validate as this many numbers.
COMPOUND_VALUES = 4
CLIENT_GONE = 499  # nginx's status for a client that left; counted and logged, never sent


class Refused(Exception):
    """A gRPC call that the guard refuses."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Guard:
    """An ASGI application that checks each request before it passes it on to `app`."""

    def __init__(
        self, app: App, settings: ServeSettings, models: ServedModels, metrics: Metrics
    ) -> None:
        self.app = app
        self.settings = settings
        self.models = models
        self.metrics = metrics
        self.keys: tuple[ApiKey, ...] = ()
        self.divides = False  # are there several shares?
        self.use_keys(settings.keys)
        names = (settings.host, *settings.allow_host)
        self.names = {name.lower().strip("[]").rstrip(".") for name in names}
        self.on_all_addresses = settings.host in ("", "0.0.0.0", "::")
        self._is_known_host = lru_cache(256)(self._is_own_host)  # to parse it takes 10 µs
        self.warned: set[tuple[str, str]] = set()  # models and keys whose texts were cut
        self.telemetry: Telemetry | None = None  # set while traces and metrics are sent
        self.draining = False
        self.places = FairLimit(settings.max_concurrent_requests)
        self.bytes = FairLimit(settings.max_buffered_bytes)  # of bodies, complete or not

    def use_keys(self, entries: Sequence[str]) -> None:
        """Accept these keys from now on, and no others; requests under way are not touched."""
        self.keys = parse_keys(entries)
        self.divides = self.divides or len({key.name for key in self.keys}) > 1

    @property
    def in_flight(self) -> int:
        """Requests that the application is answering."""
        return self.places.used

    @property
    def buffered(self) -> int:
        """Bytes of all bodies that are held."""
        return self.bytes.used

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and report it to metrics and log, however it ends."""
        if scope["type"] != "http":
            return await self._handle_other(scope, receive, send)
        record = scope["packhorse"] = RequestRecord(ids=read_ids(scope["headers"]))
        current = CURRENT.set(record.ids)  # for the log
        response = _ResponseSender(send, record)
        try:
            await self._handle(scope, receive, response)
        except ClientGone:
            response.client_gone = True
        except Exception as error:
            if response.client_gone:
                return
            record.error = type(error).__name__
            logs.LOGGER.error("a request failed in the server", exc_info=True)
            if not response.status:
                await _send_failure(scope, response, Failure(500, "internal server error"))
        finally:
            # A status of 0 means that the connection ended before a response began.
            status = CLIENT_GONE if response.client_gone else response.status or CLIENT_GONE
            self.report(scope, record, status)
            record.model = None  # the connection keeps the scope, and a removed model must not stay
            CURRENT.reset(current)

    async def _handle_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass lifespan events on; refuse WebSockets, which no route uses."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _handle(self, scope: Scope, receive: Receive, response: _ResponseSender) -> None:
        """Check the headers, receive the body, check capacity, run the application."""
        failure = self._check_headers(scope)
        if failure is not None:
            return await _send_failure(scope, response, failure)
        body = b""
        share = scope["packhorse"].share
        if scope["method"] not in METHODS_WITHOUT_BODY:
            body = await self._receive_body(receive, share)
            if isinstance(body, Failure):
                return await _send_failure(scope, response, body)
        self.bytes.take(share, len(body))
        try:
            if await self._has_too_many_values(body):
                limit = self.settings.max_body_values
                message = (
                    f"the body has more than {limit} JSON values (max_body_values), of which a "
                    f"list, an object or a field counts {COMPOUND_VALUES}"
                )
                return await _send_failure(scope, response, Failure(413, message, CLOSE))
            await self._run_app(scope, replay(body, receive), response)
        finally:
            self.bytes.give_back(share, len(body))

    async def _run_app(self, scope: Scope, receive: Receive, response: _ResponseSender) -> None:
        if scope["path"] in UNLIMITED_PATHS:
            return await self.app(scope, receive, response)
        share = scope["packhorse"].share
        failure = self._check_capacity(share)
        if failure is not None:
            return await _send_failure(scope, response, failure)
        self.places.take(share)
        self.metrics.in_flight.inc()
        try:
            await self.app(scope, receive, response)
        finally:
            self.places.give_back(share)
            self.metrics.in_flight.dec()

    async def run_call(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[bytes]],
        answer: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Run a gRPC call under the keys, limits and counts of HTTP requests; raises `Refused`.

        `receive` returns the first message. There is no Host header to check: gRPC is HTTP/2 with
        prior knowledge, which no web page can make a browser speak.
        """
        failure = self._check_access(scope, dict(scope["headers"]))
        if failure is not None:
            raise Refused(failure)
        share = scope["packhorse"].share
        body = await receive()
        if not self.bytes.has_room(share, len(body)):
            raise Refused(self.overloaded("too many bytes are being received"))
        failure = self._check_capacity(share)
        if failure is not None:
            raise Refused(failure)
        self.bytes.take(share, len(body))
        self.places.take(share)
        self.metrics.in_flight.inc()
        try:
            await answer(body)
        finally:
            self.bytes.give_back(share, len(body))
            self.places.give_back(share)
            self.metrics.in_flight.dec()

    def _check_capacity(self, share: Share | None) -> Failure | None:
        """Bound the requests that are answered at once, and with them memory and event loop time.

        The runner bounds its own queue by tokens; this bound also covers what happens around it:
        parsed bodies, tokenization threads, answers being written.
        """
        if self.places.has_room(share):
            return None
        return self.overloaded("too many requests are being answered")

    def _check_headers(self, scope: Scope) -> Failure | None:
        """Refuse what can be refused by the headers alone, before any byte of the body is read."""
        headers = dict(scope["headers"])
        # No web page can make a browser connect to a Unix socket.
        any_host = self.keys or self.settings.unix_socket
        if not any_host and not self._is_known_host(headers.get(b"host")):
            return Failure(403, FOREIGN_HOST, CLOSE)
        failure = self._check_access(scope, headers)
        if failure is not None or scope["method"] in METHODS_WITHOUT_BODY:
            return failure
        return self._check_body_headers(headers)

    def _check_access(self, scope: Scope, headers: dict[bytes, bytes]) -> Failure | None:
        """Check the key, and that the server is not shutting down."""
        if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
            # A proxy that checks the first and a server that checks the last would disagree.
            return Failure(400, "the request has more than one Authorization header", CLOSE)
        record: RequestRecord = scope["packhorse"]
        key = None
        if self.keys:
            key = find_key(self.keys, _key(headers.get(b"authorization", b"")))
            record.use_key(key)
        if self.settings.admin_key and scope["path"].startswith(ADMIN_PREFIX):
            if not self._has_admin_key(headers):
                return Failure(401, "the admin key is missing or wrong", {**BEARER, **CLOSE})
        elif self.keys and scope["path"] not in PUBLIC_PATHS and key is None:
            # Basic makes a browser ask its user for the key, which is wanted when the page is
            # opened; calls of the page's script must fail instead.
            scheme = "Basic" if headers.get(b"sec-fetch-mode") == b"navigate" else "Bearer"
            challenge = {"www-authenticate": f'{scheme} realm="packhorse"'}
            return Failure(401, "the API key is missing or wrong", {**challenge, **CLOSE})
        if self.draining and scope["path"] not in UNLIMITED_PATHS:
            return Failure(503, "the server is shutting down", {**CLOSE, "retry-after": "1"})
        return self._make_ticket(record, key, headers)

    def _make_ticket(
        self, record: RequestRecord, key: ApiKey | None, headers: dict[bytes, bytes]
    ) -> Failure | None:
        """Find the lane, the share and the deadline of a request."""
        record.bulk = key is not None and key.bulk
        bulk = is_bulk(headers, key)
        timeout = read_timeout(headers)
        for failure in (bulk, timeout):
            if isinstance(failure, Failure):
                return replace(failure, headers=CLOSE)
        record.bulk = bool(bulk)
        self.divides = self.divides or record.bulk
        if self.divides:
            record.share = Share(record.key, record.bulk)
        seconds = min(cast(float, timeout), self.settings.request_timeout or math.inf)
        if seconds < math.inf:
            record.deadline = min(record.deadline, time.monotonic() + seconds)
        return None

    def _is_own_host(self, host: bytes | None) -> bool:
        """Return whether a Host header names this server.

        A web page can make its own domain resolve to this machine (DNS rebinding) and then call the
        server from the browser of whoever reads the page. The Host header still has the page's
        domain, which is how such a request is recognized.
        """
        if host is None:  # only HTTP/1.0 clients may omit it, and no browser does
            return True
        name = _host_name(host)
        if name is None:
            return False
        if name in self.names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        # A rebinding page comes with a domain name, never with an address, so any address is safe;
        # a server that listens on all of them does not know which are its own.
        return address.is_loopback or self.on_all_addresses

    def _has_admin_key(self, headers: dict[bytes, bytes]) -> bool:
        sent = _key(headers.get(b"authorization", b""))
        return find_key(parse_keys([self.settings.admin_key]), sent) is not None

    def _check_body_headers(self, headers: dict[bytes, bytes]) -> Failure | None:
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            return Failure(411, "the request has no Content-Length", CLOSE)
        if length is not None and int(length) > self.settings.max_body_bytes:
            return self._body_too_large()
        # A few kilobytes can decompress to gigabytes, which the size limit would see too late.
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            message = "compressed bodies are not supported; send it without Content-Encoding"
            return Failure(415, message, CLOSE)
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        # Some clients name no type. Pages of other sites can send a form, or bytes without a type,
        # but not this type; and a browser's POST has an Origin.
        is_untyped_client = not content_type and b"origin" not in headers
        if content_type != b"application/json" and not is_untyped_client:
            return Failure(415, "the body must be JSON, with Content-Type: application/json", CLOSE)
        return None

    async def _receive_body(self, receive: Receive, share: Share | None) -> bytes | Failure:
        """Receive the whole body within the limits of one body, of all bodies and of time.

        Content-Length was checked before, but a chunked body has none; so bytes are counted. The
        deadline is for the whole body, because one per part could be renewed forever by a client
        that sends a byte at a time.
        """
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.settings.receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("the client left while it sent its request")
                    part = message.get("body", b"")
                    if size + len(part) > self.settings.max_body_bytes:
                        return self._body_too_large()
                    # Each body may be within its limit while thousands of them fill the memory.
                    if not self.bytes.has_room(share, len(part)):
                        return self.overloaded("too many bytes are being received")
                    size += len(part)
                    self.bytes.take(share, len(part))
                    parts.append(part)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            seconds = f"{self.settings.receive_seconds:g} seconds"
            return Failure(408, f"the body did not arrive within {seconds}", CLOSE)
        finally:
            self.bytes.give_back(share, size)

    async def _has_too_many_values(self, body: bytes) -> bool:
        limit = self.settings.max_body_values
        if len(body) <= SLICE_BYTES:
            return has_more_values(body, limit)
        return await asyncio.to_thread(has_more_values, body, limit)

    def _body_too_large(self) -> Failure:
        limit = self.settings.max_body_bytes
        message = f"the body is too large; at most {limit} bytes are allowed (max_body_bytes)"
        return Failure(413, message, CLOSE)

    def overloaded(self, reason: str) -> Failure:
        """Return the answer to a request for which there is no room."""
        seconds = max((model.retry_after() for model in self.models), default=1)
        return Failure(429, f"{reason}; try again later", {**CLOSE, "retry-after": str(seconds)})

    def report(self, scope: Scope, record: RequestRecord, status: int) -> None:
        """Count and log a request that has ended."""
        if status == CLIENT_GONE:
            self.metrics.dropped.inc()
        if record.truncated:
            self._warn_of_truncation(record)
        route = getattr(scope.get("route"), "path", UNMATCHED_ROUTE)
        self.metrics.record(record, route, status)
        logs.log_request(record, route, status)
        if self.telemetry is not None:
            known = None if route == UNMATCHED_ROUTE else route
            self.telemetry.record(scope, record, known, status)

    def _warn_of_truncation(self, record: RequestRecord) -> None:
        """Log once per model and key that texts are cut; the metric counts how many."""
        if record.model is None or (record.model.name, record.key) in self.warned:
            return
        self.warned.add((record.model.name, record.key))
        sender = "clients" if record.key == NO_KEY else f"the clients of {record.key}"
        logs.LOGGER.warning(
            "%s sent texts with more tokens than %s takes, and they were cut; "
            "--no-truncate refuses such texts, packhorse_truncated_inputs_total counts them",
            sender,
            record.model.name,
        )


class _ResponseSender:
    """An ASGI `send` that remembers the status and adds the headers of every response."""

    __slots__ = ("client_gone", "record", "send", "status")

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self.send = send
        self.record = record
        self.status = 0
        self.client_gone = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"] = list(message.get("headers", ()))
            headers.append((b"x-content-type-options", b"nosniff"))
            headers += self.record.ids.headers()
            if self.record.pack:
                headers.append((b"x-packhorse-pack", self.record.pack.encode()))
            if self.record.fingerprint:
                headers.append((b"x-packhorse-fingerprint", self.record.fingerprint.encode()))
            if self.record.truncated:
                headers.append((b"x-packhorse-truncated", str(self.record.truncated).encode()))
            if self.record.ignored:
                headers.append((b"x-packhorse-ignored-fields", self.record.ignored.encode()))
        try:
            await self.send(message)
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError on a closed transport
            self.client_gone = True
            raise ClientGone("the connection was closed") from error


async def _send_failure(scope: Scope, response: _ResponseSender, failure: Failure) -> None:
    """Answer with an error without running the application."""
    response.record.error = response.record.error or str(failure.status)
    body = failure.body(scope["path"])
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    headers |= failure.headers
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await response({"type": "http.response.start", "status": failure.status, "headers": encoded})
    await response({"type": "http.response.body", "body": body})


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first delivers this body, then what the connection reports."""
    delivered = False

    async def replayed() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def has_more_values(body: bytes, limit: int) -> bool:
    """Return whether a JSON body has more than about `limit` values, without parsing it.

    Two megabytes of small values take seconds to validate, during which no other request is
    answered; two megabytes of text take a millisecond. Commas separate values, but only those
    outside of strings count. Each string is a value too, with two quotes. Lists, objects and
    fields count `COMPOUND_VALUES` each.
    """
    if _count_values(body) <= limit:
        return False
    quotes = 0
    values = 0
    for part in _slices(body):
        if b"\\" in part:  # with pairs of backslashes gone, each that is left escapes a character
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        # Every other piece is outside of strings: the first, if the slice does not begin in one.
        values += _count_values(b"".join(pieces[quotes % 2 :: 2]))
        quotes += len(pieces) - 1
        if values > limit or quotes > 2 * limit + 2:
            return True
    return False


def _count_values(text: bytes) -> int:
    """Count the values in a part of a body without strings, but for the last in each list."""
    compounds = text.count(b"[") + text.count(b"{") + text.count(b":")
    return text.count(b",") + COMPOUND_VALUES * compounds


def _slices(body: bytes) -> Iterator[bytes]:
    """Divide a body into slices of about `SLICE_BYTES`, none of which ends within an escape."""
    begin = 0
    while begin < len(body):
        part = body[begin : begin + SLICE_BYTES]
        begin += len(part)
        while part.endswith(b"\\") and begin < len(body):
            # The rest of a run of backslashes, and the character behind it.
            rest = body[begin : begin + SLICE_BYTES]
            run = rest[: len(rest) - len(rest.lstrip(b"\\")) + 1]
            part += run
            begin += len(run)
        yield part


def _host_name(host: bytes) -> str | None:
    """Return the name or address in a Host header, without its port; None if it is malformed."""
    parts = HOST.fullmatch(host.decode("latin-1").strip().lower())
    return parts and (parts["address"] or parts["name"])


def _key(authorization: bytes) -> bytes:
    """Return the key in an Authorization header, or empty bytes if there is none."""
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"basic":
        try:
            return b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return value.strip() if scheme.lower() == b"bearer" else b""
