"""Run good and bad clients against one server for hours, and check that it does not grow.

    python tests/serve/soak.py --seconds 3600 --out soak.json

`packhorse serve` runs a tiny model in a separate process. This script sends, at the same time: good
requests at a steady rate, texts that make the model raise, clients that disconnect at any moment,
clients that send a byte or nothing and wait, and every ten seconds a burst of nine times what the
queue holds. Memory, open files and threads of the server are sampled meanwhile, and compared at
rest: once after a warm-up, once at the end. `--leak BYTES` makes the server leak so much per
request, which must be noticed. Exit code 1 means that something grew or an answer was wrong.

In a run of a minute a leak cannot be measured in MiB per hour: allocators and the cache of prepared
weights vary by more. So growth is measured per request (a real leak is one object per request), and
the slope, the median over all pairs of samples (Theil 1950, Sen 1968), only in runs of an hour.
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

RATE = 60.0  # good requests per second
SLOW_CLIENTS = 40
BURST_EVERY = 10.0  # seconds
BURST = 300  # requests at once
MAX_IDLE = 32  # kept-alive connections
LIGHT_CLIENTS = 3
LIGHT_PAUSE = 0.002
LEAST = 10_000  # requests without input; fewer would not show a leak
NAP = 0.04  # seconds added to each batch, because a tiny model is never overloaded otherwise
REST_SECONDS = 4.0  # until connections of slow clients are closed
WARM_UP = 0.5  # part of the run in which pools and arenas grow
MOST_WARM_UP = 600.0  # seconds
BYTES_PER_REQUEST = 256.0
NOISE = 4 << 20  # bytes by which the memory of a server at rest varies
# One more arena in an hour is no leak: it is one byte per request.
MIB_PER_HOUR = 2.0
JUDGED_FROM = 2900.0  # seconds measured, below which the slope is not judged
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
    """Figures of the server process at one moment."""

    seconds: float
    rss: int  # bytes
    files: int
    threads: int
    requests: int  # ended so far
    in_flight: int
    metrics_ms: float  # that /metrics took


@dataclass
class Findings:
    """Statuses and samples of a run."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)  # by kind of client
    samples: list[Sample] = field(default_factory=list)

    @property
    def empty(self) -> int:
        """The number of answered requests without input."""
        return sum(self.statuses.get("empty", {}).values())

    def note(self, kind: str, status: int | str) -> None:
        self.statuses.setdefault(kind, Counter())[str(status)] += 1


# The statuses that each kind of client may get; a closed connection is not an answer.
ALLOWED = {"good": {"200", "429"}, "burst": {"200", "429"}, "poison": {"424", "429"}}
ALLOWED["empty"] = {"400"}


def text(chance: random.Random) -> str:
    return " ".join(f"w{chance.randint(100, 2000)}" for _ in range(chance.randint(1, 60)))


class Client:
    """A cheap HTTP client with kept-alive connections, so that it costs less than the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle = []

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body. A connection that fails, or is abandoned, is not reused."""
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
        if fields.get("connection") == "close" or len(self.idle) >= MAX_IDLE:
            writer.close()
        else:
            self.idle.append((reader, writer))
        return int(head[9:12]), answer

    def close(self) -> None:
        for _, writer in self.idle:
            writer.close()
        self.idle.clear()


class Load:
    """All kinds of clients."""

    def __init__(self, port: int, findings: Findings, part: int) -> None:
        self.client = Client(port)
        self.port = port
        self.findings = findings
        self.chance = random.Random(part)
        self.tasks = set()
        self.least = part * LEAST + findings.empty

    async def run(self, seconds: float) -> None:
        """Run all clients for so many seconds; then wait for requests in flight."""
        self.until = time.monotonic() + seconds
        kinds = [self._steady(), self._bursts()]
        kinds += [self._light() for _ in range(LIGHT_CLIENTS)]
        kinds += [self._slow() for _ in range(SLOW_CLIENTS)]
        await asyncio.gather(*kinds)
        await asyncio.gather(*self.tasks)
        self.client.close()

    @property
    def goes_on(self) -> bool:
        """Return whether time is left, or too few requests were answered to see a leak."""
        return time.monotonic() < self.until or self.findings.empty < self.least

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _steady(self) -> None:
        begun = time.monotonic()
        sent = 0
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
            self.findings.note(kind, status if right else "wrong")
        except (OSError, EOFError) as error:
            self.findings.note(kind, type(error).__name__)

    async def _bursts(self) -> None:
        while self.goes_on:
            inputs = [text(self.chance) for _ in range(8)]
            await asyncio.gather(*[self._ask("burst", inputs) for _ in range(BURST)])
            await asyncio.sleep(min(BURST_EVERY, max(0.0, self.until - time.monotonic())))

    async def _light(self) -> None:
        """Send cheap requests without input, which are refused: a leak per request adds up."""
        while self.goes_on:
            await self._ask("empty", [])
            await asyncio.sleep(LIGHT_PAUSE)

    async def _slow(self) -> None:
        """Send a part of a request, wait until the server closes, and start again."""
        while self.goes_on:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(self.chance.choice(SLOW))
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            await asyncio.sleep(self.chance.random() * 0.5)


async def sample(client: httpx.AsyncClient, pid: int, begun: float) -> Sample:
    started = time.perf_counter()
    figures = (await client.get("/metrics")).text
    took = 1e3 * (time.perf_counter() - started)
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
    """Sample the server when no client is connected and free memory was returned."""
    await asyncio.sleep(REST_SECONDS)
    os.kill(pid, signal.SIGUSR1)
    await asyncio.sleep(0.5)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await sample(client, pid, begun)


async def soak(url: str, pid: int, seconds: float) -> tuple[Findings, Sample, Sample]:
    """Run the load in two parts; sample the server at rest after each."""
    findings = Findings()
    begun = time.monotonic()
    rests = []
    warming = min(WARM_UP * seconds, MOST_WARM_UP)
    for part, lasts in enumerate((warming, seconds - warming)):
        async with httpx.AsyncClient(base_url=url, timeout=120) as watcher:
            load = Load(httpx.URL(url).port or 0, findings, part)
            running = asyncio.ensure_future(load.run(lasts))
            while not running.done():
                findings.samples.append(await sample(watcher, pid, begun))
                await asyncio.wait([running], timeout=max(1.0, seconds / 500))
            await running
        rests.append(await at_rest(url, pid, begun))
    return findings, rests[0], rests[1]


def slope(samples: list[Sample]) -> float:
    """Return the growth of memory in MiB per hour: the median over all pairs of samples."""
    shown = samples[:: max(1, len(samples) // 200)]
    rises = [
        (b.rss - a.rss) / (b.seconds - a.seconds)
        for i, a in enumerate(shown)
        for b in shown[i + 1 :]
    ]
    return statistics.median(rises) * 3600 / 2**20 if rises else 0.0


def judge(findings: Findings, warm: Sample, end: Sample) -> dict[str, Any]:
    """Return the figures, and what is wrong with them."""
    later = [sample for sample in findings.samples if sample.seconds > warm.seconds]
    requests = end.requests - warm.requests
    measured = end.seconds - warm.seconds
    grown = max(0, end.rss - warm.rss - NOISE)
    figures = {
        "seconds": round(end.seconds, 1),
        "measured_seconds": round(measured, 1),
        "requests": end.requests,
        "statuses": {kind: dict(counts) for kind, counts in findings.statuses.items()},
        "rss_mib": [round(sample.rss / 2**20, 2) for sample in (warm, end)],
        "rss_bytes_a_request": round(grown / max(1, requests), 1),
        "rss_slope_mib_an_hour": round(slope(later), 2),
        "files_at_rest": [warm.files, end.files],
        "threads_at_rest": [warm.threads, end.threads],
        "most_files": max(sample.files for sample in later),
        "metrics_ms_median": round(statistics.median(sample.metrics_ms for sample in later), 1),
    }
    wrong = [
        f"{kind}: {count} of {status}"
        for kind, counts in findings.statuses.items()
        for status, count in counts.items()
        if status not in ALLOWED.get(kind, counts)
    ]
    if figures["rss_bytes_a_request"] > BYTES_PER_REQUEST:
        wrong.append(f"memory grows by {figures['rss_bytes_a_request']} bytes per request")
    if measured >= JUDGED_FROM and figures["rss_slope_mib_an_hour"] > MIB_PER_HOUR:
        wrong.append(f"memory grows by {figures['rss_slope_mib_an_hour']} MiB per hour")
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
    parser.add_argument("--leak", type=int, default=0, help="bytes to leak per request")
    parser.add_argument("--out", type=Path, help="the figures and all samples, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        server = start(Path(place), arguments.leak)
        try:
            line = server.stdout.readline() if server.stdout else ""
            assert line, f"it did not start: {(Path(place) / 'stderr').read_text()}"
            url = f"http://127.0.0.1:{json.loads(line)['port']}"
            findings, warm, end = asyncio.run(soak(url, server.pid, arguments.seconds))
            server.send_signal(signal.SIGTERM)
            figures: dict[str, Any] = judge(findings, warm, end)
            figures["exit_code"] = server.wait(60)
        finally:
            server.kill()
            server.wait()
    figures["wrong"] += ["it did not leave with 0"] if figures["exit_code"] else []
    if arguments.out:
        samples = [asdict(sample) for sample in findings.samples]
        arguments.out.write_text(json.dumps({**figures, "samples": samples}, indent=1) + "\n")
    print(json.dumps(figures))
    return int(bool(figures["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
