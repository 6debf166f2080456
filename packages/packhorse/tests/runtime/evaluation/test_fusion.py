"""Retrieval by several outputs: scores, their combination, and the measures of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from packhorse.data.tasks.retrieval import Collection
from packhorse.errors import InputError
from packhorse.runtime.evaluation import fusion, retrieval

NAMES = ("dense", "sparse", "multi")


@pytest.fixture
def data(rng: np.random.Generator) -> tuple[Any, dict[str, Any], dict[str, Any], Collection]:
    """A reader of made-up outputs of 30 documents and 6 queries, which it finds by their names."""

    def make(count: int) -> dict[str, Any]:
        return {
            "dense": rng.standard_normal((count, 5)).astype(np.float32),
            "sparse": csr_array(rng.standard_normal((count, 9)).clip(0).astype(np.float32)),
            "multi": [
                rng.standard_normal((int(k), 4)).astype(np.float32)
                for k in rng.integers(1, 6, count)
            ],
        }

    documents, queries = make(30), make(6)

    def read(texts: Any, role: Any = None, progress: Any = None) -> dict[str, Any]:
        rows, source = [int(text) for text in texts], queries if role == "query" else documents
        return {
            "dense": source["dense"][rows],
            "sparse": source["sparse"][rows],
            "multi": [source["multi"][row] for row in rows],
        }

    grades = {f"q{i}": {f"d{j}": int(rng.integers(0, 3)) for j in range(30)} for i in range(6)}
    texts = {f"d{i}": str(i) for i in range(30)}
    return read, documents, queries, Collection(texts, {f"q{i}": str(i) for i in range(6)}, grades)


def by_hand(name: str, query: dict[str, Any], i: int, documents: dict[str, Any]) -> np.ndarray:
    if name == "dense":
        return documents["dense"] @ query["dense"][i]
    if name == "sparse":
        return documents["sparse"].toarray() @ query["sparse"].toarray()[i]
    return np.array([(query["multi"][i] @ d.T).max(1).sum() for d in documents["multi"]])


def order(scores: np.ndarray) -> list[int]:
    """Of equal scores the larger id first."""
    return sorted(range(len(scores)), key=lambda j: (scores[j], f"d{j}"), reverse=True)


@pytest.mark.parametrize("kind", ["rrf", "weighted"])
@pytest.mark.parametrize("chunk", [1 << 24, 100])
def test_every_output_and_their_fusion(
    data: Any, kind: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "SCORES_PER_CHUNK", chunk)
    read, documents, queries, collection = data
    weights = {"dense": 0.5, "sparse": 2.0, "multi": 1.0}
    found = fusion.judge(read, collection, NAMES, kind, weights, "dot")
    expected: dict[str, list[dict[str, float]]] = {}
    for i in range(6):
        rows = {name: by_hand(name, queries, i, documents) for name in NAMES}
        total = np.zeros(30)
        for name, row in rows.items():
            if kind == "rrf":
                for rank, j in enumerate(order(row), 1):
                    total[j] += weights[name] / (60 + rank)
            else:
                total += weights[name] * (row - row.min()) / (row.max() - row.min())
        for name, row in {**rows, kind: total}.items():
            ranking = [f"d{j}" for j in order(row)]
            expected.setdefault(name, []).append(
                retrieval.measures(ranking, collection.judgments[f"q{i}"])
            )
    for name, rows in expected.items():
        for measure, value in retrieval.averages(rows).items():
            assert found[f"{name} {measure}"] == pytest.approx(value, abs=1e-6), (name, measure)
    assert len(found) == 4 * len(expected["dense"][0])
    other = fusion.judge(read, collection, NAMES, kind, {"dense": 9.0, "multi": 0.0}, "dot")
    assert other[f"{kind} map"] != found[f"{kind} map"], "the control"
    assert other["dense map"] == found["dense map"]


def test_one_output_alone_is_that_of_the_plain_way(data: Any) -> None:
    read, _, _, collection = data
    plain = retrieval.judge(lambda *given: read(*given)["dense"], collection, "cosine")
    found = fusion.judge(read, collection, ("dense",), similarity="cosine")
    assert found == {f"dense {name}": value for name, value in plain.items()}
    assert found != fusion.judge(read, collection, ("dense",), similarity="dot"), "the control"


def test_the_document_with_the_id_of_a_query_can_be_left_out(data: Any) -> None:
    read, _, _, collection = data
    renamed = Collection(
        {id.replace("d", "q"): text for id, text in collection.documents.items()},
        collection.queries,
        {query: {query: 1} for query in collection.queries},
    )
    assert fusion.judge(read, renamed, ("multi",))["multi recall@100"] == 1
    assert fusion.judge(read, renamed, ("multi",), skip_same_id=True)["multi recall@100"] == 0


def test_names_and_weights() -> None:
    assert fusion.parse_outputs("dense, multi,dense") == ("dense", "multi")
    with pytest.raises(InputError, match="no output 'colbert'"):
        fusion.parse_outputs("dense,colbert")
    assert fusion.parse_weights("0.4,0.2,0.4", NAMES) == {"dense": 0.4, "sparse": 0.2, "multi": 0.4}
    for text in ("0.4", "a,b,c", "1,1,-1", "1,1,nan"):
        with pytest.raises(InputError, match="weights"):
            fusion.parse_weights(text, NAMES)
