"""FlashAttention over ragged sequences, through torch's own `varlen_attn`.

On CUDA in half precision: no padding, no mask, and nothing planned on the host. The keywords of
`varlen_attn` changed between torch 2.10 and 2.13. Its first seven arguments did not, and full
attention needs no more; only this file deals with the difference. A window is a keyword that exists
from torch 2.11 on. There is none for a relative position bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.attention.kernels import NO_DROPOUT, KernelSupport, check_scope
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed


def _obstacle(device: torch.device) -> str | None:
    try:
        from torch.nn.attention import varlen  # noqa: F401  # pyright: ignore[reportUnusedImport]  (does it exist?)
    except ImportError:
        return f"torch {torch.__version__} has no varlen attention"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere (capability 8.0)"
    return None


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Boundaries on the device, and the length of the longest sequence."""

    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int
    window: int | None = None
    causal: bool = False


class Varlen:
    """One fused call for the whole batch."""

    serves = KernelSupport(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_sizes=range(8, 257, 8),  # those of FlashAttention-2
        compiles=True,
        compiles_backward=True,
        records=True,
        one_at_a_time=True,
        dropout=False,
        windows=True,
        causal=True,
        obstacle=_obstacle,
    )

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> VarlenPlan:
        """Keep the batch's boundaries as they are."""
        check_scope("varlen", scope, self.serves)
        if dropout:
            raise KernelError(f"kernel 'varlen': {NO_DROPOUT}; use 'bucketed', or a rate of 0")
        return VarlenPlan(packed.cu_seqlens, packed.max_seqlen, scope.window, scope.causal)

    def __call__(self, qkv: Tensor, plan: VarlenPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = qkv.unbind(1)
        bounds = plan.cu_seqlens
        longest = plan.max_seqlen
        # Boundaries and longest length twice: once for queries, once for keys.
        arguments = (q, k, v, bounds, bounds, longest, longest)
        before = -1 if plan.window is None else plan.window  # -1: all
        after = 0 if plan.causal else before
        if before == after == -1:
            out = varlen_attn(*arguments)
        else:
            out = varlen_attn(*arguments, window_size=(before, after))
        # By its annotation it may return (out, logsumexp), which only `return_aux` asks for.
        return out if isinstance(out, Tensor) else out[0]
