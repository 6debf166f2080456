"""int8 layers compute what their reference in plain torch does, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from packhorse import attention, native
from packhorse.errors import KernelError
from packhorse.model import int8
from packhorse.model.bert import ACTIVATIONS, Bert, BertLayer
from packhorse.model.config import BertConfig
from packhorse.model.int8 import (
    Int8Layer,
    Int8Linear,
    freeze_int8,
    quantize_tokens,
    quantize_weight,
)
from packhorse.packing.batch import Packed
from packhorse.processor import Features
from packhorse.runtime.proof import SyntheticSequence

pytestmark = pytest.mark.machine
needs_native = pytest.mark.skipif(
    not int8.is_native(), reason="no AVX2, or int8.c cannot be compiled here"
)
# Inputs and outputs: 61 and 127 inputs take all bytes of a vector, but not all of its numbers.
WIDTHS = ((1, 1), (3, 7), (16, 64), (37, 70), (384, 65), (130, 384), (61, 5), (127, 9))
CLOSE = 3e-6  # of the largest result: what rounding in fp32 leaves


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor without int8 products, afterwards this one."""
    monkeypatch.setattr(int8, "features", lambda: Features())
    int8.is_native.cache_clear()
    int8._functions.cache_clear()
    yield
    int8.is_native.cache_clear()
    int8._functions.cache_clear()


def reference(linear: torch.nn.Linear, x: Tensor, activation: str | None = None) -> Tensor:
    """In float64, where sums of these integers are exact."""
    weight, tokens = quantize_weight(linear.weight), quantize_tokens(x)
    values = tokens.values.double() - tokens.zero[:, None].double()
    y = values @ weight.values.double().T
    y = y * tokens.scale[:, None].double() * weight.scale.double()
    y = y if linear.bias is None else y + linear.bias.double()
    return ACTIVATIONS[activation](y) if activation else y


def draw(rows: int, width: int) -> Tensor:
    """Rows of unlike ranges, as hidden states are."""
    return torch.randn(rows, width) * torch.rand(rows, 1) * 4 + torch.randn(rows, 1)


def difference(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
def test_a_layer_is_its_reference(shape: tuple[int, int], activation: str | None) -> None:
    linear = torch.nn.Linear(*shape)
    with torch.inference_mode():
        layer = Int8Linear(linear, activation)
        for rows in (1, 5, 6, 7, 48, 49, 200):
            x = draw(rows, shape[0])
            expected = reference(linear, x, activation)
            assert difference(layer(x), expected) <= CLOSE


@pytest.mark.parametrize("change", ["weight", "zero", "scale"])
def test_the_comparison_sees_one_step(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: a reference that is off by one step is another one."""
    linear = torch.nn.Linear(130, 70)
    x = draw(50, 130)
    with torch.inference_mode():
        y = Int8Linear(linear)(x)
        weight, tokens = quantize_weight(linear.weight), quantize_tokens(x)
        if change == "weight":
            weight.values[3, 5] += 1 if weight.values[3, 5] < 0 else -1
        elif change == "zero":
            tokens.zero[7] += 1
        else:
            tokens.scale[7] *= 1 + 1e-4
        monkeypatch.setattr(f"{__name__}.quantize_weight", lambda _: weight)
        monkeypatch.setattr(f"{__name__}.quantize_tokens", lambda _: tokens)
        assert difference(y, reference(linear, x)) > CLOSE


def test_bf16_in_and_out() -> None:
    linear = torch.nn.Linear(100, 70, bias=False)
    x = draw(60, 100).bfloat16()
    with torch.inference_mode():
        expected = reference(linear, x.float())
        assert difference(Int8Linear(linear)(x), expected) <= CLOSE
        y = Int8Linear(linear, dtype=torch.bfloat16)(x)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


def test_rounded_weights_round_to_themselves() -> None:
    weight = torch.randn(50, 33) * torch.rand(50, 1)
    weight[4] = 0
    once = quantize_weight(weight)
    again = quantize_weight(once.dequantize())
    assert torch.equal(once.values, again.values)
    assert once.values.abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 45
    assert (once.dequantize() - weight).abs().max() <= weight.abs().max() / 254 + 1e-6


def test_a_token_is_within_half_a_step() -> None:
    x = draw(40, 30)
    x[0], x[1], x[2] = 0, 3, -2  # no range on one side of 0, or at all
    tokens = quantize_tokens(x)
    assert tokens.values.min() >= 0 and tokens.values.max() <= 255
    assert ((tokens.dequantize() - x).abs() <= 0.5001 * tokens.scale[:, None] + 1e-6).all()


@needs_native
def test_every_number_of_rows_and_threads_gives_the_same_bits(threads) -> None:
    layer, x = Int8Linear(torch.nn.Linear(40, 70), "gelu"), draw(200, 40)
    threads(1)
    alone = torch.cat([layer(row[None]) for row in x])
    for count in (1, 2, 3):
        threads(count)
        for rows in (0, 1, 2, 31, 32, 47, 48, 49, 200):
            assert torch.equal(layer(x[:rows]), alone[:rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    layer, x = Int8Linear(torch.nn.Linear(40, 70), "relu"), draw(70, 40)
    clean = layer(x)
    x[34, 39] = x[69, 0] = value
    out, sick = layer(x), torch.zeros(70, dtype=torch.bool)
    sick[[34, 69]] = True
    assert out[sick].isnan().all()
    assert torch.equal(out[~sick], clean[~sick])


@needs_native
def test_rows_that_lie_apart() -> None:
    layer, x = Int8Linear(torch.nn.Linear(24, 70)), draw(50, 24)
    expected = layer(x)
    assert torch.equal(layer(x.T.contiguous().T), expected)
    assert torch.equal(layer(torch.cat([x, x], 1)[:, 24:]), expected)


@needs_native
def test_refuses_what_c_would_read_astray() -> None:
    layer, x = Int8Linear(torch.nn.Linear(24, 70)), draw(5, 24)
    for wrong in (x[:, :23], x[None], x.double(), x.to("meta")):
        with pytest.raises(KernelError, match="takes \\[tokens, 24\\]"):
            layer(wrong)


# ---- layers of a model ----


def batch(rng) -> Packed:
    return Packed.build(
        [SyntheticSequence(rng.integers(0, 60, n), rng.integers(0, 2, n)) for n in (3, 40, 9)]
    )


def replaced_one_by_one(bert: Bert) -> Bert:
    """The same model with plain modules around linear layers in fp32 steps: the reference."""
    bert = deepcopy(bert)
    layer: Any
    for layer in bert.layers:
        layer.attention.qkv = Int8Linear(layer.attention.qkv)
        layer.attention.out = Int8Linear(layer.attention.out)
        layer.up = Int8Linear(layer.up.dense, layer.up.activation)
        layer.down = Int8Linear(layer.down)
    return bert


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_a_fused_layer_is_its_parts(activation: str, plain: None, rng, request) -> None:
    """Rounding may move a number to the next of 256 steps, which few results show."""
    bert = Bert(BertConfig(60, 48, 2, 4, 80, activation=activation), attention.kernel("reference"))
    bert = bert.eval()
    packed = batch(rng)
    with torch.inference_mode():
        expected = replaced_one_by_one(bert)(packed)
        exact = bert(packed)
        for function in (int8.is_native, int8._functions):
            function.cache_clear()
        request.getfixturevalue("monkeypatch").undo()
        freeze_int8(bert.layers)
        out = bert(packed)
    assert all(isinstance(layer, Int8Layer) == int8.is_native() for layer in bert.layers)
    assert (out - expected).abs().mean() <= 4e-3  # attention is bf16 in the fused one
    assert (exact - expected).abs().mean() > 1e-3  # and int8 is not fp32: the control


@needs_native
def test_neighbors_and_position_change_no_bit(rng, threads) -> None:
    bert = Bert(BertConfig(60, 48, 2, 4, 80), attention.kernel("native")).eval()
    freeze_int8(bert.layers)
    texts = [
        SyntheticSequence(rng.integers(0, 60, n), rng.integers(0, 2, n)) for n in (3, 40, 9, 33)
    ]
    with torch.inference_mode():
        together = [Packed.build(texts).split(bert(Packed.build(texts)))]
        threads(2)
        together.append(Packed.build(texts).split(bert(Packed.build(texts))))
        for i, text in enumerate(texts):
            alone = bert(Packed.build([text]))
            assert all(torch.equal(rows[i], alone) for rows in together)


def test_layers_that_are_kept_stay_as_they_are() -> None:
    bert = Bert(BertConfig(60, 48, 2, 4, 80), attention.kernel("reference")).eval()
    freeze_int8(bert.layers, kept=["0.down"])
    assert isinstance(bert.layers[0].down, torch.nn.Linear)
    assert isinstance(bert.layers[0].up, Int8Linear)
    assert not any(isinstance(m, torch.nn.Linear) for m in bert.layers[1].modules())


def test_layers_that_cannot_be_fused_have_their_products_replaced(rng) -> None:
    config = BertConfig(60, 48, 2, 4, 80, gated=True, norm_first=True, rotary_base=1e4)
    bert = Bert(config, attention.kernel("reference")).eval()
    packed = batch(rng)
    with torch.inference_mode():
        exact = bert(packed)
        freeze_int8(bert.layers)
        out = bert(packed)
    assert not any(isinstance(m, torch.nn.Linear | BertLayer) for m in bert.layers.modules())
    assert torch.nn.functional.cosine_similarity(out, exact).min() > 0.99
    assert not torch.equal(out, exact)


@pytest.mark.parametrize("compiler", ["/bin/false"])
def test_without_a_compiler_it_computes_in_fp32_steps_and_says_so(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: None
) -> None:
    monkeypatch.setattr(int8, "features", lambda: Features(avx2=True))
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "WHEEL_FOLDER", tmp_path / "no-wheel")
    monkeypatch.setenv("CC", compiler)
    native._warn_once.cache_clear()
    linear, x = torch.nn.Linear(24, 70), draw(5, 24)
    with pytest.warns(RuntimeWarning, match="running slower than this machine can"):
        layer = Int8Linear(linear)
    assert not layer.native
    assert difference(layer(x).detach(), reference(linear, x).detach()) <= CLOSE
