"""float8 inference on CUDA: each kernel by torch's operators, and whole layers by those unfused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from packhorse import attention
from packhorse import device as devices
from packhorse.model import float8_inference
from packhorse.model.bert import ACTIVATIONS
from packhorse.model.config import BertConfig
from packhorse.model.float8_inference import Float8Layer, Float8Product, to_float8
from packhorse.packing.batch import Packed
from packhorse.reports import random_model
from packhorse.runtime import proof
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.invariant import SyntheticSequence

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not devices.fast_float8(CUDA), reason="no Hopper GPU"
)
CONFIG = BertConfig(2000, hidden_size=256, layers=3, heads=4, intermediate_size=1024)
LENGTHS = (9, 1, 130, 17, 64, 2, 300)
STEPS = 40.0


def drawn(*shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=CUDA) * size).bfloat16()


def differing(a: Tensor, b: Tensor) -> float:
    """The share of float8 numbers that differ."""
    return float((a.float() != b.float()).float().mean())


def far(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("tokens", [1, 77, 1024])
def test_cast(activation: str | None, tokens: int) -> None:
    from packhorse.model.float8_kernels import cast

    x = drawn(tokens, 1024, size=3)
    y = ACTIVATIONS[activation](x.float()) if activation else x.float()
    result = cast(x, STEPS, activation)
    assert differing(result, to_float8(y, STEPS)) < 0.02
    assert far(result.float() / STEPS, y) < 0.03
    assert differing(result, to_float8(y.roll(1, 1), STEPS)) > 0.2


def test_cast_saturates_and_keeps_nan() -> None:
    from packhorse.model.float8_kernels import cast

    x = torch.tensor([[float("nan"), 1e30, -1e30, float("inf"), 0.0]], device=CUDA).bfloat16()
    result = cast(x, STEPS).float()[0].tolist()
    assert np.isnan(result[0]) and result[1:] == [448, -448, 448, 0]
    assert cast(x, STEPS, "gelu").float()[0, :3].isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("width", [64, 384, 1000, 1024])
def test_add_norm_cast(width: int) -> None:
    from packhorse.model.float8_kernels import add_norm_cast

    x, residual, weight, bias = drawn(77, width), drawn(77, width), drawn(width), drawn(width)
    x[5, 3] = float("nan")
    out, rounded = add_norm_cast(x, residual, weight, bias, 1e-12, STEPS)
    y = F.layer_norm(x.float() + residual.float(), (width,), weight.float(), bias.float(), 1e-12)
    assert bool(out[5].isnan().all()) and bool(rounded[5].float().isnan().all())
    rows = [row for row in range(77) if row != 5]
    assert far(out[rows], y[rows]) < 3e-3
    assert differing(rounded[rows], to_float8(y[rows], STEPS)) < 0.005
    assert far(out[rows], y[rows].roll(1, 0)) > 0.1


@pytest.mark.parametrize("heads", [(4, 64), (12, 32)])
def test_attention_writes_float8(heads: tuple[int, int]) -> None:
    from packhorse.attention import triton_float8

    packed = batch(LENGTHS)
    qkv = drawn(len(packed.ids), 3, *heads, size=2)
    kernel = attention.kernel("fused")
    plan: Any = kernel.plan(packed)
    rows = triton_float8.FORWARD[heads[1]][0]
    blocks = triton_float8.blocks(plan.cu_seqlens, plan.order, len(packed.ids), rows)
    result = triton_float8.forward(qkv, blocks, STEPS)
    reference = attention.kernel("reference")
    exact = reference(qkv.float(), reference.plan(packed))
    assert far(result.float() / STEPS, exact) < 0.04  # float8's own rounding is 0.026
    own = slice(*packed.cu_seqlens[2:4].tolist())
    qkv[: own.start] = float("nan")
    qkv[own.stop :] = float("nan")
    again = triton_float8.forward(qkv, blocks, STEPS)
    assert torch.equal(again[own].view(torch.uint8), result[own].view(torch.uint8))
    assert bool(again[: own.start].float().isnan().all())


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize(("tokens", "inputs"), [(64, 256), (1000, 384), (4096, 1024)])
def test_product_with_activation(activation: str, tokens: int, inputs: int) -> None:
    from packhorse.model.float8_product import product

    x, weight = (to_float8(drawn(n, inputs), 50.0) for n in (tokens, 512))
    bias = drawn(512)
    exact = (x.double() * 0.02) @ (weight.double() * 0.02).t() * 0.1 + bias.double()
    y = ACTIVATIONS[activation](exact)
    result = product(x, weight, bias, 0.02 * 0.02 * 0.1, STEPS, activation)
    assert differing(result, to_float8(y, STEPS)) < 0.05
    assert far(result.float() / STEPS, y) < 0.03
    assert far(result.float() / STEPS, y.roll(1, 0)) > 0.1


def batch(lengths: tuple[int, ...], seed: int = 0) -> Packed:
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 1900, n) for n in lengths]
    return Packed.build([SyntheticSequence(ids, ids * 0) for ids in rows]).to(CUDA)


@pytest.fixture
def model() -> Any:
    made = random_model.build(CONFIG, seed=3).eval()
    for name, weight in made.bert.named_parameters():
        if "layers" in name and weight.ndim == 2:
            weight.data *= 3
    made.bert.use(attention.kernel("fused"))
    return made.to(CUDA, torch.bfloat16)


def test_fused_layers_compute_what_layers_do(model: Any) -> None:
    packed = batch(LENGTHS)
    exact = copy.deepcopy(model).float()
    exact.bert.use(attention.kernel("reference"))
    scales = float8_inference.calibrate(model.bert, [packed])
    plain = copy.deepcopy(model)
    float8_inference.use_float8(plain.bert, scales, fuse=False)
    float8_inference.use_float8(model.bert, scales)
    assert all(isinstance(layer, Float8Layer) for layer in model.bert.layers)
    assert isinstance(plain.bert.layers[0].down, Float8Product)
    with torch.inference_mode():
        a, b, c = model.bert(packed), plain.bert(packed), exact.bert(packed)
    assert far(b, c) < 0.1
    assert far(a, c) < 1.2 * far(b, c)  # as far from fp32, because roundings are one fewer
    assert far(a, b) < 0.1


def test_the_proof_of_isolation(model: Any) -> None:
    scales = float8_inference.calibrate(model.bert, [batch(LENGTHS)])
    proofs = proof.prove(model, CUDA, ["fused"], packs=4, products=devices.FLOAT8, scales=scales)
    assert [p for p in proofs if not p.passed] == []


@pytest.mark.parametrize("graphs", [True, "small"])
def test_graphs_give_the_same_bits(model: Any, graphs: Any) -> None:
    packed = batch(LENGTHS).to(torch.device("cpu"))
    scales = float8_inference.calibrate(model.bert, [packed])
    backend = TorchBackend(model, CUDA, graphs, products=devices.FLOAT8, scales=scales)
    first = backend(packed, ["hidden"])[0].clone()
    backend(batch((300, 200), 5).to(torch.device("cpu")), ["hidden"])
    again = backend(packed, ["hidden"])[0]
    assert torch.equal(first, again)
    with torch.inference_mode():
        eager = model.bert(packed.to(CUDA))
    assert far(first, eager) < 0.05


def test_it_loads_and_stays_near_bf16(tmp_path: Path) -> None:
    import packhorse

    folder = random_model.write("tiny", tmp_path / "tiny")
    texts = ["the quick brown fox", "jumps over the lazy dog and on and on", "a"]
    exact = packhorse.load(folder, device="cuda", dtype="fp32").embed(texts)
    encoder = packhorse.load(folder, device="cuda", dtype="float8")
    assert encoder.dtype == devices.FLOAT8
    vectors = encoder.embed(texts)
    assert F.cosine_similarity(torch.tensor(vectors), torch.tensor(exact)).min() > 0.99
