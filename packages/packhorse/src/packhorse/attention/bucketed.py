"""Attention over groups of sequences of similar length, each group padded to its longest.

For CPUs, and for GPUs and dtypes that `varlen` does not serve. Sequences are grouped by length
rounded up, gathered from the flat batch into `[n, L, H, D]`, attended, and scattered back. A group
whose lengths are all equal needs no mask; the others are padded with zeros that a mask hides, so a
sequence never sees another one, nor another one's NaN.

On a CPU two batched products around a softmax are twice as fast as the fused kernel at BERT's
lengths (measured, see docs/decisions.md), as long as the scores of a group stay in the cache: hence
the limit on the size of a group. Elsewhere the fused kernel is used.

Shapes: T tokens, n sequences of a group, L their padded length, H heads, D head width.
"""

# torch leaves some of its functions untyped (from_numpy, tolist, split …).
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention.disentangled import PositionTerms, position_scores
from packhorse.attention.kernels import NO_DROPOUT, KernelSupport
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed

STEP = 16  # lengths are rounded up to a multiple of this to be grouped
CACHED_SCORES = 1 << 15  # n · L² of a group on a CPU: with 12 heads in fp32, 1.5 MB of scores
CACHED_DISTANCES = 1 << 18  # n · L² · H at once, with three times as many scores of distances


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Sequences of similar length that attend together, padded to the longest of them."""

    tokens: Tensor | slice  # [n · L] index of each slot's token; padding slots point at token 0
    real: Tensor | None  # [n, L] which slots hold a token; None: all
    count: int  # n
    width: int  # L
    visible: Tensor | None = None  # [n or 1, 1, L or 1, L] keys that a query sees; None: all
    bias: Tensor | None = None  # [H, L, L] or [n, H, L, L] added to the scores
    rows: Tensor | None = None  # [2L-1] of the vectors that score distances


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """The groups of a batch, and the way back to the batch's order."""

    groups: tuple[LengthGroup, ...]
    inverse: Tensor | None  # [T] place of each token in the groups' real slots; None: in order
    cu_seqlens: Tensor  # [S+1] what the plan was made from
    dropout: float = 0.0
    scope: AttentionScope = FULL_SCOPE


class Bucketed:
    """Groups of similar length; compiled, it is one opaque operator without a backward pass."""

    serves = KernelSupport(compiles=True, windows=True, biases=True, causal=True, disentangled=True)

    def plan(
        self, packed: Packed, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
    ) -> GroupedPlan:
        """Group the batch's sequences by length."""
        return plan_groups(packed.cu_seqlens, dropout, scope)

    def __call__(
        self, qkv: Tensor, plan: GroupedPlan, positions: PositionTerms | None = None
    ) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        if torch.compiler.is_compiling():
            if plan.dropout:
                raise KernelError(f"kernel 'bucketed', compiled: {NO_DROPOUT}; do not compile")
            scope = plan.scope
            keys, queries = (
                (None, None) if positions is None else (positions.keys, positions.queries)
            )
            scores = (scope.window, scope.bias, scope.rows, scope.causal, scope.slopes)
            return _opaque(q, k, v, plan.cu_seqlens, *scores, keys, queries)
        return attend_groups(q, k, v, plan, positions)


@torch.library.custom_op("packhorse::bucketed", mutates_args=())
def _opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None = None,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    causal: bool = False,
    slopes: Tensor | None = None,
    position_keys: Tensor | None = None,
    position_queries: Tensor | None = None,
) -> Tensor:
    """The kernel as one node of a compiled graph: groups depend on the data, the graph must not."""
    plan = plan_groups(cu_seqlens, 0.0, AttentionScope(window, bias, rows, causal, slopes))
    positions = None if rows is None else PositionTerms(position_keys, position_queries)
    return attend_groups(q, k, v, plan, positions).contiguous()


@_opaque.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def plan_groups(
    cu_seqlens: Tensor, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
) -> GroupedPlan:
    """Sort by length, group equal rounded lengths, and split groups with too many scores."""
    device = cu_seqlens.device
    limit = CACHED_SCORES if device.type == "cpu" else 1 << 40  # in effect no limit
    spans = _spans(cu_seqlens)
    by_length = sorted(spans)
    groups: list[LengthGroup] = []
    for _, similar in groupby(by_length, key=lambda span: -(-span[0] // STEP)):
        groups.extend(_split(list(similar), limit, device))
    inverse = None
    if spans != by_length:
        order = torch.cat([torch.arange(start, start + length) for length, start in by_length])
        inverse = torch.argsort(order).to(device)
    return GroupedPlan(_with_scope(groups, scope, device), inverse, cu_seqlens, dropout, scope)


def plan_one_group(
    cu_seqlens: Tensor, dropout: float = 0.0, scope: AttentionScope = FULL_SCOPE
) -> GroupedPlan:
    """Every sequence in one group, as wide as the longest."""
    device = cu_seqlens.device
    groups = _with_scope([_group(_spans(cu_seqlens), device)], scope, device)
    return GroupedPlan(groups, None, cu_seqlens, dropout, scope)


def _with_scope(
    groups: list[LengthGroup], scope: AttentionScope, device: torch.device
) -> tuple[LengthGroup, ...]:
    """The groups with their masks and biases; groups of one width share these matrices."""
    widths = {group.width for group in groups}
    windows = {width: scope.visible(width, device) for width in widths}
    biases = {width: scope.bias_matrix(width) for width in widths}
    rows = {width: scope.position_rows(width) for width in widths}
    return tuple(
        replace(
            group,
            visible=_visible(group.real, windows[group.width]),
            bias=biases[group.width],
            rows=rows[group.width],
        )
        for group in groups
    )


def _visible(real: Tensor | None, window: Tensor | None) -> Tensor | None:
    """Real keys within the window.

    A padding slot sees all real keys, whatever the window: a row without any visible key would
    make its softmax 0/0, and the NaN would reach the gradients of real tokens.
    """
    if real is None:
        return window
    keys = real[:, None, None, :]  # [n, 1, 1, L]
    return keys if window is None else keys & (window | ~real[:, None, :, None])


def _spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """(length, start) of every sequence that has tokens."""
    bounds: list[int] = cu_seqlens.tolist()
    return [(end - start, start) for start, end in pairwise(bounds) if end > start]


def _split(similar: list[tuple[int, int]], limit: int, device: torch.device) -> list[LengthGroup]:
    """Groups of at most `limit` scores; `similar` is sorted, so its last span is the longest."""
    most = max(1, limit // similar[-1][0] ** 2)
    return [_group(similar[i : i + most], device) for i in range(0, len(similar), most)]


def _group(spans: list[tuple[int, int]], device: torch.device) -> LengthGroup:
    """One group of (length, start) spans; adjacent spans of equal length need no index at all."""
    width = max(length for length, _ in spans)
    first = spans[0][1]
    if all(span == (width, first + i * width) for i, span in enumerate(spans)):
        return LengthGroup(slice(first, first + len(spans) * width), None, len(spans), width)
    lengths = torch.tensor([length for length, _ in spans]).unsqueeze(1)
    starts = torch.tensor([start for _, start in spans]).unsqueeze(1)
    slots = torch.arange(width).unsqueeze(0)
    real = slots < lengths  # [n, L]
    tokens = torch.where(real, starts + slots, 0).flatten().to(device)
    return LengthGroup(tokens, None if bool(real.all()) else real.to(device), len(spans), width)


def attend_groups(
    q: Tensor, k: Tensor, v: Tensor, plan: GroupedPlan, positions: PositionTerms | None = None
) -> Tensor:
    """Attend group by group and put the tokens back in their order: [T, H, D]."""
    attend = _attend_by_products if q.device.type == "cpu" else _attend_fused
    scale = q.shape[-1] ** -0.5
    outputs = []
    for group in plan.groups:
        gathered = _gather(q, group), _gather(k, group), _gather(v, group)  # [n, H, L, D]
        if positions is None or group.rows is None:
            out = attend(*gathered, group, plan.dropout, scale)
        else:
            out = _attend_to_distances(attend, gathered, group, group.rows, plan.dropout, positions)
        out = out.transpose(1, 2)  # [n, L, H, D]
        outputs.append(out.flatten(0, 1) if group.real is None else out[group.real])
    joined = torch.cat(outputs)
    return joined if plan.inverse is None else joined[plan.inverse]


def _attend_to_distances(
    attend: Callable[..., Tensor],
    gathered: tuple[Tensor, Tensor, Tensor],
    group: LengthGroup,
    rows: Tensor,
    dropout: float,
    positions: PositionTerms,
) -> Tensor:
    """Attend with scores of distances, on a CPU so many heads at once that scores stay in cache."""
    heads, width = gathered[0].shape[1], gathered[0].shape[3]
    scores = group.count * group.width**2
    step = max(1, CACHED_DISTANCES // scores) if gathered[0].device.type == "cpu" else heads
    outputs: list[Tensor] = []
    for first in range(0, heads, step):
        some = slice(first, first + step)
        q, k, v = (x[:, some] for x in gathered)
        terms = positions.of_heads(some)
        bias = position_scores(q.transpose(0, 1), k.transpose(0, 1), terms, rows)
        bias = bias.transpose(0, 1)  # [n, H, L, L]
        bias = bias if group.bias is None else bias + group.bias[some]
        changed = replace(group, bias=bias)
        outputs.append(attend(q, k, v, changed, dropout, positions.scale(width)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _gather(x: Tensor, group: LengthGroup) -> Tensor:
    """[T, H, D] to [n, H, L, D]; padding slots are zero."""
    x = x[group.tokens].unflatten(0, (group.count, group.width))
    if group.real is not None:
        # Not only masked: token 0, which padding slots point at, may be NaN, and 0 × NaN is NaN.
        x = x.masked_fill(~group.real[:, :, None, None], 0)
    return x.transpose(1, 2)


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, group: LengthGroup, dropout: float, scale: float
) -> Tensor:
    mask = group.visible
    if group.bias is not None:
        bias = group.bias.to(q.dtype)
        mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
    return scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)


def _attend_by_products(
    q: Tensor, k: Tensor, v: Tensor, group: LengthGroup, dropout: float, scale: float
) -> Tensor:
    # Scaling the queries costs nothing: the product copies them into a contiguous layout anyway.
    scores = (q * scale) @ k.transpose(-1, -2)  # [n, H, L, L]
    if group.bias is not None:
        scores = scores + group.bias.to(scores.dtype)
    if group.visible is not None:
        scores = scores.masked_fill(~group.visible, float("-inf"))
    probabilities = scores.softmax(-1)
    return (F.dropout(probabilities, dropout) if dropout else probabilities) @ v
