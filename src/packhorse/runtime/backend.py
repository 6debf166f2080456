"""The torch model as a backend: `backend(packed, heads) -> tensors`, on its device, in its dtype.

On a CPU linear layers are frozen (prepared once for inference). With `graphs` a batch is padded to
a bucket and the layers compiled for it (one layer's compilation serves them all), and on CUDA the
encoder is recorded as a graph: a bucket is prepared once and then costs one launch. Heads run
outside, on the batch's own tokens: they are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from packhorse import executable
from packhorse.errors import KernelError
from packhorse.model.freeze import can_freeze, freeze
from packhorse.model.model import Model
from packhorse.packing.batch import Packed


class TorchBackend:
    """Runs a model in inference mode; frozen, or compiled per bucket."""

    def __init__(self, model: Model, device: torch.device, graphs: bool = False) -> None:
        self.model = model.eval().to(device)
        self.device = device
        self.graphs = graphs
        serves = model.bert.kernel.serves
        if graphs and not serves.compiles:
            name = type(model.bert.kernel).__name__.lower()
            raise KernelError(f"kernel {name!r} plans anew for each batch and cannot be compiled")
        recorded = graphs and serves.records and device.type == "cuda"
        self._recorded = executable.CudaGraphs(self._hidden) if recorded else None
        if graphs:
            executable.compile(model.bert.layers)
        elif device.type == "cpu" and can_freeze(next(model.parameters()).dtype):
            freeze(self.model)

    @torch.inference_mode()
    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """What each head makes of the batch; `at` narrows heads of tokens to these tokens."""
        here = packed.to(self.device)
        hidden = self._in_bucket(packed) if self.graphs else self.model.bert(here)
        return self.model.apply_heads(hidden, here, heads, at)

    def _in_bucket(self, packed: Packed) -> Tensor:
        executable.allow_every_bucket()
        bucket = _bucket(packed).to(self.device)
        tensors = bucket.ids, bucket.types, bucket.positions, bucket.cu_seqlens
        constants = {"max_seqlen": bucket.max_seqlen, "capacity": bucket.capacity}
        hidden = (self._recorded or self._hidden)(*tensors, **constants)
        return hidden[: len(packed.ids)]  # padding is a tail

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


def _bucket(packed: Packed) -> Packed:
    """The smallest bucket that holds the batch; rows are a bucket already."""
    if packed.capacity:
        return _same_slots(packed)
    tokens = executable.round_up(len(packed.ids))
    dummies = -(-(tokens - len(packed.ids)) // packed.max_seqlen)
    sequences = 1 << (len(packed) + dummies - 1).bit_length()
    longest = 1 << (packed.max_seqlen - 1).bit_length()
    return replace(packed.pad(tokens, sequences), max_seqlen=longest)


def _same_slots(packed: Packed) -> Packed:
    """Rows have their tokens already; empty sequences at the end make one number of slots."""
    rows = len(packed.ids) // packed.capacity
    slots = max(4 * rows, 1 << (len(packed) - 1).bit_length())
    spare = packed.cu_seqlens[-1:].expand(slots - len(packed))
    bounds = torch.cat([packed.cu_seqlens, spare])
    return replace(packed, cu_seqlens=bounds, max_seqlen=packed.capacity)
