"""The measures of retrieval are those of pytrec_eval, query by query."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.data.tasks.retrieval import averages, measures

THEIRS = {
    "ndcg@10": "ndcg_cut_10",
    "map": "map",
    "recall@1": "recall_1",
    "recall@10": "recall_10",
    "recall@100": "recall_100",
}

ASKED = {"ndcg_cut", "map", "recall.1,10,100", "recip_rank"}


def collection(rng: np.random.Generator) -> tuple[dict, dict[str, list[str]]]:
    """Graded judgements, some below 0, some queries without an answer; rankings of 0 to 150."""
    grades, rankings = {}, {}
    for query in range(60):
        judged = rng.choice(200, size=rng.integers(1, 40), replace=False)
        worth = rng.integers(-1, 4, size=len(judged)) * (query % 7 != 0)
        grades[f"q{query}"] = {f"d{d}": int(g) for d, g in zip(judged, worth, strict=True)}
        result = rng.permutation(200)[: rng.integers(1, 150)]
        rankings[f"q{query}"] = [f"d{d}" for d in result]
    return grades, rankings


def test_as_pytrec_eval(rng: np.random.Generator) -> None:
    reference = pytest.importorskip("pytrec_eval", reason="mteb brings pytrec_eval")
    grades, rankings = collection(rng)
    evaluator = reference.RelevanceEvaluator(grades, ASKED)
    run = {q: {d: float(-place) for place, d in enumerate(r)} for q, r in rankings.items()}
    expected = evaluator.evaluate(run)
    wrong = 0
    for query, ranking in rankings.items():
        result = measures(ranking, grades[query])
        for name, their in THEIRS.items():
            assert result[name] == pytest.approx(expected[query][their]), (query, name)
        # Theirs does not end at 10; within it the two are one.
        whole = expected[query]["recip_rank"]
        assert result["mrr@10"] == pytest.approx(whole if whole >= 0.1 else 0)
        flat = {d: min(g, 1) for d, g in grades[query].items()}
        wrong += measures(ranking, flat)["ndcg@10"] != pytest.approx(expected[query]["ndcg_cut_10"])
    assert wrong > 10  # without its grades nDCG is another number: the comparison can fail


def test_by_hand() -> None:
    result = measures(["x", "a", "y", "b"], {"a": 1, "b": 2, "c": 1})
    assert result["mrr@10"] == 1 / 2 and result["recall@1"] == 0 and result["recall@10"] == 2 / 3
    assert result["map"] == pytest.approx((1 / 2 + 2 / 4) / 3)
    ideal = 2 + 1 / np.log2(3) + 1 / 2
    assert result["ndcg@10"] == pytest.approx((1 / np.log2(3) + 2 / np.log2(5)) / ideal)
    late = measures([*"klmnopqrst", "a"], {"a": 1})
    assert late["mrr@10"] == late["ndcg@10"] == 0 and late["map"] == pytest.approx(1 / 11)


def test_what_has_no_answer_is_zero() -> None:
    assert set(measures(["a"], {"a": 0}).values()) == {0}
    assert set(measures([], {"a": 1}).values()) == {0}
    assert averages([measures(["a"], {"a": 1}), measures(["b"], {"a": 1})])["map"] == 0.5
