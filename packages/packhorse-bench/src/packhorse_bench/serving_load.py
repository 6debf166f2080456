"""The load generator, in a process of its own: `python -m packhorse_bench.serving_load TEXTS`.

*Open loop*: requests come at random times (Poisson) that are drawn before the first is sent, and
every latency counts from the time at which a request was due. A server that stalls cannot hold the
clock up: those who should have asked meanwhile waited too, whether they could be sent or not
(Gil Tene's "coordinated omission" is the mistake of forgetting them). *Closed loop*: a number of
connections that each ask again when they are answered; it says how much a server can do at most.

The process takes one job a line on stdin, in JSON, and answers each with one line. It says what it
took of the processor itself, and how late it was with what it had to send: where that is much, the
figures are its own and not the server's. `burn` takes a given share of a core and does nothing, so
that something else can be timed beside the same load.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO, RawIOBase
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.errors import RequestFailed
from packhorse_bench.serving_http import SWEEP_SECONDS, Pool, PostRequest, request

OK = "200"
ALLOWED = 0.01  # of all requests: more late ones than that, and the 99th percentile is late
LEAD_SECONDS = 0.1  # between the last connection and the first request
SLICE_SECONDS = 0.01


@dataclass(frozen=True)
class LoadJob:
    """What to ask whom, how often and how long."""

    port: int
    rate: float  # requests a second; 0: a closed loop of all connections
    seconds: float
    path: str = "/v1/embeddings"
    model: str = "model"
    connections: int = 256
    patience: float = 2.0  # seconds until a request counts as failed
    limit: float = 0.0  # end as soon as more than 1 % took longer than these seconds; 0: never
    seed: int = 0


@dataclass(frozen=True)
class LoadReport:
    """What came of it. Failed requests count as infinitely late."""

    asked: int
    answered: int  # with 200
    seconds: float  # to the last answer
    tokens: int  # of what was answered
    p50_ms: float
    p90_ms: float
    p99_ms: float
    worst_ms: float
    share: float  # of a core, that the generator took
    late_ms: float  # 99th percentile of how late requests were handed to a connection
    cut: bool = False  # ended early, beyond `limit`
    errors: dict[str, int] = field(default_factory=dict)  # by status, or by what happened

    @property
    def rate(self) -> float:
        """Requests answered in a second."""
        return self.answered / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of what was answered."""
        return self.tokens / self.seconds

    def holds(self, limit: float) -> bool:
        """Did every request get an answer, and 99 of 100 within `limit` seconds?"""
        return not self.errors and not self.cut and self.p99_ms <= 1e3 * limit


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has been answered, or has failed."""

    place: int
    status: str
    due: float
    when: float

    @property
    def seconds(self) -> float:
        """Since it was due; without a good answer for ever."""
        return self.when - self.due if self.status == OK else math.inf


class OfferedLoad:
    """One job while it runs, over requests as they are written and the tokens of each."""

    def __init__(self, job: LoadJob, messages: Sequence[bytes], tokens: Sequence[int]) -> None:
        self.job = job
        self.messages = messages
        self.tokens = tokens
        self.pool = Pool(job.port, job.connections, job.patience, self._record)
        self.due = _due(job)
        order = np.random.default_rng(job.seed).permutation(len(messages))
        self.places = cycle(order.tolist())
        self.ended: list[Ended] = []
        self.late: list[float] = []  # seconds from due to handed over
        self.bad = 0  # failed, or over the limit
        self.begin = self.stop = 0.0

    async def run(self) -> LoadReport:
        """The whole job, from the first connection to the report."""
        await self.pool.open()
        spent = time.process_time()
        since = time.perf_counter()
        self.begin = since + LEAD_SECONDS
        self.stop = self.begin + self.job.seconds
        sender = asyncio.get_running_loop().create_task(self._send())
        try:
            while not sender.done() or self.pool.busy:
                await asyncio.sleep(SWEEP_SECONDS)
                self.pool.sweep()
                if self._hopeless():
                    break
            share = (time.process_time() - spent) / (time.perf_counter() - since)
            without = len(self.due) - len(self.ended) if self.job.rate else 0
        finally:
            sender.cancel()
            await self.pool.close()
        return self._report(share, without)

    async def _send(self) -> None:
        """Hand over each request when it is due, whatever became of those before."""
        for after in self.due.tolist():
            due = self.begin + after
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            self.late.append(max(0.0, time.perf_counter() - due))
            self._ask(due)

    def _ask(self, due: float) -> None:
        place = next(self.places)
        self.pool.push(PostRequest(place, due, self.messages[place]))

    def _record(self, ask: PostRequest, status: str) -> None:
        now = time.perf_counter()
        self.ended.append(Ended(ask.place, status, ask.due, now))
        self.bad += self.ended[-1].seconds > (self.job.limit or sys.float_info.max)
        if not self.job.rate and now < self.stop:
            self._ask(now)

    def _hopeless(self) -> bool:
        """Are so many late that the 99th percentile is, whatever comes?"""
        if not (self.job.limit and self.job.rate):
            return False
        before = time.perf_counter() - self.job.limit
        overdue = sum(ask.due < before for ask in self.pool.asked())
        return self.bad + overdue > ALLOWED * len(self.due)

    def _report(self, share: float, without: int) -> LoadReport:
        """`without` requests had no answer yet, or were not even sent, when it was cut short."""
        last = max((request.when for request in self.ended), default=self.stop)
        end = last if without else max(last, self.stop)
        good = [request for request in self.ended if request.status == OK]
        taken = np.array(
            [*(request.seconds for request in self.ended), *[math.inf] * without] or [math.inf]
        )
        p50, p90, p99 = 1e3 * np.percentile(taken, (50, 90, 99), method="higher")
        return LoadReport(
            asked=len(self.ended) + without,
            answered=len(good),
            seconds=end - self.begin,
            tokens=sum(self.tokens[request.place] for request in good),
            p50_ms=float(p50),
            p90_ms=float(p90),
            p99_ms=float(p99),
            worst_ms=1e3 * max(taken),
            share=share,
            late_ms=1e3 * float(np.percentile(self.late or [0.0], 99)),
            cut=without > 0,
            errors=dict(Counter(request.status for request in self.ended if request.status != OK)),
        )


def _due(job: LoadJob) -> np.ndarray:
    """Seconds after the beginning at which requests are due; of a closed loop the first ones."""
    if not job.rate:
        return np.zeros(job.connections)
    expected = job.rate * job.seconds
    most = int(expected + 10 * expected**0.5 + 10)
    due = np.cumsum(np.random.default_rng(job.seed).exponential(1 / job.rate, most))
    return due[due < job.seconds]


def perform(job: LoadJob, texts: Sequence[str], tokens: Sequence[int]) -> LoadReport:
    """Run a job in this process."""
    bodies = (json.dumps({"model": job.model, "input": text}).encode() for text in texts)
    host = f"127.0.0.1:{job.port}"
    messages = [request(job.path, body, host) for body in bodies]
    try:
        from uvloop import new_event_loop  # pyright: ignore[reportMissingImports]
    except ImportError:
        new_event_loop = asyncio.new_event_loop

    async def run() -> LoadReport:
        return await OfferedLoad(job, messages, tokens).run()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run())


def burn(share: float, jobs: RawIOBase) -> float:
    """Take a share of a core until the next job comes; the share that it was."""
    spent = time.process_time()
    since = time.perf_counter()
    while not select.select([jobs], [], [], 0)[0]:
        until = time.process_time() + share * SLICE_SECONDS
        while time.process_time() < until:
            pass
        time.sleep((1 - share) * SLICE_SECONDS)
    return (time.process_time() - spent) / (time.perf_counter() - since)


def main(path: str) -> None:
    """Texts and their tokens from a file of JSON; then a job a line, until there are no more."""
    texts, tokens = json.loads(Path(path).read_text("utf-8"))
    gc.collect()
    gc.freeze()  # the texts are not looked at again while requests are timed
    # Unbuffered: a line that was read ahead could not be seen coming.
    for line in (jobs := FileIO(sys.stdin.fileno(), closefd=False)):
        message = json.loads(line)
        if "burn" in message:
            answer: Any = burn(message["burn"], jobs)
        elif "stop" in message:
            continue
        else:
            answer = asdict(perform(LoadJob(**message), texts, tokens))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Generator:
    """The process with the load generator, seen from the one that gives it jobs."""

    def __init__(self, texts: Sequence[str], tokens: Sequence[int], scratch: Path) -> None:
        file = scratch / "texts.json"
        file.write_text(json.dumps([list(texts), list(tokens)]), "utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "packhorse_bench.serving_load", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for whoever waits for it
        )

    def run(self, job: LoadJob) -> LoadReport:
        """The load, from its first request to the last answer."""
        self._tell(asdict(job))
        return LoadReport(**self._hear())

    @contextmanager
    def burning(self, share: float) -> Iterator[None]:
        """Something of this share of a core runs beside."""
        self._tell({"burn": share})
        try:
            yield
        finally:
            self._tell({"stop": True})
            self._hear()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(BrokenPipeError):  # what was not taken any more
                pipe.close()
        self._process.wait()

    def _tell(self, message: dict[str, Any]) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # `_hear` says so
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()

    def _hear(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RequestFailed("the load generator ended; what it said stands above")
        return json.loads(line)


if __name__ == "__main__":
    main(sys.argv[1])
