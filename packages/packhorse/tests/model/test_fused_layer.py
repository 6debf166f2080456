"""A layer's training step as one function: the gradients of the layer as it is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from packhorse import attention
from packhorse.model import float8, fused_layer, rows
from packhorse.model.bert import BertLayer
from packhorse.model.config import BertConfig
from packhorse.train import estimate

WIDTH = 32
TOKENS = 24


def make_layer(dropout: float = 0.0, **more: object) -> BertLayer:
    torch.manual_seed(0)
    config = BertConfig(97, WIDTH, 1, 2, 4 * WIDTH, dropout=dropout, **more)  # pyright: ignore[reportArgumentType]
    layer = BertLayer(config, attention.kernel("reference")).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def learned(layer: BertLayer, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """What a layer makes of x, and all gradients."""
    packed = estimate.synthetic_batch(TOKENS, 8).packed
    held = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    out = layer(held, attention.kernel("reference").plan(packed))
    out.backward(gradient)
    grads = [held.grad, *(p.grad for p in layer.parameters())]
    return [out.detach(), *(g.clone() for g in grads if g is not None)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_result_and_gradients_are_those_of_the_layer(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(dropout)
    x, gradient = drawn(TOKENS, WIDTH), drawn(TOKENS, WIDTH)
    seeds = torch.tensor([7, 1 << 61])
    monkeypatch.setattr(fused_layer, "draw_seeds", lambda _: seeds)
    calls = iter(seeds)
    layer.dropout.forward = lambda input: rows.dropped(input, next(calls), dropout)
    plain = learned(layer, x, gradient)
    assert fused_layer.fits(layer)
    layer.fused = fused_layer.forward
    fused = learned(layer, x, gradient)
    assert len(fused) == len(plain) == 2 + len(list(layer.parameters()))
    for actual, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    if dropout:
        seeds += 1  # the comparison above is one of what was dropped out, too
        assert float((learned(layer, x, gradient)[0] - plain[0]).norm()) > 1


def test_float8_is_near() -> None:
    layer = make_layer().bfloat16()
    x, gradient = drawn(TOKENS, WIDTH).bfloat16(), drawn(TOKENS, WIDTH).bfloat16()
    half = learned(layer, x, gradient)
    layer.attention.out = float8.Float8Linear(layer.attention.out)  # pyright: ignore
    assert not fused_layer.fits(layer)  # products of two kinds
    layer.up.dense = float8.Float8Linear(layer.up.dense)  # pyright: ignore
    layer.down = float8.Float8Linear(layer.down)  # pyright: ignore
    plain = learned(layer, x, gradient)
    assert fused_layer.fits(layer)
    layer.fused = fused_layer.forward
    fused = learned(layer, x, gradient)
    for actual, expected, bf16 in zip(fused, plain, half, strict=True):
        size = float(bf16.float().norm())
        error = float((expected.float() - bf16.float()).norm())  # by float8
        assert error < 0.25 * size
        assert float((actual.float() - bf16.float()).norm()) <= 1.2 * error + 0.015 * size
        assert float((actual.float() - expected.float()).norm()) <= error + 0.015 * size


@pytest.mark.parametrize(
    "options",
    [{"activation": "gelu_tanh"}, {"mlp_bias": False}, {"attention_bias": False}, {"gated": True}],
    ids=str,
)
def test_layers_of_other_parts_stay(options: dict[str, object]) -> None:
    assert not fused_layer.fits(make_layer(**options))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("frozen", [("up.dense", "down", "attention.out"), ("down",)], ids=str)
def test_frozen_weights_cost_no_product(frozen: tuple[str, ...]) -> None:
    layer = make_layer()
    x, gradient = drawn(TOKENS, WIDTH), drawn(TOKENS, WIDTH)
    for name in frozen:
        layer.get_submodule(name).requires_grad_(False)
    plain, learning = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with plain:
        expected = learned(layer, x, gradient)
    layer.fused = fused_layer.forward
    with learning:
        results = learned(layer, x, gradient)
    assert len(results) == len(expected) == 2 + len(list(layer.parameters())) - 2 * len(frozen)
    for actual, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-10, atol=1e-10)
    assert learning.get_total_flops() == plain.get_total_flops() > 0


def test_outside_of_training_a_layer_is_as_before() -> None:
    layer = make_layer(0.5)
    x = drawn(TOKENS, WIDTH)
    before = learned(layer.eval(), x, x)
    layer.fused = fused_layer.forward
    for actual, expected in zip(learned(layer, x, x), before, strict=True):
        assert torch.equal(actual, expected)


# torch.compile's own, about functions that its tracer makes instances of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layer_is_traced_whole() -> None:
    layer = make_layer(0.1).float()
    layer.fused = fused_layer.forward
    layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    results = learned(layer, drawn(TOKENS, WIDTH).float(), drawn(TOKENS, WIDTH).float())
    assert all(bool(result.isfinite().all()) for result in results)


def test_the_share_that_is_dropped() -> None:
    for seed in (0, 5, (1 << 62) - 1):
        kept = rows.keeps(torch.tensor(seed), 1000, 512, 0.1)
        share = kept.double()
        assert abs(float(share.mean()) - 0.9) < 0.002  # five standard deviations
        assert float(share.mean(0).std()) < 0.015 and float(share.mean(1).std()) < 0.02
        assert not torch.equal(kept, rows.keeps(torch.tensor(seed ^ 1), 1000, 512, 0.1))


def test_gelu_gradient_is_torchs() -> None:
    h = (3 * drawn(40, 8)).requires_grad_()
    grad = drawn(40, 8)
    F.gelu(h).backward(grad)
    out, *_, total = rows.gelu_gradient(grad, h.detach(), False)
    assert h.grad is not None
    torch.testing.assert_close(out, h.grad)
    torch.testing.assert_close(total, h.grad.sum(0))
