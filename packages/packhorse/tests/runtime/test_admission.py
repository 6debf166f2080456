"""Admission without threads: a clock in hand, and every request accounted for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import InputError, Overloaded, RunnerStopped
from packhorse.packing.online import POLICIES
from packhorse.runtime.admission import COMPANY_SECONDS, Admission, PackedFuture, QueuedBatch
from packhorse.runtime.batches import MODES, PackedShape
from packhorse.runtime.tasks import InferenceJob, from_ids


class Clock:
    """A clock that stands until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def job(*lengths: int, heads: tuple[str, ...] = ("embed",)) -> InferenceJob:
    sequences = tuple(from_ids(np.full(n, 7), 10_000, 100) for n in lengths)
    return InferenceJob(sequences, heads, lambda rows: rows)


def admission(shape: PackedShape, **options) -> tuple[Admission, Clock]:
    clock = Clock()
    limits = {"timeout": 1.0, "max_tokens": 10_000, "max_requests": 1000, "clock": clock}
    return Admission(shape, **(limits | options)), clock


def lengths(batch: QueuedBatch | None) -> list[list[int]]:
    return [[piece.tokens for piece in row] for row in batch or []]


RAGGED = PackedShape("ragged", rows=2, capacity=8)  # 16 tokens


def test_a_batch_waits_until_it_is_full_or_its_time_has_come() -> None:
    queue, clock = admission(RAGGED)
    queue.push(job(5))
    assert queue.next_batch(wait=False) is None
    clock.now += 0.999
    queue.push(job(6))
    assert queue._due(clock.now, idle=True) is None
    assert queue._until_due(clock.now) == pytest.approx(0.001)
    clock.now += 0.001
    assert queue.next_batch(wait=False) is None, "while another runs, only a full one goes"
    assert lengths(queue.next_batch(wait=True)) == [[5, 6]]
    for n in (5, 6, 5):
        queue.push(job(n))
    assert lengths(queue.next_batch(wait=False)) == [[5, 6, 5]], "exactly full"
    for n in (5, 6, 6):
        queue.push(job(n))
    assert lengths(queue.next_batch(wait=False)) == [[5, 6]], "the third does not fit"
    assert queue.waiting_tokens == 6 and queue.waiting_requests == 1


def test_who_was_just_answered_may_join_the_next_batch() -> None:
    queue, clock = admission(RAGGED)
    queue.push(job(5))
    clock.now += 2.0  # long overdue
    queue.linger(0.1, 9)
    assert queue._due(clock.now, idle=True) is None
    assert queue._until_due(clock.now) == pytest.approx(0.1)
    queue.push(job(11))
    assert lengths(queue.next_batch(wait=True)) == [[5, 11]], "a full one does not wait for more"
    queue.push(job(5))
    clock.now += 2.0
    assert lengths(queue.next_batch(wait=True)) == [[5]], "nor does one later"


def test_it_waits_no_longer_than_until_all_who_were_answered_are_back() -> None:
    queue, clock = admission(RAGGED, timeout=0.001)
    queue.linger(0.1, 2)
    queue.push(job(2))
    clock.now += 0.01  # beyond the timeout
    assert queue._due(clock.now, idle=True) is None
    queue.push(job(3))
    assert lengths(queue.next_batch(wait=True)) == [[2, 3]]


def test_a_request_without_company_does_not_wait_if_told_so() -> None:
    queue, clock = admission(RAGGED, wait_alone=False)
    first = queue.push(job(5))
    assert lengths(queue.next_batch(wait=True)) == [[5]], "nobody else was here"
    second = queue.push(job(4))
    assert queue._due(clock.now, idle=True) is None, "the first one still runs: there are two"
    clock.now += 1.0
    assert lengths(queue.next_batch(wait=True)) == [[4]]
    first.set_result("done")
    second.set_result("done")
    queue.push(job(3))
    assert lengths(queue.next_batch(wait=True)) == [[3]], "the company was a second ago"


def test_who_had_company_a_moment_ago_waits_for_more() -> None:
    queue, clock = admission(RAGGED, wait_alone=False)
    for future in [queue.push(job(2)), queue.push(job(3))]:
        future.cancel()
    clock.now += COMPANY_SECONDS / 2
    queue.push(job(5))
    assert queue._due(clock.now, idle=True) is None
    clock.now += 1.0
    assert lengths(queue.next_batch(wait=True)) == [[5]]


def test_max_sequences_fills_a_batch() -> None:
    queue, _ = admission(PackedShape("ragged", 2, 8, max_sequences=2))
    queue.push(job(1))
    assert queue.next_batch(wait=False) is None
    queue.push(job(1))
    assert lengths(queue.next_batch(wait=False)) == [[1, 1]]


def test_rows_are_kept_and_the_policy_chooses() -> None:
    for policy, expected in [("first_fit", [[5, 3], [6, 2]]), ("next_fit", [[5], [6]])]:
        queue, _ = admission(PackedShape("mask", 2, 8, policy=policy))
        for n in (5, 6, 3, 2, 8):
            queue.push(job(n))
        assert lengths(queue.next_batch(wait=False)) == expected


def test_a_row_that_is_full_before_its_tokens_are_ends_the_batch() -> None:
    queue, _ = admission(PackedShape("mask", 2, 8))
    for n in (5, 5, 5):  # 15 of 16 tokens, but the third has no row
        queue.push(job(n))
    assert lengths(queue.next_batch(wait=False)) == [[5], [5]]


def test_lookahead_fills_what_one_that_does_not_fit_would_leave_empty() -> None:
    plain, _ = admission(RAGGED, lookahead=0)
    ahead, _ = admission(RAGGED, lookahead=1)
    for queue in (plain, ahead):
        for n in (8, 5, 6, 3, 4):
            queue.push(job(n))
    assert lengths(plain.next_batch(wait=False)) == [[8, 5]]
    assert lengths(ahead.next_batch(wait=False)) == [[8, 5, 3]]
    clock = ahead.clock
    clock.now += 1  # type: ignore[attr-defined]
    assert lengths(ahead.next_batch(wait=True)) == [[6, 4]], "who was passed over goes first"


def test_lines_do_not_mix_and_the_oldest_goes_first() -> None:
    queue, clock = admission(RAGGED)
    queue.push(job(3, heads=("embed",)))
    clock.now += 0.5
    queue.push(job(4, heads=("classify",)))
    queue.push(job(2, heads=("embed",)))
    clock.now += 0.5
    assert lengths(queue.next_batch(wait=True)) == [[3, 2]]
    assert queue._due(clock.now, idle=True) is None
    clock.now += 0.5
    assert lengths(queue.next_batch(wait=True)) == [[4]]
    assert not queue.queues


def test_beyond_the_allowance_is_refused_and_given_back() -> None:
    queue, _ = admission(RAGGED, max_tokens=10, max_requests=3)
    first = queue.push(job(6))
    with pytest.raises(Overloaded, match="1 requests of 6 tokens wait already"):
        queue.push(job(5))
    queue.push(job(3))
    queue.push(job(1))
    with pytest.raises(Overloaded), queue.check_capacity():
        pass
    assert first.cancel()
    with queue.check_capacity(), pytest.raises(Overloaded):
        queue.push(job(1))  # the one at the door has the last place
    queue.push(job(6))
    assert (queue.refused, queue.cancelled, queue.admitted) == (3, 1, 4)
    with pytest.raises(InputError, match="will never be admitted"):
        queue.push(job(11))


def test_what_is_cancelled_leaves_the_batch_that_was_packed() -> None:
    queue, _ = admission(RAGGED)
    futures = [queue.push(job(n)) for n in (8, 6)]
    assert futures[0].cancel()
    assert (queue.waiting_tokens, queue.waiting_requests) == (6, 1)
    queue.push(job(8))
    assert queue.next_batch(wait=False) is None, "6 and 8 leave room"
    queue.push(job(3))
    assert lengths(queue.next_batch(wait=False)) == [[6, 8]]
    assert not futures[1].cancel(), "it runs"
    assert queue.waiting_tokens == 3


def test_one_cancelled_at_the_last_moment_does_not_run() -> None:
    queue, clock = admission(RAGGED)
    gone, remaining = queue.push(job(4)), queue.push(job(5))
    gone._done_callbacks.clear()  # type: ignore[attr-defined]  # it was cancelled, but not told yet
    gone.cancel()
    clock.now += 1
    assert lengths(queue.next_batch(wait=True)) == [[5]]
    queue._done(gone)
    assert (queue.waiting_tokens, queue.waiting_requests, queue.cancelled) == (0, 0, 1)
    assert list(queue.unanswered) == [remaining]


def test_answered_by_someone_else_is_no_harm() -> None:
    queue, clock = admission(RAGGED)
    queue.push(job(4)).set_result("mine")
    assert queue.waiting_requests == queue.waiting_tokens == 0 and not queue.unanswered
    queue.push(job(5))
    clock.now += 1
    assert lengths(queue.next_batch(wait=True)) == [[5]]


def test_a_request_of_several_sequences_is_packed_sequence_by_sequence() -> None:
    queue, _ = admission(RAGGED)
    future = queue.push(job(8, 8, 8, 4))
    assert lengths(queue.next_batch(wait=False)) == [[8, 8]]
    assert (queue.waiting_requests, queue.waiting_tokens) == (0, 12)
    future.set_exception(ValueError("the first of them failed"))
    assert queue.waiting_tokens == 0 and not queue.queues


def test_stopping_drains_or_empties() -> None:
    queue, _ = admission(RAGGED)
    queue.push(job(3))
    assert queue.stop("closed") == []
    for refused in (lambda: queue.push(job(1)), lambda: queue.check_capacity().__enter__()):
        with pytest.raises(RunnerStopped, match="closed"):
            refused()
    assert lengths(queue.next_batch(wait=True)) == [[3]], "no need to wait any more"
    assert queue.next_batch(wait=True) is None

    queue, _ = admission(RAGGED)
    futures = [queue.push(job(3)), queue.push(job(9, 9))]
    assert {request.future for request in queue.stop("closed", drain=False)} == set(futures)
    assert queue.waiting_tokens == queue.waiting_requests == 0
    assert queue.next_batch(wait=True) is None


# Every way to change a future or to look at it that does not wait.
FUTURE_STEPS: dict[str, Callable[[Future[Any], list[str]], Any]] = {
    "cancel": lambda future, _: future.cancel(),
    "run": lambda future, _: future.set_running_or_notify_cancel(),
    "result": lambda future, _: future.set_result("answer"),
    "error": lambda future, _: future.set_exception(ValueError("no answer")),
    "callback": lambda future, calls: future.add_done_callback(
        lambda done: calls.append(f"{done is future}, {done.done()}")
    ),
    "wait": lambda future, _: futures.wait([future], timeout=0).done == {future},
    "get result": lambda future, _: future.result(timeout=0),
    "get error": lambda future, _: repr(future.exception(timeout=0)),
    "look": lambda future, _: (future.cancelled(), future.running(), future.done()),
}


@given(st.lists(st.sampled_from(sorted(FUTURE_STEPS)), max_size=12))
def test_a_packed_future_is_a_future(steps: list[str]) -> None:
    """The standard library's own does the same at every step, and raises the same."""
    histories: list[list[Any]] = []
    for future in (Future[Any](), PackedFuture()):
        calls: list[str] = []
        history: list[Any] = [calls]
        for step in steps:
            try:
                history.append(FUTURE_STEPS[step](future, calls))
            except Exception as error:
                history.append(type(error))
        histories.append(history)
    assert histories[0] == histories[1]


def test_a_packed_future_wakes_whoever_waits_for_it() -> None:
    future = PackedFuture()
    answers: list[Any] = []
    waiters = [threading.Thread(target=lambda: answers.append(future.result(60))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    future.set_result("answer")
    for waiter in waiters:
        waiter.join(60)
    assert answers == ["answer"] * 3


def test_a_packed_future_keeps_no_callback_that_has_run() -> None:
    future = PackedFuture()
    kept = threading.Event()
    reference = weakref.ref(kept)
    future.add_done_callback(partial(lambda event, _: event.set(), kept))
    future.set_result("answer")
    assert kept.is_set()
    del kept
    assert reference() is None


class Announced:
    """A lock that says when someone has to wait for it."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.awaited = lock, threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.awaited.set()
            self.lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self.lock.release()


class Turnstile(dict):
    """A dictionary that stops between its first value and the next, until it may go on."""

    def __init__(self, known: dict[Any, Any], reached: threading.Event, go: threading.Event):
        super().__init__(known)
        self.reached, self.go = reached, go

    def values(self) -> Any:
        for number, value in enumerate(super().values()):
            yield value
            if not number:
                self.reached.set()
                assert self.go.wait(60)


def test_stopping_while_a_request_is_answered() -> None:
    """The answer comes in the middle of the search for those who wait, in another thread."""
    queue, clock = admission(RAGGED)
    running, waiting = queue.push(job(3)), [queue.push(job(14)) for _ in range(3)]
    clock.now += 2
    assert lengths(queue.next_batch(wait=True)) == [[3]]
    lock = Announced(queue._lock)
    queue._lock = lock  # type: ignore[assignment]
    reached = threading.Event()
    queue.unanswered = Turnstile(queue.unanswered, reached, lock.awaited)

    def answer() -> None:
        assert reached.wait(60)
        running.set_result("done")
        lock.awaited.set()  # it did not have to wait

    engine = threading.Thread(target=answer)
    engine.start()
    try:
        stopped = queue.stop("closed", drain=False)
    finally:
        engine.join(60)
    assert [request.future for request in stopped] == waiting
    assert not queue.unanswered
    assert queue.waiting_requests == queue.waiting_tokens == 0 and not queue.queues


def test_a_request_that_leaves_with_the_queue_can_no_longer_be_cancelled() -> None:
    """It fails or it was cancelled: one of the two is counted, and the future says the same."""
    queue, _ = admission(RAGGED)
    cancelled, remaining = queue.push(job(3)), queue.push(job(4))
    cancelled._done_callbacks.clear()  # type: ignore[attr-defined]  # it is told in a moment
    cancelled.cancel()
    assert [request.future for request in queue.stop("closed", drain=False)] == [remaining]
    queue._done(cancelled)
    assert not remaining.cancel()
    assert queue.cancelled == 1 and queue.waiting_requests == 0


def test_promises_are_counted() -> None:
    queue, _ = admission(RAGGED, max_requests=10)
    with pytest.raises(InputError, match="3000 requests will never be admitted together"):
        queue.reserve(3000, 3000)
    queue.reserve(6, 6)
    with pytest.raises(Overloaded, match="6 requests of 6 tokens wait already"):
        queue.reserve(5, 5)
    queue.reserve(4, 4)
    for refused in (lambda: queue.push(job(1)), lambda: queue.check_capacity().__enter__()):
        with pytest.raises(Overloaded):
            refused()
    queue.release(1, 1)
    queue.push(job(1))
    for _ in range(9):
        queue.push_reserved(job(1))
    assert (queue.waiting_requests, queue.reserved_requests, queue.reserved_tokens) == (10, 0, 0)


def test_a_job_of_many_inputs_needs_room_for_one() -> None:
    """Else it would never be admitted while short requests keep the queue nearly full."""
    queue, _ = admission(RAGGED, max_tokens=20, max_requests=10)
    sequences = job(3).sequences * 8
    many = InferenceJob(sequences, ("embed",), list, inputs=8)
    whole = InferenceJob(sequences, ("embed",), list)
    queue.push(job(8, 8, 1))
    with pytest.raises(InputError, match="24 tokens will never be admitted"):
        queue.push(whole)
    queue.push(many)
    assert (queue.waiting_tokens, queue.waiting_requests) == (41, 9)
    for refused in (job(1), many):
        with pytest.raises(Overloaded):
            queue.push(refused)
    queue.push_follow_up(many)
    assert queue.waiting_tokens == 65
    queue.stop("closed")
    with pytest.raises(RunnerStopped):
        queue.push_follow_up(many)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(1, 8), min_size=1, max_size=3)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("take"), st.booleans()),
    ),
    max_size=60,
)


@given(
    actions=ACTIONS,
    mode=st.sampled_from(MODES),
    policy=st.sampled_from(sorted(POLICIES)),
    lookahead=st.integers(0, 3),
    max_sequences=st.none() | st.integers(1, 5),
)
def test_whatever_happens_everyone_runs_once_or_was_cancelled(
    actions, mode: str, policy: str, lookahead: int, max_sequences: int | None
) -> None:
    shape = PackedShape(mode, 2, 8, max_sequences, policy)
    queue, clock = admission(shape, lookahead=lookahead)
    futures: list[Future] = []
    ran: list[Future] = []
    lengths_of: dict[Future, int] = {}

    def take(idle: bool) -> None:
        with queue._changed:
            key = queue._due(clock.now, idle)
            batch = queue._take(key, clock.now) if key else None
        rows = lengths(batch)
        assert sum(map(len, rows)) <= (max_sequences or 99)
        width, count = (8, 2) if mode == "mask" else (16, 1)
        assert len(rows) <= count and all(sum(row) <= width for row in rows)
        ran.extend(piece.request.future for row in batch or [] for piece in row)

    for action, argument in actions:
        clock.now += 0.3
        if action == "push":
            future = queue.push(job(*argument))
            futures.append(future)
            lengths_of[future] = len(argument)
        elif action == "cancel" and futures:
            futures[argument % len(futures)].cancel()
        elif action == "take":
            take(argument)
        pieces = [p for line in queue.queues.values() for p in (*line.open, *line.overflow)]
        assert queue.waiting_tokens == sum(piece.tokens for piece in pieces)
        assert queue.waiting_requests == len({p.request for p in pieces if p.request.is_waiting})
    clock.now += 10
    for _ in range(200):
        take(True)
    assert not queue.queues and queue.waiting_tokens == queue.waiting_requests == 0
    for future in futures:
        assert ran.count(future) == (0 if future.cancelled() else lengths_of[future])
    assert queue.admitted == len(futures)
    assert queue.cancelled == sum(future.cancelled() for future in futures)


def test_quiet_lasts_its_time_and_ends_with_a_request() -> None:
    times = iter([0.0, 0.1, 0.3])
    queue, _ = admission(RAGGED, clock=lambda: next(times))
    assert queue.wait_for_quiet(0.25)
    assert next(times, None) is None, "it ended before the time was over"
    queue, _ = admission(RAGGED)  # its clock stands
    waited: Future[bool] = Future()
    thread = threading.Thread(
        target=lambda: waited.set_result(queue.wait_for_quiet(3600)), daemon=True
    )
    thread.start()
    queue.push(job(3))
    assert not waited.result(60)
    assert not queue.wait_for_quiet(0), "a request waits"
    queue, _ = admission(RAGGED)
    queue.stop("the end")
    assert not queue.wait_for_quiet(3600)
