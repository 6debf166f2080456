"""Windows and scores by distance, under every kernel, against plain loops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse import attention
from packhorse.attention import kernels
from packhorse.attention.scope import FULL_SCOPE, AttentionScope
from packhorse.errors import KernelError
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

pytestmark = pytest.mark.machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KERNELS = [name for name in attention.KERNELS if name not in ("fused", "varlen")]
LENGTHS = (5, 40, 1, 17, 150)
HEADS, WIDTH = 2, 8
BIAS = torch.linspace(-2, 2, HEADS * 9).reshape(HEADS, 9)
SLOPES = torch.tensor([0.002, 0.05])
SCOPES = {
    "full": FULL_SCOPE,
    "itself": AttentionScope(0),
    "near": AttentionScope(3),
    "wider than a block": AttentionScope(70),
    "bias": AttentionScope(None, BIAS),
    "both": AttentionScope(6, BIAS),
    "causal": AttentionScope(causal=True),
    "causal and near": AttentionScope(20, causal=True),
    "slopes": AttentionScope(slopes=SLOPES),  # ALiBi: beyond every limit of a learned bias
    "causal slopes": AttentionScope(causal=True, slopes=SLOPES),
}


def make_packed(rows: bool = False) -> Packed:
    built = [SyntheticSequence(np.zeros(n, int), np.zeros(n, int)) for n in LENGTHS]
    return Packed.rows(built, [[0, 1, 2], [3], [4]], 160) if rows else Packed.build(built)


def loop(qkv: Tensor, packed: Packed, scope: AttentionScope) -> Tensor:
    """One query after another."""
    q, k, v = qkv.double().unbind(1)
    out = torch.zeros_like(q)
    bounds = packed.cu_seqlens.tolist()
    window = len(q) if scope.window is None else scope.window
    for first, end in pairwise(bounds):
        for i in range(first, end):
            last = i if scope.causal else i + window
            near = torch.arange(max(first, i - window), min(end, last + 1))
            scores = torch.einsum("hd,khd->hk", q[i], k[near]) * q.shape[-1] ** -0.5
            if scope.bias is not None:
                farthest = scope.bias.shape[-1] // 2
                scores += scope.bias[:, (near - i).clamp(-farthest, farthest) + farthest]
            if scope.slopes is not None:
                scores -= scope.slopes[:, None] * (near - i).abs()
            out[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[near])
    return out


def run(kernel: str, qkv: Tensor, scope: AttentionScope, dropout: float = 0.0) -> Tensor:
    chosen = attention.kernel(kernel)
    return chosen(qkv, chosen.plan(make_packed(chosen.serves.rows), dropout, scope))


def random_qkv(rows: bool, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(480 if rows else sum(LENGTHS), 3, HEADS, WIDTH, generator=generator)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, bool], Tensor]:
    return {
        (name, rows): loop(random_qkv(rows), make_packed(rows), scope)
        for name, scope in SCOPES.items()
        for rows in (False, True)
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scope", SCOPES)
def test_every_kernel_knows_how_far_a_token_sees(kernel: str, scope: str, expected) -> None:
    if refusal := attention.kernel(kernel).serves.refusal(CPU, torch.float32):
        pytest.skip(refusal)
    rows = attention.kernel(kernel).serves.rows
    result = run(kernel, random_qkv(rows), SCOPES[scope]).double()
    torch.testing.assert_close(result, expected[scope, rows], atol=1e-5, rtol=1e-5)
    for another in set(SCOPES) - {scope}:  # the control: none is taken for another
        assert not torch.allclose(result, expected[another, rows], atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scope", ["both", "causal", "slopes"])
def test_no_scope_lets_a_neighbor_through(kernel: str, scope: str) -> None:
    if refusal := attention.kernel(kernel).serves.refusal(CPU, torch.float32):
        pytest.skip(refusal)
    qkv = random_qkv(attention.kernel(kernel).serves.rows)
    another = qkv.clone()
    another[5:45] = float("nan")  # the second sequence, in rows too
    mask = torch.ones(len(qkv), dtype=torch.bool)
    mask[5:45] = False
    result, spoilt = run(kernel, qkv, SCOPES[scope]), run(kernel, another, SCOPES[scope])
    assert torch.equal(result[mask], spoilt[mask]) and spoilt[5:45].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_causal_tokens_see_nothing_later(kernel: str) -> None:
    """What comes later changes nothing, even where it is not finite; the control: what is seen."""
    if refusal := attention.kernel(kernel).serves.refusal(CPU, torch.float32):
        pytest.skip(refusal)
    qkv = random_qkv(attention.kernel(kernel).serves.rows)
    later = qkv.clone()
    later[40:45] += 1  # the end of the second sequence
    before, after = slice(5, 40), slice(40, 45)
    result, other = run(kernel, qkv, SCOPES["causal"]), run(kernel, later, SCOPES["causal"])
    torch.testing.assert_close(result[before], other[before], atol=1e-6, rtol=0)
    assert not torch.allclose(result[after], other[after], atol=1e-3)
    both = run(kernel, qkv, FULL_SCOPE), run(kernel, later, FULL_SCOPE)
    assert not torch.allclose(both[0][before], both[1][before], atol=1e-3)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "native"])
def test_gradients_flow_to_queries_and_to_the_bias(kernel: str) -> None:
    """Sequences of unlike lengths fill up groups; a slot of filler must not spoil a gradient."""
    rows = attention.kernel(kernel).serves.rows
    packed, weight = make_packed(rows), random_qkv(rows, 1)[:, 0].double()
    result = []
    for attend in (
        lambda *arguments: run(kernel, *arguments),
        lambda q, scope: loop(q, packed, scope),
    ):
        qkv = random_qkv(rows).double().requires_grad_()
        bias = BIAS.double().requires_grad_()
        total = (attend(qkv, AttentionScope(6, bias)) * weight).sum()
        result.append(torch.autograd.grad(total, (qkv, bias)))
    for actual, reference in zip(*result, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-9, rtol=1e-9)


def test_half_precision_stays_close() -> None:
    qkv = random_qkv(False)
    wide, sloped = (run("reference", qkv, SCOPES[name]) for name in ("near", "slopes"))
    for kernel in ("native", "bucketed", "reference"):
        if attention.kernel(kernel).serves.refusal(CPU, torch.bfloat16):
            continue
        result = run(kernel, qkv.bfloat16(), SCOPES["near"])
        assert float((result.float() - wide).abs().max()) < 0.05, kernel
        result = run(kernel, qkv.bfloat16(), SCOPES["slopes"])
        assert float((result.float() - sloped).abs().max()) < 0.05, kernel


def test_kernels_without_windows_or_biases_refuse_them() -> None:
    fused, varlen = attention.kernel("fused"), attention.kernel("varlen")
    assert fused.serves.refusal(CUDA, torch.bfloat16, windows=True) == kernels.NO_WINDOW
    assert varlen.serves.refusal(CUDA, torch.bfloat16, biases=True) == kernels.NO_BIAS
    with pytest.raises(KernelError, match=r"'fused' cannot run this model.*use 'bucketed'"):
        fused.plan(make_packed(), 0.0, AttentionScope(3))
    with pytest.raises(KernelError, match=r"'varlen' cannot run this model.*distance"):
        varlen.plan(make_packed(), 0.0, SCOPES["both"])
    assert varlen.plan(make_packed(), 0.0, AttentionScope(3)).window == 3
    assert fused.serves.refusal(CUDA, torch.bfloat16, causal=True) == kernels.NO_CAUSAL
    with pytest.raises(KernelError, match=r"'fused' cannot run this model.*causal"):
        fused.plan(make_packed(), 0.0, SCOPES["causal"])
    with pytest.raises(KernelError, match=r"'varlen' cannot run this model.*distance"):
        varlen.plan(make_packed(), 0.0, SCOPES["slopes"])
    assert varlen.plan(make_packed(), 0.0, SCOPES["causal"]).causal
    with pytest.raises(KernelError, match="a bias or slopes, not both"):
        run("reference", random_qkv(False), AttentionScope(bias=BIAS, slopes=SLOPES))


def test_the_choice_says_why_it_passed_others_over() -> None:
    for need in ("windows", "biases", "causal"):
        needs: dict[str, Any] = {need: True}
        choice = attention.pick(CPU, torch.float32, **needs)
        assert choice.name in ("native", "bucketed") and choice.kernel.serves.windows
        assert attention.pick(CPU, torch.float32, backward=True, **needs).name == "reference"
    with pytest.raises(KernelError, match=r"'fused' cannot run here: it runs on cuda"):
        attention.pick(CPU, torch.float32, name="fused", windows=True)


@pytest.mark.parametrize("kernel", ["native", "bucketed"])
def test_a_compiled_kernel_sees_as_far(kernel: str) -> None:
    if refusal := attention.kernel(kernel).serves.refusal(CPU, torch.float32):
        pytest.skip(refusal)
    chosen, qkv = attention.kernel(kernel), random_qkv(False)
    step = torch.compile(chosen.__call__, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        for scope in (FULL_SCOPE, *(SCOPES[name] for name in ("near", "both", "causal slopes"))):
            plan = chosen.plan(make_packed(), 0.0, scope)
            torch.testing.assert_close(step(qkv, plan), chosen(qkv, plan))
