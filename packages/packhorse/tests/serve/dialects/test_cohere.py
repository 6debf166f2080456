"""Rerank beyond what Cohere's client can send: Jina's fields, objects, limits, errors."""

from __future__ import annotations

import pytest

DOCUMENTS = ["the cat", "a mule carries sacks", "what ?"]


def test_an_answer_holds_what_jina_reads(post, server):
    body = {"query": "who carries", "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    response = post("/v1/rerank", body)[1]
    assert (
        response["object"] == "list"
        and response["model"] == "ranker"
        and len(response["results"]) == 2
    )
    assert response["results"][0]["document"]["text"] in DOCUMENTS
    pairs = [("who carries", document) for document in DOCUMENTS]
    tokens = sum(map(len, server.encoder("ranker").tokenize(pairs)))
    assert response["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    plain = post("/v1/rerank", body | {"return_documents": False, "top_n": 100})[1]["results"]
    assert len(plain) == 3 and all(set(result) == {"index", "relevance_score"} for result in plain)


@pytest.mark.parametrize("top_k", [None, 2])
def test_voyage_reads_data(post, top_k):
    body = {"query": "who carries", "documents": DOCUMENTS}
    expected = post("/v1/rerank", body)[1]["results"][:top_k]
    voyage = body | {"top_k": top_k, "truncation": True, "return_documents": True}
    response = post("/v1/rerank", voyage)[1]
    assert set(response) == {"object", "data", "model", "usage"}
    for row, other in zip(response["data"], expected, strict=True):
        assert row["index"] == other["index"]
        assert row["relevance_score"] == pytest.approx(other["relevance_score"])
        assert row["document"] == DOCUMENTS[row["index"]]
    # Whoever names `top_n` too is not Voyage's client.
    assert "results" in post("/v1/rerank", voyage | {"top_n": 2})[1]


def test_fields_of_objects_are_ranked_by(post):
    document = {"text": "the cat", "title": "a mule carries sacks", "id": "7"}
    body = {"query": "who", "documents": [document], "return_documents": True}
    joined = body | {"documents": ["a mule carries sacks\nthe cat"]}
    score = lambda body: post("/v1/rerank", body)[1]["results"][0]["relevance_score"]  # noqa: E731
    assert score(body | {"rank_fields": ["title", "text"]}) == pytest.approx(score(joined))
    assert score(body) != pytest.approx(score(joined))
    assert post("/v1/rerank", body)[1]["results"][0]["document"] == document
    assert post("/v1/rerank", body | {"rank_fields": ["body"]})[0] == 422


def test_documents_are_cut(post):
    long = "a mule carries sacks to market " * 30
    body = {"query": "who", "documents": [long]}
    assert post("/v2/rerank", body)[0] == 200
    few = post("/v2/rerank", body | {"max_tokens_per_doc": 4})[1]
    same = post("/v2/rerank", body | {"documents": ["a mule carries sacks"]})[1]
    score = same["results"][0]["relevance_score"]
    assert few["results"][0]["relevance_score"] == pytest.approx(score)
    assert few["usage"] == same["usage"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"documents": []}, 400),
        ({"documents": ["a"] * 2049}, 413),
        ({"documents": "a"}, 422),
        ({"query": None}, 422),
        ({"top_n": 0}, 422),
        ({"model": "judge"}, 424),
        ({"model": "rerank-v3.5"}, 404),
    ],
)
def test_refusals(post, path, change, status):
    actual, error = post(path, {"query": "a", "documents": ["b"]} | change)
    assert actual == status and set(error) == {"message", "detail"}


def test_half_a_surrogate_pair_is_refused(http):
    document = rb'{"text": "b", "x": "\ud800"}'
    content = b'{"query": "a", "return_documents": true, "documents": [' + document + b"]}"
    headers = {"content-type": "application/json"}
    assert http.post("/v1/rerank", content=content, headers=headers).status_code == 422
