"""A request between its two ends: tokenized and not yet run, run and not yet read.

A `Job` is one text made ready for a task: the sequences to run (several where a context is read in
windows, or a query is held against documents), the heads to run over them, and how their numbers
become the answer. A `Batch` is what was handed to the device for some sequences. The encoder makes
and reads them in one go; the runner does other things in between. Both keep to the same code, so
what is asked one by one gets the same answer as what is asked all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.tokens import Encoding, Text

Given = Text | Encoding | Sequence[int] | np.ndarray  # a text, a pair, or token ids as they are
Row = tuple[np.ndarray, ...]  # what each head says of one sequence

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# The other heads answer once a sequence.
PER_TOKEN = ("hidden", "span", "tokens", "mlm", "replaced")


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to run."""

    sequences: tuple[Encoding, ...]
    heads: tuple[str, ...]
    finish: Callable[[Sequence[Row]], Any]  # the rows of all its sequences to the answer
    only: int | None = None  # heads of tokens see and answer for the tokens of this id alone

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was handed to the device, and the tensors that will hold its results."""

    packed: Packed
    heads: tuple[str, ...]
    found: Sequence[Tensor]
    at: Tensor | None
    arrived: torch.cuda.Event | None = None  # when the results are on the host

    def sent(self) -> Batch:
        """The same batch, its results on their way to the host behind the work that makes them.

        A copy that is asked for only when it is needed waits for the batch handed over meanwhile.
        """
        if not all(found.is_cuda for found in self.found):
            return self
        host = [found.float().to("cpu", non_blocking=True) for found in self.found]
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
        return replace(self, found=host, arrived=arrived)

    def land(self) -> Batch:
        """Wait until the device is done; the same batch with its results on the host."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return replace(self, found=[found.float().cpu() for found in self.found])

    def finite(self) -> bool:
        """Is every result a number?"""
        # numpy: torch would wake all its threads for it.
        return all(bool(np.isfinite(found.numpy()).all()) for found in self.found)

    def rows(self) -> Iterator[Row]:
        """Wait, and give each of the caller's sequences its array of every head."""
        return zip(*map(self._column, self.heads, self.land().found), strict=True)

    def _column(self, head: str, host: Tensor) -> list[np.ndarray]:
        if head in PER_TOKEN:
            return [piece.numpy().copy() for piece in self.packed.split(host, self.at)]
        return list(self.packed.pick(host).numpy())


def is_ids(text: Given) -> bool:
    """Token ids, rather than a text to be tokenized?"""
    if isinstance(text, Encoding | np.ndarray):
        return True
    return isinstance(text, list | tuple) and isinstance(text[:1] and text[0], int | np.integer)


def from_ids(ids: Given, limit: int, vocabulary: int) -> Encoding:
    """A sequence of token ids as they are, special tokens included; refused where it cannot run."""
    found = ids.ids if isinstance(ids, Encoding) else np.asarray(ids)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InputError(f"token ids must be a flat list of integers, not {ids!r:.80}")
    if not 1 <= len(found) <= limit:
        raise InputError(f"{len(found)} token ids were given; the model takes 1 to {limit}")
    # Seen as unsigned, what is negative is too large as well: one pass instead of two.
    if found.view(UNSIGNED[found.itemsize]).max() >= vocabulary:
        least, most = found.min(), found.max()
        raise InputError(f"token ids go from 0 to {vocabulary - 1}; found {least} to {most}")
    return ids if isinstance(ids, Encoding) else Encoding(found.astype(np.int32), *_plain(len(ids)))


@lru_cache(maxsize=1024)
def _plain(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[slice, ...]]:
    """Types, offsets, specials and spans of `n` tokens of which nothing is known; shared."""
    shared = np.zeros(n, np.uint8), np.zeros((n, 2), np.int32), np.zeros(n, bool)
    for array in shared:
        array.flags.writeable = False
    return *shared, (slice(0, n),)
