"""`attend` on CUDA, inside a model that is not ours: the gradients of the CPU in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packhorse.attention import PackedAttention, attend, pick
from packhorse.packing import Packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LENGTHS = (9, 1, 130, 17, 64, 2, 300)


def make_packed() -> Packed:
    random = np.random.default_rng(0)
    return Packed.build([random.integers(0, 23, n) for n in LENGTHS])


class OneLayer(nn.Module):
    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        width = heads * head_size
        self.heads = heads
        self.tokens = nn.Embedding(23, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 5)

    def forward(self, packed: Packed) -> Tensor:
        qkv = self.qkv(self.tokens(packed.ids)).unflatten(-1, (3, self.heads, -1))
        return self.out(attend(*qkv.unbind(1), packed).flatten(1))


def gradient(model: nn.Module, packed: Packed) -> Tensor:
    scores = model(packed)
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    loss = (scores.double() * weights.to(scores.device)).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([x.double().cpu().flatten() for x in gradients])


@pytest.mark.parametrize(
    ("dtype", "head_size", "kernel", "limit"),
    [
        (torch.float32, 32, "bucketed", 1e-5),
        (torch.bfloat16, 64, "fused", 2e-2),
        (torch.float16, 32, "fused", 3e-3),
        (torch.bfloat16, 128, "fused", 2e-2),
    ],
    ids=str,
)
def test_gradients(dtype: torch.dtype, head_size: int, kernel: str, limit: float) -> None:
    device = torch.device("cuda")
    assert pick(device, dtype, backward=True, head_size=head_size).name == kernel
    torch.manual_seed(0)
    model = OneLayer(2, head_size).to(dtype)
    packed = make_packed()
    truth = gradient(model.double(), packed)
    result = gradient(model.to(device, dtype), packed.to(device))
    assert float((result - truth).norm() / truth.norm()) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_neighbor_of_nan_changes_nothing(dtype: torch.dtype) -> None:
    packed = make_packed().to("cuda")
    numbers = torch.randn(3, len(packed.ids), 2, 64, device="cuda", dtype=dtype)
    start, end = packed.cu_seqlens[2:4].tolist()
    others = torch.ones(len(packed.ids), dtype=torch.bool, device="cuda")
    others[start:end] = False
    results = []
    for value in (0.0, float("nan")):
        inputs = numbers.clone()
        inputs[:, start:end] += value
        inputs.requires_grad_()
        out = attend(*inputs.unbind(0), packed)
        (gradients,) = torch.autograd.grad(out[others].float().square().sum(), inputs)
        results.append((out[others], gradients[:, others]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_autocast_chooses_for_half_precision() -> None:
    packed = make_packed().to("cuda")
    model = OneLayer(2, 64).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        attention = PackedAttention(packed)
        qkv = model.qkv(model.tokens(packed.ids)).unflatten(-1, (3, 2, 64))
        out = attention(*qkv.unbind(1))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert model.qkv.weight.grad is not None and model.qkv.weight.grad.dtype == torch.float32


def test_a_mean_and_ends_of_sequences() -> None:
    packed = make_packed()
    x = torch.randn(len(packed.ids), 16)
    for name in ("first", "last", "mean"):
        here = getattr(packed, name)(x)
        there = getattr(packed.to("cuda"), name)(x.to("cuda"))
        torch.testing.assert_close(there.cpu(), here)
