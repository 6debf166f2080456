"""FlashAttention (Dao et al. 2022) in Triton, for many short sequences laid end to end.

A program computes one block of one head of one sequence: a block of queries in the forward pass and
for the gradients of queries, a block of keys for the gradients of keys and values. Every result is
written by exactly one program, so that nothing is added atomically, gradients are bitwise
reproducible, and a program reads nothing but its own sequence. The backward pass takes seven
products where five would do if the parts of dQ were added up in memory: that was tried, and the
memory traffic took longer than two products (docs/decisions.md). Programs start in `order`, longest
sequences first, so that short ones fill the gaps at the end. Queries, keys and values stay side by
side in `qkv` as one product computed them, and so do their gradients: nothing is split or joined.

Which probabilities are dropped out is a function of a seed, the head and the two tokens, so the
backward pass recomputes it instead of storing it.

Scores are exponents of two: `scale` includes log2(e), and so does `lse`.

The names in the kernels are those of the FlashAttention papers: p are the probabilities, dp and ds
the gradients of probabilities and scores, delta = rowsum(dO · O), lse the log of the softmax's
denominator (FlashAttention-2, Dao 2023, algorithms 1 and 2).

Shapes: T tokens, S sequences, H heads, D head width.
"""

# Functions that Triton compiles cannot be typed: their arguments are pointers and tiles of its own.
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false

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
Tuning = tuple[int, int, int, int]  # queries per block, keys per block, warps, pipeline stages
# By head width; measured on an H200.
FORWARD: dict[int, Tuning] = {32: (64, 64, 4, 3), 64: (64, 64, 4, 3)}
QUERY_GRADIENTS: dict[int, Tuning] = {32: (64, 32, 4, 2), 64: (64, 64, 4, 2)}
KEY_GRADIENTS: dict[int, Tuning] = {32: (64, 64, 4, 1), 64: (64, 64, 4, 1)}
DRAWS = 1 << 31  # random numbers for dropout are from 0 to below this


def forward(
    qkv: Tensor,
    bounds: Tensor,
    order: Tensor,
    longest: int,
    seed: Tensor | None = None,
    rate: float = 0.0,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention's output [T, H, D], and the log2 of each softmax's denominator [H, T].

    qkv: [T, 3, H, D]. bounds: [S+1] cumulative lengths. order: [S] which sequence goes first.
    seed: [1] int64 if probabilities are to be dropped out at `rate`, else None.
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
    """The gradient of `qkv`, [T, 3, H, D]; `grad` is that of the output, [T, H, D]."""
    qkv = qkv.contiguous()
    grad = grad.contiguous()
    tokens, _, heads, width = qkv.shape
    delta = torch.empty_like(lse)  # written by the first kernel, read by the second
    qkv_grad = torch.empty_like(qkv)
    query_tuning, key_tuning = tunings or (QUERY_GRADIENTS[width], KEY_GRADIENTS[width])
    common = (bounds, order, width**-0.5 * LOG2_E, width**-0.5, tokens, heads * width)
    _launch(_query_gradients, query_tuning, query_tuning[0], longest, qkv, order, seed, rate)(
        grad, qkv, out, lse, delta, qkv_grad, *common
    )
    _launch(_key_gradients, key_tuning, key_tuning[1], longest, qkv, order, seed, rate)(
        grad, qkv, lse, delta, qkv_grad, *common
    )
    return qkv_grad


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
    """The kernel with its grid: a program per block of the longest sequence, head and sequence.

    The host does not know the lengths, so the grid is as if all sequences were the longest; a
    program whose block lies beyond its sequence returns at once.
    """
    _, _, heads, width = qkv.shape
    rows, columns, warps, stages = tuning
    grid = (-(-longest // block), heads, len(order))
    sizes = {"D": width, "ROWS": rows, "COLUMNS": columns}
    # Without dropout the pointer is never read, but it must be one.
    dropout = {"seed_ptr": order, "drop_below": 0, "keep": 1.0, "DROPOUT": False}
    if seed is not None:
        dropout = {
            "seed_ptr": seed,
            "drop_below": round(rate * DRAWS),
            "keep": 1 - rate,
            "DROPOUT": True,
        }
    _use_private_cache()
    return partial(kernel[grid], **sizes, **dropout, num_warps=warps, num_stages=stages)


@cache
def _use_private_cache() -> None:
    """Once, before anything is compiled: others may be able to write to Triton's default folder."""
    keep_compiled_code_private()


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """The finalizer of MurmurHash3: every bit of the input affects every bit of the output."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _random(seed_ptr: tl.tensor, head: tl.tensor, queries: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """A number below DRAWS for each pair of tokens; `queries` and `keys` broadcast.

    Queries and keys are hashed apart, with one half of the seed each, so that most of the work is
    per token and only the last mix is per pair.
    """
    seed = tl.load(seed_ptr)
    head = mix(head.to(tl.uint32) + 0x9E3779B9)
    query_hash = mix(mix(seed.to(tl.uint32) ^ head) ^ queries.to(tl.uint32))
    key_hash = mix(mix((seed >> 32).to(tl.uint32) ^ head) ^ keys.to(tl.uint32))
    return (mix(query_hash ^ key_hash) >> 1).to(tl.int32)


@triton.jit
def _sequence(bounds_ptr: tl.tensor, order_ptr: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The first token of this program's sequence, and its length."""
    sequence = tl.load(order_ptr + tl.program_id(2))
    # int64: token x 3 x H x D exceeds 31 bits for large batches.
    begin = tl.load(bounds_ptr + sequence).to(tl.int64)
    return begin, (tl.load(bounds_ptr + sequence + 1) - begin).to(tl.int32)


@triton.jit
def _forward(
    qkv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    order_ptr: tl.tensor,
    scale: tl.tensor,
    tokens: tl.tensor,
    hidden: tl.tensor,  # H x D
    seed_ptr: tl.tensor,
    drop_below: tl.tensor,  # dropout rate x DRAWS
    keep: tl.tensor,  # 1 - dropout rate
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    begin, length = _sequence(bounds_ptr, order_ptr)
    if first >= length:
        return
    rows, columns, depth = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, D)
    step = 3 * hidden  # from a token's query to the next token's
    q_ptr = qkv_ptr + begin * step + head * D
    k_ptr, v_ptr = q_ptr + hidden, q_ptr + 2 * hidden
    row_mask = rows < length
    q = tl.load(q_ptr + rows[:, None] * step + depth[None, :], mask=row_mask[:, None], other=0.0)
    # Online softmax (Milakov and Gimelshein 2018): a running maximum, and sums relative to it.
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, COLUMNS):
        keys = start + columns
        key_mask = keys < length
        k = tl.load(
            k_ptr + keys[None, :] * step + depth[:, None], mask=key_mask[None, :], other=0.0
        )
        v = tl.load(
            v_ptr + keys[:, None] * step + depth[None, :], mask=key_mask[:, None], other=0.0
        )
        scores = tl.where(key_mask[None, :], tl.dot(q, k) * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        rescale = tl.exp2(maximum - new_maximum)
        p = tl.exp2(scores - new_maximum[:, None])
        denominator = denominator * rescale + tl.sum(p, 1)
        if DROPOUT:  # after the sum: dropout applies to normalized probabilities
            random = _random(seed_ptr, head, begin + rows[:, None], begin + keys[None, :])
            p = tl.where(random >= drop_below, p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        maximum = new_maximum
    target = out_ptr + (begin + rows[:, None]) * hidden + head * D + depth[None, :]
    tl.store(
        target,
        (acc / (keep * denominator)[:, None]).to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None],
    )
    lse = maximum + tl.log2(denominator)
    tl.store(lse_ptr + head.to(tl.int64) * tokens + begin + rows, lse, mask=row_mask)


@triton.jit
def _query_gradients(
    grad_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    qkv_grad_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    order_ptr: tl.tensor,
    scale: tl.tensor,
    slope: tl.tensor,  # of scores in natural units: D ** -0.5
    tokens: tl.tensor,
    hidden: tl.tensor,  # H x D
    seed_ptr: tl.tensor,
    drop_below: tl.tensor,  # dropout rate x DRAWS
    keep: tl.tensor,  # 1 - dropout rate
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    begin, length = _sequence(bounds_ptr, order_ptr)
    if first >= length:
        return
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    depth = tl.arange(0, D)[None, :]
    step = 3 * hidden
    row_mask = rows < length
    out_offset = begin * hidden + head * D + rows[:, None] * hidden + depth  # in [T, H, D]
    qkv_offset = begin * step + head * D  # in [T, 3, H, D]
    q_ptr = qkv_ptr + qkv_offset
    k_ptr, v_ptr = q_ptr + hidden, q_ptr + 2 * hidden
    q = tl.load(q_ptr + rows[:, None] * step + depth, mask=row_mask[:, None], other=0.0)
    grad = tl.load(grad_ptr + out_offset, mask=row_mask[:, None], other=0.0)
    out = tl.load(out_ptr + out_offset, mask=row_mask[:, None], other=0.0)
    row_offset = head.to(tl.int64) * tokens + begin + rows  # in [H, T]
    lse = tl.load(lse_ptr + row_offset, mask=row_mask, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + row_offset, delta, mask=row_mask)  # for `_key_gradients`
    dq = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, length, COLUMNS):
        keys = start + columns
        key_mask = keys < length
        k = tl.load(k_ptr + keys[:, None] * step + depth, mask=key_mask[:, None], other=0.0)
        v = tl.load(v_ptr + keys[:, None] * step + depth, mask=key_mask[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale - lse[:, None]
        p = tl.where(key_mask[None, :], tl.exp2(scores), 0.0)
        dp = tl.dot(grad, tl.trans(v))
        if DROPOUT:
            random = _random(seed_ptr, head, begin + rows[:, None], begin + keys[None, :])
            dp = tl.where(random >= drop_below, dp / keep, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    target = qkv_grad_ptr + qkv_offset + rows[:, None] * step + depth
    tl.store(target, (dq * slope).to(qkv_grad_ptr.dtype.element_ty), mask=row_mask[:, None])


@triton.jit
def _key_gradients(
    grad_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    qkv_grad_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    order_ptr: tl.tensor,
    scale: tl.tensor,
    slope: tl.tensor,  # of scores in natural units: D ** -0.5
    tokens: tl.tensor,
    hidden: tl.tensor,  # H x D
    seed_ptr: tl.tensor,
    drop_below: tl.tensor,  # dropout rate x DRAWS
    keep: tl.tensor,  # 1 - dropout rate
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * COLUMNS, tl.program_id(1)
    begin, length = _sequence(bounds_ptr, order_ptr)
    if first >= length:
        return
    rows = tl.arange(0, ROWS)
    columns = first + tl.arange(0, COLUMNS)
    depth = tl.arange(0, D)[None, :]
    step = 3 * hidden
    key_mask = (columns < length)[:, None]
    qkv_offset = begin * step + head * D  # in [T, 3, H, D]
    q_ptr, grad_ptr = qkv_ptr + qkv_offset, grad_ptr + begin * hidden + head * D
    key_offset = columns[:, None] * step + depth
    k = tl.load(q_ptr + hidden + key_offset, mask=key_mask, other=0.0)
    v = tl.load(q_ptr + 2 * hidden + key_offset, mask=key_mask, other=0.0)
    lse_ptr += head.to(tl.int64) * tokens + begin
    delta_ptr += head.to(tl.int64) * tokens + begin
    dk = tl.zeros([COLUMNS, D], tl.float32)
    dv = tl.zeros([COLUMNS, D], tl.float32)
    # Scores are computed transposed, [COLUMNS, ROWS], so that dK and dV need no transposed p.
    for start in range(0, length, ROWS):
        queries = start + rows
        row_mask = queries < length
        q = tl.load(q_ptr + queries[:, None] * step + depth, mask=row_mask[:, None], other=0.0)
        grad = tl.load(
            grad_ptr + queries[:, None] * hidden + depth, mask=row_mask[:, None], other=0.0
        )
        # Queries past the end get the probability exp2(-inf) = 0.
        lse = tl.load(lse_ptr + queries, mask=row_mask, other=float("inf"))
        delta = tl.load(delta_ptr + queries, mask=row_mask, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])  # [COLUMNS, ROWS]
        dp = tl.dot(v, tl.trans(grad))
        p_after_dropout = p
        if DROPOUT:
            random = _random(seed_ptr, head, begin + queries[None, :], begin + columns[:, None])
            dp = tl.where(random >= drop_below, dp / keep, 0.0)
            p_after_dropout = tl.where(random >= drop_below, p, 0.0)
        dv = tl.dot(p_after_dropout.to(grad.dtype), grad, dv)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    qkv_grad_ptr += qkv_offset + hidden
    tl.store(
        qkv_grad_ptr + key_offset, (dk * slope).to(qkv_grad_ptr.dtype.element_ty), mask=key_mask
    )
    tl.store(
        qkv_grad_ptr + hidden + key_offset,
        (dv / keep).to(qkv_grad_ptr.dtype.element_ty),
        mask=key_mask,
    )


class Attend(torch.autograd.Function):
    """Forward and backward where nothing is compiled: an operator of torch costs more host time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        outputs = forward(*inputs)
        ctx.mark_non_differentiable(outputs[1])
        _save(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads, run=backward)


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
    """`forward` as an operator that torch can differentiate and compile around."""
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
def _(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, _, heads, width = qkv.shape
    out = qkv.new_empty((tokens, heads, width))
    return out, qkv.new_empty((heads, tokens), dtype=torch.float32)


@_attend_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bounds, order, ctx.longest, seed, ctx.rate = inputs
    ctx.save_for_backward(qkv, *output, bounds, order, seed)


def _backward(
    ctx: Any, grad: Tensor, _: Any, run: Callable[..., Tensor] = _attend_backward
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs, of which only `qkv` has one; `_` is that of lse, never used."""
    qkv, out, lse, bounds, order, seed = ctx.saved_tensors
    qkv_grad = run(grad, qkv, out, lse, bounds, order, ctx.longest, seed, ctx.rate)
    return qkv_grad, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)
