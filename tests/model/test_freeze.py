"""Frozen layers compute what they were made from."""

from __future__ import annotations

import pytest
import torch

from packhorse import attention
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.freeze import FrozenLinear, can_freeze, freeze
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import Made

needs_onednn = pytest.mark.skipif(
    not can_freeze(torch.float32), reason="this torch has no oneDNN operators"
)


@needs_onednn
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_frozen_encoder_is_the_same(activation: str, dtype, limit: float, rng) -> None:
    config = BertConfig(60, 48, 2, 4, 80, activation=activation)
    bert = Bert(config, attention.kernel("bucketed")).to(dtype).eval()
    packed = Packed.build([Made(rng.integers(0, 60, n), rng.integers(0, 2, n)) for n in (3, 40, 9)])
    with torch.inference_mode():
        before = bert(packed)
        freeze(bert)
        after = bert(packed)
    assert not any(isinstance(m, torch.nn.Linear) for m in bert.layers[0].attention.modules())
    assert float((before - after).abs().max()) <= limit * float(before.abs().max())


@needs_onednn
def test_a_frozen_layer_without_bias() -> None:
    linear = torch.nn.Linear(16, 8, bias=False)
    x = torch.randn(5, 16)
    with torch.inference_mode():
        torch.testing.assert_close(FrozenLinear(linear)(x), linear(x))


def test_double_is_left_alone() -> None:
    assert not can_freeze(torch.float64)
