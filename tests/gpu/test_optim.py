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


def test_waiting_would_be_noticed(never_waiting: None) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").norm().item()
