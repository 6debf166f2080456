"""Rows of `capacity` tokens under a block-diagonal mask: PopRT's attention-mask mode.

Every row attends within itself and the mask keeps its sequences apart, so scores are computed
across neighbours and thrown away: simple and of fixed shape, at the price of `capacity` scores a
token. Thrown away is not enough for numbers that are not finite (0 × NaN is NaN), so they are
contained: a sequence that holds a key, query or value which is not finite, or so large that a
product could overflow, answers NaN as a whole, and its neighbours are computed as if it were zero.

Shapes: T tokens, R rows, C capacity, S sequences, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention import Support
from packhorse.attention.reach import FULL, Reach
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Which sequence each token belongs to, and which pairs of a row may meet."""

    owner: Tensor  # [T] sequence number
    sequences: int
    allowed: Tensor  # [R, 1 or H, C, C]: pairs to see, or numbers to add, minus infinity if not
    dropout: float = 0.0


class Mask:
    """Block-diagonal mask over rows."""

    serves = Support(
        rows=True, compiles=True, compiles_backward=True, records=True, windows=True, biases=True
    )

    def plan(self, packed: Packed, dropout: float = 0.0, reach: Reach = FULL) -> MaskPlan:
        """Compare the sequence numbers of each row's tokens."""
        if not packed.capacity:
            raise KernelError("kernel 'mask' needs a batch laid in rows; build it with Packed.rows")
        numbers = torch.arange(len(packed), device=packed.ids.device)
        owner = numbers.repeat_interleave(packed.lengths.long(), output_size=len(packed.ids))
        rows = owner.unflatten(0, (-1, packed.capacity))
        allowed = (rows[:, :, None] == rows[:, None, :]).unsqueeze(1)
        # Within a sequence tokens are as far apart as they are in their row.
        near, added = reach.near(packed.capacity, owner.device), reach.added(packed.capacity)
        if near is not None:
            allowed = allowed & near
        if added is not None:
            allowed = torch.where(allowed, added, float("-inf"))
        return MaskPlan(owner, len(packed), allowed, dropout)

    def __call__(self, qkv: Tensor, plan: MaskPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        poisoned = _poisoned(q, k, v, plan)  # [T, 1, 1]
        q, k, v = (_rows(x.masked_fill(poisoned, 0), plan) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, plan.allowed, plan.dropout)  # [R, H, C, D]
        return out.transpose(1, 2).flatten(0, 1).masked_fill(poisoned, float("nan"))


def _poisoned(q: Tensor, k: Tensor, v: Tensor, plan: MaskPlan) -> Tensor:
    """Tokens of sequences that hold a number too large to square, or none at all.

    Where every sum of squares is finite, so is every product of a query with a key (Cauchy and
    Schwarz), and the mask has only finite scores to hide.
    """
    squares = sum(x.detach().float().square().sum((1, 2)) for x in (q, k, v))
    bad = (~torch.isfinite(torch.as_tensor(squares))).to(torch.int32)
    held = torch.zeros(plan.sequences, dtype=torch.int32, device=q.device)
    return (held.index_add(0, plan.owner, bad) > 0)[plan.owner][:, None, None]


def _rows(x: Tensor, plan: MaskPlan) -> Tensor:
    return x.unflatten(0, (len(plan.allowed), -1)).transpose(1, 2)  # [R, H, C, D]
