"""What a body to one URL is taken for, and the shapes of answers beyond those a client asks for."""

from __future__ import annotations

import pytest

QUESTION = {"question": "what ?", "context": "the cat sat on the mat"}


@pytest.mark.parametrize(
    ("name", "body", "task"),
    [
        ("", {"inputs": "the cat"}, "feature-extraction"),
        ("", {"inputs": QUESTION}, "question-answering"),
        ("", {"inputs": [QUESTION]}, "question-answering"),
        ("", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "sentence-similarity"),
        ("", {"inputs": "a", "parameters": {"function_to_apply": "none"}}, "text-classification"),
        ("", {"inputs": "a", "parameters": {"ignore_labels": ["O"]}}, "token-classification"),
        ("", {"inputs": "a [MASK]", "parameters": {"targets": ["cat"]}}, "fill-mask"),
        ("filler", {"inputs": "the [MASK]"}, "fill-mask"),
        ("filler", {"inputs": "the cat"}, "feature-extraction"),
        ("filler", {"inputs": "a [MASK]", "normalize": False}, "feature-extraction"),
        ("judge", {"inputs": "the [MASK]"}, "text-classification"),
        ("tagger", {"inputs": ["the", "cat"]}, "token-classification"),
    ],
)
def test_body_and_heads_choose(server, name, body, task):
    from packhorse.serve.dialects.huggingface import OURS, InferenceRequest, choose

    host, chosen = choose(server.hosts, name or None, InferenceRequest.model_validate(body))
    assert chosen == task and OURS[task] in host.tasks


def test_both_paths_name_the_task(post):
    found = post("/pipeline/feature-extraction/tiny", {"inputs": "the cat"})
    assert found == post("/models/tiny/pipeline/feature-extraction", {"inputs": "the cat"})
    assert found[0] == 200 and len(found[1]) == 96
    same = post("/models/tiny/pipeline/sentence-similarity", {"inputs": "the cat"})
    assert same[0] == 422 and set(same[1]) == {"error"}
    assert post("/pipeline/translation/tiny", {"inputs": "the cat"})[0] == 422
    assert post("/pipeline/fill-mask/tiny", {"inputs": "the [MASK]"})[0] == 424
    assert post("/models/nobody", {"inputs": "the cat"})[0] == 404


def test_lists_are_answered_with_lists(post, server):
    labels = post("/models/judge", {"inputs": ["a cat", "a hat"], "parameters": {"top_k": 2}})[1]
    assert [len(each) for each in labels] == [2, 2]
    answers = post("/models/reader", {"inputs": [QUESTION, QUESTION]})[1]
    assert len(answers) == 2 and answers[0]["answer"] == answers[1]["answer"]
    nothing = post("/models/reader", {"inputs": {"question": "who ?", "context": ""}})[1]
    assert nothing == {"answer": "", "start": 0, "end": 0, "score": 0.0}
    names = post("/models/tagger", {"inputs": ["the cat", "a hat"]})[1]
    assert len(names) == 2 and names[0][0]["entity_group"] in ("CAT", "MAT")
    long = {"inputs": "the cat " * 60, "parameters": {"stride": 0}}
    assert post("/models/tagger", long)[1][-1]["end"] > 400


def test_masks_of_one_text_nest(post):
    one = post("/models/filler", {"inputs": "the [MASK]"})[1]
    two = post("/models/filler", {"inputs": "the [MASK] [MASK]"})[1]
    assert isinstance(one[0], dict) and [len(each) for each in two] == [5, 5]
    batch = post("/models/filler", {"inputs": ["the [MASK]", "the [MASK] [MASK]"]})[1]
    assert isinstance(batch[0][0], dict) and isinstance(batch[1][0], list)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": None},
        {"inputs": {"question": "a"}},
        {"inputs": [QUESTION, "a"]},
        {"inputs": "a", "parameters": {"top_k": 0}},
        {"inputs": "a", "encoding_format": "base64"},
        {"inputs": QUESTION, "parameters": {"doc_stride": 10**9}},
    ],
)
def test_refusals(post, body):
    status, told = post("/", body)
    assert status == 422 and set(told) == {"error"}
    assert post("/", {"inputs": []})[0] == 400
