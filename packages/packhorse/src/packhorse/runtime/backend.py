"""The torch model as a backend: `backend(packed, heads) -> tensors`, on its device, in its dtype.

On a CPU linear layers are frozen (prepared once for inference). With `graphs` a batch is padded to
a bucket and the layers compiled for it (one layer's compilation serves them all), and on CUDA the
encoder is recorded as a graph: a bucket is prepared once and then costs one launch. Heads run
outside, on the batch's own tokens: they are small. With `fixed` tokens, shapes are those of
`invariant`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from packhorse import executable
from packhorse.errors import KernelError
from packhorse.model.freeze import can_freeze, freeze, widen
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.runtime.invariant import FixedShapes

SMALLEST_RECORDED = 1024  # tokens; below, a launch costs as much as the work
USUAL_LENGTH = 64  # of a bucket's sequences, at least: so that most batches of a size share one


class TorchBackend:
    """Runs a model in inference mode; frozen, or compiled per bucket, or in fixed shapes."""

    def __init__(
        self, model: Model, device: torch.device, graphs: bool = False, fixed: int = 0
    ) -> None:
        self.model = model.eval().to(device)
        self.device = device
        self.graphs = graphs
        serves = model.bert.kernel.serves
        if graphs and not serves.compiles:
            name = type(model.bert.kernel).__name__.lower()
            raise KernelError(f"kernel {name!r} plans anew for each batch and cannot be compiled")
        recorded = graphs and serves.records and device.type == "cuda"
        self._recorded = executable.CudaGraphs(self._hidden) if recorded else None
        self.smallest = SMALLEST_RECORDED if recorded else 64
        if device.type == "cpu":
            prepare = freeze if can_freeze(next(model.parameters()).dtype) and not graphs else widen
            prepare(self.model)
        if graphs:
            executable.compile(model.bert.layers)
        self.fixed = FixedShapes(self.model, device, fixed) if fixed else None

    @torch.inference_mode()
    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """What each head makes of the batch; `at` narrows heads of tokens to these tokens."""
        if self.fixed is not None:
            return self.fixed(packed, heads, at)
        if self.graphs:
            bucket = _bucket(packed, self.smallest).to(self.device)
            hidden = self._in_bucket(bucket)[: len(packed.ids)]  # padding is a tail
            here = _unpadded(bucket, packed)
        else:
            here = packed.to(self.device)
            hidden = self.model.bert(here)
        return self.model.apply_heads(hidden, here, heads, at)

    def computed(self, packed: Packed) -> int:
        """The tokens that a batch costs, those that fill up its bucket included."""
        if self.fixed is not None:
            return self.fixed.computed(packed)
        tokens = len(packed.ids)
        filled = self.graphs and not packed.capacity
        return executable.round_up(tokens, self.smallest) if filled else tokens

    def _in_bucket(self, bucket: Packed) -> Tensor:
        executable.allow_every_bucket()
        tensors = bucket.ids, bucket.types, bucket.positions, bucket.cu_seqlens
        constants = {"max_seqlen": bucket.max_seqlen, "capacity": bucket.capacity}
        return (self._recorded or self._hidden)(*tensors, **constants)

    def _hidden(
        self,
        ids: Tensor,
        types: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        capacity: int,
    ) -> Tensor:
        """The encoder over bare tensors, as a recorded graph takes them."""
        packed = Packed(ids, types, positions, cu_seqlens, max_seqlen, (), capacity)
        return self.model.bert(packed)


def _bucket(packed: Packed, smallest: int) -> Packed:
    """The smallest bucket that holds the batch; rows are a bucket already."""
    if packed.capacity:
        return _same_slots(packed)
    tokens = executable.round_up(len(packed.ids), smallest)
    dummies = -(-(tokens - len(packed.ids)) // packed.max_seqlen)
    needed = max(len(packed) + dummies, tokens // USUAL_LENGTH)
    longest = 1 << (packed.max_seqlen - 1).bit_length()
    return replace(packed.pad(tokens, 1 << (needed - 1).bit_length()), max_seqlen=longest)


def _unpadded(bucket: Packed, packed: Packed) -> Packed:
    """The batch itself, as part of its bucket."""
    tokens, prompts = len(packed.ids), bucket.prompt_lengths
    return replace(
        packed,
        ids=bucket.ids[:tokens],
        types=bucket.types[:tokens],
        positions=bucket.positions[:tokens],
        cu_seqlens=bucket.cu_seqlens[: len(packed.cu_seqlens)],
        prompt_lengths=None if prompts is None else prompts[: len(packed)],
    )


def _same_slots(packed: Packed) -> Packed:
    """Rows have their tokens already; empty sequences at the end make one number of slots."""
    rows = len(packed.ids) // packed.capacity
    slots = max(4 * rows, 1 << (len(packed) - 1).bit_length())
    spare = packed.cu_seqlens[-1:].expand(slots - len(packed))
    bounds = torch.cat([packed.cu_seqlens, spare])
    return replace(packed, cu_seqlens=bounds, max_seqlen=packed.capacity)
