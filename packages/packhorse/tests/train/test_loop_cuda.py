"""Training on CUDA: bf16, compiled, never waiting for the device but to look, and resumable.

Skipped where there is no NVIDIA GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse.train.job import assemble
from packhorse.train.loop import train
from packhorse.train.ranks import RankGroup
from packhorse.train.step import set_rates, train_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
Make = Callable[..., Any]


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_no_step_waits_for_the_device(compiled: str, settings: Make) -> None:
    options = {"device": "cuda", "precision": "bf16", "next_sentence": False, "compile": compiled}
    job = assemble(settings(**options))
    steps = job.feed.steps(None)
    for number in range(3):  # what is compiled or allocated for the first time may wait
        set_rates(job, number)
        train_step(job, next(steps), RankGroup())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reports = [train_step(job, next(steps), RankGroup()) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(step.row.isfinite().all()) for step in reports)


def test_it_learns_what_the_cpu_learns(settings: Make, tmp_path: Path) -> None:
    options = {"dropout": 0.0, "steps": 12, "eval_every": 12, "learning_rate": 3e-3}
    here = train(assemble(settings(**options)), tmp_path / "cpu").evaluation["loss"]
    there = settings(**options, device="cuda", precision="bf16", compile="auto")
    assert abs(train(assemble(there), tmp_path / "cuda").evaluation["loss"] - here) < 0.05


def test_it_goes_on_to_the_bit(settings: Make, tmp_path: Path) -> None:
    options = settings(device="cuda", precision="bf16", kernel="reference", steps=8, eval_every=3)
    train(assemble(options), tmp_path / "whole")
    signals = iter([0, 0, 0, 15])
    train(assemble(options), tmp_path / "stopped", stop_signal=lambda: next(signals))
    train(assemble(options), tmp_path / "stopped")
    whole, stopped = (tmp_path / run / "log.jsonl" for run in ("whole", "stopped"))
    assert whole.read_bytes() == stopped.read_bytes()
