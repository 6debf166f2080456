"""The packing algorithms of Krell, Kosec, Perez and Fitzgibbon (2021, arXiv 2107.02027).

All three look at the histogram only, so their cost does not depend on how many sequences there are.
They are kept as published, to be compared with; `optimum` is the one to use.

- SPFHP, shortest pack first: longest sequences first, each into the open pack with the most room.
- LPFHP, longest pack first: the same into the open pack with the least room, several equal
  sequences at once. Nearly optimal where depth does not bind, in a few milliseconds.
- NNLSHP: non-negative least squares over every strategy that fills a pack exactly, then rounding.
  Good where the histogram is full and smooth (Wikipedia at depth 3), poor where exact fits are rare
  (depth 2), and possible only where the strategies can be listed. The least squares meet their
  columns a few hundred at a time: the same minimum as over all at once, five times sooner.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from packhorse.errors import InputError

Pack = tuple[tuple[int, ...], int]  # lengths, longest first, and how many packs look like this

MOST_CELLS = 20_000_000  # lengths × strategies that NNLSHP takes on: 512 tokens at depth 3 are 11 M
COLUMNS_AT_ONCE = 300
SHORT, SHORT_WEIGHT = 8, 0.09  # NNLSHP minds less where the shortest sequences go


def spfhp(histogram: np.ndarray, capacity: int, depth: int) -> list[Pack]:
    """Shortest-pack-first histogram packing."""

    def roomiest(rooms: list[int], length: int) -> int:
        return rooms[-1] if rooms and rooms[-1] >= length else 0

    return longest_first(histogram, OpenPacks(capacity, depth), roomiest, most=1)


def lpfhp(histogram: np.ndarray, capacity: int, depth: int) -> list[Pack]:
    """Longest-pack-first histogram packing."""

    def tightest(rooms: list[int], length: int) -> int:
        first = bisect_left(rooms, length)
        return rooms[first] if first < len(rooms) else 0

    return longest_first(histogram, OpenPacks(capacity, depth), tightest, most=depth)


class OpenPacks:
    """Packs by the room they have left; full ones are set aside."""

    def __init__(self, capacity: int, depth: int) -> None:
        self.capacity, self.depth = capacity, depth
        self.rooms: list[int] = []  # ascending, each with at least one pack
        self.stacks: defaultdict[int, list[Pack]] = defaultdict(list)
        self.full: list[Pack] = []

    def put(self, lengths: tuple[int, ...], count: int) -> None:
        """Add packs; none and empty ones leave no trace."""
        room = self.capacity - sum(lengths)
        if not count or not lengths:
            return
        if not room or len(lengths) == self.depth:
            self.full.append((lengths, count))
            return
        if not self.stacks[room]:
            insort(self.rooms, room)
        self.stacks[room].append((lengths, count))

    def take(self, room: int) -> Pack:
        """Remove the packs added last among those with this room."""
        pack = self.stacks[room].pop()
        if not self.stacks[room]:
            del self.rooms[bisect_left(self.rooms, room)]
        return pack

    def all(self) -> list[Pack]:
        return self.full + [pack for room in self.rooms for pack in self.stacks[room]]


def longest_first(
    histogram: np.ndarray, packs: OpenPacks, choose: Callable[[list[int], int], int], most: int
) -> list[Pack]:
    """Place whole counts, up to `most` equal sequences a pack at once, into the room chosen."""
    for length, count in reversed(present(histogram)):
        while count:
            room = choose(packs.rooms, length)
            lengths, available = packs.take(room) if room else ((), count)
            fitting = min((room or packs.capacity) // length, packs.depth - len(lengths))
            times = min(fitting, most, count)
            used = min(available, count // times)
            packs.put(lengths, available - used)
            packs.put(lengths + times * (length,), used)
            count -= used * times
    return packs.all()


def present(histogram: np.ndarray) -> list[tuple[int, int]]:
    """The lengths that occur, shortest first, and their counts."""
    return [(index + 1, int(histogram[index])) for index in np.flatnonzero(histogram).tolist()]


def total(packs: list[Pack]) -> int:
    return sum(count for _, count in packs)


def fill(
    strategies: Iterable[Pack], histogram: np.ndarray, shorter: bool
) -> tuple[list[Pack], np.ndarray]:
    """Put sequences into the slots of `strategies`: the packs that result, and the histogram left.

    A slot takes a sequence of its own length or, with `shorter`, the longest left that fits it; by
    an exchange argument no order of the slots then places more. Packs that stay empty are dropped.
    """
    left = dict(present(histogram))
    waiting = list(left)
    packs = []
    for slots, uses in strategies:
        while uses and (held := hold(slots, waiting, left, shorter)):
            times = min(uses, *(left[length] // number for length, number in held.items()))
            packs.append((tuple(sorted(held.elements(), reverse=True)), times))
            uses -= times
            for length, number in held.items():
                left[length] -= times * number
                if not left[length]:
                    waiting.remove(length)
    remaining = np.zeros_like(histogram)
    remaining[np.array(list(left)) - 1] = list(left.values())
    return packs, remaining


def hold(
    slots: tuple[int, ...], waiting: list[int], left: dict[int, int], shorter: bool
) -> Counter[int]:
    """What one pack with these slots would hold."""
    held: Counter[int] = Counter()
    for slot in slots:
        at = bisect_right(waiting, slot) - 1
        while at >= 0 and held[waiting[at]] == left[waiting[at]]:
            at -= 1
        if at >= 0 and (shorter or waiting[at] == slot):
            held[waiting[at]] += 1
    return +held


def nnlshp(histogram: np.ndarray, capacity: int, depth: int) -> list[Pack]:
    """Non-negative-least-squares histogram packing."""
    from scipy.sparse import coo_array

    refuse_too_many(capacity, depth)
    strategies = list(partitions(capacity, depth, capacity))
    column = np.repeat(np.arange(len(strategies)), [len(slots) for slots in strategies])
    row = np.concatenate(strategies) - 1
    slots = coo_array((np.ones(len(row)), (row, column)), shape=(capacity, len(strategies))).tocsc()
    weight = np.where(np.arange(capacity) < SHORT, SHORT_WEIGHT, 1.0)
    uses = least_squares((slots * weight[:, None]).tocsc(), weight * histogram)
    uses = np.rint(uses).astype(np.int64)
    missing = np.maximum(histogram - np.rint(slots @ uses).astype(np.int64), 0)
    chosen = [(strategies[index], int(uses[index])) for index in np.flatnonzero(uses)]
    alone = [((length,), count) for length, count in present(missing)]
    return fill(chosen + alone, histogram, shorter=False)[0]


def refuse_too_many(capacity: int, depth: int) -> None:
    """Count the partitions of `capacity` into up to `depth` parts before anyone lists them."""
    ways = [1] + capacity * [0]
    for part in range(1, depth + 1):
        for whole in range(part, capacity + 1):
            ways[whole] += ways[whole - part]
        if ways[capacity] * capacity > MOST_CELLS:
            raise InputError(
                f"nnlshp lists every way to fill {capacity} tokens with up to {depth} sequences;"
                " here they are too many: choose a smaller max_per_pack, or algorithm 'optimum'"
            )


def partitions(whole: int, depth: int, longest: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `whole` as up to `depth` parts, longest first."""
    if not whole:
        yield ()
    elif depth:
        for part in range(min(whole, longest), -(-whole // depth) - 1, -1):
            for rest in partitions(whole - part, depth - 1, part):
                yield (part, *rest)


def least_squares(matrix: Any, target: np.ndarray) -> np.ndarray:
    """The x ≥ 0 with the least |matrix · x − target|, letting in only columns that can help."""
    from scipy.optimize import nnls

    x = np.zeros(matrix.shape[1])
    while True:
        gain = matrix.T @ (target - matrix @ x)
        gain[x > 0] = 0
        new = np.argsort(-gain, kind="stable")[:COLUMNS_AT_ONCE]
        new = new[gain[new] > 1e-8 * target.max()]
        if not len(new):
            return x
        columns = np.union1d(np.flatnonzero(x), new)
        x = np.zeros_like(x)
        x[columns] = nnls(matrix[:, columns].toarray(), target, maxiter=20 * len(columns))[0]
