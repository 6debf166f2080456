"""The kernel every other one is tested against: one scaled-dot-product call a sequence.

Isolation is plain to see: no call is ever given two sequences. Runs wherever torch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention import Support
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of every sequence, on the host."""

    lengths: list[int]
    dropout: float = 0.0


class Reference:
    """One call a sequence."""

    serves = Support()

    def plan(self, packed: Packed, dropout: float = 0.0) -> Lengths:
        """The lengths, on the host."""
        return Lengths(packed.lengths.tolist(), dropout)

    def __call__(self, qkv: Tensor, plan: Lengths) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        pieces = zip(*(x.split(plan.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([_attend(*each, dropout=plan.dropout) for each in pieces])


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, L, D]
    out = scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    return out.squeeze(0).transpose(0, 1)
