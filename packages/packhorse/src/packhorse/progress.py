"""The progress display of commands and training: bars on a terminal, plain lines elsewhere.

    with progress_display() as show:
        show("reading", 10, 100, "3 documents")  # stage, done, total (0: unknown), detail

A bar has the total and the time left; the detail of the latest stage stands below, because it may
be long. A log should stay short: off a terminal a line needs both a pause and another tenth of the
work, but a reader of the log sees within a minute that the work goes on. rich is imported for a
terminal only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from rich.console import RenderableType

PAUSE = 5.0  # seconds between two lines at least
PATIENCE = 60.0  # seconds after which a line needs no further tenth


class ShowProgress(Protocol):
    """Takes the progress of a stage, as often as the caller likes; a total of 0 is unknown."""

    def __call__(self, stage: str, done: int, total: int, detail: str = "", /) -> None: ...


def write_to_stderr(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(line + "\n")


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def progress_display(
    write_line: Callable[[str], None] = write_to_stderr,
) -> Iterator[ShowProgress]:
    """A function that shows progress on stderr: as bars, or off a terminal by `write_line`."""
    if sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield _lines(write_line)


@final
class StageClock:
    """Estimates the time left of a stage from its mean speed since the first known total."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None  # time and work done

    def time_left(self, done: int, total: int) -> str:
        """The estimate after this much work, or "" if there is none or nothing is left."""
        now = time.monotonic()
        if total and self._start is None:
            self._start = (now, done)
        if self._start is None or done >= total:
            return ""
        start_time, start_done = self._start
        if done <= start_done:
            return ""
        return f"{duration((now - start_time) / (done - start_done) * (total - done))} left"


def _lines(write_line: Callable[[str], None]) -> ShowProgress:
    clock = StageClock()
    last_stage = ""
    last_tenths = 0
    last_time = time.monotonic()

    def show(stage: str, done: int, total: int, detail: str = "", /) -> None:
        nonlocal clock, last_stage, last_tenths, last_time
        if stage != last_stage:
            clock = StageClock()
            last_stage = stage
            last_tenths = 0
        left = clock.time_left(done, total)
        tenths = 10 * done // total if total else 0
        waited = time.monotonic() - last_time
        if waited >= PATIENCE or (waited >= PAUSE and (not total or tenths > last_tenths)):
            share = f" of {total:,} ({done / total:.0%})" if total else ""
            parts = [f"{stage}: {done:,}{share}", left, detail]
            write_line(", ".join(part for part in parts if part))
            last_tenths = tenths
            last_time = time.monotonic()

    return show


@contextmanager
def _bars() -> Iterator[ShowProgress]:
    from rich import progress as rich_progress
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    bars = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.fields[left]}", markup=False),
    )
    stages: dict[str, tuple[rich_progress.TaskID, StageClock]] = {}
    last_detail = Text()

    def show(stage: str, done: int, total: int, detail: str = "", /) -> None:
        if stage not in stages:
            stages[stage] = (bars.add_task(stage, total=None, left=""), StageClock())
        task, clock = stages[stage]
        left = clock.time_left(done, total)
        bars.update(task, completed=done, total=total or None, left=left)
        last_detail.plain = detail

    def draw() -> RenderableType:
        return Group(bars, last_detail) if last_detail else bars

    with Live(get_renderable=draw, console=Console(stderr=True)):
        yield show
