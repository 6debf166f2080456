"""Who may wait, and who goes next: the only queue in the house.

Requests are admitted up to a number of tokens and of requests, and refused at once beyond it. What
is admitted is packed as it arrives, into the open batch of its line, so that the next batch is
ready when the last one is done. A line is for requests that ask the same of the model (the same
heads): these can share a batch. A batch is due when it is full or when its oldest request has
waited `timeout`; while another one runs only a full one is, because one that is not full gains by
staying open until the device can take it.

Who has many requests may have room promised for all of them and let them in one after the other, so
that others come in between: what was promised counts as if it waited.

Where a sequence does not fit, later ones may go before it until `lookahead` have been passed over;
those open the next batch, in their order, so no one starves. A request that is cancelled before it
runs leaves at once: its place goes to others and its tokens back to the allowance.

One lock, held for microseconds, guards all of this; the engine is woken only for what it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from packhorse.errors import InputError, Overloaded, RunnerStopped
from packhorse.runtime.jobs import Job
from packhorse.runtime.lines import Awaited, Batch, Line, Piece, Request
from packhorse.runtime.modes import Shape

BATCHES_AHEAD = 3
HEARTBEAT = 60.0  # the longest sleep; a wake-up that was lost costs no more than this


class Admission:
    """The lines, and how much may stand in them. Shared by all threads."""

    def __init__(
        self,
        shape: Shape,
        *,
        timeout: float,
        max_tokens: int,
        max_requests: int,
        lookahead: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape, self.timeout, self.lookahead, self.clock = shape, timeout, lookahead, clock
        self.max_tokens, self.max_requests = max_tokens, max_requests
        # Those who are patient keep the engine fed and no more: a thread that fills a long queue
        # takes the interpreter from the engine.
        self.ahead = min(max_tokens, BATCHES_AHEAD * shape.tokens)
        self.waiting_tokens = self.waiting_requests = self.at_door = 0
        self.promised_tokens = self.promised_requests = 0
        self.admitted = self.refused = self.cancelled = 0
        self.unanswered: dict[Future[Any], Request] = {}  # waiting or running
        self.lines: dict[Hashable, Line] = {}
        self.stopped: str | None = None  # why no one is admitted any more
        self.not_before = 0.0  # no batch goes out part full
        self.expected = 0  # requests that end that
        # Held by the engine while it prepares a batch for an accelerator or replies to one. Those
        # who are patient wait for that: else it gets the interpreter from them only every 5 ms,
        # after each call of torch anew.
        self.hands = threading.Lock()
        # Reentrant: the garbage collector may let go of a runner while its own lock is held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the engine waits here
        self._room = threading.Condition(self._lock)  # patient requests wait here

    @contextmanager
    def door(self) -> Iterator[None]:
        """Held while a request is made ready: so those being tokenized are bounded as well."""
        with self._lock:
            if not self._fits(1, self.max_tokens):
                self._refuse()
            self.at_door += 1
        try:
            yield
        finally:
            with self._lock:
                self.at_door -= 1
                self._room.notify_all()

    def promise(self, requests: int, tokens: int) -> None:
        """Keep room for requests that are pushed one after the other, or raise Overloaded."""
        if requests > self.max_requests:
            raise InputError(
                f"{requests} requests will never be admitted together: at most "
                f"{self.max_requests} may wait; raise max_waiting_requests or divide them"
            )
        with self._lock:
            if not self._fits(tokens, self.max_tokens, requests):
                self._refuse()
            self.promised_requests += requests
            self.promised_tokens += tokens

    def release(self, requests: int, tokens: int) -> None:
        """They will not come after all."""
        with self._lock:
            self.promised_requests -= requests
            self.promised_tokens -= tokens
            self._room.notify_all()

    def push_promised(self, job: Job) -> Awaited:
        """Let a job wait its turn for which there is room because it was promised."""
        with self._lock:
            if self.stopped:
                raise RunnerStopped(self.stopped)
            self.promised_requests -= 1
            self.promised_tokens -= job.tokens
            return self._admit(Request(job, self.clock()), job.tokens)

    def push(self, job: Job, patient: bool = False) -> Awaited:
        """Let a job wait its turn. Where there is no room, wait for some or raise Overloaded."""
        tokens = job.tokens
        if tokens > self.max_tokens:
            raise InputError(
                f"a request of {tokens} tokens will never be admitted: at most "
                f"{self.max_tokens} may wait; raise max_waiting_tokens or divide it"
            )
        with self._lock:
            while not self._fits(tokens, self.ahead if patient else self.max_tokens):
                if not patient:
                    self._refuse()
                self._room.wait(HEARTBEAT)
            future = self._admit(Request(job, self.clock()), tokens)
        if patient:
            with self.hands:
                pass
        return future

    def next_batch(self, wait: bool) -> Batch | None:
        """The batch that is due; None if there is none yet, or with `wait`, if none will ever be.

        Without `wait` another one is running: only a full batch is due then.
        """
        with self._lock:
            while True:
                now = self.clock()
                while key := self._due(now, idle=wait):
                    if batch := self._take(key, now):
                        return batch
                if not wait or (self.stopped and not self.lines):
                    return None
                self._changed.wait(self._until_due(now))

    def linger(self, seconds: float, answered: int) -> None:
        """Those who were just answered may ask again at once: give them that long to join.

        No longer than until so many have come: a batch that leaves without them is small, and then
        they do not all fit into the next, so that some wait for three.
        """
        with self._lock:
            self.not_before, self.expected = self.clock() + seconds, answered

    def stop(self, why: str, drain: bool = True) -> list[Request]:
        """Admit no one any more. Without `drain` those who wait leave; they are returned.

        Whoever gets them is the only one to answer them.
        """
        with self._lock:
            self.stopped = self.stopped or why
            waiting = [] if drain else [r for r in self.unanswered.values() if r.waiting]
            left = [request for request in waiting if self._claim(request)]
            for request in left:
                del self.unanswered[request.future]
            for request in waiting:
                self._withdraw(request)
            self._changed.notify_all()
            self._room.notify_all()
            return left

    def all_unanswered(self) -> list[Request]:
        """Those who wait or run at this moment."""
        with self._lock:
            return list(self.unanswered.values())

    def _fits(self, tokens: int, limit: int, requests: int = 1) -> bool:
        if self.stopped:
            raise RunnerStopped(self.stopped)
        before = self.waiting_requests + self.promised_requests + self.at_door
        ahead = self.waiting_tokens + self.promised_tokens
        return before + requests <= self.max_requests and (ahead + tokens <= limit or not ahead)

    def _refuse(self) -> None:
        self.refused += 1
        requests = self.waiting_requests + self.promised_requests + self.at_door
        ahead = self.waiting_tokens + self.promised_tokens
        counted = f"{requests} requests of {ahead} tokens" if ahead else f"{requests} requests"
        raise Overloaded(
            f"{counted} wait already (max_waiting_requests is {self.max_requests}, "
            f"max_waiting_tokens {self.max_tokens}); try again in a moment"
        )

    def _admit(self, request: Request, tokens: int) -> Awaited:
        self.admitted += 1
        self.unanswered[request.future] = request
        request.future.add_done_callback(self._done)
        first = not self.waiting_requests
        self.waiting_requests += 1
        self.waiting_tokens += tokens
        line = self.lines.get(request.line)
        if line is None:
            line = self.lines[request.line] = Line(self.shape, self.lookahead)
        for piece in request.pieces:
            line.add(piece)
        self.expected -= 1
        if not self.expected:
            self.not_before = 0.0
        if first or line.full or not self.expected:
            self._changed.notify()
        return request.future

    def _done(self, future: Future[Any]) -> None:
        """Called by every future that is answered or cancelled."""
        with self._lock:
            request = self.unanswered.pop(future, None)
            if request is None:
                return
            if not request.left:  # all of it was run: nothing of it waits
                request.pieces.clear()
                return
            self.cancelled += request.waiting and future.cancelled()
            self._withdraw(request)

    def _due(self, now: float, idle: bool) -> Hashable:
        """The line whose batch goes next, of those that are due the one that waits longest."""
        due = [
            (line.oldest, i, key)
            for i, (key, line) in enumerate(self.lines.items())
            if line.full or (idle and (self.stopped or now >= self._deadline(line)))
        ]
        return min(due)[2] if due else None

    def _until_due(self, now: float) -> float:
        if not self.lines:
            return HEARTBEAT
        first = min(map(self._deadline, self.lines.values()))
        return min(HEARTBEAT, max(0.0, first - now))

    def _deadline(self, line: Line) -> float:
        """When its batch goes out, full or not."""
        return max(line.oldest + self.timeout, self.not_before)

    def _take(self, key: Hashable, now: float) -> Batch | None:
        batch = self.lines[key].take()
        self._forget_if_empty(key)
        self._room.notify_all()
        begun = [[piece for piece in row if self._begin(piece, now)] for row in batch]
        return begun if any(begun) else None

    def _begin(self, piece: Piece, now: float) -> bool:
        """It goes to the device, unless it was cancelled a moment ago."""
        self.waiting_tokens -= piece.tokens
        request = piece.request
        if not request.waiting:  # another sequence of it went before
            return not request.future.done()
        request.started = now
        return self._claim(request)

    def _claim(self, request: Request) -> bool:
        """From here on the answer is ours to give; False if it was cancelled or given before."""
        self._waits_no_more(request)
        try:
            runs = request.future.set_running_or_notify_cancel()
        except RuntimeError:  # someone answered it in our place
            return False
        self.cancelled += not runs
        return runs

    def _withdraw(self, request: Request) -> None:
        """What of a request still waits leaves."""
        line = self.lines.get(request.line)
        for piece in request.pieces:
            if line is not None and line.remove(piece):
                self.waiting_tokens -= piece.tokens
        request.pieces.clear()  # they know the request: a cycle, and the garbage would pile up
        self._waits_no_more(request)
        self._forget_if_empty(request.line)
        self._room.notify_all()

    def _waits_no_more(self, request: Request) -> None:
        self.waiting_requests -= request.waiting
        request.waiting = False

    def _forget_if_empty(self, key: Hashable) -> None:
        if key in self.lines and not self.lines[key]:
            del self.lines[key]
