"""Semantic textual similarity: how well similarities of vectors agree with human scores.

Both texts of all pairs are encoded in one call, so that the encoder may sort them by length. Only
the order counts: papers report Spearman's correlation of the cosine, and the other measures cost
next to nothing. Distances are negated, so that for all of them more means more similar.

Cer et al., "SemEval-2017 Task 1" (2017); Reimers et al. (2016) on why Spearman.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from packhorse.data.tasks import glue_score
from packhorse.errors import InputError
from packhorse.runtime.encoder import Progress
from packhorse.runtime.evaluation.reading import TextReader
from packhorse.tokens.tokenizer import Text


def judge(
    read: TextReader,
    pairs: Sequence[Text],
    scores: Sequence[float],
    progress: Progress | None = None,
) -> dict[str, float]:
    """Return the correlations of the pairs' similarities with human scores."""
    first, second = np.split(read(_unzipped(pairs), progress=progress).astype(np.float64), 2)
    truth = np.asarray(scores, np.float64)
    correlations: dict[str, float] = {}
    for name, function in SIMILARITIES.items():
        similarities = function(first, second)
        correlations[f"{name}_spearman"] = glue_score.spearman(similarities, truth)
        correlations[f"{name}_pearson"] = glue_score.pearson(similarities, truth)
    return correlations


def _unzipped(pairs: Sequence[Text]) -> list[str]:
    """Return all first texts, then all second ones."""
    checked = [pair for pair in pairs if isinstance(pair, tuple)]
    if len(checked) < len(pairs):
        raise InputError("similarity needs pairs, but there are single texts; name two columns")
    return [first for first, _ in checked] + [second for _, second in checked]


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return _dot(a, b) / np.maximum(lengths, np.finfo(np.float32).tiny)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1)


def _euclidean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -np.linalg.norm(a - b, axis=1)


def _manhattan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -np.abs(a - b).sum(1)


SIMILARITIES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}
