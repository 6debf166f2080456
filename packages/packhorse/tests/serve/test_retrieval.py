"""Sparse and multi-vector outputs over HTTP are the encoder's, in one process or several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import packhorse
from packhorse.results import maxsim
from packhorse.serve.processes.descriptions import describe

from ..runtime import retrieval_models as models

TEXTS = ["the cat sat on a mat", "one red hat", "who saw the cat ?"]


@pytest.fixture(scope="module")
def served(serving) -> Any:
    return serving(names=("tiny", "ranker"))


@pytest.fixture
def encoder(served: Any) -> Any:
    return served.models.default.encoder


def dense(rows: list[list[dict[str, float]]], width: int) -> np.ndarray:
    result = np.zeros((len(rows), width))
    for i, row in enumerate(rows):
        for item in row:
            result[i, int(item["index"])] = item["value"]
    return result


def test_sparse_vectors_by_number_and_by_word(served: Any, encoder: Any) -> None:
    want = encoder.sparse(TEXTS)
    rows = served.post("/embed_sparse", {"inputs": TEXTS}).json()
    assert np.allclose(dense(rows, want.shape[1]), want.toarray(), atol=1e-5)
    few = served.post("/embed_sparse", {"inputs": TEXTS, "top_k": 3}).json()
    assert [len(row) for row in few] == [3, 3, 3]
    words = served.post("/embed_sparse", {"inputs": TEXTS, "top_k": 3, "format": "words"}).json()
    for row, expected in zip(words, encoder.words(want, 3), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    prompted = {"inputs": TEXTS, "prompt_name": "query"}
    other = served.post("/embed_sparse", prompted).json()
    assert not np.allclose(dense(other, want.shape[1]), want.toarray(), atol=1e-3), "the control"
    ids = served.post("/embed_sparse", {"inputs": [[2, 5, 6, 3]]}).json()
    plain = encoder.sparse([[2, 5, 6, 3]]).toarray()
    assert np.allclose(dense(ids, want.shape[1]), plain, atol=1e-5)


def test_vectors_of_tokens(served: Any, encoder: Any) -> None:
    for side in ("query", "document"):
        rows = served.post("/embed_multi", {"inputs": TEXTS, "input_type": side}).json()
        want = encoder.multi(TEXTS, query=side == "query", long="truncate")
        assert [len(row) for row in rows] == [len(vectors) for vectors in want]
        for row, vectors in zip(rows, want, strict=True):
            assert np.allclose(row, vectors, atol=1e-5)
    response = served.post("/embed_multi", {"inputs": "the cat " * 60})
    assert response.headers["x-packhorse-truncated"] == "1"
    refused = served.post("/embed_multi", {"inputs": "the cat " * 60, "truncate": False})
    assert refused.status_code == 413
    lacking = served.post("/embed_multi", {"inputs": "the cat", "model": "ranker"})
    assert lacking.status_code == 424 and "it supports" in lacking.json()["error"]


def test_too_many_results_are_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from packhorse.serve import calls

    monkeypatch.setitem(calls.MAX_RESULT_BYTES, "sparse", 2 * 97 * 4)
    assert served.post("/embed_sparse", {"inputs": TEXTS[:2]}).status_code == 200
    assert served.post("/embed_sparse", {"inputs": TEXTS}).status_code == 413
    monkeypatch.setitem(calls.MAX_RESULT_BYTES, "multi", 100)
    assert served.post("/embed_multi", {"inputs": TEXTS}).status_code == 413


def test_requests_for_different_outputs_share_batches(served: Any, encoder: Any) -> None:
    """All at once, many times: each answer is its own."""
    import asyncio

    want = encoder.sparse(TEXTS).toarray()
    vectors = encoder.embed(TEXTS)
    asked = encoder.multi(TEXTS, query=True, long="truncate")

    async def everyone(client: Any) -> list[Any]:
        requests = []
        for _ in range(8):
            requests.append(client.post("/embed_sparse", json={"inputs": TEXTS}))
            requests.append(client.post("/embed", json={"inputs": TEXTS}))
            body = {"inputs": TEXTS, "input_type": "query"}
            requests.append(client.post("/embed_multi", json=body))
        return await asyncio.gather(*requests)

    answers = [response.json() for response in served.run(everyone)]
    for sparse, embedded, multi in zip(*(answers[i::3] for i in range(3)), strict=True):
        assert np.allclose(dense(sparse, 97), want, atol=1e-5)
        assert np.allclose(embedded, vectors, atol=1e-5)
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(multi, asked, strict=True))


def test_a_front_knows_what_it_needs(served: Any, encoder: Any) -> None:
    """Its encoder, made of JSON, prepares the same jobs."""
    import json

    model = served.models.default
    description = describe(model, 0)
    fields = json.loads(json.dumps(asdict(description)))
    far = type(description)(**fields).encoder()
    assert far.sparse_settings == encoder.sparse_settings
    assert far.multi_settings == encoder.multi_settings
    (ours,) = encoder.prepare("multi", ["cat"], query=True)
    (theirs,) = far.prepare("multi", ["cat"], query=True)
    assert np.array_equal(ours.sequences[0].ids, theirs.sequences[0].ids)
    assert ours.sequences[0].key_length == theirs.sequences[0].key_length > 0


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers").logging.disable_progress_bar()
        pytest.importorskip("sentence_transformers")
        home = tmp_path_factory.mktemp("models")
        models.stanford(models.bert(home / "bare", "BertModel"), home / "colbert")
        yield home / "colbert"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux's")
def test_fronts_and_an_engine_give_the_same(colbert: Path, start: Any) -> None:
    """Hidden tokens keep their place on the way through shared memory."""
    server = start("--fronts", "1", "--device", "cpu", "--model", str(colbert)).wait_until_ready()
    encoder = packhorse.load(colbert, device="cpu")
    texts = models.TEXTS[:4]
    with httpx.Client(base_url=server.url, timeout=120) as client:
        asked = client.post("/embed_multi", json={"inputs": texts, "input_type": "query"}).json()
        want = encoder.multi(texts, query=True, long="truncate")
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(asked, want, strict=True))
        body = {"query": "two sacks", "texts": texts, "truncate": True}
        ranking = client.post("/rerank", json=body).json()
    documents = encoder.multi(texts, long="truncate")
    scores = maxsim(encoder.multi(["two sacks"], query=True), documents)[0]
    assert [row["index"] for row in ranking] == np.argsort(-scores).tolist()
    assert [row["score"] for row in ranking] == pytest.approx(sorted(scores)[::-1], abs=1e-4)
