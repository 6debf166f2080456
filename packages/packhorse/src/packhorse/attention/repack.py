"""Attention over sequences that are padded to the longest of the batch, and flat again afterwards.

The linear layers still see only real tokens; attention alone is padded, to `[S, max_seqlen]`.
`bucketed` divides the sequences into groups of similar lengths, each padded to its own longest;
here all are one group, which is simple, has a fixed shape and is the baseline that `bucketed` has
to beat. PopRT has the same as its unpack/repack mode.
"""

from __future__ import annotations

from torch import Tensor

from packhorse.attention.bucketed import GroupedPlan, attend_groups, plan_one_group
from packhorse.attention.disentangled import PositionTerms
from packhorse.attention.kernels import KernelSupport
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.packing.batch import Packed


class Repack:
    """All sequences in one padded group."""

    serves = KernelSupport(windows=True, biases=True, causal=True, disentangled=True)

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> GroupedPlan:
        """Put every sequence into one group."""
        return plan_one_group(packed.cu_seqlens, dropout, scope)

    def __call__(
        self, qkv: Tensor, plan: GroupedPlan, positions: PositionTerms | None = None
    ) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        return attend_groups(q, k, v, plan, positions)
