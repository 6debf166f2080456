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
from functools import partial
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from packhorse.cache import keep_kernels_private
from packhorse.device import current

LOG2_E = 1.4426950408889634
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # Triton's interpreter has no assembler


class Tuning(NamedTuple):
    """How a kernel is cut."""

    rows: int  # queries per block
    columns: int  # keys per block
    warps: int
    stages: int  # of the pipeline that loads blocks
    registers: int | None = None  # at most, a thread: one more program then fits beside others


# By head width; measured on an H200.
FORWARD = {
    32: Tuning(64, 64, 4, 3),
    64: Tuning(64, 64, 4, 3),
    96: Tuning(64, 32, 4, 3),
    128: Tuning(64, 32, 4, 3),
}
QUERY_GRADIENTS = {
    32: Tuning(64, 32, 4, 3),
    64: Tuning(64, 32, 4, 3),
    96: Tuning(64, 32, 4, 2),
    128: Tuning(64, 32, 4, 2),
}
KEY_GRADIENTS = {
    32: Tuning(32, 64, 4, 3, 128),
    64: Tuning(32, 64, 4, 3, 128),
    96: Tuning(32, 64, 4, 3),
    128: Tuning(32, 64, 4, 3),
}
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
    with current(qkv.device):  # layers of a model may lie on several GPUs
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
    # lse and delta of each query, written by the first kernel and read by the second
    pair = lse.new_empty((*lse.shape, 2))
    qkv_grad = torch.empty_like(qkv)
    query_tuning, key_tuning = tunings or (QUERY_GRADIENTS[width], KEY_GRADIENTS[width])
    common = (bounds, order, width**-0.5 * LOG2_E, width**-0.5, tokens, heads * width)
    _launch(_query_gradients, query_tuning, query_tuning[0], longest, qkv, order, seed, rate)(
        grad, qkv, out, lse, pair, qkv_grad, *common
    )
    _launch(_key_gradients, key_tuning, key_tuning[1], longest, qkv, order, seed, rate)(
        grad, qkv, pair, qkv_grad, *common
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
    rows, columns, warps, stages, registers = tuning
    grid = (-(-longest // block), heads, len(order))
    depth = triton.next_power_of_2(width)
    sizes = {"D": width, "DEPTH": depth, "ROWS": rows, "COLUMNS": columns}
    # Without dropout the pointer is never read, but it must be one.
    dropout = {"seed_ptr": order, "drop_below": 0, "keep": 1.0, "DROPOUT": False}
    if seed is not None:
        dropout = {
            "seed_ptr": seed,
            "drop_below": round(rate * DRAWS),
            "keep": 1 - rate,
            "DROPOUT": True,
        }
    keep_kernels_private()
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    return partial(kernel[grid], **sizes, **dropout, **options)


@triton.jit
def power_of_2(x: tl.tensor) -> tl.tensor:
    """2 to the x in one instruction, 0 where that is no normal number; `tl.exp2` takes four."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


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
def _forward_block(
    state: tl.tuple,
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    begin: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    step: tl.tensor,
    seed_ptr: tl.tensor,
    drop_below: tl.tensor,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """The online softmax over one more block of keys."""
    maximum, denominator, acc = state
    keys = start + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    k_target = k_ptr + keys[None, :] * step + depth[:, None]
    v_target = v_ptr + keys[:, None] * step + depth[None, :]
    k_mask, v_mask = (depth < D)[:, None], (depth < D)[None, :]
    if MASKED:
        k_mask &= (keys < length)[None, :]
        v_mask &= (keys < length)[:, None]
    k = tl.load(k_target, mask=k_mask, other=0.0)
    v = tl.load(v_target, mask=v_mask, other=0.0)
    scores = tl.dot(q, k)
    if MASKED:
        scores = tl.where((keys < length)[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    rescale = power_of_2(maximum - new_maximum)
    p = power_of_2(scores * scale - new_maximum[:, None])
    denominator = denominator * rescale + tl.sum(p, 1)
    if DROPOUT:  # after the sum: dropout applies to normalized probabilities
        random = _random(seed_ptr, head, begin + rows[:, None], begin + keys[None, :])
        p = tl.where(random >= drop_below, p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    return new_maximum, denominator, acc


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
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    begin, length = _sequence(bounds_ptr, order_ptr)
    if first >= length:
        return
    rows, depth = first + tl.arange(0, ROWS), tl.arange(0, DEPTH)
    step = 3 * hidden  # from a token's query to the next token's
    q_ptr = qkv_ptr + begin * step + head * D
    k_ptr, v_ptr = q_ptr + hidden, q_ptr + 2 * hidden
    row_mask = rows < length
    mask = row_mask[:, None] & (depth < D)[None, :]
    q = tl.load(q_ptr + rows[:, None] * step + depth[None, :], mask=mask, other=0.0)
    # Online softmax (Milakov and Gimelshein 2018): a running maximum, and sums relative to it.
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DEPTH], tl.float32)
    whole = (length // COLUMNS) * COLUMNS
    for start in range(0, whole, COLUMNS):
        maximum, denominator, acc = _forward_block(
            (maximum, denominator, acc),
            q,
            k_ptr,
            v_ptr,
            start,
            length,
            begin,
            rows,
            head,
            scale,
            step,
            seed_ptr,
            drop_below,
            D,
            DEPTH,
            COLUMNS,
            DROPOUT,
            False,
        )
    if whole < length:
        maximum, denominator, acc = _forward_block(
            (maximum, denominator, acc),
            q,
            k_ptr,
            v_ptr,
            whole,
            length,
            begin,
            rows,
            head,
            scale,
            step,
            seed_ptr,
            drop_below,
            D,
            DEPTH,
            COLUMNS,
            DROPOUT,
            True,
        )
    target = out_ptr + (begin + rows[:, None]) * hidden + head * D + depth[None, :]
    out = acc / (keep * denominator)[:, None]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)
    lse = maximum + tl.log2(denominator)
    tl.store(lse_ptr + head.to(tl.int64) * tokens + begin + rows, lse, mask=row_mask)


@triton.jit
def _query_block(
    dq: tl.tensor,
    q: tl.tensor,
    grad: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    begin: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    step: tl.tensor,
    seed_ptr: tl.tensor,
    drop_below: tl.tensor,
    keep: tl.tensor,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """dQ with the share of one more block of keys."""
    keys = start + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)[None, :]
    offsets = keys[:, None] * step + depth
    mask = depth < D
    if MASKED:
        mask &= (keys < length)[:, None]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    p = power_of_2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if MASKED:
        p = tl.where((keys < length)[None, :], p, 0.0)
    dp = tl.dot(grad, tl.trans(v))
    if DROPOUT:
        random = _random(seed_ptr, head, begin + rows[:, None], begin + keys[None, :])
        dp = tl.where(random >= drop_below, dp / keep, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _query_gradients(
    grad_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    pair_ptr: tl.tensor,
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
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    begin, length = _sequence(bounds_ptr, order_ptr)
    if first >= length:
        return
    rows = first + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)[None, :]
    step = 3 * hidden
    row_mask = rows < length
    mask = row_mask[:, None] & (depth < D)
    out_offset = begin * hidden + head * D + rows[:, None] * hidden + depth  # in [T, H, D]
    qkv_offset = begin * step + head * D  # in [T, 3, H, D]
    q_ptr = qkv_ptr + qkv_offset
    k_ptr, v_ptr = q_ptr + hidden, q_ptr + 2 * hidden
    q = tl.load(q_ptr + rows[:, None] * step + depth, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + out_offset, mask=mask, other=0.0)
    out = tl.load(out_ptr + out_offset, mask=mask, other=0.0)
    row_offset = head.to(tl.int64) * tokens + begin + rows  # in [H, T]
    lse = tl.load(lse_ptr + row_offset, mask=row_mask, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    # For `_key_gradients`, side by side: Triton then copies them to shared memory together.
    pair = tl.join(lse, delta)
    pair_offset = row_offset[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(pair_ptr + pair_offset, pair, mask=row_mask[:, None])
    dq = tl.zeros([ROWS, DEPTH], tl.float32)
    whole = (length // COLUMNS) * COLUMNS
    for start in range(0, whole, COLUMNS):
        dq = _query_block(
            dq,
            q,
            grad,
            lse,
            delta,
            k_ptr,
            v_ptr,
            start,
            length,
            begin,
            rows,
            head,
            scale,
            step,
            seed_ptr,
            drop_below,
            keep,
            D,
            DEPTH,
            COLUMNS,
            DROPOUT,
            False,
        )
    if whole < length:
        dq = _query_block(
            dq,
            q,
            grad,
            lse,
            delta,
            k_ptr,
            v_ptr,
            whole,
            length,
            begin,
            rows,
            head,
            scale,
            step,
            seed_ptr,
            drop_below,
            keep,
            D,
            DEPTH,
            COLUMNS,
            DROPOUT,
            True,
        )
    target = qkv_grad_ptr + qkv_offset + rows[:, None] * step + depth
    tl.store(target, (dq * slope).to(qkv_grad_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _key_block(
    state: tl.tuple,
    k: tl.tensor,
    v: tl.tensor,
    q_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    begin: tl.tensor,
    columns: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    step: tl.tensor,
    hidden: tl.tensor,
    seed_ptr: tl.tensor,
    drop_below: tl.tensor,
    keep: tl.tensor,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """dK and dV with the share of one more block of queries.

    Scores are computed transposed, [COLUMNS, ROWS], so that dK and dV need no transposed p.
    """
    dk, dv = state
    queries = start + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)[None, :]
    q_offsets = queries[:, None] * step + depth
    grad_offsets = queries[:, None] * hidden + depth
    mask = depth < D
    pair = pair_ptr + queries[:, None] * 2 + tl.arange(0, 2)[None, :]
    if MASKED:
        # Queries past the end and their gradients are 0, and so is what they add.
        mask &= (queries < length)[:, None]
        pair = tl.load(pair, mask=(queries < length)[:, None], other=0.0)
    else:
        pair = tl.load(pair)
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)
    grad = tl.load(grad_ptr + grad_offsets, mask=mask, other=0.0)
    lse, delta = tl.split(pair)
    p = power_of_2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])  # [COLUMNS, ROWS]
    dp = tl.dot(v, tl.trans(grad))
    p_after_dropout = p
    if DROPOUT:
        random = _random(seed_ptr, head, begin + queries[None, :], begin + columns[:, None])
        dp = tl.where(random >= drop_below, dp / keep, 0.0)
        p_after_dropout = tl.where(random >= drop_below, p, 0.0)
    dv = tl.dot(p_after_dropout.to(grad.dtype), grad, dv)
    ds = p * (dp - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit
def _key_gradients(
    grad_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    pair_ptr: tl.tensor,
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
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROPOUT: tl.constexpr,
) -> None:
    first, head = tl.program_id(0) * COLUMNS, tl.program_id(1)
    begin, length = _sequence(bounds_ptr, order_ptr)
    if first >= length:
        return
    columns = first + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)[None, :]
    step = 3 * hidden
    mask = (columns < length)[:, None] & (depth < D)
    qkv_offset = begin * step + head * D  # in [T, 3, H, D]
    q_ptr, grad_ptr = qkv_ptr + qkv_offset, grad_ptr + begin * hidden + head * D
    key_offset = columns[:, None] * step + depth
    k = tl.load(q_ptr + hidden + key_offset, mask=mask, other=0.0)
    v = tl.load(q_ptr + 2 * hidden + key_offset, mask=mask, other=0.0)
    pair_ptr += 2 * (head.to(tl.int64) * tokens + begin)
    dk = tl.zeros([COLUMNS, DEPTH], tl.float32)
    dv = tl.zeros([COLUMNS, DEPTH], tl.float32)
    whole = (length // ROWS) * ROWS
    for start in range(0, whole, ROWS):
        dk, dv = _key_block(
            (dk, dv),
            k,
            v,
            q_ptr,
            grad_ptr,
            pair_ptr,
            start,
            length,
            begin,
            columns,
            head,
            scale,
            step,
            hidden,
            seed_ptr,
            drop_below,
            keep,
            D,
            DEPTH,
            ROWS,
            DROPOUT,
            False,
        )
    if whole < length:
        dk, dv = _key_block(
            (dk, dv),
            k,
            v,
            q_ptr,
            grad_ptr,
            pair_ptr,
            whole,
            length,
            begin,
            columns,
            head,
            scale,
            step,
            hidden,
            seed_ptr,
            drop_below,
            keep,
            D,
            DEPTH,
            ROWS,
            DROPOUT,
            True,
        )
    qkv_grad_ptr += qkv_offset + hidden
    tl.store(qkv_grad_ptr + key_offset, (dk * slope).to(qkv_grad_ptr.dtype.element_ty), mask=mask)
    tl.store(
        qkv_grad_ptr + hidden + key_offset,
        (dv / keep).to(qkv_grad_ptr.dtype.element_ty),
        mask=mask,
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
