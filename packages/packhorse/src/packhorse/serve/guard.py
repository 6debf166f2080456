"""What stands before the app: keys, sizes, deadlines, and how many may come in at once.

Pure ASGI and outermost: nothing of ours or of the framework runs for a request that is refused
here. A body is received whole, counted as it comes and against the clock, before the request counts
as one being worked on; so slow clients hold a connection and a few bytes, and no place of those who
are ready. The place is given back exactly once, however the request ends.

Every route is closed to those without a key, unknown ones too; only /health is open. A key comes as
`Authorization: Bearer KEY`; a browser may send it as the password of Basic authentication, which is
how the page can be opened. Where there is no key, a request must name this server in its Host
header: else a web page could reach it by a name of its own (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import binascii
import hmac
import re
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from ipaddress import ip_address
from typing import Any

from packhorse.serve import logs
from packhorse.serve.failures import ClientGone, Failure
from packhorse.serve.hosting import Hosts
from packhorse.serve.metrics import ELSEWHERE, Metrics, Seen
from packhorse.serve.settings import Settings

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health",)  # without a key
ALWAYS = ("/health", "/ready", "/metrics", "/engine")  # whatever the load
CLOSE = {"connection": "close"}
BODILESS = ("GET", "HEAD", "OPTIONS", "DELETE")
HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:@/\[\]]+?)\.?)(?::[0-9]*)?")
FOREIGN_HOST = (
    "the Host header names another host than this server's; without an API key it answers to "
    "localhost, its own address and the names given with --allow-host"
)
GONE = 499  # as it is counted; no one is left to be told


class Guard:
    """The app, guarded."""

    def __init__(self, app: App, settings: Settings, hosts: Hosts, metrics: Metrics) -> None:
        self.app, self.settings, self.hosts, self.metrics = app, settings, hosts, metrics
        self.keys = [sha256(key.encode()).digest() for key in settings.keys]
        names = (settings.host, *settings.allow_host)
        self.names = {name.lower().strip("[]").rstrip(".") for name in names}
        self.everywhere = settings.host in ("", "0.0.0.0", "::")  # bound to every address there is
        self.draining = False
        self.in_flight = 0
        self.buffered = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from its headers to the end of its answer."""
        if scope["type"] != "http":
            return await self._other(scope, receive, send)
        seen = scope["packhorse"] = Seen()
        answer = _Answer(send, seen)
        try:
            await self._answer(scope, receive, answer)
        except ClientGone:  # nobody is left to be answered
            answer.gone = True
        except Exception as error:
            if answer.gone:
                return
            seen.error = type(error).__name__
            logs.LOGGER.error("a request failed in the server", exc_info=True)
            if not answer.status:
                await _refuse(scope, answer, Failure(500, "the server made a mistake"))
        finally:
            self._record(scope, seen, GONE if answer.gone else answer.status or GONE)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lifespan goes through; web sockets are not spoken here."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        failure = self._refusal(scope)
        if failure is not None:
            return await _refuse(scope, answer, failure)
        body = b""
        if scope["method"] not in BODILESS:
            body = await self._body(receive)
            if isinstance(body, Failure):
                return await _refuse(scope, answer, body)
        self.buffered += len(body)
        try:
            await self._admit(scope, replay(body, receive), answer)
        finally:
            self.buffered -= len(body)

    async def _admit(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        if scope["path"] in ALWAYS:
            return await self.app(scope, receive, answer)
        if self.in_flight >= self.settings.max_concurrent_requests:
            return await _refuse(scope, answer, self._busy("requests are being worked on"))
        self.in_flight += 1
        self.metrics.in_flight.inc()
        try:
            await self.app(scope, receive, answer)
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.dec()

    def _refusal(self, scope: Scope) -> Failure | None:
        """What can be told from the headers alone."""
        headers = dict(scope["headers"])
        if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
            # Which of them counts is what a proxy and this server might not agree on.
            return Failure(400, "the request has more than one Authorization header", CLOSE)
        if not self.keys and not self._is_mine(headers.get(b"host")):
            return Failure(403, FOREIGN_HOST, CLOSE)
        if self.keys and scope["path"] not in OPEN and not self._known(headers):
            # A browser asks whoever opens a page; from its scripts it takes what they have.
            scheme = "Basic" if headers.get(b"sec-fetch-mode") == b"navigate" else "Bearer"
            ask = {"www-authenticate": f'{scheme} realm="packhorse"'}
            return Failure(401, "no valid API key was sent", {**ask, **CLOSE})
        if self.draining and scope["path"] not in ALWAYS:
            return Failure(503, "the server is shutting down", {**CLOSE, "retry-after": "1"})
        if scope["method"] in BODILESS:
            return None
        return self._bad_body(headers)

    def _is_mine(self, host: bytes | None) -> bool:
        """May a request without a key name this host?

        A web page can give its own name this machine's address (DNS rebinding) and then call the
        server from the browser of whoever reads it; but the name stays in its requests.
        """
        if host is None:  # no browser leaves it out
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
        return address.is_loopback or self.everywhere

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        """Compared in constant time, and with every key, so that time tells nothing."""
        given = sha256(_key(headers.get(b"authorization", b""))).digest()
        return sum([hmac.compare_digest(given, key) for key in self.keys]) > 0

    def _bad_body(self, headers: dict[bytes, bytes]) -> Failure | None:
        length = headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in headers:
            return Failure(411, "the request says no Content-Length", CLOSE)
        if length is not None and int(length) > self.settings.max_body_bytes:
            return self._too_large()
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return Failure(415, "compressed bodies are not taken; send it as it is", CLOSE)
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            return Failure(415, "the body must be JSON, with Content-Type: application/json", CLOSE)
        return None

    async def _body(self, receive: Receive) -> bytes | Failure:
        """The whole body; not a byte more than is allowed is kept, and not a second longer."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.settings.receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("the client left within its request")
                    part = message.get("body", b"")
                    size += len(part)
                    self.buffered += len(part)
                    parts.append(part)
                    if size > self.settings.max_body_bytes:
                        return self._too_large()
                    if self.buffered > self.settings.max_buffered_bytes:
                        return self._busy("bytes are being received")
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            seconds = f"{self.settings.receive_seconds:g} seconds"
            return Failure(408, f"the body did not arrive within {seconds}", CLOSE)
        finally:
            self.buffered -= size

    def _too_large(self) -> Failure:
        most = self.settings.max_body_bytes
        return Failure(413, f"the body is too large; at most {most} bytes are allowed", CLOSE)

    def _busy(self, what: str) -> Failure:
        later = max((host.retry_after() for host in self.hosts), default=1)
        return Failure(
            429, f"too many {what}; try again later", {**CLOSE, "retry-after": str(later)}
        )

    def _record(self, scope: Scope, seen: Seen, status: int) -> None:
        if status == GONE:
            self.metrics.dropped.inc()
        route = getattr(scope.get("route"), "path", ELSEWHERE)
        self.metrics.record(seen, route, status)
        logs.told(seen, route, status)


class _Answer:
    """`send`, which remembers the status and adds the headers that are known by then."""

    __slots__ = ("gone", "seen", "send", "status")

    def __init__(self, send: Send, seen: Seen) -> None:
        self.send, self.seen, self.status, self.gone = send, seen, 0, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"] = list(message.get("headers", ()))
            headers.append((b"x-content-type-options", b"nosniff"))
            if self.seen.pack:
                headers.append((b"x-packhorse-pack", self.seen.pack.encode()))
            if self.seen.ignored:
                headers.append((b"x-packhorse-ignored-fields", self.seen.ignored.encode()))
        try:
            await self.send(message)
        except (OSError, RuntimeError) as error:  # uvloop's word for a transport that was cut
            self.gone = True
            raise ClientGone("the connection was cut") from error


async def _refuse(scope: Scope, answer: _Answer, failure: Failure) -> None:
    """Answer from here; the app never sees it."""
    answer.seen.error = answer.seen.error or str(failure.status)
    body = failure.body(scope["path"])
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    headers |= failure.headers
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    await answer({"type": "http.response.start", "status": failure.status, "headers": named})
    await answer({"type": "http.response.body", "body": body})


def replay(body: bytes, receive: Receive) -> Receive:
    """The body that was received, once; then whatever the connection says."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _host_name(host: bytes) -> str | None:
    """The name or address in a Host header, without its port; None where it is malformed."""
    parts = HOST.fullmatch(host.decode("latin-1").strip().lower())
    return parts and (parts["address"] or parts["name"])


def _key(authorization: bytes) -> bytes:
    """The key in an Authorization header; nothing where there is none."""
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"basic":
        try:
            return b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return value.strip() if scheme.lower() == b"bearer" else b""
