"""Small convolutions of a compiled step: equal to torch's, and used where they serve alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv2d

from packhorse.native import Obstacle
from packhorse_port import convolve

pytestmark = pytest.mark.machine

CHANNELS, WINDOW = (1, 18), (1, 5)
SIZES = {"n": (1, 5), "c": CHANNELS, "k": CHANNELS, "r": WINDOW, "s": WINDOW}
SIZES |= {"h": (0, 9), "w": (0, 16)}
CNN = [(16, 1, 5, 3, 3, 28, 28), (16, 5, 12, 5, 5, 13, 13)]  # of the course


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    try:
        convolve._functions(convolve._defines(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)))
    except Obstacle as why:
        pytest.skip(f"no compiled C here: {why}")


def check(n: int, c: int, k: int, r: int, s: int, h: int, w: int) -> None:
    """Forward and backward against torch in double precision."""
    generator = torch.Generator().manual_seed(n + 10 * c + 100 * k)
    x, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((n, c, h, w), (k, c, r, s), (k,))
    )
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    wanted = conv2d(*exact)
    grad = torch.randn(wanted.shape, generator=generator)
    wanted.backward(grad.double())
    found = (convolve.convolve(x, weight, bias), *convolve.convolve_backward(grad, x, weight, True))
    for mine, theirs in zip(found, (wanted, *(each.grad for each in exact)), strict=True):
        assert theirs is not None and away(mine, theirs.detach()) < 1e-5
    apart = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(convolve.convolve(apart, weight, bias), found[0])
    without = convolve.convolve(x, weight, None)
    assert away(without, (wanted - exact[2][:, None, None]).detach()) < 1e-5
    empty, *same = convolve.convolve_backward(grad, x, weight, False)
    assert not len(empty) and all(map(torch.equal, same, found[2:]))


def away(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs).norm() / theirs.norm().clamp(min=1e-3))


@pytest.mark.parametrize("sizes", CNN)
def test_those_of_the_course(sizes: tuple[int, ...]) -> None:
    check(*sizes)


@settings(max_examples=12, deadline=None)  # each is a call of the compiler
@given(st.fixed_dictionaries({name: st.integers(*bounds) for name, bounds in SIZES.items()}))
def test_any_shape(sizes: dict[str, int]) -> None:
    sizes["h"] += sizes["r"]  # a window fits in
    sizes["w"] += sizes["s"]
    check(**sizes)


def traced(layer: torch.nn.Conv2d, x: Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    def micro(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        weight, bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        given = {"weight": weight, "bias": bias}
        out = torch.func.functional_call(layer, given, (x,))
        return torch.autograd.grad((out * out).sum(), [weight, bias])

    module = make_fx(micro, tracing_mode="fake", _allow_non_fake_inputs=True)(
        x, layer.weight, layer.bias
    )
    convolve.use(module)
    return module


@pytest.mark.parametrize(
    ("how", "width", "ours"),
    [
        ({}, 12, True),
        ({"stride": 2}, 12, False),
        ({"padding": 1}, 12, False),
        ({"dilation": 2}, 12, False),
        ({"groups": 2}, 12, False),
        ({}, 600, False),  # too much work
    ],
)
def test_what_does_not_serve_is_left_alone(how: dict[str, Any], width: int, ours: bool) -> None:
    layer, x = torch.nn.Conv2d(4, 6, 3, **how), torch.randn(2, 4, width, width)
    module = traced(layer, x)
    targets = {str(node.target) for node in module.graph.nodes}
    assert any("packhorse.convolve" in name for name in targets) == ours
    assert any("aten.convolution" in name for name in targets) != ours
    layer(x).square().sum().backward()
    for mine, theirs in zip(
        module(x, layer.weight, layer.bias), (layer.weight.grad, layer.bias.grad), strict=True
    ):
        assert theirs is not None and away(mine, theirs.double()) < 1e-4


def test_a_machine_without_a_compiler_keeps_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> Any:
        raise Obstacle("no C compiler found")

    monkeypatch.setattr(convolve, "_functions", nothing)
    module = traced(torch.nn.Conv2d(4, 6, 3), torch.randn(2, 4, 12, 12))
    assert any("aten.convolution" in str(node.target) for node in module.graph.nodes)
