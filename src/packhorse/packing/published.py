"""The packing algorithms of Krell, Kosec, Perez and Fitzgibbon (2021, arXiv 2107.02027).

All three look at the histogram only, so their cost does not depend on how many sequences there are.
They are kept as published, to be compared with; `optimum` is the one to use.

- SPFHP, shortest pack first: the longest sequences first, each into the open pack with most room.
- LPFHP, longest pack first: the same into the open pack with least room, several equal sequences
  at once. Nearly optimal where depth does not bind, in hundredths of a second.
- NNLSHP: non-negative least squares over every strategy that fills a pack exactly, rounded. Good
  where the histogram is full and smooth (Wikipedia at depth 3), poor where exact fits are rare
  (depth 2), and only possible where the strategies can be listed.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from packhorse.errors import InputError

Pack = tuple[tuple[int, ...], int]  # lengths, longest first, and how many packs look like this

MOST_STRATEGIES = 200_000  # for NNLSHP; 512 tokens have 22,102 at depth 3 and 945,121 at depth 4
SHORT, SHORT_WEIGHT = 8, 0.09  # NNLSHP minds less where the shortest sequences go


class OpenPacks:
    """Packs by the room they have left; full ones are set aside."""

    def __init__(self, capacity: int, depth: int) -> None:
        self.capacity, self.depth = capacity, depth
        self.rooms: list[int] = []  # ascending, each with at least one open pack
        self.stacks: defaultdict[int, list[Pack]] = defaultdict(list)
        self.full: list[Pack] = []

    def put(self, lengths: tuple[int, ...], count: int) -> None:
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
        pack = self.stacks[room].pop()
        if not self.stacks[room]:
            del self.rooms[bisect_left(self.rooms, room)]
        return pack

    def all(self) -> list[Pack]:
        return self.full + [pack for room in self.rooms for pack in self.stacks[room]]


def longest_first(
    histogram: np.ndarray, capacity: int, depth: int, choose: Callable, repeats: bool
) -> list[Pack]:
    """Place whole counts, longest sequences first, into the open packs that `choose` names."""
    packs = OpenPacks(capacity, depth)
    for length in (np.flatnonzero(histogram)[::-1] + 1).tolist():
        count = int(histogram[length - 1])
        while count:
            room = choose(packs.rooms, length)
            lengths, available = packs.take(room) if room else ((), count)
            most = min((capacity - sum(lengths)) // length, depth - len(lengths), count)
            times = most if repeats else 1
            used = min(available, count // times)
            packs.put(lengths, available - used)
            packs.put(lengths + times * (length,), used)
            count -= used * times
    return packs.all()


def roomiest(rooms: list[int], length: int) -> int:
    return rooms[-1] if rooms and rooms[-1] >= length else 0


def tightest(rooms: list[int], length: int) -> int:
    first = bisect_left(rooms, length)
    return rooms[first] if first < len(rooms) else 0


spfhp = partial(longest_first, choose=roomiest, repeats=False)
lpfhp = partial(longest_first, choose=tightest, repeats=True)


def total(packs: list[Pack]) -> int:
    return sum(count for _, count in packs)


def fill(
    strategies: Iterable[Pack], histogram: np.ndarray, shorter: bool
) -> tuple[list[Pack], np.ndarray]:
    """Put sequences into the slots of `strategies`: the packs that result, and the histogram left.

    A slot takes a sequence of its own length or, with `shorter`, the longest left that fits: by an
    exchange argument the order of the slots then does not matter. Empty packs are dropped.
    """
    left = {
        length: int(histogram[length - 1]) for length in (np.flatnonzero(histogram) + 1).tolist()
    }
    waiting = list(left)
    packs = []

    def hold(slots: tuple[int, ...]) -> Counter[int]:
        held = Counter[int]()
        for slot in slots:
            at = bisect_right(waiting, slot) - 1
            while shorter and at >= 0 and held[waiting[at]] == left[waiting[at]]:
                at -= 1
            if at >= 0 and (shorter or (waiting[at] == slot and held[slot] < left[slot])):
                held[waiting[at]] += 1
        return held

    for slots, uses in strategies:
        while uses and (held := hold(slots)):
            times = min(uses, *(left[length] // number for length, number in held.items()))
            uses -= times
            packs.append((tuple(sorted(held.elements(), reverse=True)), times))
            for length, number in held.items():
                left[length] -= times * number
                if not left[length]:
                    waiting.remove(length)
    remaining = np.zeros_like(histogram)
    for length in waiting:
        remaining[length - 1] = left[length]
    return packs, remaining
