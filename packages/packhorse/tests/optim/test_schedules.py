"""Schedules at their corners, under LambdaLR, and after a resume."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from packhorse.errors import InputError
from packhorse.optim import SCHEDULES, constant, cosine, linear, polynomial, wsd


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (partial(constant), {0: 1, 7: 1}),
        (partial(constant, warmup=4), {0: 0, 1: 0.25, 4: 1, 5: 1, 1000: 1}),
        (partial(linear, total=10), {0: 1, 1: 0.9, 9: 0.1, 10: 0, 11: 0}),
        (partial(linear, total=10, warmup=2), {0: 0, 1: 0.5, 2: 1, 6: 0.5, 10: 0, 99: 0}),
        (partial(linear, total=10, warmup=2, end=0.1), {1: 0.5, 2: 1, 6: 0.55, 10: 0.1, 99: 0.1}),
        (partial(linear, total=4, warmup=4), {3: 0.75, 4: 0, 5: 0}),
        (partial(polynomial, total=10, power=2.0), {0: 1, 5: 0.25, 10: 0, 12: 0}),
        (partial(polynomial, total=9, warmup=1, power=0.5), {0: 0, 1: 1, 7: 0.5, 9: 0}),
        # The warm-up of MLPerf's reference ends on a line that began at step 0.
        (
            partial(polynomial, total=10, warmup=4, decay_from_zero=True),
            {0: 0, 3: 0.75, 4: 0.6, 5: 0.5, 10: 0, 11: 0},
        ),
        (
            partial(polynomial, total=20, warmup=4, start_warmup_step=6),
            {0: 0, 5: 0, 6: 0, 8: 0.5, 10: 1, 15: 0.5, 20: 0},
        ),
        (partial(polynomial, total=20, start_warmup_step=10), {9: 0, 10: 1, 15: 0.5, 20: 0}),
        (
            partial(polynomial, total=20, warmup=5, start_warmup_step=5, decay_from_zero=True),
            {4: 0, 5: 0, 7: 0.4, 10: 0.5, 20: 0},
        ),
    ],
)
def test_corners(schedule: Any, expected: dict[int, float]) -> None:
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)


def test_the_submissions_rate() -> None:
    """MLPerf v1.0, packed BERT: a straight line to 0 over 1,127 steps, no warm-up."""
    for step in (0, 1, 500, 1126, 1127):
        assert polynomial(step, total=1127) == pytest.approx((1127 - step) / 1127)


@pytest.mark.parametrize("name", SCHEDULES)
def test_under_lambda_lr_a_resumed_run_has_the_same_rates(name: str) -> None:
    settings = {"warmup": 3} if name == "constant" else {"total": 10, "warmup": 3}
    schedule = partial(SCHEDULES[name], **settings)

    def start() -> tuple[torch.optim.Optimizer, LambdaLR]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        return optimizer, LambdaLR(optimizer, schedule)

    def rates(optimizer: torch.optim.Optimizer, scheduler: LambdaLR, steps: int) -> list[float]:
        result = []
        for _ in range(steps):
            result.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return result

    whole = rates(*start(), 12)
    assert whole == [2.0 * schedule(step) for step in range(12)]
    optimizer, scheduler = start()
    begun = rates(optimizer, scheduler, 5)
    resumed, another = start()
    another.load_state_dict(scheduler.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert begun + rates(resumed, another, 7) == whole


@pytest.mark.parametrize(
    "wrong",
    [
        partial(constant, warmup=-1),
        partial(linear, total=0),
        partial(linear, total=10, warmup=-1),
        partial(linear, total=10, warmup=11),
        partial(linear, total=10, end=1.5),
        partial(polynomial, total=10, power=0.0),
        partial(polynomial, total=10, warmup=5, start_warmup_step=6),
        partial(polynomial, total=10, start_warmup_step=-1),
    ],
)
def test_settings_that_make_no_schedule_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError):
        wrong(3)


def test_cosine_and_wsd_are_those_of_transformers() -> None:
    """Its functions, on the same optimizer; they count steps and floors as ours do."""
    transformers = pytest.importorskip("transformers", reason="no transformers")
    ours_and_theirs = [
        (
            partial(cosine, total=40, warmup=6),
            lambda optimizer: transformers.get_cosine_schedule_with_warmup(optimizer, 6, 40),
        ),
        (
            partial(cosine, total=40, warmup=6, end=0.1),
            lambda optimizer: transformers.get_cosine_with_min_lr_schedule_with_warmup(
                optimizer, 6, 40, min_lr_rate=0.1
            ),
        ),
        (
            partial(wsd, total=40, warmup=6, decay=10),
            lambda optimizer: transformers.get_wsd_schedule(
                optimizer,
                num_warmup_steps=6,
                num_decay_steps=10,
                num_training_steps=40,
                decay_type="linear",
            ),
        ),
    ]
    for ours, make in ours_and_theirs:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = make(optimizer)
        rates = []
        for _ in range(41):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            theirs.step()
        assert rates == pytest.approx([ours(step) for step in range(41)])


def test_a_decay_that_does_not_fit_is_refused() -> None:
    for wrong in (partial(wsd, total=10, warmup=5, decay=6), partial(wsd, total=10, decay=-1)):
        with pytest.raises(InputError, match="must fit"):
            wrong(0)
    assert [wsd(step, total=4) for step in range(6)] == [1.0] * 6
    falling = [wsd(step, total=10, decay=4, end=0.2) for step in (6, 8, 10, 11)]
    assert falling == pytest.approx([1.0, 0.6, 0.2, 0.2])
