"""The load generator, in a process of its own: `python -m packhorse_bench.serving_load TEXTS`.

*Open loop*: requests come at random times (Poisson) that are drawn before the first is sent, and
every latency counts from the time at which a request was due. So a server that stalls cannot stop
the clock: requests that were due meanwhile waited too, whether they could be sent or not (to leave
them out is the mistake that Gil Tene calls "coordinated omission"). *Closed loop*: a number of
connections, each of which sends its next request when the last is answered; it measures the
highest throughput of a server.

A job may begin with a warm-up whose requests do not count. On a fast server one generator is not
enough: `GeneratorTeam` divides the connections and the rate of a job among several.

It is a process of its own so that it shares neither Python's lock nor memory with what it measures.
It reads one job per line from stdin, in JSON, and answers each with one line, before which it
writes once a second what it is doing: whoever waits for it can tell a server that is slow from one
that accepts no connections. It reports the processor time that it took itself, and how late it was
in sending: if either is large, the figures are its own and not the server's. `burn` takes a given
share of a core and does nothing, so that something else can be timed beside the same load.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from io import FileIO, RawIOBase
from itertools import cycle
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import numpy as np

from packhorse.errors import PackhorseError, RequestFailed
from packhorse_bench.serving_http import (
    OPEN_SECONDS,
    SWEEP_SECONDS,
    Pool,
    PostRequest,
    post_message,
    request_body,
)

OK = "200"
ALLOWED = 0.01  # of all requests: more late ones than that, and the 99th percentile is late
LEAD_SECONDS = 0.1  # between the last connection and the first request
SLICE_SECONDS = 0.01
STATUS_SECONDS = 1.0  # between two lines about what a generator is doing
SPARE_SECONDS = 15.0  # beyond the longest time that a job may take

ReportStatus = Callable[[str], None]
RequestTexts = str | list[str]  # what one request asks: a text, or several


@dataclass(frozen=True)
class LoadJob:
    """One measurement: which port, at what rate, for how long."""

    port: int
    rate: float  # requests per second; 0: a closed loop of all connections
    seconds: float
    host: str = "127.0.0.1"
    path: str = "/v1/embeddings"
    model: str = "model"
    connections: int = 256
    timeout: float = 2.0  # seconds until a request counts as failed
    limit: float = 0.0  # end as soon as over 1 % took longer than this many seconds; 0: never
    seed: int = 0
    # Seconds of load before those that count. A closed loop then counts what is answered within
    # `seconds`, and neither its start nor its end, when fewer and fewer connections are busy.
    warm: float = 0.0
    first: int = 0  # of the generator's requests: the first that this job sends, and how many
    count: int = 0  # 0: all
    keep: bool = False  # report every latency

    @property
    def longest(self) -> float:
        """Seconds after which it has surely ended, whatever the server does."""
        return OPEN_SECONDS + LEAD_SECONDS + self.warm + self.seconds + self.timeout


@dataclass(frozen=True)
class LoadReport:
    """The figures of one job. The latency of a failed request counts as infinite."""

    asked: int
    answered: int  # with 200
    seconds: float  # to the last answer
    tokens: int  # of the answered requests
    p50_ms: float
    p90_ms: float
    p99_ms: float
    worst_ms: float
    share: float  # of a core, that the generator took
    late_ms: float  # 99th percentile of how late requests were handed to a connection
    cut: bool = False  # ended early, because `limit` could no longer be kept
    errors: dict[str, int] = field(default_factory=dict)  # by status, or by what happened
    latencies_ms: list[float] = field(default_factory=list)  # with `LoadJob.keep`

    @property
    def rate(self) -> float:
        """Answered requests per second."""
        return self.answered / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answered requests per second."""
        return self.tokens / self.seconds

    def holds(self, limit: float) -> bool:
        """Whether every request was answered, and 99 of 100 within `limit` seconds."""
        return not self.errors and not self.cut and self.p99_ms <= 1e3 * limit


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has been answered, or has failed."""

    index: int  # of its text
    status: str
    due: float
    when: float

    @property
    def seconds(self) -> float:
        """Latency since it was due; infinite unless the status is 200."""
        return self.when - self.due if self.status == OK else math.inf


class OfferedLoad:
    """One running job; `messages` are the requests as bytes, `tokens` their numbers of tokens."""

    def __init__(self, job: LoadJob, messages: Sequence[bytes], tokens: Sequence[int]) -> None:
        self.job = job
        self.messages = messages
        self.tokens = tokens
        self.pool = Pool(job.host, job.port, job.connections, job.timeout, self._record)
        self.due = _due(job)
        order = np.random.default_rng(job.seed).permutation(len(messages))
        self.text_order = cycle(order.tolist())
        self.ended: list[EndedRequest] = []
        self.late: list[float] = []  # seconds from due to sent
        self.over_limit = 0  # failed, or over the limit
        self.start = self.begin = self.stop = 0.0  # of the load, and of what counts

    async def run(self, report_status: ReportStatus | None = None) -> LoadReport:
        """Run the job, from the first connection to the report.

        Once a second `report_status` is called with what it is doing.
        """
        status = asyncio.get_running_loop().create_task(self._describe(report_status))
        try:
            return await self._run()
        finally:
            status.cancel()

    async def _describe(self, report_status: ReportStatus | None) -> None:
        while report_status is not None:
            await asyncio.sleep(STATUS_SECONDS)
            connections = f"{len(self.pool.connections)} of {self.job.connections} connections"
            if not self.start:
                report_status(f"opening connections, has {connections}")
                continue
            unanswered = sum(1 for _ in self.pool.unanswered())
            doing = "sending" if time.perf_counter() < self.stop else "waiting for the last answers"
            report_status(
                f"{doing}: {len(self.ended)} requests have ended, {unanswered} have no answer; "
                f"{connections}"
            )

    async def _run(self) -> LoadReport:
        try:
            await self.pool.open()
        except BaseException:
            await self.pool.close()
            raise
        cpu_before = time.process_time()
        started = time.perf_counter()
        self.start = started + LEAD_SECONDS
        self.begin = self.start + self.job.warm
        self.stop = self.begin + self.job.seconds
        sender = asyncio.get_running_loop().create_task(self._send())
        try:
            while not sender.done() or self.pool.busy:
                await asyncio.sleep(SWEEP_SECONDS)
                self.pool.sweep()
                if self._cannot_hold():
                    break
            share = (time.process_time() - cpu_before) / (time.perf_counter() - started)
            # A closed loop has no list of due requests, so none can be missing.
            unanswered = len(self.due) - len(self.ended) if self.job.rate else 0
        finally:
            sender.cancel()
            await self.pool.close()
        return self._report(share, unanswered)

    async def _send(self) -> None:
        """Push each request when it is due, whether earlier ones are answered or not."""
        for after in self.due.tolist():
            due = self.start + after
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            self.late.append(max(0.0, time.perf_counter() - due))
            self._push_request(due)

    def _push_request(self, due: float) -> None:
        index = next(self.text_order)
        self.pool.push(PostRequest(index, due, self.messages[index]))

    def _record(self, request: PostRequest, status: str) -> None:
        now = time.perf_counter()
        self.ended.append(EndedRequest(request.index, status, request.due, now))
        self.over_limit += self.ended[-1].seconds > (self.job.limit or sys.float_info.max)
        if not self.job.rate and now < self.stop:  # closed loop: the next request follows
            self._push_request(now)

    def _cannot_hold(self) -> bool:
        """Whether so many requests are late already that the 99th percentile will be."""
        if not (self.job.limit and self.job.rate):
            return False
        before = time.perf_counter() - self.job.limit
        overdue = sum(request.due < before for request in self.pool.unanswered())
        return self.over_limit + overdue > ALLOWED * len(self.due)

    def _report(self, share: float, unanswered: int) -> LoadReport:
        """Compute the figures; `unanswered` requests had no answer when the job was cut short."""
        counted = self._counted()
        last = max((ended.when for ended in counted), default=self.stop)
        end = last if unanswered else max(last, self.stop)
        good = [ended for ended in counted if ended.status == OK]
        latencies = [*(ended.seconds for ended in counted), *[math.inf] * unanswered]
        p50, p90, p99 = percentiles_ms(latencies)
        return LoadReport(
            asked=len(counted) + unanswered,
            answered=len(good),
            seconds=end - self.begin,
            tokens=sum(self.tokens[ended.index] for ended in good),
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
            worst_ms=1e3 * max(latencies, default=math.inf),
            share=share,
            late_ms=1e3 * float(np.percentile(self.late or [0.0], 99)),
            cut=unanswered > 0,
            errors=dict(Counter(ended.status for ended in counted if ended.status != OK)),
            latencies_ms=[round(1e3 * seconds, 3) for seconds in latencies if self.job.keep],
        )

    def _counted(self) -> list[EndedRequest]:
        """The requests that count: all of them, or those after the warm-up."""
        if not self.job.warm:
            return self.ended
        if self.job.rate:
            return [ended for ended in self.ended if ended.due >= self.begin]
        return [ended for ended in self.ended if self.begin <= ended.when <= self.stop]


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th percentile in milliseconds; infinite if there is no latency."""
    # "higher" takes a latency that occurred; interpolating with infinity could give NaN.
    latencies = np.array(seconds or [math.inf])
    p50, p90, p99 = 1e3 * np.percentile(latencies, (50, 90, 99), method="higher")
    return float(p50), float(p90), float(p99)


def merge(reports: Sequence[LoadReport]) -> LoadReport:
    """One report of several generators that ran at the same time and kept their latencies.

    `share` and `late_ms` are those of the busiest generator: one that is too slow spoils all.
    """
    latencies = [latency for report in reports for latency in report.latencies_ms]
    p50, p90, p99 = percentiles_ms([latency / 1e3 for latency in latencies])
    errors: Counter[str] = Counter()
    for report in reports:
        errors.update(report.errors)
    return LoadReport(
        asked=sum(report.asked for report in reports),
        answered=sum(report.answered for report in reports),
        seconds=max(report.seconds for report in reports),
        tokens=sum(report.tokens for report in reports),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        worst_ms=max(latencies, default=math.inf),
        share=max(report.share for report in reports),
        late_ms=max(report.late_ms for report in reports),
        cut=any(report.cut for report in reports),
        errors=dict(errors),
    )


def _due(job: LoadJob) -> np.ndarray:
    """Times in seconds at which requests are due; in a closed loop, one per connection at 0."""
    if not job.rate:
        return np.zeros(job.connections)
    seconds = job.warm + job.seconds
    expected = job.rate * seconds
    # Ten standard deviations of a Poisson count above its mean: practically never too few.
    count = int(expected + 10 * expected**0.5 + 10)
    due = np.cumsum(np.random.default_rng(job.seed).exponential(1 / job.rate, count))
    return due[due < seconds]


def perform(
    job: LoadJob,
    texts: Sequence[RequestTexts],
    tokens: Sequence[int],
    report_status: ReportStatus | None = None,
) -> LoadReport:
    """Run a job in this process."""
    chosen = slice(job.first, job.first + job.count if job.count else None)
    host = f"{job.host}:{job.port}"
    messages = [
        post_message(job.path, request_body(job.path, job.model, text), host)
        for text in texts[chosen]
    ]
    try:
        from uvloop import new_event_loop  # pyright: ignore[reportMissingImports]
    except ImportError:
        new_event_loop = asyncio.new_event_loop

    async def run() -> LoadReport:
        return await OfferedLoad(job, messages, tokens[chosen]).run(report_status)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run())


def burn(share: float, jobs: RawIOBase) -> float:
    """Take a share of a core until the next job comes; returns the share that it took."""
    cpu_before = time.process_time()
    started = time.perf_counter()
    while not select.select([jobs], [], [], 0)[0]:
        until = time.process_time() + share * SLICE_SECONDS
        while time.process_time() < until:
            pass
        time.sleep((1 - share) * SLICE_SECONDS)
    return (time.process_time() - cpu_before) / (time.perf_counter() - started)


def main(path: str, core: str = "") -> None:
    """Read texts and token counts from a JSON file, then run one job per line of stdin."""
    if core:
        os.sched_setaffinity(0, {int(core)})
    texts, tokens = json.loads(Path(path).read_text("utf-8"))
    gc.collect()
    gc.freeze()  # so that collections during the timing do not visit the texts
    # Unbuffered: `burn` polls the pipe, and a line that was read ahead is no longer in it.
    for line in (jobs := FileIO(sys.stdin.fileno(), closefd=False)):
        message = json.loads(line)
        if "burn" in message:
            answer: Any = burn(message["burn"], jobs)
        elif "stop" in message:
            continue
        else:
            try:
                answer = asdict(perform(LoadJob(**message), texts, tokens, _write_status))
            except PackhorseError as error:
                answer = {"failed": str(error)}
        _write(answer)


def _write(answer: Any) -> None:
    # What interrupts a write to a full pipe cuts it short. A buffered file writes the rest;
    # sys.stdout does not where PYTHONUNBUFFERED is set.
    with open(sys.stdout.fileno(), "wb", closefd=False) as output:
        output.write(json.dumps(answer).encode() + b"\n")


def _write_status(status: str) -> None:
    _write({"status": status})


class Generator:
    """Starts the load generator as a process, if wanted on one core only, and gives it jobs."""

    def __init__(
        self,
        texts: Sequence[RequestTexts],
        tokens: Sequence[int],
        scratch: Path,
        core: int | None = None,
    ) -> None:
        handle, file = mkstemp(".json", "texts-", scratch)
        with open(handle, "w", encoding="utf-8") as stream:
            json.dump([list(texts), list(tokens)], stream)
        pinned = [] if core is None else [str(core)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "packhorse_bench.serving_load", file, *pinned],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the parent only, which then ends it
        )
        self._unread = b""
        self._until = math.inf  # when the job must have ended, by `time.monotonic`
        self.status = "starting"  # its last message

    def run(self, job: LoadJob, report_status: ReportStatus | None = None) -> LoadReport:
        """Run a job and return its figures."""
        self.start(job)
        return self.report(report_status)

    def start(self, job: LoadJob) -> None:
        """Start a job without waiting for its end; call `report` next."""
        self.status = "starting"
        self._until = time.monotonic() + job.longest + SPARE_SECONDS
        self._send_message(asdict(job))

    def report(self, report_status: ReportStatus | None = None) -> LoadReport:
        """Wait for the end of the job that was started; raise if it does not end in time."""
        return LoadReport(**self._read_answer(self._until, report_status))

    @contextmanager
    def burning(self, share: float) -> Iterator[None]:
        """Take this share of a core inside this context."""
        self._send_message({"burn": share})
        try:
            yield
        finally:
            self._send_message({"stop": True})
            self._read_answer(time.monotonic() + SPARE_SECONDS)

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with suppress(BrokenPipeError):  # unread input of a process that has ended
                pipe.close()
        self._process.wait()

    def _send_message(self, message: dict[str, Any]) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # `_read_answer` raises then
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                self._process.stdin.flush()

    def _read_answer(self, until: float, report_status: ReportStatus | None = None) -> Any:
        while True:
            answer = json.loads(self._read_line(until))
            if not isinstance(answer, dict):  # of `burn`
                return answer
            if "failed" in answer:
                raise RequestFailed(answer["failed"])
            if "status" not in answer:
                return answer
            self.status = answer["status"]
            if report_status is not None:
                report_status(self.status)

    def _read_line(self, until: float) -> bytes:
        """Return the next line of its output."""
        pipe = self._process.stdout
        if pipe is None:
            raise RequestFailed("the load generator has no output")
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(1e3 * max(0.0, until - time.monotonic())):
                self._process.kill()  # what it says later belongs to no job any more
                raise RequestFailed(
                    f"a load generator did not end in time; its last message: {self.status}"
                )
            data = os.read(pipe.fileno(), 1 << 20)
            if not data:
                raise RequestFailed("the load generator ended; its output is above")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


class GeneratorTeam:
    """Several generators, each a process on a core of its own, that share the load of a job."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self.generators = generators
        self._running: Sequence[Generator] = ()

    def run(self, job: LoadJob, report_status: ReportStatus | None = None) -> LoadReport:
        """Run a job, each generator with its share of connections and rate."""
        self.start(job)
        return self.report(report_status)

    def start(self, job: LoadJob) -> None:
        """Start a job without waiting for its end; call `report` next."""
        self._running = self.generators[: job.connections]
        count = len(self._running)
        for place, generator in enumerate(self._running):
            share = replace(
                job,
                rate=job.rate / count,
                connections=(job.connections + place) // count,
                seed=job.seed * count + place,
                keep=True,
            )
            generator.start(share)

    def report(self, report_status: ReportStatus | None = None) -> LoadReport:
        """Wait for all generators; their figures as those of one.

        `report_status` is called once a second with what the first that has not ended is doing.
        """
        return merge([generator.report(report_status) for generator in self._running])


if __name__ == "__main__":
    main(*sys.argv[1:])
