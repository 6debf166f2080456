"""Paths of several servers: the fields say which server's API a request is written for."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.results import sigmoid

QUERY = "who carries"
DOCUMENTS = ["the cat", "a mule carries sacks", "what ?"]


def close(values: object, expected: object) -> bool:
    return np.allclose(np.asarray(values, np.float64), np.asarray(expected), rtol=0, atol=1e-5)


@pytest.fixture
def expected(server) -> list:
    """The documents as the encoder ranks them, by logits."""
    return server.encoder("ranker").rerank(QUERY, DOCUMENTS, raw=True)


def test_rerank_as_vllm(post, expected):
    body = {"query": QUERY, "documents": DOCUMENTS}
    answer = post("/rerank", body)[1]
    assert set(answer) == {"id", "object", "created", "model", "usage", "results"}
    assert [row["index"] for row in answer["results"]] == [rank.index for rank in expected]
    scores = sigmoid(np.array([rank.score for rank in expected]))
    assert close([row["relevance_score"] for row in answer["results"]], scores)
    assert [row["document"] for row in answer["results"]] == [
        {"text": rank.text} for rank in expected
    ]
    raw = post("/rerank", body | {"use_activation": False})[1]["results"]
    assert close([row["relevance_score"] for row in raw], [rank.score for rank in expected])
    # What LiteLLM sends to vLLM.
    whole = post("/rerank", body | {"return_documents": True, "top_n": 0})[1]["results"]
    assert whole[0]["document"] == {"text": expected[0].text} and len(whole) == 3
    assert len(post("/rerank", body | {"top_n": 2})[1]["results"]) == 2
    one = post("/rerank", body | {"documents": DOCUMENTS[0]})[1]["results"]
    assert len(one) == 1 and one[0]["document"] == {"text": DOCUMENTS[0]}


def test_rerank_as_infinity(post, expected):
    body = {"query": QUERY, "documents": DOCUMENTS, "model": "default/not-specified"}
    answer = post("/rerank", body | {"raw_scores": False, "return_documents": False})[1]
    assert answer["object"] == "rerank" and answer["id"].startswith("infinity-")
    assert all(set(row) == {"index", "relevance_score"} for row in answer["results"])
    body |= {"raw_scores": True, "return_documents": True, "top_n": 2}
    rows = post("/rerank", body)[1]["results"]
    assert [row["document"] for row in rows] == [rank.text for rank in expected[:2]]
    assert close([row["relevance_score"] for row in rows], [rank.score for rank in expected[:2]])


def test_rerank_by_vectors(post, server):
    vectors = server.encoder("mini").embed([QUERY, *DOCUMENTS])
    cosines = vectors[1:] @ vectors[0]
    rows = post("/rerank", {"query": QUERY, "documents": DOCUMENTS, "model": "mini"})[1]["results"]
    order = np.argsort(-cosines)
    assert [row["index"] for row in rows] == order.tolist()
    assert close([row["relevance_score"] for row in rows], cosines[order])
    status, error = post("/rerank", {"query": QUERY, "texts": DOCUMENTS, "model": "mini"})
    assert status == 424 and error["error_type"] == "Backend"


def test_classify_as_vllm(post, server):
    judge = server.encoder("judge")
    for texts in (["a cat", "a hat"], "a cat"):
        answer = post("/classify", {"input": texts})[1]
        values = judge.classify([texts] if isinstance(texts, str) else texts)
        assert answer["object"] == "list" and answer["id"].startswith("classify-")
        for item, value in zip(answer["data"], values, strict=True):
            assert item["label"] == value.label and item["num_classes"] == 3
            assert close(item["probs"], [value.scores[label] for label in judge.labels])


def test_classify_as_infinity(post, server):
    (value,) = server.encoder("judge").classify(["a cat"])
    answer = post("/classify", {"input": ["a cat"], "raw_scores": False})[1]
    assert answer["object"] == "classify"
    assert [row["label"] for row in answer["data"][0]] == list(value.scores)
    assert close([row["score"] for row in answer["data"][0]], list(value.scores.values()))
    raw = post("/classify", {"input": ["a cat"], "raw_scores": True})[1]["data"][0]
    logits = server.encoder("judge").classify(["a cat"], problem="raw")[0].scores
    assert {row["label"]: row["score"] for row in raw} == pytest.approx(logits, abs=1e-5)


def test_infinity_truncates_and_vllm_refuses(post, server):
    long = "a mule carries sacks to market " * 30
    ranked = {"query": "who", "documents": [long]}
    assert post("/rerank", ranked)[0] == post("/classify", {"input": long})[0] == 413
    (row,) = post("/rerank", ranked | {"raw_scores": True})[1]["results"]
    (rank,) = server.encoder("ranker").rerank("who", [long], long="truncate", raw=True)
    assert close(row["relevance_score"], rank.score)
    assert post("/classify", {"input": [long], "raw_scores": False})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "shape"),
    [
        ("/rerank", {"query": "a"}, 422, "tei"),
        ("/rerank", {"query": "a", "texts": []}, 400, "tei"),
        ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, 422, "tei"),
        ("/rerank", {"query": "a", "documents": []}, 400, "vllm"),
        ("/rerank", {"query": "a", "documents": [5]}, 422, "vllm"),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "judge"}, 424, "vllm"),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "nobody"}, 404, "vllm"),
        ("/classify", {"inputs": 5}, 422, "tei"),
        ("/classify", {"input": 5}, 422, "vllm"),
        ("/classify", {"input": "a", "model": "mini"}, 424, "vllm"),
        ("/classify", {"messages": []}, 422, "vllm"),
        ("/tokenize", {}, 422, "tei"),
        ("/tokenize", {"prompt": ""}, 400, "vllm"),
        ("/tokenize", {"prompt": "a" * 200_001}, 413, "vllm"),
        ("/tokenize", {"messages": []}, 422, "vllm"),
        ("/invocations", {"inputs": ""}, 400, "tei"),
        ("/invocations", {"input": 5}, 422, "vllm"),
        ("/invocations", {"outputs": 5}, 422, "tei"),
    ],
)
def test_errors_have_the_shape_of_the_server(post, path, body, status, shape):
    actual, error = post(path, body)
    assert actual == status, error
    if shape == "tei":
        assert set(error) == {"error", "error_type"} and isinstance(error["error"], str)
    else:
        assert error["error"]["code"] == status


def test_unknown_fields_are_named(http):
    header = "x-packhorse-ignored-fields"
    for path, body in {
        "/rerank": {"query": "a", "documents": ["b"]},
        "/classify": {"input": "a"},
        "/tokenize": {"prompt": "a"},
    }.items():
        response = http.post(path, json=body | {"flavor": "sweet"})
        assert (response.status_code, response.headers[header]) == (200, "flavor")
