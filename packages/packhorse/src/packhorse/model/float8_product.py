"""A float8 product with bias, activation and the rounding of its result in one kernel, in Triton.

The feed-forward layer's first product is four times as wide as its input. By `torch._scaled_mm` it
is written in bf16 and read again for GELU, and that takes a third as long as the product itself.
Here the activation is computed while a tile of the result is in registers. Programs are persistent,
one for each multiprocessor: a program takes tile after tile, and the copies of the next tile's
operands (by the tensor memory accelerator of Hopper) run while it computes an activation. The
product alone is slower than cuBLAS's by a tenth, so that it pays only for what it saves.

Shapes: T tokens; N outputs and K inputs of the product.
"""

# Functions that Triton compiles cannot be typed: their arguments are pointers and tiles of its own.
# pyright: reportUnknownParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false

from __future__ import annotations

from functools import cache
from math import log2
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.tools.tensor_descriptor import (  # pyright: ignore[reportMissingImports]
    TensorDescriptor,
)

from packhorse.cache import keep_kernels_private
from packhorse.model.float8_kernels import ACTIVATIONS, E4M3, activated


class Tiling(NamedTuple):
    """Sizes of a tile of the result, [rows, columns], and of a step along K."""

    rows: int = 128
    columns: int = 256
    depth: int = 128
    warps: int = 8
    stages: int = 3
    group: int = 8  # rows of tiles that are computed one after another, so that weights stay in L2
    flatten: bool = True
    programs: int = 1  # for each multiprocessor


# Measured on an H200: the second where the first has fewer tiles than there are multiprocessors.
LARGE = Tiling()
SMALL = Tiling(columns=128, warps=4, programs=2)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: float,
    steps: float,
    activation: str | None,
    tiling: Tiling | None = None,
) -> Tensor:
    """The activation of scale · x·Wᵀ + b, [T, N], in float8 that is `steps` times as large.

    x [T, K] and weight [N, K] are float8, `scale` is the product of their scales.
    """
    keep_kernels_private()
    tokens, inputs = x.shape
    outputs = len(weight)
    out = torch.empty(tokens, outputs, dtype=E4M3, device=x.device)
    processors = _multiprocessors(x.device)
    if tiling is None:
        tiling = LARGE if _tiles(LARGE, tokens, outputs) > processors else SMALL
    rows, columns, depth, warps, stages, group, flatten, programs = tiling
    programs = min(processors * programs, _tiles(tiling, tokens, outputs))
    kernel: Any = _product
    kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [rows, depth]),
        TensorDescriptor.from_tensor(weight, [columns, depth]),
        TensorDescriptor.from_tensor(out, [rows, columns]),
        bias, scale, steps, log2(steps), tokens, outputs, inputs,
        rows, columns, depth, group, flatten, ACTIVATIONS[activation],
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _tiles(tiling: Tiling, tokens: int, outputs: int) -> int:
    return -(-tokens // tiling.rows) * -(-outputs // tiling.columns)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _product(
    x_tiles: tl.tensor,
    weight_tiles: tl.tensor,
    out_tiles: tl.tensor,
    bias_ptr: tl.tensor,
    scale: tl.tensor,
    steps: tl.tensor,
    log_steps: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    down, across = tl.cdiv(tokens, ROWS), tl.cdiv(outputs, COLUMNS)
    step = tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), down * across, step, flatten=FLATTEN):
        first = tile // (GROUP * across) * GROUP
        size = min(down - first, GROUP)
        row = (first + tile % (GROUP * across) % size) * ROWS
        column = tile % (GROUP * across) // size * COLUMNS
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, inputs, DEPTH):
            x = x_tiles.load([row, k])
            weight = weight_tiles.load([column, k])
            acc = tl.dot(x, weight.T, acc)
        columns = column + tl.arange(0, COLUMNS)
        bias = tl.load(bias_ptr + columns, mask=columns < outputs, other=0.0).to(tl.float32)
        y = activated(acc * scale + bias[None, :], steps, log_steps, ACTIVATION)
        out_tiles.store([row, column], y.to(tl.float8e4nv))
