"""Shares of a queue, without threads: a clock in hand, a device that takes as long as its tokens.

The bounds that docs/limits.md states are simulated, each beside the same load without shares, which
must exceed it.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import DeadlineExceeded, Overloaded
from packhorse.runtime.admission import LANE_SECONDS, Admission, PackedFuture
from packhorse.runtime.batches import PackedShape
from packhorse.runtime.shares import BULK_PART, FairLimit, Share, ShareLedger, Ticket, may_take
from packhorse.runtime.tasks import InferenceJob, from_ids

SHAPE = PackedShape("ragged", rows=4, capacity=64)  # 256 tokens
LIGHT, HEAVY = Share("light"), Share("heavy")
BULK = Share("heavy", bulk=True)
QUEUE_BATCHES = 16
SIMULATED = 150  # seconds, so many full batches
FIXED = 0.01  # seconds that any batch takes
FULL = 1.0  # seconds that a full batch takes
STEPS = ("push", "push", "take", "cancel")


class Clock:
    """A clock that stands until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def job(*lengths: int, heads: tuple[str, ...] = ("embed",)) -> InferenceJob:
    sequences = tuple(from_ids(np.full(n, 7), 10_000, 100) for n in lengths)
    return InferenceJob(sequences, heads, lambda rows: rows)


def admission(shape: PackedShape = SHAPE, **options: Any) -> tuple[Admission, Clock]:
    clock = Clock()
    limits = {
        "timeout": 0.002,
        "max_tokens": QUEUE_BATCHES * shape.tokens,
        "max_requests": 4096,
        "clock": clock,
        "wait_alone": False,
    }
    return Admission(shape, **(limits | options)), clock


def tokens_by_share(batch: Any) -> Counter[Share | None]:
    counts: Counter[Share | None] = Counter()
    for row in batch or []:
        for sequence in row:
            counts[sequence.request.share] += sequence.tokens
    return counts


# Simulated servers -----------------------------------------------------------------------------


@dataclass
class Client:
    """Sends texts at random times, or as many as find room."""

    share: Share | None
    rate: float  # requests per second
    lengths: tuple[int, ...]
    heads: tuple[str, ...] = ("embed",)
    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    tokens: int = 0

    def p99(self) -> float:
        return float(np.percentile(self.latencies, 99))


def simulate(clients: list[Client], seconds: float, ahead: int = 0, shares: bool = True) -> None:
    """Run a device of `FULL` seconds a full batch; `ahead` batches are launched before they run.

    This does what `RunnerEngine` does: on a CPU nothing is launched ahead, on an accelerator one
    batch is, if it is full.
    """
    queue, clock = admission()
    draw = random.Random(7)
    arrivals = [(clock.now + draw.expovariate(c.rate), i) for i, c in enumerate(clients)]
    heapq.heapify(arrivals)
    flight: list[tuple[float, Any]] = []  # the end of each batch under way
    owners: dict[PackedFuture, tuple[Client, float]] = {}
    end = clock.now + seconds

    def launch() -> bool:
        with queue._lock:
            key = queue._due(clock.now, idle=not flight)  # next_batch would wait for one
            batch = queue._take(key, clock.now, ahead=bool(flight)) if key else None
        if batch:
            count = sum(tokens_by_share(batch).values())
            begins = max([clock.now, *(ends for ends, _ in flight)])
            took = FIXED + (FULL - FIXED) * count / SHAPE.tokens
            flight.append((begins + took, batch))
        return bool(key)

    while arrivals[0][0] < end:
        while len(flight) <= ahead and launch():
            pass
        steps = [arrivals[0][0], *(ends for ends, _ in flight[:1])]
        if not flight and queue.queues:
            steps.append(clock.now + max(1e-4, queue._until_due(clock.now)))
        clock.now = min(steps)
        if flight and flight[0][0] <= clock.now:
            _, batch = flight.pop(0)
            for row in batch:
                for sequence in row:
                    request = sequence.request
                    request.remaining -= 1
                    client, sent = owners.pop(request.future)
                    client.latencies.append(clock.now - sent)
                    client.tokens += sequence.tokens
                    request.future.set_result(None)
        elif arrivals[0][0] <= clock.now:
            _, number = heapq.heappop(arrivals)
            client = clients[number]
            heapq.heappush(arrivals, (clock.now + draw.expovariate(client.rate), number))
            share = client.share if shares else None
            try:
                work = job(draw.choice(client.lengths), heads=client.heads)
                owners[queue.push(work, share=share)] = (client, clock.now)
            except Overloaded:
                client.refused += 1


def light(heads: tuple[str, ...] = ("embed",)) -> Client:
    """A sixteenth of what the device can do, in short texts."""
    return Client(LIGHT, rate=1.0, lengths=(8, 16, 24), heads=heads)


def flood(share: Share = HEAVY, heads: tuple[str, ...] = ("embed",)) -> Client:
    """A hundred times as many requests: far more than the device can do."""
    return Client(share, rate=100.0, lengths=(8, 16, 24), heads=heads)


def added(ahead: int, shares: bool, heads: tuple[str, ...] = ("embed",)) -> tuple[float, int]:
    """What a flood adds to the 99th percentile of another client, in full batches; its refusals."""
    alone = light(heads)
    simulate([alone], SIMULATED, ahead, shares)
    beside = light(heads)
    simulate([beside, flood()], SIMULATED, ahead, shares)
    return (beside.p99() - alone.p99()) / FULL, beside.refused


@pytest.mark.parametrize(("ahead", "heads"), [(0, ("embed",)), (0, ("classify",)), (1, ("embed",))])
def test_a_flood_adds_at_most_two_batches(ahead: int, heads: tuple[str, ...]) -> None:
    """At 100 times the rate; also for another head, in other batches, and on an accelerator."""
    batches, refused = added(ahead, shares=True, heads=heads)
    assert 0 < batches <= 2
    assert refused == 0


def test_without_shares_it_adds_the_whole_queue() -> None:
    batches, refused = added(ahead=0, shares=False)
    assert batches > 10
    assert refused > 50


@pytest.mark.parametrize("ahead", [0, 1])
def test_bulk_leaves_what_is_interactive_twice_its_time_and_a_batch(ahead: int) -> None:
    alone = light()
    simulate([alone], SIMULATED, ahead)
    bound = 2 * alone.p99() + FULL
    for shares in (True, False):
        beside, bulk = light(), flood(BULK)
        simulate([beside, bulk], SIMULATED, ahead, shares)
        assert (beside.p99() <= bound) is shares, "only the lanes keep to it"
        assert bulk.tokens > 0.7 * SIMULATED * SHAPE.tokens / FULL, "bulk has what is left"


@pytest.mark.parametrize("ahead", [0, 1])
def test_bulk_keeps_a_tenth_where_both_are_too_much(ahead: int) -> None:
    interactive, bulk = flood(Share("busy")), flood(BULK)
    simulate([interactive, bulk], SIMULATED, ahead)
    tokens = interactive.tokens + bulk.tokens
    assert bulk.tokens + SHAPE.tokens >= tokens / 10
    assert bulk.tokens <= tokens / 8


def test_two_floods_get_the_same() -> None:
    """One of them asks a hundred times as often, and in long texts."""
    quick = Client(Share("quick"), rate=500.0, lengths=(8,))
    long = Client(Share("long"), rate=20.0, lengths=(40, 60))
    simulate([quick, long], 50)
    assert quick.tokens == pytest.approx(long.tokens, rel=0.1)


# Turns -----------------------------------------------------------------------------------------


def test_who_comes_late_is_in_the_next_batch() -> None:
    queue, _ = admission()
    for _ in range(64):
        queue.push(job(16), share=HEAVY)
    late = queue.push(job(16), share=LIGHT)
    batch = queue.next_batch(wait=True)
    assert tokens_by_share(batch) == {HEAVY: 240, LIGHT: 16}
    assert late.running()
    plain, _ = admission()
    for _ in range(64):
        plain.push(job(16))
    plain.push(job(16))
    assert [tokens_by_share(plain.next_batch(wait=False)) for _ in range(4)] == [{None: 256}] * 4


def test_absence_earns_no_more_than_a_batch() -> None:
    queue, _ = admission()
    for _ in range(160):
        queue.push(job(16), share=HEAVY)
    for _ in range(4):
        queue.next_batch(wait=True)
    for _ in range(80):
        queue.push(job(16), share=LIGHT)
    batches = [tokens_by_share(queue.next_batch(wait=True)) for _ in range(4)]
    light_tokens = [batch[LIGHT] for batch in batches]
    assert sum(light_tokens) <= 4 * 128 + 256, "not the four batches that it missed"
    assert light_tokens[-1] == 128


def test_one_share_alone_is_packed_on_arrival_as_without_shares() -> None:
    orders: list[list[list[int]]] = []
    draw = random.Random(3)
    lengths = [draw.randint(1, 64) for _ in range(60)]
    for share in (None, LIGHT):
        queue, _ = admission(PackedShape("mask", 4, 64), lookahead=2)
        for length in lengths:
            queue.push(job(length), share=share)
        assert all(line.fair is None for line in queue.queues.values())
        rows: list[list[int]] = []
        while batch := queue.next_batch(wait=False):
            rows += [[sequence.tokens for sequence in row] for row in batch]
        orders.append(rows)
    assert orders[0] == orders[1]


def test_long_texts_of_one_share_do_not_starve_beside_short_ones_of_another() -> None:
    queue, _ = admission(PackedShape("ragged", 1, 64))
    queue.push(job(60), share=LIGHT)
    for _ in range(20):
        queue.push(job(10), share=HEAVY)
    batches = [tokens_by_share(queue.next_batch(wait=False)) for _ in range(2)]
    assert any(batch[LIGHT] for batch in batches)


def test_bulk_is_not_launched_ahead_while_somebody_may_come() -> None:
    queue, clock = admission()
    queue.push(job(16), share=LIGHT).cancel()
    for _ in range(64):
        queue.push(job(16), share=BULK)
    assert queue.next_batch(wait=False) is None
    assert tokens_by_share(queue.next_batch(wait=True)) == {BULK: 256}
    clock.now += LANE_SECONDS
    assert tokens_by_share(queue.next_batch(wait=False)) == {BULK: 256}


def test_an_interactive_request_does_not_wait_for_company_behind_bulk() -> None:
    queue, _ = admission(timeout=1.0)
    for _ in range(64):
        queue.push(job(16), share=BULK)
    queue.push(job(16), share=LIGHT)
    assert tokens_by_share(queue.next_batch(wait=True)) == {LIGHT: 16}


@pytest.mark.parametrize("share", [None, LIGHT])
def test_a_full_queue_does_not_starve_one_that_is_not(share: Share | None) -> None:
    """On an accelerator another batch runs whenever one is taken."""
    queue, clock = admission(timeout=0.01)
    queue.push(job(16, heads=("classify",)), share=share)
    clock.now += 0.1
    taken: list[str] = []
    for _ in range(3):
        for _ in range(32):
            queue.push(job(16), share=share)
        batch = queue.next_batch(wait=False)
        assert batch is not None
        taken.append(batch[0][0].request.job.heads[0])
    assert "classify" in taken


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "take", "cancel"]), st.integers(0, 3), st.integers(1, 64)
        ),
        max_size=80,
    ),
    st.sampled_from(["ragged", "mask"]),
    st.sampled_from([1.0, 0.5]),
)
def test_everything_runs_once_and_nothing_is_left_in_the_books(
    steps: list[tuple[str, int, int]], mode: str, part: float
) -> None:
    queue, clock = admission(PackedShape(mode, 4, 64), max_tokens=1000)
    shares = [None, LIGHT, HEAVY, BULK]
    pushed: list[PackedFuture] = []
    ran: list[PackedFuture] = []

    def take() -> None:
        batch = queue.next_batch(wait=False) if part < 1 else None
        if batch is None and queue.queues:
            clock.now += 1.0
            batch = queue.next_batch(wait=True)
        for row in batch or []:
            assert sum(sequence.tokens for sequence in row) <= 64 * (4 if mode == "ragged" else 1)
            for sequence in row:
                sequence.request.remaining -= 1
                ran.append(sequence.request.future)
                sequence.request.future.set_result(None)

    for step, number, length in steps:
        if step == "push":
            with suppress(Overloaded):
                pushed.append(queue.push(job(length), share=shares[number]))
        elif step == "cancel" and pushed:
            pushed[length % len(pushed)].cancel()
        elif step == "take":
            take()
    while queue.queues:
        take()
    assert len(ran) == len(set(map(id, ran)))
    assert {id(future) for future in ran} == {id(f) for f in pushed if not f.cancelled()}
    assert (queue.waiting_tokens, queue.waiting_requests) == (0, 0)
    if (ledger := queue.ledger) is not None:
        assert (dict(ledger.tokens), dict(ledger.requests), ledger.bulk_tokens) == ({}, {}, 0)


# Rooms -----------------------------------------------------------------------------------------


def fill_queue(queue: Admission, share: Share | None) -> int:
    """Push until refused; return how many tokens found room."""
    tokens = 0
    while True:
        try:
            queue.push(job(16), share=share)
        except Overloaded:
            return tokens
        tokens += 16


def test_nobody_fills_the_waiting_room_alone() -> None:
    queue, _ = admission()
    room = queue.max_tokens
    assert fill_queue(queue, HEAVY) == pytest.approx(room * 2 / 3, abs=32)
    assert fill_queue(queue, LIGHT) >= room / 5
    assert fill_queue(queue, BULK) >= room / 20
    plain, _ = admission()
    assert fill_queue(plain, None) == room, "without shares as it was"
    with pytest.raises(Overloaded):
        plain.push(job(16))


def test_a_newcomer_finds_room_even_where_long_requests_have_filled_it() -> None:
    queue, _ = admission()
    queue.push(job(16), share=HEAVY)
    for _ in range(QUEUE_BATCHES):
        queue.push_follow_up(job(*[64] * 4), share=HEAVY)
    with pytest.raises(Overloaded, match="for this client"):
        queue.push(job(16), share=HEAVY)
    with queue.check_capacity(LIGHT):
        queue.push(job(16), share=LIGHT)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=200))
def test_a_room_is_never_more_than_full_and_comes_back(steps: list[tuple[int, int]]) -> None:
    room = FairLimit(100)
    held: list[tuple[Share | None, int]] = []
    for number, amount in steps:
        share = None if number == 4 else Share(str(number))
        if number == 3 and held:
            room.give_back(*held.pop(amount % len(held)))
        elif room.has_room(share, amount):
            room.take(share, amount)
            held.append((share, amount))
        assert room.used == sum(amount for _, amount in held) <= 100
    for share, amount in held:
        room.give_back(share, amount)
    assert room.used == 0
    assert not room._held


def test_a_share_may_hold_twice_what_is_free() -> None:
    assert may_take(0, 0.5)
    assert may_take(65, 35)
    assert not may_take(67, 33)
    ledger = ShareLedger()
    ledger.settle(bulk=False, tokens=900)
    assert not ledger.owes_bulk(100), "nothing of it waits"
    ledger.add(BULK, 50)
    ledger.settle(bulk=False, tokens=50 * BULK_PART)
    assert ledger.owes_bulk(100), "it pays for all that waits"


# Time ------------------------------------------------------------------------------------------


def took(tokens: float) -> float:
    """Seconds of a batch: small ones are slow, per token."""
    return 0.1 + 0.9 * tokens / SHAPE.tokens


def run_next(queue: Admission, clock: Clock) -> float:
    """Run a batch; return how many seconds that took."""
    with queue._lock:
        key = queue._due(clock.now, idle=True)
        batch = queue._take(key, clock.now, ahead=False) if key else None
    seconds = took(sum(tokens_by_share(batch).values()))
    clock.now += seconds
    queue.pace.add(sum(tokens_by_share(batch).values()), seconds)
    for row in batch or []:
        for sequence in row:
            sequence.request.remaining -= 1
            sequence.request.future.set_result(None)
    return seconds


def after_small_batches() -> tuple[Admission, Clock]:
    """A server that has answered lone queries for a while, after it measured a quarter batch."""
    queue, clock = admission()
    queue.pace.add(SHAPE.tokens // 4, took(SHAPE.tokens / 4))
    for _ in range(64):
        queue.push(job(12))
        clock.now += 1.0
        run_next(queue, clock)
    return queue, clock


@pytest.mark.parametrize("shares", [(None,), (LIGHT,), (HEAVY, LIGHT), (BULK, LIGHT)])
def test_retry_after_is_the_time_until_the_queue_has_run(shares: tuple[Share | None, ...]) -> None:
    queue, clock = after_small_batches()
    for share in shares:
        fill_queue(queue, share)
    waiting = queue.waiting_tokens
    with pytest.raises(Overloaded) as refused:
        for _ in range(100):
            queue.push(job(16), share=shares[0])
    began = clock.now
    mine = shares[0]
    while any(request.share == mine and request.is_waiting for request in queue.all_unanswered()):
        run_next(queue, clock)
    truth = clock.now - began
    assert truth / 2 <= refused.value.retry_after <= 2 * truth
    if shares == (None,):  # by the speed of the last batches, whatever their size
        rate = 12 / took(12)
        assert waiting / rate > 2 * truth


def test_a_request_that_cannot_be_in_time_is_refused_and_told_when_it_could() -> None:
    queue, clock = after_small_batches()
    fill_queue(queue, None)
    seconds = queue.seconds_until_run()
    allowed = 3.0
    with pytest.raises(DeadlineExceeded, match="try again later") as refused:
        queue.check_deadline(16, Ticket(None, clock.now + allowed))
    assert refused.value.retry_after == pytest.approx(seconds - allowed, abs=1.0)
    queue.check_deadline(16, Ticket(None, clock.now + 2 * seconds))  # no error
    began = clock.now
    while True:
        run_next(queue, clock)
        try:
            queue.check_deadline(16, Ticket(None, clock.now + allowed))
        except DeadlineExceeded:
            continue
        break
    truth = clock.now - began
    assert truth / 2 <= refused.value.retry_after <= 2 * truth


def test_an_idle_queue_tries_whatever_it_believes() -> None:
    """Nothing else would correct what it believes of its speed."""
    queue, clock = admission()
    queue.pace.add(SHAPE.tokens, 1000.0)
    queue.check_deadline(16, Ticket(None, clock.now + 0.1))
    queue.push(job(16))
    with pytest.raises(DeadlineExceeded):
        queue.check_deadline(16, Ticket(None, clock.now + 0.1))


def test_a_deadline_counts_only_what_goes_before() -> None:
    queue, clock = after_small_batches()
    fill_queue(queue, HEAVY)
    fill_queue(queue, BULK)
    soon = clock.now + 2.5  # two batches; eleven wait
    queue.check_deadline(16, Ticket(LIGHT, soon))
    for share in (HEAVY, BULK, Share("light", bulk=True)):
        with pytest.raises(DeadlineExceeded):
            queue.check_deadline(16, Ticket(share, soon))


def test_estimates_that_are_too_long_do_not_add_up() -> None:
    """A device that is never idle has one batch that runs, and at most one behind it."""
    queue, clock = admission()
    queue.pace.add(SHAPE.tokens, 2.0)
    for _ in range(50):
        queue.push(job(64, 64, 64, 64))
        assert queue.next_batch(wait=False, idle=False)
        clock.now += 1.0  # half of what is believed
    assert 0 < queue.seconds_until_run() <= 2 * 2.0


def test_what_was_flushed_is_launched_ahead_beside_other_queues() -> None:
    queue, clock = admission(timeout=10.0)
    flushed = queue.push(job(16))
    queue.flush()
    clock.now += 0.001
    queue.push(job(16, heads=("hidden",)))
    ((sequence,),) = queue.next_batch(wait=False, idle=False) or [()]
    assert sequence.request.future is flushed
    assert queue.next_batch(wait=False, idle=False) is None, "nobody flushed the other"
