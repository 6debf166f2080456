"""`attend` inside a model that is not ours: the gradients of every sequence alone.

The model is a pre-norm encoder with its own embeddings and attention layer, in plain PyTorch. Its
oracle is the same model with torch's own attention over one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from packhorse.attention import KERNELS, AttentionScope, PackedAttention, attend, kernel
from packhorse.errors import InputError, KernelError
from packhorse.packing import Packed

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LENGTHS = (9, 1, 30, 17, 64, 2, 30)
ON_CPU = [name for name in KERNELS if name not in ("fused", "varlen")]
TRAINING = [name for name in ON_CPU if kernel(name).serves.backward]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, attention: Attend) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return x + self.out(attention(q, k, v).flatten(-2))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(23, 24)
        self.positions = nn.Embedding(64, 24)
        self.layers = nn.ModuleList(Layer(24, 3) for _ in range(2))
        self.head = nn.Linear(24, 5)

    def forward(self, ids: Tensor, positions: Tensor, attention: Attend) -> Tensor:
        x = self.tokens(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, attention)
        return self.head(x)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention over one sequence, [L, H, D]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(0, 1)


def make_model(dtype: torch.dtype) -> Encoder:
    torch.manual_seed(3)
    return Encoder().to(dtype)


def make_sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 23, (n,), generator=generator) for n in LENGTHS]


def gradients(model: nn.Module, outputs: list[Tensor]) -> list[Tensor]:
    """Of a loss that weighs every output differently, with respect to every weight."""
    generator = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=outputs[0].dtype)
    for x in outputs:
        loss = loss + (x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def run_alone(model: Encoder) -> list[Tensor]:
    return [model(ids, torch.arange(len(ids)), plain_attention) for ids in make_sequences()]


def run_packed(model: Encoder, packed: Packed, name: str | None = None) -> list[Tensor]:
    attention = PackedAttention(packed, kernel=name)
    return packed.split(model(packed.ids, packed.positions, attention))


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative to the largest entry of each tensor of `b`."""
    return max(
        float((x - y).detach().abs().max() / y.detach().abs().max().clamp(min=1e-30))
        for x, y in zip(a, b, strict=True)
    )


def batches() -> dict[str, Packed]:
    sequences = make_sequences()
    packed = Packed.build(sequences)
    return {
        "ragged": packed,
        "bucket": packed.pad(200, 16),
        "rows": Packed.rows(sequences, [[4], [2, 6, 5], [0, 3, 1]], 70),
    }


@pytest.mark.parametrize("name", [None, *TRAINING])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gradients_are_those_of_every_sequence_alone(
    name: str | None, dtype: torch.dtype, limit: float
) -> None:
    model = make_model(dtype)
    alone = run_alone(model)
    expected = gradients(model, alone)
    for shape, packed in batches().items():
        if name == "mask" and not packed.capacity:
            continue
        outputs = run_packed(model, packed, name)
        assert largest_difference(outputs, alone) <= limit, shape
        assert largest_difference(gradients(model, outputs), expected) <= limit, shape


def test_without_boundaries_gradients_differ() -> None:
    """The control: one boundary is dropped, and the comparison above would fail."""
    model = make_model(torch.float64)
    packed = Packed.build(make_sequences())
    whole = replace(packed, cu_seqlens=packed.cu_seqlens[[0, -1]], max_seqlen=len(packed.ids))
    attention = PackedAttention(whole)
    outputs = packed.split(model(packed.ids, packed.positions, attention))
    expected = gradients(model, run_alone(model))
    assert largest_difference(gradients(model, outputs), expected) > 1e-2


@pytest.mark.machine
@pytest.mark.parametrize("name", [None, *ON_CPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inference_needs_no_gradients(name: str | None, dtype: torch.dtype) -> None:
    if name and (refusal := kernel(name).serves.refusal(torch.device("cpu"), dtype)):
        pytest.skip(refusal)
    model = make_model(dtype)
    with torch.no_grad():
        alone = run_alone(model)
        for shape, packed in batches().items():
            if name != "mask" or packed.capacity:
                assert largest_difference(run_packed(model, packed, name), alone) <= 1e-5, shape


@pytest.mark.parametrize("name", [None, *TRAINING])
def test_a_neighbor_of_nan_changes_nothing(name: str | None) -> None:
    """Not a bit: neither of the outputs nor of the gradients of the other sequences."""
    packed = batches()["rows"]
    generator = torch.Generator().manual_seed(1)
    clean = torch.randn(3, len(packed.ids), 3, 8, generator=generator)
    poisoned = clean.clone()
    place = packed.places[2]
    start, end = packed.cu_seqlens[place : place + 2].tolist()
    poisoned[:, start:end] = float("nan")
    others = torch.ones(len(packed.ids), dtype=torch.bool)
    others[start:end] = False
    results = []
    for numbers in (clean, poisoned):
        inputs = numbers.clone().requires_grad_()
        out = attend(*inputs.unbind(0), packed, kernel=name)
        (gradient,) = torch.autograd.grad((out[others] ** 2).sum(), inputs)
        results.append((out[others], gradient[:, others]))
        assert bool(out[~others].isnan().all()) == (numbers is poisoned)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_window_and_a_bias_have_gradients_too() -> None:
    packed = Packed.build(make_sequences())
    torch.manual_seed(0)
    q, k, v = torch.randn(3, len(packed.ids), 3, 8, dtype=torch.float64).unbind(0)
    bias = torch.randn(3, 21, dtype=torch.float64, requires_grad=True)
    scope = AttentionScope(window=12, bias=bias)
    out = attend(q, k, v, packed, scope=scope)
    expected = []
    for x in zip(*(packed.split(x) for x in (q, k, v)), strict=True):
        length = len(x[0])
        distance = torch.arange(length) - torch.arange(length)[:, None]
        scores = bias[:, distance.clamp(-10, 10) + 10]
        scores = scores.masked_fill(distance.abs() > 12, float("-inf"))
        heads = (part.transpose(0, 1) for part in x)
        expected.append(scaled_dot_product_attention(*heads, scores).transpose(0, 1))
    torch.testing.assert_close(out, torch.cat(expected))
    (gradient,) = torch.autograd.grad((out**2).sum(), bias, retain_graph=True)
    (truth,) = torch.autograd.grad((torch.cat(expected) ** 2).sum(), bias)
    torch.testing.assert_close(gradient, truth)


def test_a_window_that_hides_nothing_restricts_no_kernel() -> None:
    packed = Packed.build([[1, 2, 3], [4]])
    assert PackedAttention(packed, scope=AttentionScope(2)).scope.window is None
    assert PackedAttention(packed, scope=AttentionScope(1)).scope.window == 1


def test_dropout_is_drawn_in_every_call() -> None:
    packed = Packed.build(make_sequences())
    q, k, v = torch.randn(3, len(packed.ids), 3, 8).unbind(0)
    attention = PackedAttention(packed, dropout=0.5)
    assert not torch.equal(attention(q, k, v), attention(q, k, v))
    still = PackedAttention(packed)
    assert torch.equal(still(q, k, v), still(q, k, v))


def test_a_batch_is_prepared_once_for_all_layers() -> None:
    packed = Packed.build(make_sequences())
    attention = PackedAttention(packed)
    model = make_model(torch.float32)
    model(packed.ids, packed.positions, attention)
    assert len(attention._prepared) == 1
    with torch.no_grad():  # another pass, another kernel
        model(packed.ids, packed.positions, attention)
    assert len(attention._prepared) == 2


def test_what_does_not_fit_is_refused() -> None:
    packed = Packed.build([[1, 2, 3], [4]])
    x = torch.randn(4, 2, 8)
    with pytest.raises(InputError, match=r"the 4 tokens of the batch; .* \[5, 2, 8\]"):
        attend(torch.randn(5, 2, 8), x, x, packed)
    with pytest.raises(InputError, match=r"\[tokens, heads, head width\]"):
        attend(x.flatten(1), x.flatten(1), x.flatten(1), packed)
    with pytest.raises(InputError, match="must be repeated"):
        attend(x, x[:, :1], x[:, :1], packed)
    with pytest.raises(InputError, match="one floating dtype, but have fp32, fp64, fp32"):
        attend(x, x.double(), x, packed)
    with pytest.raises(InputError, match="the batch on cpu; move the batch"):
        attend(*[x.to("meta")] * 3, packed)
    with pytest.raises(InputError, match="dropout must be"):
        attend(x, x, x, packed, dropout=1.0)
    with pytest.raises(KernelError, match="unknown kernel 'fancy'"):
        attend(x, x, x, packed, kernel="fancy")
    with pytest.raises(KernelError, match="needs a batch in rows"):
        attend(x, x, x, packed, kernel="mask")
    with pytest.raises(KernelError, match="no backward pass; use 'reference'"):
        attend(x.requires_grad_(), x, x, packed, kernel="native")
