"""Pack sequences as they arrive, into the open rows of the batch that is being filled.

    packer = OnlinePacker(capacity=256, rows=16, policy="first_fit")
    row = packer.add(length)      # None: it fits into no row, the batch is full
    packs = packer.flush()        # [[0, 3], [1, 2], …]: arrival numbers by row; then start over

Three classic bin-packing rules (Johnson 1973) choose the row: *first fit* takes the first row with
enough room, *best fit* the one with the least room, *next fit* looks at the last row only. A rule
is an index over the free tokens of the rows: a lookup takes logarithmic time for the first two and
constant time for next fit. First fit is the default: best fit packs no better if there are few
rows, and first fit keeps the late rows open for long arrivals.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from packhorse.errors import InputError


class FitRule(Protocol):
    """Chooses the open row that a sequence goes to."""

    def find(self, length: int) -> int | None:
        """The row to use, or None if a new row must be opened."""
        ...

    def update(self, row: int, free: int) -> None:
        """Record that `row`, which may be new, now has `free` tokens left."""
        ...


class FirstFit:
    """The first row with enough room, by a segment tree of maxima over free tokens.

    `tree[1]` is the root, node i has the children 2i and 2i+1, and the leaves are the rows.
    """

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
            if self.tree[node] < length:  # no row of the left half fits, so one of the right does
                node += 1
        return node - self.leaves

    def update(self, row: int, free: int) -> None:
        while row >= self.leaves:
            self._double()
        node = self.leaves + row
        self.tree[node] = free
        while node := node // 2:
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])

    def _double(self) -> None:
        """Make the tree the left half of one twice as wide, so that it can hold more rows."""
        wider = [0, self.tree[1]]
        for level in range(self.leaves.bit_length()):
            nodes = self.tree[1 << level : 2 << level]
            wider += nodes + len(nodes) * [0]
        self.tree = wider


class BestFit:
    """The row with the least sufficient room, by a sorted list of (free tokens, row)."""

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        self.free: dict[int, int] = {}

    def find(self, length: int) -> int | None:
        index = bisect_left(self.order, (length, 0))
        return self.order[index][1] if index < len(self.order) else None

    def update(self, row: int, free: int) -> None:
        if row in self.free:
            del self.order[bisect_left(self.order, (self.free[row], row))]
        self.free[row] = free
        insort(self.order, (free, row))


class NextFit:
    """The last row, if it has enough room."""

    def __init__(self) -> None:
        self.row = 0
        self.free = 0

    def find(self, length: int) -> int | None:
        return self.row if length <= self.free else None

    def update(self, row: int, free: int) -> None:
        self.row = row
        self.free = free


POLICIES: dict[str, type[FitRule]] = {
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
        limits = {
            "capacity": capacity,
            "rows": rows,
            "max_sequences": max_sequences,
            "max_per_row": max_per_row,
        }
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise InputError(f"{name} must be at least 1, got {limit}")
        self.capacity = capacity
        self.rows = rows
        self.policy = policy
        self.max_sequences = max_sequences
        self.max_per_row = max_per_row
        self._reset()

    def _reset(self) -> None:
        self._rule: FitRule = POLICIES[self.policy]()
        self._packs: list[list[int]] = []
        self._free: list[int] = []
        self._arrivals = 0

    def __len__(self) -> int:
        """Number of sequences in the batch so far."""
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
        # A row with all the sequences it may have counts as full, so that no rule chooses it.
        is_full = len(self._packs[row]) == self.max_per_row
        self._rule.update(row, 0 if is_full else self._free[row])
        self._arrivals += 1
        return row

    def flush(self) -> list[list[int]]:
        """Return the arrival numbers (since the last flush) in each row, and start over."""
        packs = self._packs
        self._reset()
        return packs
