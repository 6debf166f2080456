"""Batches out of packed rows: shuffled, masked, divided among ranks, and exactly resumable.

    for batch in Loader(shards.open("corpus/train"), rows=96, seed=7):
        ...                                    # batch.packed, batch.masked_at, batch.next_labels
        state["data"] = batch.cursor           # later: Loader(…, cursor=state["data"])

The epochs' orders laid end to end make one stream of rows; a global batch is the next `rows` of it,
whatever the number of ranks and workers, and a cursor is a place in it. So a cursor may be taken up
by another number of ranks, and even with another `rows`: the stream goes on where it stood. What is
masked in a row depends on the seed, the epoch and the row alone, never on who loads it or what
lies beside it; how much and whether by whole words, the dataset says as it was built, unless it is
said here. Each batch carries the cursor behind it, so that what was loaded ahead but never
used is not skipped on resuming.

Shapes: T tokens, S sequences, R rows, M masked tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from packhorse.data.order import by_count, by_tokens, permuted
from packhorse.data.packed.masking import Recipe, draw_by_keys, keys_of
from packhorse.data.packed.packs import Rows, cumulative
from packhorse.errors import InputError
from packhorse.packing.batch import Packed

if TYPE_CHECKING:
    from packhorse.data.packed.shards import Dataset

MADE_BY = ("dataset", "seed", "shuffle")  # what a cursor must agree on to mean the same place


@dataclass(frozen=True, slots=True)
class Batch:
    """What a training step takes; per-sequence values are in the order of `packed.places`."""

    packed: Packed
    masked_at: Tensor  # [M] which tokens of the batch are to be guessed, rising
    masked_ids: Tensor  # [M] what stood there
    next_labels: Tensor  # [S] 1: the second segment is from elsewhere; [0] if there are none
    sequences: int  # of the dataset; dummies do not count
    tokens: int
    cursor: dict[str, Any]  # where to go on behind this batch


@dataclass(frozen=True)
class Loader:
    """Iterate to get this rank's share of each global batch, from the cursor on."""

    dataset: Dataset
    rows: int  # of a global batch, all ranks together
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None  # None: without end
    drop_last: bool = False  # each epoch ends with its last full batch; else the next fills it up
    # Drawn anew each epoch. None: stored masks, or as the dataset was built to be; False: no masks.
    masking: Recipe | Literal[False] | None = None
    in_rows: bool = False  # T is rows × capacity; else the rows' tokens alone
    rank: int = 0
    world: int = 1
    parts: int = 1  # batches that a rank's share is divided into, at most, for accumulation
    worker: int = 0  # of `workers` that take the global batches in turn
    workers: int = 1
    balanced: bool = False  # ranks get as many tokens each, not only as many rows
    prefetch: int = 2  # batches made ahead, by a thread; 0: none
    cursor: Mapping[str, Any] | None = None  # of a batch behind which to go on

    def __post_init__(self) -> None:
        least = {"rows": 1, "seed": 0, "world": 1, "parts": 1, "workers": 1, "prefetch": 0}
        for name, smallest in least.items():
            if not smallest <= (given := getattr(self, name)) < 1 << 63:
                raise InputError(f"{name} must be from {smallest} up to 2**63 - 1, got {given}")
        if not (0 <= self.rank < self.world and 0 <= self.worker < self.workers):
            told = f"rank {self.rank} of {self.world}, worker {self.worker} of {self.workers}"
            raise InputError(f"there is no {told}; they count from 0")
        if self.rows < self.world:
            raise InputError(
                f"a batch of {self.rows} rows has not one for each of {self.world} ranks;"
                " take more rows, or fewer ranks"
            )
        if self.masking is not None and self.dataset.manifest.layout.static_masks:
            raise InputError(f"{self.dataset.folder} has masks of its own; leave out masking")
        if not self._epoch_rows:
            raise InputError(
                f"{self.dataset.folder} has {len(self.dataset)} rows, not one batch of {self.rows};"
                " take fewer rows a batch, or keep the last batch"
            )
        self._begin()

    def __iter__(self) -> Iterator[Batch]:
        return _ahead(self._batches(), self.prefetch) if self.prefetch else self._batches()

    @property
    def _epoch_rows(self) -> int:
        have = len(self.dataset)
        return have // self.rows * self.rows if self.drop_last else have

    def _batches(self) -> Iterator[Batch]:
        first, begin = self._begin()
        end = None if self.epochs is None else self.epochs * self._epoch_rows
        for number in count(first):
            until = begin + self.rows if end is None else min(begin + self.rows, end)
            if until <= begin:
                return
            if number % self.workers == self.worker:
                yield from self._share(begin, until, number)
            begin = until

    def _share(self, begin: int, until: int, number: int) -> Iterator[Batch]:
        """This rank's part of the rows at these places of the stream."""
        epochs, places = np.divmod(np.arange(begin, until), self._epoch_rows)
        rows = self._ordered(epochs, places)
        if self.balanced:
            shares = by_tokens(self.dataset.tokens(rows), self.world * self.parts)
        else:
            shares = by_count(rows, self.world * self.parts)
        mine = [share for share in shares[self.rank :: self.world] if len(share)]
        here, behind = self._cursor(begin, number), self._cursor(until, number + 1)
        for left, share in zip(reversed(range(len(mine))), mine, strict=True):
            # A step begun is done again: a cursor never points into a batch.
            yield self._batch(rows[share], epochs[share], here if left else behind)

    def _ordered(self, epochs: np.ndarray, places: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return places
        size, rows = len(self.dataset), places.copy()
        for epoch in np.unique(epochs).tolist():
            of = epochs == epoch
            rows[of] = permuted(places[of], size, self.seed, epoch)
        return rows

    def _batch(self, numbers: np.ndarray, epochs: np.ndarray, cursor: dict[str, Any]) -> Batch:
        rows, manifest = self.dataset.take(numbers), self.dataset.manifest
        masking = manifest.masking if self.masking is None else self.masking
        if masking and not manifest.layout.static_masks:
            told = manifest.specials, masking, keys_in(rows, self.seed, epochs, numbers)
            rows = rows.masked(*draw_by_keys(rows.ids, rows.lengths, *told))
        batch = batch_of(rows, manifest.layout.capacity * self.in_rows, cursor)
        if manifest.layout.next_sentence:
            return batch
        return replace(batch, next_labels=batch.next_labels[:0])  # to learn from them is an error

    def _begin(self) -> tuple[int, int]:
        """The number of the first batch, and its place in the stream."""
        if self.cursor is None:
            return 0, 0
        for key, ours in self._cursor(0, 0).items():
            theirs = self.cursor.get(key)
            if type(theirs) is not type(ours) or (isinstance(theirs, int) and theirs < 0):
                raise InputError(f"not a cursor of a loader: its {key} is {theirs!r:.40}")
            if key in MADE_BY and theirs != ours:
                raise InputError(
                    f"the cursor was made with another {key} ({theirs!r:.40}, now {ours!r:.40});"
                    " go on with the same, or begin without a cursor"
                )
        epoch, row = self.cursor["epoch"], min(self.cursor["row"], self._epoch_rows)
        return self.cursor["batch"], epoch * self._epoch_rows + row

    def _cursor(self, place: int, batch: int) -> dict[str, Any]:
        epoch, row = divmod(place, self._epoch_rows)
        made_by = (self.dataset.fingerprint, self.seed, self.shuffle)
        made = dict(zip(MADE_BY, made_by, strict=True))
        return {**made, "epoch": epoch, "row": row, "batch": batch}


def keys_in(rows: Rows, seed: int, epochs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """[S] what decides a sequence's masks: the seed, the epoch, its row, its place in the row."""
    counts = np.diff(rows.offsets)
    within = np.arange(len(rows.lengths)) - np.repeat(rows.offsets[:-1], counts)
    return keys_of(seed, np.repeat(epochs, counts), np.repeat(numbers, counts), within)


def batch_of(rows: Rows, capacity: int, cursor: dict[str, Any]) -> Batch:
    """Rows as a model sees them: each in a row of `capacity` tokens, or with 0 end to end."""
    lengths, begins = rows.lengths.astype(np.int64), rows.bounds()
    starts = cumulative(lengths)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    types = positions >= np.repeat(rows.first, lengths)
    masked_at = masked_ids = np.zeros(0, np.int64)
    if rows.masked_positions is not None and rows.masked_ids is not None:
        in_row = np.diff(begins["masked_ids"])
        masked_at = rows.masked_positions + np.repeat(begins["ids"][:-1], in_row)
        masked_ids = rows.masked_ids
    per_token, places = (rows.ids, types, positions), np.arange(len(lengths))
    if capacity:
        at = _places_in_rows(begins["ids"], capacity)
        per_token = tuple(_spread(x, at, len(rows) * capacity) for x in per_token)
        lengths, places = _with_tails(lengths, rows.offsets, begins["ids"], capacity)
        masked_at = at[masked_at]
    packed = Packed(
        *(_tensor(x) for x in per_token),
        cu_seqlens=torch.from_numpy(cumulative(lengths).astype(np.int32)),
        max_seqlen=int(lengths.max()),
        places=tuple(places.tolist()),
        capacity=capacity,
    )
    labels = _tensor(rows.random_next)
    counts = len(rows.lengths), len(rows.ids)
    return Batch(packed, _tensor(masked_at), _tensor(masked_ids), labels, *counts, cursor)


def _places_in_rows(bounds: np.ndarray, capacity: int) -> np.ndarray:
    """[T] where each token goes if every row takes `capacity` places."""
    shifts = capacity * np.arange(len(bounds) - 1) - bounds[:-1]
    return np.arange(bounds[-1]) + np.repeat(shifts, np.diff(bounds))


def _spread(values: np.ndarray, at: np.ndarray, size: int) -> np.ndarray:
    spread = np.zeros(size, np.int64)
    spread[at] = values
    return spread


def _with_tails(
    lengths: np.ndarray, offsets: np.ndarray, bounds: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """The lengths with each row's unused tail as a sequence, and where the real ones then stand."""
    tails = capacity - np.diff(bounds)
    open_rows = np.flatnonzero(tails)
    every = np.insert(lengths, offsets[open_rows + 1], tails[open_rows])
    before = np.cumsum(tails > 0) - (tails > 0)
    return every, np.arange(len(lengths)) + np.repeat(before, np.diff(offsets))


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))


def _ahead(batches: Iterator[Batch], number: int) -> Iterator[Batch]:
    """The same batches, so many of them made ahead by a thread, which ends with the iteration."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="packhorse-loader")
    try:
        waiting = deque(pool.submit(next, batches, None) for _ in range(number))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, batches, None))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
