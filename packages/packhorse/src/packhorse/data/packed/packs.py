"""Packed rows as arrays: their columns, dtypes, and the checks that every row must pass.

Rows are laid end to end, so that a million of them are a handful of arrays and no check of them
needs a loop. The same checks run before rows are written and when they are verified.

Shapes: R rows, S sequences, T tokens, M masked tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from packhorse.data.packed.examples import Sequences
    from packhorse.data.packed.masking import Masks

SEQUENCE_COLUMNS = ("lengths", "first", "random_next")
MASK_COLUMNS = ("masked_counts", "masked_positions", "masked_ids")


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The limits and properties that all rows of a dataset share."""

    capacity: int
    vocab_size: int
    max_per_pack: int | None = None  # None: as many as fit
    static_masks: bool = False
    next_sentence: bool = True  # False: sequences have one segment, and their labels no meaning


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows of S sequences laid end to end in T tokens, with static masks at M of them or none."""

    ids: np.ndarray  # [T]
    lengths: np.ndarray  # [S]
    first: np.ndarray  # [S] tokens of the first segment, [CLS] and [SEP] included
    random_next: np.ndarray  # [S] 1: the second segment is from another document
    offsets: np.ndarray  # [R+1] the sequence that each row begins with, and the end
    masked_counts: np.ndarray | None = None  # [S]
    masked_positions: np.ndarray | None = None  # [M] within the row
    masked_ids: np.ndarray | None = None  # [M] the tokens that stood there

    @classmethod
    def of(cls, sequences: Sequences, offsets: np.ndarray) -> Rows:
        """Rows from sequences in the order of their rows; `offsets` as in an `Assignment`."""
        s = sequences
        rows = cls(s.ids, s.lengths, s.first, s.random_next, offsets)
        return rows if s.masked is None else rows.masked(s.ids, s.masked)

    def masked(self, ids: np.ndarray, masks: Masks) -> Rows:
        """The same rows with these masks, and `ids` as a model should see them."""
        begins = begins_in_row(self.lengths, self.offsets)
        return replace(
            self,
            ids=ids,
            masked_counts=masks.counts,
            masked_positions=masks.positions + np.repeat(begins, masks.counts),
            masked_ids=masks.ids,
        )

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, one part after the other."""
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in columns_of(parts[0].masked_ids is not None)
        }
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(offsets=cumulative(counts), **columns)

    def cut(self, begin: int, end: int) -> Rows:
        """Rows `begin` to `end`, as views."""
        columns = {
            name: getattr(self, name)[bounds[begin] : bounds[end]]
            for name, bounds in self.bounds().items()
        }
        return Rows(offsets=self.offsets[begin : end + 1] - self.offsets[begin], **columns)

    def bounds(self) -> dict[str, np.ndarray]:
        """For each column [R+1]: the begin of each row in it, and the end."""
        bounds: dict[str, np.ndarray] = {name: self.offsets for name in SEQUENCE_COLUMNS}
        bounds["ids"] = cumulative(self.lengths)[self.offsets]
        if self.masked_counts is not None:
            masks = cumulative(self.masked_counts)[self.offsets]
            bounds["masked_counts"] = self.offsets
            bounds["masked_positions"] = masks
            bounds["masked_ids"] = masks
        return bounds

    def __len__(self) -> int:
        return len(self.offsets) - 1


def columns_of(static_masks: bool) -> tuple[str, ...]:
    """The columns of a shard, in order."""
    columns = ("ids", *SEQUENCE_COLUMNS)
    return columns + MASK_COLUMNS if static_masks else columns


def dtypes_of(layout: RowLayout) -> dict[str, np.dtype]:
    """The narrowest dtype for each column."""
    token = np.min_scalar_type(layout.vocab_size - 1)
    position = np.min_scalar_type(layout.capacity)
    special = {"ids": token, "random_next": np.dtype(np.uint8), "masked_ids": token}
    return {name: special.get(name, position) for name in columns_of(layout.static_masks)}


def row_problems(rows: Rows, layout: RowLayout) -> Iterator[str]:
    """What is wrong with the rows; a check may rely on those before it."""
    offsets = rows.offsets
    lengths = rows.lengths.astype(np.int64)
    in_row = np.diff(offsets)
    if not len(in_row) or offsets[0] != 0 or offsets[-1] != len(lengths) or in_row.min() < 1:
        yield "its rows do not hold its sequences, each row at least one"
    elif not len(rows.first) == len(rows.random_next) == len(lengths):
        yield "not all of its sequences have a first segment and a label"
    elif layout.max_per_pack is not None and in_row.max() > layout.max_per_pack:
        yield f"a row of {in_row.max()} sequences, {layout.max_per_pack} are allowed"
    elif lengths.min() < 1 or lengths.sum() != len(rows.ids):
        yield "its lengths do not add up to its tokens"
    elif (most := np.add.reduceat(lengths, offsets[:-1]).max()) > layout.capacity:
        yield f"a row of {most} tokens, the capacity is {layout.capacity}"
    elif rows.first.min() < 1 or (rows.first > lengths).any():
        yield "a first segment that is empty or longer than its sequence"
    elif rows.random_next.min() < 0 or rows.random_next.max() > 1:
        yield "a label of the next sentence that is neither 0 nor 1"
    elif not layout.next_sentence and rows.random_next.any():
        yield "a label of the next sentence, but there are to be none"
    elif rows.ids.min() < 0 or rows.ids.max() >= layout.vocab_size:
        yield f"token ids outside the vocabulary of {layout.vocab_size}"
    else:
        yield from _mask_problems(rows, layout)


def _mask_problems(rows: Rows, layout: RowLayout) -> Iterator[str]:
    counts = rows.masked_counts
    positions = rows.masked_positions
    ids = rows.masked_ids
    if counts is None or positions is None or ids is None:
        if layout.static_masks:
            yield "it has no masks, but they are to be static"
        return
    if not layout.static_masks:
        yield "it has masks, but they are to be drawn when loading"
    elif len(counts) != len(rows.lengths) or not counts.sum() == len(ids) == len(positions):
        yield "its masks do not belong to its sequences"
    elif len(ids):
        begins = np.repeat(begins_in_row(rows.lengths, rows.offsets), counts)
        ends = begins + np.repeat(rows.lengths.astype(np.int64), counts)
        if (positions < begins).any() or (positions >= ends).any():
            yield "a mask outside its sequence"
        if ids.min() < 0 or ids.max() >= layout.vocab_size:
            yield f"masked ids outside the vocabulary of {layout.vocab_size}"


def begins_in_row(lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[S] the position of each sequence in its row."""
    begins = cumulative(lengths)
    return begins[:-1] - np.repeat(begins[offsets[:-1]], np.diff(offsets))


def cumulative(counts: np.ndarray | Sequence[int]) -> np.ndarray:
    """0, and the sums up to each count."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def index_ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """start, start+1 … for each start, as many as its size, one run after the other."""
    begins = cumulative(sizes)
    return np.repeat(starts - begins[:-1], sizes) + np.arange(int(begins[-1]))
