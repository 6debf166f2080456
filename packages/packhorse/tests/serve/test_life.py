"""The server process over real sockets: slow clients, many connections, signals, a dead engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import selectors
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

BODY = json.dumps({"inputs": "one two three"}).encode()
HEADERS = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
REQUEST = HEADERS + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY

# The engine ends at a batch of 13 tokens, as it does when the device is lost.
DIES = """
from packhorse.runtime.backend import TorchBackend
plain = TorchBackend.__call__
def call(self, packed, *given):
    if len(packed.ids) == 13:
        raise SystemExit("lost")
    return plain(self, packed, *given)
TorchBackend.__call__ = call
"""
# Batches of more than a thousand tokens wait for a file.
WAITS = """
import os, time
from packhorse.runtime.backend import TorchBackend
plain = TorchBackend.__call__
def call(self, packed, *given):
    while len(packed.ids) > 1000 and not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)
    return plain(self, packed, *given)
TorchBackend.__call__ = call
"""
# A limit on open files below --max-connections, as many systems have by default.
NARROW = """
import resource
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
"""
# A batch takes 0.3 s: about ten of the requests below per second.
SLOW = """
import time
from packhorse.runtime.backend import TorchBackend
plain = TorchBackend.__call__
def call(self, *given):
    time.sleep(0.3)
    return plain(self, *given)
TorchBackend.__call__ = call
"""
# Loading takes forever.
LOADS = """
import sys, time
from packhorse.serve import hosting
def open(settings):
    print("{}", file=sys.__stdout__, flush=True)
    time.sleep(60)
hosting.open_models = open
"""


@pytest.fixture(scope="module")
def go(tmp_path_factory) -> Path:
    """A file that batches wait for."""
    return tmp_path_factory.mktemp("go") / "go"


@pytest.fixture(scope="module")
def processes(start, go) -> dict[str, Any]:
    """All processes of this file, started together, because importing torch takes longest."""
    short = ["--receive-seconds", "1", "--send-seconds", "1", "--idle-seconds", "1"]
    short += ["--max-connections", "250", "--max-queue-tokens", "2000000"]
    sockets = {
        "busy": start(*short, before=NARROW + WAITS, GO=str(go)),
        "dies": start(before=DIES),
        "loads": start(before=LOADS),
    }
    return sockets


@pytest.fixture(scope="module")
def busy(processes):
    return processes["busy"].wait_until_ready()


def connect(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def reset(connection: socket.socket) -> None:
    """Close the connection with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def closed_within(sockets: list[socket.socket], seconds: float) -> int:
    """Return how many connections the server closes in that time."""
    until = time.monotonic() + seconds
    closed = 0
    for connection in sockets:
        connection.settimeout(max(0.01, until - time.monotonic()))
        try:
            while connection.recv(65536):
                pass
            closed += 1
        except TimeoutError:
            pass
        except OSError:
            closed += 1
    return closed


def test_it_serves(busy) -> None:
    response = httpx.post(f"{busy.url}/embed", json={"inputs": ["one", "two"]})
    assert response.status_code == 200
    assert len(response.json()) == 2
    assert "x-packhorse-pack" in response.headers
    assert "server" not in response.headers


def test_slow_clients_are_closed_while_good_ones_are_served(busy) -> None:
    """120 clients at once that send headers or bodies a byte at a time, half, or nothing."""
    slow = [connect(busy) for _ in range(120)]
    for number, connection in enumerate(slow):
        connection.sendall(
            [b"", b"P", HEADERS, HEADERS + b"Content-Length: 9\r\n\r\n{"][number % 4]
        )
    begun = time.monotonic()
    times = []
    while time.monotonic() - begun < 1.5:
        sent = time.monotonic()
        assert httpx.post(f"{busy.url}/embed", json={"inputs": "good"}).status_code == 200
        times.append(time.monotonic() - sent)
        for connection in slow[1::4]:
            with contextlib.suppress(OSError):
                connection.sendall(b"O")
    assert closed_within(slow, 40.0) == len(slow)
    assert max(times) < 20.0
    for connection in slow:
        connection.close()


def test_a_slow_body_gets_408(busy) -> None:
    with connect(busy) as slow:
        slow.sendall(HEADERS + b"Content-Length: 9\r\n\r\n{")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")


def test_an_idle_connection_is_closed(busy) -> None:
    with connect(busy) as idle:
        idle.sendall(REQUEST)
        assert idle.recv(100).startswith(b"HTTP/1.1 200")
        assert closed_within([idle], 40.0) == 1


def test_an_answer_nobody_reads_is_given_up(busy) -> None:
    """Answers that are never read, until no buffer takes any more."""
    texts = json.dumps({"inputs": ["one"] * 32}).encode()
    request = HEADERS + b"Content-Length: %d\r\n\r\n" % len(texts) + texts
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", busy.port))
    begun = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - begun < 150:
            deaf.sendall(request * 2)
            time.sleep(0.02)
    deaf.close()


def test_requests_that_wait_for_no_answer_do_not_pile_up(busy) -> None:
    with connect(busy) as flood, pytest.raises(OSError):
        for _ in range(2000):
            flood.sendall(REQUEST * 100)


def test_clients_that_vanish_leave_no_trace(busy) -> None:
    for sent in (HEADERS + b"Content-Length: 90\r\n\r\n{", REQUEST, REQUEST[:-3]):
        for _ in range(10):
            gone = connect(busy)
            gone.sendall(sent)
            reset(gone)
    half = connect(busy)
    half.sendall(REQUEST[:40])
    half.shutdown(socket.SHUT_WR)
    assert closed_within([half], 40.0) == 1
    half.close()
    until = time.monotonic() + 60
    while "packhorse_in_flight 0.0" not in httpx.get(f"{busy.url}/metrics").text:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_more_connections_than_allowed_are_closed_at_once(busy) -> None:
    sockets = [connect(busy) for _ in range(300)]
    order = []  # in which they are closed
    with selectors.DefaultSelector() as open_sockets:
        for number, connection in enumerate(sockets):
            open_sockets.register(connection, selectors.EVENT_READ, number)
        while open_sockets.get_map():
            events = open_sockets.select(timeout=30)
            assert events, "they stay open"
            for key, _ in events:
                order.append(key.data)
                open_sockets.unregister(key.fileobj)
    # The others have their second to send headers. Connections of earlier tests may still count.
    assert min(order[:50]) >= 200
    for connection in sockets:
        connection.close()
    assert httpx.get(f"{busy.url}/health").status_code == 200


def test_many_tiny_chunks_do_not_stop_the_others(busy) -> None:
    """A body of 65,537 chunks of one byte."""
    with connect(busy) as flood:
        flood.sendall(HEADERS + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            flood.sendall(b"1\r\n \r\n" * 65_537 + b"0\r\n\r\n")
            answer = flood.recv(4096)
        except OSError:
            answer = b""
        assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 408")
    assert httpx.get(f"{busy.url}/health", timeout=20).status_code == 200


def test_sigterm_answers_what_is_in_flight(busy, go) -> None:
    """The last test of that process: a hundred requests are in flight, and all are answered."""
    body = {"inputs": ["one two three four five six " * 6] * 32}

    async def work() -> tuple[list[int], int, int]:
        limits = httpx.Limits(max_connections=150)
        async with httpx.AsyncClient(base_url=busy.url, limits=limits, timeout=60) as client:
            tasks: list[asyncio.Future[httpx.Response]] = []
            figures = ""
            while len(tasks) < 100:  # ten at a time: a body has a second to arrive
                calls = [client.post("/embed", json=body) for _ in range(min(10, 100 - len(tasks)))]
                tasks += [asyncio.ensure_future(call) for call in calls]
                while f"packhorse_in_flight {len(tasks)}.0" not in figures:
                    for task in [task for task in tasks if task.done()]:
                        # On a busy machine a body may not arrive in its second.
                        assert task.result().status_code == 408, task.result().text
                        tasks.remove(task)
                    await asyncio.sleep(0.01)
                    figures = (await client.get("/metrics")).text
            busy.popen.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            health = (await client.get("/health")).status_code
            new = await client.post("/embed", json={"inputs": "late"})
            assert new.headers["connection"] == "close"
            go.touch()
            answers = await asyncio.gather(*tasks)
            return [response.status_code for response in answers], health, new.status_code

    assert asyncio.run(work()) == ([200] * 100, 503, 503)
    assert busy.popen.wait(60) == 0
    assert "draining: 100 requests" in busy.log()


def test_an_engine_that_dies_ends_the_process(processes) -> None:
    server = processes["dies"].wait_until_ready()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.post("/embed", json={"inputs": "one"}).status_code == 200
        lost = client.post("/embed", json={"inputs": "one " * 11})
        assert lost.status_code == 503
        statuses = [client.get(path).status_code for path in ("/health", "/ready")]
    assert statuses == [503, 503]
    assert server.popen.wait(60) == 70
    assert "the engine died" in server.log()


def test_sigterm_while_loading_ends_at_once(processes) -> None:
    server = processes["loads"]
    assert server.popen.stdout.readline() == "{}\n"
    assert server.end(timeout=30) == 0  # loading would take a minute


@pytest.mark.parametrize(
    ("limits", "now", "warns"),
    [
        ((64, 5000), 556, False),
        ((64, -1), 556, False),  # no limit
        ((64, 300), 300, True),
        ((1024, 5000), 1024, False),
        ((-1, -1), -1, False),
    ],
)
def test_files_for_as_many_connections_as_are_allowed(
    monkeypatch, caplog, limits: tuple[int, int], now: int, warns: bool
) -> None:
    """With a fake system call: a test must not change the limits of its process."""
    from packhorse.serve import life, logs
    from packhorse.serve.settings import ServeSettings

    limits_set = [limits]
    monkeypatch.setattr(logs.LOGGER, "propagate", True)
    monkeypatch.setattr(life.resource, "getrlimit", lambda kind: limits_set[-1])
    monkeypatch.setattr(life.resource, "setrlimit", lambda kind, value: limits_set.append(value))
    life.raise_file_limit(ServeSettings(max_connections=300))
    assert limits_set[-1] == (now, limits[1])
    assert ("only 300 files" in caplog.text) is warns


@pytest.mark.slow
def test_a_second_signal_ends_at_once(start) -> None:
    server = start("--max-queue-tokens", "2000000").wait_until_ready()
    sockets = [connect(server) for _ in range(20)]
    body = json.dumps({"inputs": ["one two three " * 60] * 32}).encode()
    for connection in sockets:
        connection.sendall(HEADERS + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    time.sleep(0.3)
    server.popen.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert server.popen.poll() is None
    begun = time.monotonic()
    assert server.end(signal.SIGTERM) == 143
    assert time.monotonic() - begun < 1.0
    for connection in sockets:
        connection.close()


def memory(pid: int) -> int:
    """Return the resident memory of the process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _ask(server: Any, request: bytes) -> bytes:
    """Return the whole answer over a new connection: a pool would add its own waiting time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


async def _open_loop(server: Any, request: bytes, rate: float, seconds: float) -> list[bytes]:
    """Send requests at a fixed rate, whether or not earlier ones were answered."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    tasks = []
    while (now := loop.time() - begun) < seconds:
        due = int(now * rate) - len(tasks)
        tasks += [asyncio.ensure_future(_ask(server, request)) for _ in range(due)]
        await asyncio.sleep(0.01)
    return await asyncio.gather(*tasks)


@pytest.mark.slow
def test_ten_times_too_much(start) -> None:
    """For a minute: only 200 and 429, no growth of memory, normal again at once."""
    server = start("--max-queue-tokens", "6000", before=SLOW).wait_until_ready()
    body = json.dumps({"inputs": ["one two three four five six " * 12] * 8}).encode()
    request = HEADERS + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def work() -> tuple[list[bytes], int, float]:
        await _open_loop(server, request, 100, 5)  # buffers and pools grow once
        before = memory(server.popen.pid)
        responses = await _open_loop(server, request, 100, 60)
        begun = time.monotonic()
        assert (await _ask(server, request)).startswith(b"HTTP/1.1 200")
        return responses, before, time.monotonic() - begun

    responses, before, recovered = asyncio.run(work())
    after = memory(server.popen.pid)
    figures = httpx.get(f"{server.url}/metrics").text
    assert recovered < 5
    assert {response[9:12] for response in responses} == {b"200", b"429"}
    assert sum(response[9:12] == b"200" for response in responses) > 150
    longest = re.findall(r'request_seconds_bucket{le="(?:5.0|\+Inf)"} (\S+)', figures)
    assert longest[0] == longest[1], "a request took more than five seconds"
    refused = [response for response in responses if response[9:12] == b"429"]
    assert all(re.search(rb"\r\nretry-after: [1-9]", response) for response in refused)
    assert after - before < 64 << 20
    assert server.end() == 0


def slow_client(server: Any, kind: int) -> socket.socket:
    """Open a client with endless headers, endless body, unread answer, silence, or a reset."""
    deaf = json.dumps({"inputs": ["one"] * 4}).encode()
    begun = HEADERS + b"Content-Length: 90\r\n\r\n{"
    unread = (HEADERS + b"Content-Length: %d\r\n\r\n" % len(deaf) + deaf) * 2
    connection = socket.socket()
    if kind == 2:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall([b"POST /embed HTTP/1.1\r\nX: ", begun, unread, begun, begun][kind])
    if kind == 3:
        connection.shutdown(socket.SHUT_WR)
    if kind == 4:
        reset(connection)
    return connection


@pytest.mark.slow
def test_a_thousand_slow_clients(start) -> None:
    """Two hundred of each kind at once; those that send go on with a byte per second."""
    limits = ["--receive-seconds", "5", "--send-seconds", "5", "--idle-seconds", "5"]
    limits += ["--max-queue-tokens", "2000000"]
    server = start(*limits).wait_until_ready()
    slow = [slow_client(server, number % 5) for number in range(1000)]
    begun = time.monotonic()
    last_check = time.monotonic()
    times = []
    while time.monotonic() - begun < 8:
        sent = time.monotonic()
        response = httpx.post(f"{server.url}/embed", json={"inputs": "good"}, timeout=30)
        assert response.status_code == 200
        times.append(time.monotonic() - sent)
        if time.monotonic() - last_check > 1:
            last_check += 1
            for connection in [*slow[0::5], *slow[1::5]]:
                with contextlib.suppress(OSError):
                    connection.send(b" ")
    still = [connection for number, connection in enumerate(slow) if number % 5 < 4]
    assert closed_within(still, 12.0) == 800
    for connection in slow:
        connection.close()
    assert sorted(times)[len(times) // 2] < 0.5
    assert "packhorse_in_flight 0.0" in httpx.get(f"{server.url}/metrics").text
    assert "Traceback" not in server.log() and "failed in the server" not in server.log()
    assert server.end() == 0


@pytest.mark.slow
def test_the_default_model_and_a_port_that_is_taken(start, minilm) -> None:
    server = start("--model", "sentence-transformers/all-MiniLM-L6-v2").wait_until_ready()
    response = httpx.post(f"{server.url}/embed", json={"inputs": "one"}, timeout=30)
    assert len(response.json()[0]) == 384
    second = start("--port", str(server.port))
    assert second.popen.wait(240) == 2
    assert "cannot listen" in second.log()
    os.kill(server.popen.pid, signal.SIGINT)
    assert server.popen.wait(120) == 0
