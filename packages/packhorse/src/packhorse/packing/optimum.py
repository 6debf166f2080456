"""The fewest packs that a length histogram allows, with a proof of how close the plan comes.

Packing a histogram is the cutting-stock problem. Its linear relaxation counts *slots*: a strategy
cuts `capacity` tokens into at most `depth` slots, and `uses` is how often each strategy is used. A
slot may also hold a shorter sequence, so surplus slots are handed down from length to length:

    minimize Σ uses    with    slots · uses + handed down − handed on  ≥  demand,    uses ≥ 0

There are too many strategies to list (512 tokens have 22,102 at depth 3 and 959,631 at depth 4), so
they are generated as needed (column generation, Gilmore and Gomory 1961), starting with LPFHP's.
The LP's dual has a value for each length. Only a strategy whose slots have a total dual value
above 1 can improve the LP, and the best one is a knapsack over capacity and depth. That knapsack
also proves a lower bound for any dual values, optimal or not (Farley 1990): divide them by the
knapsack's value and no pack is worth more than 1, so `demand · duals` packs are needed. The LP's
own duals oscillate; pricing near the best duals known so far (stabilization, Wentges 1997), which
start at length / capacity, takes ten rounds instead of fifty.

Rounding dives: keep the integer part of `uses`, then solve again for the remaining sequences, and
round up where nothing is integer. After every step LPFHP completes a copy of the plan, and the best
completion wins.

Two limits bound the work. They cost quality, but the bound stays proven. If there are more than
`CLASSES` distinct lengths they are thinned out: for the plan a sequence counts as the next longer
class, for the bound as the next shorter. And after `effort` linear programs the best plan and bound
so far are returned, marked as incomplete; they are never worse than LPFHP's plan and the bound from
the token count.

No clock decides anything, so that a histogram has one answer on every machine. For the same reason
sums that are compared go through `exact_dot`: a BLAS dot product rounds differently on different
processors.
"""

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from packhorse.packing.published import Pack, fill, lpfhp, total

Columns = Any  # a scipy csc_array [lengths, strategies]; scipy is imported late and has no types

CLASSES = 512
SMOOTHING = 0.8  # weight of the best duals known in stabilized pricing; 0.7 to 0.9 do equally well
PRECISION = 1e-6  # a relative gap below this counts as closed
EFFORT = 100  # maximum number of linear programs; real histograms take 5 to 40
DIVE_STEP = 0.2  # fraction of the missing packs that a step of the dive rounds up


@dataclass(frozen=True)
class CuttingStock:
    """The problem: which slots may be cut from `capacity` tokens, at most `depth` per pack."""

    lengths: np.ndarray  # slot lengths, longest first
    capacity: int
    depth: int

    def demand(self, histogram: np.ndarray) -> np.ndarray:
        """[lengths] sequences that need each slot, which is the shortest one that holds them."""
        present = np.flatnonzero(histogram)
        slot = np.searchsorted(-self.lengths, -present - 1, side="right") - 1
        return np.bincount(slot, weights=histogram[present], minlength=len(self.lengths))

    def bound(self, histogram: np.ndarray, duals: np.ndarray) -> int:
        """A lower bound on packs, valid if no strategy has a total dual value above 1."""
        present = np.flatnonzero(histogram)
        # The longest slot that a sequence fills completely: rounding down keeps the bound valid.
        slot = np.searchsorted(-self.lengths, -present - 1)
        return round_up(exact_dot(histogram[present], np.append(duals, 0.0)[slot]))


class Optimum(NamedTuple):
    """The best packs, the proven bound, and whether the search ran to its end."""

    packs: list[Pack]
    bound: int  # no plan has fewer packs
    complete: bool  # False: the effort was used up before the linear relaxation was solved


class Relaxation(NamedTuple):
    """A solution of the linear relaxation over the strategies generated so far."""

    slots: Columns  # [lengths, strategies]
    uses: np.ndarray  # [strategies]
    duals: np.ndarray  # [lengths] those that give the best bound so far
    complete: bool  # no other strategy could improve it


def optimum(histogram: np.ndarray, capacity: int, depth: int, effort: int = EFFORT) -> Optimum:
    """Packs for `histogram` (entry i counts length i+1), and a lower bound on any plan's packs.

    `effort` is the number of linear programs that generating strategies may solve.
    """
    packs = lpfhp(histogram, capacity, depth)
    bound = simple_bound(histogram, capacity, depth)
    if total(packs) <= bound * (1 + PRECISION):
        return Optimum(packs, bound, True)
    stock = CuttingStock(classes(histogram), capacity, depth)
    relaxed = relax(stock, stock.demand(histogram), effort)
    bound = max(bound, stock.bound(histogram, relaxed.duals))
    used = relaxed.uses > 0
    rounded = dive(stock, histogram, relaxed.slots[:, used], relaxed.uses[used], bound)
    packs = min(packs, rounded, key=total)
    return Optimum(packs, bound, relaxed.complete or total(packs) == bound)


def simple_bound(histogram: np.ndarray, capacity: int, depth: int) -> int:
    """A bound without any LP: by tokens, by sequences, and by those longer than half a pack."""
    tokens = int(histogram @ np.arange(1, len(histogram) + 1))
    sequences = int(histogram.sum())
    alone = int(histogram[capacity // 2 :].sum())  # no two of these share a pack
    return max(-(-tokens // capacity), -(-sequences // depth), alone)


def round_up(packs: float) -> int:
    """The next integer, tolerating the rounding errors of the sums that `packs` comes from."""
    return math.ceil(packs * (1 - 1e-9))


def exact_dot(counts: np.ndarray, duals: np.ndarray) -> float:
    """The dot product, correctly rounded: the same number on every processor."""
    return math.fsum((counts * duals).tolist())


def classes(histogram: np.ndarray) -> np.ndarray:
    """The lengths that occur, longest first; at most `CLASSES`, dense where sequences are many."""
    lengths = np.flatnonzero(histogram)[::-1] + 1
    if len(lengths) <= CLASSES:
        return lengths
    # Classes of equal total √count lose the fewest tokens to rounding lengths up.
    weight = np.sqrt(histogram[lengths - 1])
    before = np.cumsum(weight) - weight
    _, first = np.unique((before * (CLASSES / weight.sum())).astype(int), return_index=True)
    return lengths[first]


def relax(stock: CuttingStock, demand: np.ndarray, effort: int) -> Relaxation:
    """Solve the LP by column generation, in at most `effort` rounds of one LP each."""
    from scipy.sparse import hstack

    slots, uses = greedy(stock, demand)
    best = stock.lengths / stock.capacity
    new = as_columns(stock, price(stock, best)[1])
    for _ in range(effort):
        if not new.shape[1]:
            return Relaxation(slots, uses, best, True)
        slots = hstack([slots, new], format="csc")
        uses = np.append(uses, np.zeros(new.shape[1]))
        solution = solve(slots, demand)
        if solution is None:
            break
        uses, duals = solution
        best, new = improve(stock, demand, best, duals)
        bound = exact_dot(demand, best)
        if uses.sum() <= max(round_up(bound), bound * (1 + PRECISION)):
            return Relaxation(slots, uses, best, True)
    return Relaxation(slots, uses, best, not new.shape[1])


def greedy(stock: CuttingStock, demand: np.ndarray) -> tuple[Columns, np.ndarray]:
    """LPFHP's strategies and their uses: a feasible start for the LP."""
    histogram = np.zeros(stock.capacity, dtype=np.int64)
    histogram[stock.lengths - 1] = demand
    packs = lpfhp(histogram, stock.capacity, stock.depth)
    strategy = np.repeat(np.arange(len(packs)), [len(lengths) for lengths, _ in packs])
    slot_lengths = np.concatenate([lengths for lengths, _ in packs])
    slots = sparse(np.searchsorted(-stock.lengths, -slot_lengths), strategy, len(stock.lengths))
    return slots, np.array([count for _, count in packs], dtype=float)


def improve(
    stock: CuttingStock, demand: np.ndarray, best: np.ndarray, duals: np.ndarray
) -> tuple[np.ndarray, Columns]:
    """The duals of the better bound, and new strategies whose slots are worth more than 1."""
    smoothing = SMOOTHING
    while True:
        stabilized = smoothing * best + (1 - smoothing) * duals
        largest, strategies = price(stock, stabilized)
        # Farley's bound: after this division no strategy is worth more than 1.
        candidates = (best, stabilized / largest)
        best = max(candidates, key=lambda candidate: exact_dot(demand, candidate))
        columns = as_columns(stock, strategies)
        columns = columns[:, duals @ columns > 1 + 1e-9]
        if columns.shape[1] or not smoothing:
            return best, columns
        # Stabilized pricing gave nothing that the LP can use: go nearer to the LP's own duals.
        smoothing = smoothing / 2 if smoothing > 0.1 else 0.0


def as_columns(stock: CuttingStock, strategies: np.ndarray) -> Columns:
    """Rows of indices into `stock.lengths` (past its end: nothing) to columns, without repeats."""
    strategies = np.unique(np.sort(strategies, axis=1), axis=0)
    strategy, place = np.nonzero(strategies < len(stock.lengths))
    return sparse(strategies[strategy, place], strategy, len(stock.lengths))


def sparse(slot: np.ndarray, strategy: np.ndarray, lengths: int) -> Columns:
    """Slots of each length (row) in each strategy (column), from one (slot, strategy) pair each."""
    from scipy.sparse import coo_array

    shape = (lengths, int(strategy[-1]) + 1)
    return coo_array((np.ones(len(slot)), (slot, strategy)), shape=shape).tocsc()


def solve(slots: Columns, demand: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Solve the LP over these strategies: (uses, duals), or None if the solver failed."""
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, hstack

    lengths, strategies = slots.shape
    # Column i moves one slot of length i to the next shorter length.
    hand_down = eye_array(lengths, lengths - 1, k=-1) - eye_array(lengths, lengths - 1)
    solution: Any = linprog(
        np.concatenate([np.ones(strategies), np.zeros(lengths - 1)]),
        A_ub=-hstack([slots, hand_down], format="csc"),
        b_ub=-demand,
        # Interior point with crossover, so that most uses are zero; twice as fast as the simplex.
        method="highs-ipm",
    )
    if not solution.success:
        return None
    return solution.x[:strategies], np.maximum(-solution.ineqlin.marginals, 0.0)


def price(stock: CuttingStock, duals: np.ndarray) -> tuple[float, np.ndarray]:
    """The largest total dual value of a strategy, and for every length the best that contains it.

    Strategies are rows of indices into `stock.lengths`; the index past its end means "no slot".
    """
    nothing = len(stock.lengths)
    lengths = np.append(stock.lengths, 0)
    room = stock.capacity - stock.lengths
    value, choices = knapsack(lengths, np.append(duals, 0.0), room.max(), stock.depth - 1)
    largest = float((duals + value[room]).max())
    parts = [np.arange(nothing)]
    for choice in choices:
        part = choice[room]
        if (part == nothing).all():
            break
        parts.append(part)
        room = room - lengths[part]
    return largest, np.stack(parts, axis=1)


def knapsack(
    lengths: np.ndarray, duals: np.ndarray, most_room: int, parts: int
) -> tuple[np.ndarray, Iterable[np.ndarray]]:
    """The largest value of up to `parts` slots for each room, and the choices that lead there.

    The choices are one table per slot, to be followed in order. If the room runs out before
    `parts` does, one table that refers to itself serves for any number of slots.
    """
    fitting = np.searchsorted(-lengths, -np.arange(most_room + 1))
    unlimited = parts >= most_room // lengths[-2]
    value = np.zeros(most_room + 1)
    tables: list[np.ndarray] = []
    for _ in range(1 if unlimited else parts):
        improved = np.zeros(most_room + 1)
        table = np.zeros(most_room + 1, dtype=np.intp)
        # A slot of any length follows, which the same table has already solved for the smaller
        # room; with a limit, it is the table of one slot fewer.
        source = improved if unlimited else value
        for room, first in enumerate(fitting):
            totals = duals[first:] + source[room - lengths[first:]]
            best = totals.argmax()  # the longest of equal ones, so that strategies stay short
            improved[room] = totals[best]
            table[room] = first + best
        settled = np.array_equal(improved, value)
        value = improved
        tables = [table, *tables]
        if settled:
            break
    return value, repeat(tables[0]) if unlimited else tables


def dive(
    stock: CuttingStock, histogram: np.ndarray, slots: Columns, uses: np.ndarray, enough: int
) -> list[Pack]:
    """Round the LP's solution: fix what is integer, solve for the rest, and so on to the end.

    Stops early at `enough` packs. Every step fixes at least a fifth of the packs that are missing,
    so there are few steps.
    """
    fixed: list[Pack] = []
    remaining = histogram
    best: list[Pack] | None = None
    while remaining.any():
        packs, remaining = fill(integer_part(stock, slots, uses), remaining, shorter=True)
        fixed += packs
        completed = fixed + lpfhp(remaining, stock.capacity, stock.depth)
        best = min(best or completed, completed, key=total)
        if total(best) <= enough or not packs:
            break
        solution = solve(slots, stock.demand(remaining))
        if solution is None:
            break
        uses, _ = solution
    return best or []


def integer_part(stock: CuttingStock, slots: Columns, uses: np.ndarray) -> Iterator[Pack]:
    """The strategies to fix now: integer uses or, if there are none, the most used ones, once."""
    times = np.floor(uses + 1e-6).astype(np.int64)
    if not times.any():
        step = max(1, int(uses.sum() * DIVE_STEP))
        times[np.argsort(-uses, kind="stable")[:step]] = 1
    for strategy in np.flatnonzero(times):
        column = slice(*slots.indptr[strategy : strategy + 2])
        lengths = np.repeat(stock.lengths[slots.indices[column]], slots.data[column].astype(int))
        yield tuple(lengths.tolist()), int(times[strategy])
