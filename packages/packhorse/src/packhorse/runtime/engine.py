"""The engine of a runner: one thread that takes batches, runs them and replies to requests.

On an accelerator a full batch is launched while the one before it still runs, exactly one ahead.
When a batch has come back, the next one is launched first and the replies are made while it runs,
so the device never waits for replies. On a CPU the engine itself computes: a second thread would
only take cores from it, and requests are packed by the threads that submit them anyway.

A request fails alone. Values that are not finite stay in their own sequence, because packing keeps
sequences apart. Where the model raises, the batch runs again in halves until the request that fails
is by itself, and all others are answered: about 2 log2(n) small batches for one request of n. The
engine dies only of what ends any program (SystemExit, KeyboardInterrupt), of a lost device or of a
bug; then every request, present and future, gets an error at once.

**Locks.** The order is that of `admission`: `engine_busy` before `Admission._lock`, and the
recorder's lock last. The engine holds `engine_busy` while it launches and replies on an
accelerator, and not while it waits for a batch, except for the halves of one that failed. It calls
user code (the callbacks of futures) with `engine_busy` held but never with `Admission._lock`, so a
callback may submit, cancel or close. It must not call `PackRunner.run`: that would wait for this
very thread.

**Waits.** The engine waits in `Admission.next_batch` and for the device; see there for why the
first ends. A device that never answers is the one thing that can block `close` without end; at the
exit of the interpreter the wait is bounded by `EXIT_SECONDS`. The status thread waits for `ended`,
which the engine sets however it ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, count
from typing import Any, cast

import numpy as np
import torch

from packhorse import status
from packhorse.errors import PackhorseError, RequestFailed, RunnerStopped
from packhorse.runtime.admission import Admission, QueuedBatch, QueuedRequest, QueuedSequence
from packhorse.runtime.batches import LaunchedBatch
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.statistics import BatchRecord, RunnerRecorder, RunnerStats
from packhorse.runtime.tasks import Row

LOGGER = logging.getLogger(__name__)
PUBLISH_SECONDS = 1.0
# After a batch, clients that were answered may take this share of its time to send their next
# requests: the device is idle that long, and the next batch is fuller for it.
LINGER = 0.06
# A client that asks one question after another pauses for less, and would wait for a compiler.
QUIET_SECONDS = 0.25
EXIT_SECONDS = 5.0  # how long the exit of the interpreter waits for the batch that runs
NUMBERS = count(1)
FORKS = [0]  # between this process and the one that imported this module
NOT_FINITE = (
    "the model's output for this request is not finite (NaN, or too large for its number format); "
    "if the text is not the cause, load the model with dtype='fp32'"
)


@dataclass(frozen=True, slots=True)
class BatchInFlight:
    """A batch that was handed to the device; or the error of its launch or of its computation."""

    batch: QueuedBatch
    started: float
    outcome: LaunchedBatch | BaseException


@dataclass(frozen=True, slots=True)
class BatchResults:
    """Results per sequence; None if any value is not finite."""

    rows: Sequence[Row | None]
    tokens: int  # of the batch, padding included


class RunnerEngine:
    """The threads of a runner, and all that they do."""

    def __init__(
        self, encoder: Encoder, admission: Admission, when_idle: Callable[[], bool] | None
    ) -> None:
        self.encoder = encoder
        self.admission = admission
        self.recorder = RunnerRecorder()
        self.name = f"runner-{next(NUMBERS)}"
        count_forks()
        self._forks = FORKS[0]
        self.running: BatchInFlight | None = None  # on an accelerator, the last batch launched
        self.finished: BatchInFlight | None = None  # is back and has no replies yet
        self.ended = threading.Event()
        self.when_idle = when_idle
        self.on_replied: Callable[[], None] = _nothing  # called after the replies to a batch
        self.threads = [threading.Thread(target=self._live, name=self.name, daemon=True)]

    def start(self, publish: bool) -> None:
        """Start to run what is admitted."""
        atexit.register(self._at_exit)
        if publish:
            name = f"{self.name}-status"
            self.threads.append(threading.Thread(target=self._publish, name=name, daemon=True))
        for thread in self.threads:
            thread.start()

    def close(self, reason: str, drain: bool, timeout: float | None = None) -> None:
        """Answer what waits, or fail it without `drain`; then end the threads and wait for them."""
        for request in self.admission.stop(reason, drain):
            self._fail(request, RunnerStopped(reason))
        # A future's callback, which runs on the engine's thread, may close the runner; a thread
        # cannot wait for itself, and the loop ends after the callback anyway.
        if threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join(timeout)

    def abandon(self) -> None:
        """Answer what waits and end, without waiting for that; the runner was garbage-collected.

        The collector may call it in any thread at any moment: it must not wait, and
        `Admission.stop` takes only a lock that the thread may hold already.
        """
        if not self.was_forked:
            self.admission.stop("the runner was garbage-collected")

    @property
    def was_forked(self) -> bool:
        """Whether this is a copy in a child of the process that it runs in, without its threads."""
        return self._forks != FORKS[0]

    def stats(self) -> RunnerStats:
        """Return the statistics of this moment."""
        admission = self.admission
        recorder = self.recorder
        waiting = admission.waiting_requests
        return RunnerStats(
            requests=admission.admitted,
            answered=recorder.answered,
            failed=recorder.failed,
            cancelled=admission.cancelled,
            refused=admission.refused,
            waiting_requests=waiting,
            waiting_tokens=admission.waiting_tokens,
            running_requests=max(0, admission.unanswered_requests - waiting),
            tokens=recorder.tokens,
            batches=recorder.batches,
            reruns=recorder.reruns,
            fill=recorder.tokens / max(1, recorder.batch_tokens),
            sequences_a_batch=recorder.sequences / max(1, recorder.batches),
            **recorder.times(),
        )

    def _live(self) -> None:
        reason = "the runner is closed"
        try:
            while self._step():
                pass
        except BaseException as error:
            LOGGER.critical("the engine of %s died", self.name, exc_info=True)
            reason = f"the runner's engine died: {type(error).__name__}: {error}"
        finally:
            # Whatever ended it, nobody may wait for an answer that will not come: stop admission
            # first, so that nothing arrives after the requests were collected.
            self.ended.set()
            waiting = self.admission.stop(reason, drain=False)
            for request in [*waiting, *self.admission.all_unanswered()]:
                self._fail(request, RunnerStopped(reason))
            self.on_replied()
            atexit.unregister(self._at_exit)

    def _step(self) -> bool:
        """Launch a batch that is due, reply to the one that is back, wait for the one that runs.

        Return False when there is nothing left to do.
        """
        running = self.running
        finished = self.finished
        if not (running or finished):
            self._use_idle_time()
        # Where nothing runs, what is due is launched before the replies to the last batch are made:
        # they take as long as a batch of short texts.
        batch = self.admission.next_batch(wait=not (running or finished), idle=not running)
        on_cpu = self.encoder.device.type == "cpu"
        with nullcontext() if on_cpu else self.admission.engine_busy:
            self.running = self._launch(batch) if batch else None
            if finished:
                self._finish(finished)
                self.on_replied()
        self.finished = _wait_for(running) if running else None
        if on_cpu and self.running and _is_back(self.running):  # the launch has computed it
            self._finish(_wait_for(self.running))
            self.on_replied()
            self.running = None
        return bool(batch or running or finished)

    def _use_idle_time(self) -> None:
        """Do what makes later batches faster until a request comes or nothing is left of it."""
        if not self.when_idle or not self.admission.wait_for_quiet(QUIET_SECONDS):
            return
        while self.when_idle and not (self.admission.queues or self.admission.stopped):
            try:
                if not self.when_idle():
                    return
            except Exception:
                LOGGER.warning("batches cannot be prepared; they run slower", exc_info=True)
                self.when_idle = None

    def _launch(self, batch: QueuedBatch) -> BatchInFlight:
        return BatchInFlight(batch, self.admission.clock(), _attempt(self._start, batch))

    def _start(self, batch: QueuedBatch) -> LaunchedBatch:
        sequences = _flat(batch)
        ends = accumulate(map(len, batch))
        packs = [range(end - len(row), end) for row, end in zip(batch, ends, strict=True)]
        packed = self.admission.shape.lay([sequence.encoding for sequence in sequences], packs)
        job = sequences[0].request.job
        return self.encoder.launch(packed, job.heads, job.only)

    def _finish(self, flight: BatchInFlight) -> None:
        """Reply to a batch that is back; where it failed, run its halves."""
        results = _attempt(_results, flight.outcome)
        if isinstance(results, BaseException):
            return self._divide(flight.batch, results)
        sequences = _flat(flight.batch)
        seconds = self.admission.clock() - flight.started
        lengths = [[sequence.tokens for sequence in row] for row in flight.batch]
        record = self.recorder.batch(lengths, results.tokens, seconds)
        self._reply(sequences, results.rows, record)
        if self.admission.timeout:
            answered = len({sequence.request for sequence in sequences})
            self.admission.linger(LINGER * seconds, answered)

    def _divide(self, batch: QueuedBatch, error: BaseException) -> None:
        """Run a failed batch again in halves; a sequence that fails by itself is the cause."""
        # Where the device is lost this raises and the engine dies at once, instead of failing
        # request after request.
        torch.zeros(1, device=self.encoder.device).cpu()
        # The frames where it was raised hold the tensors of the whole batch, which the halves need
        # the memory of.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()  # blocks of other sizes, which the halves cannot use
        sequences = _flat(batch)
        if len(sequences) == 1:
            return self._fail(sequences[0].request, request_error(error))
        sequences = [sequence for sequence in sequences if not sequence.request.future.done()]
        middle = len(sequences) // 2
        for half in (set(sequences[:middle]), set(sequences[middle:])):
            if half:
                self.recorder.rerun()
                rows = [[sequence for sequence in row if sequence in half] for row in batch]
                self._finish(_wait_for(self._launch(rows)))

    def _reply(
        self, sequences: Sequence[QueuedSequence], rows: Sequence[Row | None], record: BatchRecord
    ) -> None:
        """Give each sequence its row; answer the requests that are complete by that."""
        answers: list[tuple[QueuedRequest, Any]] = []
        for sequence, row in zip(sequences, rows, strict=True):
            request = sequence.request
            if row is None:
                self._fail(request, RequestFailed(NOT_FINITE))
                continue
            request.rows[sequence.index] = row
            request.remaining -= 1
            if not request.remaining:
                future = request.future
                future.ran = record
                future.waited = request.started_at - request.admitted_at
                answers.append((request, _attempt(request.job.finish, request.rows)))
        # Count before answering: who has its answer must find itself in the statistics.
        now = self.admission.clock()
        self.recorder.answer(
            [
                (now - request.admitted_at, request.future.waited, request.job.inputs)
                for request, answer in answers
                if not isinstance(answer, BaseException)
            ]
        )
        # All at once, which takes the lock once. Whoever asks for the statistics when it has its
        # answer must not be counted as running.
        self.admission.forget([request for request, _ in answers])
        try:
            for request, answer in answers:
                if isinstance(answer, BaseException):
                    self._fail(request, request_error(answer))
                else:
                    _settle(request.future.set_result, answer)
        except BaseException as error:  # nobody else knows of these any more
            for request, _ in answers:
                self._fail(request, RunnerStopped(f"the runner's engine died: {error!r}"))
            raise

    def _fail(self, request: QueuedRequest, error: BaseException) -> None:
        if not request.future.done():
            self.recorder.fail(request.job.inputs)
            _settle(request.future.set_exception, error)

    def _publish(self) -> None:
        """Publish the statistics once a second, in a thread that cannot harm the engine."""
        labels = {"model": self.encoder.name, "device": str(self.encoder.device)}
        try:
            with status.publishing(self.name, labels) as report_progress:
                while True:
                    stats = asdict(self.stats())
                    report_progress({**stats, "sequences": self.recorder.sequences})
                    if self.ended.wait(PUBLISH_SECONDS):
                        return
        except Exception:
            LOGGER.debug("the statistics cannot be published", exc_info=True)

    def _at_exit(self) -> None:
        """Stop before the interpreter is torn down: a thread inside torch would then crash it."""
        if not self.was_forked:
            self.close("the interpreter exits", drain=False, timeout=EXIT_SECONDS)


@cache
def count_forks() -> None:
    """Count in a child process that it is one; to ask for the process id costs a system call."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_count_fork)


def _count_fork() -> None:
    FORKS[0] += 1


def _nothing() -> None:
    """Do nothing after a batch, unless `PackRunner.on_replied` says what."""


def _flat(batch: QueuedBatch) -> list[QueuedSequence]:
    return [sequence for row in batch for sequence in row]


def _wait_for(flight: BatchInFlight) -> BatchInFlight:
    """Wait for a batch; an error on the device becomes its outcome."""
    if isinstance(flight.outcome, BaseException):
        return flight
    return replace(flight, outcome=_attempt(flight.outcome.wait))


def _is_back(flight: BatchInFlight) -> bool:
    return isinstance(flight.outcome, BaseException) or flight.outcome.is_back


def _results(outcome: LaunchedBatch | BaseException) -> BatchResults:
    if isinstance(outcome, BaseException):
        raise outcome
    rows: list[Row | None] = [*outcome.rows()]
    # One look at the whole batch; only where that fails, one at each sequence.
    if not outcome.finite():
        rows = [row if row and all(np.isfinite(x).all() for x in row) else None for row in rows]
    return BatchResults(rows, len(outcome.packed.ids))


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result, or what was raised; native code may raise more than `Exception`."""
    try:
        return function(*arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error


def request_error(error: BaseException) -> BaseException:
    """Return the error for a request that made the model fail, with its traceback as text.

    The frames themselves refer to the whole batch, and a caller that keeps the error would keep
    that too.
    """
    text = "".join(traceback.format_exception(error))
    for link in _chain(error):
        link.__traceback__ = None
    if isinstance(error, PackhorseError):
        return error
    failed = RequestFailed(f"the model failed on this request: {type(error).__name__}: {error}")
    failed.__cause__ = error
    failed.add_note(text)
    return failed


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error, its causes and the members of groups, each once: chains may loop."""
    chain: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in chain:
            continue
        chain[id(link)] = link
        pending += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            pending += cast("BaseExceptionGroup[BaseException]", link).exceptions
    return list(chain.values())


def _settle(settle: Callable[[Any], None], value: Any) -> None:
    """Set a future's result, unless somebody else did; errors of its callbacks are logged."""
    try:
        settle(value)
    except InvalidStateError:
        pass
    except BaseException:
        LOGGER.exception("a callback of a future raised")
