"""Train the layers' four large products in float8, on GPUs that multiply it twice as fast.

The forward product x·Wᵀ and the gradient of its input dY·W are multiplied in e4m3 (Micikevicius et
al. 2022, FP8 formats for deep learning); the weight gradient dYᵀ·x stays in bf16. The advantages:
scales are per row, so computing one is a reduction over a row that was just produced, which its
producer does on the way (`model.fused_layer`); nothing large is transposed;
and the sum over tens of thousands of tokens, where small errors would accumulate, keeps its
precision. The third product would be faster in float8 too, but its rows are columns of the tensors
at hand, and transposing them costs as much as it gains.

All operands are e4m3, gradients too: a scale per row makes the wider range of e5m2 unnecessary, and
its fewer mantissa bits show. Sums stay in the tensor cores (fast accumulation), whose rounding is
far below that of operands with three mantissa bits.

Weights do not change: they are parameters of the same names, rounded to float8 on each use, so
optimizer, checkpoints and results are not affected. Outside of training (`eval()`) products are
those of any other model.

Shapes: T tokens; N outputs and K inputs of a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.model import rows
from packhorse.model.bert import Bert

Rounded = tuple[Tensor, Tensor]  # rows in float8, and their scales
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST = 1e-30  # lower bound of a row's largest number, so that a row of zeros has a scale
PRODUCTS = ("attention.qkv", "attention.out", "up.dense", "down")  # in a layer
GROUPED = ("attention.q", "attention.kv")  # instead of the first, where heads share keys and values
MULTIPLE = 16  # torch._scaled_mm needs both sides of a weight to be multiples of this


def use(bert: Bert) -> list[str]:
    """Train the layers' products in float8 from now on; returns the names of those that cannot.

    A product can if its sizes are multiples of 16 and it has a bias.
    """
    unsupported = []
    grouped = bert.config.key_heads != bert.config.heads
    products = (*GROUPED, *PRODUCTS[1:]) if grouped else PRODUCTS
    for number, layer in enumerate(bert.layers):
        for name in products:
            parent, _, attribute = name.rpartition(".")
            plain: Any = layer.get_submodule(name)
            fits = not (plain.in_features % MULTIPLE or plain.out_features % MULTIPLE)
            if plain.bias is None or not fits:
                unsupported.append(f"layers.{number}.{name}")
            else:
                setattr(layer.get_submodule(parent), attribute, Float8Linear(plain))
    return unsupported


class Float8Linear(nn.Module):
    """A linear layer over the parameters of another one, in float8 while it trains."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        if self.training:
            return linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x·Wᵀ + b for bf16 tensors [T, K], [N, K] and [N]; returns [T, N] in bf16."""
    return _Linear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if not x.is_cuda:
            return product(x, weight, bias)
        small = [rows.rounded(tensor, False)[:2] for tensor in (x, weight)]
        return multiply(small[0], small[1], bias, x.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if not x.is_cuda:
            return product(gradient, weight.t()), gradient.t() @ x, gradient.sum(0)
        small, scale, bias_gradient = rows.rounded(gradient, True)
        x_gradient = multiply((small, scale), rows.rounded_columns(weight), None, x.dtype)
        return x_gradient, gradient.t() @ x, bias_gradient.to(x.dtype)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a·bᵀ (+ bias) in float8: rows of a, [M, K], by rows of b, [N, K]."""
    return multiply(quantized(a), quantized(b), bias, a.dtype)


def multiply(a: Rounded, b: Rounded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The same of operands in float8, each with the scales of its rows, [M, 1] and [N, 1]."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a[0], b[0].t(), a[1], b[1].t(), bias, out_dtype=dtype, use_fast_accum=True
    )


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x in e4m3, scaled so that its largest value is e4m3's largest; the scale [M, 1].

    NaN stays NaN, so that a run that has diverged is noticed.
    """
    largest = x.abs().amax(1, keepdim=True).float().clamp(min=SMALLEST)
    rounded = (x.float() * (LARGEST / largest)).to(E4M3)
    return rounded.contiguous(), largest / LARGEST
