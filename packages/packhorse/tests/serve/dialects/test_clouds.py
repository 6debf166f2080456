"""SageMaker and Vertex AI: the body says which route answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packhorse.serve import calls

QUESTION = {"question": "who sat ?", "context": "the cat sat"}
# A body, and the route whose answer it gets.
INVOCATIONS: list[tuple[dict[str, Any], str]] = [
    ({"inputs": ["the cat"], "model": "mini"}, "/embed"),
    ({"inputs": "the cat", "model": "judge"}, "/predict"),
    ({"inputs": "the cat", "model": "tagger"}, "/"),
    ({"inputs": QUESTION, "model": "reader"}, "/"),
    ({"inputs": "the cat", "parameters": {"top_k": 2}, "model": "judge"}, "/"),
    ({"query": "who", "texts": ["the cat"]}, "/rerank"),
    ({"query": "who", "documents": ["the cat"]}, "/rerank"),
    ({"text_1": "who", "text_2": "the cat"}, "/score"),
    ({"queries": "who", "documents": ["the cat"]}, "/score"),
    ({"input": "the cat", "model": "mini"}, "/v1/embeddings"),
    ({"input": "the cat", "model": "judge"}, "/classify"),
    ({"input": "the cat", "model": "tagger"}, "/pooling"),
]


def without_id(document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    return {name: part for name, part in document.items() if name not in ("id", "created")}


@pytest.mark.parametrize(("body", "path"), INVOCATIONS)
def test_invocations_answer_as_the_route(http, body, path):
    expected = http.post(path, json=body)
    answer = http.post("/invocations", json=body)
    assert answer.status_code == expected.status_code == 200, answer.text
    assert without_id(answer.json()) == without_id(expected.json())


def test_invocations_that_fit_no_route(post):
    status, error = post("/invocations", {"prompt": "the cat"})
    assert status == 422 and "fits no route" in error["error"]
    status, error = post("/invocations", {"query": "who", "texts": [5]})
    assert (status, error["error_type"]) == (422, "Tokenizer") and "texts.0" in error["error"]
    assert post("/invocations", {"inputs": "a", "model": "nobody"})[0] == 404


def test_vertex(post):
    instances = [{"inputs": "the cat"}, {"query": "who", "texts": ["the cat", "a mat"]}]
    instances.append({"inputs": ["a cat", "a hat"], "model": "judge"})
    answer = post("/vertex", {"instances": instances})[1]
    expected = [
        post(path, body)[1]
        for path, body in zip(("/embed", "/rerank", "/predict"), instances, strict=True)
    ]
    assert answer == {"predictions": expected}


def test_vertex_with_an_answer_that_is_written_when_it_is_sent(post, server):
    """Long answers are written in a thread, after the handler has returned."""
    texts = [f"the cat saw {number} {'sacks ' * (number % 7)}" for number in range(400)]
    expected = server.encoder("tiny").embed(texts)
    assert expected.size > calls.MAX_INLINE_VALUES
    instances = [{"inputs": texts, "model": "tiny"}, {"inputs": texts[:2], "model": "tiny"}]
    status, answer = post("/vertex", {"instances": instances})
    assert status == 200
    long, short = answer["predictions"]
    assert np.allclose(long, expected, rtol=0, atol=1e-6)
    assert np.allclose(short, expected[:2], rtol=0, atol=1e-6)


def test_vertex_refuses_all_if_one_is_wrong(post):
    good = {"inputs": "the cat"}
    assert post("/vertex", {"instances": []})[0] == 400
    assert post("/vertex", {"instances": [good] * 5000})[0] == 413
    many = {"inputs": ["the cat"] * 1025}
    assert post("/vertex", {"instances": [many] * 2})[0] == 413  # the limit is that of a request
    for wrong, status in (({"inputs": ""}, 400), ({"inputs": 5}, 422), ({}, 422)):
        actual, error = post("/vertex", {"instances": [good, wrong]})
        assert actual == status and set(error) == {"error", "error_type"}


def test_ping_needs_no_key(listen, encoders):
    import httpx

    server = listen({"tiny": encoders["tiny"]}, keys=("secret",))
    assert httpx.get(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/version").status_code == 401
