"""The fewest packs a length histogram allows, with a proof of how close we came.

Packing a histogram is the cutting-stock problem. Its linear relaxation counts *slots*: a strategy
cuts `capacity` tokens into at most `depth` slots, `uses` says how often each strategy is used, and
because a slot may also hold a shorter sequence, slots are handed down from length to length:

    minimise Σ uses    with    slots · uses + handed down − handed on  ≥  demand,    uses ≥ 0

Strategies are too many to list (512 tokens have 22,102 at depth 3, 959,631 at depth 4), so they are
generated as needed (Gilmore and Gomory 1961), beginning with LPFHP's. The LP's dual is a *worth*
for each length; only a strategy whose slots are together worth more than 1 can help, and the
worthiest one is a knapsack over capacity and depth. That knapsack also proves a bound for any
worths, optimal or not (Farley 1990): divided by its value no pack is worth more than 1, so
`demand · worth` packs are needed. The LP's own worths jump about; priced near the best worths known
(Wentges 1997), which start at length / capacity, ten rounds do what takes fifty without.

Rounding dives: keep the whole part of `uses`, then solve again for the few sequences left, rounding
up where nothing is whole. After every step LPFHP finishes a copy, and the best finish wins.

Two limits bound the work; they cost quality, and the bound stays a proof. More than `CLASSES`
distinct lengths are thinned out: for the plan a sequence counts as the next longer class, for the
bound as the next shorter. And after `effort` linear programs the best plan and bound so far are the
answer, marked as incomplete; they are never worse than LPFHP's plan and the token count's bound.

No clock decides anything, so a histogram has one answer, whatever the machine and its load. For
the same reason the sums that are compared go through `weighted`: a BLAS dot product rounds
differently from processor to processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from packhorse.packing.published import Pack, fill, lpfhp, total

Columns = Any  # a scipy csc_array [lengths, strategies]: imported late, and loosely typed

CLASSES = 512
SMOOTHING = 0.8  # how far pricing leans to the best worths known; 0.7 to 0.9 do equally well
PRECISION = 1e-6  # the relative gap that counts as none
EFFORT = 100  # linear programs at most; real histograms take 5 to 40
DIVE_STEP = 0.2  # of the packs still missing that a step of the dive rounds up


@dataclass(frozen=True)
class Stock:
    """Which slots may be cut, longest first, from how many tokens, and how many from each."""

    lengths: np.ndarray
    capacity: int
    depth: int

    def demand(self, histogram: np.ndarray) -> np.ndarray:
        """How many sequences ask for each slot, the shortest that holds them."""
        present = np.flatnonzero(histogram)
        slot = np.searchsorted(-self.lengths, -present - 1, side="right") - 1
        return np.bincount(slot, weights=histogram[present], minlength=len(self.lengths))

    def bound(self, histogram: np.ndarray, worth: np.ndarray) -> int:
        """Packs that no plan can do without, if no strategy is worth more than 1."""
        present = np.flatnonzero(histogram)
        slot = np.searchsorted(-self.lengths, -present - 1)  # the longest that a sequence fills
        return round_up(weighted(histogram[present], np.append(worth, 0.0)[slot]))


class Optimum(NamedTuple):
    """The best packs found, the proven bound, and whether the search ran to its end."""

    packs: list[Pack]
    bound: int  # no plan has fewer packs
    complete: bool  # False: the effort was spent before the linear relaxation was solved


class Relaxation(NamedTuple):
    """A solution of the linear relaxation over the strategies generated so far."""

    slots: Columns  # [lengths, strategies]
    uses: np.ndarray  # [strategies]
    worth: np.ndarray  # [lengths], the best worths known
    complete: bool  # no other strategy could improve it


def optimum(histogram: np.ndarray, capacity: int, depth: int, effort: int = EFFORT) -> Optimum:
    """Packs for `histogram` (entry i counts length i+1), and a number that no plan can go below.

    `effort` is the number of linear programs that generating strategies may solve.
    """
    packs = lpfhp(histogram, capacity, depth)
    bound = simple_bound(histogram, capacity, depth)
    if total(packs) <= bound * (1 + PRECISION):
        return Optimum(packs, bound, True)
    stock = Stock(classes(histogram), capacity, depth)
    relaxed = relax(stock, stock.demand(histogram), effort)
    bound = max(bound, stock.bound(histogram, relaxed.worth))
    used = relaxed.uses > 0
    rounded = dive(stock, histogram, relaxed.slots[:, used], relaxed.uses[used], bound)
    packs = min(packs, rounded, key=total)
    return Optimum(packs, bound, relaxed.complete or total(packs) == bound)


def simple_bound(histogram: np.ndarray, capacity: int, depth: int) -> int:
    """What is plain without any LP: tokens, sequences, and sequences of more than half a pack."""
    tokens = int(histogram @ np.arange(1, len(histogram) + 1))
    sequences = int(histogram.sum())
    alone = int(histogram[capacity // 2 :].sum())
    return max(-(-tokens // capacity), -(-sequences // depth), alone)


def round_up(packs: float) -> int:
    """The next whole number, forgiving the rounding errors of the sums behind `packs`."""
    return math.ceil(packs * (1 - 1e-9))


def weighted(counts: np.ndarray, worth: np.ndarray) -> float:
    """Their dot product, correctly rounded: the same number on every processor."""
    return math.fsum((counts * worth).tolist())


def classes(histogram: np.ndarray) -> np.ndarray:
    """The lengths that occur, longest first; at most `CLASSES`, dense where sequences are many."""
    lengths = np.flatnonzero(histogram)[::-1] + 1
    if len(lengths) <= CLASSES:
        return lengths
    weight = np.sqrt(histogram[lengths - 1])  # makes the tokens lost to rounding up the fewest
    before = np.cumsum(weight) - weight
    _, first = np.unique((before * (CLASSES / weight.sum())).astype(int), return_index=True)
    return lengths[first]


def relax(stock: Stock, demand: np.ndarray, effort: int) -> Relaxation:
    """Solve the LP by generating columns, in at most `effort` rounds of one LP each."""
    from scipy.sparse import hstack

    slots, uses = greedy(stock, demand)
    best = stock.lengths / stock.capacity
    new = as_columns(stock, price(stock, best)[1])
    for _ in range(effort):
        if not new.shape[1]:
            return Relaxation(slots, uses, best, True)
        slots = hstack([slots, new], format="csc")
        uses = np.append(uses, np.zeros(new.shape[1]))
        answer = solve(slots, demand)
        if answer is None:
            break
        uses, worth = answer
        best, new = improve(stock, demand, best, worth)
        bound = weighted(demand, best)
        if uses.sum() <= max(round_up(bound), bound * (1 + PRECISION)):
            return Relaxation(slots, uses, best, True)
    return Relaxation(slots, uses, best, not new.shape[1])


def greedy(stock: Stock, demand: np.ndarray) -> tuple[Columns, np.ndarray]:
    """LPFHP's strategies and uses: a solution of the LP from the first moment on."""
    histogram = np.zeros(stock.capacity, dtype=np.int64)
    histogram[stock.lengths - 1] = demand
    packs = lpfhp(histogram, stock.capacity, stock.depth)
    strategy = np.repeat(np.arange(len(packs)), [len(lengths) for lengths, _ in packs])
    held = np.concatenate([lengths for lengths, _ in packs])
    slots = sparse(np.searchsorted(-stock.lengths, -held), strategy, len(stock.lengths))
    return slots, np.array([count for _, count in packs], dtype=float)


def improve(
    stock: Stock, demand: np.ndarray, best: np.ndarray, worth: np.ndarray
) -> tuple[np.ndarray, Columns]:
    """The better of the best worths and those priced now, and strategies worth more than 1."""
    lean = SMOOTHING
    while True:
        priced = lean * best + (1 - lean) * worth
        worthiest, strategies = price(stock, priced)
        best = max(best, priced / worthiest, key=lambda candidate: weighted(demand, candidate))
        columns = as_columns(stock, strategies)
        columns = columns[:, worth @ columns > 1 + 1e-9]
        if columns.shape[1] or not lean:
            return best, columns
        lean = lean / 2 if lean > 0.1 else 0.0  # leaned too far to see what the LP needs


def as_columns(stock: Stock, strategies: np.ndarray) -> Columns:
    """Rows of indices into `stock.lengths` (past its end: nothing) → a column for each, once."""
    strategies = np.unique(np.sort(strategies, axis=1), axis=0)
    strategy, place = np.nonzero(strategies < len(stock.lengths))
    return sparse(strategies[strategy, place], strategy, len(stock.lengths))


def sparse(slot: np.ndarray, strategy: np.ndarray, lengths: int) -> Columns:
    """How many slots of each length (row) each strategy (column) has, from one pair per slot."""
    from scipy.sparse import coo_array

    shape = (lengths, int(strategy[-1]) + 1)
    return coo_array((np.ones(len(slot)), (slot, strategy)), shape=shape).tocsc()


def solve(slots: Columns, demand: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The LP over these strategies: (uses of each, worth of each length), or None if it failed."""
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, hstack

    lengths, strategies = slots.shape
    hand_down = eye_array(lengths, lengths - 1, k=-1) - eye_array(lengths, lengths - 1)
    answer = linprog(
        np.concatenate([np.ones(strategies), np.zeros(lengths - 1)]),
        A_ub=-hstack([slots, hand_down], format="csc"),
        b_ub=-demand,
        method="highs-ipm",  # with a crossover, so most uses are zero; twice as fast as the simplex
    )
    if not answer.success:
        return None
    return answer.x[:strategies], np.maximum(-answer.ineqlin.marginals, 0.0)


def price(stock: Stock, worth: np.ndarray) -> tuple[float, np.ndarray]:
    """The worth of the worthiest strategy, and for every length the worthiest that has it.

    Strategies are rows of indices into `stock.lengths`; the index past its end stands for nothing.
    """
    nothing = len(stock.lengths)
    lengths = np.append(stock.lengths, 0)
    room = stock.capacity - stock.lengths
    value, choices = knapsack(lengths, np.append(worth, 0.0), room.max(), stock.depth - 1)
    worthiest = float((worth + value[room]).max())
    parts = [np.arange(nothing)]
    for choice in choices:
        part = choice[room]
        if (part == nothing).all():
            break
        parts.append(part)
        room = room - lengths[part]
    return worthiest, np.stack(parts, axis=1)


def knapsack(
    lengths: np.ndarray, worth: np.ndarray, most_room: int, parts: int
) -> tuple[np.ndarray, Iterable[np.ndarray]]:
    """The most that up to `parts` slots are worth in each room, and the choices that lead there.

    The choices are one table for each slot, to be followed in order. Where the room runs out before
    `parts` does, one table that feeds on itself serves for any number of slots.
    """
    fitting = np.searchsorted(-lengths, -np.arange(most_room + 1))
    unlimited = parts >= most_room // lengths[-2]
    value, tables = np.zeros(most_room + 1), []
    for _ in range(1 if unlimited else parts):
        more, table = np.zeros(most_room + 1), np.zeros(most_room + 1, dtype=np.intp)
        source = more if unlimited else value
        for room, first in enumerate(fitting):
            totals = worth[first:] + source[room - lengths[first:]]
            best = totals.argmax()  # the longest of equals, so that strategies stay short
            more[room], table[room] = totals[best], first + best
        settled = np.array_equal(more, value)
        value, tables = more, [table, *tables]
        if settled:
            break
    return value, repeat(tables[0]) if unlimited else tables


def dive(
    stock: Stock, histogram: np.ndarray, slots: Columns, uses: np.ndarray, enough: int
) -> list[Pack]:
    """Round the LP's answer: fix what is whole, solve for the rest, and so on to the end.

    Every step fixes at least a fifth of the packs that are missing, so there are few steps.
    """
    fixed, left, best = [], histogram, None
    while left.any():
        packs, left = fill(whole_part(stock, slots, uses), left, shorter=True)
        fixed += packs
        finish = fixed + lpfhp(left, stock.capacity, stock.depth)
        best = min(best or finish, finish, key=total)
        if total(best) <= enough or not packs:
            break
        answer = solve(slots, stock.demand(left))
        if answer is None:
            break
        uses, _ = answer
    return best or []


def whole_part(stock: Stock, slots: Columns, uses: np.ndarray) -> Iterator[Pack]:
    """The strategies to fix now: whole uses, or where there are none the most used ones, once."""
    times = np.floor(uses + 1e-6).astype(np.int64)
    if not times.any():
        step = max(1, int(uses.sum() * DIVE_STEP))
        times[np.argsort(-uses, kind="stable")[:step]] = 1
    for strategy in np.flatnonzero(times):
        column = slice(*slots.indptr[strategy : strategy + 2])
        lengths = np.repeat(stock.lengths[slots.indices[column]], slots.data[column].astype(int))
        yield tuple(lengths.tolist()), int(times[strategy])
