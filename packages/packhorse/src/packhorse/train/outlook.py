"""What a run will be like, before it begins: its batches, its steps, and about how long it takes.

The rate is what the same run reached before, in the same folder; without one, where the device's
peak is known, the usual share of that; else, on a CPU above all, what a short trial reaches
(`trial`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from packhorse import device as devices
from packhorse.errors import InputError
from packhorse.train import cost
from packhorse.train.job import Ground, survey
from packhorse.train.journal import last_speed
from packhorse.train.loop import SETTINGS
from packhorse.train.settings import Settings, resolve
from packhorse.train.trial import attempt

MASKED = 0.15  # of tokens, about
# Settings that make a run longer or shorter, not faster or slower.
LONGER = frozenset({"out", "seed", "steps", "epochs", "max_sequences", "target", "keep", "write"})


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
    if world < 1:
        raise InputError(f"{world} processes cannot be started; at least one is needed")
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
    fed, place = ground.feed, ground.place
    if earlier := _earlier(ground.settings, out, place.world):
        return earlier, f"as an earlier run in {out}"
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


def _earlier(settings: Settings, out: Path, world: int) -> float | None:
    """Sequences a second that the same run reached there before."""
    said = last_speed(out) or {}
    try:
        then = resolve(out / SETTINGS).settings
    except InputError:
        return None
    names = [each.name for each in fields(Settings) if each.name not in LONGER]
    alike = all(getattr(then, name) == getattr(settings, name) for name in names)
    return said.get("sequences_per_second") if alike and said.get("devices") == world else None
