"""float8 inference: fixed scales, emulated where the device has no float8 products."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse import attention
from packhorse.model import float8_inference
from packhorse.model.bert import ACTIVATIONS
from packhorse.model.float8_inference import (
    E4M3,
    LARGEST,
    Float8Layer,
    Float8Product,
    calibrate,
    linear_layers,
    round_weight,
    to_float8,
    use_float8,
)
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.reports import random_model
from packhorse.runtime.invariant import SyntheticSequence

CONFIG = random_model.CONFIGS["tiny"]


def sequence(length: int, seed: int) -> SyntheticSequence:
    ids = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length)
    return SyntheticSequence(ids, ids * 0)


@pytest.fixture
def model() -> Model:
    made = random_model.build(CONFIG, seed=3).eval()
    for name, weight in made.bert.named_parameters():  # larger, so that results are not all norm
        if "layers" in name and weight.ndim == 2:
            weight.data *= 4
    made.bert.use(attention.kernel("reference"))
    return made


@pytest.fixture
def packed() -> Packed:
    return Packed.build([sequence(n, n) for n in (5, 30, 1, 12)])


def hidden(model: Model, packed: Packed) -> Tensor:
    with torch.inference_mode():
        return model.bert(packed)


def test_rounding_is_that_of_e4m3_within_its_range() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = numbers[~numbers.isnan()]
    assert torch.equal(to_float8(finite / 8, 8.0).float(), finite)
    beyond = to_float8(torch.tensor([1e9, -1e9, float("inf"), float("nan")]), 1.0).float()
    assert beyond[:3].tolist() == [LARGEST, -LARGEST, LARGEST] and beyond[3].isnan()
    x = torch.randn(1000)
    error = (to_float8(x, 50.0).float() / 50 - x).abs()
    assert bool((error <= x.abs() / 16 + 2**-10 / 50).all())
    assert bool((error > x.abs() / 64).any())  # and it does round


def test_a_weight_that_was_rounded_rounds_to_itself() -> None:
    weight = torch.randn(32, 48)
    once = round_weight(weight)
    twice = round_weight(once.dequantize())
    assert torch.equal(once.values.view(torch.uint8), twice.values.view(torch.uint8))
    assert twice.scale == pytest.approx(once.scale, rel=1e-6)
    assert float(once.values.float().abs().max()) == LARGEST


def test_a_product_is_that_of_the_rounded_numbers() -> None:
    linear = nn.Linear(48, 32)
    x = torch.randn(7, 48)
    product = Float8Product(linear, scale=0.02)
    rounded = to_float8(x, 1 / 0.02).double() * 0.02
    weight = round_weight(linear.weight)
    expected = rounded @ (weight.values.double() * weight.scale).t() + linear.bias.double()
    torch.testing.assert_close(product(x).double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(product(x), linear(x), atol=1e-4)


def test_the_model_stays_near_fp32(model: Model, packed: Packed) -> None:
    exact = hidden(model, packed)
    use_float8(model.bert, calibrate(model.bert, [packed]))
    rounded = hidden(model, packed)
    cosine = F.cosine_similarity(exact, rounded)
    assert float(cosine.min()) > 0.98 and float(cosine.max()) < 0.999999


def test_calibration_sees_the_largest_input_of_each_product(model: Model, packed: Packed) -> None:
    seen: dict[str, float] = {}
    for name, layer in linear_layers(model.bert).items():
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.update({name: float(inputs[0].abs().max())})
        )
    scales = calibrate(model.bert, [packed])
    assert set(scales) == set(seen) == set(linear_layers(model.bert))
    for name, scale in scales.items():
        assert scale * LARGEST == pytest.approx(2 * seen[name], rel=1e-6)


def test_layers_that_are_kept_stay_as_they_are(model: Model, packed: Packed) -> None:
    scales = calibrate(model.bert, [packed])
    use_float8(model.bert, scales, kept=["0.down"])
    kinds = {name: type(model.bert.layers.get_submodule(name)) for name in scales}
    assert kinds.pop("0.down") is nn.Linear
    assert set(kinds.values()) == {Float8Product}


def dynamic(self: Float8Product, x: Tensor) -> Tensor:
    """The control: a scale that is taken from the batch, as dynamic quantization does."""
    scale = float(x.abs().max()) / LARGEST
    self.input_scale.fill_(scale)
    return self.multiply(to_float8(x, 1 / scale))


@pytest.mark.parametrize("scales_are", ["fixed", "dynamic"])
def test_a_neighbor_changes_no_bit(
    model: Model, scales_are: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sequence(20, 1)
    batches = [Packed.build([own, sequence(30, seed)]) for seed in (2, 3)]
    use_float8(model.bert, calibrate(model.bert, batches))
    if scales_are == "dynamic":
        monkeypatch.setattr(Float8Product, "forward", dynamic)
    first, second = (hidden(model, batch)[:20] for batch in batches)
    assert torch.equal(first, second) == (scales_are == "fixed")


@pytest.fixture
def kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`float8_kernels` by torch's operators, so that `Float8Layer` runs without a GPU."""
    module: Any = ModuleType("packhorse.model.float8_kernels")
    module.ACTIVATIONS = {None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}

    def cast(x: Tensor, steps: float, activation: str | None = None) -> Tensor:
        return to_float8(ACTIVATIONS[activation](x) if activation else x, steps)

    def add_norm_cast(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, steps: float
    ) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(x + residual, weight.shape, weight, bias, eps)
        return y, to_float8(y, steps)

    module.cast, module.add_norm_cast = cast, add_norm_cast
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(float8_inference, "_has_kernels", lambda bert: True)


@pytest.mark.usefixtures("kernels_in_torch")
def test_fused_layers_compute_what_layers_do(model: Model, packed: Packed) -> None:
    """In fp32 nothing is rounded but to float8, so that both are equal to the bit."""
    scales = calibrate(model.bert, [packed])
    plain = copy.deepcopy(model)
    use_float8(plain.bert, scales, fuse=False)
    use_float8(model.bert, scales)
    assert all(isinstance(layer, Float8Layer) for layer in model.bert.layers)
    assert not any(isinstance(layer, Float8Layer) for layer in plain.bert.layers)
    assert torch.equal(hidden(model, packed), hidden(plain, packed))


@pytest.mark.usefixtures("kernels_in_torch")
def test_a_layer_that_is_kept_stands_between_fused_ones(model: Model, packed: Packed) -> None:
    names = [name for name in linear_layers(model.bert) if name.startswith("0.")]
    scales = calibrate(model.bert, [packed])
    plain = copy.deepcopy(model)
    use_float8(plain.bert, scales, names, fuse=False)
    use_float8(model.bert, scales, names)
    kinds = [isinstance(layer, Float8Layer) for layer in model.bert.layers]
    assert kinds == [False, True]
    assert torch.equal(hidden(model, packed), hidden(plain, packed))
