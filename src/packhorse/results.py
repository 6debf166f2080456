"""What a head's tensors mean: answers, labels, words and rankings, as plain values.

Everything here is host work on numpy arrays of one sequence (or the windows of one), so it can be
read and tested without a model. Offsets are code points of the text the user passed.

Shapes: n tokens of one sequence, C labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packhorse.tokens import Encoding, Tokenizer


@dataclass(frozen=True, slots=True)
class Hidden:
    """The raw output for one text: a state a token, and BERT's pooled output if it has one."""

    states: np.ndarray  # [n, E]
    pooled: np.ndarray | None  # [E]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Classified:
    """One text's label, the likeliest first, with the scores of all."""

    label: str
    score: float
    scores: dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of the context: `context[start:end]`."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place in a ranking."""

    index: int
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Filled:
    """A word for the mask, and the text with it put in."""

    word: str
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Entity:
    """A labelled stretch of text: `text[start:end]`."""

    label: str
    text: str
    start: int
    end: int
    score: float


def classified(logits: np.ndarray, labels: Sequence[str], problem: str) -> Classified:
    """[C] logits to a label: softmax, or a sigmoid each where several may hold."""
    if problem == "regression":
        return Classified(labels[0], float(logits[0]), {labels[0]: float(logits[0])})
    scores = softmax(logits) if problem == "single_label" else sigmoid(logits)
    order = [int(i) for i in np.argsort(-scores, kind="stable")]
    by_score = {labels[i]: float(scores[i]) for i in order}
    return Classified(labels[order[0]], float(scores[order[0]]), by_score)


def ranked(scores: np.ndarray, documents: Sequence[str], top_k: int | None = None) -> list[Ranked]:
    """Best document first; equal scores keep the order given."""
    order = [int(i) for i in np.argsort(-scores, kind="stable")[:top_k]]
    return [Ranked(i, float(scores[i]), documents[i]) for i in order]


def answers(
    logits: Sequence[np.ndarray],
    windows: Sequence[Encoding],
    context: str,
    top_k: int = 1,
    longest: int = 30,
) -> list[Answer]:
    """The best spans over all windows of one context; logits are [n, 2] a window, start and end.

    A span's score is the product of its ends' probabilities among the context's tokens of its
    window, as question-answering pipelines count it. The same span in two windows counts once.
    """
    best: dict[tuple[int, int], float] = {}
    for window_logits, window in zip(logits, windows, strict=True):
        for start, end, score in _spans(window_logits, window, top_k, longest):
            best[start, end] = max(score, best.get((start, end), 0.0))
    order = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:top_k]
    return [Answer(context[a:b], a, b, score) for (a, b), score in order]


def _spans(
    logits: np.ndarray, window: Encoding, top_k: int, longest: int
) -> list[tuple[int, int, float]]:
    """Up to `top_k` (start, end, score) of one window, in characters of the context."""
    context = window.spans[-1]
    if context.start == context.stop:
        return []
    starts, ends = softmax(logits[context, 0]), softmax(logits[context, 1])
    product = np.triu(np.outer(starts, ends))  # a span does not end before it starts
    product = product - np.triu(product, longest)
    found = np.argsort(-product, axis=None, kind="stable")[:top_k]
    first, last = np.unravel_index(found, product.shape)
    offsets = window.offsets[context]
    return [
        (int(offsets[i, 0]), int(offsets[j, 1]), float(product[i, j]))
        for i, j in zip(first, last, strict=True)
        if product[i, j] > 0
    ]


def filled(
    logits: np.ndarray, encoding: Encoding, text: str, tokenizer: Tokenizer, top_k: int = 5
) -> list[list[Filled]]:
    """For each mask of one text the likeliest words; logits are [masks, V]."""
    spans = [encoding.offsets[i] for i in np.flatnonzero(encoding.ids == tokenizer.mask_id)]
    return [
        [
            Filled(word, float(scores[i]), text[:start] + word + text[end:])
            for i in np.argsort(-scores, kind="stable")[:top_k]
            for word in [tokenizer.decode([int(i)])]
        ]
        for scores, (start, end) in zip(map(softmax, logits), spans, strict=True)
    ]


def entities(
    logits: np.ndarray, encoding: Encoding, text: str, labels: Sequence[str]
) -> list[Entity]:
    """[n, C] logits to labelled stretches: neighbours of one kind are joined, "O" is left out."""
    scores = softmax(logits)
    found: list[Entity] = []
    previous = -2
    for i in np.flatnonzero(~encoding.special):
        label = labels[int(scores[i].argmax())]
        kind, begins = label.removeprefix("B-").removeprefix("I-"), label.startswith("B-")
        start, end = map(int, encoding.offsets[i])
        if label != "O" and end > start:
            piece = Entity(kind, text[start:end], start, end, float(scores[i].max()))
            # The second piece of a split word never begins a new entity, whatever it is labelled.
            touching = bool(found) and previous == i - 1 and found[-1].label == kind
            if touching and (not begins or start == found[-1].end):
                found[-1] = _joined(found[-1], piece, text)
            else:
                found.append(piece)
            previous = i
    return found


def _joined(left: Entity, right: Entity, text: str) -> Entity:
    span = text[left.start : right.end]
    return Entity(left.label, span, left.start, right.end, min(left.score, right.score))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis, in float64."""
    wide = np.asarray(logits, dtype=np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Elementwise, in float64, without overflow."""
    wide = np.asarray(logits, dtype=np.float64)
    return np.exp(-np.logaddexp(0, -wide))
