"""Positions that attention is told: angles, buckets of distances, and the axes that choose them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import attention
from packhorse.errors import CheckpointError
from packhorse.model.bert import Bert, GatedUpProjection, PreNormLayer, RMSNorm
from packhorse.model.config import BertConfig
from packhorse.model.positions import (
    MAX_DISTANCE,
    RelativePositionBias,
    RotaryAttention,
    alibi_slopes,
    relative_position_bucket,
    rotary_plan,
)
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

MODERN = {
    "rotary_base": 160_000.0,
    "local_rotary_base": 10_000.0,
    "norm_first": True,
    "gated": True,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
}


def config(**axes) -> BertConfig:
    return BertConfig(40, 16, 3, 2, 24, max_positions=64, type_vocab_size=0, **axes)


def make_packed(*lengths: int) -> Packed:
    random = np.random.default_rng(0)
    return Packed.build(
        [SyntheticSequence(random.integers(0, 40, n), np.zeros(n, int)) for n in lengths]
    )


def test_buckets_are_those_of_mpnet() -> None:
    modeling = pytest.importorskip("transformers.models.mpnet.modeling_mpnet")
    distances = torch.arange(-400, 401)
    expected = modeling.MPNetEncoder.relative_position_bucket(distances)
    assert [relative_position_bucket(d, 32) for d in distances.tolist()] == expected.tolist()
    assert len({relative_position_bucket(d, 32) for d in range(91, 400)}) == 1, "all beyond are one"


def test_distances_are_rows_of_the_table() -> None:
    module = RelativePositionBias(32, 2)
    result = module()
    for distance in (-MAX_DISTANCE, -9, -1, 0, 1, 30, MAX_DISTANCE):
        expected = module.table.weight[relative_position_bucket(distance, 32)]
        assert torch.equal(result[:, distance + MAX_DISTANCE], expected)
    result.sum().backward()
    assert module.table.weight.grad is not None and module.table.weight.grad[0].sum() == 2


def test_scores_of_turned_queries_depend_on_the_distance_alone() -> None:
    qkv = torch.randn(1, 3, 1, 8).expand(2, -1, -1, -1)
    seen: list[tuple[float, Any]] = []

    def attend(qkv, plan):
        q, k, v = qkv.unbind(1)
        seen.append((float((q[0] * k[1]).sum()), v))

    for first in (0, 7, 1000):
        packed = replace(make_packed(2), positions=torch.tensor([first, first + 5]))
        plan = rotary_plan(None, packed, 10_000.0, config())
        RotaryAttention(attend)(qkv, plan)  # pyright: ignore
    scores = [score for score, _ in seen]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-3)
    q, k, v = qkv[0]
    assert torch.equal(seen[0][1][0], v), "values are not turned"
    assert scores[0] != pytest.approx(float((q * k).sum()), abs=1e-2)


def test_pairs_side_by_side_are_complex_numbers() -> None:
    """RoFormer's pairing: each pair, read as a complex number, is multiplied by e^(i·angle)."""
    packed, qkv = make_packed(6), torch.randn(6, 3, 2, 8, dtype=torch.float64)
    axes = config(rotary_base=100.0, rotary_interleaved=True, rotary_width=6)
    plan = rotary_plan(None, packed, 100.0, axes)
    result = RotaryAttention(lambda x, _: x, interleaved=True)(qkv, plan)  # pyright: ignore
    numbers = torch.view_as_complex(qkv[..., :6].unflatten(-1, (3, 2)).contiguous())
    angles = packed.positions.double()[:, None] * 100.0 ** (-torch.arange(3).double() / 3)
    turned = torch.view_as_real(
        numbers * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    )
    expected = torch.cat((turned.flatten(-2), qkv[..., 6:]), -1)
    torch.testing.assert_close(result[:, :2], expected[:, :2], atol=1e-6, rtol=1e-6)
    assert torch.equal(result[:, 2], qkv[:, 2])
    halves = RotaryAttention(lambda x, _: x)(qkv, plan)  # pyright: ignore
    assert not torch.allclose(halves[:, :2], expected[:, :2], atol=1e-3)


def test_angles_stretch_by_the_length_of_each_text() -> None:
    """A short text beside a long one has the angles that it has alone; the long one has others."""
    axes = config(rotary_base=1000.0, dynamic_stretch=2.0, trained_positions=8)
    plain = config(rotary_base=1000.0)
    together = rotary_plan(None, make_packed(5, 20), 1000.0, axes)
    for first, length in ((0, 5), (5, 20)):
        alone = rotary_plan(None, make_packed(length), 1000.0, axes)
        assert torch.equal(together.sines[first : first + length], alone.sines)
        fixed = rotary_plan(None, make_packed(length), 1000.0, plain)
        assert torch.allclose(alone.sines, fixed.sines) == (length <= 8)


def test_slopes_are_those_of_the_authors_of_alibi() -> None:
    def power_of_two(heads: int) -> list[float]:
        return [2 ** (-8 * (number + 1) / heads) for number in range(heads)]

    for heads, expected in ((8, power_of_two(8)), (12, power_of_two(8) + power_of_two(16)[:8:2])):
        slopes = alibi_slopes(heads, torch.device("cpu"))
        assert slopes.tolist() == pytest.approx(expected, rel=1e-7)


def test_root_mean_square_norms() -> None:
    x = torch.randn(5, 16)
    plain, offset = RMSNorm(16, 1e-6), RMSNorm(16, 1e-6, offset=True)
    with torch.no_grad():
        plain.weight.copy_(torch.randn(16))
        offset.weight.copy_(plain.weight - 1)
    expected = torch.nn.functional.rms_norm(x, (16,), plain.weight, 1e-6)
    torch.testing.assert_close(plain(x), expected)
    torch.testing.assert_close(offset(x), expected)


@pytest.mark.parametrize("kernel", ["reference", "bucketed", "native"])
def test_heads_that_share_keys_are_heads_with_equal_keys(kernel: str) -> None:
    """A model whose weights of keys and values are repeated gives the same without grouping."""
    if refusal := attention.kernel(kernel).serves.refusal(torch.device("cpu"), torch.float32):
        pytest.skip(refusal)
    axes: dict[str, Any] = {**MODERN, "causal": True, "norm_kind": "rms", "query_key_norm": True}
    grouped = Bert(config(**axes, head_width=8, kv_heads=1), attention.kernel(kernel)).eval()
    for parameter in grouped.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state = dict(grouped.state_dict())
    for number in range(3):
        q, kv = (state.pop(f"layers.{number}.attention.{part}.weight") for part in ("q", "kv"))
        keys, values = kv.chunk(2)
        state[f"layers.{number}.attention.qkv.weight"] = torch.cat((q, keys, keys, values, values))
    full = Bert(config(**axes, head_width=8), attention.kernel(kernel)).eval()
    full.load_state_dict(state)
    packed = make_packed(9, 1, 30)
    with torch.inference_mode():
        torch.testing.assert_close(grouped(packed), full(packed), atol=1e-5, rtol=1e-5)
        full.get_parameter("layers.0.attention.qkv.weight")[-1] += 1  # the control
        assert not torch.allclose(grouped(packed), full(packed), atol=1e-3)


@pytest.mark.parametrize("axes", [MODERN, {**MODERN, "local_layers": (1, 2), "window": 2}])
def test_two_plans_at_most_and_no_bias_where_none_is(axes) -> None:
    bert = Bert(config(**axes), attention.kernel("reference")).eval()
    assert bert.embed.positions is None and not any("bias" in n for n, _ in bert.named_parameters())
    assert isinstance(bert.layers[0], PreNormLayer) and isinstance(
        bert.layers[0].up, GatedUpProjection
    )
    assert isinstance(bert.layers[0].attention_norm, torch.nn.Identity)
    plans = bert._plans(make_packed(3, 9))
    assert set(plans) == ({False, True} if "local_layers" in axes else {False})


def test_a_window_wide_enough_is_none() -> None:
    """And the control: a narrower one is not."""
    outputs = []
    for window in (64, 8, 2):
        bert = Bert(
            config(**MODERN, local_layers=(1, 2), window=window), attention.kernel("bucketed")
        )
        torch.manual_seed(1)
        for parameter in bert.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        outputs.append(bert.eval()(make_packed(9, 4)))
    assert torch.equal(outputs[0], outputs[1]) and not torch.allclose(outputs[0], outputs[2])


def test_kernels_are_exchanged_under_their_turning() -> None:
    bert = Bert(config(**MODERN), attention.kernel("reference")).eval()
    before = bert(make_packed(5, 20, 1))
    another = attention.kernel("bucketed")
    bert.use(another)
    assert bert.kernel is another and bert.get_submodule(
        "layers.0.attention"
    ).kernel == RotaryAttention(another)
    torch.testing.assert_close(bert(make_packed(5, 20, 1)), before, atol=1e-5, rtol=1e-5)


def test_what_a_model_asks_of_a_kernel() -> None:
    plain, modern = config(), config(**MODERN, local_layers=(1,), window=4)
    assert {need: value for need, value in plain.needs.items() if value} == {"head_size": 8}
    assert plain.classic
    assert config(alibi=True).needs["biases"] and config(causal=True).needs["causal"]
    for axes in ({"alibi": True}, {"causal": True}, {"kv_heads": 1}, {"head_width": 4}):
        assert not config(**axes).classic
    assert modern.needs["windows"] and not modern.needs["biases"] and not modern.classic
    assert config(distance_buckets=32).needs["biases"] and not config(distance_buckets=32).classic


@pytest.mark.parametrize(
    "axes",
    [
        {"rotary_base": 0.5},
        {"kv_heads": 3},
        {"rotary_base": 10.0, "rotary_width": 3},
        {"rotary_base": 10.0, "rotary_width": 10},
        {"rotary_base": 10.0, "rotary_stretch": 0.5},
        {"rotary_base": 10.0, "dynamic_stretch": 2.0},
        {"rotary_base": 10.0, "alibi": True},
        {"norm_kind": "rms"},
        {"norm_kind": "batch", "norm_first": True},
        {"branch_norms": True},
        {"rotary_base": float("nan")},
        {"local_rotary_base": 10_000.0},
        {"rotary_base": 10_000.0, "heads": 16},
        {"distance_buckets": 30},
        {"distance_buckets": -4},
        {"window": -1},
        {"classify_pooling": "max"},
        {"norm_bias": False},
    ],
)
def test_axes_that_are_out_of_bounds(axes) -> None:
    with pytest.raises(CheckpointError, match="config"):
        BertConfig(
            **{"vocab_size": 40, "hidden_size": 16, "layers": 1, "heads": 2} | axes,
            intermediate_size=8,
        )
