"""Connections that do not hold the server up: a number of them, and a clock for each.

uvicorn waits for ever for headers that come a byte at a time, for an answer that is never read, and
for a closed connection whose last bytes nobody takes. Its protocol is extended to note since when a
connection has been in such a state, and `sweep` ends those that are in it too long. One pass a
second over all connections instead of a timer for each request: a deadline is kept to a second, and
costs a request two comparisons. Requests that are sent before the last one is answered would pile
up without a bound, too: who sends more than a few of these is cut.
"""

from __future__ import annotations

import asyncio
from typing import Any

from packhorse.serve.settings import Settings

SWEEP_SECONDS = 1.0
SECOND_LOOK = 0.1
LINGER_SECONDS = 5.0  # for the last bytes of a connection that was closed
MOST_PIPELINED = 64


def protocol(settings: Settings) -> type[asyncio.Protocol]:
    """uvicorn's protocol (over httptools where it is installed) with the clocks."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Plain
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Plain

    class Clocked(Plain):  # type: ignore[valid-type, misc]
        headers_since: float | None = None  # it sends, or should send, the headers of a request
        unread_since: float | None = None  # the answer is not read
        closing_since: float | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.headers_since = self.loop.time()
            if len(self.connections) > settings.max_connections:
                transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if len(getattr(self, "pipeline", ())) > MOST_PIPELINED:
                self.transport.abort()
            elif self.answering:
                self.headers_since = None
            elif self.headers_since is None:
                self.headers_since = self.loop.time()

        def pause_writing(self) -> None:
            self.unread_since = self.loop.time()
            super().pause_writing()

        def resume_writing(self) -> None:
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
                _over(self.headers_since, now, settings.receive_seconds)
                or _over(self.unread_since, now, settings.send_seconds)
                or _over(self.closing_since, now, LINGER_SECONDS)
            )

    return Clocked


async def sweep(connections: set[Any]) -> None:
    """End what has expired, once a second, for ever.

    Looked at twice: where this process got no time, what a client has sent meanwhile is read first.
    """
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        expired = _expired(connections)
        await asyncio.sleep(SECOND_LOOK)
        for each in expired & _expired(connections):
            each.transport.abort()


def _expired(connections: set[Any]) -> set[Any]:
    now = asyncio.get_running_loop().time()
    return {each for each in connections if each.expired(now)}


def _over(since: float | None, now: float, seconds: float) -> bool:
    return since is not None and now - since > seconds
