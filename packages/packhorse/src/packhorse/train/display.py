"""Progress of a run for people: a live bar on a terminal, plain lines elsewhere.

    with watching(report) as watch:
        watch(RunStatus(step=10, steps=100, loss=6.9, accuracy=0.1, …))

The figures are fetched from the device anyway, so displaying them costs nothing more. Without a
terminal there is a line now and then, and one per evaluation and for the end, so that a log can be
read and searched. Nothing is printed here: lines go to `report`, rich writes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

Watch = Callable[["RunStatus"], None]
PAUSE = 5.0  # seconds between two plain lines


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
    seconds_left: float | None = None  # estimated
    evaluation: Mapping[str, float] = field(default_factory=dict)  # not empty after an evaluation


def progress_line(status: RunStatus) -> str:
    """The figures of recent steps in one line."""
    parts = [f"loss {status.loss:.4f}"]
    if status.accuracy is not None:
        parts.append(f"accuracy {status.accuracy:.4f}")
    parts.append(f"{status.sequences_per_second:,.1f} seq/s")
    parts.append(f"{status.tokens_per_second:,.0f} tok/s")
    parts.append(f"{status.fill:.1%} full")
    if status.mfu is not None:
        parts.append(f"MFU {status.mfu:.1%}")
    if status.seconds_left is not None:
        parts.append(f"{duration(status.seconds_left)} left")
    return ", ".join(parts)


def evaluation_line(status: RunStatus) -> str:
    """The measures of an evaluation in one line."""
    measures = ", ".join(f"{name} {value:.6g}" for name, value in status.evaluation.items())
    return f"step {status.step:,}, {status.sequences:,} sequences: {measures}"


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def watching(report: Callable[[str], None], live: bool | None = None) -> Iterator[Watch]:
    """A function that displays a status; `live` is a bar, by default on a terminal."""
    if sys.stderr.isatty() if live is None else live:
        with _bar() as watch:
            yield watch
    else:
        yield _lines(report)


def _lines(report: Callable[[str], None]) -> Watch:
    last = -PAUSE

    def watch(status: RunStatus) -> None:
        nonlocal last
        if status.evaluation:
            report(evaluation_line(status))
        elif status.step >= status.steps or time.monotonic() - last >= PAUSE:
            last = time.monotonic()
            report(f"step {status.step:,} of {status.steps:,}: {progress_line(status)}")

    return watch


@contextmanager
def _bar() -> Iterator[Watch]:
    """A bar with the figures below it, which may take two lines."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.text import Text

    bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn())
    task = bar.add_task("", total=None)
    figures = Text()
    with Live(Group(bar, figures), console=Console(stderr=True)) as live:

        def watch(status: RunStatus) -> None:
            if status.evaluation:
                live.console.print(Text(evaluation_line(status)))
            else:
                bar.update(task, completed=status.step, total=max(status.steps, status.step))
                figures.plain = progress_line(status)

        yield watch
