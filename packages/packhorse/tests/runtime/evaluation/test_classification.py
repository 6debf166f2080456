"""Labels by a head and by a regression on vectors, with logits and vectors that are known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from packhorse.data.tasks.glue_score import f1_macro
from packhorse.data.tasks.labeled import LabeledTexts
from packhorse.errors import InputError, MissingExtra
from packhorse.runtime.evaluation.classification import draws, judge, probe

Read = Callable[..., np.ndarray]


def says(rows: np.ndarray) -> Read:
    """A reader of texts that are the numbers of its rows."""

    def read(texts: Sequence[Any], role: Any = None, progress: Any = None) -> np.ndarray:
        return rows[[int(text) for text in texts]]

    return read


def labeled(targets: Sequence[Any], labels: int, problem: Any = "single_label") -> LabeledTexts:
    names = tuple(map(str, range(labels)))
    return LabeledTexts([str(i) for i in range(len(targets))], list(targets), names, problem)


def test_a_head_of_two_labels() -> None:
    logits = np.array([[2, 1], [0, 1], [0, 3], [1, 0]], np.float32)
    scores = judge(says(logits), labeled([0, 1, 0, 0], 2))
    assert scores["accuracy"] == 3 / 4 and scores["f1"] == pytest.approx(2 / 3)
    assert scores["matthews"] == pytest.approx((1 * 2 - 1 * 0) / np.sqrt(2 * 1 * 3 * 2))


def test_heads_of_other_kinds() -> None:
    logits = np.array([[2, 1, 0], [0, 1, 3], [0, 3, 1]], np.float32)
    figures = judge(says(logits), labeled([0, 1, 1], 3))
    assert list(figures) == ["accuracy", "f1_macro", "matthews"]
    several = judge(says(logits - 1.5), labeled([(0,), (2,), (0, 1)], 3, "multi_label"))
    assert several == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(6 / 7)}
    scores = judge(says(logits[:, :1]), labeled([5.0, 1.0, 1.0], 1, "regression"))
    assert scores == {"pearson": pytest.approx(1), "spearman": pytest.approx(1)}


def test_f1_as_scikit_learn_has_it(rng: np.random.Generator) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    guess, truth = rng.integers(0, 4, size=50), rng.integers(0, 3, size=50)
    assert f1_macro(guess, truth) == pytest.approx(
        metrics.f1_score(truth, guess, average="macro", zero_division=0)
    )


def test_the_probe_learns_what_is_there(rng: np.random.Generator) -> None:
    pytest.importorskip("sklearn")
    truth = rng.integers(0, 3, size=120)
    apart = np.eye(3, dtype=np.float32)[truth] + rng.normal(scale=0.1, size=(120, 3))
    rows = labeled(truth.tolist(), 3)
    scores = probe(says(apart.astype(np.float32)), rows, rows)
    assert scores["accuracy"] > 0.95 and scores["f1_macro"] > 0.95
    nothing = probe(says(rng.normal(size=(120, 3)).astype(np.float32)), rows, rows)
    assert nothing["accuracy"] < 0.6
    with pytest.raises(InputError, match="pairs of texts have no vectors"):
        probe(says(apart), rows, LabeledTexts([("a", "b")], [0], ("0", "1"), "single_label"))


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    rows = labeled([0, 1], 2)
    with pytest.raises(MissingExtra, match=r"scikit-learn .*packhorse\[tutorials\]"):
        probe(says(np.eye(2)), rows, rows)


def test_draws_have_eight_of_each(rng: np.random.Generator) -> None:
    labels = rng.integers(0, 3, size=200)
    drawn = draws(labels)
    assert len(drawn) == 10 and drawn[0].tolist() != drawn[1].tolist()
    for chosen in drawn:
        assert np.bincount(labels[chosen]).tolist() == [8, 8, 8] and len(set(chosen.tolist())) == 24
    assert len(draws(np.array([0, 1, 1]))[0]) == 3  # all there are, where there are fewer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_draws_are_those_of_mteb(rng: np.random.Generator) -> None:
    task = pytest.importorskip("mteb.abstasks.classification").AbsTaskClassification
    dataset = pytest.importorskip("datasets").Dataset
    labels, order = rng.integers(0, 3, size=100), None
    rows = dataset.from_dict({"text": list(map(str, range(100))), "label": labels.tolist()})

    class Theirs:
        seed, samples_per_label, label_column_name = 42, 8, "label"

    for number, drawn in enumerate(draws(labels)):
        _, order, chosen = task._undersample_data(Theirs, rows, number, order)
        assert chosen == drawn.tolist()
