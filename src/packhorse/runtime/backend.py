"""The torch model as a backend: `backend(packed, heads) -> tensors`, on its device, in its dtype.

On a CPU linear layers are frozen (prepared once for inference). With `graphs` a batch is padded to
a bucket and the encoder compiled for it, and on CUDA recorded as a graph: a bucket is prepared once
and then costs one launch. Heads run outside, on the batch's own tokens: they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from packhorse import executable
from packhorse.model.freeze import can_freeze, freeze
from packhorse.model.model import Model
from packhorse.packing.batch import Packed


class TorchBackend:
    """Runs a model in inference mode; frozen, or compiled per bucket."""

    def __init__(self, model: Model, device: torch.device, graphs: bool = False) -> None:
        dtype = next(model.parameters()).dtype
        self.model = model.eval().to(device)
        self.device = device
        self._hidden = self._compiled() if graphs else None
        if device.type == "cpu" and not graphs and can_freeze(dtype):
            freeze(self.model)

    @torch.inference_mode()
    def __call__(
        self, packed: Packed, heads: Sequence[str], at: Tensor | None = None
    ) -> list[Tensor]:
        """What each head makes of the batch; `at` narrows heads of tokens to these tokens."""
        packed = packed.to(self.device)
        hidden = _in_bucket(self._hidden, packed) if self._hidden else self.model.bert(packed)
        return self.model.apply_heads(hidden, packed, heads, at)

    def _compiled(self) -> Callable[..., Tensor]:
        """The encoder over bare tensors: a graph's inputs, and nothing else to guard."""

        def hidden(
            ids: Tensor,
            types: Tensor,
            positions: Tensor,
            cu_seqlens: Tensor,
            *,
            max_seqlen: int,
            capacity: int,
        ) -> Tensor:
            return self.model.bert(
                Packed(ids, types, positions, cu_seqlens, max_seqlen, (), capacity)
            )

        compiled = executable.compile(hidden, self.device)
        return executable.CudaGraphs(compiled) if self.device.type == "cuda" else compiled


def _in_bucket(compiled: Callable[..., Tensor], packed: Packed) -> Tensor:
    bucket = _bucket(packed)
    hidden = compiled(
        bucket.ids,
        bucket.types,
        bucket.positions,
        bucket.cu_seqlens,
        max_seqlen=bucket.max_seqlen,
        capacity=bucket.capacity,
    )
    return hidden[: len(packed.ids)]  # padding is a tail


def _bucket(packed: Packed) -> Packed:
    """The smallest bucket that holds the batch; rows are a bucket already."""
    if packed.capacity:
        return packed
    tokens = executable.round_up(len(packed.ids))
    dummies = -(-(tokens - len(packed.ids)) // packed.max_seqlen)
    sequences = 1 << (len(packed) + dummies - 1).bit_length()
    longest = 1 << (packed.max_seqlen - 1).bit_length()
    return replace(packed.pad(tokens, sequences), max_seqlen=longest)
