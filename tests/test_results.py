"""From logits to plain values: hand-made cases whose answer is plain to see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse import results
from packhorse.tokens import Encoding


def make_encoding(text: str, question: int = 0) -> Encoding:
    """[CLS] question words [SEP] the text's words [SEP]; a token a word."""
    words, offsets, at = text.split(" "), [], 0
    for word in words:
        offsets.append((at, at + len(word)))
        at += len(word) + 1
    head = 1 + question + (1 if question else 0)
    n = head + len(words) + 1
    special = np.zeros(n, bool)
    special[[0, n - 1]] = True
    if question:
        special[head - 1] = True
    return Encoding(
        ids=np.arange(n, dtype=np.int32),
        types=np.array([0] * head + [1] * (n - head), np.uint8),
        offsets=np.array([(0, 0)] * head + offsets + [(0, 0)], np.int32),
        special=special,
        spans=(slice(1, 1 + question), slice(head, n - 1)),
    )


def span_logits(n: int, start: int, end: int, height: float = 9.0) -> np.ndarray:
    logits = np.zeros((n, 2))
    logits[start, 0] = logits[end, 1] = height
    return logits


def test_the_best_span_is_the_answer() -> None:
    context = "the red cat sat on the mat"
    window = make_encoding(context, question=3)
    best = results.answers([span_logits(len(window), 6, 7)], [window], context)
    assert [(a.text, a.start, a.end) for a in best] == [("red cat", 4, 11)]
    assert 0.9 < best[0].score <= 1


def test_a_span_never_ends_before_it_starts_nor_leaves_the_context() -> None:
    context = "one two three"
    window = make_encoding(context, question=2)
    backwards = results.answers([span_logits(len(window), 6, 4)], [window], context, top_k=9)
    assert all(a.start < a.end for a in backwards)
    # The highest logits lie on the question and [CLS]: they are no answer.
    outside = results.answers([span_logits(len(window), 0, 1)], [window], context, top_k=9)
    assert all(a.text and a.text in context for a in outside)


def test_no_span_is_longer_than_allowed() -> None:
    context = " ".join(str(i) for i in range(50))
    window = make_encoding(context)
    found = results.answers(
        [span_logits(len(window), 2, 48)], [window], context, top_k=100, longest=5
    )
    assert max(len(a.text.split()) for a in found) == 5


def test_windows_compete_and_the_same_span_counts_once() -> None:
    context = "one two three"
    window = make_encoding(context)
    weak, strong = span_logits(len(window), 2, 2, 3.0), span_logits(len(window), 2, 2, 9.0)
    found = results.answers([weak, strong], [window, window], context, top_k=5)
    assert found[0].text == "two"
    assert len({(a.start, a.end) for a in found}) == len(found)
    assert found[0].score == results.answers([strong], [window], context)[0].score


def test_classification() -> None:
    logits = np.array([0.0, 2.0, -1.0])
    single = results.classified(logits, ("a", "b", "c"), "single_label")
    assert single.label == "b" and list(single.scores) == ["b", "a", "c"]
    assert sum(single.scores.values()) == pytest.approx(1)
    multi = results.classified(logits, ("a", "b", "c"), "multi_label")
    assert multi.scores["a"] == pytest.approx(0.5)
    assert results.classified(np.array([3.5]), ("score",), "regression").score == 3.5


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_ranking_is_a_sorted_permutation(scores: list[float]) -> None:
    documents = [f"document {i}" for i in range(len(scores))]
    found = results.ranked(np.array(scores), documents)
    assert sorted(r.index for r in found) == list(range(len(scores)))
    assert [r.score for r in found] == sorted(scores, reverse=True)
    ties = [r.index for r in results.ranked(np.zeros(len(scores)), documents)]
    assert ties == list(range(len(scores)))


def test_entities_join_their_pieces() -> None:
    text = "Ada Lovelace met Charles in London"
    labels = ("O", "B-PER", "I-PER", "B-LOC")
    encoding = make_encoding(text)
    words = encoding.spans[-1]
    logits = np.full((len(encoding), 4), -4.0)
    logits[np.arange(words.start, words.stop), [1, 2, 0, 1, 0, 3]] = 4.0
    found = results.entities(logits, encoding, text, labels)
    expected = [("PER", "Ada Lovelace"), ("PER", "Charles"), ("LOC", "London")]
    assert [(e.label, e.text) for e in found] == expected
    assert all(text[e.start : e.end] == e.text for e in found)


def test_two_entities_side_by_side_stay_two() -> None:
    text = "Ada Charles"
    encoding = make_encoding(text)
    logits = np.full((4, 2), -4.0)
    logits[[1, 2], 1] = 4.0  # B-PER, B-PER
    found = results.entities(logits, encoding, text, ("O", "B-PER"))
    assert [e.text for e in found] == ["Ada", "Charles"]
    joined = results.entities(logits, encoding, text, ("O", "I-PER"))
    assert [e.text for e in joined] == ["Ada Charles"]


@given(st.lists(st.floats(-800, 800), min_size=1, max_size=8))
def test_softmax_and_sigmoid_never_overflow(logits: list[float]) -> None:
    assert results.softmax(np.array(logits)).sum() == pytest.approx(1)
    squashed = results.sigmoid(np.array(logits))
    assert ((squashed >= 0) & (squashed <= 1)).all()
