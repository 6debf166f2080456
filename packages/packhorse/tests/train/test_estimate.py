"""A trial: it stands for runs of either kind, and what it found is scaled by arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packhorse.train import estimate as estimates
from packhorse.train.estimate import SpeedTrial, estimate, measure_speed
from packhorse.train.job import open_inputs

Make = Callable[..., Any]


def sound(trial: SpeedTrial) -> bool:
    return all(0 < rate < math.inf for rate in (trial.operations, trial.parameters))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pretraining_is_tried(precision: str, settings: Make) -> None:
    assert sound(measure_speed(open_inputs(settings(precision=precision, layers=5))))


def test_fine_tuning_is_tried(settings: Make, tiny: Path, tmp_path: Path) -> None:
    table = tmp_path / "train.tsv"
    table.write_text("sentence\tlabel\n" + "good horse\t1\nbad mule cart\t0\n" * 4)
    options = {"task": "classify", "model": str(tiny), "train": str(table)}
    assert sound(
        measure_speed(open_inputs(settings(**options, layers=0, hidden_size=0, heads=0, batch=4)))
    )


def test_hours_follow_from_work_and_parameters(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SpeedTrial(operations=10.0, parameters=100.0).step(20.0, 50.0) == 2.5
    monkeypatch.setattr(
        "packhorse.train.estimate.measure_speed", lambda ground: SpeedTrial(1e6, math.inf)
    )

    def hours(**options: Any) -> float:
        return estimate(settings(**options), tmp_path).hours

    assert hours(steps=12) == pytest.approx(2 * hours(steps=6))
    assert hours(batch=32, steps=6) == pytest.approx(2 * hours(batch=16, steps=6))
    assert 1.3 * hours(layers=2) < hours(layers=4) < 2 * hours(layers=2)  # words are the rest
    both = estimate(settings(), tmp_path, world=2)
    assert both.hours == pytest.approx(hours()) and both.devices == 2  # they share the cores


def test_what_is_tried_is_what_runs_at_once(settings: Make) -> None:
    ground = open_inputs(settings(batch=16, micro_tokens=100))
    batch = estimates._trial_batch(ground)
    per_part = ground.feed.batch * ground.feed.tokens / ground.feed.parts
    assert batch.tokens == round(per_part) and batch.packed.max_seqlen == round(ground.feed.tokens)
    large = replace(ground, feed=replace(ground.feed, parts=1, batch=1e6))
    assert estimates._trial_batch(large).tokens == estimates.MAX_TOKENS
