"""Endless headers from one connection and from a thousand: memory stays, /health answers.

    python -m pytest tests/serve/test_attack.py -m slow -s

prints the measurements. Times are printed but not asserted: they depend on the machine. Memory is
compared with the same server at rest, with room for what an allocator keeps.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .processes.server import children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
ROOM = 16 * MIB
BOUND = 16_384  # bytes of headers, the default
CONNECTIONS = 1000
SECONDS = 3.0  # of each kind of attack
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
KINDS = {
    "lines": (GET, b"a:\r\n" * 16384),
    "large headers": (GET, b"x: " + b"y" * 65000 + b"\r\n"),
    "one header": (GET + b"x: ", b"y" * 65536),
    "trailers": (CHUNKED + b"0\r\n", b"a:\r\n" * 16384),
    "one trailer": (CHUNKED + b"0\r\nx: ", b"y" * 65536),
    "an extension": (CHUNKED + b"5;a=", b"y" * 65536),
    "small chunks": (CHUNKED, b"1\r\nx\r\n" * 8192),
    "requests": (b"", (GET + b"\r\n") * 1024),
}


def memory(server: Any) -> int:
    """Return the resident memory of all processes of the server."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in server.pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Measures peak memory and the response times of /health while it is open."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.most = 0
        self.times = []
        self.over = threading.Event()
        self.threads = [threading.Thread(target=work) for work in (self._memory, self._health)]

    def __enter__(self) -> Watch:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _memory(self) -> None:
        while not self.over.wait(0.005):
            self.most = max(self.most, memory(self.server))

    def _health(self) -> None:
        while not self.over.wait(0.02):
            begun = time.monotonic()
            client = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
            client.request("GET", "/health")
            assert client.getresponse().status == 200
            client.close()
            self.times.append(1e3 * (time.monotonic() - begun))

    def told(self, rest: int) -> str:
        times = f"median {statistics.median(self.times):.1f}, most {max(self.times):.1f} ms"
        return f"{(self.most - rest) / MIB:+.1f} MiB of rest, /health {times}"


def connect(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def attack(server: Any, begin: bytes, more: bytes) -> None:
    """Send until the server closes the connection, then again on another."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        with connect(server) as connection, contextlib.suppress(OSError):
            connection.sendall(begin)
            while time.monotonic() < until:
                connection.sendall(more)


@contextlib.contextmanager
def held(server: Any, first: bytes) -> Iterator[list[socket.socket]]:
    """A thousand connections that have sent this and wait."""
    opened = [connect(server) for _ in range(CONNECTIONS)]
    for connection in opened:
        connection.sendall(first)
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


def settled(server: Any, reached: Callable[[int], bool], seconds: float = 20.0) -> int:
    """Return the memory once it meets the condition, or after a generous timeout."""
    until = time.monotonic() + seconds
    while not reached(now := memory(server)) and time.monotonic() < until:
        time.sleep(0.1)
    return now


@pytest.fixture(scope="module", params=["one process", "fronts"])
def server(start, request) -> Any:
    """In one process, and over fronts: these divide the limit on connections evenly."""
    words = ["--fronts", "2", "--device", "cpu"] if request.param == "fronts" else []
    limits = ["--receive-seconds", "600", "--max-connections", "8192"]
    server = start(*limits, *words).wait_until_ready()
    kinds = children(server.popen.pid)
    server.pids = [server.popen.pid, *kinds["front"], *kinds["engine"]]
    with Watch(server):  # the first request allocates
        time.sleep(1)
    with held(server, b""):
        pass
    with Watch(server) as watch:
        time.sleep(2)
    print(f"\nat rest: {watch.told(memory(server))}")
    return server


@pytest.mark.parametrize("kind", KINDS)
def test_one_connection_after_the_other(server, kind) -> None:
    rest = settled(server, lambda _: False, 1)
    with Watch(server) as watch:
        attack(server, *KINDS[kind])
    print(f"\n{kind}: {watch.told(rest)}")
    assert watch.most - rest < ROOM


def test_a_thousand_at_the_bound(server) -> None:
    """Connections at the limit take no more memory than idle ones plus their bytes."""
    rest = settled(server, lambda _: False, 1)
    with held(server, b""), Watch(server) as idle:
        time.sleep(2)
    settled(server, lambda now: now - rest < ROOM)
    for begin in (GET + b"x: ", CHUNKED + b"0\r\nx: "):
        filled = begin + b"y" * (BOUND - len(begin) - 200)
        with held(server, filled) as opened, Watch(server) as full:
            time.sleep(2)
            open_count = _open(opened)
        after = settled(server, lambda now: now - rest < ROOM)
        summary = f"idle {(idle.most - rest) / MIB:+.1f} MiB, full: {full.told(rest)}"
        print(f"\n{open_count} connections, {summary}; after {(after - rest) / MIB:+.1f} MiB")
        assert open_count == CONNECTIONS, "a connection within the bounds was closed"
        assert full.most - rest < idle.most - rest + CONNECTIONS * BOUND + ROOM
        assert after - rest < ROOM


def test_a_thousand_that_go_on(server) -> None:
    """Connections that send more than the limit are closed at once."""
    rest = settled(server, lambda _: False, 1)
    with Watch(server) as watch:
        for _ in range(3):
            with held(server, GET) as opened:
                for connection in opened:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"a:\r\n" * 8192)
    after = settled(server, lambda now: now - rest < ROOM)
    print(f"\n3 times 1000: {watch.told(rest)}; after {(after - rest) / MIB:+.1f} MiB")
    assert watch.most - rest < CONNECTIONS * BOUND + 2 * ROOM
    assert after - rest < ROOM


def _open(connections: list[socket.socket]) -> int:
    """Return how many of the connections the server has not closed."""
    still = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            still += bool(connection.recv(1))
        except BlockingIOError:
            still += 1
        except OSError:
            pass
    return still
