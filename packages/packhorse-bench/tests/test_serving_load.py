"""The load generator against stub servers whose delays are known.

A server that stalls is the control: counted from when requests were due, its stall is in the high
percentiles; counted from when they were sent, as a closed loop does, it all but disappears.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from packhorse.errors import RequestFailed
from packhorse_bench import serving_http
from packhorse_bench.serving_http import (
    LOST,
    NOT_HTTP,
    TIMEOUT,
    parse_head,
    post_message,
    request_body,
)
from packhorse_bench.serving_load import (
    Generator,
    GeneratorTeam,
    LoadJob,
    LoadReport,
    OfferedLoad,
    _due,
    merge,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
BUSY = b"HTTP/1.1 429 Too Many\r\ncontent-length: 0\r\n\r\n"
Answer = Callable[
    [int], Awaitable[bytes]
]  # number of the request → what is written; empty: hang up


class Stub:
    """Reads requests and answers each as `answer` says, requests on a connection one by one."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.seen, self.inside, self.most = answer, 0, 0, 0
        self.bodies: list[bytes] = []
        self.port = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                self.seen, self.inside = self.seen + 1, self.inside + 1
                self.most = max(self.most, self.inside)
                try:
                    response = await self.answer(self.seen)
                finally:
                    self.inside -= 1
                if not response:
                    break
                writer.write(response)
                if b"connection: close" in response.lower():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def load(answer: Answer, rate: float, seconds: float, **more: float) -> tuple[LoadReport, Stub]:
    """A job against a stub in the same event loop."""

    async def run() -> tuple[LoadReport, Stub]:
        stub = Stub(answer)
        server = await stub.start()
        job = LoadJob(stub.port, rate, seconds, **{"connections": 16, **more})  # type: ignore[arg-type]
        messages = [post_message("/", str(i).encode(), "test") for i in range(10)]
        report = await OfferedLoad(job, messages, list(range(10))).run()
        server.close()
        await asyncio.sleep(0.01)
        return report, stub

    return asyncio.run(run())


def after(seconds: float, response: bytes = OK) -> Answer:
    async def answer(number: int) -> bytes:
        await asyncio.sleep(seconds)
        return response

    return answer


def test_a_known_delay_is_the_latency() -> None:
    report, stub = load(after(0.05), 100, 1.0)
    assert report.asked == report.answered == stub.seen > 50
    assert 50 <= report.p50_ms <= report.p90_ms <= report.p99_ms <= report.worst_ms
    assert not report.errors and not report.cut and report.share > 0
    assert report.holds(report.p99_ms / 1e3) and not report.holds(0.049)
    assert report.tokens == sum(int(body) for body in stub.bodies)


def stalling(at: float, seconds: float) -> Answer:
    """Answers at once; but once, it answers nobody for some seconds."""
    begun: list[float] = []

    async def answer(number: int) -> bytes:
        begun.append(time.perf_counter())
        stall = begun[0] + at
        if stall <= begun[-1] < stall + seconds:
            await asyncio.sleep(stall + seconds - begun[-1])
        return OK

    return answer


@pytest.mark.parametrize("connections", [1, 64])
def test_a_stall_shows_however_few_connections_could_send(connections: int) -> None:
    report, _ = load(stalling(0.3, 0.7), 200, 1.5, connections=connections, timeout=5)
    # 0.7 of 1.5 seconds: nearly half of the requests were due in the stall, evenly spread over it.
    assert report.asked == report.answered > 200
    assert report.p99_ms > 600 and report.p90_ms > 400


def test_counted_from_when_it_was_sent_the_same_stall_would_not_show() -> None:
    report, _ = load(stalling(0.3, 0.7), 0, 1.5, connections=1)  # asks when it was answered
    assert report.worst_ms > 600 and report.asked > 100
    assert report.p90_ms < 300  # the control: one late request among all these


def test_arrivals_are_random_at_the_rate_and_drawn_beforehand() -> None:
    due = _due(LoadJob(0, 200, 50, seed=3))
    gaps = np.diff(due)
    assert len(due) == pytest.approx(10_000, rel=0.05) and due[-1] < 50
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as of an exponential
    assert np.array_equal(due, _due(LoadJob(0, 200, 50, seed=3)))
    assert not np.array_equal(due[:100], _due(LoadJob(0, 200, 50, seed=4))[:100])


def test_refusals_are_counted_and_a_rate_with_them_does_not_hold() -> None:
    async def answer(number: int) -> bytes:
        return BUSY if number == 20 else OK

    report, stub = load(answer, 200, 1.0)
    assert report.errors == {"429": 1} and report.answered == stub.seen - 1
    assert report.worst_ms == math.inf and not report.holds(60)


def test_requests_without_an_answer_time_out_and_the_rest_goes_on() -> None:
    async def answer(number: int) -> bytes:
        await asyncio.sleep(30 if number % 10 == 0 else 0)
        return OK

    report, stub = load(answer, 100, 1.0, connections=4, timeout=0.4)
    assert set(report.errors) == {TIMEOUT} and report.errors[TIMEOUT] >= stub.seen // 10
    assert report.answered + report.errors[TIMEOUT] == report.asked
    assert report.p99_ms == math.inf and report.p50_ms < math.inf


def test_connections_that_are_closed_are_opened_again() -> None:
    closing = OK.replace(b"Content", b"Connection: close\r\nContent")
    report, stub = load(after(0, closing), 100, 0.5, connections=2)
    assert report.answered == report.asked == stub.seen and not report.errors


def test_a_request_that_met_a_closing_connection_is_sent_again_but_once() -> None:
    async def now_and_then(number: int) -> bytes:
        return b"" if number % 10 == 1 else OK

    report, stub = load(now_and_then, 100, 0.5, connections=1)
    assert report.answered == report.asked < stub.seen and not report.errors
    report, stub = load(after(0, b""), 50, 0.4)
    assert report.errors == {LOST: report.asked} and stub.seen == 2 * report.asked


@pytest.mark.parametrize("response", [b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nhello"])
def test_what_is_no_answer_fails(response: bytes) -> None:
    report, _ = load(after(0, response), 50, 0.2)
    assert report.errors == {NOT_HTTP: report.asked} and report.answered == 0


def test_answers_may_come_in_pieces() -> None:
    async def run() -> LoadReport:
        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(1000):
                for byte in OK:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0)
            writer.close()

        server = await asyncio.start_server(connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        report = await OfferedLoad(
            LoadJob(port, 50, 0.3, connections=2), [post_message("/", b"{}", "x")], [1]
        ).run()
        server.close()
        await asyncio.sleep(0.01)
        return report

    report = asyncio.run(run())
    assert report.answered == report.asked > 0 and not report.errors


def test_a_hopeless_rate_is_given_up_early() -> None:
    begun = time.monotonic()
    report, _ = load(after(0.5), 50, 60, limit=0.1, timeout=5)
    assert report.cut and not report.holds(10) and time.monotonic() - begun < 20
    assert report.p99_ms == math.inf and report.seconds < 20


def test_a_port_that_refuses_connections() -> None:
    async def run() -> LoadReport:
        server = await Stub(after(0)).start()
        port = server.sockets[0].getsockname()[1]
        server.close()
        return await OfferedLoad(LoadJob(port, 50, 0.3, timeout=0.3), [b"x"], [1]).run()

    report = asyncio.run(run())
    assert report.errors == {TIMEOUT: report.asked} and report.answered == 0


def test_a_closed_loop_keeps_every_connection_busy_and_no_more() -> None:
    report, stub = load(after(0.05), 0, 0.5, connections=4)
    assert stub.most == 4 and report.answered == stub.seen >= 8
    assert report.rate == pytest.approx(report.answered / report.seconds)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 12", ("200", 12, False)),
        (b"HTTP/1.1 503\r\ncontent-length:0\r\nConnection: Close", ("503", 0, True)),
    ],
)
def test_heads(head: bytes, expected: tuple[str, int, bool]) -> None:
    assert parse_head(head) == expected


@pytest.fixture(scope="module")
def stub_port() -> Iterator[int]:
    """A stub in another thread, for a generator in another process."""
    loop, stub = asyncio.new_event_loop(), Stub(after(0.02))
    thread = Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(stub.start(), loop).result(10)
    yield stub.port
    loop.call_soon_threadsafe(server.close)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_generator_has_a_process_of_its_own(stub_port: int, tmp_path: Path) -> None:
    with Generator(["one", "two texts"], [3, 4], tmp_path) as generator:
        job = LoadJob(stub_port, 50, 0.5, connections=8)
        report = generator.run(job)
        assert report.answered == report.asked > 5 and report.p50_ms >= 20
        assert 3 * report.answered <= report.tokens <= 4 * report.answered
        with generator.burning(0.3):  # and at once no more
            pass
        with generator.burning(0.2):
            time.sleep(0.3)
        assert generator.run(job).answered > 0
        process = generator._process
    assert process.poll() is not None


@pytest.mark.slow
def test_a_warm_up_does_not_count() -> None:
    """A server that refuses requests in the first moments has no errors after a warm-up."""

    def starting() -> Answer:
        begun: list[float] = []

        async def answer(number: int) -> bytes:
            begun.append(time.perf_counter())
            await asyncio.sleep(0.01)
            return BUSY if begun[-1] < begun[0] + 0.1 else OK

        return answer

    for rate in (0, 50):
        report, stub = load(starting(), rate, 0.5, warm=0.8, connections=4, timeout=5)
        assert 0 < report.answered == report.asked < stub.seen and not report.errors
        control, _ = load(starting(), rate, 0.5, connections=4, timeout=5)
        assert "429" in control.errors


def test_a_team_divides_a_job(stub_port: int, tmp_path: Path) -> None:
    texts = ["one", ["two", "texts"], "three"]
    with (
        Generator(texts, [3, 8, 5], tmp_path) as first,
        Generator(texts, [3, 8, 5], tmp_path) as second,
    ):
        team = GeneratorTeam([first, second])
        job = LoadJob(stub_port, 0, 0.4, connections=3, warm=0.1, first=1, count=1)
        report = team.run(job)
        assert report.answered > 0 and report.tokens == 8 * report.answered
        assert 20 <= report.p50_ms <= report.p99_ms <= report.worst_ms and report.share > 0
        assert report.rate == pytest.approx(report.answered / 0.4)
        # One connection is the work of one generator; the other is not asked.
        assert team.run(LoadJob(stub_port, 0, 0.1, connections=1)).answered > 0
        assert team.run(LoadJob(stub_port, 60, 0.5, connections=4)).asked > 5


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_generator_stays_on_its_core(stub_port: int, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with Generator(["one"], [3], tmp_path, core) as generator:
        generator.run(LoadJob(stub_port, 0, 0.05, connections=1))
        assert os.sched_getaffinity(generator._process.pid) == {core}


def test_reports_of_several_generators_are_one() -> None:
    def report(latencies: list[float], **more: object) -> LoadReport:
        counts = {"asked": 4, "answered": 3, "seconds": 2.0, "tokens": 30, "share": 0.1}
        figures = {"p50_ms": 0.0, "p90_ms": 0.0, "p99_ms": 0.0, "worst_ms": max(latencies)}
        both = {**counts, **figures, "late_ms": 1.0, "latencies_ms": latencies, **more}
        return LoadReport(**both)  # type: ignore[arg-type]

    slow = report([5.0, 6.0, 7.0, math.inf], share=0.7, errors={"429": 1})
    merged = merge([report([1.0, 2.0, 3.0, 4.0], errors={"429": 2}), slow])
    assert (merged.asked, merged.answered, merged.tokens, merged.seconds) == (8, 6, 60, 2.0)
    assert (merged.p50_ms, merged.p99_ms, merged.share) == (5.0, math.inf, 0.7)
    assert merged.errors == {"429": 3} and merged.rate == 3


def test_bodies_of_both_dialects() -> None:
    assert request_body("/v1/embeddings", "m", "one") == b'{"model": "m", "input": "one"}'
    assert request_body("/prefix/embed", "m", ["a", "b"]) == b'{"inputs": ["a", "b"]}'


def test_a_server_that_takes_no_connections_is_named(tmp_path: Path, monkeypatch) -> None:
    """A listening port whose queue is full answers no handshake, and refuses none."""
    monkeypatch.setattr(serving_http, "OPEN_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        port = silent.getsockname()[1]
        job = LoadJob(port, 0.0, 0.1, connections=16)
        with pytest.raises(RequestFailed, match=r"only \d of 16 connections to port \d+ could be"):
            asyncio.run(OfferedLoad(job, [b"x"], [1]).run())


def test_a_generator_says_what_it_is_doing(stub_port: int, tmp_path: Path) -> None:
    statuses: list[str] = []
    with Generator(["one"], [3], tmp_path) as generator:
        report = generator.run(LoadJob(stub_port, 0.0, 1.5, connections=2), statuses.append)
        assert generator.status == statuses[-1]
    assert report.answered > 0 and statuses
    words = r"sending: \d+ requests have ended, [012] have no answer; 2 of 2 connections"
    assert re.fullmatch(words, statuses[0])


CUT_SHORT = """
import signal
from packhorse_bench.serving_load import _write
signal.signal(signal.SIGALRM, lambda number, frame: None)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
_write({"latencies_ms": [1.0] * 200_000})
"""


def test_a_long_report_arrives_whole_though_signals_cut_its_writes() -> None:
    # A write to a full pipe ends early when a signal comes, and an unbuffered stdout is content.
    command = [sys.executable, "-c", CUT_SHORT]
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=unbuffered) as process:
        assert process.stdout is not None
        select.select([process.stdout], [], [])
        time.sleep(0.3)  # meanwhile the pipe is full and signals come
        answer = json.loads(process.stdout.read())
    assert len(answer["latencies_ms"]) == 200_000


def test_a_generator_that_does_not_end_is_reported(stub_port: int, tmp_path: Path) -> None:
    with Generator(["one"], [3], tmp_path) as generator:
        generator.start(LoadJob(stub_port, 0.0, 60.0, connections=1))
        generator._until = time.monotonic()  # its time is over
        with pytest.raises(RequestFailed, match="did not end in time; its last message: starting"):
            generator.report()
        generator._process.wait()


def test_a_generator_that_died_is_reported(tmp_path: Path) -> None:
    with Generator(["one"], [3], tmp_path) as generator:
        generator._process.kill()
        generator._process.wait()
        with pytest.raises(RequestFailed, match="generator ended"):
            generator.run(LoadJob(1, 1, 0.1))
