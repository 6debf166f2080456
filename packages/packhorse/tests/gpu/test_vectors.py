"""On CUDA: poolings, dense layers and norms make the CPU's vectors, recorded and invariant too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from packhorse import attention
from packhorse.model.heads import Embed
from packhorse.model.model import Model
from packhorse.model.pooling import POOLINGS
from packhorse.model.vectors import ACTIVATIONS, Dense, UnitLength, VectorNorm
from packhorse.packing.batch import Packed
from packhorse.runtime import invariant
from packhorse.runtime.backend import TorchBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = {"width": 128, "heads": 4, "positions": 512, "std": 0.1}
LENGTHS = [100, 20, 7, 60, 1, 33]
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class FakeSequence:
    """A made-up sequence, with a prompt that is not pooled."""

    ids: np.ndarray
    types: np.ndarray
    prompt_length: int


@pytest.fixture(autouse=True)
def _full_precision():
    """fp32 products in fp32: TF32 would hide differences under its own."""
    previous = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = previous


def make_packed(prompt: int) -> Packed:
    random = np.random.default_rng(0)
    ids = [random.integers(0, 97, length) for length in LENGTHS]
    return Packed.build([FakeSequence(x, x * 0, prompt) for x in ids])


def make(make_model, dtype: torch.dtype, activation: str = "PReLU") -> Model:
    """A BERT whose vectors are of all poolings, projected twice, with a norm between."""
    bert = make_model(torch.float32, **SIZES).bert
    width = len(POOLINGS) * SIZES["width"]
    stages: list[nn.Module] = [
        Dense(width, 48, activation=activation, residual=activation != "GLU"),
        VectorNorm(24 if activation == "GLU" else 48),
        UnitLength(),
        Dense(24 if activation == "GLU" else 48, 16, bias=False, activation="GELU"),
    ]
    head = Embed(POOLINGS, stages, include_prompt=False)
    torch.manual_seed(1)
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.1)
    return Model(bert, {"embed": head}).to(dtype).eval()


def backend(model: Model, device: torch.device, **mode) -> TorchBackend:
    dtype = next(model.parameters()).dtype
    pick = invariant.pick if mode.get("fixed") else attention.pick
    model.bert.use(pick(device, dtype, **model.bert.config.needs).kernel)
    return TorchBackend(model, device, **mode)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("prompt", [0, 3])
def test_vectors_are_those_of_the_cpu(make_model, prompt: int, dtype, graphs: bool) -> None:
    packed = make_packed(prompt)
    (expected,) = backend(make(make_model, torch.float32), CPU)(packed, ["embed"])
    runs = backend(make(make_model, dtype), CUDA, graphs=graphs)
    for _ in range(2):  # the second replays what the first recorded
        (result,) = runs(packed, ["embed"])
        assert float((result.cpu() - expected).abs().max()) <= LIMITS[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(make_model, activation: str) -> None:
    packed = make_packed(0)
    (expected,) = backend(make(make_model, torch.float32, activation), CPU)(packed, ["embed"])
    (result,) = backend(make(make_model, torch.float32, activation), CUDA)(packed, ["embed"])
    assert float((result.cpu() - expected).abs().max()) <= LIMITS[torch.float32]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_invariant_vectors_are_the_same_alone(make_model, dtype) -> None:
    runs = backend(make(make_model, dtype), CUDA, fixed=512)
    random = np.random.default_rng(0)
    built = [FakeSequence(x, x * 0, 3) for x in (random.integers(0, 97, n) for n in LENGTHS)]
    (together,) = runs(Packed.build(built), ["embed"])
    alone = torch.cat([runs(Packed.build([sequence]), ["embed"])[0] for sequence in built])
    assert torch.equal(together, alone)


def test_prompt_lengths_arrive_as_they_were() -> None:
    here = make_packed(3)
    there = here.to(CUDA)
    assert here.prompt_lengths is not None and there.prompt_lengths is not None
    assert there.prompt_lengths.is_cuda
    assert torch.equal(there.prompt_lengths.cpu(), here.prompt_lengths)
