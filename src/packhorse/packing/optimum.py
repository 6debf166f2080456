"""The fewest packs a length histogram allows, with a proof of how close we came.

Packing a histogram is the cutting-stock problem. Its linear relaxation counts *slots*: a strategy
is a way to cut `capacity` into at most `depth` slots, `uses` says how often each is used, and a slot
may also hold a shorter sequence, so one column more per length hands slots down to the next length:

    minimise Σ uses    with    slots(uses) + handed down − handed on  ≥  demand,    uses ≥ 0

Strategies are too many to list (512 tokens have 22,102 at depth 3, billions at depth 8), so they
are generated as needed (Gilmore and Gomory 1961), beginning with LPFHP's. The LP's dual is a *worth*
per length; only a strategy whose slots are worth more than 1 can help, and the worthiest strategy is
a knapsack over capacity and depth. That knapsack also proves a bound for any worths, optimal or not
(Farley 1990): divided by its value no pack is worth more than 1, so `demand · worth` packs are
needed. The LP's own worths jump about; priced close to the best worths known (Wentges 1997), which
start at length / capacity, ten rounds do what takes fifty without.

Rounding dives: keep the whole part of `uses`, then solve again for the few sequences left, rounding
up where nothing is whole. After every step LPFHP finishes a copy, and the best finish wins.

Two limits keep the time bounded, both paid in quality and never in truth: more than `CLASSES`
distinct lengths are grouped, each group packed as its longest, and at the deadline the best plan and
the best bound so far are the answer: never worse than LPFHP's plan and the token bound.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from packhorse.packing.published import Pack, fill, lpfhp, total

if TYPE_CHECKING:
    from scipy.sparse import csc_array

CLASSES = 1024
SMOOTHING = 0.8  # how far pricing leans to the best worths known; 0.7 to 0.9 do equally well
PRECISION = 1e-6  # the relative gap that counts as none


@dataclass(frozen=True)
class Stock:
    """The problem: which slot lengths to cut (longest first) from how many tokens, how many a pack."""

    lengths: np.ndarray
    capacity: int
    depth: int

    def demand(self, histogram: np.ndarray) -> np.ndarray:
        """How many sequences need each slot length, or one that is longer."""
        present = np.flatnonzero(histogram)
        slot = np.searchsorted(-self.lengths, -(present + 1), side="right") - 1
        return np.bincount(slot, weights=histogram[present], minlength=len(self.lengths))


def optimum(
    histogram: np.ndarray, capacity: int, depth: int, seconds: float = 8.0
) -> tuple[list[Pack], int]:
    """Packs for `histogram` (entry i counts length i+1) and a proven bound: no plan has fewer."""
    deadline = time.perf_counter() + seconds
    packs, bound = lpfhp(histogram, capacity, depth), simple_bound(histogram, capacity, depth)
    if total(packs) <= bound * (1 + PRECISION):
        return packs, bound
    stock = Stock(group(histogram), capacity, depth)
    slots, uses, worth = relax(stock, stock.demand(histogram), deadline - seconds * 0.4)
    present = np.flatnonzero(histogram)
    bound = max(
        bound,
        round_up(
            np.append(worth, 0)[np.searchsorted(-stock.lengths, -(present + 1))]
            @ histogram[present]
        ),
    )
    return dive(histogram, stock, slots, uses, bound, packs, deadline), bound


def group(histogram: np.ndarray) -> np.ndarray:
    """At most `CLASSES` of these lengths, closest where rounding up to them would cost the most."""
    lengths = np.flatnonzero(histogram)[::-1] + 1
    if len(lengths) <= CLASSES:
        return lengths
    weight = np.sqrt(histogram[lengths - 1])
    before = np.cumsum(weight) - weight
    _, first = np.unique((before * (CLASSES / weight.sum())).astype(int), return_index=True)
    return lengths[first]


def simple_bound(histogram: np.ndarray, capacity: int, depth: int) -> int:
    """What is plain without any LP: tokens, sequences, and sequences of more than half a pack."""
    tokens = int(histogram @ np.arange(1, len(histogram) + 1))
    sequences = int(histogram.sum())
    alone = int(histogram[capacity // 2 :].sum())
    return max(-(-tokens // capacity), -(-sequences // depth), alone)


def round_up(bound: float) -> int:
    """The next whole number of packs, forgiving the rounding errors of the sums behind `bound`."""
    return math.ceil(bound * (1 - 1e-9))


def relax(
    stock: Stock, demand: np.ndarray, deadline: float
) -> tuple["csc_array", np.ndarray, np.ndarray]:
    """Solve the LP by column generation: (slots of each strategy, uses of each, best worths)."""
    from scipy.sparse import hstack

    slots, uses = greedy(stock, demand)
    best = stock.lengths / stock.capacity
    new = from_rows(stock, price(stock, best)[1])
    while new.shape[1] and time.perf_counter() < deadline:
        slots = hstack([slots, new], format="csc")
        answer = solve(slots, demand, deadline)
        if answer is None:
            return slots, np.append(uses, np.zeros(new.shape[1])), best
        uses, worth = answer
        best, new = improve(stock, demand, best, worth)
        bound = demand @ best
        if uses.sum() <= max(round_up(bound), bound * (1 + PRECISION)):
            break
    return slots, uses, best


def improve(stock, demand, best, worth):
    lean = SMOOTHING
    while True:
        smoothed = lean * best + (1 - lean) * worth
        worthiest, strategies = price(stock, smoothed)
        best = max(best, smoothed / worthiest, key=demand.dot)
        columns = from_rows(stock, strategies)
        columns = columns[:, worth @ columns > 1 + 1e-9]
        if columns.shape[1] or lean == 0:
            return best, columns
        lean = lean / 2 if lean > 0.1 else 0


def greedy(stock, demand):
    h = np.zeros(stock.capacity, int)
    h[stock.lengths - 1] = demand
    packs = lpfhp(h, stock.capacity, stock.depth)
    return from_packs(stock, packs), np.array([c for _, c in packs], float)


def from_packs(stock, packs):
    parts = np.concatenate([np.array(l) for l, _ in packs])
    col = np.repeat(np.arange(len(packs)), [len(l) for l, _ in packs])
    return columns(stock, np.searchsorted(-stock.lengths, -parts), col)


def from_rows(stock, strategies):
    strategies = np.unique(np.sort(strategies, axis=1), axis=0)
    column, place = np.nonzero(strategies < len(stock.lengths))
    return columns(stock, strategies[column, place], column)


def columns(stock, part, column):
    from scipy.sparse import coo_array

    return coo_array(
        (np.ones(len(part)), (part, column)), shape=(len(stock.lengths), column[-1] + 1)
    ).tocsc()


def solve(
    slots: "csc_array", demand: np.ndarray, deadline: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """The LP over these strategies: (uses of each, worth of each length)."""
    from scipy.optimize import linprog
    from scipy.sparse import diags_array, hstack

    lengths, strategies = slots.shape
    hand_down = diags_array([-1.0, 1.0], offsets=[0, -1], shape=(lengths, lengths - 1))
    cost = np.concatenate([np.ones(strategies), np.zeros(lengths - 1)])
    answer = linprog(
        cost,
        A_ub=-hstack([slots, hand_down], format="csc"),
        b_ub=-demand,
        method="highs-ds",
        options=dict(time_limit=max(deadline - time.perf_counter(), 0.01)),
    )
    if not answer.success:
        return None
    return answer.x[:strategies], np.maximum(-answer.ineqlin.marginals, 0)


def price(stock: Stock, worth: np.ndarray) -> tuple[float, np.ndarray]:
    """The worth of the worthiest strategy, and for every length the worthiest that holds it.

    Strategies are rows of indices into `stock.lengths`; the index past its end stands for nothing.
    """
    nothing = len(stock.lengths)
    lengths = np.append(stock.lengths, 0)
    value, choices = knapsack(lengths, np.append(worth, 0), stock.capacity, stock.depth - 1)
    room = stock.capacity - stock.lengths
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
    lengths: np.ndarray, worth: np.ndarray, capacity: int, parts: int
) -> tuple[np.ndarray, Iterable[np.ndarray]]:
    """The most that up to `parts` slots are worth in 0..capacity tokens, and the choices to make.

    The choices come one table per slot, to be followed from the first. Where capacity runs out
    before `parts` does, one table that feeds on itself answers for any number of slots.
    """
    fitting = np.searchsorted(-lengths, -np.arange(capacity + 1))
    value, tables = np.zeros(capacity + 1), []
    unlimited = parts >= capacity // lengths[-2]
    for _ in range(1 if unlimited else parts):
        more, table = np.zeros(capacity + 1), np.zeros(capacity + 1, dtype=np.intp)
        source = more if unlimited else value
        for room, first in enumerate(fitting):
            totals = worth[first:] + source[room - lengths[first:]]
            best = totals.argmax()  # the longest of equals, for short strategies
            more[room], table[room] = totals[best], first + best
        if np.array_equal(more, value):
            break
        value, tables = more, [table, *tables]
    return value, repeat(tables[0]) if unlimited else tables


def dive(histogram, stock, slots, uses, bound, best, deadline):
    placed, left = [], histogram
    t = time.perf_counter()
    keep = uses > 1e-9 if MODE == "support" else uses > -1
    slots, uses = slots[:, keep], uses[keep]
    it = 0
    while total(best) > bound and left.any() and time.perf_counter() < deadline:
        it += 1
        packs, left = fill(whole(stock, slots, uses), left, shorter=True)
        placed += packs
        best = min(best, placed + lpfhp(left, stock.capacity, stock.depth), key=total)
        if not left.any():
            break
        answer = solve(slots, stock.demand(left), deadline)
        if answer is None:
            break
        uses = answer[0]
    return best


MODE = "support"


def whole(stock, slots, uses):
    n = np.floor(uses + 1e-6).astype(int)
    if not n.any():
        order = np.argsort(-uses, kind="stable")
        k = max(1, int(uses.sum() * FR))
        n[order[:k]] = 1
    for c in np.flatnonzero(n):
        i = slots.indices[slots.indptr[c] : slots.indptr[c + 1]]
        k = slots.data[slots.indptr[c] : slots.indptr[c + 1]].astype(int)
        yield tuple(np.repeat(stock.lengths[i], k).tolist()), int(n[c])


FR = 0.1
