"""Packhorse's own routes: one item per input, offsets into the sent text, strict options."""

from __future__ import annotations

import pytest

CONTEXT = "the old brown horse carries sacks to market and the cat sat on the red mat ."
QUESTION = "what carries sacks ?"
LONG = CONTEXT * 8


def test_answer(post, server):
    encoder = server.encoder("reader")
    answers = post("/answer", {"question": QUESTION, "context": CONTEXT, "top_k": 2})[1]
    expected = encoder.answer([(QUESTION, CONTEXT)], top_k=2)
    assert [answer["text"] for answer in answers[0]] == [answer.text for answer in expected[0]]
    assert all(CONTEXT[answer["start"] : answer["end"]] == answer["text"] for answer in answers[0])
    both = post("/answer", {"question": QUESTION, "contexts": [CONTEXT, LONG]})[1]
    expected = encoder.answer([(QUESTION, CONTEXT), (QUESTION, LONG)])
    assert [[a["start"] for a in answers] for answers in both] == [
        [a.start for a in e] for e in expected
    ]


def test_answer_may_be_none(post):
    body = {"question": QUESTION, "context": CONTEXT, "no_answer": -1e6}
    assert post("/answer", body)[1][0][0]["text"] == ""
    assert post("/answer", body | {"no_answer": 1e6})[1][0][0]["text"] != ""
    assert post("/answer", {"question": QUESTION, "context": ""}) == (200, [[]])


def test_windows_share_at_most_a_third(post, server):
    body = {"question": QUESTION, "context": LONG}
    most = server.encoder("reader").max_length // 3
    assert post("/answer", body | {"stride": most})[0] == 200
    status, error = post("/answer", body | {"stride": most + 1})
    assert status == 422 and f"can share {most}" in error["error"]
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
    status, error = post("/answer", body)
    assert status == 422 and set(error) == {"error", "error_type"}


def test_fill(post, server):
    encoder = server.encoder("filler")
    text = "the [MASK] carries [MASK] ."
    rows = post("/fill", {"inputs": [text], "top_k": 2})[1]
    expected = encoder.fill([text], top_k=2)
    assert [[[w["word"] for w in mask] for mask in masks] for masks in rows] == [
        [[w.word for w in mask] for mask in masks] for masks in expected
    ]
    assert rows[0][0][0]["text"] == f"the {rows[0][0][0]['word']} carries [MASK] ."
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
    inputs = ["a good cat", ["a cat", "a hat"]]
    expected = encoder.classify(["a good cat", ("a cat", "a hat")])
    rows = post("/classify", {"inputs": inputs})[1]
    assert [row["label"] for row in rows] == [row.label for row in expected]
    assert rows[1]["scores"] == pytest.approx(expected[1].scores)
    assert post("/classify", {"inputs": LONG})[0] == 413
    (chunked,) = post("/classify", {"inputs": LONG, "long": "chunk"})[1]
    assert chunked["scores"] == pytest.approx(encoder.classify([LONG], long="chunk")[0].scores)
    assert post("/classify", {"inputs": [["a", "b"]], "long": "chunk"})[0] == 422


def test_ner(post, server):
    encoder = server.encoder("tagger")
    rows = post("/ner", {"inputs": [CONTEXT, "a cat"]})[1]
    expected = encoder.label([CONTEXT, "a cat"])
    places = [[(e["label"], e["start"], e["end"]) for e in names] for names in rows]
    assert places == [[(e.label, e.start, e.end) for e in names] for names in expected] != [[], []]
    (whole,) = post("/ner", {"inputs": LONG, "long": "chunk"})[1]
    assert whole[-1]["end"] > len(CONTEXT) * 7
    assert all(LONG[name["start"] : name["end"]] == name["text"] for name in whole)
    assert post("/ner", {"inputs": CONTEXT, "model": "judge"})[0] == 424


def test_ner_of_a_long_text(post, server):
    encoder = server.encoder("tagger")
    most = (encoder.max_length - 2) // 2
    for options in ({"stride": 0}, {"stride": most}, {"stride": 8, "aggregation": "first"}):
        (names,) = post("/ner", {"inputs": LONG, **options})[1]
        (expected,) = encoder.label([LONG], **options)
        assert [(n["label"], n["text"], n["start"], n["end"]) for n in names] == [
            (e.label, e.text, e.start, e.end) for e in expected
        ]
    (overlapping,) = post("/ner", {"inputs": LONG, "stride": 8})[1]
    assert overlapping != post("/ner", {"inputs": LONG, "long": "chunk"})[1][0]  # the control
    status, error = post("/ner", {"inputs": LONG, "stride": most + 1})
    assert status == 422 and f"can share {most}" in error["error"]
    status, error = post("/ner", {"inputs": LONG, "stride": 1, "long": "chunk"})
    assert status == 422 and "either stride or long" in error["error"]
    assert post("/ner", {"inputs": LONG, "stride": 1, "aggregation": "none"})[0] == 422
