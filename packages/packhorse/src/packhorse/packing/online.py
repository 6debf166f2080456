"""Packing as sequences arrive, into the open rows of the batch being filled.

    packer = OnlinePacker(capacity=256, rows=16, policy="first_fit")
    row = packer.add(length)      # None: it fits nowhere, the batch is full
    packs = packer.flush()        # [[0, 3], [1, 2], …]: arrivals by row; and begin again

Three classic rules (Johnson 1973) say which row: *first-fit* takes the first with room, *best-fit*
the one with the least room, *next-fit* looks at the last row only. A rule is nothing but an index
over the rows' free tokens with `find` and `update`, logarithmic in the rows for the first two and
constant for next-fit. First-fit is the default: best-fit packs no better when rows are few, and
first-fit leaves the late rows open for a long arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from packhorse.errors import InputError


class Rule(Protocol):
    """Which open row a sequence goes to."""

    def find(self, length: int) -> int | None:
        """The row to use, or None if a new one must be opened."""
        ...

    def update(self, row: int, free: int) -> None:
        """A row, opened just now or before, has this many tokens left to give."""
        ...


class FirstFit:
    """A tree of maxima over the free tokens: leaves are rows, `tree[1]` is the root."""

    def __init__(self) -> None:
        self.tree = [0, 0]

    @property
    def leaves(self) -> int:
        return len(self.tree) // 2

    def find(self, length: int) -> int | None:
        if self.tree[1] < length:
            return None
        node = 1
        while node < self.leaves:
            node *= 2
            node += self.tree[node] < length
        return node - self.leaves

    def update(self, row: int, free: int) -> None:
        while row >= self.leaves:
            self._double()
        node = self.leaves + row
        self.tree[node] = free
        while node := node // 2:
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])

    def _double(self) -> None:
        """The tree becomes the left half of one twice as wide: each level grows to the right."""
        wider = [0, self.tree[1]]
        for level in range(self.leaves.bit_length()):
            nodes = self.tree[1 << level : 2 << level]
            wider += nodes + len(nodes) * [0]
        self.tree = wider


class BestFit:
    """Rows sorted by free tokens."""

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        self.free: dict[int, int] = {}

    def find(self, length: int) -> int | None:
        at = bisect_left(self.order, (length, 0))
        return self.order[at][1] if at < len(self.order) else None

    def update(self, row: int, free: int) -> None:
        if row in self.free:
            del self.order[bisect_left(self.order, (self.free[row], row))]
        self.free[row] = free
        insort(self.order, (free, row))


class NextFit:
    """The row touched last, which is the last row."""

    def __init__(self) -> None:
        self.row, self.free = 0, 0

    def find(self, length: int) -> int | None:
        return self.row if length <= self.free else None

    def update(self, row: int, free: int) -> None:
        self.row, self.free = row, free


POLICIES: dict[str, type[Rule]] = {
    "first_fit": FirstFit,
    "best_fit": BestFit,
    "next_fit": NextFit,
}


class OnlinePacker:
    """Fills one batch of up to `rows` rows (None: any number) of `capacity` tokens.

    `max_sequences` limits the sequences of a batch, `max_per_row` those that share a row.
    """

    def __init__(
        self,
        capacity: int,
        rows: int | None,
        max_sequences: int | None = None,
        max_per_row: int | None = None,
        policy: str = "first_fit",
    ) -> None:
        if policy not in POLICIES:
            raise InputError(f"unknown packing policy {policy!r}; known: {', '.join(POLICIES)}")
        limits = {"capacity": capacity, "rows": rows}
        limits |= {"max_sequences": max_sequences, "max_per_row": max_per_row}
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise InputError(f"{name} must be at least 1, got {limit}")
        self.capacity, self.rows, self.policy = capacity, rows, policy
        self.max_sequences, self.max_per_row = max_sequences, max_per_row
        self._begin()

    def _begin(self) -> None:
        self._rule: Rule = POLICIES[self.policy]()
        self._packs: list[list[int]] = []
        self._free: list[int] = []
        self._arrivals = 0

    def __len__(self) -> int:
        """Sequences in the batch so far."""
        return self._arrivals

    def add(self, length: int) -> int | None:
        """The row a sequence of `length` tokens goes to, or None if this batch cannot take it."""
        if not 1 <= length <= self.capacity:
            raise InputError(
                f"a sequence of {length} tokens cannot go into rows of {self.capacity};"
                " it must have at least 1 and be truncated or split to fit"
            )
        if self._arrivals == self.max_sequences:
            return None
        row = self._rule.find(length)
        if row is None:
            if len(self._packs) == self.rows:
                return None
            row = len(self._packs)
            self._packs.append([])
            self._free.append(self.capacity)
        self._packs[row].append(self._arrivals)
        self._free[row] -= length
        closed = len(self._packs[row]) == self.max_per_row
        self._rule.update(row, 0 if closed else self._free[row])
        self._arrivals += 1
        return row

    def flush(self) -> list[list[int]]:
        """The rows in use, as the numbers of their arrivals since the last flush; empties all."""
        packs = self._packs
        self._begin()
        return packs
