"""The invariant, on every kernel that runs on a CPU, every head and dtype; and its control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from packhorse import attention
from packhorse.attention import KERNELS
from packhorse.device import FLOAT8
from packhorse.errors import KernelError
from packhorse.model import float8_inference
from packhorse.runtime import proof

pytestmark = pytest.mark.machine

CPU = torch.device("cpu")
# Of the fixture `make_model`, in the conftest.py of all tests.
AXES = (
    "causal, shared keys",
    "two-way, local layers, norms of results",
    "ALiBi, gates",
    "stretched by length",
    "pairs side by side",
)
ON_CPU = [name for name in KERNELS if name != "varlen"]


def serves(kernel: str, dtype: torch.dtype) -> bool:
    try:
        attention.pick(CPU, dtype, name=kernel)
    except KernelError:
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", ON_CPU)
def test_no_result_depends_on_neighbors(make_model, kernel: str, dtype: torch.dtype) -> None:
    if not serves(kernel, dtype):
        pytest.skip(f"{kernel} does not serve {dtype} here")
    proofs = list(proof.prove(make_model(dtype), CPU, [kernel], packs=3))
    heads = {"hidden", "pooled", "embed", "mlm", "nsp", "span", "classify", "tokens"}
    heads |= {"sparse", "lexical", "multi"}
    assert {p.head for p in proofs} == heads
    assert {p.check for p in proofs} == set(proof.CHECKS)
    assert [p for p in proofs if not p.passed] == []


@pytest.mark.parametrize("kernel", ON_CPU)
def test_no_result_of_int8_depends_on_neighbors(make_model, kernel: str) -> None:
    if not serves(kernel, torch.float32):
        pytest.skip(f"{kernel} does not serve fp32 here")
    proofs = list(
        proof.prove(make_model(torch.float32), CPU, [kernel], packs=2, products=torch.int8)
    )
    assert {p.dtype for p in proofs} == {"int8"}
    assert [p for p in proofs if not p.passed] == []


@pytest.mark.parametrize("kernel", ON_CPU)
def test_no_result_of_float8_depends_on_neighbors(make_model, kernel: str) -> None:
    if not serves(kernel, torch.float32):
        pytest.skip(f"{kernel} does not serve fp32 here")
    model = make_model(torch.float32)
    scales = dict.fromkeys(float8_inference.linear_layers(model.bert), 0.05)
    assert scales
    proofs = list(proof.prove(model, CPU, [kernel], packs=2, products=FLOAT8, scales=scales))
    assert {p.dtype for p in proofs} == {"float8"}
    assert [p for p in proofs if not p.passed] == []


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("axes", AXES)
def test_nor_does_it_in_layers_beyond_berts(make_model, axes: str, dtype: torch.dtype) -> None:
    model = make_model(dtype, axes=axes)
    needs = model.bert.config.needs
    refusals = {name: attention.kernel(name).serves.refusal(CPU, dtype, **needs) for name in ON_CPU}
    kernels = [name for name, refusal in refusals.items() if refusal is None]
    assert {"reference", "bucketed", "repack", "mask"} <= set(kernels)
    proofs = list(proof.prove(model, CPU, kernels, packs=2))
    assert {p.kernel for p in proofs} == set(kernels)
    assert [p for p in proofs if not p.passed] == []


@pytest.mark.parametrize("packs", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", ON_CPU)
def test_alone_equals_in_many_packs(make_model, kernel: str, packs: int) -> None:
    if not serves(kernel, torch.float32):
        pytest.skip(f"{kernel} does not serve fp32 here")
    backend = proof.TorchBackend(make_model(torch.float32), CPU)
    prover = proof.Prover(backend, attention.kernel(kernel), packs=packs, seed=3)
    assert max(prover.alone().values()) <= 1e-5


def test_the_control_sees_loose_attention(make_model) -> None:
    """A kernel that looks across boundaries fails the proof, and is reported as failing."""

    class Everywhere(attention.kernel("reference").__class__):
        def plan(self, packed, dropout=0.0):
            return super().plan(replace(packed, cu_seqlens=packed.cu_seqlens[[0, -1]]), dropout)

    backend = proof.TorchBackend(make_model(torch.float32), CPU)
    prover = proof.Prover(backend, Everywhere(), packs=4, seed=0)
    assert min(prover.neighbor().values()) > 1e-4
    assert min(prover.poison().values()) == float("inf")
    failed = proof.Proof("x", "fp32", "hidden", "neighbour", 0.5, 0.0)
    unseen = proof.Proof("x", "fp32", "hidden", "control", 0.0, 0.0)
    assert not failed.passed and not unseen.passed


def test_mask_without_containment_would_leak_nan(make_model, monkeypatch) -> None:
    """The control of the containment in `mask`: without it the poison check fails."""
    from packhorse.attention import mask

    monkeypatch.setattr(
        mask, "_poisoned", lambda q, k, v, plan: torch.zeros(len(q), 1, 1, dtype=torch.bool)
    )
    backend = proof.TorchBackend(make_model(torch.float32), CPU)
    prover = proof.Prover(backend, mask.Mask(), packs=6, seed=0)
    assert max(prover.poison().values()) == float("inf")
    assert max(prover.neighbor().values()) == 0.0


def test_mask_contains_what_overflows() -> None:
    """Numbers too large to multiply stay with their owner; neighbors are as without them."""
    from packhorse.attention.mask import Mask
    from packhorse.packing.batch import Packed

    fakes = [
        proof.SyntheticSequence(torch.zeros(n).long().numpy(), torch.zeros(n).long().numpy())
        for n in (3, 5)
    ]
    packed = Packed.rows(fakes, [[0, 1]], capacity=8)
    kernel = Mask()
    qkv = torch.randn(8, 3, 2, 4)
    clean = kernel(qkv, kernel.plan(packed))
    for tensor in qkv.unbind(1):
        original = tensor[1, 0, 0].item()
        tensor[1, 0, 0] = 1e30
        output = kernel(qkv, kernel.plan(packed))
        assert output[:3].isnan().all()
        assert torch.equal(output[3:], clean[3:])
        tensor[1, 0, 0] = original
