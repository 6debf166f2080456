"""How a run is going: a live line on a terminal, plain lines elsewhere.

    with watching(say) as watch:
        watch(Shown(step=10, steps=100, loss=6.9, accuracy=0.1, …))

What is shown is fetched from the device anyway; looking costs nothing more. Elsewhere than on a
terminal there is a line now and then, and one for each evaluation and for the end, so that a log
can be read and searched. Nothing is printed from here: lines go to `say`, rich writes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

Watch = Callable[["Shown"], None]
PAUSE = 5.0  # seconds between two plain lines


@dataclass(frozen=True, slots=True)
class Shown:
    """The figures since the last look, and how far the run is."""

    step: int
    steps: int  # expected in all
    loss: float
    accuracy: float | None = None
    sequences: int = 0  # learned from so far, by all ranks
    sequences_per_second: float = 0.0
    tokens_per_second: float = 0.0  # real ones
    fill: float = 1.0  # of the tokens that are run, the real
    mfu: float | None = None  # of the device's peak; None where that is not known
    left: float | None = None  # seconds, about
    evaluation: Mapping[str, float] = field(default_factory=dict)  # not empty: there was one


def figures(shown: Shown) -> str:
    """What a person wants to see, in one line."""
    parts = [f"loss {shown.loss:.4f}"]
    if shown.accuracy is not None:
        parts.append(f"accuracy {shown.accuracy:.4f}")
    parts.append(f"{shown.sequences_per_second:,.1f} seq/s")
    parts.append(f"{shown.tokens_per_second:,.0f} tok/s")
    parts.append(f"{shown.fill:.1%} full")
    if shown.mfu is not None:
        parts.append(f"MFU {shown.mfu:.1%}")
    if shown.left is not None:
        parts.append(f"{duration(shown.left)} left")
    return ", ".join(parts)


def evaluated(shown: Shown) -> str:
    """An evaluation, in one line."""
    said = ", ".join(f"{name} {value:.6g}" for name, value in shown.evaluation.items())
    return f"step {shown.step:,}, {shown.sequences:,} sequences: {said}"


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def watching(say: Callable[[str], None], live: bool | None = None) -> Iterator[Watch]:
    """Something to be shown figures, as often as one likes; `live`: default on a terminal."""
    if sys.stderr.isatty() if live is None else live:
        with _bar() as watch:
            yield watch
    else:
        yield _lines(say)


def _lines(say: Callable[[str], None]) -> Watch:
    said = -PAUSE

    def watch(shown: Shown) -> None:
        nonlocal said
        if shown.evaluation:
            say(evaluated(shown))
        elif shown.step >= shown.steps or time.monotonic() - said >= PAUSE:
            said = time.monotonic()
            say(f"step {shown.step:,} of {shown.steps:,}: {figures(shown)}")

    return watch


@contextmanager
def _bar() -> Iterator[Watch]:
    """A bar, and below it the figures, which may take two lines."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.text import Text

    bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn())
    task, told = bar.add_task("", total=None), Text()
    with Live(Group(bar, told), console=Console(stderr=True)) as live:

        def watch(shown: Shown) -> None:
            if shown.evaluation:
                live.console.print(Text(evaluated(shown)))
            else:
                bar.update(task, completed=shown.step, total=max(shown.steps, shown.step))
                told.plain = figures(shown)

        yield watch
