"""Scores of content against distance (DeBERTa) under the kernels that know them, against loops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse import attention
from packhorse.attention import kernels
from packhorse.attention.disentangled import PositionTerms
from packhorse.attention.scope import AttentionScope
from packhorse.errors import KernelError
from packhorse.model.disentangled import distance_rows
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

CPU = torch.device("cpu")
KERNELS = ("bucketed", "repack", "reference")
LENGTHS = (5, 40, 1, 17, 2, 150, 40)
HEADS, WIDTH, SPAN, REACH = 3, 8, 16, 100
ROWS = distance_rows(160, SPAN, REACH)
KINDS = {"both": (True, True), "c2p": (True, False), "p2c": (False, True)}


def make_packed() -> Packed:
    return Packed.build([SyntheticSequence(np.zeros(n, int), np.zeros(n, int)) for n in LENGTHS])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def inputs(kind: str) -> tuple[Tensor, PositionTerms]:
    by_key, by_query = KINDS[kind]
    keys = random(2 * SPAN, HEADS, WIDTH, seed=1) if by_key else None
    queries = random(2 * SPAN, HEADS, WIDTH, seed=2) if by_query else None
    return random(sum(LENGTHS), 3, HEADS, WIDTH), PositionTerms(keys, queries)


def loop(qkv: Tensor, terms: PositionTerms, scope: AttentionScope) -> Tensor:
    """One query after another."""
    assert scope.rows is not None
    q, k, v = qkv.unbind(1)
    outputs: list[Tensor] = []
    for first, end in pairwise(make_packed().cu_seqlens.tolist()):
        for i in range(first, end):
            others = torch.arange(first, end)
            if scope.window is not None:
                others = others[(others - i).abs() <= scope.window]
            rows = scope.rows[others - i + len(scope.rows) // 2]
            scores = torch.einsum("hd,khd->hk", q[i], k[others])
            if terms.keys is not None:
                scores = scores + torch.einsum("hd,khd->hk", q[i], terms.keys[rows])
            if terms.queries is not None:
                scores = scores + torch.einsum("khd,khd->hk", k[others], terms.queries[rows])
            scores = scores * terms.scale(WIDTH)
            if scope.bias is not None:
                farthest = scope.bias.shape[-1] // 2
                scores = scores + scope.bias[:, (others - i).clamp(-farthest, farthest) + farthest]
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[others]))
    return torch.stack(outputs)


def knowing(kernel: attention.Kernel) -> kernels.DisentangledKernel:
    return cast("kernels.DisentangledKernel", kernel)


def run(kernel: str, qkv: Tensor, terms: PositionTerms, scope: AttentionScope) -> Tensor:
    chosen = attention.kernel(kernel)
    assert chosen.serves.disentangled
    return knowing(chosen)(qkv, chosen.plan(make_packed(), 0.0, scope), terms)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_score_distances(kernel: str, kind: str) -> None:
    qkv, terms = inputs(kind)
    scope = AttentionScope(rows=ROWS)
    actual = run(kernel, qkv, terms, scope)
    torch.testing.assert_close(actual, loop(qkv, terms, scope), atol=1e-12, rtol=1e-12)
    mirrored = AttentionScope(rows=ROWS.flip(0))  # the control: before is not after
    assert not torch.allclose(actual, loop(qkv, terms, mirrored), atol=1e-3)
    one_off = AttentionScope(rows=(ROWS + 1).clamp(max=2 * SPAN - 1))
    assert not torch.allclose(actual, loop(qkv, terms, one_off), atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_beside_a_window_and_a_bias(kernel: str) -> None:
    qkv, terms = inputs("both")
    bias = torch.linspace(-2, 2, HEADS * 9).double().reshape(HEADS, 9)
    for window in (None, 3):
        scope = AttentionScope(window, bias, ROWS)
        actual = run(kernel, qkv, terms, scope)
        torch.testing.assert_close(actual, loop(qkv, terms, scope), atol=1e-12, rtol=1e-12)
        assert not torch.allclose(actual, loop(qkv, terms, AttentionScope(rows=ROWS)), atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_many_heads_are_taken_in_parts(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.attention.bucketed.CACHED_DISTANCES", 1)
    qkv, terms = inputs("both")
    scope = AttentionScope(None, torch.linspace(-1, 1, HEADS * 9).double().reshape(HEADS, 9), ROWS)
    expected = loop(qkv, terms, scope)
    torch.testing.assert_close(run(kernel, qkv, terms, scope), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_neighbor_comes_through(kernel: str) -> None:
    qkv, terms = inputs("both")
    spoilt = qkv.clone()
    spoilt[5:45] = float("nan")  # the second sequence
    others = torch.ones(len(qkv), dtype=torch.bool)
    others[5:45] = False
    scope = AttentionScope(rows=ROWS)
    clean, dirty = run(kernel, qkv, terms, scope), run(kernel, spoilt, terms, scope)
    assert torch.equal(clean[others], dirty[others]) and dirty[5:45].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_reach_content_and_distances(kernel: str) -> None:
    scope, gradients = AttentionScope(rows=ROWS), []
    weight = random(sum(LENGTHS), HEADS, WIDTH, seed=3)
    for attend in (lambda *given: run(kernel, *given), loop):
        qkv, terms = inputs("both")
        assert terms.keys is not None and terms.queries is not None
        leaves = [x.requires_grad_() for x in (qkv, terms.keys, terms.queries)]
        gradients.append(torch.autograd.grad((attend(qkv, terms, scope) * weight).sum(), leaves))
    for actual, expected in zip(*gradients, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def test_a_compiled_kernel_scores_distances() -> None:
    chosen = knowing(attention.kernel("bucketed"))
    step = torch.compile(chosen.__call__, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        for kind in KINDS:
            qkv, terms = inputs(kind)
            plan = chosen.plan(make_packed(), 0.0, AttentionScope(rows=ROWS))
            torch.testing.assert_close(
                step(qkv, plan, terms),
                loop(qkv, terms, AttentionScope(rows=ROWS)),
                atol=1e-12,
                rtol=1e-12,
            )


def test_other_kernels_refuse_and_name_one_that_can() -> None:
    needs: dict[str, Any] = {"disentangled": True}
    scope = AttentionScope(rows=ROWS)
    for name in set(attention.KERNELS) - set(KERNELS):
        serves = attention.kernel(name).serves
        assert not serves.disentangled
        device = torch.device("cuda" if name in ("fused", "varlen") else "cpu")
        dtype = torch.bfloat16
        assert serves.mismatch(device, dtype, **needs) == kernels.NO_POSITIONS
        with pytest.raises(KernelError, match=f"'{name}' cannot run .*disentangled.*'bucketed'"):
            attention.kernel(name).plan(make_packed(), 0.0, scope)
    assert attention.pick(CPU, torch.float32, **needs).name == "bucketed"
    assert attention.pick(CPU, torch.float32, backward=True, **needs).name == "reference"
    with pytest.raises(KernelError, match=r"'mask' cannot run here: .*disentangled.*'bucketed'"):
        attention.pick(CPU, torch.float32, name="mask", **needs)


@pytest.mark.parametrize(("span", "reach"), [(256, 512), (256, 1024), (16, 40), (32, 0), (7, 20)])
def test_ranges_of_distances_are_those_of_transformers(span: int, reach: int) -> None:
    """Every distance of a model's longest text, and the control: another reach, other ranges."""
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    length = max(2 * reach, 100)
    tokens = torch.zeros(length, 1)
    before = deberta.build_relative_position(tokens, tokens, span if reach else -1, reach or -1)
    expected = (before[0] + span).clamp(0, 2 * span - 1)  # query, key
    rows = distance_rows(length - 1, span, reach)
    distances = torch.arange(length) - torch.arange(length)[:, None]  # of the key from its query
    assert torch.equal(rows[distances + length - 1], expected)
    assert not reach or not torch.equal(rows, distance_rows(length - 1, span, 2 * reach))
