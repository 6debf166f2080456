"""What a layer does between its products while it trains, row by row, as operators of torch.

Each operator does in one pass over memory what would be several: GELU with the float8 scales of its
rows, its gradient with the sum over rows, the residual sum with dropout and LayerNorm, and their
gradient. On CUDA they are the kernels of `model.row_kernels`; the plain functions here define them,
run on other devices, and are what the kernels are tested against.

Operators return every tensor that some caller wants; what was not asked for is empty. torch can
compile around them and record them in CUDA graphs. They have no gradients of their own:
`model.fused_layer` calls them.

Dropout keeps a number if a hash of seed, row and column is large enough (`keeps`), so that the
backward pass computes again what was dropped.

Shapes: T rows (tokens), N columns.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.device import runs_triton

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST = 1e-30  # lower bound of a row's largest number, so that a row of zeros has a scale
WIDEST = 8192  # columns that a program of `row_kernels` holds in registers
DRAWS = 1 << 31  # random numbers for dropout are from 0 to below this


@torch.library.custom_op("packhorse::rounded", mutates_args=())
def rounded(x: Tensor, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x in float8, its rows' scales [T, 1], and its sum over rows in fp32 if asked for."""
    if kernels := _kernels(x):
        return kernels.rounded(x, sums)
    return *to_float8(x), _wide(x).sum(0) if sums else x.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("packhorse::rounded_columns", mutates_args=())
def rounded_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """The transposed x, [N, T], in float8, and its rows' scales [N, 1]."""
    if kernels := _kernels(x):
        return kernels.rounded_columns(x)
    small, scale = to_float8(x.t())
    return small.contiguous(), scale


@torch.library.custom_op("packhorse::gelu", mutates_args=())
def gelu(h: Tensor, float8: bool) -> tuple[Tensor, Tensor]:
    """GELU(h): in float8 with its rows' scales, or in the dtype of h."""
    if kernels := _kernels(h):
        return kernels.gelu(h, float8)
    value = F.gelu(_wide(h))
    return to_float8(value) if float8 else (value.to(h.dtype), h.new_empty(0))


@torch.library.custom_op("packhorse::gelu_gradient", mutates_args=())
def gelu_gradient(
    grad: Tensor, h: Tensor, float8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of h, where `grad` is that of GELU(h); in float8 too, with its rows' scales.

    With float8 also GELU(h), so that it need not be kept; last the gradient's sum over rows.
    """
    if kernels := _kernels(h):
        return kernels.gelu_gradient(grad, h, float8)
    wide = _wide(h)
    below = 0.5 * torch.erfc(-wide * math.sqrt(0.5))
    density = torch.exp(-0.5 * wide.square()) / math.sqrt(2 * math.pi)
    out = _wide(grad) * (below + wide * density)
    small = to_float8(out) if float8 else _nothing(h)
    value = (wide * below).to(h.dtype) if float8 else _no_rows(h)
    return out.to(h.dtype), *small, value, out.sum(0)


@torch.library.custom_op("packhorse::add_norm", mutates_args=())
def add_norm(
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    seed: Tensor,
    rate: float,
    float8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """LayerNorm(x + dropout(branch)), in float8 too, with its rows' scales.

    Last each row's mean and 1/σ, [2, T], for the gradient. `seed` is an int64, which counts only if
    the dropout rate is not 0.
    """
    if kernels := _kernels(x):
        return kernels.add_norm(x, branch, weight, bias, eps, seed, rate, float8)
    total = _wide(x) + dropped(_wide(branch), seed, rate)
    out = F.layer_norm(total, weight.shape, _wide(weight), _wide(bias), eps)
    spread = (total.var(1, correction=0) + eps).rsqrt()
    small = to_float8(out) if float8 else _nothing(x)
    return out.to(x.dtype), *small, torch.stack((total.mean(1), spread))


@torch.library.custom_op("packhorse::add_norm_gradient", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of x, and that of the branch if it was dropped out (else it is the same).

    Then the branch's in float8 with its rows' scales, and in [3, N] the gradients of weight and
    bias and the sum of the branch's over rows. The gradient of the result is `grad` + `second`.
    """
    if kernels := _kernels(x):
        return kernels.add_norm_gradient(
            grad, second, x, branch, weight, moments, seed, rate, float8
        )
    mean, spread = moments[..., None]
    normal = (_wide(x) + dropped(_wide(branch), seed, rate) - mean) * spread
    incoming = _wide(grad) + (0 if second is None else _wide(second))
    scaled = incoming * _wide(weight)
    centered = scaled - scaled.mean(1, keepdim=True)
    out = (centered - normal * (scaled * normal).mean(1, keepdim=True)) * spread
    branch_out = dropped(out, seed, rate)
    small = to_float8(branch_out) if float8 else _nothing(x)
    sums = torch.stack(((incoming * normal).sum(0), incoming.sum(0), branch_out.sum(0)))
    branch_grad = branch_out.to(x.dtype) if rate else _no_rows(x)
    return out.to(x.dtype), branch_grad, *small, sums


def _kernels(x: Tensor) -> Any:
    """`model.row_kernels` if they serve this tensor, else None."""
    if not runs_triton(x.device) or x.shape[1] > WIDEST:
        return None
    return import_module("packhorse.model.row_kernels")


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in e4m3, scaled so that its largest number is e4m3's largest; the scales [T, 1]."""
    largest = x.abs().amax(1, keepdim=True).float().clamp(min=SMALLEST)
    return (x.float() * (LARGEST / largest)).to(E4M3), largest / LARGEST


def dropped(x: Tensor, seed: Tensor, rate: float) -> Tensor:
    """Dropout of x, [T, N], by a seed."""
    if not rate:
        return x
    return torch.where(keeps(seed, x.shape[0], x.shape[1], rate), x / (1 - rate), 0.0)


def keeps(seed: Tensor, tokens: int, width: int, rate: float) -> Tensor:
    """Which of [T, N] numbers dropout keeps: rows and columns are hashed apart, then together."""
    rows, columns = (torch.arange(n, device=seed.device) for n in (tokens, width))
    row_hash = _mix(_mix((seed & 0xFFFFFFFF) ^ 0x9E3779B9) ^ rows)
    column_hash = _mix(_mix((seed >> 32) ^ 0x9E3779B9) ^ columns)
    return _mix(row_hash[:, None] ^ column_hash[None, :]) >> 1 >= round(rate * DRAWS)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of MurmurHash3, of 32 bits in an int64."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0), x.new_empty(0)


def _no_rows(x: Tensor) -> Tensor:
    return x.new_empty((0, x.shape[1]))


def _shaped(x: Tensor, float8: bool) -> tuple[Tensor, Tensor]:
    if not float8:
        return _nothing(x)
    scale = x.new_empty((len(x), 1), dtype=torch.float32)
    return torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format), scale


def _sums(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=_wide(x[:0]).dtype)


@rounded.register_fake
def _(x: Tensor, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *_shaped(x, True), _sums(x, x.shape[1] if sums else 0)


@rounded_columns.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _shaped(x.t(), True)


@gelu.register_fake
def _(h: Tensor, float8: bool) -> tuple[Tensor, Tensor]:
    return _shaped(h, True) if float8 else (torch.empty_like(h), h.new_empty(0))


@gelu_gradient.register_fake
def _(grad: Tensor, h: Tensor, float8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    value = torch.empty_like(h) if float8 else _no_rows(h)
    return torch.empty_like(h), *_shaped(h, float8), value, _sums(h, h.shape[1])


@add_norm.register_fake
def _(
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    seed: Tensor,
    rate: float,
    float8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_shaped(x, float8), _sums(x, 2, len(x))


@add_norm_gradient.register_fake
def _(
    grad: Tensor,
    second: Tensor | None,
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    moments: Tensor,
    seed: Tensor,
    rate: float,
    float8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    other = torch.empty_like(x) if rate else _no_rows(x)
    return torch.empty_like(x), other, *_shaped(x, float8), _sums(x, 3, x.shape[1])
