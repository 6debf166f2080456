"""FlashAttention over ragged sequences, through torch's own `varlen_attn`.

The fastest there is on CUDA in half precision: no padding, no mask, nothing planned on the host.
The function's keywords changed between torch 2.10 and 2.13; its first seven arguments did not, and
they are all that full attention needs, so this file is the only place that knows it. A window is a
keyword that is there from torch 2.11 on; scores by distance it has none for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.attention import NO_DROPOUT, Support, refuse
from packhorse.attention.reach import FULL, Reach
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed


def _obstacle(device: torch.device) -> str | None:
    try:
        from torch.nn.attention import varlen  # noqa: F401  (is it there at all?)
    except ImportError:
        return f"torch {torch.__version__} has no varlen attention"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere (capability 8.0)"
    return None


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Boundaries on the device, and the longest sequence."""

    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int
    window: int | None = None


class Varlen:
    """One fused call for the whole batch."""

    serves = Support(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_sizes=range(8, 257, 8),
        compiles=True,
        compiles_backward=True,
        records=True,
        dropout=False,
        windows=True,
        obstacle=_obstacle,
    )

    def plan(self, packed: Packed, dropout: float = 0.0, reach: Reach = FULL) -> VarlenPlan:
        """The batch's own boundaries."""
        refuse("varlen", reach, self.serves)
        if dropout:
            raise KernelError(f"kernel 'varlen': {NO_DROPOUT}; use 'bucketed', or a rate of 0")
        return VarlenPlan(packed.cu_seqlens, packed.max_seqlen, reach.window)

    def __call__(self, qkv: Tensor, plan: VarlenPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        from torch.nn.attention.varlen import varlen_attn

        bounds, longest = plan.cu_seqlens, plan.max_seqlen
        given = q, k, v, bounds, bounds, longest, longest
        if plan.window is None:
            out = varlen_attn(*given)
        else:
            out = varlen_attn(*given, window_size=(plan.window, plan.window))
        return out if isinstance(out, Tensor) else out[0]
