"""Windows and scores by distance on CUDA: every kernel that serves there, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse import attention
from packhorse.attention.scope import AttentionScope
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda")
LENGTHS = (5, 200, 1, 64, 300)
HEADS, WIDTH = 4, 64


def make_packed() -> Packed:
    return Packed.build(
        [SyntheticSequence(np.zeros(n, int), np.zeros(n, int)) for n in LENGTHS]
    ).to(CUDA)


def run(kernel: str, qkv: Tensor, scope: AttentionScope) -> Tensor:
    chosen = attention.kernel(kernel)
    return chosen(qkv, chosen.plan(make_packed(), 0.0, scope))


def learned(kernel: str, dtype: torch.dtype, biased: bool, window: int | None) -> list[Tensor]:
    """Result and gradients of a fixed random projection, in fp32."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(sum(LENGTHS), 3, HEADS, WIDTH, generator=generator)
    qkv = numbers.to(CUDA, dtype).requires_grad_()
    bias = torch.linspace(-2, 2, HEADS * 33).reshape(HEADS, 33).to(CUDA, dtype).requires_grad_()
    out = run(kernel, qkv, AttentionScope(window, bias if biased else None))
    weight = torch.randn(out.shape, generator=generator).to(CUDA, dtype)
    gradients = torch.autograd.grad((out * weight).sum(), (qkv, bias) if biased else (qkv,))
    return [x.detach().float() for x in (out, *gradients)]


@pytest.mark.parametrize("kernel", ["varlen", "bucketed", "repack", "reference"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_and_biases(kernel: str, biased: bool, dtype: torch.dtype) -> None:
    serves = attention.kernel(kernel).serves
    if refusal := serves.refusal(CUDA, dtype, True, WIDTH, windows=True, biases=biased):
        pytest.skip(refusal)
    exact = learned("reference", torch.float32, biased, 20)
    result = learned(kernel, dtype, biased, 20)
    limit = 0.03 if dtype == torch.bfloat16 else 1e-3
    for actual, expected in zip(result, exact, strict=True):
        assert float((actual - expected).norm() / expected.norm()) < limit
    control = learned(kernel, dtype, biased, None)
    assert float((control[0] - exact[0]).norm() / exact[0].norm()) > 0.1, "a window ignored shows"


def distant(kernel: str, dtype: torch.dtype, scope: AttentionScope) -> list[Tensor]:
    """Result and gradient of a fixed random projection under a scope, in fp32."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(sum(LENGTHS), 3, HEADS, WIDTH, generator=generator)
    qkv = numbers.to(CUDA, dtype).requires_grad_()
    out = run(kernel, qkv, scope)
    weight = torch.randn(out.shape, generator=generator).to(CUDA, dtype)
    (gradient,) = torch.autograd.grad((out * weight).sum(), qkv)
    return [x.detach().float() for x in (out, gradient)]


@pytest.mark.parametrize("kernel", ["varlen", "bucketed", "repack", "reference"])
@pytest.mark.parametrize("kind", ["causal", "causal and near", "slopes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_attention_and_slopes(kernel: str, kind: str, dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.004], device=CUDA) if kind == "slopes" else None
    window = 20 if kind == "causal and near" else None
    scope = AttentionScope(window, causal="causal" in kind, slopes=slopes)
    needs = {"windows": window is not None, "biases": scope.biased, "causal": scope.causal}
    if refusal := attention.kernel(kernel).serves.refusal(CUDA, dtype, True, WIDTH, **needs):
        pytest.skip(refusal)
    exact = distant("reference", torch.float32, scope)
    result = distant(kernel, dtype, scope)
    limit = 0.03 if dtype == torch.bfloat16 else 1e-3
    for actual, expected in zip(result, exact, strict=True):
        assert float((actual - expected).norm() / expected.norm()) < limit
    control = distant(kernel, dtype, AttentionScope())
    assert float((control[0] - exact[0]).norm() / exact[0].norm()) > 0.1, "one ignored shows"


def test_the_choice_for_windows_and_biases() -> None:
    half = torch.bfloat16
    assert attention.pick(CUDA, half, head_size=64, windows=True).name == "varlen"
    assert attention.pick(CUDA, half, head_size=64, biases=True).name == "bucketed"
    assert attention.pick(CUDA, half, head_size=64).name in ("fused", "varlen")
