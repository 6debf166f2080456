"""What a run will be like, before it begins: its batches, its steps, and about how long it takes.

The rate is what an earlier run in the same folder reached; without one, where the device's peak is
known, the usual share of that; else there is none, and no hours are promised.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packhorse import device as devices
from packhorse.train import cost
from packhorse.train.job import Ground, survey
from packhorse.train.journal import last_speed
from packhorse.train.settings import Settings

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
    hours: float | None  # None: no rate is known
    rate: str  # where the hours come from


def outlook(settings: Settings, out: Path, world: int = 1) -> Outlook:
    """Look ahead. Of a model whose sizes are set, the weights need not be there yet."""
    ground = survey(settings, world=world, weights=False)
    feed, steps = ground.feed, ground.pace.steps
    sequences = round(steps * feed.batch)
    rate, whence = _rate(ground, out)
    return Outlook(
        device=devices.describe(ground.place.device),
        precision=devices.dtype_name(ground.place.dtype),
        global_batch=feed.batch,
        micro_batch=feed.batch / feed.parts / world,
        micro_tokens=ground.micro_tokens,
        accumulation=feed.parts,
        devices=world,
        steps=steps,
        sequences=sequences,
        epochs=steps / feed.epoch,
        hours=sequences / rate / 3600 if rate else None,
        rate=whence,
    )


def _rate(ground: Ground, out: Path) -> tuple[float | None, str]:
    """Sequences a second on all devices, and how that is known."""
    said = last_speed(out)
    if said and said.get("sequences_per_second"):
        return said["sequences_per_second"], f"as an earlier run in {out}"
    peak = cost.peak(ground.place.device)
    if peak is None:
        return None, "not known for this device; a run shows it in its first minute"
    tokens, squares = ground.feed.tokens, ground.feed.squares
    guessed = MASKED * tokens if ground.problem == "pretrain" else 0.0
    each = cost.operations(ground.config, cost.Work(tokens, squares, guessed))
    usual = f"{cost.USUAL:.0%} of the device's peak, as is usual"
    return ground.place.world * peak * cost.USUAL / each, usual
