"""How long a run is, and what changes on its way: learning rate and betas, by the step alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from packhorse.optim import SCHEDULES
from packhorse.train.settings import Settings


@dataclass(frozen=True, slots=True)
class Pace:
    """Of settings and of the data they are for; the first step is 0."""

    settings: Settings
    batch: float  # sequences a step
    epoch: float  # steps of a pass over the data
    power: float = 1.0  # of the betas: what the packing rule makes of them

    @property
    def limit(self) -> int:
        """The steps after which the run ends; 0 where only a number of sequences ends it."""
        ends = [self.settings.steps, math.ceil(self.settings.epochs * self.epoch)]
        return min((end for end in ends if end), default=0)

    @property
    def steps(self) -> int:
        """Those to be expected."""
        counted = math.ceil(self.settings.max_sequences / self.batch)
        return min(end for end in (self.limit, counted) if end)

    @property
    def total(self) -> int:
        """Steps until the learning rate has fallen."""
        return self.settings.decay_steps or self.steps

    @property
    def warmup(self) -> int:
        """Steps that it rises."""
        told = self.settings.warmup
        return round(told if told >= 1 else told * self.total)

    def rate(self, step: int) -> float:
        """The learning rate."""
        settings = self.settings
        told: dict[str, Any] = {"warmup": self.warmup}
        if settings.schedule != "constant":
            told |= {"total": self.total, "end": settings.end}
        if settings.schedule == "polynomial":
            told |= {"power": settings.power, "decay_from_zero": settings.decay_from_zero}
        return settings.learning_rate * SCHEDULES[settings.schedule](step, **told)

    def betas(self, step: int) -> tuple[float, float]:
        """LAMB's and Adam's; the first may have a way to go."""
        settings, first = self.settings, self.settings.beta1
        if settings.beta1_steps:
            gone = min(1.0, step / settings.beta1_steps)
            first += (settings.beta1_end - first) * gone
        return first**self.power, settings.beta2**self.power
