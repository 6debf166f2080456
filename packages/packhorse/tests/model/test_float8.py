"""Products in float8: the reference, gradients, what must fail, and the model around them.

A row by row scaled product also runs on CPUs, in torch's versions that have it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse.model import float8
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

BOUND = 0.06  # of a product's norm: two operands, each rounded to three binary digits
ROUNDED = 2**-8  # of a number, by bf16
TOKENS, WIDE, NARROW = 77, 96, 64
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def _multiplies() -> bool:
    ones = torch.ones(16, 16, dtype=torch.bfloat16)
    try:
        return bool((float8.product(ones, ones) == 16).all())
    except (RuntimeError, NotImplementedError):
        return False


pytestmark = pytest.mark.skipif(
    not _multiplies(), reason="this torch has no row by row scaled float8 product on a CPU"
)


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def far(result: Tensor, truth: Tensor) -> float:
    """How far apart, of the norm; all of it where something is no number."""
    gap = (result.double() - truth.double()).norm() / truth.double().norm()
    return float(gap.nan_to_num(torch.inf, torch.inf))


def reference(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same product in float64, of numbers that were rounded to float8."""
    a, b = (small.double() * scale for small, scale in map(float8.quantized, (a, b)))
    return a @ b.t() + (0 if bias is None else bias.double())


def learned(product: Product, x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """The result, and the gradients of x, weight and bias, for gradients drawn at random."""
    held = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    out = product(*held)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward((gradient * 1e-6).to(out.dtype))
    return [out.detach(), *(tensor.grad for tensor in held if tensor.grad is not None)]


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_the_product_is_that_of_rounded_numbers(scale: float) -> None:
    x, weight, bias = drawn(TOKENS, NARROW, scale=scale), drawn(WIDE, NARROW), drawn(WIDE)
    assert far(float8.product(x, weight), reference(x, weight)) < ROUNDED
    result, truth = float8.product(x, weight, bias), reference(x, weight, bias)
    assert far(result, truth) < ROUNDED
    assert far(float8.product(x, weight), (x.double() @ weight.double().t())) > 2 * ROUNDED


def test_gradients_are_near_and_the_weights_is_that_of_bf16() -> None:
    x, weight, bias = drawn(TOKENS, NARROW), drawn(WIDE, NARROW, scale=0.05), drawn(WIDE)
    exact = learned(F.linear, x.float(), weight.float(), bias.float())
    half = learned(F.linear, x, weight, bias)
    out, of_x, of_weight, of_bias = learned(float8.linear, x, weight, bias)
    assert far(out, exact[0]) < BOUND
    assert ROUNDED < far(of_x, exact[1]) < BOUND
    assert torch.equal(of_weight, half[2]) and torch.equal(of_bias, half[3])


def spread(rows: int, columns: int) -> Tensor:
    """Rows of very different sizes, as hidden states and their gradients have them."""
    return (torch.randn(rows, columns) * torch.logspace(-8, 4, rows)[:, None]).bfloat16()


def test_each_row_has_its_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = spread(TOKENS, NARROW), drawn(WIDE, NARROW)

    def errors() -> list[float]:
        truth = x.double() @ weight.double().t()
        return [far(*pair) for pair in zip(float8.product(x, weight), truth, strict=True)]

    assert max(errors()) < 2 * BOUND  # of single rows, where chance has less to even out

    def unscaled(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(float8.E4M3).contiguous(), torch.ones(len(x), 1)

    monkeypatch.setattr(float8, "quantized", unscaled)
    result = errors()
    assert result[0] > BOUND and result[-1] > BOUND  # too small for float8, and too large


def test_rows_of_nothing_and_of_no_numbers() -> None:
    x = drawn(4, 16)
    x[1], x[2, 3], x[3] = 0, torch.inf, 1e-38
    result = float8.product(x, drawn(16, 16))
    assert result[0].isfinite().all() and result[3].isfinite().all()
    assert (result[1] == 0).all() and not result[2].isfinite().any()


def test_a_gradient_that_is_one_number_spread_out() -> None:
    x, weight, bias = drawn(8, 16).requires_grad_(), drawn(32, 16), drawn(32)
    float8.linear(x, weight, bias).sum().backward()
    assert x.grad is not None
    assert far(x.grad, weight.double().sum(0).expand(8, 16)) < 0.2  # signs cancel in the sum


def test_the_model_keeps_names_and_parameters_and_evaluates_as_before(make_model) -> None:
    model, packed = make_model(torch.bfloat16), make_packed()
    previous, before = dict(model.named_parameters()), model(packed, "hidden", "mlm")
    assert float8.use(model.bert) == []
    assert [type(m) for m in model.modules()].count(float8.Float8Linear) == 8  # four a layer
    now = dict(model.named_parameters())
    assert list(now) == list(previous) and all(now[name] is previous[name] for name in previous)
    for was, result in zip(before, model.eval()(packed, "hidden", "mlm"), strict=True):
        assert torch.equal(was, result)
    for layer in model.train().bert.layers:
        layer.dropout.p = 0.0
    model.bert.embed.dropout.p = 0.0
    (hidden,) = model(packed, "hidden")
    assert ROUNDED < far(hidden.detach(), before[0].detach()) < BOUND


def make_packed() -> Packed:
    random = np.random.default_rng(0)
    return Packed.build(
        [SyntheticSequence(random.integers(0, 97, n), np.zeros(n, int)) for n in (9, 30, 4)]
    )


def test_sizes_that_do_not_fit_stay(make_model) -> None:
    model = make_model(torch.bfloat16, width=24)  # 24 by 72, 24 by 24, 24 by 48
    assert float8.use(model.bert) == [
        f"layers.{number}.{name}" for number in range(2) for name in float8.PRODUCTS
    ]
    assert not any(isinstance(m, float8.Float8Linear) for m in model.modules())


# torch's own tracer makes an instance of the function, and warns of it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_layer_is_traced_whole(make_model) -> None:
    """Forward and backward, without a break: what a compiler must see to fuse the scales."""
    layer = make_model(torch.bfloat16).bert.layers[0].up.train()
    x = drawn(TOKENS, 48)
    half = learned_of(layer, x)
    layer.dense = float8.Float8Linear(layer.dense)
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    plain, result = learned_of(layer, x), learned_of(traced, x)
    assert all(map(torch.equal, plain, result))
    assert not any(map(torch.equal, plain, half))


def learned_of(layer: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Its result and the gradient of x."""
    return learned(lambda x, *_: layer(x), x, drawn(1), drawn(1))
