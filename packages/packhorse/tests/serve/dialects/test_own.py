"""Our own routes: an item an input, offsets of the text that was sent, unknown options refused."""

from __future__ import annotations

import pytest

CONTEXT = "the old brown horse carries sacks to market and the cat sat on the red mat ."
QUESTION = "what carries sacks ?"
LONG = CONTEXT * 8


def test_answer(post, server):
    encoder = server.encoder("reader")
    found = post("/answer", {"question": QUESTION, "context": CONTEXT, "top_k": 2})[1]
    expected = encoder.answer([(QUESTION, CONTEXT)], top_k=2)
    assert [each["text"] for each in found[0]] == [each.text for each in expected[0]]
    assert all(CONTEXT[each["start"] : each["end"]] == each["text"] for each in found[0])
    both = post("/answer", {"question": QUESTION, "contexts": [CONTEXT, LONG]})[1]
    expected = encoder.answer([(QUESTION, CONTEXT), (QUESTION, LONG)])
    assert [[a["start"] for a in each] for each in both] == [[a.start for a in e] for e in expected]


def test_answer_may_be_none(post):
    body = {"question": QUESTION, "context": CONTEXT, "no_answer": -1e6}
    assert post("/answer", body)[1][0][0]["text"] == ""
    assert post("/answer", body | {"no_answer": 1e6})[1][0][0]["text"] != ""
    assert post("/answer", {"question": QUESTION, "context": ""}) == (200, [[]])


def test_windows_share_at_most_half(post):
    body = {"question": QUESTION, "context": LONG}
    assert post("/answer", body | {"stride": 12})[0] == 200
    status, told = post("/answer", body | {"stride": 13})
    assert status == 422 and "can share 12" in told["error"]
    assert post("/answer", body | {"question": QUESTION * 12})[0] == 413


@pytest.mark.parametrize(
    "body",
    [
        {"question": "a"},
        {"question": "a", "context": "b", "contexts": ["b"]},
        {"question": "a", "context": "b", "top_k": 0},
        {"question": "a", "context": "b", "max_answer_tokens": 10**6},
        {"question": "a", "context": "b", "topk": 1},
        {"question": "a", "context": "b", "no_answer": "0"},
    ],
)
def test_answer_refuses(post, body):
    status, told = post("/answer", body)
    assert status == 422 and set(told) == {"error", "error_type"}


def test_fill(post, server):
    encoder, text = server.encoder("filler"), "the [MASK] carries [MASK] ."
    found = post("/fill", {"inputs": [text], "top_k": 2})[1]
    expected = encoder.fill([text], top_k=2)
    assert [[[w["word"] for w in mask] for mask in each] for each in found] == [
        [[w.word for w in mask] for mask in each] for each in expected
    ]
    assert found[0][0][0]["text"] == f"the {found[0][0][0]['word']} carries [MASK] ."
    assert post("/fill", {"inputs": "no mask"})[0] == 422
    end = LONG + "the [MASK]"
    assert "within the model" in post("/fill", {"inputs": end})[1]["error"]
    assert post("/fill", {"inputs": end, "long": "truncate"})[0] == 422
    (words,) = post("/fill", {"inputs": end, "long": "chunk", "top_k": 1})[1]
    assert len(words) == 1 and words[0][0]["text"].startswith(LONG + "the ")
    assert post("/fill", {"inputs": text, "targets": []})[0] == 422
    assert post("/fill", {"inputs": text, "targets": [" "]})[0] == 422


def test_classify(post, server):
    encoder = server.encoder("judge")
    given = ["a good cat", ["a cat", "a hat"]]
    expected = encoder.classify(["a good cat", ("a cat", "a hat")])
    found = post("/classify", {"inputs": given})[1]
    assert [each["label"] for each in found] == [each.label for each in expected]
    assert found[1]["scores"] == pytest.approx(expected[1].scores)
    assert post("/classify", {"inputs": LONG})[0] == 413
    (chunked,) = post("/classify", {"inputs": LONG, "long": "chunk"})[1]
    assert chunked["scores"] == pytest.approx(encoder.classify([LONG], long="chunk")[0].scores)
    assert post("/classify", {"inputs": [["a", "b"]], "long": "chunk"})[0] == 422


def test_ner(post, server):
    encoder = server.encoder("tagger")
    found = post("/ner", {"inputs": [CONTEXT, "a cat"]})[1]
    expected = encoder.label([CONTEXT, "a cat"])
    places = [[(e["label"], e["start"], e["end"]) for e in each] for each in found]
    assert places == [[(e.label, e.start, e.end) for e in each] for each in expected] != [[], []]
    (whole,) = post("/ner", {"inputs": LONG, "long": "chunk"})[1]
    assert whole[-1]["end"] > len(CONTEXT) * 7
    assert all(LONG[each["start"] : each["end"]] == each["text"] for each in whole)
    assert post("/ner", {"inputs": CONTEXT, "model": "judge"})[0] == 424
