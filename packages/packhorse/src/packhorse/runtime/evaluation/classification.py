"""Classification: by the model's own head, or by what a few examples teach about its vectors.

A model with a head is asked for labels. One that only makes vectors is probed as MTEB probes it:
ten times, eight examples of each label are drawn from a training set, a logistic regression learns
from their vectors, and its labels for the test set are judged; figures are averages of the ten. The
draw is MTEB's own, number for number, so that a score here and there is the same. Only examples
that are drawn are encoded.

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
from packhorse.runtime.evaluation.reading import Read

ROUNDS, SAMPLES, SEED, STEPS = 10, 8, 42, 100  # MTEB's


def judge(read: Read, rows: LabeledTexts, progress: Progress | None = None) -> dict[str, float]:
    """GLUE's measures of a head whose logits `read` gives."""
    logits = read(rows.texts, progress=progress)
    if rows.problem == "regression":
        found, truth = logits[:, 0].astype(np.float64), np.asarray(rows.targets, np.float64)
    elif rows.problem == "multi_label":
        found, truth = (logits > 0).astype(np.int64), _flags(rows)
    else:
        found, truth = logits.argmax(1), np.asarray(rows.targets)
    return glue_score.measured(rows.problem, found, truth, len(rows.labels))


def probe(
    read: Read, train: LabeledTexts, rows: LabeledTexts, progress: Progress | None = None
) -> dict[str, float]:
    """Accuracy and F1 of what can be learned from the vectors that `read` gives."""
    if not all(isinstance(text, str) for text in [*train.texts, *rows.texts]):
        raise InputError("vectors are of single texts; pairs need a model with a classifying head")
    _regression()  # before the long part
    drawn = draws(np.asarray(train.targets))
    used = sorted(set(np.concatenate(drawn).tolist()))
    vectors = read([train.texts[i] for i in used] + rows.texts, progress=progress)
    learned, asked = vectors[: len(used)], vectors[len(used) :]
    place = {index: at for at, index in enumerate(used)}
    truth, found = np.asarray(rows.targets), []
    for some in drawn:
        examples = learned[[place[i] for i in some.tolist()]]
        guess = _taught(examples, np.asarray(train.targets)[some], asked)
        found.append((glue_score.accuracy(guess, truth), glue_score.f1_macro(guess, truth)))
    accuracy, f1 = np.mean(found, axis=0)
    return {"accuracy": float(accuracy), "f1_macro": float(f1)}


def draws(labels: np.ndarray) -> list[np.ndarray]:
    """For each round the rows it learns from: the first few of each label, shuffled once more."""
    order, drawn = list(range(len(labels))), []
    for _ in range(ROUNDS):
        np.random.RandomState(SEED).shuffle(order)
        have: Counter[int] = Counter()
        some = []
        for index in order:
            if have[label := int(labels[index])] < SAMPLES:
                have[label] += 1
                some.append(index)
        drawn.append(np.array(some))
    return drawn


def _flags(rows: LabeledTexts) -> np.ndarray:
    """[rows, labels]: 1 where one holds."""
    flags = np.zeros((len(rows.targets), len(rows.labels)), np.int64)
    for row, target in enumerate(rows.targets):
        flags[row, list(target) if isinstance(target, tuple) else int(target)] = 1
    return flags


def _taught(examples: np.ndarray, labels: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """What a regression that saw the examples says."""
    made = _regression()(max_iter=STEPS, random_state=SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was not done after so many steps, as MTEB's
        return np.asarray(made.fit(examples, labels).predict(asked))


def _regression() -> type:
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise MissingExtra("scikit-learn", "tutorials") from error
    return LogisticRegression
