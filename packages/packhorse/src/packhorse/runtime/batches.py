"""Batches: which sequences run together, how they are laid out, and a batch on the device.

Offline all sequences are known. `by_tokens` fills batches up to a budget of tokens, so one long
text never makes a batch of many short ones expensive, and memory use does not depend on the input.
Sequences are taken by length: packing does not need that, but kernels that work on groups of
similar length run faster.

Online a batch has a `PackedShape` of `rows` × `capacity` tokens, in one of three modes. *ragged* is
our own: at most rows × capacity tokens, sequences end to end, nothing padded. *mask* and *repack*
are the two modes of PopRT: a batch always has rows × capacity tokens, so every linear layer pays
for the empty ones. In *mask* a sequence stays within one row and each row's unused tail is a dummy
sequence; the attention kernel of that name masks neighbors. In *repack* sequences may cross rows,
so only the end of the batch is empty; its kernel unpacks for attention alone. Results are the same
in all three.

    shape = PackedShape("mask", rows=16, capacity=256, policy="next_fit")
    for indices, packs in shape.cut(lengths): ...     # offline, in the order of the lengths

Shapes: T tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from packhorse import executable
from packhorse.errors import InputError
from packhorse.packing.batch import Packed, TokenSequence
from packhorse.packing.online import OnlinePacker
from packhorse.runtime.tasks import Row

MODES = ("ragged", "mask", "repack")
SPIN_TOKENS = 1024  # a batch of so many is back from an accelerator within a millisecond
# Heads with one output per token; all others have one per sequence.
PER_TOKEN = ("hidden", "span", "tokens", "mlm", "replaced", "lexical", "multi")


def by_tokens(
    lengths: Sequence[int] | np.ndarray, budget: int, most: int = 0, *, by_length: bool = True
) -> Iterator[np.ndarray]:
    """Yield the indices of each batch; a sequence longer than the budget is a batch by itself.

    most: sequences in a batch; 0: any number. Without `by_length` batches are cut in the order of
    the sequences.
    """
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(lengths, kind="stable") if by_length else np.arange(len(lengths))
    ends = np.cumsum(lengths[order])
    begin = 0
    while begin < len(order):
        used = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, used + budget, side="right")))
        if most:
            end = min(end, begin + most)
        yield order[begin:end]
        begin = end


def lay(sequences: Sequence[TokenSequence], capacity: int) -> Packed:
    """Lay out one flat batch or, for kernels that need rows, rows of `capacity` tokens."""
    if not capacity:
        return Packed.build(sequences)
    packer = OnlinePacker(capacity, rows=None, policy="first_fit")
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids))
    for index in order:
        packer.add(len(sequences[index].ids))
    packs = [[order[arrival] for arrival in row] for row in packer.flush()]
    return Packed.rows(sequences, packs, capacity)


@dataclass(frozen=True, slots=True)
class PackedShape:
    """How much fits into an online batch, and how it is laid out."""

    mode: str
    rows: int
    capacity: int
    max_sequences: int | None = None
    policy: str = "first_fit"  # chooses the row in mode "mask"; the other modes have one row

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"unknown mode {self.mode!r}; use one of {', '.join(MODES)}")
        # The packer checks the other fields, in every mode.
        OnlinePacker(self.capacity, self.rows, self.max_sequences, policy=self.policy)

    @property
    def tokens(self) -> int:
        """The tokens that fit into a batch."""
        return self.rows * self.capacity

    def packer(self) -> OnlinePacker:
        """Return a packer that fills one batch after another."""
        if self.mode == "mask":
            return OnlinePacker(self.capacity, self.rows, self.max_sequences, policy=self.policy)
        return OnlinePacker(self.tokens, 1, self.max_sequences)

    def cut(self, lengths: Sequence[int]) -> Iterator[tuple[range, list[list[int]]]]:
        """Cut sequences into batches without reordering; yield the indices and packs of each."""
        packer = self.packer()
        begin = 0
        for end, length in enumerate(lengths):
            if packer.add(length) is None:
                yield range(begin, end), packer.flush()
                begin = end
                packer.add(length)
        if len(packer):
            yield range(begin, len(lengths)), packer.flush()

    def sizes(self) -> list[int]:
        """Return the sizes in tokens that are compiled separately: every bucket if ragged."""
        if self.mode != "ragged":
            return [self.tokens]
        return [min(size, self.tokens) for size in executable.sizes(self.tokens)]

    def lay(self, sequences: Sequence[TokenSequence], packs: Sequence[Sequence[int]]) -> Packed:
        """Lay out a batch; `packs` says which of the sequences share a row."""
        if self.mode == "mask":
            empty: list[Sequence[int]] = [[] for _ in range(self.rows - len(packs))]
            return Packed.rows(sequences, [*packs, *empty], self.capacity)
        # As if the longest possible sequence were there: batches that differ only in their longest
        # sequence share a bucket.
        packed = Packed.build(sequences, max_seqlen=self.capacity)
        if self.mode == "ragged":
            return packed
        spare = self.tokens - len(packed.ids)
        return packed.pad(self.tokens, len(packed) + -(-spare // packed.max_seqlen))


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch that was handed to the device, with the tensors that will hold its results."""

    packed: Packed
    heads: tuple[str, ...]
    outputs: Sequence[Tensor]  # one per head, [T, …] or [S, …]
    token_indices: Tensor | None  # the tokens that per-token heads ran on; None: all
    copied: torch.cuda.Event | None = None  # recorded when the results are on the host
    # Until `wait`, where groups of cores run parts of the batch: the outputs of each part.
    parts: Sequence[Future[Sequence[Tensor]]] = ()

    @property
    def is_back(self) -> bool:
        """Whether the results are on the host for certain."""
        return self.copied is None and not self.parts

    def copy_to_host(self) -> LaunchedBatch:
        """Queue the copy of the results to the host right behind the work that computes them.

        A copy that is queued only when the results are read would wait for the batch that was
        launched in the meantime.
        """
        if not all(output.is_cuda for output in self.outputs):
            return self
        host = [output.float().to("cpu", non_blocking=True) for output in self.outputs]
        # Blocking: the thread that waits sleeps instead of spinning on a core. To wake it takes a
        # tenth of a millisecond, which a small batch does not have.
        copied = torch.cuda.Event(blocking=len(self.packed.ids) > SPIN_TOKENS)
        # On the stream of the copies, which need not be on the current device.
        copied.record(torch.cuda.current_stream(self.outputs[0].device))
        return replace(self, outputs=host, copied=copied)

    def wait(self) -> LaunchedBatch:
        """Wait for the device; return the same batch with its results on the host in fp32."""
        if self.parts:
            columns = zip(*(part.result() for part in self.parts), strict=True)
            outputs = [torch.cat(column) for column in columns]
            return replace(self, outputs=outputs, parts=()).wait()
        if self.copied is not None:
            self.copied.synchronize()
        host = [output.float().cpu() for output in self.outputs]
        if all(here is there for here, there in zip(host, self.outputs, strict=True)):
            return self
        return replace(self, outputs=host)

    def finite(self) -> bool:
        """Return whether all results, which must be on the host, are finite."""
        # numpy, because torch would wake all its threads for this.
        return all(bool(np.isfinite(output.numpy()).all()) for output in self.outputs)

    def rows(self) -> Iterator[Row]:
        """Wait for the device; yield one row per sequence, in the order they were passed."""
        return zip(*map(self._column, self.heads, self.wait().outputs), strict=True)

    def _column(self, head: str, host: Tensor) -> list[np.ndarray]:
        if head in PER_TOKEN:
            return [part.numpy().copy() for part in self.packed.split(host, self.token_indices)]
        return list(self.packed.pick(host).numpy())
