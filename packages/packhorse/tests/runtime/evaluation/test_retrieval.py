"""Search finds what a full sort finds, ties included; roles, and a query's own document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from packhorse.data.tasks.retrieval import Collection
from packhorse.runtime.evaluation import retrieval
from packhorse.runtime.evaluation.reading import prompt_of


@pytest.mark.parametrize("depth", [1, 7, 50])
def test_search_is_a_full_sort(
    depth: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "SCORES_PER_CHUNK", 100)  # several chunks
    queries = rng.integers(-1, 2, size=(9, 3)).astype(np.float32)  # few values: many ties
    documents = rng.integers(-1, 2, size=(40, 3)).astype(np.float32)
    ids = [f"d{i}" for i in rng.permutation(40)]
    rankings = list(retrieval.search(queries, documents, ids, depth))
    scores = (queries @ documents.T).tolist()
    sorted_rows = [
        sorted(zip(row, ids, strict=True), reverse=True)[:depth] for row in scores
    ]  # the larger id first among equals
    assert rankings == [[id for _, id in row] for row in sorted_rows]
    backwards = list(retrieval.search(queries, documents[::-1], ids[::-1], depth))
    assert backwards == rankings  # the order of the file does not show


def test_ties_are_broken_as_trec_eval_does(rng: np.random.Generator) -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="mteb brings pytrec_eval")
    ids = [f"d{i}" for i in range(30)]
    vectors = rng.integers(0, 2, size=(30, 2)).astype(np.float32)
    grades = {"q": {id: int(rng.integers(0, 2)) for id in ids}}
    query = np.ones((1, 2), np.float32)
    run = {"q": dict(zip(ids, (query @ vectors.T)[0].tolist(), strict=True))}
    expected = pytrec_eval.RelevanceEvaluator(grades, {"ndcg_cut", "map"}).evaluate(run)["q"]
    (ranking,) = retrieval.search(query, vectors, ids, 100)
    measures = retrieval.measures(ranking, grades["q"])
    assert measures["map"] == pytest.approx(expected["map"])
    assert measures["ndcg@10"] == pytest.approx(expected["ndcg_cut_10"])
    reverse_measures = retrieval.measures(ranking[::-1], grades["q"])
    assert reverse_measures["map"] != pytest.approx(expected["map"])


VECTORS = {"north": (0, 1), "near": (1, 1), "far east": (9, 1), "?": (1, 0.9)}


def read(texts: Sequence[Any], role: Any = None, progress: Any = None) -> np.ndarray:
    if progress:
        progress(len(texts), len(texts))
    return np.array([VECTORS[text] for text in texts], np.float32)


def test_the_nearest_is_the_answer() -> None:
    roles, reported = [], []

    def watched(texts: Sequence[Any], role: Any = None, progress: Any = None) -> np.ndarray:
        roles.append(role)
        return read(texts, role, progress)

    documents = {"f": "far east", "n": "near", "o": "north"}
    collection = Collection(documents, {"q": "?"}, {"q": {"n": 1, "o": 0}})
    measures = retrieval.judge(
        watched, collection, progress=lambda *counts: reported.append(counts)
    )
    assert roles == ["document", "query"] and reported == [(3, 4), (4, 4)]
    assert set(measures.values()) == {1}
    assert retrieval.judge(read, collection, "dot")["mrr@10"] == 1 / 2  # the longest vector wins


def test_a_query_is_no_answer_to_itself() -> None:
    collection = Collection({"q": "?", "n": "near"}, {"q": "?"}, {"q": {"n": 1}})
    assert retrieval.judge(read, collection)["mrr@10"] == 1 / 2
    assert retrieval.judge(read, collection, skip_same_id=True)["mrr@10"] == 1


def test_the_prompt_of_a_role() -> None:
    prompts = {"query": "q: ", "passage": "p: ", "corpus": "c: "}
    assert prompt_of("query", prompts) == "query"
    assert prompt_of("document", prompts) == "passage"
    assert prompt_of(None, prompts) is None and prompt_of("query", {}) is None
