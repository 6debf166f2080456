"""Semantic textual similarity: do vectors find those texts alike that people find alike?

Both texts of all pairs are encoded in one go, so that whoever encodes may sort them by length. What
counts is the order: Spearman's correlation of the cosine is the measure that papers report, and
others are as cheap. Distances are negated, so that for all of them more is more alike.

Cer et al., "SemEval-2017 Task 1" (2017); Reimers et al. (2016) on why Spearman.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from packhorse.data.tasks import glue_score
from packhorse.errors import InputError
from packhorse.runtime.encoder import Progress
from packhorse.runtime.evaluation.reading import Read
from packhorse.tokens import Text


def judge(
    read: Read, pairs: Sequence[Text], scores: Sequence[float], progress: Progress | None = None
) -> dict[str, float]:
    """Correlations of the pairs' likenesses with the scores that people gave."""
    first, second = np.split(read(_apart(pairs), progress=progress).astype(np.float64), 2)
    truth, found = np.asarray(scores, np.float64), {}
    for name, likeness in LIKENESSES.items():
        alike = likeness(first, second)
        found[f"{name}_spearman"] = glue_score.spearman(alike, truth)
        found[f"{name}_pearson"] = glue_score.pearson(alike, truth)
    return found


def _apart(pairs: Sequence[Text]) -> list[str]:
    """All first texts, then all second ones."""
    two = [pair for pair in pairs if isinstance(pair, tuple)]
    if len(two) < len(pairs):
        raise InputError("similarity is of pairs, and there are single texts; name two columns")
    return [first for first, _ in two] + [second for _, second in two]


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return _dot(a, b) / np.maximum(lengths, np.finfo(np.float32).tiny)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1)


def _euclidean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -np.linalg.norm(a - b, axis=1)


def _manhattan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -np.abs(a - b).sum(1)


LIKENESSES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}
