"""Triton kernels for what a layer does between its products, each in one pass over memory.

GELU and its gradient, the residual sum with dropout and LayerNorm and their gradient, and rounding
to float8. A row stays in registers, so that its float8 scale (a maximum over the row) is known
before the row is written, and sums over rows (the gradients of biases and of LayerNorm's
parameters) are added up on the way: every program takes each P-th group of rows and writes its own
sums, [P, N], which are added in a fixed order. Nothing is atomic, so results are the same to the
bit in every run.

Whether dropout drops a number is a hash of a seed, its row and its column, as attention does it
(`attention.triton_kernels`): the backward pass computes it again.

The plain versions are in `model.rows`, which also chooses between them.

Shapes: T rows (tokens), N columns; P programs.
"""

# Functions that Triton compiles cannot be typed: their arguments are pointers and tiles of its own.
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from packhorse.attention.triton_kernels import INTERPRETED, mix, power_of_2
from packhorse.cache import keep_kernels_private

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LARGEST_E4M3 = tl.constexpr(LARGEST)
SMALLEST = tl.constexpr(1e-30)  # as `model.float8`


class RowTuning(NamedTuple):
    """How a kernel is cut."""

    rows: int  # at once in a program
    warps: int
    stages: int  # of the pipeline that loads rows
    programs: int  # per multiprocessor, at most


# Measured on an H200 with 65,536 rows; one program a row where nothing is summed.
ROUND = RowTuning(1, 2, 1, 500)
ROUND_AND_SUM = RowTuning(1, 4, 3, 4)
GELU = RowTuning(1, 4, 1, 500)
GELU_GRADIENT = RowTuning(1, 8, 3, 2)
ADD_NORM = RowTuning(1, 1, 3, 24)
ADD_NORM_GRADIENT = RowTuning(1, 4, 3, 4)
TILE = 64  # rows and columns of a tile that is transposed
STRIP = 256  # rows of a column whose largest number a program finds


def rounded(
    x: Tensor, sums: bool, tuning: RowTuning | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x in float8, scales [T, 1], and the sum over rows in fp32."""
    x = x.contiguous()
    out, scale = _float8_like(x)
    tuning = tuning or (ROUND_AND_SUM if sums else ROUND)
    programs, launch = _launch(_rounded, tuning, x)
    parts = _sums(x, programs if sums else 0)
    launch(x, out, scale, parts, len(x), SUMS=sums)
    return out, scale, parts.sum(0) if sums else parts.new_empty(0)


def rounded_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """`rounded` of the transposed matrix, [N, T], without a transposed copy: for weights."""
    x = x.contiguous()
    tokens, width = x.shape
    out = torch.empty((width, tokens), dtype=E4M3, device=x.device)
    scale = torch.empty((width, 1), dtype=torch.float32, device=x.device)
    largest = torch.zeros_like(scale)  # a maximum does not depend on the order
    grid = triton.cdiv(width, TILE), triton.cdiv(tokens, STRIP)
    keep_kernels_private()
    column_maxima: Any = _column_maxima
    column_maxima[grid](x, largest, tokens, width, TILE, STRIP, num_warps=8)
    transposed: Any = _transposed
    grid = triton.cdiv(width, TILE), triton.cdiv(tokens, TILE)
    transposed[grid](x, largest, out, scale, tokens, width, TILE, num_warps=4)
    return out, scale


def gelu(h: Tensor, float8: bool, tuning: RowTuning = GELU) -> tuple[Tensor, Tensor]:
    """GELU(h) in h's dtype, or in float8 with scales."""
    h = h.contiguous()
    out, scale = _float8_like(h) if float8 else (torch.empty_like(h), _none(h))
    _, launch = _launch(_gelu, tuning, h)
    launch(h, out, scale, len(h), FLOAT8=float8)
    return out, scale


def gelu_gradient(
    grad: Tensor, h: Tensor, float8: bool, tuning: RowTuning = GELU_GRADIENT
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of h; in float8 also that, its scales, and GELU(h) again; its sum over rows."""
    h, grad = h.contiguous(), grad.contiguous()
    out = torch.empty_like(h)
    small, scale = _float8_like(h) if float8 else (_none(h), _none(h))
    value = torch.empty_like(h) if float8 else h.new_empty((0, h.shape[1]))
    programs, launch = _launch(_gelu_gradient, tuning, h)
    parts = _sums(h, programs)
    launch(grad, h, out, small, scale, value, parts, len(h), FLOAT8=float8)
    return out, small, scale, value, parts.sum(0)


def add_norm(
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    seed: Tensor,
    rate: float,
    float8: bool,
    tuning: RowTuning = ADD_NORM,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm(x + dropout(branch)); in float8 also that with scales; mean and 1/σ, [2, T]."""
    x, branch = x.contiguous(), branch.contiguous()
    out = torch.empty_like(x)
    small, scale = _float8_like(x) if float8 else (_none(x), _none(x))
    moments = torch.empty((2, len(x)), dtype=torch.float32, device=x.device)
    _, launch = _launch(_add_norm, tuning, x)
    sizes = {"FLOAT8": float8, **_dropout(rate)}
    launch(x, branch, weight, bias, out, small, scale, moments, seed, eps, len(x), **sizes)
    return out, small, scale, moments


def add_norm_gradient(
    grad: Tensor,
    second: Tensor | None,
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    moments: Tensor,
    seed: Tensor,
    rate: float,
    float8: bool,
    tuning: RowTuning = ADD_NORM_GRADIENT,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x and, if dropped out, of the branch; the latter in float8 with scales.

    The gradient of the result is `grad` + `second`. Last the gradients of weight and bias and the
    sum of the branch's over rows, [3, N] in fp32.
    """
    x, branch, grad = x.contiguous(), branch.contiguous(), grad.contiguous()
    second = None if second is None else second.contiguous()
    out = torch.empty_like(x)
    dropped = torch.empty_like(x) if rate else x.new_empty((0, x.shape[1]))
    small, scale = _float8_like(x) if float8 else (_none(x), _none(x))
    programs, launch = _launch(_add_norm_gradient, tuning, x)
    parts = _sums(x, programs, 3)
    sizes = {"FLOAT8": float8, "TWO": second is not None, **_dropout(rate)}
    tensors = (grad, grad if second is None else second, x, branch, weight, moments, seed)
    launch(*tensors, out, dropped, small, scale, parts, len(x), **sizes)
    return out, dropped, small, scale, parts.sum(0)


def _float8_like(x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for x in float8 and for the scales of its rows."""
    scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    return torch.empty_like(x, dtype=E4M3), scale


def _none(x: Tensor) -> Tensor:
    return x.new_empty(0)


def _sums(x: Tensor, programs: int, count: int = 1) -> Tensor:
    shape = (programs, count, x.shape[1]) if count > 1 else (programs, x.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _dropout(rate: float) -> dict[str, Any]:
    # Python's numbers, so that a rate compiles once; it does not change while a model trains.
    return {"DROP_BELOW": round(rate * (1 << 31)), "KEEP": 1 - rate}


def _launch(kernel: Any, tuning: RowTuning, x: Tensor) -> tuple[int, Any]:
    """The number of programs, and the kernel to be called with the rest of its arguments."""
    tokens, width = x.shape
    programs = max(1, min(-(-tokens // tuning.rows), tuning.programs * _processors(x.device)))
    sizes = {
        "N": width,
        "BLOCK": triton.next_power_of_2(width),
        "ROWS": tuning.rows,
        "STAGES": tuning.stages,
    }
    keep_kernels_private()

    def launch(*arguments: Any, **more: Any) -> None:
        kernel[(programs,)](*arguments, **sizes, **more, num_warps=tuning.warps)

    return programs, launch


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # in Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _reciprocal(x: tl.tensor) -> tl.tensor:
    """1/x in one instruction, for normal numbers; Triton's division takes six."""
    if INTERPRETED:  # no assembler there
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _tail(size: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """1 − Φ(size) of the normal distribution, to 1e-7, and exp(−size²/2); `size` is not negative.

    Abramowitz and Stegun's 7.1.26: its exponential is the one that the gradient needs anyway, and a
    small tail keeps its digits. Constants: p/√2, −log2(e)/2, and halves of a1 to a5.
    """
    t = _reciprocal(1.0 + 0.23164189 * size)
    power = power_of_2(size * size * -0.7213475204444817)
    series = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    return power * t * (0.127414796 + t * (-0.142248368 + t * series)), power


@triton.jit
def _gelu_of(h: tl.tensor) -> tl.tensor:
    """h·Φ(h), which is max(h, 0) − |h|·(1 − Φ(|h|))."""
    size = tl.abs(h)
    tail, _ = _tail(size)
    return tl.maximum(h, 0.0) - size * tail


@triton.jit
def _store_float8(
    x: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    row_mask: tl.tensor,
) -> None:
    """Round rows so that each one's largest value is float8's largest; NaN stays NaN."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST)
    tl.store(scale_ptr + rows, largest / LARGEST_E4M3, mask=row_mask)
    factor = LARGEST_E4M3 / largest
    tl.store(out_ptr + offsets, (x * factor[:, None]).to(tl.float8e4nv), mask=mask)


@triton.jit
def _kept(seed_ptr: tl.tensor, rows: tl.tensor, column_hash: tl.tensor, drop_below: tl.constexpr):
    """Which numbers dropout keeps; rows and columns are hashed apart, by half a seed each."""
    seed = tl.load(seed_ptr)
    row_hash = mix(mix(seed.to(tl.uint32) ^ 0x9E3779B9) ^ rows.to(tl.uint32))
    random = mix(row_hash[:, None] ^ column_hash[None, :])
    return (random >> 1).to(tl.int32) >= drop_below


@triton.jit
def _column_hash(seed_ptr: tl.tensor, columns: tl.tensor) -> tl.tensor:
    seed = tl.load(seed_ptr)
    return mix(mix((seed >> 32).to(tl.uint32) ^ 0x9E3779B9) ^ columns.to(tl.uint32))


@triton.jit
def _rounded(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tokens: tl.tensor,
    SUMS: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, tokens, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        mask = (rows < tokens)[:, None] & (columns < N)[None, :]
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        _store_float8(x, out_ptr, scale_ptr, rows, offsets, mask, rows < tokens)
        if SUMS:
            total += x
    if SUMS:
        target = sums_ptr + tl.program_id(0) * N + columns
        tl.store(target, tl.sum(total, 0), mask=columns < N)


@triton.jit
def _column_maxima(
    x_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    mask = (rows < tokens)[:, None] & (columns < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_max(largest_ptr + columns, tl.max(tl.abs(x), 0), mask=columns < width)


@triton.jit
def _transposed(
    x_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (rows < tokens)[:, None] & (columns < width)[None, :]
    offsets = rows.to(tl.int64)[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    largest = tl.load(largest_ptr + columns, mask=columns < width, other=0.0)
    largest = tl.maximum(largest, SMALLEST)
    small = (x * (LARGEST_E4M3 / largest[None, :])).to(tl.float8e4nv)
    target = columns.to(tl.int64)[:, None] * tokens + rows[None, :]
    tl.store(out_ptr + target, tl.trans(small), mask=tl.trans(mask))
    tl.store(scale_ptr + columns, largest / LARGEST_E4M3, mask=columns < width)


@triton.jit
def _gelu(
    h_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    tokens: tl.tensor,
    FLOAT8: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, tokens, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        mask = (rows < tokens)[:, None] & (columns < N)[None, :]
        h = tl.load(h_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        value = _gelu_of(h)
        if FLOAT8:
            _store_float8(value, out_ptr, scale_ptr, rows, offsets, mask, rows < tokens)
        else:
            tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_gradient(
    grad_ptr: tl.tensor,
    h_ptr: tl.tensor,
    out_ptr: tl.tensor,
    small_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    value_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tokens: tl.tensor,
    FLOAT8: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, tokens, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        mask = (rows < tokens)[:, None] & (columns < N)[None, :]
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        size = tl.abs(h)
        tail, power = _tail(size)
        slope = tail - 0.3989422804014327 * size * power  # of GELU at −|h|
        out = grad * tl.where(h < 0, slope, 1.0 - slope)
        total += out
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
        if FLOAT8:
            value = tl.maximum(h, 0.0) - size * tail
            tl.store(value_ptr + offsets, value.to(value_ptr.dtype.element_ty), mask=mask)
            _store_float8(out, small_ptr, scale_ptr, rows, offsets, mask, rows < tokens)
    tl.store(sums_ptr + tl.program_id(0) * N + columns, tl.sum(total, 0), mask=columns < N)


@triton.jit
def _add_norm(
    x_ptr: tl.tensor,
    branch_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    small_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    moments_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    eps: tl.tensor,
    tokens: tl.tensor,
    FLOAT8: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    KEEP: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    column_mask = columns < N
    weight = tl.load(weight_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    column_hash = _column_hash(seed_ptr, columns)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, tokens, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < tokens
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if DROP_BELOW > 0:
            kept = _kept(seed_ptr, rows, column_hash, DROP_BELOW)
            branch = tl.where(kept, branch * (1 / KEEP), 0.0)
        x += branch
        mean = tl.sum(x, 1) / N
        centered = tl.where(column_mask[None, :], x - mean[:, None], 0.0)
        spread = tl.rsqrt(tl.sum(centered * centered, 1) / N + eps)
        out = centered * spread[:, None] * weight[None, :] + bias[None, :]
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(moments_ptr + rows, mean, mask=row_mask)
        tl.store(moments_ptr + tokens + rows, spread, mask=row_mask)
        if FLOAT8:
            _store_float8(out, small_ptr, scale_ptr, rows, offsets, mask, row_mask)


@triton.jit
def _add_norm_gradient(
    grad_ptr: tl.tensor,
    second_ptr: tl.tensor,
    x_ptr: tl.tensor,
    branch_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    moments_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    out_ptr: tl.tensor,
    dropped_ptr: tl.tensor,
    small_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tokens: tl.tensor,
    FLOAT8: tl.constexpr,
    TWO: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    KEEP: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    column_mask = columns < N
    weight = tl.load(weight_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    column_hash = _column_hash(seed_ptr, columns)
    weight_grad = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_grad = tl.zeros([ROWS, BLOCK], tl.float32)
    branch_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, tokens, step, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < tokens
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(second_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(moments_ptr + rows, mask=row_mask, other=0.0)
        spread = tl.load(moments_ptr + tokens + rows, mask=row_mask, other=0.0)
        kept = mask
        if DROP_BELOW > 0:
            kept = _kept(seed_ptr, rows, column_hash, DROP_BELOW)
            branch = tl.where(kept, branch * (1 / KEEP), 0.0)
        normal = (x + branch - mean[:, None]) * spread[:, None]
        weight_grad += grad * normal
        bias_grad += grad
        grad *= weight[None, :]
        along = tl.sum(grad * normal, 1) / N
        average = tl.sum(grad, 1) / N
        out = (grad - average[:, None] - normal * along[:, None]) * spread[:, None]
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
        if DROP_BELOW > 0:
            out = tl.where(kept, out * (1 / KEEP), 0.0)
            tl.store(dropped_ptr + offsets, out.to(dropped_ptr.dtype.element_ty), mask=mask)
        branch_sum += tl.where(mask, out, 0.0)
        if FLOAT8:
            out = tl.where(mask, out, 0.0)
            _store_float8(out, small_ptr, scale_ptr, rows, offsets, mask, row_mask)
    target = sums_ptr + tl.program_id(0) * 3 * N + columns
    tl.store(target, tl.sum(weight_grad, 0), mask=column_mask)
    tl.store(target + N, tl.sum(bias_grad, 0), mask=column_mask)
    tl.store(target + 2 * N, tl.sum(branch_sum, 0), mask=column_mask)
