"""SQuAD's measures: cases worked out by hand, and what must hold for any texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.data.tasks.squad import (
    Gold,
    Mark,
    SquadQuestion,
    best_threshold,
    f1,
    mark,
    marks,
    normalize_answer,
    score,
)

TEXTS = st.text("aAnthe .,!'-\t\n0é茶🐎İ", max_size=12) | st.text(max_size=12)


def ask(id: str, *golds: str) -> SquadQuestion:
    answers = tuple(Gold(gold, 0) for gold in golds)
    return SquadQuestion(id, "?", "context", answers, impossible=not golds)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Denver\tBroncos!", "denver broncos"),
        ("an apple a day, the end", "apple day end"),
        ("another theme", "another theme"),  # articles are whole words
        ("A", ""),
        (".", ""),
        ("U.S.", "us"),
        ("twenty-one", "twentyone"),
        ("$1,000", "1000"),
        ("the-best", "thebest"),  # punctuation goes first, and joins
        ("L'Été", "lété"),
        ("“quoted”", "“quoted”"),  # only ASCII punctuation goes
        ("1\u20132", "1\u20132"),
        ("北京\u3000大学", "北京 大学"),  # an ideographic blank is a blank
        ("ÀTHE É", "àthe é"),  # a letter beyond ASCII is part of a word
    ],
)
def test_normalization(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("Denver Broncos", ["the Denver Broncos"], (1, 1)),
        ("Broncos", ["Denver Broncos"], (0, 2 / 3)),
        ("Denver Broncos won it", ["Denver Broncos", "Broncos"], (0, 2 * 2 / 6)),
        ("x x y", ["x z z z"], (0, 2 * 1 / 7)),  # a word counts as often as both have it
        ("x", ["y", "the x."], (1, 1)),
        ("", ["x"], (0, 0)),
        ("the", ["x"], (0, 0)),
    ],
)
def test_marks_by_hand(prediction: str, golds: list[str], expected: tuple[float, float]) -> None:
    for v2 in (False, True):
        assert mark(prediction, golds, v2) == pytest.approx(expected)


def test_golds_that_normalize_to_nothing() -> None:
    assert mark("the", ["."], v2=False) == (1, 0)  # so says v1.1's script
    assert mark("the", [".", "x"], v2=True) == (0, 0)
    assert mark("x", [".", "x"], v2=True) == mark("x", [".", "x"], v2=False) == (1, 1)
    assert mark("", [], v2=True) == mark("the", [], v2=True) == (1, 1)
    assert mark("x", [], v2=True) == (0, 0)


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_f1_is_the_overlap_of_two_bags(remaining: list[str], right: list[str]) -> None:
    result = f1(remaining, right)
    assert result == f1(right, remaining) == f1(right[::-1], remaining) and 0 <= result <= 1
    assert (result == 1) == (sorted(remaining) == sorted(right))
    if remaining and right:
        common = sum(min(remaining.count(word), right.count(word)) for word in "abc")
        precision, recall = common / len(remaining), common / len(right)
        mean = 2 * precision * recall / (precision + recall) if common else 0
        assert result == pytest.approx(mean)


@given(TEXTS, st.lists(TEXTS, max_size=3))
def test_an_exact_match_has_all_the_words(prediction: str, golds: list[str]) -> None:
    result = mark(prediction, golds, v2=True)
    assert result.exact_match in (0, 1) and result.exact_match <= result.f1 <= 1
    assert result == mark(normalize_answer(prediction), golds, v2=True)
    more = mark(prediction, [*golds, prediction], v2=True)
    assert more == (1, 1) or (not normalize_answer(prediction) and more == result)


def test_means_and_their_parts() -> None:
    questions = [ask("a", "x y"), ask("b", "y"), ask("c"), ask("d")]
    predicted = {"a": ["x"], "b": ["y"], "c": [""], "unknown": ["z"]}
    result = score(questions, marks(questions, predicted))
    assert {name: astuple(part) for name, part in result.items()} == {
        "all": (50, pytest.approx(100 * (2 / 3 + 1 + 1) / 4), 4),
        "has_answer": (50, pytest.approx(100 * (2 / 3 + 1) / 2), 2),
        "no_answer": (50, 50, 2),  # d has no prediction: wrong, though "" were right
    }
    answerable = questions[:2]
    assert list(score(answerable, marks(answerable, predicted))) == ["all"]
    several = marks(questions, {"a": ["z", "x", "x y"], "d": ["z", ""]})
    assert several == [Mark(1, 1), Mark(0, 0), Mark(0, 0), Mark(1, 1)]


def mean_at(threshold: float, marks: Sequence[float], impossible, nulls) -> float:
    taken = [
        float(none) if null > threshold else mark
        for mark, none, null in zip(marks, impossible, nulls, strict=True)
    ]
    return 100 * float(np.mean(taken))


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.integers(-4, 4)), min_size=1
    )
)
def test_no_threshold_is_better_than_the_best(rows: list[tuple[float, bool, int]]) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)]
    best = best_threshold(*columns)
    assert best.score == pytest.approx(mean_at(best.threshold, *columns))
    tried = [mean_at(at, *columns) for at in np.arange(-5, 5, 0.5)]
    assert best.score == pytest.approx(max(tried))


def test_best_threshold_by_hand() -> None:
    #        right  wrong  impossible, which should be refused
    result = best_threshold([1.0, 0.0, 0.0], [False, False, True], [-3.0, 1.0, 2.0])
    assert result == (pytest.approx(200 / 3), -3.0)
    assert best_threshold([0.0, 0.0], [True, True], [-np.inf, 5.0]).score == 100
