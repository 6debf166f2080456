"""What a head's tensors mean: answers, labels, words and rankings, as plain values.

Everything here is host work on numpy arrays of one sequence (or the windows of one), so it can be
read and tested without a model. Offsets are code points of the text the user passed.

Shapes: n tokens of one sequence, C labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from packhorse.errors import InputError
from packhorse.tokens import Encoding, Tokenizer

OVERFLOWED = 1e9  # stands for an infinite logit: above all others, yet sums still tell apart


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
    """A span of the context: `context[start:end]`; empty where there is none."""

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
    id: int  # of the token


@dataclass(frozen=True, slots=True)
class Entity:
    """A labelled stretch of text: `text[start:end]`."""

    label: str
    text: str
    start: int
    end: int
    score: float


def classified(logits: np.ndarray, labels: Sequence[str], problem: str) -> Classified:
    """[C] logits to a label: softmax, or a sigmoid each where several may hold.

    `problem` is "single_label", "multi_label", "regression", or "raw" for the logits themselves.
    """
    if problem == "regression":
        return Classified(labels[0], float(logits[0]), {labels[0]: float(logits[0])})
    scores = SCORES[problem](logits)
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
    no_answer: float | None = None,
) -> list[Answer]:
    """The best spans over all windows of one context; logits are [n, 2] a window, start and end.

    A span of up to `longest` tokens is worth the sum of its ends' logits in the best of the windows
    that hold it whole. (BERT's own script asks only the window in which the span's first token has
    most context, and so loses an answer that this window cuts.) Sums compare across windows;
    products of a window's own probabilities do not: one without the answer is as sure of its best
    as any. The score is the softmax of these sums over every span there is, each counted once.

    With `no_answer`, having none is one more candidate, worth the least that any window's first
    token gives it (a window that sees the answer outvotes those that do not). Where that beats the
    best span by more than `no_answer`, an empty answer at 0 comes first.
    """
    if top_k < 1 or longest < 1:
        raise InputError(f"top_k is {top_k}, an answer's tokens {longest}; ask for 1 or more")
    wide = [_rankable(each) for each in logits]
    worth, offsets = _worth(wide, windows, longest)
    null = -np.inf if no_answer is None else min(float(each[0].sum()) for each in wide)
    top = max(float(worth.max(initial=-np.inf)), null)
    if top == -np.inf:
        return []
    norm = top + np.log(np.exp(worth - top).sum() + np.exp(null - top))
    spans = _best(worth, offsets, top_k)
    found = [Answer(context[a:b], a, b, float(np.exp(x - norm))) for (a, b), x in spans]
    best = spans[0][1] if spans else -np.inf
    if no_answer is not None and null - best > no_answer:
        found.insert(0, Answer("", 0, 0, float(np.exp(null - norm))))
    return found[:top_k]


def _rankable(logits: np.ndarray) -> np.ndarray:
    """In float64, where halves cannot overflow; what is masked or not a number is never best."""
    wide = np.asarray(logits, dtype=np.float64)
    return np.nan_to_num(wide, nan=-np.inf, posinf=OVERFLOWED, neginf=-np.inf)


def _worth(
    logits: Sequence[np.ndarray], windows: Sequence[Encoding], longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """[N, longest]: what the j + 1 tokens from the context's token i are worth; offsets [N, 2].

    A band, not a square: memory is linear in the context, and spans that are too long or end
    before they start have no place in it.
    """
    count = max(window.start + _size(window) for window in windows)
    longest = min(longest, max(count, 1))
    worth = np.full((count, longest), -np.inf)
    offsets = np.zeros((count, 2), np.int64)
    for each, window in zip(logits, windows, strict=True):
        context, here = window.spans[-1], slice(window.start, window.start + _size(window))
        starts, ends = each[context].T
        ends = np.pad(ends, (0, longest), constant_values=-np.inf)
        ends = sliding_window_view(ends, longest)[: len(starts)]
        np.maximum(worth[here], starts[:, None] + ends, out=worth[here])
        offsets[here] = window.offsets[context]
    return worth, offsets


def _size(window: Encoding) -> int:
    return window.spans[-1].stop - window.spans[-1].start


def _best(
    worth: np.ndarray, offsets: np.ndarray, count: int
) -> list[tuple[tuple[int, int], float]]:
    """Up to `count` stretches of characters and what they are worth, the best first.

    Several tokens can stand for one character (the bytes of an emoji): more spans are looked at
    until there are enough that differ.
    """
    flat, wanted = worth.ravel(), count
    while True:
        least = np.partition(flat, -wanted)[-wanted] if wanted < flat.size else -np.inf
        kept = np.flatnonzero((flat >= least) & (flat > -np.inf))
        order = np.argsort(-flat[kept], kind="stable")  # of equals, the one that begins first
        kept = kept[order[:wanted]]
        first, more = np.divmod(kept, worth.shape[1])
        places = zip(offsets[first, 0].tolist(), offsets[first + more, 1].tolist(), strict=True)
        found: dict[tuple[int, int], float] = {}
        for place, value in zip(places, flat[kept].tolist(), strict=True):
            if place[0] < place[1]:
                found.setdefault(place, value)
        if len(found) >= count or wanted >= flat.size:
            return list(found.items())[:count]
        wanted *= 4


def filled(
    logits: np.ndarray,
    encoding: Encoding,
    text: str,
    tokenizer: Tokenizer,
    top_k: int = 5,
    among: Sequence[int] | None = None,
) -> list[list[Filled]]:
    """For each mask of one text the likeliest words, all or those `among`; logits [masks, V]."""
    known = logits[:, : tokenizer.vocab_size]  # a padded table scores words that do not exist
    spans = [encoding.offsets[i] for i in np.flatnonzero(encoding.ids == tokenizer.mask_id)]
    words = np.arange(known.shape[1]) if among is None else np.unique(np.asarray(among, int))
    return [
        [
            Filled(word, float(scores[i]), text[:start] + word + text[end:], i)
            for i in words[np.argsort(-scores[words], kind="stable")[:top_k]].tolist()
            for word in [tokenizer.decode([i])]
        ]
        for scores, (start, end) in zip(map(softmax, known), spans, strict=True)
    ]


def entities(
    logits: np.ndarray, encoding: Encoding, text: str, labels: Sequence[str], join: bool = True
) -> list[Entity]:
    """[n, C] logits to labelled stretches: neighbours of one kind are joined, "O" is left out.

    Without `join`, each token for itself with its label as it is.
    """
    scores = softmax(logits)
    found: list[list[Entity]] = []
    previous = -2
    for i in np.flatnonzero(~encoding.special):
        label = labels[int(scores[i].argmax())]
        kind, begins = label.removeprefix("B-").removeprefix("I-"), label.startswith("B-")
        start, end = map(int, encoding.offsets[i])
        if label != "O" and end > start:
            named = kind if join else label
            piece = Entity(named, text[start:end], start, end, float(scores[i].max()))
            # The second piece of a split word never begins a new entity, whatever it is labelled.
            touching = join and previous == i - 1 and found[-1][-1].label == kind
            if touching and (not begins or start == found[-1][-1].end):
                found[-1].append(piece)
            else:
                found.append([piece])
            previous = i
    return [_joined(pieces, text) for pieces in found]


def _joined(pieces: Sequence[Entity], text: str) -> Entity:
    """As sure as its tokens are on average, which is how transformers tells it."""
    start, end = pieces[0].start, pieces[-1].end
    score = sum(piece.score for piece in pieces) / len(pieces)
    return Entity(pieces[0].label, text[start:end], start, end, score)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis, in float64."""
    wide = np.asarray(logits, dtype=np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Elementwise, in float64, without overflow."""
    wide = np.asarray(logits, dtype=np.float64)
    return np.exp(-np.logaddexp(0, -wide))


SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "single_label": softmax,
    "multi_label": sigmoid,
    "raw": np.asarray,
}
