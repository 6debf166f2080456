"""The measures of GLUE: accuracy, F1, Matthews' and the two correlations, as fractions of 1.

Where a measure is not defined (a model that always says the same has no correlation with anything)
it is 0, as scikit-learn's Matthews is: what is learned so far tells nothing about the truth.

Wang et al., "GLUE" (2018). Matthews' for more than two labels is Gorodkin's R_K (2004), which is
the same for two.
"""

from __future__ import annotations

import numpy as np


def measured(
    problem: str, predicted: np.ndarray, truth: np.ndarray, labels: int
) -> dict[str, float]:
    """What GLUE reports of such a problem: single_label, multi_label or regression."""
    if problem == "regression":
        measures = (pearson, spearman)
    elif problem == "multi_label":
        measures = (accuracy, f1)
    else:
        # GLUE's F1 is that of label 1 of two.
        measures = (accuracy, f1 if labels == 2 else f1_macro, matthews)
    return {measure.__name__: measure(predicted, truth) for measure in measures}


def accuracy(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The share of rows in which all is right."""
    right = predicted == truth
    return float(right.reshape(len(truth), -1).all(1).mean())


def f1(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Of what is 1, whether labels of two kinds or flags of many (then over all of them)."""
    hits = np.count_nonzero((predicted == 1) & (truth == 1))
    claims, facts = np.count_nonzero(predicted == 1), np.count_nonzero(truth == 1)
    return 2 * hits / (claims + facts) if claims + facts else 0.0


def f1_macro(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The average of each label's F1, over labels that are claimed or true somewhere."""
    labels = np.union1d(predicted, truth)
    return float(np.mean([f1(predicted == each, truth == each) for each in labels]))


def matthews(predicted: np.ndarray, truth: np.ndarray) -> float:
    """The correlation of two labellings, -1 to 1."""
    kinds = int(max(predicted.max(), truth.max())) + 1
    table = np.zeros((kinds, kinds))
    np.add.at(table, (truth, predicted), 1)
    facts, claims, rows = table.sum(1), table.sum(0), table.sum()
    spread = (rows**2 - facts @ facts) * (rows**2 - claims @ claims)
    return float((np.trace(table) * rows - facts @ claims) / spread**0.5) if spread else 0.0


def pearson(predicted: np.ndarray, truth: np.ndarray) -> float:
    """How near to a straight line, -1 to 1."""
    constant = len(truth) < 2 or np.ptp(predicted) == 0 or np.ptp(truth) == 0
    return 0.0 if constant else float(np.corrcoef(predicted, truth)[0, 1])


def spearman(predicted: np.ndarray, truth: np.ndarray) -> float:
    """How alike the two orders, -1 to 1; equals share their rank."""
    from scipy.stats import rankdata

    return pearson(rankdata(predicted), rankdata(truth))
