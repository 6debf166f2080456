"""What a run will be like, before it begins: its batches, its steps, and about how long it takes.

The rate is what an earlier run in the same folder reached; without one, where the device's peak is
known, the usual share of that; else, on a CPU above all, what a short trial reaches (`trial`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packhorse import device as devices
from packhorse.train import cost
from packhorse.train.job import Ground, survey
from packhorse.train.journal import last_speed
from packhorse.train.settings import Settings
from packhorse.train.trial import attempt

MASKED = 0.15  # of tokens, about


@dataclass(frozen=True, slots=True)
class Outlook:
    """The figures of a run that has not begun."""

    device: str
    precision: str
    global_batch: float  # sequences a step, on average
    micro_batch: float  # of them, that run at once on a device
    micro_tokens: int  # tokens of these, at most
    accumulation: int  # parts of a step, on each device
    devices: int
    steps: int
    sequences: int
    epochs: float
    hours: float
    rate: str  # where the hours come from


def outlook(settings: Settings, out: Path, world: int = 1) -> Outlook:
    """Look ahead. Of a model whose sizes are set, the weights need not be there yet."""
    ground = survey(settings, world=world, weights=False)
    feed, steps = ground.feed, ground.pace.steps
    sequences = round(steps * feed.batch)
    rate, whence = _rate(ground, out)
    return Outlook(
        device=devices.describe(ground.place.device),
        precision="float8" if ground.place.float8 else devices.dtype_name(ground.place.dtype),
        global_batch=feed.batch,
        micro_batch=feed.batch / feed.parts / world,
        micro_tokens=ground.micro_tokens,
        accumulation=feed.parts,
        devices=world,
        steps=steps,
        sequences=sequences,
        epochs=steps / feed.epoch,
        hours=sequences / rate / 3600,
        rate=whence,
    )


def _rate(ground: Ground, out: Path) -> tuple[float, str]:
    """Sequences a second on all devices, and how that is known."""
    said = last_speed(out)
    if said and said.get("sequences_per_second"):
        return said["sequences_per_second"], f"as an earlier run in {out}"
    fed, place = ground.feed, ground.place
    guessed = MASKED * fed.tokens if ground.problem == "pretrain" else 0.0
    once = cost.operations(ground.config, cost.Work(fed.tokens, fed.squares, guessed))
    each = once * ground.settings.passes
    peak = cost.peak(place.device)
    if peak is not None:
        usual = f"{cost.USUAL:.0%} of the device's peak, as is usual"
        return place.world * peak * cost.USUAL / each, usual
    # Ranks on a CPU share its cores: they do not add up.
    devices_apart = 1 if place.device.type == "cpu" else place.world
    share = fed.batch / devices_apart
    seconds = attempt(ground).step(share * each, cost.parameters(ground.config))
    return fed.batch / seconds, "by a trial of some steps, just now"
