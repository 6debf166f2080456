"""The kernel that every other one is tested against: one scaled-dot-product call per sequence.

Isolation is obvious, because no call ever gets two sequences. Runs wherever torch does.

Shapes: H heads, L tokens of a sequence, D head width.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention.disentangled import PositionTerms, position_scores
from packhorse.attention.kernels import KernelSupport
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The length of every sequence, on the host, and the mask for each length."""

    lengths: list[int]
    masks: dict[int, Tensor | None]  # by length, [1 or H, L, L]: bool (visible) or float (added)
    dropout: float = 0.0
    rows: dict[int, Tensor | None] = field(default_factory=dict[int, "Tensor | None"])  # by length


class Reference:
    """One call per sequence."""

    serves = KernelSupport(
        one_at_a_time=True, windows=True, biases=True, causal=True, disentangled=True
    )

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> ReferencePlan:
        """Copy the lengths to the host and build one mask per length."""
        lengths: list[int] = packed.lengths.tolist()
        masks = {length: _mask(scope, length, packed.ids.device) for length in set(lengths)}
        rows = {length: scope.position_rows(length) for length in set(lengths) if length}
        return ReferencePlan(lengths, masks, dropout, rows)

    def __call__(
        self, qkv: Tensor, plan: ReferencePlan, positions: PositionTerms | None = None
    ) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = (x.split(plan.lengths) for x in qkv.unbind(1))  # per sequence [L, H, D]
        outputs = [
            _attend(*sequence, length=length, plan=plan, positions=positions)
            for length, *sequence in zip(plan.lengths, q, k, v, strict=True)
        ]
        return torch.cat(outputs)


def _mask(scope: AttentionScope, length: int, device: torch.device) -> Tensor | None:
    visible = scope.visible(length, device)
    bias = scope.bias_matrix(length)
    if bias is None:
        return None if visible is None else visible.unsqueeze(0)
    return bias if visible is None else bias.masked_fill(~visible, float("-inf"))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int,
    plan: ReferencePlan,
    positions: PositionTerms | None,
) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H, L, D]
    mask, scale = plan.masks[length], None
    if mask is not None:
        mask = (mask.to(q.dtype) if mask.is_floating_point() else mask).unsqueeze(0)
    rows = plan.rows.get(length)
    if positions is not None and rows is not None:
        scale = positions.scale(q.shape[-1])
        added = position_scores(q.transpose(0, 1), k.transpose(0, 1), positions, rows)
        added = added.transpose(0, 1)  # [1, H, L, L]
        if mask is not None:
            visible = mask.dtype == torch.bool
            added = added.masked_fill(~mask, float("-inf")) if visible else added + mask
        mask = added
    out = scaled_dot_product_attention(q, k, v, mask, plan.dropout, scale=scale)
    return out.squeeze(0).transpose(0, 1)
