"""The kernels of a layer's training step, and attention's, against the plain versions.

On a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1), which rounds to bf16 and float8
by cutting digits off: bounds are wider there.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse import attention, device
from packhorse.model import rows
from packhorse.packing.batch import Packed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device"
)
pytest.importorskip("triton")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
EXACT = 3e-6  # fp32 sums and approximate exponentials
HALF = 0.006 if INTERPRETED else 0.002  # rounding to bf16
SMALL = 0.15 if INTERPRETED else 0.015  # results that another rounding to float8 moved by one
SIZES = [(5, 48), (7, 1024)] if INTERPRETED else [(5, 48), (1003, 768), (517, 1024), (300, 4096)]
needs_float8 = pytest.mark.skipif(
    not (INTERPRETED or (torch.cuda.is_available() and device.fast_float8(DEVICE))),
    reason="no CUDA device with float8",
)
FLOAT8 = [False, pytest.param(True, marks=needs_float8)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def far(result: Tensor, truth: Tensor) -> float:
    truth = truth.detach()
    gap = (result.double().cpu() - truth.double()).norm() / truth.double().norm()
    return float(gap.nan_to_num(torch.inf, torch.inf))


def kernel(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    from packhorse.model import row_kernels

    return getattr(row_kernels, name)(*arguments)


def plain(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """The operator on the CPU, in float64 where numbers are not rounded on the way."""
    return getattr(rows, name)(*(a.cpu() if isinstance(a, Tensor) else a for a in arguments))


def wide(small: Tensor, scale: Tensor) -> Tensor:
    return small.float() * scale


@needs_float8
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_rounding(tokens: int, width: int) -> None:
    x = drawn(tokens, width) * torch.logspace(-6, 2, tokens, device=DEVICE)[:, None].bfloat16()
    (small, scale, total), (*expected, expected_total) = (
        run("rounded", x, True) for run in (kernel, plain)
    )
    each = (wide(small, scale).cpu() - wide(*expected)).norm(dim=1) / wide(*expected).norm(dim=1)
    assert float(each.max()) < SMALL
    assert far(scale, expected[1]) < EXACT and far(total, expected_total) < 10 * EXACT
    assert far(wide(small, scale.roll(1, 0)), wide(*expected)) > 0.1
    small, scale = kernel("rounded_columns", x)
    assert small.shape == (width, tokens) and small.is_contiguous()
    assert far(wide(small, scale), wide(*rows.to_float8(x.cpu().t()))) < SMALL
    x[1, 3] = float("nan")
    x[2] = 0
    small, scale, _ = kernel("rounded", x, False)
    assert not bool(small[2].float().any())
    assert INTERPRETED or bool(small[1, 3].float().isnan())


@pytest.mark.parametrize("float8", FLOAT8)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_gelu_and_its_gradient(tokens: int, width: int, float8: bool) -> None:
    h, grad = 3 * drawn(tokens, width), drawn(tokens, width)
    exact = h.cpu().double().requires_grad_()
    value = F.gelu(exact)
    value.backward(grad.cpu().double())
    assert exact.grad is not None
    result, scale = kernel("gelu", h, float8)
    if float8:
        assert far(wide(result, scale), wide(*rows.to_float8(value.detach()))) < SMALL
    else:
        assert far(result, value.detach()) < HALF
    out, small, scale, again, total = kernel("gelu_gradient", grad, h, float8)
    assert far(out, exact.grad) < HALF and far(total, exact.grad.sum(0)) < 10 * EXACT
    if float8:
        assert far(wide(small, scale), wide(*rows.to_float8(exact.grad))) < SMALL
        assert far(again, value.detach()) < HALF
    assert far(grad, exact.grad) > 0.1  # without GELU's slope
    # The tail keeps its digits: GELU(-5) is -1.4e-6.
    tail = torch.linspace(-5.5, -4, width, device=DEVICE).expand(3, width)
    assert far(kernel("gelu", tail, False)[0], F.gelu(tail.cpu().double())) < 1e-3


@pytest.mark.parametrize("float8", FLOAT8)
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_residual_sum_and_norm(tokens: int, width: int, rate: float, float8: bool) -> None:
    x, branch, grad, second = (drawn(tokens, width) for _ in range(4))
    weight, bias = drawn(width), drawn(width)
    seed = torch.randint(1 << 62, (), device=DEVICE)
    held = [t.cpu().double().requires_grad_() for t in (x, branch, weight, bias)]
    total = held[0] + rows.dropped(held[1], seed.cpu(), rate)
    expected = F.layer_norm(total, (width,), held[2], held[3], 1e-12)
    expected.backward(grad.cpu().double() + second.cpu().double())
    grads = [t.grad for t in held if t.grad is not None]

    numbers = (weight, bias, 1e-12, seed, rate, float8)
    out, *small, moments = kernel("add_norm", x, branch, *numbers)
    assert far(out, expected.detach()) < HALF
    assert float(out[0].float().cpu().dist(expected[1].detach().float())) > 1  # of another row
    numbers = (weight, moments, seed, rate, float8)
    x_grad, dropped, *small_grad, sums = kernel(
        "add_norm_gradient", grad, second, x, branch, *numbers
    )
    assert far(x_grad, grads[0]) < HALF
    assert far(dropped if rate else x_grad, grads[1]) < HALF
    for actual, truth in zip(sums, (grads[2], grads[3], grads[1].sum(0)), strict=True):
        # Sums of a gradient that LayerNorm made almost 0 are as near as the numbers are large.
        size = grads[1].detach().square().sum(0).sqrt().norm()
        assert float((actual.cpu() - truth).norm()) < 30 * EXACT * float(size + truth.norm())
    if float8:
        assert far(wide(*small), wide(*rows.to_float8(expected.detach()))) < SMALL
        assert far(wide(*small_grad), wide(*rows.to_float8(grads[1]))) < SMALL
    if rate:
        other = kernel("add_norm", x, branch, weight, bias, 1e-12, seed + 1, rate, float8)[0]
        assert far(other, expected.detach()) > 0.1
    alone = kernel("add_norm_gradient", grad + second, None, x, branch, *numbers)[0]
    assert far(alone, grads[0]) < 2 * HALF


def test_results_are_the_same_to_the_bit() -> None:
    h, grad = drawn(300, 1024), drawn(300, 1024)
    first, again = (kernel("gelu_gradient", grad, h, False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_attention_at_every_head_width(width: int, rate: float) -> None:
    from packhorse.attention import triton_kernels

    lengths = (5, 70, 33, 64) if INTERPRETED else (512, 1, 300, 64, 65, 130)
    packed = Packed.build([torch.ones(n, dtype=torch.int64).numpy() for n in lengths])
    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # its products know no bf16
    shapes = (sum(lengths), 3, 2, width), (sum(lengths), 2, width)
    qkv, grad = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
    reference = attention.kernel("reference")
    held = qkv.cpu().double().requires_grad_()
    expected = reference(held, reference.plan(packed))
    expected.backward(grad.cpu().double())
    assert held.grad is not None
    packed = packed.to(DEVICE)
    order = packed.lengths.argsort(descending=True)
    where = (packed.cu_seqlens, order, max(lengths))
    seed = torch.randint(1 << 62, (1,), device=DEVICE)
    options = (seed, rate) if rate else (None, 0.0)
    out, lse = triton_kernels.forward(qkv, *where, *options)
    gradient = triton_kernels.backward(grad, qkv, out, lse, *where, *options)
    if rate:  # what dropout does is in test_dropout; here that it is in both directions
        assert far(out, expected.detach()) > 0.1 and far(gradient, held.grad) > 0.1
    else:
        assert far(out, expected.detach()) < 4 * HALF and far(gradient, held.grad) < 4 * HALF
        assert far(gradient.roll(1, 0), held.grad) > 0.1
