"""Batches of packed rows for pretraining: shuffled, masked, divided among ranks, resumable.

    for batch in Loader(shards.open_dataset("corpus/train"), rows=96, seed=7):
        ...                                    # batch.packed, batch.masked_at, batch.next_labels
        state["data"] = batch.cursor           # later: Loader(…, cursor=state["data"])

The epochs laid end to end make one stream of rows. A global batch is the next `rows` of it, for any
number of ranks and workers, and a cursor is a position in it. So a cursor can be used with another
number of ranks, and even with another `rows`: the stream continues where it was. The masks of a row
depend on the seed, the epoch and the row alone, never on the process that loads it or on its
neighbors. How much is masked, and whether by whole words, is stored with the dataset, unless it is
set here. Each batch carries the cursor after it, so that batches that were loaded ahead but never
used are not skipped when training resumes.

Shapes: T tokens, S sequences, R rows, M masked tokens.
"""

# torch leaves from_numpy untyped.
# pyright: reportUnknownMemberType=false

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

MADE_BY = ("dataset", "seed", "shuffle")  # must be equal for a cursor to mean the same position


@dataclass(frozen=True, slots=True)
class PretrainingBatch:
    """The input of a training step; per-sequence values are in the order of `packed.places`."""

    packed: Packed
    masked_at: Tensor  # [M] indices of the masked tokens, rising
    masked_ids: Tensor  # [M] the original tokens
    next_labels: Tensor  # [S] 1: the second segment is from another document; [0] without pairs
    sequences: int  # of the dataset; dummies do not count
    tokens: int
    cursor: dict[str, Any]  # where to continue after this batch


@dataclass(frozen=True)
class Loader:
    """Iterate to get this rank's share of each global batch, from the cursor on."""

    dataset: Dataset
    rows: int  # per global batch, all ranks together
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None  # None: without end
    drop_last: bool = False  # end each epoch with its last full batch; else the next fills it up
    # How to draw masks, anew in each epoch. None: as stored in the dataset; False: no masks.
    masking: Recipe | Literal[False] | None = None
    in_rows: bool = False  # T is rows × capacity; else only the tokens of the rows
    rank: int = 0
    world: int = 1
    parts: int = 1  # batches that a rank's share is divided into, at most, for accumulation
    worker: int = 0  # one of `workers`, which take the global batches in turn
    workers: int = 1
    balanced: bool = False  # ranks get about equal numbers of tokens, not only of rows
    prefetch: int = 2  # batches that a thread makes ahead; 0: none
    cursor: Mapping[str, Any] | None = None  # of the batch after which to continue

    def __post_init__(self) -> None:
        least = {"rows": 1, "seed": 0, "world": 1, "parts": 1, "workers": 1, "prefetch": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not smallest <= value < 1 << 63:
                raise InputError(f"{name} must be from {smallest} up to 2**63 - 1, got {value}")
        if not 0 <= self.rank < self.world:
            raise InputError(f"there is no rank {self.rank} of {self.world}; ranks count from 0")
        if not 0 <= self.worker < self.workers:
            raise InputError(
                f"there is no worker {self.worker} of {self.workers}; workers count from 0"
            )
        if self.rows < self.world:
            raise InputError(
                f"a batch of {self.rows} rows has fewer rows than there are ranks ({self.world});"
                " use more rows, or fewer ranks"
            )
        if self.masking is not None and self.dataset.manifest.layout.static_masks:
            raise InputError(f"{self.dataset.folder} has stored masks; leave out masking")
        if not self._epoch_rows:
            raise InputError(
                f"{self.dataset.folder} has {len(self.dataset)} rows, not one batch of {self.rows};"
                " use fewer rows per batch, or drop_last=False"
            )
        self._start()

    def __iter__(self) -> Iterator[PretrainingBatch]:
        return _prefetched(self._batches(), self.prefetch) if self.prefetch else self._batches()

    @property
    def _epoch_rows(self) -> int:
        rows = len(self.dataset)
        return rows // self.rows * self.rows if self.drop_last else rows

    def _batches(self) -> Iterator[PretrainingBatch]:
        first, begin = self._start()
        end = None if self.epochs is None else self.epochs * self._epoch_rows
        for number in count(first):
            until = begin + self.rows if end is None else min(begin + self.rows, end)
            if until <= begin:
                return
            if number % self.workers == self.worker:
                yield from self._share(begin, until, number)
            begin = until

    def _share(self, begin: int, until: int, number: int) -> Iterator[PretrainingBatch]:
        """This rank's share of the rows at these positions of the stream, in batches."""
        epochs, positions = np.divmod(np.arange(begin, until), self._epoch_rows)
        rows = self._ordered(epochs, positions)
        if self.balanced:
            shares = by_tokens(self.dataset.tokens(rows), self.world * self.parts)
        else:
            shares = by_count(rows, self.world * self.parts)
        rank_shares = [share for share in shares[self.rank :: self.world] if len(share)]
        # A cursor never points into a global batch: a step that was begun is done again.
        before = self._cursor(begin, number)
        after = self._cursor(until, number + 1)
        for part, share in enumerate(rank_shares, 1):
            cursor = after if part == len(rank_shares) else before
            yield self._batch(rows[share], epochs[share], cursor)

    def _ordered(self, epochs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The rows at these positions of their epochs."""
        if not self.shuffle:
            return positions
        rows = positions.copy()
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            size = len(self.dataset)
            rows[in_epoch] = permuted(positions[in_epoch], size, self.seed, epoch)
        return rows

    def _batch(
        self, numbers: np.ndarray, epochs: np.ndarray, cursor: dict[str, Any]
    ) -> PretrainingBatch:
        rows = self.dataset.take(numbers)
        manifest = self.dataset.manifest
        masking = manifest.masking if self.masking is None else self.masking
        if masking and not manifest.layout.static_masks:
            keys = mask_keys(rows, self.seed, epochs, numbers)
            ids, masks = draw_by_keys(rows.ids, rows.lengths, manifest.specials, masking, keys)
            rows = rows.masked(ids, masks)
        batch = batch_of(rows, manifest.layout.capacity if self.in_rows else 0, cursor)
        if manifest.layout.next_sentence:
            return batch
        return replace(batch, next_labels=batch.next_labels[:0])  # they have no meaning

    def _start(self) -> tuple[int, int]:
        """The number of the first batch, and its position in the stream."""
        if self.cursor is None:
            return 0, 0
        for key, now in self._cursor(0, 0).items():
            then = self.cursor.get(key)
            if type(then) is not type(now) or (isinstance(then, int) and then < 0):
                raise InputError(f"not a cursor of a loader: its {key} is {then!r:.40}")
            if key in MADE_BY and then != now:
                raise InputError(
                    f"the cursor was made with another {key} ({then!r:.40}, now {now!r:.40});"
                    " continue with the same, or begin without a cursor"
                )
        epoch = self.cursor["epoch"]
        row = min(self.cursor["row"], self._epoch_rows)
        return self.cursor["batch"], epoch * self._epoch_rows + row

    def _cursor(self, position: int, batch: int) -> dict[str, Any]:
        epoch, row = divmod(position, self._epoch_rows)
        return {
            "dataset": self.dataset.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": epoch,
            "row": row,
            "batch": batch,
        }


def mask_keys(rows: Rows, seed: int, epochs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """[S] keys for drawing masks, from the seed, the epoch, the row, and the number in the row."""
    counts = np.diff(rows.offsets)
    within = np.arange(len(rows.lengths)) - np.repeat(rows.offsets[:-1], counts)
    return keys_of(seed, np.repeat(epochs, counts), np.repeat(numbers, counts), within)


def batch_of(rows: Rows, capacity: int, cursor: dict[str, Any]) -> PretrainingBatch:
    """A batch from rows: each in a row of `capacity` tokens; with capacity 0, end to end."""
    lengths = rows.lengths.astype(np.int64)
    begins = rows.bounds()
    starts = cumulative(lengths)
    positions = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)
    types = positions >= np.repeat(rows.first, lengths)
    masked_at = masked_ids = np.zeros(0, np.int64)
    if rows.masked_positions is not None and rows.masked_ids is not None:
        in_row = np.diff(begins["masked_ids"])
        masked_at = rows.masked_positions + np.repeat(begins["ids"][:-1], in_row)
        masked_ids = rows.masked_ids
    per_token = (rows.ids, types, positions)
    places = np.arange(len(lengths))
    if capacity:
        slots = _slots_in_rows(begins["ids"], capacity)
        per_token = tuple(_spread(x, slots, len(rows) * capacity) for x in per_token)
        lengths, places = _with_tails(lengths, rows.offsets, begins["ids"], capacity)
        masked_at = slots[masked_at]
    packed = Packed(
        *(_tensor(x) for x in per_token),
        cu_seqlens=torch.from_numpy(cumulative(lengths).astype(np.int32)),
        max_seqlen=int(lengths.max()),
        places=tuple(places.tolist()),
        capacity=capacity,
    )
    return PretrainingBatch(
        packed=packed,
        masked_at=_tensor(masked_at),
        masked_ids=_tensor(masked_ids),
        next_labels=_tensor(rows.random_next),
        sequences=len(rows.lengths),
        tokens=len(rows.ids),
        cursor=cursor,
    )


def _slots_in_rows(bounds: np.ndarray, capacity: int) -> np.ndarray:
    """[T] the slot of each token if every row has `capacity` slots."""
    shifts = capacity * np.arange(len(bounds) - 1) - bounds[:-1]
    return np.arange(int(bounds[-1])) + np.repeat(shifts, np.diff(bounds))


def _spread(values: np.ndarray, slots: np.ndarray, size: int) -> np.ndarray:
    spread = np.zeros(size, np.int64)
    spread[slots] = values
    return spread


def _with_tails(
    lengths: np.ndarray, offsets: np.ndarray, bounds: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """The lengths with each row's unused tail as a sequence, and the indices of the real ones."""
    tails = capacity - np.diff(bounds)
    open_rows = np.flatnonzero(tails)
    with_tails = np.insert(lengths, offsets[open_rows + 1], tails[open_rows])
    before = np.cumsum(tails > 0) - (tails > 0)
    return with_tails, np.arange(len(lengths)) + np.repeat(before, np.diff(offsets))


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False))


def _prefetched(batches: Iterator[PretrainingBatch], number: int) -> Iterator[PretrainingBatch]:
    """The same batches, `number` of them made ahead by a thread, which ends with the iteration."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="packhorse-loader")
    try:
        waiting = deque(pool.submit(next, batches, None) for _ in range(number))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, batches, None))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
