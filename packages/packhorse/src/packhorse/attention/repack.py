"""Unpack to `[S, max_seqlen]`, attend, repack: what PopRT calls its unpack/repack mode.

The linear layers still see real tokens only; attention alone pays for padding, up to the longest
sequence of the batch. One group instead of several: simple, of fixed shape, and the comparison that
`bucketed` has to win.
"""

from __future__ import annotations

from torch import Tensor

from packhorse.attention import Support
from packhorse.attention.bucketed import GroupedPlan, attend_groups, plan_one_group
from packhorse.attention.reach import FULL, Reach
from packhorse.packing.batch import Packed


class Repack:
    """All sequences in one padded group."""

    serves = Support(windows=True, biases=True)

    def plan(self, packed: Packed, dropout: float = 0.0, reach: Reach = FULL) -> GroupedPlan:
        """One group of every sequence."""
        return plan_one_group(packed.cu_seqlens, dropout, reach)

    def __call__(self, qkv: Tensor, plan: GroupedPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        return attend_groups(q, k, v, plan)
