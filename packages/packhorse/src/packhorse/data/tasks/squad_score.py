"""Exact match and F1 as SQuAD's official scripts define them, for v1.1 and v2.0.

Texts are compared without case, ASCII punctuation, English articles and extra blanks; a question
counts with its best gold answer. The two versions differ in two corners, which are followed: gold
answers that normalise to nothing (v1.1's dev set has three) count for v1.1's exact match alone; and
in v2.0 no answer is itself the right answer to an impossible question. Where the scripts do not
agree with themselves this is simpler: a question without a prediction counts as wrong (v2.0's
script drops it from the mean), and the best threshold is one that can be had, also among ties.

Rajpurkar et al., "SQuAD" (2016) and "Know What You Don't Know" (2018).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from packhorse.data.tasks.squad import Question

ARTICLE = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Mark(NamedTuple):
    """How right one prediction is, 0 to 1."""

    exact_match: float
    f1: float


@dataclass(frozen=True, slots=True)
class Score:
    """The mean of so many questions' marks, in percent."""

    exact_match: float
    f1: float
    questions: int


class Threshold(NamedTuple):
    """The best mean, in percent, and how far above the best span "no answer" must be for it."""

    score: float
    threshold: float


def normalise(text: str) -> str:
    """What two texts have to share to be the same answer."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def f1(prediction: Sequence[str], gold: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of words; without words, whether both are."""
    if not prediction or not gold:
        return float(prediction == gold)
    common = (Counter(prediction) & Counter(gold)).total()
    return 2 * common / (len(prediction) + len(gold))


def mark(prediction: str, golds: Sequence[str], v2: bool = False) -> Mark:
    """The better of each measure over the gold answers; v2.0: without any, "" is right."""
    found = normalise(prediction)
    every = [normalise(gold) for gold in golds]
    full = [gold for gold in every if gold]
    if v2:
        every = full = full or [""]
    best = max((f1(found.split(), gold.split()) for gold in full), default=0.0)
    return Mark(float(found in every), best)


def is_v2(questions: Sequence[Question]) -> bool:
    """Is there a question without an answer?"""
    return any(question.impossible for question in questions)


def marks(questions: Sequence[Question], predicted: Mapping[str, Sequence[str]]) -> list[Mark]:
    """Of each question the mark of the best of its texts, 0 without any."""
    v2 = is_v2(questions)
    found = []
    for question in questions:
        golds = [gold.text for gold in question.answers]
        each = [mark(text, golds, v2) for text in predicted.get(question.id, ())]
        found.append(Mark(*map(max, zip(Mark(0.0, 0.0), *each, strict=True))))
    return found


def score(questions: Sequence[Question], marks: Sequence[Mark]) -> dict[str, Score]:
    """The mean of all, and in v2.0 of questions with and of questions without an answer."""
    parts = {"all": list(marks)}
    if is_v2(questions):
        pairs = list(zip(questions, marks, strict=True))
        parts["has_answer"] = [mark for question, mark in pairs if not question.impossible]
        parts["no_answer"] = [mark for question, mark in pairs if question.impossible]
    return {name: _mean(part) for name, part in parts.items()}


def _mean(marks: Sequence[Mark]) -> Score:
    if not marks:
        return Score(0.0, 0.0, 0)
    exact, words = (100 * float(np.mean(column)) for column in zip(*marks, strict=True))
    return Score(exact, words, len(marks))


def best_threshold(
    marks: Sequence[float], impossible: Sequence[bool], nulls: Sequence[float]
) -> Threshold:
    """The best mean there is when every question whose null is above a threshold goes unanswered.

    marks are those of answering, nulls by how much "no answer" beats each answer.
    """
    order = np.argsort(nulls, kind="stable")
    null, refused = np.asarray(nulls)[order], np.asarray(impossible, float)[order]
    gain = np.asarray(marks, float)[order] - refused  # of answering rather than refusing
    total = refused.sum() + np.concatenate([[0.0], np.cumsum(gain)])
    possible = np.append(np.append(True, null[1:] != null[:-1]), True)  # no threshold parts equals
    best = int(np.argmax(np.where(possible, total, -np.inf)))
    threshold = null[best - 1] if best else np.nextafter(null[0], -np.inf)
    return Threshold(100 * float(total[best]) / len(null), float(threshold))
