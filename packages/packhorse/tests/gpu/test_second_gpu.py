"""A model on another GPU than the current one. Skipped where there are not two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import packhorse
from packhorse.optim import LAMB
from packhorse.reports import random_model

pytestmark = pytest.mark.skipif(
    torch.accelerator.device_count() < 2 or not torch.cuda.is_available(), reason="no two GPUs"
)
TEXTS = [f"w{number} " * (1 + number % 40) for number in range(64)]


@pytest.mark.parametrize("graphs", [False, "small", True])
def test_vectors_are_those_of_the_first(graphs: bool | str, tmp_path: Path) -> None:
    base = random_model.write("base", tmp_path / "base")
    first, second = (
        packhorse.load(base, device=device, dtype="bf16", graphs=graphs)  # pyright: ignore[reportArgumentType]
        for device in ("cuda:0", "cuda:1")
    )
    vectors = first.embed(TEXTS)
    assert np.array_equal(second.embed(TEXTS), vectors)
    assert np.array_equal(first.embed(TEXTS), vectors)


def test_lamb_updates_there() -> None:
    weights = [
        torch.ones(1024, 512, device=device, requires_grad=True) for device in ("cpu", "cuda:1")
    ]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
        LAMB([weight], lr=0.1).step()
    assert float((weights[1].cpu() - weights[0]).abs().max()) < 1e-5
    assert float((weights[0] - 1).abs().max()) > 1e-3
