"""Attention's forward pass for inference in float8: reads bf16, writes float8 for the next product.

It is the forward pass of `triton_kernels` without dropout and denominators. Programs are one per
block of queries that exists, by a list which the plan makes once a batch (`blocks`): a grid as if
all sequences were the longest would mostly start programs that return at once. Only the last block
of keys is masked.

Shapes: T tokens, S sequences, H heads, D head width, B blocks of queries.
"""

# Functions that Triton compiles cannot be typed: their arguments are pointers and tiles of its own.
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from packhorse.cache import keep_kernels_private

E4M3 = torch.float8_e4m3fn
LOG2_E = 1.4426950408889634
Tuning = tuple[int, int, int, int]  # queries per block, keys per block, warps, pipeline stages
FORWARD: dict[int, Tuning] = {32: (64, 64, 4, 3), 64: (64, 32, 4, 3)}


def blocks(bounds: Tensor, order: Tensor, tokens: int, rows: int) -> Tensor:
    """Every block of `rows` queries, longest sequences first: [B, 4] int32.

    A block is the first token of its sequence, the sequence's length, and its first query there;
    B is as many as there can be, and those that there are not have length 0.
    """
    begins, lengths = bounds[:-1][order], bounds.diff()[order]
    ends = ((lengths + rows - 1) // rows).cumsum(0)
    most = tokens // rows + len(order)
    numbers = torch.arange(most, device=bounds.device)
    sequence = torch.searchsorted(ends, numbers, right=True).clamp(max=len(order) - 1)
    before = torch.where(sequence > 0, ends[sequence - 1], 0)
    length = torch.where(numbers < ends[-1], lengths[sequence], 0)
    first = (numbers - before) * rows
    columns = (begins[sequence], length, first, length)
    return torch.stack([column.int() for column in columns], 1).contiguous()


def forward(
    qkv: Tensor,
    listed: Tensor,
    steps: float,
    tuning: Tuning | None = None,
) -> Tensor:
    """Attention over qkv [T, 3, H, D]: [T, H, D] in float8, `steps` times as large.

    `listed` are the `blocks` for the number of rows that the tuning has.
    """
    keep_kernels_private()
    qkv = qkv.contiguous()
    tokens, _, heads, width = qkv.shape
    rows, columns, warps, stages = tuning or FORWARD[width]
    out = torch.empty((tokens, heads, width), dtype=E4M3, device=qkv.device)
    kernel: Any = _forward
    kernel[(heads, len(listed))](
        qkv, out, listed, width**-0.5 * LOG2_E, steps, heads * width,
        width, rows, columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _forward(
    qkv_ptr: tl.tensor,
    out_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    scale: tl.tensor,
    steps: tl.tensor,
    hidden: tl.tensor,  # H x D
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    head, block = tl.program_id(0), tl.program_id(1)
    length = tl.load(blocks_ptr + 4 * block + 1)
    if length == 0:
        return
    begin = tl.load(blocks_ptr + 4 * block).to(tl.int64)
    rows = tl.load(blocks_ptr + 4 * block + 2) + tl.arange(0, ROWS)
    columns, depth = tl.arange(0, COLUMNS), tl.arange(0, D)
    step = 3 * hidden  # from a token's query to the next token's
    q_ptr = qkv_ptr + begin * step + head * D
    k_ptr, v_ptr = q_ptr + hidden, q_ptr + 2 * hidden
    row_mask = rows < length
    q = tl.load(q_ptr + rows[:, None] * step + depth[None, :], mask=row_mask[:, None], other=0.0)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    whole = length // COLUMNS * COLUMNS
    for start in range(0, whole, COLUMNS):
        keys = start + columns
        k = tl.load(k_ptr + keys[None, :] * step + depth[:, None])
        v = tl.load(v_ptr + keys[:, None] * step + depth[None, :])
        scores = tl.dot(q, k)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        rescale = tl.exp2(maximum - new_maximum)
        p = tl.exp2(scores * scale - new_maximum[:, None])
        denominator = denominator * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        maximum = new_maximum
    if whole < length:
        keys = whole + columns
        key_mask = keys < length
        k = tl.load(
            k_ptr + keys[None, :] * step + depth[:, None], mask=key_mask[None, :], other=0.0
        )
        v = tl.load(
            v_ptr + keys[:, None] * step + depth[None, :], mask=key_mask[:, None], other=0.0
        )
        scores = tl.where(key_mask[None, :], tl.dot(q, k), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        rescale = tl.exp2(maximum - new_maximum)
        p = tl.exp2(scores * scale - new_maximum[:, None])
        denominator = denominator * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    rounded = acc * (steps / denominator)[:, None]
    target = out_ptr + (begin + rows[:, None]) * hidden + head * D + depth[None, :]
    tl.store(target, rounded.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])
