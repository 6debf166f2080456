"""Learning-rate schedules: functions from a step to the factor on the peak learning rate.

    LambdaLR(optimizer, partial(linear, total=10_000, warmup=1_000))

Schedules have no state, so that a run resumed at a step has the rate it would have had. A `partial`
also keeps torch from saving the settings with the scheduler and restoring old ones on resume. Steps
count from 0; with a warm-up the factor at step 0 is 0, as in BERT's own code, so that the first
update changes no weight and only initializes the optimizer's averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from packhorse.errors import InputError


def constant(step: int, *, warmup: int = 0) -> float:
    """Rise to 1 in `warmup` steps, then stay at 1."""
    if warmup < 0:
        raise InputError(f"the warm-up is {warmup} steps; it cannot be negative, use 0 for none")
    return min(1.0, step / warmup) if warmup else 1.0


def linear(step: int, *, total: int, warmup: int = 0, end: float = 0.0) -> float:
    """Rise to 1 in `warmup` steps, then fall linearly to `end` at step `total`."""
    return polynomial(step, total=total, warmup=warmup, end=end)


def polynomial(
    step: int,
    *,
    total: int,
    warmup: int = 0,
    power: float = 1.0,
    end: float = 0.0,
    start_warmup_step: int = 0,
    decay_from_zero: bool = False,
) -> float:
    """Rise to 1 in `warmup` steps, then fall to `end` at step `total` as remaining ** power.

    start_warmup_step: first step of the warm-up; the factor is 0 before it.
    decay_from_zero: the remaining fraction is counted from step 0, not from the end of the warm-up.
    MLPerf's reference does so: after the warm-up the factor drops from 1 to the curve below.
    """
    if total < 1 or min(warmup, start_warmup_step) < 0 or start_warmup_step + warmup > total:
        raise InputError(
            f"a schedule of {total} steps cannot have {warmup} steps of warm-up from step "
            f"{start_warmup_step}; it needs at least 1 step, and the warm-up must fit"
        )
    if power <= 0 or not 0 <= end <= 1:
        raise InputError(f"power {power} must be above 0, and end {end} between 0 and 1")
    warmup_step = step - start_warmup_step
    if warmup_step < warmup:
        return max(0, warmup_step) / max(1, warmup)
    begin = 0 if decay_from_zero else start_warmup_step + warmup
    remaining = max(0, total - step) / max(1, total - begin)
    return end + (1 - end) * min(1.0, remaining) ** power


def cosine(step: int, *, total: int, warmup: int = 0, end: float = 0.0) -> float:
    """Rise to 1 in `warmup` steps, then fall to `end` at step `total` as half a cosine wave."""
    remaining = linear(step, total=total, warmup=warmup)
    if step < warmup:
        return remaining
    return end + (1 - end) * (1 - math.cos(math.pi * remaining)) / 2


def wsd(step: int, *, total: int, warmup: int = 0, decay: int = 0, end: float = 0.0) -> float:
    """Rise to 1 in `warmup` steps, stay there, and fall linearly to `end` in the last `decay`."""
    if decay < 0 or warmup + decay > total:
        raise InputError(
            f"a schedule of {total} steps cannot have {warmup} steps of warm-up and {decay} of"
            " decay; both must fit"
        )
    if step < total - decay:
        return constant(step, warmup=warmup)
    return linear(step - (total - decay), total=max(1, decay), end=end) if decay else 1.0


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "linear": linear,
    "polynomial": polynomial,
    "cosine": cosine,
    "wsd": wsd,
}
"""The schedules by name: functions of the step, for torch's `LambdaLR`."""
