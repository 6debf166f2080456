"""Attention over rows of `capacity` tokens with a block-diagonal mask.

Every row attends within itself and the mask separates its sequences, so scores across sequences are
computed and thrown away: simple and of fixed shape, at the cost of `capacity` scores per token.
PopRT has the same as its attention-mask mode.
Masking alone does not contain values that are not finite (0 × NaN is NaN). Therefore a sequence
with a query, key or value that is not finite, or so large that a product could overflow, gets NaN
as its whole output, and its neighbors are computed as if it were zero.

Shapes: T tokens, R rows, C capacity, S sequences, H heads, D head width.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention.kernels import KernelSupport, check_scope
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Which sequence each token belongs to, and which pairs within a row see each other."""

    owner: Tensor  # [T] sequence number
    sequences: int
    mask: Tensor  # [R, 1 or H, C, C]: bool (visible), or float (added; -inf: not visible)
    dropout: float = 0.0


class Mask:
    """Block-diagonal mask over rows."""

    serves = KernelSupport(
        rows=True,
        compiles=True,
        compiles_backward=True,
        records=True,
        windows=True,
        biases=True,
        causal=True,
    )

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> MaskPlan:
        """Compare the sequence numbers of the tokens in each row."""
        check_scope("mask", scope, self.serves)
        if not packed.capacity:
            raise KernelError("kernel 'mask' needs a batch in rows; build it with Packed.rows")
        numbers = torch.arange(len(packed), device=packed.ids.device)
        owner = numbers.repeat_interleave(packed.lengths.long(), output_size=len(packed.ids))
        rows: Tensor = owner.unflatten(0, (-1, packed.capacity))  # [R, C]
        mask = (rows[:, :, None] == rows[:, None, :]).unsqueeze(1)  # [R, 1, C, C]
        # Two tokens of a sequence are as far apart in the row as in the sequence, so the matrices
        # for a sequence of length C hold for every sequence of the row.
        visible = scope.visible(packed.capacity, owner.device)
        bias = scope.bias_matrix(packed.capacity)
        if visible is not None:
            mask = mask & visible
        if bias is not None:
            mask = torch.where(mask, bias, float("-inf"))
        return MaskPlan(owner, len(packed), mask, dropout)

    def __call__(self, qkv: Tensor, plan: MaskPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        poisoned = _poisoned(q, k, v, plan)  # [T, 1, 1]
        q, k, v = (_to_rows(x.masked_fill(poisoned, 0), plan) for x in (q, k, v))
        mask = plan.mask.to(q.dtype) if plan.mask.is_floating_point() else plan.mask
        out = scaled_dot_product_attention(q, k, v, mask, plan.dropout)  # [R, H, C, D]
        return out.transpose(1, 2).flatten(0, 1).masked_fill(poisoned, float("nan"))


def _poisoned(q: Tensor, k: Tensor, v: Tensor, plan: MaskPlan) -> Tensor:
    """[T, 1, 1] tokens of sequences with a value that is not finite or too large to square.

    If every sum of squares is finite, so is every product of a query with a key (Cauchy-Schwarz),
    and the mask has only finite scores to hide.
    """
    squares = sum(x.detach().float().square().sum((1, 2)) for x in (q, k, v))
    bad_tokens = (~torch.isfinite(torch.as_tensor(squares))).to(torch.int32)
    counts = torch.zeros(plan.sequences, dtype=torch.int32, device=q.device)
    return (counts.index_add(0, plan.owner, bad_tokens) > 0)[plan.owner][:, None, None]


def _to_rows(x: Tensor, plan: MaskPlan) -> Tensor:
    rows: Tensor = x.unflatten(0, (len(plan.mask), -1))
    return rows.transpose(1, 2)  # [R, H, C, D]
