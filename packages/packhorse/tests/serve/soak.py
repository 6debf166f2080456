"""Hours of good and bad clients at once against one server, and whether it is as small as before.

    python tests/serve/soak.py --seconds 3600 --out soak.json

`packhorse serve` runs a tiny model in a process of its own. From here come, at the same time: good
requests at a steady rate, texts that make the model raise, clients that hang up at any moment,
clients that send a byte or nothing and wait, and every ten seconds a burst of nine times what the
queue holds. Memory, open files and threads of the server are sampled all the while, and
compared at rest: once after a warm-up, once at the end. `--leak BYTES` makes the server lose so
much a request, and must be noticed; exit code 1 says that something grew or an answer was wrong.

What a leak is in a run of a minute cannot be told in MiB an hour: allocators and the cache of
prepared products move by more. So growth is told by request (a real leak is one object a request),
and the slope, by the median of all pairs of samples (Theil 1950, Sen 1968), is judged from an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

RATE = 60.0  # good requests a second
SLOW_CLIENTS = 40
BURST_EVERY, BURST = 10.0, 300  # seconds, requests at once
KEPT = 32  # connections
LIGHT_CLIENTS, LIGHT_PAUSE, LEAST = 3, 0.002, 10_000  # requests for nothing, at least
NAP = 0.04  # seconds more that a batch takes: else a tiny model is never overloaded
REST_SECONDS = 4.0  # until clients that were given up are gone
WARM_UP, MOST_WARM_UP = 0.5, 600.0  # of the time, seconds; pools and arenas come to be
BYTES_A_REQUEST, NOISE = 256.0, 4 << 20  # bytes by which a server at rest differs from itself
# One more arena in an hour is no leak: it is a byte a request.
MIB_AN_HOUR, JUDGED_FROM = 2.0, 2900.0  # seconds that were measured
POISON = "w13"
BEFORE = """
import ctypes, gc, signal, time
from packhorse.runtime.backend import TorchBackend
from packhorse.serve.guard import Guard
plain, guarded, lost = TorchBackend.__call__, Guard.__call__, []
def call(self, packed, *given):
    if (packed.ids == {poison}).any():
        raise RuntimeError("poison")
    time.sleep({nap})
    return plain(self, packed, *given)
async def guard(self, scope, receive, send):
    if {leak}:
        lost.append(bytes([1]) * {leak})
    await guarded(self, scope, receive, send)
TorchBackend.__call__, Guard.__call__ = call, guard
def tidy(*_):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
signal.signal(signal.SIGUSR1, tidy)
import sys
from packhorse.cli import main
sys.exit(main(sys.argv[1:]))
"""
HEADERS = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SLOW = [b"", b"P", HEADERS, HEADERS + b"Content-Length: 9\r\n\r\n{"]


@dataclass(frozen=True)
class Sample:
    """The server's process at a moment."""

    seconds: float
    rss: int  # bytes
    files: int
    threads: int
    requests: int  # ended so far
    in_flight: int
    metrics_ms: float  # that /metrics took


@dataclass
class Found:
    """What came of it."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)  # by kind of client
    samples: list[Sample] = field(default_factory=list)

    @property
    def empty(self) -> int:
        """Requests for nothing that were answered."""
        return sum(self.statuses.get("empty", {}).values())

    def note(self, kind: str, status: int | str) -> None:
        self.statuses.setdefault(kind, Counter())[str(status)] += 1


# Who may get what; a connection that was cut is no answer.
ALLOWED = {"good": {"200", "429"}, "burst": {"200", "429"}, "poison": {"424", "429"}}
ALLOWED["empty"] = {"400"}


def text(chance: random.Random) -> str:
    return " ".join(f"w{chance.randint(100, 2000)}" for _ in range(chance.randint(1, 60)))


class Client:
    """Requests over connections that are kept; nothing that would cost more than the server."""

    def __init__(self, port: int) -> None:
        self.port, self.idle = port, []

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. A connection that fails, or is left, is not kept."""
        stale = self.idle.pop() if self.idle else None
        reader, writer = stale or await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(HEADERS + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
            answer = await reader.readexactly(int(fields["content-length"]))
        except BaseException:
            writer.transport.abort()
            raise
        if fields.get("connection") == "close" or len(self.idle) >= KEPT:
            writer.close()
        else:
            self.idle.append((reader, writer))
        return int(head[9:12]), answer

    def close(self) -> None:
        for _, writer in self.idle:
            writer.close()
        self.idle.clear()


class Load:
    """Every kind of client."""

    def __init__(self, port: int, found: Found, part: int) -> None:
        self.client, self.port, self.found = Client(port), port, found
        self.chance, self.tasks = random.Random(part), set()
        self.least = part * LEAST + found.empty

    async def run(self, seconds: float) -> None:
        """All at once for so long; then wait for those that are on their way."""
        self.until = time.monotonic() + seconds
        kinds = [self._steady(), self._bursts()]
        kinds += [self._light() for _ in range(LIGHT_CLIENTS)]
        kinds += [self._slow() for _ in range(SLOW_CLIENTS)]
        await asyncio.gather(*kinds)
        await asyncio.gather(*self.tasks)
        self.client.close()

    @property
    def goes_on(self) -> bool:
        """Until the time is over, and as many were answered as it takes to see a leak."""
        return time.monotonic() < self.until or self.found.empty < self.least

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _steady(self) -> None:
        begun, sent = time.monotonic(), 0
        while self.goes_on:
            now = time.monotonic()
            for _ in range(int((now - begun) * RATE) - sent):
                sent += 1
                self._start(self._one())
            await asyncio.sleep(0.01)

    async def _one(self) -> None:
        roll = self.chance.random()
        if roll < 0.02:
            return await self._ask("poison", [f"{POISON} {text(self.chance)}"])
        inputs = [text(self.chance) for _ in range(self.chance.randint(1, 4))]
        if roll < 0.2:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.chance.random() * 0.03):
                    await self._ask("impatient", inputs)
            return
        await self._ask("good", inputs)

    async def _ask(self, kind: str, inputs: list[str]) -> None:
        try:
            status, answer = await self.client.post(json.dumps({"inputs": inputs}).encode())
            right = status != 200 or (len(json.loads(answer)) == len(inputs) and b"u" not in answer)
            self.found.note(kind, status if right else "wrong")
        except (OSError, EOFError) as error:
            self.found.note(kind, type(error).__name__)

    async def _bursts(self) -> None:
        while self.goes_on:
            inputs = [text(self.chance) for _ in range(8)]
            await asyncio.gather(*[self._ask("burst", inputs) for _ in range(BURST)])
            await asyncio.sleep(min(BURST_EVERY, max(0.0, self.until - time.monotonic())))

    async def _light(self) -> None:
        """One after the other, refused for their body: a leak is one of a request, and shows."""
        while self.goes_on:
            await self._ask("empty", [])
            await asyncio.sleep(LIGHT_PAUSE)

    async def _slow(self) -> None:
        """Says a part of a request and waits to be given up; then once more."""
        while self.goes_on:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(self.chance.choice(SLOW))
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            await asyncio.sleep(self.chance.random() * 0.5)


async def sample(client: httpx.AsyncClient, pid: int, begun: float) -> Sample:
    asked = time.perf_counter()
    figures = (await client.get("/metrics")).text
    took = 1e3 * (time.perf_counter() - asked)
    lines = [line.rpartition(" ") for line in figures.splitlines() if not line.startswith("#")]
    counted = sum(float(v) for name, _, v in lines if name.startswith("packhorse_requests_total"))
    in_flight = next(float(v) for name, _, v in lines if name == "packhorse_in_flight")
    place = Path(f"/proc/{pid}")
    return Sample(
        seconds=time.monotonic() - begun,
        rss=int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        files=len(list((place / "fd").iterdir())),
        threads=len(list((place / "task").iterdir())),
        requests=int(counted),
        in_flight=int(in_flight),
        metrics_ms=took,
    )


async def at_rest(url: str, pid: int, begun: float) -> Sample:
    """When no client is left and what was freed is given back; over a connection of its own."""
    await asyncio.sleep(REST_SECONDS)
    os.kill(pid, signal.SIGUSR1)
    await asyncio.sleep(0.5)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await sample(client, pid, begun)


async def soak(url: str, pid: int, seconds: float) -> tuple[Found, Sample, Sample]:
    """The load in two parts, and the server at rest after each."""
    found, begun, rests = Found(), time.monotonic(), []
    warming = min(WARM_UP * seconds, MOST_WARM_UP)
    for part, lasts in enumerate((warming, seconds - warming)):
        async with httpx.AsyncClient(base_url=url, timeout=120) as watcher:
            load = Load(httpx.URL(url).port or 0, found, part)
            running = asyncio.ensure_future(load.run(lasts))
            while not running.done():
                found.samples.append(await sample(watcher, pid, begun))
                await asyncio.wait([running], timeout=max(1.0, seconds / 500))
            await running
        rests.append(await at_rest(url, pid, begun))
    return found, rests[0], rests[1]


def slope(samples: list[Sample]) -> float:
    """Of memory, MiB an hour: the median over all pairs, so that no single sample counts."""
    some = samples[:: max(1, len(samples) // 200)]
    rises = [
        (b.rss - a.rss) / (b.seconds - a.seconds) for i, a in enumerate(some) for b in some[i + 1 :]
    ]
    return statistics.median(rises) * 3600 / 2**20 if rises else 0.0


def judge(found: Found, warm: Sample, end: Sample) -> dict[str, Any]:
    """The figures, and what is wrong with them."""
    later = [each for each in found.samples if each.seconds > warm.seconds]
    requests, measured = end.requests - warm.requests, end.seconds - warm.seconds
    grown = max(0, end.rss - warm.rss - NOISE)
    figures = {
        "seconds": round(end.seconds, 1),
        "measured_seconds": round(measured, 1),
        "requests": end.requests,
        "statuses": {kind: dict(counts) for kind, counts in found.statuses.items()},
        "rss_mib": [round(each.rss / 2**20, 2) for each in (warm, end)],
        "rss_bytes_a_request": round(grown / max(1, requests), 1),
        "rss_slope_mib_an_hour": round(slope(later), 2),
        "files_at_rest": [warm.files, end.files],
        "threads_at_rest": [warm.threads, end.threads],
        "most_files": max(each.files for each in later),
        "metrics_ms_median": round(statistics.median(each.metrics_ms for each in later), 1),
    }
    wrong = [
        f"{kind}: {count} of {status}"
        for kind, counts in found.statuses.items()
        for status, count in counts.items()
        if status not in ALLOWED.get(kind, counts)
    ]
    if figures["rss_bytes_a_request"] > BYTES_A_REQUEST:
        wrong.append(f"memory grows by {figures['rss_bytes_a_request']} bytes a request")
    if measured >= JUDGED_FROM and figures["rss_slope_mib_an_hour"] > MIB_AN_HOUR:
        wrong.append(f"memory grows by {figures['rss_slope_mib_an_hour']} MiB an hour")
    for name in ("files", "threads"):
        if getattr(end, name) > getattr(warm, name):
            wrong.append(f"{name} at rest: {getattr(warm, name)}, at the end {getattr(end, name)}")
    if end.in_flight:
        wrong.append(f"{end.in_flight} requests in flight at rest")
    return {**figures, "wrong": wrong}


def start(folder: Path, leak: int) -> subprocess.Popen[str]:
    from packhorse.reports import random_model

    model = random_model.write("tiny", folder / "tiny")
    vocabulary = (folder / "tiny-tokenizer" / "vocab.txt").read_text().split()
    code = BEFORE.format(poison=vocabulary.index(POISON), leak=leak, nap=NAP)
    words = ["serve", "--json", "--port", "0", "--model", f"tiny={model}", "--threads", "1"]
    words += ["--receive-seconds", "2", "--send-seconds", "2", "--max-queue-tokens", "8192"]
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=(folder / "stderr").open("w"),
        env={**os.environ, "PACKHORSE_RUNTIME": str(folder)},
        text=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--leak", type=int, default=0, help="bytes that are lost a request")
    parser.add_argument("--out", type=Path, help="the figures and all samples, as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        server = start(Path(place), asked.leak)
        try:
            line = server.stdout.readline() if server.stdout else ""
            assert line, f"it did not start: {(Path(place) / 'stderr').read_text()}"
            url = f"http://127.0.0.1:{json.loads(line)['port']}"
            found, warm, end = asyncio.run(soak(url, server.pid, asked.seconds))
            server.send_signal(signal.SIGTERM)
            figures: dict[str, Any] = judge(found, warm, end)
            figures["exit_code"] = server.wait(60)
        finally:
            server.kill()
            server.wait()
    figures["wrong"] += ["it did not leave with 0"] if figures["exit_code"] else []
    if asked.out:
        samples = [asdict(each) for each in found.samples]
        asked.out.write_text(json.dumps({**figures, "samples": samples}, indent=1) + "\n")
    print(json.dumps(figures))
    return int(bool(figures["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
