"""The measures of GLUE: accuracy, F1, Matthews correlation, Pearson and Spearman, at most 1.

Where a measure is not defined it is 0, as in scikit-learn's Matthews correlation: a model that
always predicts the same has no correlation with anything.

Wang et al., "GLUE" (2018). The Matthews correlation of more than two labels is Gorodkin's R_K
(2004), which is the same for two.
"""

from __future__ import annotations

import numpy as np


def measured(
    problem: str, predicted: np.ndarray, truth: np.ndarray, labels: int
) -> dict[str, float]:
    """The measures that GLUE reports for single_label, multi_label or regression, by name."""
    if problem == "regression":
        measures = (pearson, spearman)
    elif problem == "multi_label":
        measures = (accuracy, f1)
    else:
        # With two labels, GLUE's F1 is that of label 1.
        measures = (accuracy, f1 if labels == 2 else f1_macro, matthews)
    return {measure.__name__: measure(predicted, truth) for measure in measures}


def accuracy(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The share of rows that are right, in all labels."""
    correct = predicted == truth
    return float(correct.reshape(len(truth), -1).all(1).mean())


def f1(predicted: np.ndarray, truth: np.ndarray) -> float:
    """F1 of the value 1: of label 1 of two, or of all flags together."""
    hits = np.count_nonzero((predicted == 1) & (truth == 1))
    total = np.count_nonzero(predicted == 1) + np.count_nonzero(truth == 1)
    return 2 * hits / total if total else 0.0


def f1_macro(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The mean F1 of all labels that are predicted or true somewhere."""
    labels = np.union1d(predicted, truth)
    return float(np.mean([f1(predicted == label, truth == label) for label in labels]))


def matthews(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The correlation of two labelings, -1 to 1."""
    labels = int(max(predicted.max(), truth.max())) + 1
    table = np.zeros((labels, labels))
    np.add.at(table, (truth, predicted), 1)
    true_counts = table.sum(1)
    predicted_counts = table.sum(0)
    rows = table.sum()
    covariance = np.trace(table) * rows - true_counts @ predicted_counts
    variances = (rows**2 - true_counts @ true_counts) * (
        rows**2 - predicted_counts @ predicted_counts
    )
    return float(covariance / variances**0.5) if variances else 0.0


def pearson(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The linear correlation, -1 to 1."""
    constant = len(truth) < 2 or np.ptp(predicted) == 0 or np.ptp(truth) == 0
    return 0.0 if constant else float(np.corrcoef(predicted, truth)[0, 1])


def spearman(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The correlation of ranks, -1 to 1; equal values share their rank."""
    from scipy.stats import rankdata

    return pearson(rankdata(predicted), rankdata(truth))
