"""Training in float8, on a CPU for once: it learns, goes on to the bit, and leaves what bf16 does.

The machine is not asked whether it has the hardware; the arithmetic is real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse import checkpoint
from packhorse import device as devices
from packhorse.errors import InputError
from packhorse.model import float8
from packhorse.train.estimate import estimate
from packhorse.train.job import TrainingJob, assemble
from packhorse.train.loop import train
from packhorse.train.ranks import RankGroup
from packhorse.train.step import train_step
from packhorse_bench.curves_plot import endings, read

Make = Callable[..., Any]
SETTINGS = {"steps": 24, "optimizer": "adamw", "learning_rate": 0.005, "eval_every": 24}


def test_a_machine_without_it_says_what_to_choose(settings: Make, tmp_path: Path) -> None:
    for ask in (assemble, lambda settings: estimate(settings, tmp_path)):
        with pytest.raises(InputError, match=r"float8.*cpu.*H200.*choose (bf16|fp32)"):
            ask(settings(precision="float8"))


def products(job: TrainingJob) -> int:
    return sum(isinstance(module, float8.Float8Linear) for module in job.model.modules())


def test_it_learns_as_bf16_does_and_goes_on_to_the_bit(
    settings: Make, float8_anywhere: None, tmp_path: Path
) -> None:
    half, small = (settings(**SETTINGS, precision=name) for name in ("bf16", "float8"))
    job = assemble(small)
    assert products(job) == 8 and not [note for note in job.notes if "float8" in note]
    outcomes = {
        name: train(assemble(s), tmp_path / name) for name, s in (("a", half), ("b", small))
    }
    _, ending = endings({name: read(tmp_path / name) for name in outcomes})
    begun = read(tmp_path / "a")[0][1]
    assert ending.steps == 24 and ending.last < begun - 0.03
    assert ending.apart_most is not None and 0 < abs(ending.apart_most) < 0.02
    signals = iter([0] * 8 + [15])
    train(assemble(small), tmp_path / "c", stop_signal=lambda: next(signals))
    train(assemble(small), tmp_path / "c")
    for name in ("log.jsonl", "model/model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    written = [checkpoint.load(tmp_path / name / "model").model for name in outcomes]
    states = [model.state_dict() for model in written]
    assert [list(state) for state in states] == [list(states[0])] * 2
    assert {tensor.dtype for tensor in states[1].values()} == {torch.float32}


@pytest.mark.skipif(
    not (torch.cuda.is_available() and devices.fast_float8(torch.device("cuda"))),
    reason="no CUDA device that multiplies float8",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_on_a_gpu_it_learns_as_bf16_does_and_waits_for_nothing(
    settings: Make, compiled: str, tmp_path: Path
) -> None:
    there = {**SETTINGS, "device": "cuda", "compile": compiled, "next_sentence": False}
    for name in ("bf16", "float8"):
        train(assemble(settings(**there, precision=name)), tmp_path / name)
    _, ending = endings({name: read(tmp_path / name) for name in ("bf16", "float8")})
    assert ending.apart_most is not None and 0 < abs(ending.apart_most) < 0.05
    job = assemble(settings(**there, precision="float8"))
    steps = job.feed.steps(None)
    for _ in range(3):  # what is compiled or allocated for the first time may wait
        train_step(job, next(steps), RankGroup())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = train_step(job, next(steps), RankGroup())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(report.row.isfinite().all())


def test_an_evaluation_is_that_of_bf16(settings: Make, float8_anywhere: None) -> None:
    jobs = [assemble(settings(precision=name)) for name in ("bf16", "float8")]
    measured = []
    for job in jobs:
        assert job.feed.evaluate_on is not None
        measured.append(job.objective.evaluate(job.model, job.feed.evaluate_on(), lambda x: x))
    assert measured[0] == measured[1] and products(jobs[1]) == 8


def test_what_does_not_fit_is_reported_once(
    settings: Make, float8_anywhere: None, tmp_path: Path
) -> None:
    odd = settings(precision="float8", hidden_size=24, intermediate_size=32)
    assert estimate(odd, tmp_path).precision == "float8"
    job = assemble(odd)
    (note,) = [note for note in job.notes if "float8" in note]
    assert note.startswith("8 products (layers.0.attention.qkv, …) are bf16") and "16" in note
    assert products(job) == 0
    even = assemble(replace(odd, hidden_size=32, intermediate_size=40))
    (note,) = [note for note in even.notes if "float8" in note]
    assert note.startswith("4 products (layers.0.up.dense, …)") and products(even) == 4
