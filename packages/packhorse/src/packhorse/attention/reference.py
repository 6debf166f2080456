"""The kernel every other one is tested against: one scaled-dot-product call a sequence.

Isolation is plain to see: no call is ever given two sequences. Runs wherever torch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention import Support
from packhorse.attention.reach import FULL, Reach
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of every sequence, on the host, and what its scores are told."""

    lengths: list[int]
    masks: dict[int, Tensor | None]  # by length, [1 or H, L, L]: numbers to add, or pairs to see
    dropout: float = 0.0


class Reference:
    """One call a sequence."""

    serves = Support(windows=True, biases=True)

    def plan(self, packed: Packed, dropout: float = 0.0, reach: Reach = FULL) -> Lengths:
        """The lengths, on the host."""
        lengths, device = packed.lengths.tolist(), packed.ids.device
        return Lengths(lengths, {n: _mask(reach, n, device) for n in set(lengths)}, dropout)

    def __call__(self, qkv: Tensor, plan: Lengths) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        pieces = zip(*(x.split(plan.lengths) for x in (q, k, v)), strict=True)
        masks = (plan.masks[n] for n in plan.lengths)
        return torch.cat(
            [
                _attend(*each, mask=mask, dropout=plan.dropout)
                for each, mask in zip(pieces, masks, strict=True)
            ]
        )


def _mask(reach: Reach, length: int, device: torch.device) -> Tensor | None:
    near, added = reach.near(length, device), reach.added(length)
    if added is None:
        return None if near is None else near.unsqueeze(0)
    return added if near is None else added.masked_fill(~near, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, L, D]
    mask = None if mask is None else mask.unsqueeze(0)
    out = scaled_dot_product_attention(q, k, v, mask, dropout)
    return out.squeeze(0).transpose(0, 1)
