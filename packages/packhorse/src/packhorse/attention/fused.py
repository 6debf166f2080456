"""Our own kernels for CUDA in half precision, by Triton: see `triton_kernels` for what they do.

Faster than FlashAttention-2 through torch at the lengths of BERT, above all on the way back, and
the same to the bit in every run. Triton comes with torch for CUDA on Linux; where it is missing,
`varlen` serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from packhorse.attention import Support, refuse
from packhorse.attention.reach import FULL, Reach
from packhorse.cache import keep_compiled_code_private
from packhorse.errors import InputError
from packhorse.packing.batch import Packed


def _obstacle(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed; it comes with torch for CUDA on Linux"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere (capability 8.0)"
    return _cache_problem()


@cache
def _cache_problem() -> str | None:
    """Why Triton has nowhere to keep what it compiles."""
    try:
        keep_compiled_code_private()
    except InputError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """Boundaries on the device, the longest sequence, and which to begin with."""

    cu_seqlens: Tensor  # [S+1] int32
    order: Tensor  # [S] int64
    max_seqlen: int
    dropout: float = 0.0


class Fused:
    """One program a head and sequence."""

    serves = Support(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_sizes=range(32, 65, 32),
        compiles=True,
        compiles_backward=True,
        records=True,
        obstacle=_obstacle,
    )

    def plan(self, packed: Packed, dropout: float = 0.0, reach: Reach = FULL) -> FusedPlan:
        """The batch's own boundaries, the longest sequences first."""
        refuse("fused", reach, self.serves)
        order = packed.lengths.argsort(descending=True)
        return FusedPlan(packed.cu_seqlens, order, packed.max_seqlen, dropout)

    def __call__(self, qkv: Tensor, plan: FusedPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        from packhorse.attention.triton_kernels import Attend, attend

        seed = None
        if plan.dropout:
            # Drawn on the device: a CUDA graph draws anew whenever it is replayed.
            seed = torch.randint(1 << 62, (1,), device=qkv.device)
        run = attend if torch.compiler.is_compiling() else Attend.apply
        return run(qkv, plan.cu_seqlens, plan.order, plan.max_seqlen, seed, plan.dropout)[0]
