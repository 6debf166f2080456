"""LAMB on CUDA: many tensors at once as one by one, and no step waits for the device.

Skipped where there is no NVIDIA GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from packhorse.optim import LAMB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHAPES = [(), (0,), (5,), (300, 70), (1100, 1000)]


@pytest.fixture
def never_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def trained(dtype: torch.dtype, foreach: bool, master: bool = False) -> list[nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    held = [nn.Parameter(draw(shape)) for shape in SHAPES]
    optimizer = LAMB(held, 0.02, clamp=(0.1, 9.0), foreach=foreach, master_weights=master)
    for _ in range(4):
        for parameter in held:
            parameter.grad = draw(tuple(parameter.shape))
        optimizer.step()
    return held


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_together_equals_one_by_one(dtype: torch.dtype, rtol: float, never_waiting: None) -> None:
    together, alone = trained(dtype, foreach=True), trained(dtype, foreach=False)
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(together, alone, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("master", [True, False])
def test_half_precision(master: bool, never_waiting: None) -> None:
    together, alone = (trained(torch.bfloat16, foreach, master) for foreach in (True, False))
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("foreach", [True, False])
def test_stacked_tensors_are_updated_as_if_they_stood_alone(
    dtype: torch.dtype, foreach: bool, never_waiting: None
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(3, 1), (6, 5), (900, 70), (3300, 1000)]

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device="cuda")
        for part, scale in zip(drawn.chunk(3), (1.0, 3.0, 0.25), strict=True):
            part.mul_(scale)  # so that one ratio cannot serve all three
        return drawn.to(dtype)

    whole = [nn.Parameter(draw(shape)) for shape in shapes]
    apart = [nn.Parameter(part.clone()) for item in whole for part in item.detach().chunk(3)]
    joined = [nn.Parameter(item.detach().clone()) for item in whole]
    options = {"master_weights": True, "foreach": foreach}
    first, second, control = (
        LAMB(held, 0.02, stacked=count, **options)
        for held, count in ((whole, 3), (apart, 1), (joined, 1))
    )
    for _ in range(3):
        gradients = [draw(shape) for shape in shapes]
        for held in (whole, joined):
            for parameter, gradient in zip(held, gradients, strict=True):
                parameter.grad = gradient.clone()
        pieces = [piece.clone() for item in gradients for piece in item.chunk(3)]
        for parameter, gradient in zip(apart, pieces, strict=True):
            parameter.grad = gradient
        for optimizer in (first, second, control):
            optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    together = [torch.cat(list(apart[at : at + 3])) for at in range(0, len(apart), 3)]
    torch.testing.assert_close(list(whole), together, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(whole[-1], joined[-1], rtol=1e-3)


def test_waiting_would_be_noticed(never_waiting: None) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").norm().item()
