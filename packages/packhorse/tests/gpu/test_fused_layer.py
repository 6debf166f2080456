"""A layer's training step in few kernels, as it is compiled: as near to fp32 as the plain layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from packhorse import attention, device
from packhorse.model import float8, fused_layer, rows
from packhorse.model.bert import BertLayer
from packhorse.model.config import BertConfig
from packhorse.packing.batch import Packed
from packhorse.train import estimate

pytest.importorskip("triton")
CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and fused_layer.serves(CUDA, torch.bfloat16)),
    reason="no CUDA device that runs the kernels",
)
FLOAT8 = pytest.param(
    True,
    marks=pytest.mark.skipif(
        not (torch.cuda.is_available() and device.fast_float8(CUDA)),
        reason="no CUDA device with float8",
    ),
)
WIDTH = 256
TOKENS = 1024


def make_layer(dropout: float) -> BertLayer:
    torch.manual_seed(0)
    config = BertConfig(97, WIDTH, 1, 4, 4 * WIDTH, dropout=dropout)
    layer = BertLayer(config, attention.kernel("reference")).to(CUDA)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return layer


def in_half(layer: BertLayer, small: bool) -> BertLayer:
    half = copy.deepcopy(layer).bfloat16()
    half.attention.use(attention.kernel("fused"))
    for name in float8.PRODUCTS if small else ():
        parent, _, last = name.rpartition(".")
        plain = half.get_submodule(name)
        assert isinstance(plain, torch.nn.Linear)
        setattr(half.get_submodule(parent), last, float8.Float8Linear(plain))
    return half


def learned(layer: BertLayer, x: Tensor, gradient: Tensor, packed: Packed) -> list[Tensor]:
    """What a layer makes of x, and all gradients."""
    held = x.to(next(layer.parameters()).dtype, copy=True).requires_grad_()  # gradients add up
    kernel = layer.attention.kernel
    out = layer(held, kernel.plan(packed))  # pyright: ignore[reportAttributeAccessIssue]
    out.backward(gradient.to(out.dtype))
    grads = [held.grad, *(p.grad for p in layer.parameters())]
    return [out.detach().float(), *(g.float() for g in grads if g is not None)]


# torch.compile's own, about functions that its tracer makes instances of.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("small", [False, FLOAT8], ids=["bf16", "float8"])
@pytest.mark.parametrize("compiled", [False, True], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_are_as_near_as_the_plain_layers(
    dropout: float, compiled: bool, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = make_layer(dropout)
    plain, fused = in_half(exact, small), in_half(exact, small)
    fused.fused = fused_layer.forward
    assert fused_layer.fits(fused)
    seeds = torch.tensor([3, 1 << 60], device=CUDA)
    monkeypatch.setattr(fused_layer, "draw_seeds", lambda _: seeds)
    for layer in (exact, plain):
        numbers = iter(seeds)
        layer.dropout.forward = lambda input, numbers=numbers: rows.dropped(
            input, next(numbers), dropout
        )
    if compiled:
        fused.compile(fullgraph=True, dynamic=False)
    packed = estimate.synthetic_batch(TOKENS, 128).packed.to(CUDA)
    x, gradient = (torch.randn(TOKENS, WIDTH, device=CUDA).bfloat16() for _ in range(2))
    truth, before, now = (learned(layer, x, gradient, packed) for layer in (exact, plain, fused))
    for actual, expected, reference in zip(now, before, truth, strict=True):
        size = float(reference.norm())
        allowed = float((expected - reference).norm()) + 0.004 * size
        assert float((actual - reference).norm()) < 1.2 * allowed < 0.3 * size
    if dropout:
        seeds += 1
        fused.zero_grad(set_to_none=True)
        assert float((learned(fused, x, gradient, packed)[0] - truth[0]).norm()) > 0.05 * float(
            truth[0].norm()
        )
