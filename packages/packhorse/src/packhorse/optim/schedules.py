"""Learning-rate schedules: the factor on the peak rate at a step, and nothing but the step.

    LambdaLR(optimizer, partial(linear, total=10_000, warmup=1_000))

No schedule has state, so a run that resumes at a step has the rate it would have had; a `partial`
also keeps torch from saving the settings with the scheduler and putting old ones back on resume.
Step 0 is the first; with a warm-up its factor is 0, as in BERT's own code, so that its update moves
no weight and only fills the optimizer's averages.
"""

from __future__ import annotations

from collections.abc import Callable

from packhorse.errors import InputError


def constant(step: int, *, warmup: int = 0) -> float:
    """Up to 1 in `warmup` steps, then 1."""
    if warmup < 0:
        raise InputError(f"a warm-up of {warmup} steps; give 0 for none")
    return min(1.0, step / warmup) if warmup else 1.0


def linear(step: int, *, total: int, warmup: int = 0, end: float = 0.0) -> float:
    """Up to 1 in `warmup` steps, then down in a straight line to `end` at step `total`."""
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
    """Up to 1 in `warmup` steps, then down to `end` at step `total` as (what is left) ** power.

    start_warmup_step: where the warm-up begins; the factor is 0 before it.
    decay_from_zero: what is left is counted from step 0, not from the end of the warm-up. MLPerf's
    reference does so: the warm-up climbs towards 1 and then falls onto the curve below it.
    """
    if total < 1 or min(warmup, start_warmup_step) < 0 or start_warmup_step + warmup > total:
        raise InputError(
            f"a schedule of {total} steps cannot have {warmup} steps of warm-up from step "
            f"{start_warmup_step}; the steps are at least 1 and hold the warm-up"
        )
    if power <= 0 or not 0 <= end <= 1:
        raise InputError(f"power {power} must be above 0, and end {end} between 0 and 1")
    since = step - start_warmup_step
    if since < warmup:
        return max(0, since) / max(1, warmup)
    begin = 0 if decay_from_zero else start_warmup_step + warmup
    left = max(0, total - step) / max(1, total - begin)
    return end + (1 - end) * min(1.0, left) ** power


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "linear": linear,
    "polynomial": polynomial,
}
