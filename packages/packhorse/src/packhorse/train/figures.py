"""What steps showed, on its way from the device to the log, and how fast they were.

A figure is asked for only when many wait: asking makes the host wait for the device. Until then a
step is one small row there: its loss, the norm of its gradient, then sums and counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from packhorse.errors import PackhorseError
from packhorse.train import cost

ACCURACIES = ("mlm_accuracy", "accuracy")  # the one that is shown


class Diverged(PackhorseError):
    """A loss or a gradient is no number: the run cannot go on as it is."""

    exit_code = 3

    def __init__(self, message: str, step: int, checkpoint: Path | None) -> None:
        super().__init__(message)
        self.step, self.checkpoint = step, checkpoint  # the last good one, before it


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step whose figures are still on the device."""

    number: int
    rate: float
    sequences: int  # so far, with it
    tokens: int
    names: tuple[str, ...]
    row: Tensor  # loss, norm, then a sum and a count for each name
    named: Callable[[], str]  # what it learned from


def fetch(waiting: list[Waiting], add: Callable[[Tensor], Tensor]) -> list[list[float]]:
    """Their rows, summed over ranks; the norm is of the whole gradient already."""
    mine = torch.stack([each.row for each in waiting]).cpu().double()
    rows = add(mine.clone())
    rows[:, 1] = mine[:, 1]
    return rows.tolist()


def line(step: Waiting, row: list[float]) -> dict[str, Any]:
    """A step's figures for the log."""
    loss, norm, *sums = row
    pairs = zip(step.names, sums[::2], sums[1::2], strict=True)
    means = {name: total / count if count else 0.0 for name, total, count in pairs}
    return {
        **means,
        "loss": loss,
        "gradient_norm": norm,
        "learning_rate": step.rate,
        "sequences": step.sequences,
        "tokens": step.tokens,
    }


def refuse_nonfinite(step: Waiting, row: list[float], last: Path | None) -> None:
    """Stop at a step whose loss or gradient is no number; `last` is the checkpoint before it."""
    loss, norm = row[:2]
    if math.isfinite(loss) and math.isfinite(norm):
        return
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
    kept = f"the last good checkpoint is {last}" if last else "no checkpoint was due before it"
    raise Diverged(
        f"step {step.number}: {what}. It learned from {step.named()}; {kept}. Lower learning_rate, "
        "or look at what it learned from",
        step.number,
        last,
    )


def seen(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several steps what is shown: means."""
    shown = next((name for name in ACCURACIES if name in lines[-1]), None)
    return {
        "loss": _mean(lines, "loss"),
        "accuracy": _mean(lines, shown) if shown else None,
    }


def _mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


@final
class Clock:
    """What was done since it was made."""

    def __init__(self) -> None:
        self.work, self.steps, self.sequences, self.tokens = cost.Work(), 0, 0, 0
        self._begun = time.perf_counter()

    def add(self, work: cost.Work, sequences: int, tokens: int) -> None:
        """Count a step."""
        self.work += work
        self.steps += 1
        self.sequences += sequences
        self.tokens += tokens

    def seconds(self) -> float:
        """Never nothing, so that it can be divided by."""
        return max(1e-9, time.perf_counter() - self._begun)
