"""The kernel that every other one is tested against: one scaled-dot-product call per sequence.

Isolation is obvious, because no call ever gets two sequences. Runs wherever torch does.

Shapes: H heads, L tokens of a sequence, D head width.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention.kernels import KernelSupport
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The length of every sequence, on the host, and the mask for each length."""

    lengths: list[int]
    masks: dict[int, Tensor | None]  # by length, [1 or H, L, L]: bool (visible) or float (added)
    dropout: float = 0.0


class Reference:
    """One call per sequence."""

    serves = KernelSupport(one_at_a_time=True, windows=True, biases=True, causal=True)

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> ReferencePlan:
        """Copy the lengths to the host and build one mask per length."""
        lengths: list[int] = packed.lengths.tolist()
        masks = {length: _mask(scope, length, packed.ids.device) for length in set(lengths)}
        return ReferencePlan(lengths, masks, dropout)

    def __call__(self, qkv: Tensor, plan: ReferencePlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = (x.split(plan.lengths) for x in qkv.unbind(1))  # per sequence [L, H, D]
        outputs = [
            _attend(*sequence, mask=plan.masks[length], dropout=plan.dropout)
            for length, *sequence in zip(plan.lengths, q, k, v, strict=True)
        ]
        return torch.cat(outputs)


def _mask(scope: AttentionScope, length: int, device: torch.device) -> Tensor | None:
    visible = scope.visible(length, device)
    bias = scope.bias_matrix(length)
    if bias is None:
        return None if visible is None else visible.unsqueeze(0)
    return bias if visible is None else bias.masked_fill(~visible, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, L, D]
    if mask is not None:
        mask = (mask.to(q.dtype) if mask.is_floating_point() else mask).unsqueeze(0)
    out = scaled_dot_product_attention(q, k, v, mask, dropout)
    return out.squeeze(0).transpose(0, 1)
