"""Packhorse's own CUDA kernels in half precision, written in Triton (see `triton_kernels`).

Faster than torch's FlashAttention-2 at BERT's lengths, above all in the backward pass, and
bitwise reproducible. Triton comes with torch for CUDA on Linux; without it, `varlen` serves.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.attention.kernels import KernelSupport, check_scope
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.device import triton_obstacle
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """Boundaries on the device, the longest length, and the order in which sequences start."""

    cu_seqlens: Tensor  # [S+1] int32
    order: Tensor  # [S] int64, longest sequence first
    max_seqlen: int
    dropout: float = 0.0


class Fused:
    """One Triton program per block, head and sequence."""

    serves = KernelSupport(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_sizes=range(32, 129, 32),  # for which block sizes were measured
        compiles=True,
        compiles_backward=True,
        records=True,
        one_at_a_time=True,
        obstacle=triton_obstacle,
    )

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> FusedPlan:
        """Sort the sequences by length, on the device."""
        check_scope("fused", scope, self.serves)
        order = packed.lengths.argsort(descending=True)
        return FusedPlan(packed.cu_seqlens, order, packed.max_seqlen, dropout)

    def __call__(self, qkv: Tensor, plan: FusedPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        from packhorse.attention.triton_kernels import Attend, attend

        seed = None
        if plan.dropout:
            # Drawn on the device, so that a CUDA graph draws anew at every replay.
            seed = torch.randint(1 << 62, (1,), device=qkv.device)
        # torch.compile needs a registered operator; elsewhere an autograd function takes less host
        # time. Both also return the softmax's denominators, which only the backward pass needs.
        run = attend if torch.compiler.is_compiling() else Attend.apply
        return run(qkv, plan.cu_seqlens, plan.order, plan.max_seqlen, seed, plan.dropout)[0]
