"""From logits to plain values: hand-made cases whose answer is plain to see."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse import results
from packhorse.errors import InputError
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
    result = results.answers(
        [span_logits(len(window), 2, 48)], [window], context, top_k=100, longest=5
    )
    assert max(len(a.text.split()) for a in result) == 5


def test_windows_compete_and_the_same_span_counts_once() -> None:
    context = "one two three"
    window = make_encoding(context)
    weak, strong = span_logits(len(window), 2, 2, 3.0), span_logits(len(window), 2, 2, 9.0)
    result = results.answers([weak, strong], [window, window], context, top_k=5)
    assert result[0].text == "two"
    assert len({(a.start, a.end) for a in result}) == len(result)
    assert result[0].score == results.answers([strong], [window], context)[0].score


def in_windows(
    window: Encoding, logits: np.ndarray, room: int, stride: int
) -> tuple[list[np.ndarray], list[Encoding]]:
    """The same tokens with the same logits, seen through windows that share `stride` of them."""
    parts: tuple[list[np.ndarray], list[Encoding]] = [], []
    context, size = window.spans[-1], window.spans[-1].stop - window.spans[-1].start
    for start in range(0, max(1, size - stride), room - stride):
        first, last = context.start + start, min(context.start + start + room, context.stop)
        keep = np.r_[: context.start, first:last, context.stop : len(window)]
        parts[0].append(logits[keep])
        part = replace(
            window,
            ids=window.ids[keep],
            types=window.types[keep],
            offsets=window.offsets[keep],
            special=window.special[keep],
            spans=(window.spans[0], slice(context.start, context.start + last - first)),
            start=start,
        )
        parts[1].append(part)
    return parts


def span_by_span(logits, windows, longest: int) -> dict[tuple[int, int], float]:
    """Every span of every window, the plain way."""
    result: dict[tuple[int, int], float] = {}
    for scores, window in zip(logits, windows, strict=True):
        context = range(window.spans[-1].start, window.spans[-1].stop)
        for i in context:
            for j in context:
                place = int(window.offsets[i, 0]), int(window.offsets[j, 1])
                value = float(scores[i, 0]) + float(scores[j, 1])
                if i <= j < i + longest:
                    result[place] = max(result.get(place, -np.inf), value)
    return result


@given(
    words=st.integers(1, 40),
    question=st.integers(0, 3),
    longest=st.integers(1, 12),
    room=st.integers(1, 9),
    seed=st.integers(0, 99),
    top_k=st.integers(1, 30),
)
def test_any_windows_give_what_a_plain_loop_finds(
    words: int, question: int, longest: int, room: int, seed: int, top_k: int
) -> None:
    rng = np.random.default_rng(seed)
    context = " ".join("x" * int(n) for n in rng.integers(1, 4, words))
    window = make_encoding(context, question)
    whole = rng.normal(size=(len(window), 2)) * 3
    logits, windows = in_windows(window, whole, room, int(rng.integers(0, room)))
    # A token is worth something else in each window it is in.
    logits = [part + rng.normal(size=part.shape) for part in logits]
    expected = span_by_span(logits, windows, longest)
    order = sorted(expected, key=lambda place: (-expected[place], place))[:top_k]
    powers = {place: np.exp(value) for place, value in expected.items()}
    result = results.answers(logits, windows, context, top_k, longest)
    assert [(a.start, a.end) for a in result] == order
    assert all(a.text == context[a.start : a.end] for a in result)
    shares = [powers[place] / sum(powers.values()) for place in order]
    assert [a.score for a in result] == pytest.approx(shares)


@given(st.integers(1, 8), st.integers(0, 99))
def test_many_windows_are_one_where_each_answer_fits_in_one(longest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    context = " ".join(str(i) for i in range(int(rng.integers(1, 60))))
    window = make_encoding(context, question=2)
    logits = rng.normal(size=(len(window), 2))
    stride = longest - 1  # the least that cuts no answer
    parts = in_windows(window, logits, stride + int(rng.integers(1, 9)), stride)
    everything = (context, 10_000, longest)
    result = results.answers(*parts, *everything)
    alone = results.answers([logits], [window], *everything)
    assert [(a.start, a.end) for a in result] == [(a.start, a.end) for a in alone]
    assert [a.score for a in result] == pytest.approx([a.score for a in alone])
    assert sum(a.score for a in result) == pytest.approx(1)


def test_a_lost_window_is_a_lost_answer() -> None:
    """The control of the two above."""
    context = " ".join(str(i) for i in range(40))
    window = make_encoding(context, question=2)
    logits = span_logits(len(window), 40, 41)
    parts, windows = in_windows(window, logits, 10, 4)
    assert results.answers(parts, windows, context)[0].text == "36 37"
    assert results.answers(parts[:-1], windows[:-1], context)[0].text != "36 37"


def test_no_answer_is_what_all_windows_say() -> None:
    context = "one two three"
    window = make_encoding(context)
    sees, does_not = span_logits(len(window), 2, 2, 4.0), np.zeros((len(window), 2))
    sees[0], does_not[0] = 1.0, 9.0
    both = [sees, does_not], [window, window], context
    # The window that sees the answer gives "none" 1 + 1, the answer 4 + 4.
    assert results.answers(*both)[0].text == "two"
    assert results.answers(*both, no_answer=-5.9)[0].text == "two"
    assert results.answers(*both, no_answer=-6.0)[0].text == "two"
    none, first = results.answers(*both, top_k=2, no_answer=-6.1)
    assert none == results.Answer("", 0, 0, none.score) and first.text == "two"
    assert np.log(none.score / first.score) == pytest.approx(-6)
    items = results.answers(*both, top_k=99, no_answer=-np.inf)
    assert len(items) == 7 and sum(a.score for a in items) == pytest.approx(1)
    assert results.answers([does_not], [window], context, no_answer=0.0)[0].text == ""
    assert results.answers([does_not], [window], context)[0].text == "one"


def test_masks_overflow_and_what_is_not_a_number() -> None:
    context = "one two three four"
    window = make_encoding(context)
    masked = np.full((len(window), 2), -np.inf)
    assert results.answers([masked], [window], context, no_answer=0.0) == []
    masked[3] = 0.0
    (only,) = results.answers([masked], [window], context, top_k=9)
    assert (only.text, only.score) == ("three", 1.0)
    broken = span_logits(len(window), 2, 3)
    broken[1, 0] = broken[4, 1] = np.nan
    result = results.answers([broken], [window], context, top_k=99)
    assert result[0].text == "two three" and all(0 <= a.score <= 1 for a in result)
    assert not any(a.text.startswith("one") or a.text.endswith("four") for a in result)
    halves = np.full((len(window), 2), -60000, np.float16)
    halves[2, 0], halves[3, 1] = 60000, np.inf  # their sum is beyond a half
    (best,) = results.answers([halves], [window], context)
    assert (best.text, best.score) == ("two three", 1.0)


def test_tokens_of_one_character_are_one_answer() -> None:
    context = "a \N{HORSE FACE} b"
    window = make_encoding("a x y z b")  # three tokens are the bytes of one character
    offsets = np.array([(0, 0), (0, 1), (2, 3), (2, 3), (2, 3), (4, 5), (0, 0)], np.int32)
    window = replace(window, offsets=offsets)
    logits = np.zeros((7, 2))
    logits[2:5] = 5.0
    result = results.answers([logits], [window], context, top_k=6)
    assert result[0].text == "\N{HORSE FACE}"
    assert sorted((a.start, a.end) for a in result) == [
        *((0, 1), (0, 3), (0, 5), (2, 3), (2, 5), (4, 5))
    ]


def test_a_context_without_tokens_has_no_answer() -> None:
    empty = make_encoding("x", question=1)
    empty = replace(empty, spans=(empty.spans[0], slice(3, 3)))
    assert results.answers([np.zeros((5, 2))], [empty], "") == []
    (none,) = results.answers([np.zeros((5, 2))], [empty], "", no_answer=0.0)
    assert (none.text, none.score) == ("", 1.0)
    for wrong in ({"top_k": 0}, {"longest": 0}):
        with pytest.raises(InputError, match="1 or more"):
            results.answers([np.zeros((5, 2))], [empty], "", **wrong)


def test_memory_is_linear_in_the_context() -> None:
    window = make_encoding(" ".join(["word"] * 20_000))
    logits = np.zeros((len(window), 2))
    tracemalloc.start()
    results.answers([logits], [window], "word " * 20_000, top_k=20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000 * 30 * 8 * 10  # a square would be 20,000 times 20,000 times 8


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
    result = results.ranked(np.array(scores), documents)
    assert sorted(r.index for r in result) == list(range(len(scores)))
    assert [r.score for r in result] == sorted(scores, reverse=True)
    ties = [r.index for r in results.ranked(np.zeros(len(scores)), documents)]
    assert ties == list(range(len(scores)))


def test_entities_join_their_pieces() -> None:
    text = "Ada Lovelace met Charles in London"
    labels = ("O", "B-PER", "I-PER", "B-LOC")
    encoding = make_encoding(text)
    words = encoding.spans[-1]
    logits = np.full((len(encoding), 4), -4.0)
    logits[np.arange(words.start, words.stop), [1, 2, 0, 1, 0, 3]] = 4.0
    result = results.entities(logits, encoding, text, labels)
    expected = [("PER", "Ada Lovelace"), ("PER", "Charles"), ("LOC", "London")]
    assert [(e.label, e.text) for e in result] == expected
    assert all(text[e.start : e.end] == e.text for e in result)


def test_a_joined_entity_is_as_sure_as_its_tokens_on_average() -> None:
    text = "Ada King Lovelace met"
    logits = np.log([[0.5, 0.5], [0.1, 0.9], [0.4, 0.6], [0.3, 0.7], [0.8, 0.2], [0.5, 0.5]])
    (result,) = results.entities(logits, make_encoding(text), text, ("O", "I-PER"))
    assert (result.text, result.start, result.end) == ("Ada King Lovelace", 0, 17)
    assert result.score == pytest.approx((0.9 + 0.6 + 0.7) / 3)


def test_two_entities_side_by_side_stay_two() -> None:
    text = "Ada Charles"
    encoding = make_encoding(text)
    logits = np.full((4, 2), -4.0)
    logits[[1, 2], 1] = 4.0  # B-PER, B-PER
    result = results.entities(logits, encoding, text, ("O", "B-PER"))
    assert [e.text for e in result] == ["Ada", "Charles"]
    joined = results.entities(logits, encoding, text, ("O", "I-PER"))
    assert [e.text for e in joined] == ["Ada Charles"]


@given(st.lists(st.floats(-800, 800), min_size=1, max_size=8))
def test_softmax_and_sigmoid_never_overflow(logits: list[float]) -> None:
    assert results.softmax(np.array(logits)).sum() == pytest.approx(1)
    squashed = results.sigmoid(np.array(logits))
    assert ((squashed >= 0) & (squashed <= 1)).all()
