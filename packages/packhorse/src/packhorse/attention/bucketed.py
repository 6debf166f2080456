"""Sequences of like length attend together, with as little padding as that needs.

For CPUs, and for GPUs and dtypes that `varlen` does not serve. Sequences are grouped by length
rounded up, cut from the flat batch into `[n, L, H, D]`, attended, and laid back. A group whose
lengths are all equal needs no mask; the others fill up with zeros that a mask hides, so a sequence
still never sees another one, nor another's NaN.

On a CPU two batched products around a softmax beat the fused kernel by two to one at BERT's lengths
(measured, see docs/decisions.md), as long as the scores of a group stay in the cache: hence the
limit on a group's size. Elsewhere the fused kernel is used.

Shapes: T tokens, n sequences of a group, L their padded length, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention import NO_DROPOUT, Support
from packhorse.attention.reach import FULL, Reach
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed

STEP = 16  # lengths are rounded up to a multiple of this to be grouped
CACHED_SCORES = 1 << 15  # n · L² of a group on a CPU: with 12 heads in fp32, 1.5 MB of scores


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend together."""

    tokens: Tensor | slice  # [n · L] index of each slot's token; padding slots point at token 0
    real: Tensor | None  # [n, L] which slots hold a token; None where all do
    count: int  # n
    width: int  # L
    seen: Tensor | None = None  # [n or 1, 1, L or 1, L] which keys a query sees; None: every one
    added: Tensor | None = None  # [H, L, L] to the scores


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """The groups of a batch and the way back."""

    groups: tuple[Group, ...]
    back: Tensor | None  # [T] where each token lies in the groups' real slots; None = in order
    cu_seqlens: Tensor  # [S+1] what the plan was made from
    dropout: float = 0.0
    reach: Reach = FULL


class Bucketed:
    """Groups of like length; compiled, it is one opaque step without a backward pass."""

    serves = Support(compiles=True, windows=True, biases=True)

    def plan(self, packed: Packed, dropout: float = 0.0, reach: Reach = FULL) -> GroupedPlan:
        """Group the batch's sequences by length."""
        return plan_groups(packed.cu_seqlens, dropout, reach)

    def __call__(self, qkv: Tensor, plan: GroupedPlan) -> Tensor:
        """[T, 3, H, D] to [T, H, D]."""
        q, k, v = qkv.unbind(1)
        if torch.compiler.is_compiling():
            if plan.dropout:
                raise KernelError(f"kernel 'bucketed', compiled: {NO_DROPOUT}; do not compile")
            return _opaque(q, k, v, plan.cu_seqlens, plan.reach.window, plan.reach.bias)
        return attend_groups(q, k, v, plan)


@torch.library.custom_op("packhorse::bucketed", mutates_args=())
def _opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The kernel as one node of a compiled graph: groups depend on the data, the graph must not."""
    return attend_groups(q, k, v, plan_groups(cu_seqlens, 0.0, Reach(window, bias))).contiguous()


@_opaque.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape)


def plan_groups(cu_seqlens: Tensor, dropout: float = 0.0, reach: Reach = FULL) -> GroupedPlan:
    """Sort by length, group what rounds up alike, and cut groups where their scores get large."""
    device = cu_seqlens.device
    limit = CACHED_SCORES if device.type == "cpu" else 1 << 40
    spans = _spans(cu_seqlens)
    by_length = sorted(spans)
    groups: list[Group] = []
    for _, alike in groupby(by_length, key=lambda span: -(-span[0] // STEP)):
        groups.extend(_cut(list(alike), limit, device))
    told = _told(groups, reach, device)
    if spans == by_length:
        return GroupedPlan(told, None, cu_seqlens, dropout, reach)
    order = torch.cat([torch.arange(a, a + n) for n, a in by_length])
    return GroupedPlan(told, torch.argsort(order).to(device), cu_seqlens, dropout, reach)


def plan_one_group(cu_seqlens: Tensor, dropout: float = 0.0, reach: Reach = FULL) -> GroupedPlan:
    """Every sequence in one group, as wide as the longest."""
    groups = [_group(_spans(cu_seqlens), cu_seqlens.device)]
    return GroupedPlan(_told(groups, reach, cu_seqlens.device), None, cu_seqlens, dropout, reach)


def _told(groups: list[Group], reach: Reach, device: torch.device) -> tuple[Group, ...]:
    """The groups with what their scores are told; groups of one width share it."""
    widths = {group.width for group in groups}
    near = {width: reach.near(width, device) for width in widths}
    added = {width: reach.added(width) for width in widths}
    return tuple(
        replace(group, seen=_seen(group.real, near[group.width]), added=added[group.width])
        for group in groups
    )


def _seen(real: Tensor | None, near: Tensor | None) -> Tensor | None:
    """Real keys within the window; a slot of padding sees all real ones, for it must see some."""
    if real is None:
        return near
    keys = real[:, None, None, :]
    return keys if near is None else keys & (near | ~real[:, None, :, None])


def _spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """(length, start) of every sequence that has tokens."""
    return [(b - a, a) for a, b in pairwise(cu_seqlens.tolist()) if b > a]


def _cut(alike: list[tuple[int, int]], limit: int, device: torch.device) -> list[Group]:
    most = max(1, limit // alike[-1][0] ** 2)
    return [_group(alike[i : i + most], device) for i in range(0, len(alike), most)]


def _group(spans: list[tuple[int, int]], device: torch.device) -> Group:
    """One group of (length, start) spans; adjacent spans of equal length need no index at all."""
    width, first = max(n for n, _ in spans), spans[0][1]
    if all(span == (width, first + i * width) for i, span in enumerate(spans)):
        return Group(slice(first, first + len(spans) * width), None, len(spans), width)
    lengths = torch.tensor([n for n, _ in spans]).unsqueeze(1)
    starts = torch.tensor([a for _, a in spans]).unsqueeze(1)
    slots = torch.arange(width).unsqueeze(0)
    real = slots < lengths  # [n, L]
    tokens = torch.where(real, starts + slots, 0).flatten().to(device)
    return Group(tokens, None if bool(real.all()) else real.to(device), len(spans), width)


def attend_groups(q: Tensor, k: Tensor, v: Tensor, plan: GroupedPlan) -> Tensor:
    """Attend group by group and lay the tokens back in their order: [T, H, D]."""
    attend = _products if q.device.type == "cpu" else _fused
    pieces = []
    for group in plan.groups:
        cut = _cut_out(q, group), _cut_out(k, group), _cut_out(v, group)
        out = attend(*cut, group, plan.dropout)
        out = out.transpose(1, 2)  # [n, L, H, D]
        pieces.append(out.flatten(0, 1) if group.real is None else out[group.real])
    joined = torch.cat(pieces)
    return joined if plan.back is None else joined[plan.back]


def _cut_out(x: Tensor, group: Group) -> Tensor:
    """[T, H, D] to [n, H, L, D]; padding slots are zero."""
    x = x[group.tokens].unflatten(0, (group.count, group.width))
    if group.real is not None:
        x = x.masked_fill(~group.real[:, :, None, None], 0)
    return x.transpose(1, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, group: Group, dropout: float) -> Tensor:
    mask = group.seen
    if group.added is not None:
        mask = group.added if mask is None else torch.where(mask, group.added, float("-inf"))
    return scaled_dot_product_attention(q, k, v, mask, dropout)


def _products(q: Tensor, k: Tensor, v: Tensor, group: Group, dropout: float) -> Tensor:
    # The scale goes in while the queries are copied into place, so it costs no pass of its own.
    q = q * q.shape[-1] ** -0.5
    scores = q @ k.transpose(-1, -2)  # [n, H, L, L]
    if group.added is not None:
        scores = scores + group.added
    if group.seen is not None:
        scores = scores.masked_fill(~group.seen, float("-inf"))
    chances = scores.softmax(-1)
    return (F.dropout(chances, dropout) if dropout else chances) @ v
