"""Correlations of likenesses with people's scores, by vectors that are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from packhorse.errors import InputError
from packhorse.runtime.evaluation.similarity import judge


def test_as_scipy_has_them(rng: np.random.Generator) -> None:
    vectors = {f"{i}": rng.normal(size=8).astype(np.float32) for i in range(40)}
    pairs = [(str(i), str(i + 20)) for i in range(20)]
    scores = rng.integers(0, 6, size=20).astype(float).tolist()
    calls = []

    def read(texts: Sequence[Any], role: Any = None, progress: Any = None) -> np.ndarray:
        calls.append(role)
        return np.stack([vectors[text] for text in texts])

    figures = judge(read, pairs, scores)
    a, b = (np.stack([vectors[pair[side]] for pair in pairs]).astype(float) for side in (0, 1))
    alike = {
        "cosine": (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1)),
        "dot": np.einsum("ij,ij->i", a, b),
        "euclidean": -np.sqrt(((a - b) ** 2).sum(1)),
        "manhattan": -np.abs(a - b).sum(1),
    }
    for name, values in alike.items():
        assert figures[f"{name}_spearman"] == pytest.approx(stats.spearmanr(values, scores)[0])
        assert figures[f"{name}_pearson"] == pytest.approx(stats.pearsonr(values, scores)[0])
    assert calls == [None]  # all texts at once, so that they can be sorted by length
    turned = judge(read, pairs, scores[::-1])
    assert turned != pytest.approx(figures)


def test_single_texts_are_refused() -> None:
    with pytest.raises(InputError, match="similarity needs pairs"):
        judge(lambda *texts, **options: np.zeros((1, 1)), ["alone", ("a", "b")], [1.0, 2.0])
