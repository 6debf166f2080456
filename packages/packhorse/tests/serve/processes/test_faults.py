"""What happens to requests when a process dies or memory is full, while clients keep asking.

Every vector that arrives is compared with the library's. A request that fails must have been in
the hands of the process that died, and afterwards nothing of that process is left: no process, no
open file, no mapped memory.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import packhorse

from .server import Load, Question, children, holdings, owners, questions, total, wait_for

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="fronts share memory by memfd, which is Linux's"
)
# Shared memory of 4 MiB in place of 256, so that it is full soon; no end after three deaths.
SMALL = """
from packhorse.serve.processes import supervisor
supervisor.ARENA_BYTES = 4 << 20
supervisor.QUICK_SECONDS = 0.0
"""
# States of all tokens: about 2 MiB of results, so that two fit into the memory of a front.
LARGE = {"inputs": ["w1 w2 w3 w4 w5 " * 25] * 32}
HEADERS = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LOST = "the engine that ran this request ended; another is being started"


@pytest.fixture(scope="module")
def asked(checkpoint_folder) -> list[Question]:
    return questions(packhorse.load(checkpoint_folder, device="cpu"))


@pytest.fixture(scope="module")
def server(start) -> Any:
    """Two fronts and two engines."""
    words = ["--fronts", "2", "--devices", "cpu", "--devices", "cpu"]
    words += ["--receive-seconds", "1", "--send-seconds", "1", "--idle-seconds", "1"]
    return start(*words, before=SMALL).wait_until_ready()


@pytest.fixture(scope="module")
def rest(server, asked) -> dict[str, list[tuple[int, int]]]:
    """What all processes hold when nobody is connected."""
    with Load(server.port, asked):
        pass
    return settled(server)


def settled(server: Any) -> dict[str, list[tuple[int, int]]]:
    """What all processes hold, once two looks a moment apart find the same."""
    wait_for(lambda: total(server, "packhorse_in_flight") == 0)

    def look() -> Any:
        first = holdings(server.popen.pid)
        time.sleep(1.2)  # the connection of the question above is closed meanwhile
        return first if first == holdings(server.popen.pid) else None

    return wait_for(look)


def check_rest(server: Any, rest: dict[str, list[tuple[int, int]]]) -> None:
    """Fail unless all processes come to hold what they held before."""
    last: Any = None

    def same() -> bool:
        nonlocal last
        last = holdings(server.popen.pid)
        return last == rest

    try:
        wait_for(same, 30)
    except AssertionError:
        raise AssertionError(f"{last} is left of {rest}") from None
    assert total(server, "packhorse_in_flight") == 0
    assert total(server, "packhorse_runner_waiting_tokens") == 0


def test_wrong_vectors_and_what_is_left_would_be_noticed(server, asked, rest) -> None:
    """The controls of all tests here."""
    exchanged = [Question(asked[0].body, 0.99 * asked[0].vectors)]
    with pytest.raises(AssertionError, match="wrong vectors"), Load(server.port, exchanged):
        pass
    with socket.create_connection(("127.0.0.1", server.port)):
        wait_for(lambda: holdings(server.popen.pid) != rest)
    check_rest(server, rest)


@pytest.mark.parametrize("suspended", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_engine_that_is_killed_loses_only_its_own(server, asked, rest, suspended: bool) -> None:
    """Suspended for a moment before, so that it certainly has requests."""
    victim, survivor = children(server.popen.pid)["engine"]
    with Load(server.port, asked) as load:
        if suspended:
            os.kill(victim, signal.SIGSTOP)
            load.wait_for_answers(20)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: _replaced(server, "engine", victim))
        load.check_served()
    # The other engine went on, so nobody heard that there is none; a client had one request.
    assert {refusal.message for refusal in load.refusals} <= {LOST}
    assert load.statuses.keys() <= {200, 503} and load.statuses[503] <= len(load.threads)
    assert load.statuses[503] or not suspended
    assert survivor in children(server.popen.pid)["engine"]
    check_rest(server, rest)


def test_a_front_that_is_killed_loses_only_its_own(server, asked, rest) -> None:
    victim, survivor = children(server.popen.pid)["front"]
    before = total(server, "packhorse_requests_total")
    with Load(server.port, asked) as load:
        connections = wait_for(lambda: _both_have_clients(server, victim, survivor))
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: _replaced(server, "front", victim))
        load.check_served()
    assert load.statuses.keys() <= {200, "lost"} and load.lost
    theirs = {port for port, pid in connections.items() if pid == survivor}
    assert not theirs.intersection(load.lost), "a connection of the other front was lost"
    assert survivor in children(server.popen.pid)["front"]
    assert total(server, "packhorse_requests_total") >= before, "a counter went back"
    check_rest(server, rest)


def _both_have_clients(server: Any, *fronts: int) -> dict[int, int] | None:
    connections = owners(server.port, fronts)
    return connections if set(connections.values()) == set(fronts) else None


def _replaced(server: Any, kind: str, victim: int) -> bool:
    """Whether two processes of this kind run, without the victim; engines with their models."""
    pids = children(server.popen.pid)[kind]
    if victim in pids or len(pids) < 2:
        return False
    return kind == "front" or total(server, "packhorse_up") == 2


def test_shared_memory_that_is_full_refuses_and_empties(server, asked, rest) -> None:
    """The engines are suspended, so that blocks stay taken until the memory is full."""
    engines = children(server.popen.pid)["engine"]
    refused: list[Any] = []

    def post(_: int) -> int:
        response = httpx.post(f"{server.url}/embed_all", json=LARGE, timeout=120)
        if response.status_code == 429:
            refused.append(response)
        return response.status_code

    with Load(server.port, asked) as load, ThreadPoolExecutor(24) as pool:
        for engine in engines:
            os.kill(engine, signal.SIGSTOP)
        try:
            answers = [pool.submit(post, place) for place in range(24)]
            wait_for(lambda: refused)
        finally:
            for engine in engines:
                os.kill(engine, signal.SIGCONT)
        statuses = Counter(answer.result() for answer in answers)
        load.check_served()
    assert statuses.keys() == {200, 429}, statuses
    for response in refused:
        assert "memory for requests under way is full" in response.json()["error"]
        assert int(response.headers["retry-after"]) >= 1
    assert load.statuses.keys() <= {200, 429}
    # All blocks came back: each front has room for a request of half of its memory, twice.
    for _ in range(8):
        assert httpx.post(f"{server.url}/embed_all", json=LARGE, timeout=60).status_code == 200
    check_rest(server, rest)


def test_clients_that_stall_hold_up_nobody(server, asked, rest) -> None:
    """Answers that nobody reads, bodies that never end, headers that never end."""
    connections = [connect(server) for _ in range(12)]
    with Load(server.port, asked) as load:
        for place, connection in enumerate(connections):
            if place % 3 == 0:
                connection.sendall(HEADERS[:-2])
            elif place % 3 == 1:
                connection.sendall(HEADERS + b"Content-Length: 9\r\n\r\n{")
            else:
                ask_until_stuck(connection)
        for place, connection in enumerate(connections):
            begun = receive_all(connection)[:12]
            assert begun in ([b"", b"HTTP/1.1 408", b"HTTP/1.1 200"][place % 3], b"")
            connection.close()
        load.check_served()
    assert load.statuses.keys() == {200}
    check_rest(server, rest)


@pytest.mark.parametrize(
    ("last", "pause"),
    [(b"", 0.05), pytest.param(b"Connection: close\r\n", 0.2, marks=pytest.mark.slow)],
)
def test_a_client_that_reads_slowly_gets_all_of_its_answer(
    server, rest, last: bytes, pause: float
) -> None:
    """It takes longer than --send-seconds, also where the connection is closed afterwards."""
    body = json.dumps({**LARGE, "inputs": [*LARGE["inputs"]] * 2}).encode()
    head = HEADERS.replace(b"/embed", b"/embed_all") + last
    with connect(server, 1 << 18) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        received = client.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 200")
        size = int(re.search(rb"content-length: (\d+)", received)[1])
        size += received.index(b"\r\n\r\n") + 4
        while len(received) < size and (part := client.recv(1 << 17)):
            received += part
            time.sleep(pause)
    assert len(received) == size
    check_rest(server, rest)


def connect(server: Any, size: int = 4096) -> socket.socket:
    """Open a connection that takes little of what is sent to it before it is read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    connection.connect(("127.0.0.1", server.port))
    connection.settimeout(60)
    return connection


def ask_until_stuck(connection: socket.socket) -> None:
    """Send requests with large answers and read none, until no buffer takes any more."""
    body = json.dumps({"inputs": ["w1"] * 32}).encode()
    request = HEADERS + b"Content-Length: %d\r\n\r\n" % len(body) + body
    connection.settimeout(0.2)
    try:
        for _ in range(64):  # as many as may wait on a connection
            connection.sendall(request)
    except TimeoutError:
        pass
    connection.settimeout(60)


def receive_all(connection: socket.socket) -> bytes:
    """Return all that arrives until the server closes the connection."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_cancels_leave_nothing_behind(server, asked, rest, count: int) -> None:
    """Clients reset their connections at any moment of a request, while others are served."""
    before = total(server, "packhorse_requests_total")
    chance = random.Random(count)

    def cancel(seed: int) -> None:
        body = json.dumps(LARGE if seed % 20 == 0 else {"inputs": ["w1 w2"] * 8}).encode()
        path = b"/embed_all" if seed % 20 == 0 else b"/embed"
        head = HEADERS.replace(b"/embed", path) + b"Content-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall((head + body)[: chance.randint(1, 4 * len(head + body))])
            time.sleep(0.01 * chance.random())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with Load(server.port, asked, clients=4) as load, ThreadPoolExecutor(8) as pool:
        list(pool.map(cancel, range(count)))
        load.check_served()
    assert load.statuses.keys() <= {200, 429}
    # All that began is counted, and all blocks of memory came back.
    assert total(server, "packhorse_requests_total") >= before + count // 4 + load.statuses[200]
    for _ in range(4):
        assert httpx.post(f"{server.url}/embed_all", json=LARGE, timeout=60).status_code == 200
    check_rest(server, rest)


@pytest.mark.slow
def test_every_process_is_replaced_under_load(server, asked, rest) -> None:
    """A rolling restart: fronts drain when they get SIGTERM, engines are ended one by one."""
    with Load(server.port, asked) as load:
        for kind, number in (("front", signal.SIGTERM), ("engine", signal.SIGKILL)) * 2:
            for victim in children(server.popen.pid)[kind]:
                os.kill(victim, number)
                wait_for(lambda victim=victim, kind=kind: _replaced(server, kind, victim))
                load.check_served()
    assert load.statuses.keys() <= {200, 503, "lost"}
    assert {refusal.message for refusal in load.refusals} <= {LOST, "the server is shutting down"}
    check_rest(server, rest)


def test_it_ends_without_a_trace(server, asked, rest) -> None:
    """The last test of this server: a drain under load."""
    everyone = sum(children(server.popen.pid).values(), [server.popen.pid])
    with Load(server.port, asked) as load:
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(120) == 0
        load.stopped.set()
    assert load.statuses.keys() <= {200, 503, "lost"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in everyone)
    assert "Traceback" not in server.log()
