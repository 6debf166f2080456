"""How far a build is: a bar on a terminal, a line now and then elsewhere, and for the monitor."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packhorse import status
from packhorse.cli.console import PAUSE, note

if TYPE_CHECKING:
    from packhorse.data.corpus.building import CorpusProgress


@contextmanager
def watching() -> Iterator[Callable[["CorpusProgress"], None]]:
    """Something to tell of each step, as often as one likes."""
    with _shown() as show, status.speaking("build", {"device": "cpu"}) as say:

        def watch(step: "CorpusProgress") -> None:
            show(step)
            say(_published(step))

        yield watch


def _published(step: "CorpusProgress") -> dict[str, Any]:
    told = {"does": step.stage, "done": step.done, "total": step.total}
    if step.stage == "reading":  # later nothing more is found, and of each half apart
        told |= {name: getattr(step.counts, name) for name in status.SPEEDS}
    return told


@contextmanager
def _shown() -> Iterator[Callable[["CorpusProgress"], None]]:
    if sys.stderr.isatty():
        with _bar() as watch:
            yield watch
    else:
        yield _lines()


def figures(progress: "CorpusProgress") -> str:
    """What was found so far, and how fast."""
    found = progress.counts
    counts = (
        f"{found.documents:,} documents",
        f"{found.sentences:,} sentences",
        f"{found.sequences:,} sequences",
    )
    if not progress.stage.startswith("reading"):
        return counts[2]
    return ", ".join((*counts, f"{progress.megabytes_per_second:.1f} MB/s"))


@contextmanager
def _bar() -> Iterator[Callable[["CorpusProgress"], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn()]
    columns += [Remaining(), TextColumn("{task.fields[figures]}")]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def watch(step: "CorpusProgress") -> None:
            if step.stage not in tasks:
                tasks[step.stage] = bar.add_task(step.stage, total=step.total, figures="")
            bar.update(tasks[step.stage], completed=step.done, figures=figures(step))

        yield watch


def _lines() -> Callable[["CorpusProgress"], None]:
    """The end of each stage, and in between a line whenever `PAUSE` has passed."""
    said = time.monotonic()

    def watch(step: "CorpusProgress") -> None:
        nonlocal said
        if step.done < step.total and time.monotonic() - said < PAUSE:
            return
        said = time.monotonic()
        share = step.done / step.total if step.total else 1.0
        note(f"{step.stage}: {share:.0%}, {figures(step)}")

    return watch
