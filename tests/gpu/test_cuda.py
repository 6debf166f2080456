"""The same promises on CUDA: every kernel, head and dtype; backward; graphs per bucket.

Skipped where there is no NVIDIA GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from packhorse import attention
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed
from packhorse.runtime import proof
from packhorse.runtime.backend import TorchBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda")
HALF = (torch.bfloat16, torch.float16)


BIG = {"width": 128, "heads": 4, "positions": 512, "std": 0.1}


@pytest.fixture(autouse=True)
def _full_precision() -> Any:
    """fp32 products in fp32: TF32 would hide differences under its own."""
    kept = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = kept


def make_packed(lengths: list[int], seed: int = 0) -> Packed:
    random = np.random.default_rng(seed)
    made = [proof.Made(random.integers(0, 97, n), np.zeros(n, int)) for n in lengths]
    return Packed.build(made)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kernel", ["varlen", "bucketed", "repack", "mask", "reference"])
def test_no_result_depends_on_neighbours(make_model, kernel: str, dtype: torch.dtype) -> None:
    if kernel == "varlen" and dtype not in HALF:
        with pytest.raises(KernelError, match="not in fp32"):
            attention.pick(CUDA, dtype, name=kernel)
        return
    proofs = list(proof.prove(make_model(dtype, **BIG), CUDA, [kernel], packs=12))
    assert [p for p in proofs if not p.passed] == []


def test_the_fastest_kernel_is_picked_and_says_why() -> None:
    assert attention.pick(CUDA, torch.bfloat16).name == "varlen"
    chosen = attention.pick(CUDA, torch.float32)
    assert chosen.name == "bucketed"
    assert "varlen" in chosen.why


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 128])
def test_varlen_equals_float64(dtype: torch.dtype, head_size: int) -> None:
    """Forward and backward lie no further from float64 than torch's own attention does."""
    packed = make_packed([1, 17, 512, 128, 63, 2, 300]).to(CUDA)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (4, len(packed.ids), 4, head_size)
    *qkv, weight = torch.randn(shape, generator=generator, device=CUDA, dtype=dtype).unbind(0)

    def run(kernel: str, to: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(to).detach().requires_grad_() for x in qkv]
        chosen = attention.kernel(kernel)
        out = chosen(*inputs, chosen.plan(packed))
        (out * weight.to(to)).sum().backward()
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    exact = run("reference", torch.float64)
    theirs, ours = run("reference", dtype), run("varlen", dtype)
    assert len(ours) == 4
    for name, truth, a, b in zip(("out", "dq", "dk", "dv"), exact, ours, theirs, strict=True):
        mine, other = ((x.double() - truth).norm() / truth.norm() for x in (a, b))
        assert float(mine) <= 1.5 * float(other) + 1e-3, name


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 6e-2), (torch.float16, 1e-2)])
def test_graphs_equal_eager_and_are_recorded_once_a_bucket(make_model, dtype, limit: float) -> None:
    model = make_model(dtype, **BIG)
    model.bert.use(attention.pick(CUDA, dtype).kernel)
    eager, graphs = TorchBackend(model, CUDA), TorchBackend(model, CUDA, graphs=True)
    # The first and last fall into one bucket: 1024 tokens, 16 slots, at most 128 a sequence.
    for seed, lengths in enumerate([[100, 20, 7], [60, 60, 8], [5, 3], [90, 20, 17]]):
        packed = make_packed(lengths, seed)
        heads = ["hidden", "embed"]
        for a, b in zip(eager(packed, heads), graphs(packed, heads), strict=True):
            assert float((a - b).abs().max()) <= limit * max(1.0, float(a.abs().max()))
    assert graphs._recorded is not None and len(graphs._recorded.recorded) == 3


@pytest.mark.parametrize("lengths", [[1], [5, 3], [100, 20, 7, 1]])
def test_a_batch_arrives_as_it_was(lengths: list[int]) -> None:
    here = make_packed(lengths)
    there = here.to(CUDA)
    for name in ("ids", "types", "positions", "cu_seqlens"):
        sent, arrived = getattr(here, name), getattr(there, name)
        assert arrived.is_cuda and arrived.dtype == sent.dtype
        assert torch.equal(arrived.cpu(), sent), name


@pytest.mark.parametrize("kernel", ["varlen", "bucketed"])
def test_training_step_matches_reference(make_model, kernel: str) -> None:
    """Gradients of a whole model in bf16 point where the float32 reference's do."""
    packed = make_packed([64, 3, 200, 31]).to(CUDA)

    def gradients(name: str, dtype: torch.dtype) -> torch.Tensor:
        model = make_model(dtype, **BIG).to(CUDA)
        model.bert.use(attention.kernel(name))
        (hidden,) = model(packed, "hidden")
        hidden.float().square().mean().backward()
        return torch.cat(
            [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        )

    truth, found = gradients("reference", torch.float32), gradients(kernel, torch.bfloat16)
    assert torch.cosine_similarity(truth, found, dim=0) > 0.999


def test_embeddings_of_minilm(minilm) -> None:
    import packhorse

    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market crashed today."] * 5
    exact = packhorse.load(minilm, device="cpu", dtype="fp32").embed(texts)
    for graphs in (False, True):
        found = packhorse.load(minilm, device="cuda", graphs=graphs).embed(texts)
        assert (exact * found).sum(1).min() >= 0.9995
    wide = packhorse.load(minilm, device="cuda", dtype="fp32").embed(texts)
    assert np.abs(exact - wide).max() <= 1e-5


def test_a_kernel_that_plans_on_the_host_is_compiled_but_not_recorded(make_model) -> None:
    model = make_model(torch.float32, **BIG)
    model.bert.use(attention.pick(CUDA, torch.float32).kernel)
    eager, graphs = TorchBackend(model, CUDA), TorchBackend(model, CUDA, graphs=True)
    assert graphs._recorded is None
    for lengths in ([100, 20, 7], [60, 60, 8]):
        (a,), (b,) = (backend(make_packed(lengths), ["hidden"]) for backend in (eager, graphs))
        assert float((a - b).abs().max()) <= 1e-4 * float(a.abs().max())
