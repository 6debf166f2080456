"""The packing algorithms of Krell, Kosec, Perez and Fitzgibbon (2021, arXiv 2107.02027).

All three look only at the histogram, so their cost does not depend on the number of sequences. They
are as published, for comparison; `optimum` is the one to use.

- SPFHP, shortest pack first: longest sequences first, each into the open pack with the most room.
- LPFHP, longest pack first: the same, but into the open pack with the least room, several equal
  sequences at once. Nearly optimal if the depth is not the limit, and takes a few milliseconds.
- NNLSHP: non-negative least squares over every strategy that fills a pack exactly, then rounding.
  Good if the histogram is full and smooth (Wikipedia at depth 3), poor if exact fits are rare
  (depth 2), and only possible if the strategies can be listed. The solver gets a few hundred
  columns at a time: the same minimum as with all at once, five times faster.
"""

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from packhorse.errors import InputError

Pack = tuple[tuple[int, ...], int]  # (lengths, longest first; number of packs like this)

MAX_CELLS = 20_000_000  # lengths × strategies that NNLSHP accepts: 512 tokens at depth 3 are 11 M
COLUMNS_AT_ONCE = 300
# NNLSHP's weights of the residual: the shortest sequences fit into any gap, so that an error in
# their count matters less.
SHORT_LENGTH = 8
SHORT_WEIGHT = 0.09


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
    """Packs by the room they have; full packs are set aside."""

    def __init__(self, capacity: int, depth: int) -> None:
        self.capacity = capacity
        self.depth = depth
        self.rooms: list[int] = []  # ascending; every one of them has at least one pack
        self.stacks: defaultdict[int, list[Pack]] = defaultdict(list)
        self.full: list[Pack] = []

    def put(self, lengths: tuple[int, ...], count: int) -> None:
        """Add `count` packs; does nothing for a count of 0 or packs without sequences."""
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
        """Remove and return the packs added last among those with this room."""
        pack = self.stacks[room].pop()
        if not self.stacks[room]:
            del self.rooms[bisect_left(self.rooms, room)]
        return pack

    def all(self) -> list[Pack]:
        return self.full + [pack for room in self.rooms for pack in self.stacks[room]]


def longest_first(
    histogram: np.ndarray, packs: OpenPacks, choose: Callable[[list[int], int], int], most: int
) -> list[Pack]:
    """Place sequences, longest first, into the open packs whose room `choose` picks.

    `choose` gets the rooms there are and a length, and returns a room or 0 for a new pack. All
    sequences of a length are placed in bulk, up to `most` of them per pack at once.
    """
    for length, count in reversed(present(histogram)):
        while count:
            room = choose(packs.rooms, length)
            lengths, available = packs.take(room) if room else ((), count)
            fitting = min((room or packs.capacity) // length, packs.depth - len(lengths))
            times = min(fitting, most, count)
            used = min(available, count // times)
            # Of the packs taken, `used` get `times` more sequences; the others go back unchanged.
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
    """Put sequences into the slots of `strategies`; returns the packs and the remaining histogram.

    A slot takes a sequence of its length or, with `shorter`, the longest remaining one that fits;
    by an exchange argument no order of the slots then places more. Empty packs are dropped.
    """
    remaining = dict(present(histogram))
    waiting = list(remaining)  # lengths that still have sequences, ascending
    packs: list[Pack] = []
    for slots, uses in strategies:
        while uses and (content := pack_content(slots, waiting, remaining, shorter)):
            # As many packs of this content as the remaining sequences allow.
            limits = (remaining[length] // number for length, number in content.items())
            times = min(uses, *limits)
            packs.append((tuple(sorted(content.elements(), reverse=True)), times))
            uses -= times
            for length, number in content.items():
                remaining[length] -= times * number
                if not remaining[length]:
                    waiting.remove(length)
    rest = np.zeros_like(histogram)
    rest[np.array(list(remaining)) - 1] = list(remaining.values())
    return packs, rest


def pack_content(
    slots: tuple[int, ...], waiting: list[int], remaining: dict[int, int], shorter: bool
) -> Counter[int]:
    """The lengths that one pack with these slots would hold, and how many of each."""
    content: Counter[int] = Counter()
    for slot in slots:
        index = bisect_right(waiting, slot) - 1
        # Skip lengths whose remaining sequences this pack has already taken.
        while index >= 0 and content[waiting[index]] == remaining[waiting[index]]:
            index -= 1
        if index >= 0 and (shorter or waiting[index] == slot):
            content[waiting[index]] += 1
    return +content  # without the zeros that the comparison above inserted


def nnlshp(histogram: np.ndarray, capacity: int, depth: int) -> list[Pack]:
    """Non-negative-least-squares histogram packing."""
    from scipy.sparse import coo_array

    check_partition_count(capacity, depth)
    strategies = list(partitions(capacity, depth, capacity))
    column = np.repeat(np.arange(len(strategies)), [len(slots) for slots in strategies])
    row = np.concatenate(strategies) - 1
    shape = (capacity, len(strategies))
    slots: Any = coo_array((np.ones(len(row)), (row, column)), shape=shape).tocsc()
    weight = np.where(np.arange(capacity) < SHORT_LENGTH, SHORT_WEIGHT, 1.0)
    uses = least_squares((slots * weight[:, None]).tocsc(), weight * histogram)
    uses = np.rint(uses).astype(np.int64)
    missing = np.maximum(histogram - np.rint(slots @ uses).astype(np.int64), 0)
    chosen = [(strategies[index], int(uses[index])) for index in np.flatnonzero(uses)]
    alone = [((length,), count) for length, count in present(missing)]
    return fill(chosen + alone, histogram, shorter=False)[0]


def check_partition_count(capacity: int, depth: int) -> None:
    """Raise if `capacity` has too many partitions into up to `depth` parts to list them."""
    ways = [1] + capacity * [0]
    for part in range(1, depth + 1):
        for whole in range(part, capacity + 1):
            ways[whole] += ways[whole - part]
        if ways[capacity] * capacity > MAX_CELLS:
            raise InputError(
                f"nnlshp lists every way to fill {capacity} tokens with up to {depth} sequences,"
                " and here there are too many; use a smaller max_per_pack, or algorithm 'optimum'"
            )


def partitions(whole: int, depth: int, longest: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `whole` as a sum of up to `depth` parts, longest first."""
    if not whole:
        yield ()
    elif depth:
        for part in range(min(whole, longest), -(-whole // depth) - 1, -1):
            for rest in partitions(whole - part, depth - 1, part):
                yield (part, *rest)


def least_squares(matrix: Any, target: np.ndarray) -> np.ndarray:
    """The x ≥ 0 that minimizes |matrix · x − target|, by an active set of columns.

    A column outside the set can help only if its gradient is positive; the best of those join the
    set until there are none, which is the optimality condition (Karush, Kuhn and Tucker).
    """
    from scipy.optimize import nnls

    x = np.zeros(matrix.shape[1])
    while True:
        gradient = matrix.T @ (target - matrix @ x)
        gradient[x > 0] = 0
        new = np.argsort(-gradient, kind="stable")[:COLUMNS_AT_ONCE]
        new = new[gradient[new] > 1e-8 * target.max()]
        if not len(new):
            return x
        columns = np.union1d(np.flatnonzero(x), new)
        x = np.zeros_like(x)
        x[columns] = nnls(matrix[:, columns].toarray(), target, maxiter=20 * len(columns))[0]
