"""The sequences of one HTTP request on their way through a runner, a few at a time.

The inputs of a request run as few jobs of many sequences, not as one job each: a job costs the
engine tens of microseconds, a sequence of it one or two. Sequences of different clients still share
batches, because the runner packs sequences and not jobs.

A request is admitted as a whole or refused as a whole, but it does not enter the queue as one
block: at most one batch of its tokens, or a quarter of them if that is more, are there at a time,
and never more than three batches. The next job is submitted when an earlier one is answered, on the
engine's own thread and so before the next batch is closed. A short text that arrives meanwhile
finds a part of a long request ahead of it and not all of it; the long request pays for that by
being overtaken once per part.

A request is admitted if there is room for one of its inputs, so that a thousand texts find a place
while the queue is nearly full of single ones. What follows its first job is not checked again: it
takes the place of what was answered.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from packhorse.runtime.admission import BATCHES_AHEAD, PackedFuture
from packhorse.runtime.runner import PackRunner
from packhorse.runtime.shares import Share, Ticket
from packhorse.runtime.tasks import InferenceJob, Row
from packhorse.serve.pack_info import PackInfo

# A long request goes through the queue in this many parts. More parts would let short requests pass
# it more often; fewer would make them wait longer.
STREAM_PARTS = 4


class StreamResult(NamedTuple):
    """The rows of all sequences of a request, in order, and the batches they ran in."""

    rows: list[Row]
    pack: PackInfo


class RunningRequest(Protocol):
    """A request that was admitted."""

    finished: asyncio.Future[StreamResult]

    def stop(self) -> None:
        """Cancel what has not run yet; does nothing once the request has finished."""
        ...


class Dispatcher(Protocol):
    """Runs the jobs of one HTTP request, in this process or in another."""

    def start(self, jobs: Sequence[InferenceJob], ticket: Ticket | None = None) -> RunningRequest:
        """Admit the jobs, which all need the same heads, or raise `Overloaded`."""
        ...


class LocalDispatcher:
    """Runs requests by a runner in this process."""

    def __init__(self, runner: PackRunner) -> None:
        self.runner = runner

    def start(self, jobs: Sequence[InferenceJob], ticket: Ticket | None = None) -> LocalRequest:
        """Admit the jobs, which all need the same heads, or raise `Overloaded`."""
        return LocalRequest(self.runner, jobs, ticket)


class LocalRequest:
    """A request in the runner of this process, awaited on the event loop."""

    def __init__(
        self, runner: PackRunner, jobs: Sequence[InferenceJob], ticket: Ticket | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[StreamResult] = self.loop.create_future()
        merged = merge(jobs, runner.shape.tokens)
        self.stream = start(runner, merged, self._on_end, ticket)

    def stop(self) -> None:
        """Cancel what has not run yet."""
        self.stream.stop()

    def _on_end(self, error: BaseException | None, result: StreamResult | None) -> None:
        # Futures of asyncio may only be set on the event loop's own thread.
        self.loop.call_soon_threadsafe(self._finish, error, result)

    def _finish(self, error: BaseException | None, result: StreamResult | None) -> None:
        if self.finished.done():  # the client left meanwhile
            return
        if result is not None:
            self.finished.set_result(result)
        else:
            self.finished.set_exception(error or RuntimeError("a request ended without a result"))


# Called once with the error, or with None and the result.
OnEnd = Callable[[BaseException | None, "StreamResult | None"], None]


def start(
    runner: PackRunner,
    jobs: Sequence[InferenceJob],
    on_end: OnEnd,
    ticket: Ticket | None = None,
) -> SingleJob | RequestStream:
    """Admit the jobs of a request, or raise `Overloaded`.

    `on_end` is called once, on any thread, maybe before this function returns; not for a request
    that was stopped.
    """
    share = None
    if ticket is not None:
        share = ticket.share
        if ticket.deadline < math.inf:
            runner.check_deadline(sum(job.tokens for job in jobs), ticket)
    if len(jobs) == 1:
        return SingleJob(runner, jobs[0], on_end, share)
    stream = RequestStream(runner, jobs, on_end, share)
    stream.start()
    return stream


class SingleJob:
    """A request of one job, which most are: the same as `RequestStream`, for less."""

    __slots__ = ("_future", "_on_end")

    def __init__(
        self, runner: PackRunner, job: InferenceJob, on_end: OnEnd, share: Share | None = None
    ) -> None:
        self._on_end = on_end
        self._future = runner.enqueue(job, share)
        self._future.add_done_callback(self._on_answer)

    def stop(self) -> None:
        """Cancel the job if it has not run yet."""
        self._future.cancel()

    def _on_answer(self, _: Future[Any]) -> None:
        future = self._future
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._on_end(None, StreamResult(future.result(), pack_info([future])))
        else:
            self._on_end(error, None)


class RequestStream:
    """Submits the jobs of a request one after another, and reports when all are answered.

    Answers arrive on the engine's thread, which also submits the next jobs. The lock is needed
    because another thread submits the first ones, and because a request can be stopped early. It is
    reentrant: a job that the runner answers at once calls `_on_answer` on the thread that is
    submitting it and holds the lock.
    """

    def __init__(
        self,
        runner: PackRunner,
        jobs: Sequence[InferenceJob],
        on_end: OnEnd,
        share: Share | None = None,
    ) -> None:
        """Prepare a stream; `on_end` is that of the function `start`."""
        self.runner = runner
        self.share = share
        self.on_end = on_end
        # Tokens that may be in the runner at once: a part of the request, but at least one batch,
        # because a request that fits into one batch gains nothing from being split, and no more
        # than keeps the device busy.
        part = -(-sum(job.tokens for job in jobs) // STREAM_PARTS)
        batch = runner.shape.tokens
        self.window = min(max(batch, part), BATCHES_AHEAD * batch)
        self.waiting = deque(jobs)  # not submitted yet
        self.unanswered = len(jobs)
        self.tokens = 0  # in the runner
        self.futures: list[PackedFuture] = []  # in the order of the jobs
        self.ended = False
        self._lock = threading.RLock()

    def start(self) -> None:
        """Submit the first jobs; raises `Overloaded`."""
        with self._lock:
            try:
                self._submit()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Cancel what has not run yet."""
        with self._lock:
            self.ended = True
        for future in self.futures:
            future.cancel()

    def _submit(self) -> None:
        """Submit jobs until the window is full; the lock is held."""
        while self.waiting and not self.ended:
            job = self.waiting[0]
            if self.tokens and self.tokens + job.tokens > self.window:
                return
            admit = self.runner.follow if self.futures else self.runner.enqueue
            future = admit(job, self.share)
            self.waiting.popleft()
            self.futures.append(future)
            self.tokens += job.tokens
            future.add_done_callback(partial(self._on_answer, job.tokens))

    def _on_answer(self, tokens: int, future: Future[Any]) -> None:
        with self._lock:
            if self.ended:
                return
            self.tokens -= tokens
            self.unanswered -= 1
            error = None if future.cancelled() else future.exception()
            if error is None and self.unanswered:
                try:
                    return self._submit()
                except Exception as refusal:
                    error = refusal
            self.ended = True
        if error is not None:
            self.stop()  # nobody waits for the rest
            return self.on_end(error, None)
        rows = [row for future in self.futures for row in future.result()]
        self.on_end(None, StreamResult(rows, pack_info(self.futures)))


def merge(jobs: Iterable[InferenceJob], batch_tokens: int) -> list[InferenceJob]:
    """Return the sequences of jobs as fewer jobs, each of at most a batch; they return their rows.

    The jobs need the same heads. A sequence counts as an input if an input begins with it.
    """
    merged: list[InferenceJob] = []
    part: list[Any] = []
    tokens = 0
    inputs = 0
    job: InferenceJob | None = None

    def close() -> None:
        if job is not None and part:
            merged.append(InferenceJob(tuple(part), job.heads, list, job.only, inputs))

    for job in jobs:
        for index, sequence in enumerate(job.sequences):
            if part and tokens + len(sequence) > batch_tokens:
                close()
                part = []
                tokens = 0
                inputs = 0
            part.append(sequence)
            tokens += len(sequence)
            inputs += job.inputs if index == 0 else 0
    close()
    return merged


def pack_info(futures: Sequence[PackedFuture]) -> PackInfo:
    """Describe the batches that a request ran in."""
    if len(futures) == 1 and (batch := futures[0].ran):
        waited = 1e3 * futures[0].waited
        return PackInfo(batch.fill, batch.sequences - 1, waited, 1e3 * batch.seconds)
    batches = [future.ran for future in futures if future.ran is not None]
    count = max(1, len(batches))
    return PackInfo(
        fill=sum(batch.fill for batch in batches) / count,
        neighbors=sum(batch.sequences - 1 for batch in batches) / count,
        queue_ms=1e3 * max((future.waited for future in futures), default=0.0),
        compute_ms=1e3 * max((batch.seconds for batch in batches), default=0.0),
    )
