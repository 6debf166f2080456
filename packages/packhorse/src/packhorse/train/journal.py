"""The logs of a run: a line of JSON per step and evaluation, which trackers get as well.

`log.jsonl` holds only what the run computes. A run that was interrupted anywhere and resumed leaves
the same file, byte for byte, as one that was not: what lies beyond a checkpoint's position is cut
off when the run is resumed. Times are never the same twice, so they go to `speed.jsonl`, which is
only appended to.

Figures are fetched from the device only when many steps are pending, because fetching makes the
host wait. Until then a step is one small row there: its loss, the norm of its gradient, then sums
and counts.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from packhorse.data.output import to_plain
from packhorse.errors import InputError, PackhorseError
from packhorse.train import cost
from packhorse.train.trackers import TensorBoard, Tracker, WeightsAndBiases

LOG = "log.jsonl"
SPEED = "speed.jsonl"
ACCURACIES = ("mlm_accuracy", "accuracy")  # the first that a task has is displayed


class Diverged(PackhorseError):
    """A loss or a gradient is not finite, so the run cannot continue as it is."""

    exit_code = 3

    def __init__(self, message: str, step: int, checkpoint: Path | None) -> None:
        super().__init__(message)
        self.step = step
        self.checkpoint = checkpoint  # the last good one, before the step


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How far a run is, and its figures since the last status."""

    step: int
    steps: int  # expected in total
    loss: float
    accuracy: float | None = None
    sequences: int = 0  # of the run so far, on all ranks
    sequences_per_second: float = 0.0
    tokens_per_second: float = 0.0  # without filler
    fill: float = 1.0  # share of computed tokens that is not filler
    mfu: float | None = None  # share of the device's peak; None if that is not known
    evaluation: Mapping[str, float] = field(default_factory=dict)  # not empty after an evaluation


Watch = Callable[[RunStatus], None]


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose figures are still on the device."""

    number: int
    rate: float
    sequences: int  # of the run so far, this step included
    tokens: int
    names: tuple[str, ...]
    row: Tensor  # loss, norm, then a sum and a count per name
    describe_data: Callable[[], str]  # which rows or examples it learned from


def fetch(pending: list[PendingStep], add: Callable[[Tensor], Tensor]) -> list[list[float]]:
    """The rows of the steps, summed over ranks."""
    local = torch.stack([step.row for step in pending]).cpu().double()
    rows = add(local.clone())
    rows[:, 1] = local[:, 1]  # the norm is that of the summed gradient on every rank already
    return rows.tolist()


def log_line(step: PendingStep, row: list[float]) -> dict[str, Any]:
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


def refuse_nonfinite(step: PendingStep, row: list[float], checkpoint: Path | None) -> None:
    """Raise if a step's loss or gradient is not finite; `checkpoint` is the last one before it."""
    loss, norm = row[:2]
    if math.isfinite(loss) and math.isfinite(norm):
        return
    problem = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
    last_good = (
        f"the last good checkpoint is {checkpoint}"
        if checkpoint
        else "no checkpoint was due before it"
    )
    raise Diverged(
        f"step {step.number}: {problem}. It learned from {step.describe_data()}; {last_good}. "
        "Lower learning_rate, or look at the data of this step",
        step.number,
        checkpoint,
    )


def displayed_means(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean loss and accuracy over several steps, for display."""
    accuracy = next((name for name in ACCURACIES if name in lines[-1]), None)
    return {
        "loss": _mean(lines, "loss"),
        "accuracy": _mean(lines, accuracy) if accuracy else None,
    }


def _mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


@final
class SpeedMeter:
    """Counts steps and their work from its construction on."""

    def __init__(self) -> None:
        self.work = cost.StepWork()
        self.sequences = 0
        self.tokens = 0
        self._start = time.perf_counter()

    def add(self, work: cost.StepWork, sequences: int, tokens: int) -> None:
        """Count a step."""
        self.work += work
        self.sequences += sequences
        self.tokens += tokens

    def seconds(self) -> float:
        """Elapsed time; never 0, so that it can be divided by."""
        return max(1e-9, time.perf_counter() - self._start)


@final
class Journal:
    """The log files of a run, open for appending; with `None`, a rank that writes nothing."""

    def __init__(
        self,
        folder: Path | None,
        position: int = 0,
        *,
        tensorboard: bool = False,
        wandb: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue the log at `position`; `wandb` is a project, which is shown the settings."""
        self._folder = folder
        self._log: FileIO | None = None
        self._speed: FileIO | None = None
        self._trackers: list[Tracker] = []
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._log = _open_at(folder / LOG, position)
            self._speed = (folder / SPEED).open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error.strerror or error}") from error
        if tensorboard:
            self._trackers.append(TensorBoard(folder, _last_step(folder / LOG, position) + 1))
        if wandb:
            self._trackers.append(WeightsAndBiases(wandb, folder, settings or {}))

    def step(self, number: int, figures: Mapping[str, Any]) -> None:
        """Log a step's figures."""
        self._write(self._log, {"step": number, **figures})
        self._track(number, figures, "train")

    def evaluation(self, number: int, sequences: int, measures: Mapping[str, float]) -> None:
        """Log an evaluation after this step."""
        self._write(self._log, {"step": number, "sequences": sequences, "evaluation": measures})
        self._track(number, measures, "evaluation")

    def speed(self, number: int, figures: Mapping[str, Any]) -> None:
        """Log how fast the steps up to this one were."""
        self._write(self._speed, {"step": number, **figures})
        self._track(number, figures, "speed")

    def settle(self) -> int:
        """Sync the log to disk and return its length, for a checkpoint to store."""
        if self._log is None:
            return 0
        try:
            os.fsync(self._log.fileno())
        except OSError as error:
            self._refuse(error)
        return self._log.tell()

    def close(self) -> None:
        """Close the files and the trackers."""
        for file in (self._log, self._speed, *self._trackers):
            if file is not None:
                file.close()

    def _write(self, file: FileIO | None, line: Mapping[str, Any]) -> None:
        if file is None:
            return
        text = json.dumps(to_plain(line)).encode() + b"\n"
        try:
            # Unbuffered, so a full disk can accept a part of the line without an error.
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._refuse(error)

    def _track(self, number: int, figures: Mapping[str, Any], group: str) -> None:
        named = {f"{group}/{name}": value for name, value in figures.items()}
        for tracker in self._trackers:
            tracker.add(number, named)

    def _refuse(self, error: OSError) -> None:
        reason = error.strerror or error
        raise InputError(f"the log in {self._folder} cannot be written: {reason}") from error


def missing_log(folder: Path, position: int) -> str:
    """A note if the log ends before `position`, where a run resumes; else empty."""
    path = folder / LOG
    if position <= (path.stat().st_size if path.exists() else 0):
        return ""
    return f"{path} was truncated or deleted: it lacks the lines of earlier steps"


def last_speed(folder: Path) -> dict[str, Any] | None:
    """The last line about speed of a run in this folder, if there is one."""
    try:
        lines = (folder / SPEED).read_text("utf-8").splitlines()
        return json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return None


def _open_at(path: Path, position: int) -> FileIO:
    path.touch()
    file = path.open("r+b", buffering=0)
    file.truncate(min(position, path.stat().st_size))
    file.seek(0, os.SEEK_END)
    return file


def _last_step(path: Path, position: int) -> int:
    lines = path.read_bytes()[:position].splitlines()
    return json.loads(lines[-1])["step"] if lines else 0
