"""Attention in which the last tokens of a sequence attend to the others, and no token to them.

ColBERT fills a query up with [MASK] tokens and by default hides them from attention: they attend to
the query, and no token attends to them, not even themselves. Other kernels need not know this: the
kernel inside runs on the tokens that are attended to, laid end to end without the rest. The hidden
tokens are few, so one padded product for all sequences is enough for them.

A batch without hidden tokens (`Packed.key_lengths` is None) goes to the kernel inside as it is.

Shapes: T tokens, K tokens that are attended to, S sequences with hidden tokens, M hidden tokens and
L other tokens of the longest of them, H heads, D head width.
"""

# torch leaves some of its functions untyped (tolist).
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.attention.kernels import AttentionPlan, Kernel, KernelSupport, kernel
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed


@dataclass(frozen=True, slots=True)
class HiddenKeysPlan:
    """Where the tokens of a batch stand, and the plan of the kernel inside."""

    inner: AttentionPlan
    attended: Tensor  # [K] tokens that others attend to
    hidden: Tensor  # [S, M] tokens that none attends to; spare places hold the last of them
    keys: Tensor  # [S, L] tokens that they attend to; spare places hold the last of them
    mask: Tensor  # [S, 1 or H, M, L] added to the scores


class HiddenKeys:
    """A kernel for batches of which some tokens are not attended to, around another kernel."""

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner
        # What is left of a batch without its hidden tokens is not in rows.
        self.ragged = kernel("bucketed") if inner.serves.rows else inner

    @property
    def serves(self) -> KernelSupport:
        """What the kernel inside supports."""
        return self.inner.serves

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> AttentionPlan:
        """Prepare a batch; dropout applies to the tokens that are attended to."""
        options: dict[str, Any] = {"dropout": dropout} if dropout else {}
        if scope is not FULL_SCOPE:
            options["scope"] = scope
        if packed.key_lengths is None:
            return self.inner.plan(packed, **options)
        if scope.causal or scope.rows is not None:
            raise KernelError(
                "tokens that no other attends to, as ColBERT's queries have, are not supported by "
                "models with causal or disentangled attention; encode queries without expansion"
            )
        counts = packed.key_lengths
        tokens = torch.arange(len(packed.ids), device=counts.device)
        starts = packed.starts.long()
        sequence = torch.repeat_interleave(packed.lengths.long(), output_size=len(tokens))
        is_key = tokens - starts[sequence] < counts[sequence]
        attended = is_key.nonzero().flatten()
        bounds = F.pad(counts.cumsum(0), (1, 0)).int()
        compact = replace(
            packed,
            ids=packed.ids[attended],
            types=packed.types[attended],
            positions=packed.positions[attended],
            cu_seqlens=bounds,
            max_seqlen=int(counts.max()),
            capacity=0,
            prompt_lengths=None,
            key_lengths=None,
        )
        lengths = packed.lengths.long()
        chosen = (lengths > counts).nonzero().flatten()
        begin, total, count = starts[chosen], lengths[chosen], counts[chosen]
        hidden = _grid(begin + count, total - count)
        keys = _grid(begin, count)
        return HiddenKeysPlan(
            self.ragged.plan(compact, **options),
            attended,
            hidden,
            keys,
            _mask(hidden - begin[:, None], count, keys.shape[1], scope),
        )

    def __call__(self, qkv: Tensor, plan: AttentionPlan, *positions: Any) -> Tensor:
        """[T, 3, H, D] to [T, H, D]; `positions` are those of a `DisentangledKernel`."""
        if not isinstance(plan, HiddenKeysPlan):
            return self.inner(qkv, plan, *positions)
        out = torch.empty_like(qkv[:, 0])
        out[plan.attended] = self.ragged(qkv[plan.attended], plan.inner)
        queries = qkv[plan.hidden, 0].transpose(1, 2)  # [S, H, M, D]
        keys = qkv[plan.keys, 1].transpose(1, 2)  # [S, H, L, D]
        values = qkv[plan.keys, 2].transpose(1, 2)
        mask = plan.mask.to(queries.dtype)
        result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        out[plan.hidden] = result.transpose(1, 2)
        return out


def _grid(begin: Tensor, counts: Tensor) -> Tensor:
    """[S, n]: `counts` numbers from `begin` on; spare places repeat the last of them."""
    longest = int(counts.max()) if len(counts) else 0
    offsets = torch.arange(longest, device=begin.device).expand(len(begin), longest)
    return begin[:, None] + torch.minimum(offsets, counts[:, None] - 1)


def _mask(queries: Tensor, counts: Tensor, longest: int, scope: AttentionScope) -> Tensor:
    """[S, 1 or H, M, L], for queries at the positions [S, M] and keys from 0 on."""
    keys = torch.arange(longest, device=counts.device)
    visible = (keys < counts[:, None])[:, None, :].expand(-1, queries.shape[1], -1)
    distances = keys - queries[..., None]  # [S, M, L]
    if scope.window is not None:
        visible = visible & (distances.abs() <= scope.window)
    mask = torch.zeros(visible.shape, device=counts.device)
    mask = mask.masked_fill(~visible, float("-inf"))[:, None]
    if scope.slopes is not None:
        return mask - scope.slopes.float()[:, None, None] * distances.abs()[:, None]
    if scope.bias is None:
        return mask
    farthest = scope.bias.shape[-1] // 2
    bias = scope.bias[:, distances.clamp(-farthest, farthest) + farthest]  # [H, S, M, L]
    return mask.to(bias.dtype) + bias.transpose(0, 1)
