"""Float8 on a GPU that multiplies it: the reference at BERT-Large's sizes, compiled as uncompiled.

Skipped where there is no such GPU (compute capability 9.0, H100 or H200, and later).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse import attention, device
from packhorse.model import float8
from packhorse.model.bert import BertLayer
from packhorse.model.config import BertConfig
from packhorse.packing.batch import Packed
from packhorse.train import estimate

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and device.fast_float8(torch.device("cuda"))),
    reason="no CUDA device that multiplies float8",
)
SIZES = [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]  # inputs, outputs
BOUND = 0.06  # of a product's norm, by float8
KERNEL = 0.005  # the same, by sums in tensor cores and by bf16


@pytest.fixture(autouse=True)
def _full_precision():
    previous = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = previous


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def far(result: Tensor, truth: Tensor) -> float:
    gap = (result.float() - truth.float()).norm() / truth.float().norm()
    return float(gap.nan_to_num(torch.inf, torch.inf))


def reference(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same product in fp32, of numbers that were rounded to float8."""
    a, b = (small.float() * scale for small, scale in map(float8.quantized, (a, b)))
    return a @ b.t() + (0 if bias is None else bias.float())


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("tokens", [4096, 1000, 13])
def test_forward_and_input_gradient_are_the_references(
    inputs: int, outputs: int, tokens: int
) -> None:
    # Rows of sizes as far apart as those of gradients, whose tokens matter more or less.
    sizes = torch.logspace(-6, 2, tokens, device="cuda")[:, None]
    x = (drawn(tokens, inputs) * sizes).bfloat16().requires_grad_()
    weight, bias = drawn(outputs, inputs, scale=0.02), drawn(outputs)
    gradient = (drawn(tokens, outputs) * sizes * 1e-6).bfloat16()
    out = float8.linear(x, weight, bias)
    out.backward(gradient)
    assert x.grad is not None
    pairs = [
        (out.detach(), reference(x.detach(), weight, bias)),
        (x.grad, reference(gradient, weight.t())),
    ]
    for result, truth in pairs:
        assert far(result, truth) < KERNEL
        # Of each row by itself: a kernel that mixed up scales would fail in the small ones.
        rows = (result.float() - truth).norm(dim=1) / truth.norm(dim=1)
        assert float(rows.max()) < 4 * KERNEL
    wrong = reference(x.detach().roll(1, 0), weight, bias)
    assert far(out.detach(), wrong) > BOUND


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_the_weights_gradient_is_that_of_bf16(inputs: int, outputs: int) -> None:
    x, gradient = drawn(2048, inputs), drawn(2048, outputs)
    result = []
    for linear in (F.linear, float8.linear):
        held = [x, drawn(outputs, inputs, scale=0.02), drawn(outputs)]
        x, weight, bias = (tensor.detach().requires_grad_() for tensor in held)
        linear(x, weight, bias).backward(gradient)
        result.append((weight.grad, bias.grad))
    for actual, expected in zip(*result, strict=True):
        assert actual is not None and expected is not None and torch.equal(actual, expected)


def in_float8(layer: BertLayer) -> BertLayer:
    for name in float8.PRODUCTS:
        parent, _, last = name.rpartition(".")
        plain = layer.get_submodule(name)
        assert isinstance(plain, torch.nn.Linear)
        setattr(layer.get_submodule(parent), last, float8.Float8Linear(plain))
    return layer


def learned(layer: BertLayer, x: Tensor, gradient: Tensor, packed: Packed) -> list[Tensor]:
    """What a layer makes of x, and all gradients."""
    held = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    out = layer(held, layer.attention.kernel.plan(packed))
    out.backward(gradient)
    items = [held.grad, *(p.grad for p in layer.parameters())]
    return [out.detach(), *(g.clone() for g in items if g is not None)]


# torch.compile's own, about torch.jit and functions that its tracer makes instances of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layer_compiles_whole_and_stays_what_it_is() -> None:
    """One graph, forward and backward, in Inductor; near the uncompiled layer and near bf16's."""
    config = BertConfig(97, 1024, 1, 16, 4096, dropout=0.0)
    packed = estimate.synthetic_batch(4096, 512).packed.to(torch.device("cuda"))
    layer = BertLayer(config, attention.kernel("varlen")).to("cuda", torch.bfloat16)
    x, gradient = drawn(4096, 1024), drawn(4096, 1024, scale=1e-4)
    half = learned(layer, x, gradient, packed)
    plain = learned(in_float8(layer), x, gradient, packed)
    layer.compile(fullgraph=True, dynamic=False)
    compiled = learned(layer, x, gradient, packed)
    assert len(plain) == len(compiled) == 2 + len(list(layer.parameters()))
    for actual, eager, expected in zip(compiled, plain, half, strict=True):
        # A compiler keeps digits between fused steps, so some numbers are rounded the other way.
        assert far(actual, eager) < BOUND
        assert far(actual, expected) < 2 * BOUND and far(eager, expected) < 2 * BOUND
