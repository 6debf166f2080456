"""What a run writes down: a line of JSON for every step and evaluation, and TensorBoard's events.

`log.jsonl` holds nothing but what the run computes, so that a run that was interrupted anywhere and
went on leaves the same file, byte for byte, as one that was not: what lies beyond a checkpoint's
place is cut off when it is taken up. Clocks are never the same twice; what they say is kept apart,
in `speed.jsonl`, which is only ever added to.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, final

from packhorse.data.output import to_plain
from packhorse.errors import InputError, MissingExtra

LOG, SPEED, EVENTS = "log.jsonl", "speed.jsonl", "tensorboard"


@final
class Journal:
    """The files of a run, open to be added to; `None` for a rank that writes nothing."""

    def __init__(self, folder: Path | None, position: int = 0, tensorboard: bool = False) -> None:
        """Go on at `position` of the log; with TensorBoard, steps behind it are taken back."""
        self._folder, self._log, self._speed, self._events = folder, None, None, None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._log = _opened(folder / LOG, position)
            self._speed = (folder / SPEED).open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error.strerror or error}") from error
        if tensorboard:
            self._events = _writer(folder / EVENTS, _last_step(folder / LOG, position) + 1)

    def step(self, number: int, figures: Mapping[str, Any]) -> None:
        """What a step showed."""
        self._write(self._log, {"step": number, **figures})
        self._show(number, figures, "train")

    def evaluation(self, number: int, sequences: int, measures: Mapping[str, float]) -> None:
        """What an evaluation after this step showed."""
        self._write(self._log, {"step": number, "sequences": sequences, "evaluation": measures})
        self._show(number, measures, "evaluation")

    def speed(self, number: int, figures: Mapping[str, Any]) -> None:
        """How fast the steps up to this one were."""
        self._write(self._speed, {"step": number, **figures})
        self._show(number, figures, "speed")

    def settle(self) -> int:
        """Put the log on the disk; where it ends, for a checkpoint to remember."""
        if self._log is None:
            return 0
        try:
            os.fsync(self._log.fileno())
        except OSError as error:
            self._refuse(error)
        return self._log.tell()

    def close(self) -> None:
        """Done."""
        for file in (self._log, self._speed, self._events):
            if file is not None:
                file.close()

    def _write(self, file: FileIO | None, line: Mapping[str, Any]) -> None:
        if file is None:
            return
        text = json.dumps(to_plain(line)).encode() + b"\n"
        try:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._refuse(error)

    def _show(self, number: int, figures: Mapping[str, Any], group: str) -> None:
        if self._events is not None:
            for name, value in figures.items():
                self._events.add_scalar(f"{group}/{name}", value, number)

    def _refuse(self, error: OSError) -> None:
        reason = error.strerror or error
        raise InputError(f"the log in {self._folder} cannot be written: {reason}") from error


def missing_log(folder: Path, position: int) -> str:
    """What to say where the log ends before `position`, from which a run goes on."""
    path = folder / LOG
    if position <= (path.stat().st_size if path.exists() else 0):
        return ""
    return f"{path} was shortened or lost: the lines of earlier steps are not in it"


def last_speed(folder: Path) -> dict[str, Any] | None:
    """What a run in this folder last said of its speed, if there was one."""
    try:
        lines = (folder / SPEED).read_text("utf-8").splitlines()
        return json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return None


def _opened(path: Path, position: int) -> FileIO:
    path.touch()
    file = path.open("r+b", buffering=0)
    file.truncate(min(position, path.stat().st_size))
    file.seek(0, os.SEEK_END)
    return file


def _last_step(path: Path, position: int) -> int:
    lines = path.read_bytes()[:position].splitlines()
    return json.loads(lines[-1])["step"] if lines else 0


def _writer(folder: Path, purge: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "train") from error
    return SummaryWriter(str(folder), purge_step=purge)
