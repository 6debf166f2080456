"""What happens to texts that are too long: by request, by settings, by route; and who is told."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

LONG = "the cat sat on a red mat " * 20
# A body of each route with a long text, and whether the server it follows truncates by default.
ROUTES: dict[str, tuple[dict[str, Any], bool]] = {
    "/embed": ({"inputs": ["a mat", LONG]}, True),
    "/embed_all": ({"inputs": LONG}, True),
    "/predict": ({"inputs": LONG}, True),
    "/rerank": ({"query": "who sat", "texts": ["a mat", LONG], "model": "ranker"}, True),
    "/similarity": ({"inputs": {"source_sentence": "a mat", "sentences": [LONG]}}, True),
    "/classify": ({"inputs": ["a mat", LONG]}, False),
    "/v1/embeddings": ({"input": ["a mat", LONG]}, True),
    "/v1/rerank": ({"query": "who sat", "documents": ["a mat", LONG], "model": "ranker"}, True),
    "/v2/rerank": ({"query": "who sat", "documents": ["a mat", LONG], "model": "ranker"}, True),
    "/models/tiny": ({"inputs": LONG, "parameters": {"top_k": 1}}, True),
    "/pipeline/feature-extraction/tiny": ({"inputs": LONG}, True),
}
OWN_FIELDS = {"/classify": ("long", "truncate", "error")}  # others have `truncate`


def asking(path: str, body: dict[str, Any], wish: bool | None) -> dict[str, Any]:
    """The body with the route's own field for truncation, or without."""
    if wish is None:
        return body
    name, yes, no = OWN_FIELDS.get(path, ("truncate", True, False))
    field = {name: yes if wish else no}
    if path in ("/similarity", "/models/tiny"):
        return body | {"parameters": body.get("parameters", {}) | field}
    return body | field


@pytest.fixture(scope="module")
def servers(serving) -> dict[bool | None, Any]:
    names = ("tiny", "ranker")
    return {auto: serving(names=names, auto_truncate=auto) for auto in (None, True, False)}


@pytest.mark.parametrize("path", ROUTES)
def test_the_request_decides_then_the_settings_then_the_route(servers, path: str) -> None:
    body, by_default = ROUTES[path]
    for auto, served in servers.items():
        for wish in (None, True, False):
            response = served.post(path, asking(path, body, wish))
            expected = next(value for value in (wish, auto, by_default) if value is not None)
            assert response.status_code == (200 if expected else 413), (auto, wish, response.text)
            assert response.headers.get("x-packhorse-truncated") == ("1" if expected else None)


def test_info_says_what_these_routes_do(servers) -> None:
    assert servers[False].get("/info").json()["auto_truncate"] is False
    for auto in (None, True):
        assert servers[auto].get("/info").json()["auto_truncate"] is True


def test_vectors_are_those_of_the_truncated_text(servers, tiny) -> None:
    texts = [LONG, "a mat", LONG + LONG]
    response = servers[None].post("/v1/embeddings", {"input": texts, "model": "tiny"})
    vectors = [row["embedding"] for row in response.json()["data"]]
    assert np.abs(np.array(vectors) - tiny().embed(texts, long="truncate")).max() <= 1e-6
    assert response.headers["x-packhorse-truncated"] == "2"
    chunks = servers[None].post("/v1/embeddings", {"input": LONG, "model": "tiny", "long": "chunk"})
    assert "x-packhorse-truncated" not in chunks.headers  # nothing was lost


def test_what_was_cut_is_counted_and_logged_once_per_key(serving, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="packhorse.serve")
    served = serving(keys=("sesame", "poppy"), cors_origin=("https://example.org",))
    for key, times in (("sesame", 1), ("poppy", 3)):
        headers = {"authorization": f"Bearer {key}", "origin": "https://example.org"}
        for _ in range(times):
            response = served.post("/v1/embeddings", {"input": [LONG, LONG, "a"]}, headers=headers)
            assert response.headers["x-packhorse-truncated"] == "2"
            assert "x-packhorse-truncated" in response.headers["access-control-expose-headers"]
    wrong = served.post("/v1/embeddings", {"input": LONG}, headers={"authorization": "Bearer no"})
    assert wrong.status_code == 401
    metrics = served.get("/metrics", headers={"authorization": "Bearer sesame"}).text
    assert 'packhorse_truncated_inputs_total{key="key1",model="tiny"} 2.0' in metrics
    assert 'packhorse_truncated_inputs_total{key="key2",model="tiny"} 6.0' in metrics
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    for name, message in zip(("key1", "key2"), messages, strict=True):
        assert f"the clients of {name} sent texts" in message and "--no-truncate" in message
    assert not any(secret in f"{metrics}{messages}" for secret in ("sesame", "poppy"))


def test_without_keys_there_is_one_series(serving) -> None:
    served = serving()
    served.post("/v1/embeddings", {"input": LONG})
    metrics = served.get("/metrics").text
    assert 'packhorse_truncated_inputs_total{key="none",model="tiny"} 1.0' in metrics
