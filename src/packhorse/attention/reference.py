"""The kernel every other one is tested against: one scaled-dot-product call a sequence.

Isolation is plain to see: no call is ever given two sequences. Runs wherever torch does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention import Support
from packhorse.packing.batch import Packed


class Reference:
    """One call a sequence."""

    serves = Support()

    def plan(self, packed: Packed) -> list[int]:
        """The lengths, on the host."""
        return packed.lengths.tolist()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: list[int]) -> Tensor:
        """[T, H, D] each."""
        pieces = zip(*(x.split(plan) for x in (q, k, v)), strict=True)
        return torch.cat([_attend(*piece) for piece in pieces])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, L, D]
    return scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)
