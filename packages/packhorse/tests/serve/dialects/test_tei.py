"""text-embeddings-inference's routes: bodies, answers, headers, errors."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

TEXTS = ["The horse carries the sacks.", "A mule."]
LONG = "the horse carries sacks to market and the cat sat on the mat . " * 8  # 112 tokens


def close(values: object, expected: object) -> bool:
    return np.allclose(np.asarray(values, np.float64), np.asarray(expected), rtol=0, atol=1e-6)


def test_embed(http, server):
    encoder = server.encoder("mini")
    answer = http.post("/embed", json={"inputs": TEXTS})
    assert close(answer.json(), encoder.embed(TEXTS))
    headers = {name: value for name, value in answer.headers.items() if name.startswith("x-")}
    assert headers["x-compute-type"] == "cpu+optimized"
    assert int(headers["x-compute-characters"]) == sum(map(len, TEXTS))
    assert int(headers["x-compute-tokens"]) == sum(map(len, encoder.tokenize(TEXTS)))
    for name in ("compute", "total", "tokenization", "queue", "inference"):
        assert headers[f"x-{name}-time"].isdigit()
    assert headers["x-packhorse-pack"].startswith("fill=1.000;neighbours=")


def test_embed_takes_token_ids_as_they_are(post, server):
    encoder = server.encoder("mini")
    first, second = (encoding.ids.tolist() for encoding in encoder.tokenize(TEXTS))
    assert close(post("/embed", {"inputs": [first, TEXTS[1]]})[1], encoder.embed(TEXTS))
    assert close(post("/embed", {"inputs": second})[1], encoder.embed(TEXTS[1:]))
    assert post("/embed", {"inputs": [first, [30522]]})[0] == 422
    assert post("/embed", {"inputs": [101] * 600, "truncate": True})[0] == 413


def test_embed_normalizes_unless_told_not_to(post, server):
    encoder = server.encoder("tiny")
    raw = encoder.embed(["the cat"], normalize=False)
    assert not close(np.linalg.norm(raw), 1)
    body = {"inputs": "the cat", "model": "tiny"}
    assert close(post("/embed", body | {"normalize": False})[1], raw)
    assert close(post("/embed", body)[1], raw / np.linalg.norm(raw))
    short = raw[:, :7]
    assert close(post("/embed", body | {"normalize": False, "dimensions": 7})[1], short)
    short = short / np.linalg.norm(short)
    assert close(post("/embed", body | {"dimensions": 7})[1], short)
    assert post("/embed", body | {"dimensions": 97})[0] == 422


def test_long_texts_are_refused_cut_or_read_in_chunks(post, server):
    encoder = server.encoder("tiny")
    body = {"inputs": LONG, "model": "tiny"}
    status, error = post("/embed", body | {"truncate": False})
    assert (status, error["error_type"]) == (413, "Validation") and "48" in error["error"]
    for more, long in [
        ({}, "truncate"),
        ({"truncate": True}, "truncate"),
        ({"truncate": True, "truncation_direction": "Left"}, "truncate_left"),
        ({"long": "truncate"}, "truncate"),
        ({"long": "chunk"}, "chunk"),
    ]:
        actual = post("/embed", body | more)[1]
        assert close(actual, encoder.embed([LONG], long=long)), more
    ways = ("truncate", "truncate_left", "chunk")
    vectors = [encoder.embed([LONG], long=long)[0] for long in ways]
    assert not any(close(a, b) for a, b in combinations(vectors, 2))
    assert post("/embed", body | {"long": "error", "truncate": True})[0] == 413


def test_prompts(post, server):
    encoder = server.encoder("tiny")
    body = {"inputs": "the cat", "model": "tiny"}
    vectors = post("/embed", body | {"prompt_name": "query"})[1]
    assert close(vectors, encoder.embed(["query : the cat"]))
    tokens = post("/tokenize", body | {"prompt_name": "query"})[1]
    assert [token["text"] for token in tokens[0]][1:3] == ["query", ":"]
    token_vectors = post("/embed_all", body | {"prompt_name": "query"})[1]
    assert close(token_vectors[0], encoder.hidden(["query : the cat"])[0].states)
    assert post("/embed", body | {"prompt_name": "passage"})[0] == 422


def test_embed_all_gives_every_token(post, server):
    token_vectors = post("/embed_all", {"inputs": TEXTS, "model": "mini"})[1]
    for states, expected in zip(token_vectors, server.encoder("mini").hidden(TEXTS), strict=True):
        assert np.allclose(states, expected.states, rtol=0, atol=1e-5)


def test_predict_nests_as_its_inputs_do(post, server):
    encoder = server.encoder("judge")
    expected = encoder.classify(["a cat", ("a cat", "a hat")])
    single = post("/predict", {"inputs": "a cat"})[1]
    assert {label["label"]: label["score"] for label in single} == pytest.approx(expected[0].scores)
    assert [label["score"] for label in single] == sorted(
        (e["score"] for e in single), reverse=True
    )
    assert post("/predict", {"inputs": ["a cat"]})[1] == single
    pair = post("/predict", {"inputs": ["a cat", "a hat"]})[1]
    assert pair[0]["label"] == expected[1].label
    both = post("/predict", {"inputs": [["a cat"], ["a cat", "a hat"]]})[1]
    for labels, alone in zip(both, [single, pair], strict=True):
        assert [label["label"] for label in labels] == [label["label"] for label in alone]
        assert close([label["score"] for label in labels], [label["score"] for label in alone])
    raw = post("/predict", {"inputs": "a cat", "raw_scores": True})[1]
    assert sum(np.exp([label["score"] for label in raw])) != pytest.approx(1)
    ranker = post("/predict", {"inputs": ["a cat", "a hat"], "model": "ranker"})[1]
    assert 0 < ranker[0]["score"] < 1
    for wrong in (["a", "b", "c"], [["a", "b", "c"]], [[]], 7, [["a"], "b"]):
        assert post("/predict", {"inputs": wrong})[0] == 422, wrong
    assert post("/predict", {"inputs": []})[0] in (400, 422)


def test_rerank(post, server):
    texts = ["the cat", "a mule carries sacks", LONG]
    body = {"query": "who carries", "texts": texts, "truncate": True}
    expected = server.encoder("ranker").rerank("who carries", texts, long="truncate", raw=True)
    ranks = post("/rerank", body | {"return_text": True, "raw_scores": True})[1]
    assert [rank["index"] for rank in ranks] == [rank.index for rank in expected]
    assert close([rank["score"] for rank in ranks], [rank.score for rank in expected])
    assert [rank["text"] for rank in ranks] == [rank.text for rank in expected]
    plain = post("/rerank", body)[1]
    assert all(0 < rank["score"] < 1 and "text" not in rank for rank in plain)
    assert post("/rerank", body | {"truncate": False})[0] == 413
    assert post("/rerank", body | {"texts": []})[0] == 400
    assert post("/rerank", body | {"model": "judge"})[0] == 424


def test_similarity(post, server):
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    vectors = server.encoder("mini").embed(TEXTS)
    assert close(post("/similarity", body)[1], vectors @ vectors[0])
    assert post("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}})[0] == 400
    body = {"inputs": {"source_sentence": LONG * 9, "sentences": ["a"]}}
    assert post("/similarity", body | {"parameters": {"truncate": False}})[0] == 413


def test_tokenize_and_decode(post, server):
    text = "Naïve 🐴 cafés"
    (tokens,) = post("/tokenize", {"inputs": text})[1]
    encoding = server.encoder("mini").tokenize([text])[0]
    assert [token["id"] for token in tokens] == encoding.ids.tolist()
    assert tokens[0] == {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert [text[e["start"] : e["stop"]] for e in tokens[1:-1]][:2] == ["Naïve", "🐴"]
    (bare,) = post("/tokenize", {"inputs": [text], "add_special_tokens": False})[1]
    assert bare == tokens[1:-1]
    ids = encoding.ids.tolist()
    assert post("/decode", {"ids": ids})[1] == ["naive cafes"]
    assert post("/decode", {"ids": [ids, ids[:1]], "skip_special_tokens": False})[1] == [
        "[CLS] naive [UNK] cafes [SEP]",
        "[CLS]",
    ]
    assert post("/decode", {"ids": [10**9]})[0] == 422
    assert post("/decode", {"ids": []})[0] == 400
    assert len(post("/tokenize", {"inputs": "a " * 2000})[1][0]) == 2002
    assert post("/tokenize", {"inputs": ["a" * 150_000] * 2})[0] == 413


def test_info(http, server):
    info = http.get("/info").json()
    assert info["model_id"] == "mini" and info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_client_batch_size"] == 2048 and info["max_input_length"] == 256
    tasks = {model["name"]: model["tasks"] for model in info["models"]}
    assert tasks["reader"] == ["answer", "hidden"] and list(tasks) == [
        h.name for h in server.models
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty"),
        ("/embed", {"inputs": ["a"] * 2049}, 413, "Validation"),
        ("/embed", {"inputs": "a" * 200_001}, 413, "Validation"),
        ("/embed", {"inputs": [1.5]}, 422, "Tokenizer"),
        ("/embed", {"inputs": [-1]}, 422, "Tokenizer"),
        ("/embed", {"inputs": "a", "normalize": 1}, 422, "Tokenizer"),
        ("/embed", {"inputs": "a", "truncation_direction": "Up"}, 422, "Tokenizer"),
        ("/embed", {}, 422, "Tokenizer"),
        ("/embed", [], 422, "Tokenizer"),
        ("/embed", {"inputs": "a", "model": "ranker"}, 424, "Backend"),
        ("/embed", {"inputs": "a", "model": "nobody"}, 404, "Validation"),
        ("/embed_sparse", {"inputs": "a", "model": "ranker"}, 424, "Backend"),
        ("/embed_sparse", {"inputs": "a", "top_k": 0}, 422, "Tokenizer"),
        ("/embed_all", {"inputs": [[]]}, 400, "Empty"),
    ],
)
def test_refusals(post, path, body, status, kind):
    actual, error = post(path, body)
    assert (actual, error["error_type"]) == (status, kind), error
    assert set(error) == {"error", "error_type"}


def test_a_task_without_a_head_is_told_the_tasks_there_are(post):
    status, error = post("/rerank", {"query": "a", "texts": ["b"], "model": "tagger"})
    assert status == 424 and "it supports: label, hidden" in error["error"]


@pytest.mark.parametrize(
    "text", ["\ud800", "a\udfff", "\0", "a\0b", "\ufeff", "\u202e abc", "e" + "\u0301" * 10_000]
)
@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/", "/tokenize", "/classify"])
def test_odd_text_is_answered_or_refused(http, path, text):
    import json

    field = "input" if path == "/v1/embeddings" else "inputs"
    content = json.dumps({field: text}).encode()  # writes a lone surrogate as an escape
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    lone = any("\ud800" <= c <= "\udfff" for c in text)
    assert response.status_code in ((400, 422) if lone else (200, 413)), response.text
    response.json()
