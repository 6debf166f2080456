"""How close vectors in a cheaper number format are to those in fp32.

The cosine shows how far single vectors moved. The overlap of the ten nearest neighbors shows
whether a search still finds the same, which is what users of an index notice. `top10_mixed` is for
those who keep an index in fp32: only the queries are in the cheaper format.

Shapes: N vectors, E dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packhorse.errors import InputError

NEAREST = 10
# A model in int8 must reach all of these to be written without --allow-loss.
LEAST_MEAN = 0.995
LEAST = 0.98
LEAST_OVERLAP = 0.95
QUERIES = 256  # rows of similarities that are computed at once


@dataclass(frozen=True, slots=True)
class QualityReport:
    """Vectors compared with fp32: cosines, and the fraction of the nearest ten in common."""

    texts: int
    cosine_mean: float
    cosine_min: float
    top10: float  # both sides in the cheaper format
    top10_mixed: float  # its queries over an index in fp32

    @property
    def good(self) -> bool:
        """Whether the vectors can replace those in fp32."""
        close = self.cosine_mean >= LEAST_MEAN and self.cosine_min >= LEAST
        return close and min(self.top10, self.top10_mixed) >= LEAST_OVERLAP


def compare(vectors: np.ndarray, exact: np.ndarray) -> QualityReport:
    """Compare [N, E] vectors with those of the same texts in fp32; every text is also a query."""
    if len(vectors) < 2 * NEAREST:
        raise InputError(
            f"{len(vectors)} texts do not show whether the nearest {NEAREST} stay the same; pass "
            f"{2 * NEAREST} or more that differ"
        )
    a, b = _unit(vectors), _unit(exact)
    cosines = (a * b).sum(1)
    expected = _nearest(b, b)
    return QualityReport(
        texts=len(a),
        cosine_mean=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        top10=_overlap(_nearest(a, a), expected),
        top10_mixed=_overlap(_nearest(a, b), expected),
    )


def _unit(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)


def _nearest(queries: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The nearest ten of each query but the query's own text, [N, 10] in any order."""
    nearest: list[np.ndarray] = []
    for first in range(0, len(queries), QUERIES):
        scores = queries[first : first + QUERIES] @ index.T
        rows = np.arange(len(scores))
        scores[rows, first + rows] = -np.inf
        nearest.append(np.argpartition(-scores, NEAREST, axis=1)[:, :NEAREST])
    return np.concatenate(nearest)


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    shared = [len(np.intersect1d(x, y)) for x, y in zip(a, b, strict=True)]
    return float(np.mean(shared) / NEAREST)
