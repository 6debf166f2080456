"""Infinity's routes, with the bodies that its own client sends by default."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.serve import calls

TEXTS = ["The horse carries the sacks.", "A mule."]
# As infinity_client 0.0.78 writes a request in which only the texts are set.
DEFAULTS = {"model": "default/not-specified", "dimensions": 0, "modality": "text"}


def close(values: object, expected: object) -> bool:
    return np.allclose(np.asarray(values, np.float64), np.asarray(expected), rtol=0, atol=1e-6)


def test_embeddings(http, server):
    encoder = server.encoder("mini")
    response = http.post("/embeddings", json={"input": TEXTS, **DEFAULTS})
    answer = response.json()
    assert close([item["embedding"] for item in answer["data"]], encoder.embed(TEXTS))
    assert answer["object"] == "list" and answer["id"].startswith("embd-")
    assert answer["model"] == "mini" and answer["created"] > 0
    assert set(answer["usage"]) == {"prompt_tokens", "total_tokens"}
    assert response.headers["content-type"] == "application/json"
    body = {"input": TEXTS[0], **DEFAULTS, "dimensions": 5}
    (item,) = http.post("/embeddings", json=body).json()["data"]
    short = encoder.embed(TEXTS)[0][:5]
    assert close(item["embedding"], short / np.linalg.norm(short))
    encoded = http.post("/embeddings", json={"input": TEXTS, "encoding_format": "base64"}).json()
    assert isinstance(encoded["data"][0]["embedding"], str)


def test_an_answer_that_is_written_when_it_is_sent(post, server):
    """Long answers are written in a thread, after the handler has returned."""
    texts = [f"the cat saw {number} {'sacks ' * (number % 7)}" for number in range(400)]
    expected = server.encoder("tiny").embed(texts)
    assert expected.size > calls.MAX_INLINE_VALUES
    status, answer = post("/embeddings", {"input": texts, "model": "tiny"})
    assert status == 200
    assert close([item["embedding"] for item in answer["data"]], expected)


def test_models(http, server):
    answer = http.get("/models").json()
    assert [model["id"] for model in answer["data"]] == [model.name for model in server.models]
    by_name = {model["id"]: model for model in answer["data"]}
    assert by_name["mini"]["capabilities"] == ["embed"]
    assert by_name["ranker"]["capabilities"] == ["rerank", "classify"]
    stats = by_name["mini"]["stats"]
    assert stats["queue_fraction"] == 0 and stats["batch_size"] >= 1
    # The client's enumerations have these values alone.
    assert {(m["object"], m["owned_by"]) for m in answer["data"]} == {("model", "infinity")}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input": []}, 400),
        ({"input": "a", "modality": "image"}, 422),
        ({"input": "a", "dimensions": -1}, 422),
        ({"input": "a", "model": "nobody"}, 404),
        ({"input": "a", "model": "ranker"}, 424),
    ],
)
def test_refusals(post, body, status):
    actual, error = post("/embeddings", body)
    assert (actual, error["error"]["code"]) == (status, status), error
