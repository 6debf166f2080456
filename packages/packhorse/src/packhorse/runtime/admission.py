"""Admission: which requests may wait, and which batch runs next. The only queue in the package.

Requests are admitted up to a number of tokens and of requests, and refused at once beyond it. An
admitted request is packed on arrival into the open batch of its `BatchQueue`, so that the next
batch is ready when the last one ends. There is one queue for all requests that need the same heads:
these can share a batch. A batch is due when it is full or when its oldest request has waited
`timeout`; while another batch runs only a full one is due, because a batch that is not full gains
by staying open until the device can take it. Without `wait_alone` a request that nobody is likely
to join does not wait: one that arrives when no two requests have been here together for
`COMPANY_SECONDS`.

A caller with many requests may reserve room for all of them and submit them one after another, so
that requests of other callers come in between; reserved room counts as if it were in use.

A job of several inputs, which a server makes of one client's request, is admitted as soon as there
is room for one of them: if it needed room for all, it would never be admitted while short requests
keep the queue nearly full. Its later jobs follow without a check, each when an earlier one was
answered. So what waits may exceed the limit by what one such request has in the queue.

Where a sequence does not fit, later ones may go before it until `lookahead` have been passed over;
those start the next batch, in their order, so none starves. A request that is cancelled before it
runs leaves at once: its place goes to others and its tokens back to the allowance.

Requests may come with a `Ticket`. Its share says whose they are: from the first one on batches are
filled by turns of the shares, when they are taken and not on arrival (`shares`), and no share can
fill the queue alone. Without shares nothing of that happens. Its deadline refuses a request that
cannot be answered in time, by what waits before it and by how long batches took lately.

**Locks.** `Admission._lock` guards everything here and is held for microseconds: nothing inside it
computes, tokenizes or calls user code. A thread that needs several locks takes them in this order:

    engine_busy  >  Admission._lock  >  the lock inside a future

The engine replies while it holds `engine_busy`; a reply runs `_done`, which takes `_lock`. `push`
takes both too, but one after the other, never together. Under `_lock` a future may be claimed
(`set_running_or_notify_cancel`), which takes its lock; in the other direction nothing happens,
because a future lets go of its lock before it calls `_done`.

**Waits.** Each of the three ends. The engine waits for a batch to be due: it is notified when one
becomes full, when the first request arrives and when the runner stops, and wakes by itself at the
next deadline. A patient `push` waits for room: it is notified whenever tokens or requests leave,
and they do leave, because the engine runs whatever waits; when the runner stops it raises. A
patient `push` then waits for `engine_busy`, which the engine holds only while it launches a batch,
replies to one or runs the halves of one that failed. The first two sleep at most `HEARTBEAT`
seconds at a time, in case a notification is ever lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from concurrent.futures._base import (
    CANCELLED,
    CANCELLED_AND_NOTIFIED,
    FINISHED,
    PENDING,
    RUNNING,
)
from contextlib import contextmanager
from typing import Any, NoReturn

from packhorse.errors import DeadlineExceeded, InputError, Overloaded, RunnerStopped
from packhorse.runtime.batches import PackedShape
from packhorse.runtime.shares import FairQueue, Share, ShareLedger, Ticket, may_take
from packhorse.runtime.statistics import BatchPace, BatchRecord
from packhorse.runtime.tasks import InferenceJob, Row
from packhorse.tokens import Encoding

BATCHES_AHEAD = 3  # that patient callers keep waiting
COMPANY_SECONDS = 0.1  # after so long alone, a request expects no other to join its batch
HEARTBEAT = 60.0  # seconds; the longest sleep, so a lost notification costs no more than this
# After an interactive request no batch of the bulk lane is launched ahead of time for so long: the
# next interactive request would have to wait for two of them. After requests of different shares
# came, others are expected for as long.
LANE_SECONDS = 60.0
# Of the tokens of a batch: so many go into one that is launched ahead while several shares are
# here. Who comes then waits for what runs, for what was launched ahead and for its own batch.
AHEAD_PART = 0.5
# Times the limit on what waits, for shares of which nothing waits.
NEWCOMERS = 2


class PackedFuture(Future[Any]):
    """A future that, once it has a result, knows the batch it ran in and how long it waited.

    It behaves as any other future and costs half as much: the condition that `result` waits on is
    created by the first thread that waits, and a request of the server has none, only a callback.
    Callbacks are let go of when they have run, because they often refer to the future.
    """

    ran: BatchRecord | None = None  # the last of its batches
    waited = 0.0  # seconds from admission until its first batch started

    def __init__(self, on_done: Callable[[Future[Any]], None] | None = None) -> None:
        """Create a future whose first callback is `on_done`."""
        # Not that of `Future`, which creates the condition. These are its attributes.
        self._lock = threading.RLock()
        self._created: threading.Condition | None = None
        self._state = PENDING
        self._result = None
        self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[Any]], object]] = []
        if on_done is not None:
            self._done_callbacks.append(on_done)

    @property
    def _condition(self) -> threading.Condition:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the methods of `Future` lock and wait on; its lock is `_lock`."""
        with self._lock:
            if self._created is None:
                self._created = threading.Condition(self._lock)
            return self._created

    def set_running_or_notify_cancel(self) -> bool:
        """Make the future uncancellable; return False if it was cancelled."""
        with self._lock:
            if self._state == PENDING:
                self._state = RUNNING
                return True
        return super().set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Call `fn` with the future when it is done."""
        with self._lock:
            if self._state in (PENDING, RUNNING):
                self._done_callbacks.append(fn)
                return
        super().add_done_callback(fn)

    def set_result(self, result: Any) -> None:
        """Set the result, wake those who wait and run the callbacks."""
        with self._lock:
            nobody_waits = self._created is None and self._state in (PENDING, RUNNING)
            if nobody_waits:
                self._result = result
                self._state = FINISHED
        if nobody_waits:
            self._invoke_callbacks()
        else:
            super().set_result(result)

    def cancelled(self) -> bool:
        """Return whether the future was cancelled."""
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED)

    def done(self) -> bool:
        """Return whether the future was cancelled or has a result or an error."""
        return self._state not in (PENDING, RUNNING)

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, or raise the error; wait for it at most `timeout` seconds."""
        if self._state == FINISHED and self._exception is None:
            return self._result
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None if there is a result; wait at most `timeout` seconds."""
        if self._state == FINISHED:
            return self._exception
        return super().exception(timeout)

    def _invoke_callbacks(self) -> None:
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks = []


class QueuedRequest:
    """An admitted job, its future, and the results of its sequences as they come in."""

    __slots__ = (
        "admitted_at",
        "future",
        "is_waiting",
        "job",
        "queue_key",
        "remaining",
        "rows",
        "sequences",
        "share",
        "started_at",
    )

    def __init__(
        self,
        job: InferenceJob,
        now: float,
        on_done: Callable[[Future[Any]], None],
        share: Share | None = None,
    ) -> None:
        self.job = job
        self.share = share
        # Requests with the same key can share a batch.
        is_bulk = share is not None and share.bulk
        self.queue_key: Hashable = (job.heads, job.only, is_bulk)
        self.future = PackedFuture(on_done)
        self.sequences = [QueuedSequence(self, i, item) for i, item in enumerate(job.sequences)]
        self.rows: list[Row] = [()] * len(self.sequences)
        self.remaining = len(self.sequences)  # sequences without a result
        self.is_waiting = True  # until the first of them runs
        self.admitted_at = now
        self.started_at = now


class QueuedSequence:
    """One sequence of a request."""

    __slots__ = ("encoding", "index", "request", "tokens")

    def __init__(self, request: QueuedRequest, index: int, encoding: Encoding) -> None:
        self.request = request
        self.index = index  # among the sequences of the request
        self.encoding = encoding
        self.tokens = len(encoding.ids)


QueuedBatch = list[list[QueuedSequence]]  # the sequences of each row


class BatchQueue:
    """Requests that can share a batch: the open batch, and an overflow of what did not fit.

    Once it is divided between shares, all wait in a `FairQueue` until a batch is taken.
    It neither locks nor waits: `Admission` does both, and decides when a batch is taken.
    """

    def __init__(self, shape: PackedShape, lookahead: int, share: Share | None = None) -> None:
        """Create a queue for requests of one share, until `divide` is called."""
        self.shape = shape
        self.lookahead = lookahead
        self.share = share
        self.is_bulk = share is not None and share.bulk
        self.fair: FairQueue[QueuedSequence] | None = None
        # In the other modes a batch is one row, and two comparisons decide what fits.
        self.packer = shape.packer() if shape.mode == "mask" else None
        # Dictionaries as ordered sets: a cancelled sequence is removed in constant time.
        self.open: dict[QueuedSequence, None] = {}
        self.overflow: OrderedDict[QueuedSequence, None] = OrderedDict()
        self.tokens = 0  # of the open batch
        self.taken = 0  # tokens of the batch that was taken last
        self.stale = False  # the packer still counts sequences that were removed

    def __len__(self) -> int:
        if self.fair is not None:
            return len(self.fair)
        return len(self.open) + len(self.overflow)

    @property
    def full(self) -> bool:
        """Whether something did not fit, or nothing more would."""
        if self.fair is not None:
            return self.fair.tokens >= self.shape.tokens or len(self.fair) >= (
                self.shape.max_sequences or math.inf
            )
        return (
            bool(self.overflow)
            or self.tokens == self.shape.tokens
            or len(self.open) == self.shape.max_sequences
        )

    @property
    def oldest(self) -> float:
        """When the request that waits longest was admitted."""
        if self.fair is not None:
            return min(sequence.request.admitted_at for sequence in self.fair.firsts())
        # Both are in order of admission, but one passed over may be older than the open batch.
        fronts = [next(iter(sequences)) for sequences in (self.open, self.overflow) if sequences]
        return min(sequence.request.admitted_at for sequence in fronts)

    def add(self, sequence: QueuedSequence) -> None:
        """Pack a sequence into the open batch, or keep it for a later one."""
        if self.fair is not None:
            return self.fair.add(sequence.request.share, sequence)
        if len(self.overflow) <= self.lookahead and self._pack(sequence):
            return
        self.overflow[sequence] = None
        if self.stale:
            self._repack()

    def remove(self, sequence: QueuedSequence) -> bool:
        """Remove a sequence; return whether it was still here."""
        if self.fair is not None:
            return self.fair.remove(sequence.request.share, sequence)
        if sequence in self.open:
            del self.open[sequence]
            self.tokens -= sequence.tokens
            self.stale = True
            return True
        if sequence in self.overflow:
            del self.overflow[sequence]
            return True
        return False

    def take(self, part: float = 1.0) -> QueuedBatch:
        """Return the open batch and start the next one from the overflow.

        A divided queue fills about this part of a batch.
        """
        if self.fair is not None:
            self.fair.fill(self._pack, part * self.shape.tokens)
        if self.stale:
            self._repack()
        sequences = list(self.open)
        packs = self.packer.flush() if self.packer is not None else [range(len(sequences))]
        batch = [[sequences[i] for i in pack] for pack in packs]
        self.taken = self.tokens
        self.open = {}
        self.tokens = 0
        self._refill()
        return batch

    def divide(self, ledger: ShareLedger) -> None:
        """Fill batches from now on by turns of the shares."""
        self._repack()  # in order of admission
        self.fair = FairQueue(ledger)
        for sequence in (*self.open, *self.overflow):
            self.fair.add(sequence.request.share, sequence)
        if self.packer is not None:
            self.packer.flush()
        self.open = {}
        self.overflow = OrderedDict()
        self.tokens = 0

    def turn(self, ledger: ShareLedger) -> float:
        """Return the virtual time of its share that is furthest behind."""
        return ledger.turn(self.share) if self.fair is None else self.fair.turn()

    def _pack(self, sequence: QueuedSequence) -> bool:
        if self.packer is not None:
            fits = self.packer.add(sequence.tokens) is not None
        else:
            fits = self.tokens + sequence.tokens <= self.shape.tokens
            fits &= len(self.open) != self.shape.max_sequences
        if not fits:
            return False
        self.open[sequence] = None
        self.tokens += sequence.tokens
        return True

    def _refill(self) -> None:
        """Move from the overflow what fits, until too many were passed over."""
        passed_over: list[QueuedSequence] = []
        while self.overflow and len(passed_over) <= self.lookahead:
            sequence, _ = self.overflow.popitem(last=False)
            if not self._pack(sequence):
                passed_over.append(sequence)
        for sequence in reversed(passed_over):
            self.overflow[sequence] = None
            self.overflow.move_to_end(sequence, last=False)

    def _repack(self) -> None:
        """Pack everything again in order of admission; a packer cannot remove a sequence."""
        sequences = sorted(
            (*self.open, *self.overflow), key=lambda sequence: sequence.request.admitted_at
        )
        if self.packer is not None:
            self.packer.flush()
        self.open = {}
        self.tokens = 0
        self.stale = False
        self.overflow = OrderedDict.fromkeys(sequences)
        self._refill()


class Admission:
    """All queues, and how much may wait in them. Shared by all threads."""

    def __init__(
        self,
        shape: PackedShape,
        *,
        timeout: float,
        max_tokens: int,
        max_requests: int,
        lookahead: int = 0,
        wait_alone: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape = shape
        self.timeout = timeout
        self.lookahead = lookahead
        self.wait_alone = wait_alone
        self.clock = clock
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        # Patient callers keep the engine busy and no more: a thread that fills a long queue takes
        # the interpreter away from the engine.
        self.patient_tokens = min(max_tokens, BATCHES_AHEAD * shape.tokens)
        self.waiting_tokens = 0
        self.waiting_requests = 0
        self.preparing = 0  # requests that are being tokenized
        self.reserved_tokens = 0
        self.reserved_requests = 0
        self.admitted = 0
        self.refused = 0
        self.cancelled = 0
        self.unanswered: dict[Future[Any], QueuedRequest] = {}  # waiting or running
        self.unanswered_requests = 0  # inputs of these
        self.queues: dict[Hashable, BatchQueue] = {}  # none of them is empty
        self.ledger: ShareLedger | None = None  # from the first request with a share on
        self.pace = BatchPace()  # the engine's recorder measures it
        self.busy_until = 0.0  # when the batches that were taken will have run
        self.last_seconds = 0.0  # that the one taken last will take
        self.stopped: str | None = None  # the reason why nothing is admitted any more
        self.company_at = -math.inf  # when a request last arrived before another was answered
        self.not_before = 0.0  # until then only full batches are due, see `linger`
        self.expected = 0  # requests after whose arrival `not_before` ends early
        self.flushed_at = -math.inf  # what was admitted by then waits for no others
        # Held by the engine while it prepares a batch for an accelerator or replies to one. Patient
        # callers wait for it. Otherwise they would compete with the engine for the interpreter,
        # which switches threads only every 5 ms: the engine would lose that much at every call of
        # torch, which releases the interpreter.
        self.engine_busy = threading.Lock()
        # Reentrant, because the garbage collector may finalize a runner, and so call `stop`, in a
        # thread that holds this very lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the engine waits here
        self._room = threading.Condition(self._lock)  # patient requests wait here

    @contextmanager
    def check_capacity(self, share: Share | None = None) -> Generator[None]:
        """Raise `Overloaded` if nothing would be admitted; count a request while it is tokenized.

        So the requests that are being tokenized, which are not admitted yet, are bounded as well.
        """
        with self._lock:
            if not self._fits(1, self.max_tokens, share=share):
                self._refuse(share)
            self.preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self.preparing -= 1
                self._room.notify_all()

    def reserve(self, requests: int, tokens: int) -> None:
        """Reserve room for requests that are pushed one after another, or raise `Overloaded`."""
        if requests > self.max_requests:
            raise InputError(
                f"{requests} requests will never be admitted together: at most "
                f"{self.max_requests} may wait; raise max_waiting_requests or send fewer at once"
            )
        with self._lock:
            if not self._fits(tokens, self.max_tokens, requests):
                self._refuse()
            self.reserved_requests += requests
            self.reserved_tokens += tokens

    def release(self, requests: int, tokens: int) -> None:
        """Give back reserved room that will not be used."""
        with self._lock:
            self.reserved_requests -= requests
            self.reserved_tokens -= tokens
            self._room.notify_all()

    def push_reserved(self, job: InferenceJob) -> PackedFuture:
        """Admit a job for which room was reserved."""
        with self._lock:
            if self.stopped:
                raise RunnerStopped(self.stopped)
            self.reserved_requests -= job.inputs
            self.reserved_tokens -= job.tokens
            return self._admit(job, job.tokens)

    def push(
        self, job: InferenceJob, patient: bool = False, share: Share | None = None
    ) -> PackedFuture:
        """Admit a job; where there is no room, wait if `patient`, else raise `Overloaded`."""
        tokens = job.tokens
        input_tokens = -(-tokens // max(1, job.inputs))
        if input_tokens > self.max_tokens:
            raise InputError(
                f"a request of {input_tokens} tokens will never be admitted: at most "
                f"{self.max_tokens} may wait; raise max_waiting_tokens or split the request"
            )
        with self._lock:
            if patient:
                while not self._fits(tokens, self.patient_tokens, job.inputs, share):
                    self._room.wait(HEARTBEAT)
            elif not self._fits(input_tokens, self.max_tokens, share=share):
                self._refuse(share)
            future = self._admit(job, tokens, share)
        if patient:
            # Outside `_lock`: a reply, made with `engine_busy` held, needs `_lock` to finish.
            with self.engine_busy:
                pass
        return future

    def push_follow_up(self, job: InferenceJob, share: Share | None = None) -> PackedFuture:
        """Admit a later job of a request of which another was admitted before."""
        with self._lock:
            if self.stopped:
                raise RunnerStopped(self.stopped)
            return self._admit(job, job.tokens, share)

    def check_deadline(self, tokens: int, ticket: Ticket) -> None:
        """Raise `DeadlineExceeded` if a request of so many tokens cannot be answered in time.

        Where nothing waits or runs it may try: what is known of the speed may be wrong, and nothing
        else would correct it.
        """
        with self._lock:
            if not self.unanswered:
                return
            seconds = self._seconds_until_run(tokens, ticket.share)
            left = ticket.deadline - self.clock()
            if seconds <= left:
                return
            self.refused += 1
            wait = self._seconds_until_run(0, ticket.share)
        error = DeadlineExceeded(
            f"the answer would take about {seconds:.1f} s, and the request allows "
            f"{max(0.0, left):.1f} s; try again later"
        )
        error.retry_after = min(wait, seconds - max(0.0, left))
        raise error

    def seconds_until_run(self, share: Share | None = None) -> float:
        """Return in how many seconds what waits now will have run; 0 if nothing is known."""
        with self._lock:
            return self._seconds_until_run(0, share)

    def next_batch(self, wait: bool, idle: bool | None = None) -> QueuedBatch | None:
        """Return the batch that is due; None if there is none, or with `wait`, if none will come.

        Unless the device is `idle` (by default, with `wait`) only a full one is due.
        """
        idle = wait if idle is None else idle
        with self._lock:
            # No batch is running, or only the last: estimates that are too long must not add up.
            self.busy_until = (
                0.0 if idle else min(self.busy_until, self.clock() + self.last_seconds)
            )
            while True:
                now = self.clock()
                while key := self._due(now, idle):
                    if batch := self._take(key, now, ahead=not idle):
                        return batch
                if not wait or (self.stopped and not self.queues):
                    return None
                self._changed.wait(self._until_due(now))

    def wait_for_quiet(self, seconds: float) -> bool:
        """Wait until no request has come for so many seconds; False as soon as one waits."""
        with self._lock:
            until = self.clock() + seconds
            while not (self.queues or self.stopped):
                left = until - self.clock()
                if left <= 0:
                    return True
                self._changed.wait(left)
            return False

    def linger(self, seconds: float, answered: int) -> None:
        """Give clients that were just answered that long to send their next requests.

        It ends early once that many have come. A batch that leaves without them is small, and then
        they do not all fit into the next one, so that some would wait for three batches.
        """
        with self._lock:
            self.not_before = self.clock() + seconds
            self.expected = answered

    def flush(self) -> None:
        """Let what waits go without waiting for more: its caller has no more to submit."""
        with self._lock:
            self.flushed_at = self.clock()
            self._changed.notify()

    def stop(self, reason: str, drain: bool = True) -> list[QueuedRequest]:
        """Admit nothing more. Without `drain` remove what waits and return it.

        A returned request is claimed: only the caller can set its result.
        """
        with self._lock:
            self.stopped = self.stopped or reason
            waiting: list[QueuedRequest] = []
            if not drain:
                waiting = [request for request in self.unanswered.values() if request.is_waiting]
            claimed = [request for request in waiting if self._claim(request)]
            for request in claimed:
                del self.unanswered[request.future]
                self.unanswered_requests -= request.job.inputs
            for request in waiting:
                self._withdraw(request)
            self._changed.notify_all()
            self._room.notify_all()
            return claimed

    def forget(self, requests: Sequence[QueuedRequest]) -> None:
        """Count requests as answered, of which everything ran; their futures get results next."""
        with self._lock:
            for request in requests:
                if self.unanswered.pop(request.future, None) is not None:
                    self.unanswered_requests -= request.job.inputs
                    # Sequences refer to their request: without this, garbage would pile up.
                    request.sequences.clear()

    def all_unanswered(self) -> list[QueuedRequest]:
        """Return the requests that wait or run at this moment."""
        with self._lock:
            return list(self.unanswered.values())

    # What follows is called with `_lock` held.

    def _fits(self, tokens: int, limit: int, requests: int = 1, share: Share | None = None) -> bool:
        if self.stopped:
            raise RunnerStopped(self.stopped)
        ahead_requests = self.waiting_requests + self.reserved_requests + self.preparing
        ahead_tokens = self.waiting_tokens + self.reserved_tokens
        max_requests = self.max_requests
        if share is not None and self.ledger is not None:
            held = self.ledger.tokens[share]
            if not held:  # finds room even if others have filled it, with one request
                max_requests *= NEWCOMERS
                limit *= NEWCOMERS
            elif not (
                may_take(held, limit - ahead_tokens)
                and may_take(self.ledger.requests[share], max_requests - ahead_requests)
            ):
                return False
        # Where nothing waits, a request larger than the patient limit is let in, or it never would.
        room = ahead_tokens + tokens <= limit or not ahead_tokens
        return ahead_requests + requests <= max_requests and room

    def _refuse(self, share: Share | None = None) -> NoReturn:
        self.refused += 1
        requests = self.waiting_requests + self.reserved_requests + self.preparing
        tokens = self.waiting_tokens + self.reserved_tokens
        waiting = f"{requests} requests of {tokens} tokens" if tokens else f"{requests} requests"
        held = self.ledger.tokens[share] if share is not None and self.ledger else 0
        if held:
            waiting += f", {held} of these tokens for this client"
        error = Overloaded(
            f"{waiting} wait already (max_waiting_requests is {self.max_requests}, "
            f"max_waiting_tokens {self.max_tokens}); try again in a moment"
        )
        error.retry_after = self._seconds_until_run(0, share)
        raise error

    def _seconds_until_run(self, tokens: int, share: Share | None) -> float:
        """Return in how many seconds so many more tokens of a share will have run."""
        waiting = self.waiting_tokens + self.reserved_tokens
        ahead = waiting + tokens
        if self.ledger is not None:
            before = self.ledger.tokens_ahead(share, tokens, waiting)
            batches = math.ceil(before / self.shape.tokens)
            ahead = min(ahead, batches * self.shape.tokens)  # others fill the last batch
        running = max(0.0, self.busy_until - self.clock())
        return running + self.pace.seconds(ahead, self.shape.tokens)

    def _admit(self, job: InferenceJob, tokens: int, share: Share | None = None) -> PackedFuture:
        request = QueuedRequest(job, self.clock(), self._done, share)
        if self.unanswered:
            self.company_at = request.admitted_at
        self.admitted += job.inputs
        self.unanswered_requests += job.inputs
        self.unanswered[request.future] = request
        first = not self.waiting_requests
        self.waiting_requests += job.inputs
        self.waiting_tokens += tokens
        queue = self.queues.get(request.queue_key)
        if queue is None:
            queue = BatchQueue(self.shape, self.lookahead, share)
            self.queues[request.queue_key] = queue
        if share is not None or self.ledger is not None:
            self._enter_share(queue, request, tokens)
        for sequence in request.sequences:
            queue.add(sequence)
        self.expected -= 1
        if not self.expected:
            self.not_before = 0.0
        # Wake the engine only where its deadline changes: waking it for each request would cost
        # more than admitting the request.
        if first or queue.full or not self.expected:
            self._changed.notify()
        return request.future

    def _enter_share(self, queue: BatchQueue, request: QueuedRequest, tokens: int) -> None:
        """Count what a share has waiting; divide the queue if it is not the only one there."""
        if self.ledger is None:
            self.ledger = ShareLedger()
        self.ledger.add(request.share, tokens, request.job.inputs)
        self.ledger.arrive(request.share, request.admitted_at)
        if queue.fair is not None:
            return
        if not queue:
            self.ledger.activate(request.share)
        if request.share != queue.share:
            queue.divide(self.ledger)

    def _done(self, future: Future[Any]) -> None:
        """Forget a request whose future has a result or was cancelled; takes the lock itself."""
        if future not in self.unanswered:  # `forget` was called, as for most
            return
        with self._lock:
            request = self.unanswered.pop(future, None)
            if request is None:
                return
            self.unanswered_requests -= request.job.inputs
            if not request.remaining:  # all of it ran: none of it waits
                request.sequences.clear()
                return
            if request.is_waiting and future.cancelled():
                self.cancelled += request.job.inputs
            self._withdraw(request)

    def _due(self, now: float, idle: bool) -> Hashable:
        """Return the key of the queue whose batch goes next: of those due, the oldest."""
        due = [
            key
            for key, queue in self.queues.items()
            if queue.full
            or queue.oldest <= self.flushed_at
            or (idle and (self.stopped or now >= self._deadline(queue)))
        ]
        if due and not idle and len(self.queues) > 1:
            # A batch will be launched anyway: one that is not full and has waited long enough may
            # be older. Otherwise it would wait for as long as others are full.
            due = [
                key
                for key, queue in self.queues.items()
                if queue.full or queue.oldest <= self.flushed_at or now >= self._deadline(queue)
            ]
        if self.ledger is not None:
            return self._next_turn(due, self.ledger, now, idle)
        if len(due) < 2:
            return due[0] if due else None
        return min(due, key=lambda key: self.queues[key].oldest)

    def _next_turn(
        self, due: list[Hashable], ledger: ShareLedger, now: float, idle: bool
    ) -> Hashable:
        """Return, of the queues that are due, the one with the share that is furthest behind."""
        interactive = [key for key in due if not self.queues[key].is_bulk]
        bulk = [key for key in due if self.queues[key].is_bulk]
        if bulk and ledger.owes_bulk(self.shape.tokens):
            interactive = []
        elif bulk and not idle and now - ledger.interactive_at < LANE_SECONDS:
            bulk = []
        elif bulk and not interactive:
            # What would have waited for company would now wait for a whole batch instead.
            interactive = [key for key, queue in self.queues.items() if not queue.is_bulk]
        keys = interactive or bulk
        if not keys:
            return None
        return min(keys, key=lambda key: (self.queues[key].turn(ledger), self.queues[key].oldest))

    def _until_due(self, now: float) -> float:
        if not self.queues:
            return HEARTBEAT
        first = min(map(self._deadline, self.queues.values()))
        return min(HEARTBEAT, max(0.0, first - now))

    def _deadline(self, queue: BatchQueue) -> float:
        """Return when its batch is due even if it is not full."""
        oldest = queue.oldest
        waits = self.wait_alone or oldest - self.company_at < COMPANY_SECONDS
        return max(oldest + self.timeout if waits else oldest, self.not_before)

    def _take(self, key: Hashable, now: float, ahead: bool = False) -> QueuedBatch | None:
        queue = self.queues[key]
        part = 1.0
        if ahead and self.ledger is not None and now - self.ledger.changed_at < LANE_SECONDS:
            part = AHEAD_PART
            if queue.fair is None:
                queue.divide(self.ledger)
        batch = queue.take(part)
        if self.ledger is not None:
            self.ledger.settle(queue.is_bulk, queue.taken)
            if queue.fair is None:
                self.ledger.begin(queue.share)
                self.ledger.charge(queue.share, queue.taken)
        self.last_seconds = self.pace.seconds(queue.taken, self.shape.tokens)
        self.busy_until = max(now, self.busy_until) + self.last_seconds
        self._drop_if_empty(key)
        self._room.notify_all()
        started = [[sequence for sequence in row if self._start(sequence, now)] for row in batch]
        return started if any(started) else None

    def _start(self, sequence: QueuedSequence, now: float) -> bool:
        """Count a sequence as running; False if its request was cancelled a moment ago."""
        self.waiting_tokens -= sequence.tokens
        request = sequence.request
        if self.ledger is not None:
            self.ledger.add(request.share, -sequence.tokens)
        if not request.is_waiting:  # another sequence of it went before
            return not request.future.done()
        request.started_at = now
        return self._claim(request)

    def _claim(self, request: QueuedRequest) -> bool:
        """Make the future uncancellable; False if it was cancelled or has a result already."""
        self._stop_waiting(request)
        try:
            runs = request.future.set_running_or_notify_cancel()
        except RuntimeError:  # somebody else set its result
            return False
        if not runs:
            self.cancelled += request.job.inputs
        return runs

    def _withdraw(self, request: QueuedRequest) -> None:
        """Remove those sequences of a request that still wait."""
        queue = self.queues.get(request.queue_key)
        for sequence in request.sequences:
            if queue is not None and queue.remove(sequence):
                self.waiting_tokens -= sequence.tokens
                if self.ledger is not None:
                    self.ledger.add(request.share, -sequence.tokens)
        # Sequences refer to their request: break the cycle, or garbage piles up until a collection.
        request.sequences.clear()
        self._stop_waiting(request)
        self._drop_if_empty(request.queue_key)
        self._room.notify_all()

    def _stop_waiting(self, request: QueuedRequest) -> None:
        if request.is_waiting:
            self.waiting_requests -= request.job.inputs
            if self.ledger is not None:
                self.ledger.add(request.share, 0, -request.job.inputs)
        request.is_waiting = False

    def _drop_if_empty(self, key: Hashable) -> None:
        if key in self.queues and not self.queues[key]:
            del self.queues[key]
