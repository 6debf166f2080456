"""Attention probabilities dropped out by `fused`: which, how many, and the same on the way back.

Skipped where there is no NVIDIA GPU.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from packhorse import attention

from .test_cuda import make_packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda")
LENGTHS = [1, 17, 300, 128, 63, 2]
RATE = 0.25


def mixed(x: Tensor) -> Tensor:
    """The kernel's hash in int64, which holds what uint32 does."""
    whole = (1 << 32) - 1
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & whole
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & whole
    return x ^ (x >> 16)


def drawn(seed: int, heads: int, begin: int, length: int) -> Tensor:
    """What the kernel draws for each pair of tokens of a sequence, in [0, 1): [H, L, L]."""
    head = mixed(torch.arange(heads, device=CUDA) + 0x9E3779B9 & 0xFFFFFFFF)[:, None]
    tokens = torch.arange(begin, begin + length, device=CUDA)
    query_hash = mixed(mixed(seed & 0xFFFFFFFF ^ head) ^ tokens)
    key_hash = mixed(mixed(seed >> 32 & 0xFFFFFFFF ^ head) ^ tokens)
    return (mixed(query_hash[:, :, None] ^ key_hash[:, None, :]) >> 1) / (1 << 31)


def by_hand(qkv: Tensor, seed: int) -> Tensor:
    """Attention with dropout as everybody writes it."""
    outs, begin = [], 0
    for length in LENGTHS:
        q, k, v = qkv[begin : begin + length].permute(1, 2, 0, 3)  # each [H, L, D]
        shares = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
        keep = drawn(seed, q.shape[0], begin, length) >= RATE
        outs.append((shares * keep / (1 - RATE) @ v).transpose(0, 1))
        begin += length
    return torch.cat(outs)


def inputs(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    built = torch.randn(
        (sum(LENGTHS), 4, 4, width), generator=generator, device=CUDA, dtype=torch.float64
    )
    return built[:, :3].to(dtype), built[:, 3].to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [32, 64])
def test_out_and_gradients_are_those_by_hand(width: int, dtype: torch.dtype) -> None:
    from packhorse.attention.triton_kernels import attend

    packed = make_packed(LENGTHS).to(CUDA)
    plan = attention.kernel("fused").plan(packed)
    qkv, weight = inputs(width, dtype)
    number = 0x1234_5678_9ABC_DEF0
    seed = torch.tensor([number], device=CUDA)
    leaf = qkv.clone().requires_grad_()
    out = attend(leaf, plan.cu_seqlens, plan.order, plan.max_seqlen, seed, RATE)[0]
    (out * weight).sum().backward()

    def away(number: int) -> tuple[float, float]:
        expected = qkv.double().requires_grad_()
        exact = by_hand(expected, number)
        (exact * weight.double()).sum().backward()
        assert leaf.grad is not None and expected.grad is not None
        pairs = (out, exact), (leaf.grad, expected.grad)
        first, second = (float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs)
        return first, second

    assert max(away(number)) < (1e-2 if dtype is torch.bfloat16 else 2e-3)
    assert min(away(number + 1)) > 0.1  # control: another seed drops others


def test_as_many_are_dropped_as_asked_for_and_none_is_like_another() -> None:
    """What is drawn is even, and neither rows, columns, heads nor seeds go together."""
    first, second = (drawn(seed, 8, 1000, 512) for seed in (1 << 40 | 77, 1 << 40 | 78))
    for share in (0.1, 0.5):
        assert float((first < share).double().mean()) == pytest.approx(share, abs=0.002)
    lost = (first < 0.1).double() - 0.1
    others = [
        (second < 0.1).double() - 0.1,
        lost.roll(1, 0),
        lost.roll(1, 1),
        lost.roll(1, 2),
        lost.transpose(1, 2) * ~torch.eye(512, dtype=torch.bool, device=CUDA),
    ]
    for another in others:
        assert abs(float((lost * another).mean())) / 0.09 < 0.005
    for axis in (1, 2):  # each row and column loses its tenth: 51 of 512, give or take 7
        assert float((first < 0.1).double().sum(axis).std()) == pytest.approx(6.8, abs=0.5)


def test_every_call_drops_others_and_the_generator_decides() -> None:
    kernel = attention.pick(CUDA, torch.bfloat16, backward=True, dropout=True)
    assert kernel.name == "fused"
    plan = kernel.kernel.plan(make_packed(LENGTHS).to(CUDA), RATE)
    qkv, _ = inputs(32, torch.bfloat16)

    def run() -> Tensor:
        torch.cuda.manual_seed(5)
        return kernel.kernel(qkv, plan)

    once = run()
    assert torch.equal(once, run())
    assert not torch.equal(once, kernel.kernel(qkv, plan))


def test_a_graph_draws_anew_whenever_it_is_replayed() -> None:
    kernel = attention.kernel("fused")
    plan = kernel.plan(make_packed(LENGTHS).to(CUDA), RATE)
    qkv, _ = inputs(32, torch.bfloat16)
    kernel(qkv, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(qkv, plan)
    result = []
    for _ in range(2):
        graph.replay()
        result.append(out.clone())
    assert not torch.equal(*result)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_way_back_drops_what_the_way_there_did(compiled: bool) -> None:
    """Attention is linear in its values: what it gives is its gradient times them."""
    kernel = attention.kernel("fused")
    plan = kernel.plan(make_packed(LENGTHS).to(CUDA), RATE)
    qkv, weight = inputs(64, torch.bfloat16)
    run = torch.compile(kernel.__call__) if compiled else kernel
    qkv.requires_grad_()
    out = run(qkv, plan)
    (out * weight).sum().backward()
    assert qkv.grad is not None
    with torch.no_grad():
        # By token and head: what a token gives to all is what all get, summed over the sequence.
        there = (out * weight).double().sum(-1)
        back = (qkv.grad[:, 2] * qkv[:, 2]).double().sum(-1)
        again = (run(qkv, plan) * weight).double().sum(-1)
        bounds = [*accumulate(LENGTHS, initial=0)]
        whole, returned, redrawn = (
            torch.stack([x[a:b].sum(0) for a, b in pairwise(bounds)]) for x in (there, back, again)
        )
    assert float((whole - returned).norm() / whole.norm()) < 2e-2
    assert float((whole - redrawn).norm() / whole.norm()) > 0.1  # control: another draw
