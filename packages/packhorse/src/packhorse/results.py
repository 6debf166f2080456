"""From the tensors of a head to answers, labels, words and rankings as plain values.

All functions work on numpy arrays of one sequence (or of the windows of one text) on the host, so
they can be read and tested without a model. Offsets are code points of the user's text.

Shapes: n tokens of one sequence, C labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from packhorse.errors import CheckpointError, InputError
from packhorse.tokens import Encoding, Tokenizer

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# How the labels of tokens become those of spans; see `entities`.
Aggregation = Literal["none", "simple", "first", "average", "max"]
MAXSIM_NUMBERS = 1 << 22  # similarities of tokens that exist at a time
OVERFLOWED = 1e9  # replaces an infinite logit: above all others, yet sums of two still compare


@dataclass(frozen=True, slots=True)
class Hidden:
    """The raw output for one text: one state per token, and BERT's pooled output if it has one."""

    states: np.ndarray  # [n, E]
    pooled: np.ndarray | None  # [E]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """The words of the vocabulary that have a weight in a text."""

    indices: np.ndarray  # [k] int32, ascending: token ids
    weights: np.ndarray  # [k] float32, above 0


@dataclass(frozen=True, slots=True)
class Classified:
    """The most likely label of a text, and the scores of all labels, best first."""

    label: str
    score: float
    scores: dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of the context, `context[start:end]`; empty if there is no answer."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document in a ranking: its index in the request, its score and its text."""

    index: int
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Filled:
    """A word for the mask, and the text with that word inserted."""

    word: str
    score: float
    text: str
    id: int  # of the token


@dataclass(frozen=True, slots=True)
class Entity:
    """A labeled span of the text: `text[start:end]`."""

    label: str
    text: str
    start: int
    end: int
    score: float


def classified(logits: np.ndarray, labels: Sequence[str], problem: str) -> Classified:
    """[C] logits to a label: by softmax, or by sigmoids if several labels may apply.

    `problem` is "single_label", "multi_label", "regression", or "raw" for the logits themselves.
    """
    if problem == "regression":
        return Classified(labels[0], float(logits[0]), {labels[0]: float(logits[0])})
    scores = SCORES[problem](logits)
    order = [int(i) for i in np.argsort(-scores, kind="stable")]
    by_score = {labels[i]: float(scores[i]) for i in order}
    return Classified(labels[order[0]], float(scores[order[0]]), by_score)


def classified_rows(logits: np.ndarray, labels: Sequence[str], problem: str) -> list[Classified]:
    """[n, C] logits of texts to the same as `classified` has for each of them."""
    if problem == "regression":
        return [Classified(labels[0], score, {labels[0]: score}) for score in logits[:, 0].tolist()]
    scores = SCORES[problem](logits)
    order = np.argsort(-scores, axis=1, kind="stable")
    names = np.array(labels, object)[order].tolist()
    ordered = np.take_along_axis(scores, order, axis=1).tolist()
    return [
        Classified(row_labels[0], values[0], dict(zip(row_labels, values, strict=True)))
        for row_labels, values in zip(names, ordered, strict=True)
    ]


def activated(logits: np.ndarray, activation: str) -> list[float]:
    """[n] logits of documents to scores, by an activation of torch's that is named."""
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"scores by {activation} are not computed here, only by {', '.join(ACTIVATIONS)}; ask "
            "for logits (raw=True, --raw), or change activation_fn in the model's configuration"
        )
    return ACTIVATIONS[activation](logits).tolist()


def sparse(weights: np.ndarray, top_k: int | None = None) -> SparseVector:
    """[V] weights of all words to those above 0, or to the largest `top_k` of them."""
    indices = np.flatnonzero(weights > 0)
    return largest(SparseVector(indices.astype(np.int32), weights[indices]), top_k)


def lexical(
    rows: Sequence[np.ndarray], ids: Sequence[np.ndarray], skipped: Sequence[int]
) -> SparseVector:
    """[n] weights of the tokens of each part of a text to those of words: the largest of each."""
    tokens = np.concatenate(ids)
    weights = np.concatenate(rows).astype(np.float32)
    counted = (weights > 0) & ~np.isin(tokens, skipped)
    indices, inverse = np.unique(tokens[counted], return_inverse=True)
    result = np.zeros(len(indices), np.float32)
    np.maximum.at(result, inverse, weights[counted])
    return SparseVector(indices.astype(np.int32), result)


def largest(vector: SparseVector, top_k: int | None) -> SparseVector:
    """The words with the largest weights; of equal ones those that come first."""
    if top_k is None or top_k >= len(vector.indices):
        return vector
    kept = np.sort(np.argsort(-vector.weights, kind="stable")[:top_k])
    return SparseVector(vector.indices[kept], vector.weights[kept])


def csr(vectors: Sequence[SparseVector], width: int) -> csr_array:
    """One row per vector, as scipy has them."""
    from scipy.sparse import csr_array

    ends = np.cumsum([0, *(len(vector.indices) for vector in vectors)], dtype=np.int64)
    indices = [vector.indices for vector in vectors] or [np.empty(0, np.int32)]
    weights = [vector.weights for vector in vectors] or [np.empty(0, np.float32)]
    parts = (np.concatenate(weights), np.concatenate(indices), ends)
    return csr_array(parts, shape=(len(vectors), width))


def vectors_of(matrix: Any) -> list[SparseVector]:
    """The rows of scipy's CSR."""
    ends: list[int] = matrix.indptr.tolist()
    return [
        SparseVector(matrix.indices[begin:end], matrix.data[begin:end])
        for begin, end in pairwise(ends)
    ]


def words(vector: SparseVector, tokenizer: Tokenizer) -> list[str]:
    """The words of a vector, in its order; a row of a padded table without a word is "#NUMBER"."""
    size = tokenizer.vocab_size
    ids: list[int] = vector.indices.tolist()
    return [tokenizer.token(id) if id < size else f"#{id}" for id in ids]


def maxsim(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray]) -> np.ndarray:
    """Score documents by the best match of each token of a query, summed over its tokens (ColBERT).

    Both are lists of [n, D], as `Encoder.multi` returns them; the result is [queries, documents].
    A document without a token scores 0. Memory is bounded: documents are compared in blocks.
    """
    scores = np.zeros((len(queries), len(documents)), np.float32)
    nonempty = [i for i, query in enumerate(queries) if len(query)]
    if not nonempty:
        return scores
    questions = np.concatenate([queries[i] for i in nonempty])  # [n, D]
    first = np.cumsum([0, *(len(queries[i]) for i in nonempty[:-1])])
    room = max(1, MAXSIM_NUMBERS // len(questions))  # tokens of documents in a block
    block: list[int] = []
    tokens = 0
    for i, document in enumerate(documents):
        if block and tokens + len(document) > room:
            scores[np.ix_(nonempty, block)] = _maxsim(questions, first, documents, block)
            block = []
            tokens = 0
        if len(document):
            block.append(i)
            tokens += len(document)
    if block:
        scores[np.ix_(nonempty, block)] = _maxsim(questions, first, documents, block)
    return scores


def _maxsim(
    questions: np.ndarray, first: np.ndarray, documents: Sequence[np.ndarray], block: Sequence[int]
) -> np.ndarray:
    tokens = np.concatenate([documents[i] for i in block])
    starts = np.cumsum([0, *(len(documents[i]) for i in block[:-1])])
    best = np.maximum.reduceat(questions @ tokens.T, starts, axis=1)  # [n, documents]
    return np.add.reduceat(best, first, axis=0)


def ranked(scores: np.ndarray, documents: Sequence[str], top_k: int | None = None) -> list[Ranked]:
    """Documents, best first; equal scores keep the order of the request."""
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
    """The best spans over all windows of one context; logits are [n, 2] per window: start, end.

    The logit of a span of up to `longest` tokens is the sum of its start and end logits, in the
    best of the windows that contain it. (BERT's own script uses only the window in which the span's
    first token has most context, and so loses an answer that this window cuts.) Sums of logits
    compare across windows; probabilities of separate windows do not: a window without the answer is
    as sure of its best span as any. The score is the softmax over all spans, each counted once.

    With `no_answer`, "no answer" is one more candidate. Its logit is the smallest that any window
    gives it at its first token (a window that sees the answer overrules those that do not). If it
    exceeds the best span by more than `no_answer`, an empty answer at 0 comes first.
    """
    if top_k < 1 or longest < 1:
        raise InputError(f"top_k is {top_k}, an answer's tokens {longest}; ask for 1 or more")
    rankable = [_rankable(window_logits) for window_logits in logits]
    span_logits, offsets = _span_logits(rankable, windows, longest)
    null = -np.inf
    if no_answer is not None:
        null = min(float(window_logits[0].sum()) for window_logits in rankable)
    top = max(float(span_logits.max(initial=-np.inf)), null)
    if top == -np.inf:
        return []
    # log-sum-exp, relative to the largest so that nothing overflows
    norm = top + np.log(np.exp(span_logits - top).sum() + np.exp(null - top))
    spans = _best_spans(span_logits, offsets, top_k)
    result = [
        Answer(context[start:end], start, end, float(np.exp(logit - norm)))
        for (start, end), logit in spans
    ]
    best = spans[0][1] if spans else -np.inf
    if no_answer is not None and null - best > no_answer:
        result.insert(0, Answer("", 0, 0, float(np.exp(null - norm))))
    return result[:top_k]


def pipeline_answers(
    logits: Sequence[np.ndarray],
    windows: Sequence[Encoding],
    context: str,
    words: np.ndarray | None,
    cls_id: int | None,
    top_k: int = 1,
    longest: int = 15,
    may_be_impossible: bool = False,
) -> list[Answer]:
    """The best spans as transformers' pipeline scores them (release 4, which is the last to have
    it); logits are [n, 2] per window: start, end.

    In each window the probabilities of a start and of an end are taken over the context and the
    first token, and their product is a span's score. Each window names its best spans; those of one
    text, whatever its case, are one answer with the sum of the scores. words: for each token of the
    context the characters of its word, [n, 2], to which spans are widened; None: spans are tokens.
    """
    if top_k < 1 or longest < 1:
        raise InputError(f"top_k is {top_k}, an answer's tokens {longest}; ask for 1 or more")
    # Words may make one answer of several spans: so many more are looked at.
    candidates = top_k if words is None else 2 * top_k + 10
    null = np.inf
    found: dict[str, Answer] = {}
    for window_logits, window in zip(logits, windows, strict=True):
        span = window.spans[-1]
        counted = np.zeros(len(window), bool)
        counted[span] = True
        counted |= window.ids == cls_id
        wide = np.where(counted[:, None], _rankable(window_logits), -np.inf)  # [n, 2]
        starts, ends = softmax(wide.T)
        null = min(null, float(starts[0] * ends[0]))
        ends = np.pad(ends[span], (0, longest))
        scores = starts[span][:, None] * sliding_window_view(ends, longest)[: _size(window)]
        flat = scores.ravel()
        order = np.argsort(-flat, kind="stable")[:candidates]
        for index in order[flat[order] > 0].tolist():
            first, more = divmod(index, longest)
            if words is None:
                offsets = window.offsets[span]
                start, end = int(offsets[first, 0]), int(offsets[first + more, 1])
            else:
                start = int(words[window.start + first, 0])
                end = int(words[window.start + first + more, 1])
            text = context[start:end]
            score = float(flat[index])
            same = found.get(text.lower())
            found[text.lower()] = (
                Answer(text, start, end, score)
                if same is None
                else replace(same, score=same.score + score)
            )
    answers = [*found.values(), *([Answer("", 0, 0, null)] if may_be_impossible else [])]
    return sorted(answers, key=lambda answer: -answer.score)[:top_k]


def _rankable(logits: np.ndarray) -> np.ndarray:
    """In float64, where fp16 sums cannot overflow; masked logits and NaN are never the best."""
    wide = np.asarray(logits, dtype=np.float64)
    return np.nan_to_num(wide, nan=-np.inf, posinf=OVERFLOWED, neginf=-np.inf)


def _span_logits(
    logits: Sequence[np.ndarray], windows: Sequence[Encoding], longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """The logits [N, longest] of the spans of j + 1 tokens from token i, and the offsets [N, 2].

    A band, not a square matrix: memory is linear in the N tokens of the context, and spans that are
    too long or end before they start do not exist in it.
    """
    count = max(window.start + _size(window) for window in windows)
    longest = min(longest, max(count, 1))
    result = np.full((count, longest), -np.inf)
    offsets = np.zeros((count, 2), np.int64)
    for window_logits, window in zip(logits, windows, strict=True):
        in_window = window.spans[-1]
        in_context = slice(window.start, window.start + _size(window))
        starts, ends = window_logits[in_window].T
        ends = np.pad(ends, (0, longest), constant_values=-np.inf)
        ends = sliding_window_view(ends, longest)[: len(starts)]  # [n, longest]
        np.maximum(result[in_context], starts[:, None] + ends, out=result[in_context])
        offsets[in_context] = window.offsets[in_window]
    return result, offsets


def _size(window: Encoding) -> int:
    return window.spans[-1].stop - window.spans[-1].start


def _best_spans(
    span_logits: np.ndarray, offsets: np.ndarray, count: int
) -> list[tuple[tuple[int, int], float]]:
    """Up to `count` spans of characters and their logits, the best first.

    Several tokens can belong to one character (the bytes of an emoji), so that spans of tokens can
    be equal as spans of characters: take more until enough are different.
    """
    flat = span_logits.ravel()
    candidates = count
    while True:
        least = -np.inf
        if candidates < flat.size:
            least = np.partition(flat, -candidates)[-candidates]
        indices = np.flatnonzero((flat >= least) & (flat > -np.inf))
        # Of equal logits, the span that begins first.
        order = np.argsort(-flat[indices], kind="stable")
        indices = indices[order[:candidates]]
        first, more = np.divmod(indices, span_logits.shape[1])
        starts = offsets[first, 0].tolist()
        ends = offsets[first + more, 1].tolist()
        spans: dict[tuple[int, int], float] = {}
        for start, end, logit in zip(starts, ends, flat[indices].tolist(), strict=True):
            if start < end:
                spans.setdefault((start, end), logit)
        if len(spans) >= count or candidates >= flat.size:
            return list(spans.items())[:count]
        candidates *= 4


def filled(
    logits: np.ndarray,
    encoding: Encoding,
    text: str,
    tokenizer: Tokenizer,
    top_k: int = 5,
    among: Sequence[int] | None = None,
    decoded: bool = False,
) -> list[list[Filled]]:
    """The most likely words for each mask of a text; logits are [masks, V].

    among: the token ids to choose from; None: all. decoded: the text with the word in it is made of
    all tokens, as transformers' pipeline makes it, instead of the text as it was written.
    """
    known = logits[:, : tokenizer.vocab_size]  # a padded embedding table has rows without words
    places = np.flatnonzero(encoding.ids == tokenizer.mask_id).tolist()
    words = np.arange(known.shape[1]) if among is None else np.unique(np.asarray(among, int))

    def filled_in(place: int, id: int, word: str) -> str:
        if not decoded:
            start, end = encoding.offsets[place].tolist()
            return text[:start] + word + text[end:]
        ids = encoding.ids.copy()
        ids[place] = id
        # With special tokens where there are several masks: the others would be left out.
        return tokenizer.decode(ids, skip_special=len(places) == 1)

    return [
        [
            Filled(word, float(scores[i]), filled_in(place, i, word), i)
            for i in words[np.argsort(-scores[words], kind="stable")[:top_k]].tolist()
            for word in [
                tokenizer.decode([i], skip_special=False) if decoded else tokenizer.decode([i])
            ]
        ]
        for scores, place in zip(map(softmax, known), places, strict=True)
    ]


def entities(
    logits: np.ndarray,
    encoding: Encoding,
    text: str,
    labels: Sequence[str],
    aggregation: Aggregation = "simple",
    tokenizer: Tokenizer | None = None,
) -> list[Entity]:
    """[n, C] logits to labeled spans, as in transformers' token classification; "O" is left out.

    "simple" joins neighboring tokens of one kind. "none" makes every token a span of its own, with
    its label unchanged. "first", "average" and "max" label whole words, by the scores of their
    first token, the average of all, or the scores of the token that is surest; then neighboring
    words of one kind are joined. They need the tokenizer, to know which tokens are one word.
    """
    scores = softmax(logits)
    if aggregation in ("none", "simple"):
        return _token_entities(scores, encoding, text, labels, aggregation == "simple")
    if tokenizer is None:
        raise InputError(f"aggregation {aggregation!r} needs the tokenizer")
    continues = tokenizer.continues_word(encoding, text)
    groups: list[list[Entity]] = []
    for tokens in _words(encoding, continues):
        word_scores = _word_scores(scores[tokens], aggregation)
        label = labels[int(word_scores.argmax())]
        kind = label.removeprefix("B-").removeprefix("I-")
        start = int(encoding.offsets[tokens[0], 0])
        end = int(encoding.offsets[tokens[-1], 1])
        word = Entity(kind, text[start:end], start, end, float(word_scores.max()))
        if groups and groups[-1][-1].label == kind and not label.startswith("B-"):
            groups[-1].append(word)
        else:
            groups.append([word])
    spans = [_joined(words, text) for words in groups]
    return [span for span in spans if span.label != "O" and span.end > span.start]


def without_overlaps(spans: Sequence[Entity]) -> list[Entity]:
    """Entities of windows that share tokens, with one where several windows found the same.

    In the order of the text. Of two that overlap the longer one stays, or the surer one of equal
    length, as in transformers: a window that cuts an entity sees less of it.
    """
    kept: list[Entity] = []
    for span in sorted(spans, key=lambda span: span.start):
        if not kept or span.start >= kept[-1].end:
            kept.append(span)
        elif _rank(span) > _rank(kept[-1]):
            kept[-1] = span
    return kept


def _rank(span: Entity) -> tuple[int, float]:
    return span.end - span.start, span.score


def _words(encoding: Encoding, continues: np.ndarray) -> list[list[int]]:
    """The tokens of each word of the text."""
    words: list[list[int]] = []
    for i in np.flatnonzero(~encoding.special).tolist():
        if words and continues[i]:
            words[-1].append(i)
        else:
            words.append([i])
    return words


def _word_scores(scores: np.ndarray, aggregation: Aggregation) -> np.ndarray:
    """The scores [C] of a word, from those of its tokens, [n, C]."""
    if aggregation == "first":
        return scores[0]
    if aggregation == "average":
        return scores.mean(axis=0)
    return scores[scores.max(axis=1).argmax()]


def _token_entities(
    scores: np.ndarray, encoding: Encoding, text: str, labels: Sequence[str], join: bool
) -> list[Entity]:
    groups: list[list[Entity]] = []
    previous = -2
    for i in np.flatnonzero(~encoding.special):
        label = labels[int(scores[i].argmax())]
        kind = label.removeprefix("B-").removeprefix("I-")
        begins = label.startswith("B-")
        start, end = map(int, encoding.offsets[i])
        if label != "O" and end > start:
            name = kind if join else label
            piece = Entity(name, text[start:end], start, end, float(scores[i].max()))
            continues = join and previous == i - 1 and groups[-1][-1].label == kind
            # The second piece of a split word never begins a new entity, even if labeled "B-".
            if continues and (not begins or start == groups[-1][-1].end):
                groups[-1].append(piece)
            else:
                groups.append([piece])
            previous = i
    return [_joined(pieces, text) for pieces in groups]


def _joined(pieces: Sequence[Entity], text: str) -> Entity:
    """One entity of several tokens or words; its score is their average, as in transformers."""
    start = pieces[0].start
    end = pieces[-1].end
    score = sum(piece.score for piece in pieces) / len(pieces)
    return Entity(pieces[0].label, text[start:end], start, end, score)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax along the last axis, in float64."""
    wide = np.asarray(logits, dtype=np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Elementwise sigmoid, in float64, without overflow."""
    wide = np.asarray(logits, dtype=np.float64)
    return np.exp(-np.logaddexp(0, -wide))


# What a reranker may put after its logits, by the names of torch's classes.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Sigmoid": sigmoid,
    "Identity": np.asarray,
    "Tanh": np.tanh,
    "ReLU": lambda logits: np.maximum(logits, 0.0),
}
SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "single_label": softmax,
    "multi_label": sigmoid,
    "raw": np.asarray,
}
