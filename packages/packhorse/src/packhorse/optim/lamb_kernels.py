"""LAMB for one large tensor on CUDA in two passes over memory, in Triton.

The first pass updates m and v and adds up ‖w‖² and ‖d‖²; the second computes the direction d again
from m and v, which takes less time than storing it, and moves the weights, and with them the copy
in half precision that the model computes with. That is 42 bytes a number where torch's fused Adam
and what must stand around it (`lamb.update_together`) take 62. Sums are added in a fixed order.

`lamb.update_one` is the reference. Tensors that a parameter stacks have programs and sums of their
own.
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

BLOCK = 2048  # numbers at once in a program
PROGRAMS = 1024  # at most, a tensor; their sums are read by every program of the second pass
WARPS = 8


def update(
    parameter: Tensor,
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    stacked: int,
    step: int,
    group: dict[str, Any],
) -> None:
    """`lamb.update_one` in place, and `parameter` too if `weight` is its master copy."""
    size = weight.numel() // stacked
    programs = min(PROGRAMS, triton.cdiv(size, BLOCK))
    sums = torch.empty((stacked, 2, PROGRAMS), dtype=torch.float32, device=weight.device)
    beta1, beta2 = group["betas"]
    corrected = group["bias_correction"]
    minimum, maximum = group["clamp"] or (0.0, float("inf"))
    most = group["max_weight_norm"]
    most = float("inf") if most is None else most
    direction = (
        group["eps"],
        group["weight_decay"],
        1 / (1 - beta1**step) if corrected else 1.0,
        1 / (1 - beta2**step) if corrected else 1.0,
    )
    direction = tuple(map(float, direction))  # an integer would be compiled in
    grid = (programs, stacked)
    sizes = {"BLOCK": BLOCK, "PROGRAMS": PROGRAMS, "num_warps": WARPS}
    keep_kernels_private()
    betas = tuple(map(float, (beta1, 1 - beta1, beta2, 1 - beta2)))
    moments: Any = _moments
    move: Any = _move
    moments[grid](weight, gradient, m, v, sums, size, *betas, *direction, **sizes)
    limits = tuple(map(float, (group["lr"], minimum, maximum, most)))
    copies = parameter is not weight
    move[grid](weight, m, v, sums, parameter, size, *limits, *direction, COPIES=copies, **sizes)


@triton.jit
def _direction(
    weight: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    m_factor: tl.tensor,  # of bias correction
    v_factor: tl.tensor,
) -> tl.tensor:
    return m * m_factor / (tl.sqrt_rn(v * v_factor) + eps) + decay * weight


@triton.jit
def _moments(
    weight_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    m_ptr: tl.tensor,
    v_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    size: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,  # 1 - beta1
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    m_factor: tl.tensor,
    v_factor: tl.tensor,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> None:
    begin = tl.program_id(1).to(tl.int64) * size
    weight_sum = tl.zeros([BLOCK], tl.float32)
    direction_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        weight = tl.load(weight_ptr + begin + offsets, mask=mask, other=0.0)
        gradient = tl.load(gradient_ptr + begin + offsets, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(m_ptr + begin + offsets, mask=mask, other=0.0) * beta1 + gradient * rest1
        v = tl.load(v_ptr + begin + offsets, mask=mask, other=0.0) * beta2
        v += gradient * gradient * rest2
        tl.store(m_ptr + begin + offsets, m, mask=mask)
        tl.store(v_ptr + begin + offsets, v, mask=mask)
        direction = _direction(weight, m, v, eps, decay, m_factor, v_factor)
        weight_sum += weight * weight
        direction_sum += tl.where(mask, direction * direction, 0.0)
    sums_ptr += tl.program_id(1) * 2 * PROGRAMS + tl.program_id(0)
    tl.store(sums_ptr, tl.sum(weight_sum))
    tl.store(sums_ptr + PROGRAMS, tl.sum(direction_sum))


@triton.jit
def _move(
    weight_ptr: tl.tensor,
    m_ptr: tl.tensor,
    v_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    copy_ptr: tl.tensor,
    size: tl.tensor,
    rate: tl.tensor,
    minimum: tl.tensor,
    maximum: tl.tensor,
    most: tl.tensor,  # of the weight's norm
    eps: tl.tensor,
    decay: tl.tensor,
    m_factor: tl.tensor,
    v_factor: tl.tensor,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> None:
    parts = tl.arange(0, PROGRAMS)
    written = parts < tl.num_programs(0)
    sums_ptr += tl.program_id(1) * 2 * PROGRAMS
    weight_norm = tl.sqrt_rn(tl.sum(tl.load(sums_ptr + parts, mask=written, other=0.0)))
    norm = tl.sqrt_rn(tl.sum(tl.load(sums_ptr + PROGRAMS + parts, mask=written, other=0.0)))
    ratio = tl.minimum(weight_norm, most) / norm
    ratio = tl.minimum(tl.maximum(ratio, minimum), maximum)
    factor = rate * tl.where((weight_norm > 0) & (norm > 0), ratio, 1.0)
    begin = tl.program_id(1).to(tl.int64) * size
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        weight = tl.load(weight_ptr + begin + offsets, mask=mask, other=0.0)
        m = tl.load(m_ptr + begin + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + begin + offsets, mask=mask, other=0.0)
        weight -= factor * _direction(weight, m, v, eps, decay, m_factor, v_factor)
        tl.store(weight_ptr + begin + offsets, weight, mask=mask)
        if COPIES:
            tl.store(copy_ptr + begin + offsets, weight.to(copy_ptr.dtype.element_ty), mask=mask)
