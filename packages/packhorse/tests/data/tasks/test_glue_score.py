"""GLUE's measures against scipy's and scikit-learn's, and where they are not defined."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from packhorse.data.tasks.glue_score import accuracy, f1, matthews, pearson, spearman


def test_small_ones_by_hand() -> None:
    predicted, true = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 0, 1, 1])
    assert accuracy(predicted, true) == 0.6
    assert f1(predicted, true) == pytest.approx(2 / 3)
    assert matthews(predicted, true) == pytest.approx((2 * 1 - 1 * 1) / 6)
    assert matthews(true, true) == 1 and matthews(1 - true, true) == -1


def test_several_labels_are_right_together() -> None:
    true = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    predicted = np.array([[1, 0, 0], [0, 0, 0], [0, 1, 1]])
    assert accuracy(predicted, true) == pytest.approx(1 / 3)
    assert f1(predicted, true) == pytest.approx(2 * 2 / (3 + 3))


def test_against_scipy_and_with_ties(rng) -> None:
    for size in (2, 3, 50, 400):
        predicted = rng.integers(0, 7, size) + 0.5
        predicted[:2] = 0.0, 1.0
        true = predicted + rng.normal(size=size)
        assert pearson(predicted, true) == pytest.approx(stats.pearsonr(predicted, true)[0])
        assert spearman(predicted, true) == pytest.approx(stats.spearmanr(predicted, true)[0])


def test_against_scikit_learn(rng) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    for kinds in (2, 3, 5):
        true = rng.integers(0, kinds, 60)
        predicted = np.where(rng.random(60) < 0.6, true, rng.integers(0, kinds, 60))
        assert matthews(predicted, true) == pytest.approx(
            metrics.matthews_corrcoef(true, predicted)
        )
        assert accuracy(predicted, true) == pytest.approx(metrics.accuracy_score(true, predicted))
    binary = predicted % 2, true % 2
    assert f1(*binary) == pytest.approx(metrics.f1_score(binary[1], binary[0]))


def test_a_model_that_always_says_the_same_knows_nothing() -> None:
    same, true = np.ones(4, int), np.array([0, 1, 1, 0])
    assert matthews(same, true) == pearson(same, true) == spearman(same, true) == 0
    assert f1(0 * same, 0 * same) == 0
    assert pearson(np.array([1.0]), np.array([2.0])) == 0
