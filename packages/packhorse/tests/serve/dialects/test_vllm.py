"""vLLM's routes: what its clients send, and answers equal to those of the encoder."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from packhorse.results import sigmoid, softmax

TEXTS = ["the cat sat", "a mule carries sacks"]
LONG = "the horse carries sacks to market and the cat sat on the mat . " * 8  # 112 tokens


def close(values: object, expected: object) -> bool:
    return np.allclose(np.asarray(values, np.float64), np.asarray(expected), rtol=0, atol=1e-5)


def pooled(answer: dict) -> list:
    assert answer["object"] == "list" and answer["id"].startswith("pool-")
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["data"] for item in answer["data"]]


def test_pooling_embeds(post, server):
    encoder = server.encoder("tiny")
    body = {"input": TEXTS, "model": "tiny", "task": "embed"}
    answer = post("/pooling", body)[1]
    assert close(pooled(answer), encoder.embed(TEXTS)) and answer["model"] == "tiny"
    tokens = sum(map(len, encoder.tokenize(TEXTS)))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    raw = pooled(post("/pooling", body | {"use_activation": False})[1])
    assert close(raw, encoder.embed(TEXTS, normalize=False))
    (first, _) = pooled(post("/pooling", body | {"encoding_format": "base64"})[1])
    assert close(np.frombuffer(base64.b64decode(first), "<f4"), encoder.embed(TEXTS)[0])
    ids = encoder.tokenize(TEXTS)[0].ids.tolist()
    assert close(pooled(post("/pooling", body | {"input": ids})[1])[0], encoder.embed(TEXTS)[0])


def test_pooling_classifies(post, server):
    judge = server.encoder("judge")
    expected = [[value.scores[label] for label in judge.labels] for value in judge.classify(TEXTS)]
    body = {"input": TEXTS, "model": "judge"}
    for task in ({}, {"task": "classify"}):
        assert close(pooled(post("/pooling", body | task)[1]), expected)
    logits = pooled(post("/pooling", body | {"use_activation": False})[1])
    assert close(softmax(np.array(logits)), expected) and not close(logits, expected)
    score = pooled(post("/pooling", body | {"model": "ranker", "task": "score"})[1])
    logit = [value.score for value in server.encoder("ranker").classify(TEXTS)]
    assert close(score, sigmoid(np.array(logit))[:, None])
    assert post("/pooling", body | {"task": "score"})[0] == 424


def test_pooling_of_tokens(post, server):
    states = server.encoder("tiny").hidden(TEXTS)[0].states
    body = {"input": TEXTS[0], "model": "tiny", "task": "token_embed"}
    assert close(pooled(post("/pooling", body | {"use_activation": False})[1])[0], states)
    unit = states / np.linalg.norm(states, axis=1, keepdims=True)
    assert close(pooled(post("/pooling", body)[1])[0], unit)

    tagger = server.encoder("tagger")
    (encoding,) = tagger.tokenize(TEXTS[:1])
    ((logits,),) = tagger.run([encoding], "tokens")
    for body in ({"model": "tagger"}, {"task": "token_classify"}):
        assert close(pooled(post("/pooling", {"input": TEXTS[0], **body})[1])[0], softmax(logits))
    raw = post("/pooling", {"input": TEXTS[0], "model": "tagger", "use_activation": False})[1]
    assert close(pooled(raw)[0], logits)


def test_score_by_a_cross_encoder(post, server):
    encoder = server.encoder("ranker")
    logits = np.array([v.score for v in encoder.classify([("who", text) for text in TEXTS])])
    for path in ("/score", "/v1/score"):
        for first, second in (
            ("text_1", "text_2"),
            ("queries", "documents"),
            ("queries", "items"),
            ("data_1", "data_2"),
        ):
            answer = post(path, {first: "who", second: TEXTS})[1]
            assert close([item["score"] for item in answer["data"]], sigmoid(logits))
            assert answer["model"] == "ranker" and answer["data"][1]["object"] == "score"
    raw = post("/score", {"text_1": "who", "text_2": TEXTS, "use_activation": False})[1]
    assert close([item["score"] for item in raw["data"]], logits)
    as_many = post("/score", {"text_1": ["who", "a"], "text_2": TEXTS})[1]["data"]
    assert close(as_many[0]["score"], sigmoid(logits)[0])
    short = post("/score", {"text_1": "who", "text_2": "the cat sat", "max_tokens_per_doc": 2})[1]
    same = post("/score", {"text_1": "who", "text_2": "the cat"})[1]
    assert close(short["data"][0]["score"], same["data"][0]["score"])


def test_score_by_cosine(post, server):
    vectors = server.encoder("mini").embed(["who", *TEXTS])
    answer = post("/score", {"text_1": "who", "text_2": TEXTS, "model": "mini"})[1]
    assert close([item["score"] for item in answer["data"]], vectors[1:] @ vectors[0])
    pairs = post("/score", {"text_1": ["who", TEXTS[0]], "text_2": TEXTS, "model": "mini"})[1]
    assert close(
        [i["score"] for i in pairs["data"]], [vectors[1] @ vectors[0], vectors[1] @ vectors[2]]
    )


def test_long_texts(post, server):
    encoder = server.encoder("tiny")
    body = {"input": LONG, "model": "tiny"}
    status, error = post("/pooling", body)
    assert status == 413 and set(error["error"]) == {"message", "type", "param", "code"}
    whole = pooled(post("/pooling", body | {"truncate_prompt_tokens": -1})[1])
    assert close(whole, encoder.embed([LONG], long="truncate"))
    few = pooled(post("/pooling", body | {"truncate_prompt_tokens": 6})[1])
    assert close(few, encoder.embed([LONG], max_length=6, long="truncate"))
    left = pooled(
        post("/pooling", body | {"truncate_prompt_tokens": 6, "truncation_side": "left"})[1]
    )
    assert close(left, encoder.embed([LONG], max_length=6, long="truncate_left"))
    assert post("/pooling", body | {"truncate_prompt_tokens": 49})[0] == 422
    ids = encoder.tokenize(["the cat sat on a mat"])[0].ids.tolist()
    status, error = post("/pooling", {"input": ids, "model": "tiny", "truncate_prompt_tokens": 5})
    assert (status, error["error"]["message"]) == (
        413,
        "input 0 has more token ids than the 5 that the request allows; "
        "token ids are never truncated",
    )
    same = {"input": ids, "model": "tiny", "truncate_prompt_tokens": len(ids)}
    assert post("/pooling", same)[0] == 200


def test_tokenize_and_detokenize(post, server):
    encoding = server.encoder("mini").tokenize(["The cats"])[0]
    answer = post("/tokenize", {"prompt": "The cats", "return_token_strs": True})[1]
    ids = encoding.ids.tolist()
    assert answer == {
        "count": 4,
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": ["[CLS]", "the", "cats", "[SEP]"],
    }
    bare = post("/tokenize", {"prompt": "The cats", "add_special_tokens": False})[1]
    assert bare["tokens"] == ids[1:-1] and bare["token_strs"] is None
    assert post("/detokenize", {"tokens": ids})[1] == {"prompt": "[CLS] the cats [SEP]"}


def test_version(http):
    from packhorse import __version__

    assert http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/pooling", {"messages": [{"role": "user", "content": "a"}]}, 422, "messages"),
        ("/pooling", {"input": []}, 400, None),
        ("/pooling", {"input": "a", "task": "encode"}, 422, "task"),
        ("/pooling", {"input": "a", "task": "token_classify", "model": "mini"}, 424, None),
        ("/pooling", {"input": "a", "dimensions": 4}, 422, "dimensions"),
        ("/pooling", {"input": "a", "encoding_format": "bytes"}, 422, "encoding_format"),
        ("/pooling", {"input": "a", "model": "nobody"}, 404, "model"),
        ("/pooling", {"input": "a", "truncate_prompt_tokens": 0}, 422, "truncate_prompt_tokens"),
        ("/score", {"text_1": "a"}, 422, None),
        ("/score", {"text_1": "a", "text_2": []}, 400, None),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 422, None),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "a", "items": "b"}, 422, None),
        ("/score", {"text_1": "a", "text_2": {"content": []}}, 422, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "model": "tagger"}, 424, None),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "judge"}, 422, "instruction"),
        ("/detokenize", {"tokens": [10**9]}, 422, None),
        ("/detokenize", {"tokens": []}, 400, None),
    ],
)
def test_refusals(post, path, body, status, param):
    actual, error = post(path, body)
    problem = error["error"]
    assert (actual, problem["code"], problem["param"]) == (status, status, param), error
    assert problem["type"].endswith("Error") and problem["message"]
