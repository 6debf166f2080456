"""What lies between the float8 products of a BERT layer, in Triton: each reads its input once and
writes what the next product reads.

`cast` is an activation and the rounding to float8; `add_norm_cast` a residual sum and its
LayerNorm, written in bf16 for the next sum and in float8 for the next product. Both are bound by
the bytes that they move. GELU by torch's erf is not: it takes twice as long as its bytes. So
GELU(x) is max(x, 0) - |x| Φ(-|x|) with Φ as 2 to a polynomial (as in product.c), one instruction
for the exponential; it differs from the exact value by 0.5 % of |x| Φ(-|x|), where rounding to
float8 may take 6 %.

NaN stays NaN in all of them; numbers beyond the range of float8 become its largest, because that is
how the processor converts to float8.

Shapes: T tokens, E hidden width, F feed-forward width.
"""

# Functions that Triton compiles cannot be typed: their arguments are pointers and tiles of its own.
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from math import log2
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from packhorse.cache import keep_kernels_private

E4M3 = torch.float8_e4m3fn
ACTIVATIONS = {None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
BLOCK = 4096  # numbers that a program of `cast` takes
# log2(2 Φ(-t)) / t as a polynomial in t, fitted to 0..4 so that the largest relative error of Φ is
# least; its last coefficient is negative, so that beyond 4 it goes to 0 as Φ does.
C0 = tl.constexpr(-1.1143146852112478)
C1 = tl.constexpr(-0.5241292896765565)
C2 = tl.constexpr(-0.01733654589309025)


def cast(
    x: Tensor, steps: float, activation: str | None = None, block: int = BLOCK, warps: int = 8
) -> Tensor:
    """x [T, F] in float8 that is `steps` times as large, after the activation if there is one."""
    keep_kernels_private()
    x = x.contiguous()
    out = torch.empty_like(x, dtype=E4M3)
    grid = (-(-x.numel() // block),)
    kernel: Any = _cast
    kernel[grid](
        x, out, steps, log2(steps), x.numel(), ACTIVATIONS[activation], block, num_warps=warps
    )  # fmt: skip
    return out


def add_norm_cast(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    steps: float,
    rows: int = 1,
    warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """LayerNorm of x + residual [T, E], in their dtype and in float8 `steps` times as large."""
    keep_kernels_private()
    x, residual = x.contiguous(), residual.contiguous()
    tokens, width = x.shape
    out = torch.empty_like(x)
    rounded = torch.empty_like(x, dtype=E4M3)
    columns = triton.next_power_of_2(width)
    grid = (-(-tokens // rows),)
    kernel: Any = _add_norm_cast
    kernel[grid](
        x, residual, weight, bias, out, rounded, eps, steps, tokens, width, rows, columns,
        num_warps=warps,
    )  # fmt: skip
    return out, rounded


@triton.jit
def activated(
    x: tl.tensor, steps: tl.tensor, log_steps: tl.tensor, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """`steps` times the activation of x; `log_steps` is log2(steps)."""
    if ACTIVATION == 0:
        return x * steps
    t = tl.abs(x)
    positive = (x + t) * (0.5 * steps)  # of max(x, 0), but NaN for NaN
    if ACTIVATION == 3:
        return positive
    if ACTIVATION == 2:  # x / (1 + exp(-2 √(2/π) (x + 0.044715 x³))), of -|x|
        z = tl.exp2(t * (-2.302208198 - 0.1029432397 * t * t))
        return positive - steps * t * z / (1.0 + z)
    return positive - t * tl.exp2(t * (C0 + t * (C1 + t * C2)) + (log_steps - 1.0))


@triton.jit
def _cast(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    steps: tl.tensor,
    log_steps: tl.tensor,
    total: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0).to(tl.float32)
    y = activated(x, steps, log_steps, ACTIVATION)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=at < total)


@triton.jit
def _add_norm_cast(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rounded_ptr: tl.tensor,
    eps: tl.tensor,
    steps: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    mask = (rows < tokens)[:, None] & inside[None, :]
    at = rows[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / width
    centered = tl.where(mask, x - mean[:, None], 0.0)
    deviation = tl.sqrt(tl.sum(centered * centered, 1) / width + eps)
    y = centered * (1.0 / deviation)[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(rounded_ptr + at, (y * steps).to(rounded_ptr.dtype.element_ty), mask=mask)
