"""One task by ours and by another library with the same weights: the scores, and who is faster.

Whoever reads the texts is judged by the same code, so a difference is one of vectors or logits.
The clock runs while texts are read (tokenizing included), not while results are judged. Before it
starts, each reads a few of the texts. A side reads everything once: a task has thousands of texts,
and to read them again would double a wait of minutes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from packhorse import __version__
from packhorse.reports.tables import Table
from packhorse.runtime.encoder import Progress
from packhorse.runtime.evaluation.reading import Role, TextReader
from packhorse.tokens import Text

OURS = "packhorse"
SAME = 5e-5  # less is no difference in four digits
WARM_UP = 32  # texts

Task = Callable[[TextReader, Progress | None], dict[str, float]]


@dataclass(frozen=True)
class Side:
    """What one library made of the task."""

    engine: str
    version: str
    metrics: dict[str, float]
    texts: int
    seconds: float

    @property
    def texts_per_second(self) -> float:
        """Tokenizing included."""
        return self.texts / self.seconds


class Clock:
    """Reads through another, and counts texts and seconds."""

    def __init__(self, read: TextReader) -> None:
        self.read, self.texts, self.seconds = read, 0, 0.0

    def __call__(
        self, texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        """The rows are on the host when it returns: no device is still at work."""
        start = time.perf_counter()
        rows = self.read(texts, role, progress)
        self.seconds += time.perf_counter() - start
        self.texts += len(texts)
        return rows


def measure(
    engine: str,
    read: TextReader,
    task: Task,
    sample: Sequence[Text],
    progress: Progress | None = None,
) -> Side:
    """Warm up on the sample, then do the task."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is said of a few texts would hide what of all
        read(sample[:WARM_UP])
    clock = Clock(read)
    metrics = task(clock, progress)
    made = __version__ if engine == OURS else version(engine)
    return Side(engine, made, metrics, clock.texts, clock.seconds)


def difference(sides: Sequence[Side]) -> float | None:
    """The largest of any metric between the first side and another; None: there is no other."""
    ours, *others = sides
    apart = [abs(ours.metrics[k] - value) for side in others for k, value in side.metrics.items()]
    return max(apart, default=None)


def ratio(sides: Sequence[Side]) -> float | None:
    """How many times longer the second took than the first."""
    return sides[1].seconds / sides[0].seconds if len(sides) > 1 else None


def table(sides: Sequence[Side]) -> Table:
    """A metric a line, a side a column."""
    times = [ratio([sides[0], side]) or 1.0 for side in sides]
    rows: Mapping[str, list[str]] = {
        **{k.replace("_", " "): [f"{s.metrics[k]:.4f}" for s in sides] for k in sides[0].metrics},
        "seconds": [f"{side.seconds:.2f}" for side in sides],
        "texts/s": [f"{side.texts_per_second:,.1f}" for side in sides],
        "times ours": [f"{value:.2f}" for value in times],
    }
    columns = ["measure", *(f"{side.engine} {side.version}" for side in sides)]
    return Table.of(columns, [[name, *cells] for name, cells in rows.items()])
