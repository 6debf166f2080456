"""Score one task with our engine and with another library on the same weights, and compare.

Both are scored by the same code, so a difference comes from vectors or logits. Time counts while
texts are encoded (tokenizing included), not while results are scored, and starts after a warm-up on
a few texts. Each engine encodes everything once: a task has thousands of texts, and a second pass
would double a wait of minutes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from packhorse import __version__
from packhorse.reports.tables import Table
from packhorse.runtime.encoder import Progress
from packhorse.runtime.evaluation.reading import Role, TextReader
from packhorse.tokens.tokenizer import Text

OURS = "packhorse"
SAME = 5e-5  # a smaller difference does not show in four digits
WARM_UP = 32  # texts

ScoringTask = Callable[[TextReader, Progress | None], dict[str, float]]


@dataclass(frozen=True)
class EngineScore:
    """Scores and time of one engine on the task."""

    engine: str
    version: str
    metrics: dict[str, float]
    texts: int
    seconds: float

    @property
    def texts_per_second(self) -> float:
        """Speed with tokenizing included."""
        return self.texts / self.seconds


class TimedReader:
    """Wraps a reader, and counts its texts and seconds."""

    def __init__(self, read: TextReader) -> None:
        self.read = read
        self.texts = 0
        self.seconds = 0.0

    def __call__(
        self, texts: Sequence[Text], role: Role | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        """Read the texts; the rows are on the host then, so the device has finished."""
        start = time.perf_counter()
        rows = self.read(texts, role, progress)
        self.seconds += time.perf_counter() - start
        self.texts += len(texts)
        return rows


def measure(
    engine: str,
    read: TextReader,
    task: ScoringTask,
    sample: Sequence[Text],
    progress: Progress | None = None,
) -> EngineScore:
    """Warm up on the sample, then score the task."""
    with warnings.catch_warnings():
        # Only the first warning is shown; it must be about all texts, not about the sample.
        warnings.simplefilter("ignore")
        read(sample[:WARM_UP])
    reader = TimedReader(read)
    metrics = task(reader, progress)
    # Our own name may be followed by the number type of the vectors.
    engine_version = __version__ if engine.split()[0] == OURS else version(engine)
    return EngineScore(engine, engine_version, metrics, reader.texts, reader.seconds)


def difference(scores: Sequence[EngineScore]) -> float | None:
    """Return the largest difference of a metric to the first engine; None if it is alone."""
    first, *others = scores
    differences = [
        abs(first.metrics[name] - value)
        for score in others
        for name, value in score.metrics.items()
    ]
    return max(differences, default=None)


def ratio(scores: Sequence[EngineScore]) -> float | None:
    """Return how many times longer the second engine took than the first."""
    return scores[1].seconds / scores[0].seconds if len(scores) > 1 else None


def table(scores: Sequence[EngineScore]) -> Table:
    """Return a table with a row per metric and a column per engine."""
    rows = [
        [name.replace("_", " "), *(f"{score.metrics[name]:.4f}" for score in scores)]
        for name in scores[0].metrics
    ]
    rows += [
        ["seconds", *(f"{score.seconds:.2f}" for score in scores)],
        ["texts/s", *(f"{score.texts_per_second:,.1f}" for score in scores)],
        ["times ours", *(f"{score.seconds / scores[0].seconds:.2f}" for score in scores)],
    ]
    columns = ["measure", *(f"{score.engine} {score.version}" for score in scores)]
    return Table.of(columns, rows)
