"""FlashAttention (Dao et al. 2022) in Triton, for many short sequences laid end to end.

A program does one block of one head of one sequence: of queries on the way forward and for their
gradients, of keys for those of keys and values. Each is made whole by one program, so nothing is
added atomically, gradients are the same to the bit in every run, and a program reads nothing but
its own sequence. Seven products on the way back, where five would do if the parts of dQ met in
memory: that was tried, and the memory took longer than two products (docs/decisions.md). Programs
begin in `order`, the longest sequences first, so that short ones fill the gaps at the end. Queries,
keys and values stay side by side as one product made them, and so do their gradients: nothing is
cut apart or joined.

Which probabilities are dropped out is a function of a seed, the head and the two tokens, so the way
back asks again in place of having kept it.

Scores are in powers of two: `scale` has log2(e) in it, and so has `lse`.

Shapes: T tokens, S sequences, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from packhorse.cache import keep_compiled_code_private

LOG2_E = 1.4426950408889634
# By head width: queries and keys a block, warps, stages of the pipeline; measured on an H200.
FORWARD = {32: (64, 64, 4, 3), 64: (64, 64, 4, 3)}
QUERY_GRADIENTS = {32: (64, 32, 4, 2), 64: (64, 64, 4, 2)}
KEY_GRADIENTS = {32: (64, 64, 4, 1), 64: (64, 64, 4, 1)}
DRAWS = 1 << 31

Tuning = tuple[int, int, int, int]


def forward(
    qkv: Tensor,
    bounds: Tensor,
    order: Tensor,
    longest: int,
    seed: Tensor | None = None,
    rate: float = 0.0,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """What attention gives, [T, H, D], and the logarithm of each softmax's sum, [H, T].

    seed: [1] int64, where probabilities are to be dropped out at `rate`.
    """
    qkv = qkv.contiguous()
    tokens, _, heads, width = qkv.shape
    tuning = tuning or FORWARD[width]
    out = torch.empty((tokens, heads, width), dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=qkv.device)
    _launch(_forward, tuning, tuning[0], longest, qkv, order, seed, rate)(
        qkv, out, lse, bounds, order, width**-0.5 * LOG2_E, tokens, heads * width
    )
    return out, lse


def backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    order: Tensor,
    longest: int,
    seed: Tensor | None = None,
    rate: float = 0.0,
    tunings: tuple[Tuning, Tuning] | None = None,
) -> Tensor:
    """The gradient of `qkv`, [T, 3, H, D]."""
    qkv, grad = qkv.contiguous(), grad.contiguous()
    tokens, _, heads, width = qkv.shape
    delta, made = torch.empty_like(lse), torch.empty_like(qkv)
    of_queries, of_keys = tunings or (QUERY_GRADIENTS[width], KEY_GRADIENTS[width])
    known = (bounds, order, width**-0.5 * LOG2_E, width**-0.5, tokens, heads * width)
    _launch(_query_gradients, of_queries, of_queries[0], longest, qkv, order, seed, rate)(
        grad, qkv, out, lse, delta, made, *known
    )
    _launch(_key_gradients, of_keys, of_keys[1], longest, qkv, order, seed, rate)(
        grad, qkv, lse, delta, made, *known
    )
    return made


def _launch(
    kernel: Any,
    tuning: Tuning,
    block: int,
    longest: int,
    qkv: Tensor,
    order: Tensor,
    seed: Tensor | None,
    rate: float,
) -> Callable[..., Any]:
    """A program for each block of each head of each sequence, were all as long as the longest."""
    _, _, heads, width = qkv.shape
    rows, columns, warps, stages = tuning
    grid = (-(-longest // block), heads, len(order))
    sizes = {"D": width, "ROWS": rows, "COLUMNS": columns}
    drops = {"seed_at": order, "lost": 0, "kept": 1.0, "DROPS": False}
    if seed is not None:
        drops = {"seed_at": seed, "lost": round(rate * DRAWS), "kept": 1 - rate, "DROPS": True}
    _close_cache()
    return partial(kernel[grid], **sizes, **drops, num_warps=warps, num_stages=stages)


@cache
def _close_cache() -> None:
    """Once, before anything is compiled; Triton's own folder may be open to others."""
    keep_compiled_code_private()


@triton.jit
def _mixed(x: tl.tensor) -> tl.tensor:
    """The end of MurmurHash3: each of 32 bits changes every other."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _drawn(seed_at: tl.tensor, head: tl.tensor, queries: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """A number below DRAWS for each pair of tokens; their shapes say how pairs are laid out."""
    seed, head = tl.load(seed_at), _mixed(head.to(tl.uint32) + 0x9E3779B9)
    asking = _mixed(_mixed(seed.to(tl.uint32) ^ head) ^ queries.to(tl.uint32))
    asked = _mixed(_mixed((seed >> 32).to(tl.uint32) ^ head) ^ keys.to(tl.uint32))
    return (_mixed(asking ^ asked) >> 1).to(tl.int32)


@triton.jit
def _place(bounds_at: tl.tensor, order_at: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Where this program's sequence begins, and its length."""
    sequence = tl.load(order_at + tl.program_id(2))
    begin = tl.load(bounds_at + sequence).to(tl.int64)
    return begin, (tl.load(bounds_at + sequence + 1) - begin).to(tl.int32)


@triton.jit
def _forward(
    qkv_at: tl.tensor,
    out_at: tl.tensor,
    lse_at: tl.tensor,
    bounds_at: tl.tensor,
    order_at: tl.tensor,
    scale: tl.tensor,
    tokens: tl.tensor,
    across: tl.tensor,  # H x D
    seed_at: tl.tensor,
    lost: tl.tensor,  # x DRAWS
    kept: tl.tensor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPS: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    begin, length = _place(bounds_at, order_at)
    if first >= length:
        return
    rows, columns, depth = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, D)
    step = 3 * across
    q_at = qkv_at + begin * step + head * D
    k_at, v_at = q_at + across, q_at + 2 * across
    mine = rows < length
    q = tl.load(q_at + rows[:, None] * step + depth[None, :], mask=mine[:, None], other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, COLUMNS):
        at = start + columns
        inside = at < length
        k = tl.load(k_at + at[None, :] * step + depth[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(v_at + at[:, None] * step + depth[None, :], mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, k) * scale, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp2(most - higher)
        shares = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(shares, 1)
        if DROPS:
            drawn = _drawn(seed_at, head, begin + rows[:, None], begin + at[None, :])
            shares = tl.where(drawn >= lost, shares, 0.0)
        sums = tl.dot(shares.to(v.dtype), v, sums * shrink[:, None])
        most = higher
    found = out_at + (begin + rows[:, None]) * across + head * D + depth[None, :]
    tl.store(
        found, (sums / (kept * total)[:, None]).to(out_at.dtype.element_ty), mask=mine[:, None]
    )
    tl.store(lse_at + head.to(tl.int64) * tokens + begin + rows, most + tl.log2(total), mask=mine)


@triton.jit
def _query_gradients(
    grad_at: tl.tensor,
    qkv_at: tl.tensor,
    out_at: tl.tensor,
    lse_at: tl.tensor,
    delta_at: tl.tensor,
    made_at: tl.tensor,
    bounds_at: tl.tensor,
    order_at: tl.tensor,
    scale: tl.tensor,
    slope: tl.tensor,
    tokens: tl.tensor,
    across: tl.tensor,  # H x D
    seed_at: tl.tensor,
    lost: tl.tensor,  # x DRAWS
    kept: tl.tensor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPS: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    begin, length = _place(bounds_at, order_at)
    if first >= length:
        return
    rows, columns, depth = (
        first + tl.arange(0, ROWS),
        tl.arange(0, COLUMNS),
        tl.arange(0, D)[None, :],
    )
    step, mine = 3 * across, rows < length
    single = begin * across + head * D + rows[:, None] * across + depth
    triple = begin * step + head * D
    q_at = qkv_at + triple
    k_at, v_at = q_at + across, q_at + 2 * across
    q = tl.load(q_at + rows[:, None] * step + depth, mask=mine[:, None], other=0.0)
    grad = tl.load(grad_at + single, mask=mine[:, None], other=0.0)
    out = tl.load(out_at + single, mask=mine[:, None], other=0.0)
    own = head.to(tl.int64) * tokens + begin + rows
    lse = tl.load(lse_at + own, mask=mine, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_at + own, delta, mask=mine)
    dq = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, COLUMNS):
        at = start + columns
        inside = at < length
        k = tl.load(k_at + at[:, None] * step + depth, mask=inside[:, None], other=0.0)
        v = tl.load(v_at + at[:, None] * step + depth, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale - lse[:, None]
        shares = tl.where(inside[None, :], tl.exp2(scores), 0.0)
        wanted = tl.dot(grad, tl.trans(v))
        if DROPS:
            drawn = _drawn(seed_at, head, begin + rows[:, None], begin + at[None, :])
            wanted = tl.where(drawn >= lost, wanted / kept, 0.0)
        slopes = shares * (wanted - delta[:, None])
        dq = tl.dot(slopes.to(k.dtype), k, dq)
    found = made_at + triple + rows[:, None] * step + depth
    tl.store(found, (dq * slope).to(made_at.dtype.element_ty), mask=mine[:, None])


@triton.jit
def _key_gradients(
    grad_at: tl.tensor,
    qkv_at: tl.tensor,
    lse_at: tl.tensor,
    delta_at: tl.tensor,
    made_at: tl.tensor,
    bounds_at: tl.tensor,
    order_at: tl.tensor,
    scale: tl.tensor,
    slope: tl.tensor,
    tokens: tl.tensor,
    across: tl.tensor,  # H x D
    seed_at: tl.tensor,
    lost: tl.tensor,  # x DRAWS
    kept: tl.tensor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPS: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * COLUMNS, tl.program_id(1)
    begin, length = _place(bounds_at, order_at)
    if first >= length:
        return
    rows, columns, depth = (
        tl.arange(0, ROWS),
        first + tl.arange(0, COLUMNS),
        tl.arange(0, D)[None, :],
    )
    step, inside = 3 * across, (columns < length)[:, None]
    triple = begin * step + head * D
    q_at, grad_at = qkv_at + triple, grad_at + begin * across + head * D
    there = columns[:, None] * step + depth
    k = tl.load(q_at + across + there, mask=inside, other=0.0)
    v = tl.load(q_at + 2 * across + there, mask=inside, other=0.0)
    lse_at += head.to(tl.int64) * tokens + begin
    delta_at += head.to(tl.int64) * tokens + begin
    dk = tl.zeros([COLUMNS, D], tl.float32)
    dv = tl.zeros([COLUMNS, D], tl.float32)
    for start in range(0, length, ROWS):
        at = start + rows
        mine = at < length
        q = tl.load(q_at + at[:, None] * step + depth, mask=mine[:, None], other=0.0)
        grad = tl.load(grad_at + at[:, None] * across + depth, mask=mine[:, None], other=0.0)
        # Beyond the end shares are exp2(-inf) = 0.
        lse = tl.load(lse_at + at, mask=mine, other=float("inf"))
        delta = tl.load(delta_at + at, mask=mine, other=0.0)
        shares = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])  # [COLUMNS, ROWS]
        wanted, used = tl.dot(v, tl.trans(grad)), shares
        if DROPS:
            drawn = _drawn(seed_at, head, begin + at[None, :], begin + columns[:, None])
            wanted = tl.where(drawn >= lost, wanted / kept, 0.0)
            used = tl.where(drawn >= lost, shares, 0.0)
        dv = tl.dot(used.to(grad.dtype), grad, dv)
        slopes = shares * (wanted - delta[None, :])
        dk = tl.dot(slopes.to(q.dtype), q, dk)
    made_at += triple + across
    tl.store(made_at + there, (dk * slope).to(made_at.dtype.element_ty), mask=inside)
    tl.store(made_at + across + there, (dv / kept).to(made_at.dtype.element_ty), mask=inside)


class Attend(torch.autograd.Function):
    """The two where nothing is compiled: an operator of torch costs the host more."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        found = forward(*given)
        ctx.mark_non_differentiable(found[1])
        _keep(ctx, given, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _go_back(ctx, *grads, by=backward)


@torch.library.custom_op(
    "packhorse::attend",
    mutates_args=(),
    schema="(Tensor qkv, Tensor bounds, Tensor order, SymInt longest, Tensor? seed=None, "
    "float rate=0.0) -> (Tensor, Tensor)",
)
def attend(
    qkv: Tensor,
    bounds: Tensor,
    order: Tensor,
    longest: int,
    seed: Tensor | None = None,
    rate: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`forward`, as an operator that torch can differentiate and compile around."""
    return forward(qkv, bounds, order, longest, seed, rate)


@torch.library.custom_op(
    "packhorse::attend_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor qkv, Tensor out, Tensor lse, Tensor bounds, Tensor order, "
    "SymInt longest, Tensor? seed, float rate) -> Tensor",
)
def _attend_backward(
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    order: Tensor,
    longest: int,
    seed: Tensor | None,
    rate: float,
) -> Tensor:
    return backward(grad, qkv, out, lse, bounds, order, longest, seed, rate)


@attend.register_fake
def _(qkv: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    tokens, _, heads, width = qkv.shape
    out = qkv.new_empty((tokens, heads, width))
    return out, qkv.new_empty((heads, tokens), dtype=torch.float32)


@_attend_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *others: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bounds, order, ctx.longest, seed, ctx.rate = inputs
    ctx.save_for_backward(qkv, *output, bounds, order, seed)


def _go_back(
    ctx: Any, grad: Tensor, _: Any, by: Callable[..., Tensor] = _attend_backward
) -> tuple[Tensor | None, ...]:
    qkv, out, lse, bounds, order, seed = ctx.saved_tensors
    made = by(grad, qkv, out, lse, bounds, order, ctx.longest, seed, ctx.rate)
    return made, *[None] * 5


attend.register_autograd(_go_back, setup_context=_keep)
