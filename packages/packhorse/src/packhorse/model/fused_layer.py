"""A layer's training step after its attention, with everything between the products in few kernels.

    use(bert)        # layers that can train this way do so from now on

What follows attention (its output product, two residual sums with dropout and LayerNorm, the two
products of the feed-forward and GELU) is one function with a gradient of its own, written out
below: so that each kernel of `model.rows` can write what the next product reads (rows in float8
with their scales) and add up what the weights' gradients need (sums of rows, for biases), and a sum
of two gradients is taken where it is used. A compiler fuses neither reductions over rows with
those over columns nor across products.

GELU's argument is kept for the backward pass, and with float8 GELU itself is computed again there
instead of being stored. Nothing else is recomputed but which numbers were dropped out.

Weights, names and results stay those of `BertLayer`; a layer that is not served (another activation
or device, parts without bias) runs as before, and so does every layer outside of training.

Shapes: T tokens, E hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.attention.kernels import AttentionPlan
from packhorse.device import runs_triton
from packhorse.model import float8, rows
from packhorse.model.bert import Bert, BertLayer, SelfAttention, UpProjection

HALF = (torch.bfloat16, torch.float16)
Float8Linear = float8.Float8Linear


def use(bert: Bert) -> int:
    """Let layers that can train this way do so; returns how many. Float8 products come first."""
    count = 0
    for layer in bert.layers:
        if isinstance(layer, BertLayer) and fits(layer):
            layer.fused = forward
            count += 1
    return count


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Do the kernels run there (CUDA from Ampere on, in half precision, with Triton)?"""
    return dtype in HALF and runs_triton(device)


def fits(layer: BertLayer) -> bool:
    """Is the layer made of parts that the function below knows?"""
    if not isinstance(layer.attention, SelfAttention) or not isinstance(layer.up, UpProjection):
        return False
    products = [layer.attention.out, layer.up.dense, layer.down]
    # Not layers derived from these, as those with an adapter are.
    alike = {type(product) for product in products} in ({nn.Linear}, {Float8Linear})
    widest = max(max(product.weight.shape) for product in products)
    has_bias = all(product.bias is not None for product in products)
    return layer.up.activation == "gelu" and alike and has_bias and widest <= rows.WIDEST


def forward(layer: BertLayer, x: Tensor, plan: AttentionPlan) -> Tensor:
    """What `BertLayer.forward` computes, [T, E] to [T, E]."""
    attention: Any = layer.attention  # `fits` has seen that it is `SelfAttention`
    attended = attention.attend(x, plan)
    out, up, down = attention.out, layer.up.dense, layer.down
    first, last = layer.attention_norm, layer.norm
    rate = layer.dropout.p
    seeds = draw_seeds(x.device)
    weights = [p for part in (out, first, up, down, last) for p in (part.weight, part.bias)]
    numbers = (rate, first.eps, last.eps, isinstance(down, Float8Linear))
    return _AfterAttention.apply(x, attended, *weights, seeds, *numbers)  # pyright: ignore[reportReturnType]


def draw_seeds(device: torch.device) -> Tensor:
    """Of the two dropouts; drawn on the device, so that a CUDA graph draws anew at every replay."""
    return torch.randint(1 << 62, (2,), device=device)


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attended: Tensor,
        out: Tensor,
        out_bias: Tensor,
        norm: Tensor,
        norm_bias: Tensor,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        last: Tensor,
        last_bias: Tensor,
        seeds: Tensor,
        rate: float,
        eps: float,
        last_eps: float,
        small: bool,
    ) -> Tensor:
        attended_small = rows.rounded(attended, False)[:2] if small else None
        mixed = _product(attended, attended_small, out, out_bias)
        y, y_small, y_scale, y_moments = rows.add_norm(
            x, mixed, norm, norm_bias, eps, seeds[0], rate, small
        )
        h = _product(y, (y_small, y_scale) if small else None, up, up_bias)
        g, g_scale = rows.gelu(h, small)
        fed = _product(g, (g, g_scale) if small else None, down, down_bias)
        z, _, _, z_moments = rows.add_norm(y, fed, last, last_bias, last_eps, seeds[1], rate, False)
        kept = (x, attended, mixed, y, y_moments, h, h if small else g, fed, z_moments)
        ctx.save_for_backward(*kept, out, norm, up, down, last, seeds)
        ctx.numbers = rate, small
        return z

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, attended, mixed, y, y_moments, h, g, fed, z_moments, *others = ctx.saved_tensors
        out, norm, up, down, last, seeds = others
        rate, small = ctx.numbers
        # Frozen weights, as beside an adapter, cost no product.
        out_learns, up_learns, down_learns = (ctx.needs_input_grad[n] for n in (2, 6, 8))

        y_grad, fed_grad, *fed_small, last_sums = rows.add_norm_gradient(
            grad, None, y, fed, last, z_moments, seeds[1], rate, small
        )
        fed_grad = fed_grad if rate else y_grad
        g_grad = _product_back(fed_grad, fed_small if small else None, down)
        h_grad, *h_small, again, up_bias_grad = rows.gelu_gradient(g_grad, h, small)
        down_grad = fed_grad.t() @ (again if small else g) if down_learns else None
        y_grad_by_up = _product_back(h_grad, h_small if small else None, up)
        up_grad = h_grad.t() @ y if up_learns else None

        x_grad, mixed_grad, *mixed_small, norm_sums = rows.add_norm_gradient(
            y_grad, y_grad_by_up, x, mixed, norm, y_moments, seeds[0], rate, small
        )
        mixed_grad = mixed_grad if rate else x_grad
        attended_grad = _product_back(mixed_grad, mixed_small if small else None, out)
        out_grad = mixed_grad.t() @ attended if out_learns else None

        norm_grad, norm_bias_grad, out_bias_grad = norm_sums.to(x.dtype)
        last_grad, last_bias_grad, down_bias_grad = last_sums.to(x.dtype)
        first = (out_grad, out_bias_grad, norm_grad, norm_bias_grad)
        second = (up_grad, up_bias_grad.to(x.dtype), down_grad, down_bias_grad)
        third = (last_grad, last_bias_grad)
        return x_grad, attended_grad, *first, *second, *third, None, None, None, None, None


def _product(x: Tensor, small: Any, weight: Tensor, bias: Tensor) -> Tensor:
    """x·Wᵀ + b; in float8 if `small`, x in float8 and its scales, is given."""
    if small is None:
        return F.linear(x, weight, bias)
    return float8.multiply(small, rows.rounded(weight, False)[:2], bias, bias.dtype)


def _product_back(grad: Tensor, small: Any, weight: Tensor) -> Tensor:
    """The gradient of `_product`'s x."""
    if small is None:
        return grad @ weight
    return float8.multiply(small, rows.rounded_columns(weight), None, grad.dtype)
