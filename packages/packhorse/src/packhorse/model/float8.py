"""The layers' four large products in float8, for training on GPUs that multiply it twice as fast.

The forward product x·Wᵀ and the gradient of its input dY·W are multiplied in e4m3 (Micikevicius et
al. 2022, FP8 formats for deep learning); the weight gradient dYᵀ·x stays in bf16. What that buys: a
scale belongs to a row, so finding it is a reduction over the row that was just computed, which a
compiler fuses with its producer (LayerNorm, GELU and its gradient); nothing large is transposed;
and the sum over tens of thousands of tokens, where small errors would gather, keeps its digits. The
third product would be faster in float8 too, but its rows are columns of what is at hand, and
transposing them costs what is won.

All three operands are e4m3, gradients too: a scale for each row leaves no need for the wider range
of e5m2, whose fewer digits show. Sums are kept in the tensor cores (fast accumulation), whose
rounding is far below that of operands with three digits.

Weights are what they were: parameters of the same names, rounded to float8 each time they are used,
so optimizer, checkpoints and results know nothing of this. Outside of training (`eval()`) products
are those of any other model.

Shapes: T tokens; N outputs and K inputs of a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.model.bert import Bert

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LEAST = 1e-30  # what a row's largest number counts as, so that a row of zeros has a scale
PRODUCTS = ("attention.qkv", "attention.out", "up.dense", "down")  # of a layer
MULTIPLE = 16  # what torch._scaled_mm asks of both sides of a weight


def use(bert: Bert) -> list[str]:
    """Have the layers' products trained in float8; the names of those that do not fit.

    A product fits whose sizes are multiples of 16 and that has a bias.
    """
    left = []
    for number, layer in enumerate(bert.layers):
        for name in PRODUCTS:
            parent, _, last = name.rpartition(".")
            plain: Any = layer.get_submodule(name)
            fits = not (plain.in_features % MULTIPLE or plain.out_features % MULTIPLE)
            if plain.bias is None or not fits:
                left.append(f"layers.{number}.{name}")
            else:
                setattr(layer.get_submodule(parent), last, Float8Linear(plain))
    return left


class Float8Linear(nn.Module):
    """A linear layer over the parameters of another, in float8 while it trains."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        if self.training:
            return linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x·Wᵀ + b of bf16 tensors [T, K], [N, K] and [N]; [T, N], in bf16."""
    return _Linear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product(gradient, weight.t()), gradient.t() @ x, gradient.sum(0)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a·bᵀ (+ bias) in float8: rows of a, [M, K], by rows of b, [N, K]."""
    (a8, a_scale), (b8, b_scale) = quantised(a), quantised(b)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a8, b8.t(), a_scale, b_scale.t(), bias, out_dtype=a.dtype, use_fast_accum=True
    )


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x in e4m3, its largest number the largest there is; and the scale, [M, 1].

    What is no number stays none, so that a run that has diverged is noticed.
    """
    largest = x.abs().amax(1, keepdim=True).float().clamp(min=LEAST)
    small = (x.float() * (LARGEST / largest)).to(E4M3)
    return small.contiguous(), largest / LARGEST
