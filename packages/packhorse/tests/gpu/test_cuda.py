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
from packhorse.runtime.backend import LARGEST_SMALL, TorchBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda")
HALF = (torch.bfloat16, torch.float16)


BIG = {"width": 128, "heads": 4, "positions": 512, "std": 0.1}


@pytest.fixture(autouse=True)
def _full_precision() -> Any:
    """fp32 products in fp32: TF32 would hide differences under its own."""
    previous = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = previous


def make_packed(lengths: list[int], seed: int = 0) -> Packed:
    random = np.random.default_rng(seed)
    built = [proof.SyntheticSequence(random.integers(0, 97, n), np.zeros(n, int)) for n in lengths]
    return Packed.build(built)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kernel", [name for name in attention.KERNELS if name != "native"])
def test_no_result_depends_on_neighbors(make_model, kernel: str, dtype: torch.dtype) -> None:
    if kernel in ("fused", "varlen") and dtype not in HALF:
        with pytest.raises(KernelError, match="not in fp32"):
            attention.pick(CUDA, dtype, name=kernel)
        return
    proofs = list(proof.prove(make_model(dtype, **BIG), CUDA, [kernel], packs=12))
    assert [p for p in proofs if not p.passed] == []


def test_the_fastest_kernel_is_picked_and_says_why() -> None:
    assert attention.pick(CUDA, torch.bfloat16).name == "fused"
    assert attention.pick(CUDA, torch.bfloat16, head_size=80).name == "varlen"
    chosen = attention.pick(CUDA, torch.float32)
    assert chosen.name == "bucketed"
    assert "varlen" in chosen.reason


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("kernel", "head_size"),
    [
        ("varlen", 32),
        ("varlen", 64),
        ("varlen", 128),
        ("fused", 32),
        ("fused", 64),
        ("fused", 96),
        ("fused", 128),
    ],
)
def test_half_precision_lies_by_float64(dtype: torch.dtype, kernel: str, head_size: int) -> None:
    """Forward and backward lie no further from float64 than torch's own attention does."""
    packed = make_packed([1, 17, 512, 128, 63, 2, 300]).to(CUDA)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (4, len(packed.ids), 4, head_size)
    *qkv, weight = torch.randn(shape, generator=generator, device=CUDA, dtype=dtype).unbind(0)

    def run(name: str, to: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(to).detach().requires_grad_() for x in qkv]
        chosen = attention.kernel(name)
        out = chosen(torch.stack(inputs, 1), chosen.plan(packed))
        (out * weight.to(to)).sum().backward()
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    exact = run("reference", torch.float64)
    expected, actual = run("reference", dtype), run(kernel, dtype)
    assert len(actual) == 4
    for name, truth, a, b in zip(("out", "dq", "dk", "dv"), exact, actual, expected, strict=True):
        error, baseline = ((x.double() - truth).norm() / truth.norm() for x in (a, b))
        assert float(error) <= 1.5 * float(baseline) + 1e-3, name


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
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


def test_small_batches_are_recorded_when_there_is_time(make_model) -> None:
    model = make_model(torch.bfloat16, **BIG)
    model.bert.use(attention.pick(CUDA, torch.bfloat16).kernel)
    eager, graphs = TorchBackend(model, CUDA), TorchBackend(model, CUDA, graphs="small")
    assert graphs._recorded is not None
    large = [128] * (LARGEST_SMALL // 128 + 1)
    graphs.prepare_later([make_packed(large), make_packed([9])])
    for prepared in (False, True):
        for seed, lengths in enumerate([[100, 20, 7], [60, 60, 8], [5, 3], large]):
            packed = make_packed(lengths, seed)
            (a,), (b,) = (backend(packed, ["hidden"]) for backend in (eager, graphs))
            (c,) = eager(make_packed(lengths, seed + 10), ["hidden"])  # the control: other tokens
            assert float((a - b).abs().max()) <= float((a - c).abs().max()) / 3
        if not prepared:
            assert not graphs._recorded.recorded
            while graphs.prepare_next():
                pass
    # At most 128, 64, 8 and 16 tokens a sequence; the large batch is not recorded.
    assert len(graphs._recorded.recorded) == 4
    assert graphs.computed(make_packed(large)) == sum(large)


def test_heads_with_an_output_per_sequence_are_recorded_too(make_model) -> None:
    model = make_model(torch.bfloat16, **BIG)
    model.bert.use(attention.pick(CUDA, torch.bfloat16).kernel)
    eager, graphs = TorchBackend(model, CUDA), TorchBackend(model, CUDA, graphs="small")
    assert graphs._recorded is not None
    graphs.prepare_later([], ("embed",))
    for prepared in (False, True):
        for seed, lengths in enumerate([[100, 20, 7], [60, 60, 8], [5, 3]]):
            packed = make_packed(lengths, seed)
            for heads in (["embed"], ["pooled"]):
                (a,), (b,) = (backend(packed, heads) for backend in (eager, graphs))
                assert len(b) == len(lengths)
                (c,) = eager(make_packed(lengths, seed + 10), heads)  # the control: other tokens
                assert float((a - b).abs().max()) <= float((a - c).abs().max()) / 3
        if not prepared:
            while graphs.prepare_next():
                pass
    recorded = graphs._recorded.recorded
    assert len(recorded) == 6  # at most 128, 64 and 8 tokens a sequence, each with either head
    assert all(len(graph.outputs[0]) < len(graph.inputs[0]) // 3 for graph in recorded.values())


@pytest.mark.parametrize("lengths", [[1], [5, 3], [100, 20, 7, 1]])
def test_a_batch_arrives_as_it_was(lengths: list[int]) -> None:
    here = make_packed(lengths)
    there = here.to(CUDA)
    for name in ("ids", "types", "positions", "cu_seqlens"):
        sent, arrived = getattr(here, name), getattr(there, name)
        assert arrived.is_cuda and arrived.dtype == sent.dtype
        assert torch.equal(arrived.cpu(), sent), name


@pytest.mark.parametrize("kernel", ["fused", "varlen", "bucketed"])
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

    truth, result = gradients("reference", torch.float32), gradients(kernel, torch.bfloat16)
    assert torch.cosine_similarity(truth, result, dim=0) > 0.999


def test_embeddings_of_minilm(minilm) -> None:
    import packhorse

    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market crashed today."] * 5
    exact = packhorse.load(minilm, device="cpu", dtype="fp32").embed(texts)
    for graphs in (False, True):
        result = packhorse.load(minilm, device="cuda", graphs=graphs).embed(texts)
        assert (exact * result).sum(1).min() >= 0.9995
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


def fused_gradient(lengths: list[int], seed: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the sequence `index` comes to and its gradient, among neighbors drawn from the seed."""
    packed, chosen = make_packed(lengths).to(CUDA), attention.kernel("fused")
    begin, end = packed.cu_seqlens[index : index + 2].tolist()
    drawn = torch.Generator("cuda").manual_seed(seed)
    shape = (len(packed.ids), 3, 4, 64)
    qkv = torch.randn(shape, generator=drawn, device=CUDA, dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(99)
    values = torch.randn((end - begin, *shape[1:]), generator=generator, device=CUDA)
    qkv[begin:end] = values.bfloat16()
    out = chosen(qkv.requires_grad_(), chosen.plan(packed))
    (out * qkv.detach()[:, 0]).sum().backward()
    assert qkv.grad is not None
    return out.detach()[begin:end], qkv.grad[begin:end]


def test_fused_is_the_same_to_the_bit_whatever_the_neighbors() -> None:
    first = fused_gradient([70, 300, 5], seed=1, index=1)
    for lengths, seed, separate in (([70, 300, 5], 2, 1), ([1, 1, 512, 300], 3, 3), ([300], 4, 0)):
        again = fused_gradient(lengths, seed, separate)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    another = fused_gradient(
        [70, 301, 5], seed=1, index=1
    )  # control: a token more is another sequence
    assert not torch.equal(first[0], another[0][:300])


def test_words_are_scored_alike_when_the_vocabulary_is_filled_up(make_model) -> None:
    model = make_model(torch.bfloat16, **BIG).to(CUDA)
    packed = make_packed([30, 12]).to(CUDA)
    (scores,) = model(packed, "mlm")
    plain = model.heads["mlm"].decoder
    assert plain.out_features % 8 and scores.shape[-1] == plain.out_features
    head = model.heads["mlm"]
    x = head.norm(torch.nn.functional.gelu(head.dense(model.bert(packed))))
    assert torch.allclose(scores.float(), plain(x).float(), atol=2e-2)
