"""Gradient checkpointing: the same run to the bit, with less kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse.train.job import assemble
from packhorse.train.loop import train

Make = Callable[..., Any]


@pytest.mark.parametrize(
    "options",
    [{}, {"attention_dropout": 0.2, "kernel": "reference"}, {"precision": "bf16"}],
    ids=str,
)
def test_the_run_is_the_same_to_the_bit(
    settings: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    for name, recompute in (("plain", False), ("again", True)):
        train(assemble(settings(steps=3, recompute=recompute, **options)), tmp_path / name)
    for file in ("log.jsonl", "model/model.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_less_is_kept(settings: Make) -> None:
    kept: dict[bool, int] = {}
    gradients: dict[bool, torch.Tensor] = {}
    for recompute in (False, True):
        job = assemble(settings(recompute=recompute, layers=4))
        batch = next(job.feed.steps(None)).batches[0]
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = job.objective.loss(job.model, batch)
        kept[recompute] = sum(sizes.values())
        loss.backward()
        grad = job.model.bert.embed.words.weight.grad
        assert grad is not None
        gradients[recompute] = grad
    assert kept[True] < kept[False] / 2
    assert torch.equal(gradients[True], gradients[False])
