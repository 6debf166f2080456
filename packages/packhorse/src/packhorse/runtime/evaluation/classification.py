"""Classification: by the model's head, or by a classifier trained on a few of its vectors.

A model with a head predicts labels. One that only makes vectors is probed as in MTEB: ten times,
eight examples per label are drawn from a training set, a logistic regression is fitted to their
vectors, and its predictions for the test set are scored; the figures are averages of the ten. The
draws are exactly those of MTEB, so that scores are equal. Only examples that are drawn are encoded.

Muennighoff et al., "MTEB" (2023); for the measures Wang et al., "GLUE" (2018).
"""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np

from packhorse.data.tasks import glue_score
from packhorse.data.tasks.labeled import LabeledTexts
from packhorse.errors import InputError, MissingExtra
from packhorse.runtime.encoder import Progress
from packhorse.runtime.evaluation.reading import TextReader

# As in MTEB.
ROUNDS = 10
SAMPLES = 8  # per label and round
SEED = 42
STEPS = 100


def judge(
    read: TextReader, rows: LabeledTexts, progress: Progress | None = None
) -> dict[str, float]:
    """Return GLUE's measures of a head whose logits `read` returns."""
    logits = read(rows.texts, progress=progress)
    if rows.problem == "regression":
        predictions = logits[:, 0].astype(np.float64)
        truth = np.asarray(rows.targets, np.float64)
    elif rows.problem == "multi_label":
        predictions = (logits > 0).astype(np.int64)
        truth = _flags(rows)
    else:
        predictions = logits.argmax(1)
        truth = np.asarray(rows.targets)
    return glue_score.measured(rows.problem, predictions, truth, len(rows.labels))


def probe(
    read: TextReader, train: LabeledTexts, rows: LabeledTexts, progress: Progress | None = None
) -> dict[str, float]:
    """Return accuracy and F1 of classifiers fitted to the vectors that `read` returns."""
    if not all(isinstance(text, str) for text in [*train.texts, *rows.texts]):
        raise InputError(
            "pairs of texts have no vectors; use single texts or a model with a classify head"
        )
    _regression()  # raise for a missing package before the long part
    drawn = draws(np.asarray(train.targets))
    used: list[int] = sorted(set(np.concatenate(drawn).tolist()))
    vectors = read([train.texts[i] for i in used] + rows.texts, progress=progress)
    train_vectors = vectors[: len(used)]
    test_vectors = vectors[len(used) :]
    row_of = {index: row for row, index in enumerate(used)}
    truth = np.asarray(rows.targets)
    scores: list[tuple[float, float]] = []
    for indices in drawn:
        examples = train_vectors[[row_of[i] for i in indices.tolist()]]
        labels = np.asarray(train.targets)[indices]
        predictions = _predictions(examples, labels, test_vectors)
        accuracy = glue_score.accuracy(predictions, truth)
        scores.append((accuracy, glue_score.f1_macro(predictions, truth)))
    accuracy, f1 = np.mean(np.array(scores), axis=0)
    return {"accuracy": float(accuracy), "f1_macro": float(f1)}


def draws(labels: np.ndarray) -> list[np.ndarray]:
    """Return the training rows of each round: the first few per label of a shuffled order."""
    order = list(range(len(labels)))
    drawn: list[np.ndarray] = []
    for _ in range(ROUNDS):
        # The same seed each time, but the order goes on from the last round's: so does MTEB.
        np.random.RandomState(SEED).shuffle(order)
        counts: Counter[int] = Counter()
        indices: list[int] = []
        for index in order:
            label = int(labels[index])
            if counts[label] < SAMPLES:
                counts[label] += 1
                indices.append(index)
        drawn.append(np.array(indices))
    return drawn


def _flags(rows: LabeledTexts) -> np.ndarray:
    """Return [rows, labels]: 1 where a row has the label."""
    flags = np.zeros((len(rows.targets), len(rows.labels)), np.int64)
    for row, target in enumerate(rows.targets):
        flags[row, list(target) if isinstance(target, tuple) else int(target)] = 1
    return flags


def _predictions(examples: np.ndarray, labels: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the labels that a regression fitted to the examples predicts for the vectors."""
    regression = _regression()(max_iter=STEPS, random_state=SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may not converge in so few steps, as in MTEB
        return np.asarray(regression.fit(examples, labels).predict(vectors))


def _regression() -> type:
    try:
        from sklearn.linear_model import (  # pyright: ignore[reportMissingTypeStubs]
            LogisticRegression,
        )
    except ImportError as error:
        raise MissingExtra("scikit-learn", "tutorials") from error
    return LogisticRegression
