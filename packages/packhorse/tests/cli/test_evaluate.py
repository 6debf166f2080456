"""`packhorse evaluate`: a model's score is that of the file it writes; what it says and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Spoken

Cli = Callable[..., Spoken]
Tiny = Callable[[str], Path]

CONTEXT = "The good horse carries sacks to market. " * 6 + "A bad mule carries the market to hello."


def write_squad(tmp_path: Path, impossible: bool, moved: int = 0) -> Path:
    golds = {"a": "horse", "b": "sacks to market", "c": "bad mule"}
    questions: list[dict[str, Any]] = [
        {
            "id": id,
            "question": "who carries",
            "answers": [{"text": text, "answer_start": CONTEXT.index(text) + moved}],
        }
        for id, text in golds.items()
    ]
    if impossible:
        none = {"question": "to hello", "answers": [], "is_impossible": True}
        questions += [{"id": "d", **none}, {"id": "e", **none}]
    paragraph = {"context": CONTEXT, "qas": questions}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    return path


def squad(path: Path, *more: object) -> list[object]:
    return ["evaluate", "--task", "squad", "--input", path, *more]


def test_the_score_of_a_model_is_that_of_its_file(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path, out = write_squad(tmp_path, impossible=True), tmp_path / "predictions.json"
    result = cli(
        *squad(path, "-m", tiny("span"), "--predictions", out, "--no-answer", 0.3, "--json")
    )
    assert result.code == 0, result.err
    assert "windows of 64 tokens, of which a quarter is shared" in result.err
    document = result.document
    assert document["threshold"] == 0.3 and document["questions"] == 5 and document["seconds"] > 0
    assert document["has_answer"]["questions"] == 3 and document["no_answer"]["questions"] == 2
    predictions = json.loads(out.read_text())
    assert list(predictions) == list("abcde")
    assert all(text in CONTEXT for text in predictions.values())
    again = cli(*squad(path, "--predictions-in", out, "--json")).document
    shared = ("exact_match", "f1", "questions", "has_answer", "no_answer")
    assert {name: again[name] for name in shared} == {name: document[name] for name in shared}
    # The best threshold is one that can be asked for, and then gives what was promised.
    for measure, best in document["best"].items():
        flags = ("-m", tiny("span"), "--no-answer", repr(best["threshold"] + 1e-9), "--json")
        assert cli(*squad(path, *flags)).document[measure] == pytest.approx(best["score"])


def test_the_table(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path = write_squad(tmp_path, impossible=False)
    result = cli(*squad(path, "-m", tiny("span"), "--top-k", 3, "--limit", 2))
    assert result.code == 0, result.err
    head, _, *rows = result.out.splitlines()
    assert head.split() == ["exact", "match", "F1", "questions", "seconds", "questions/s"]
    assert rows[0].split()[:2] == ["all", "questions"] and rows[0].split()[4] == "2"
    assert rows[1].startswith("best of top-k") and len(rows) == 2
    both = cli(*squad(path, "-m", tiny("span"), "--top-k", 5000, "--json")).document
    assert both["within_top_k"]["exact_match"] == 100  # the answers are among all the spans
    assert "best" not in both and both["threshold"] is None


def test_a_file_of_predictions_needs_no_model(cli: Cli, tmp_path: Path) -> None:
    path, predicted = write_squad(tmp_path, impossible=True), tmp_path / "given.json"
    right = {"a": "the HORSE!", "b": "sacks to market", "c": "a bad mule", "d": "", "e": ""}
    predicted.write_text(json.dumps(right))
    result = cli(*squad(path, "--predictions-in", predicted, "--json"))
    assert result.document["exact_match"] == result.document["f1"] == 100
    predicted.write_text(json.dumps({"a": "good horse", "d": "horse", "other": "x"}))
    result = cli(*squad(path, "--predictions-in", predicted, "--json"))
    assert result.document["exact_match"] == 0 and result.document["missing"] == 3
    assert result.document["f1"] == pytest.approx(100 * (2 / 3) / 5)
    assert "3 of 5 questions have no prediction" in result.err


def test_misplaced_answers_are_counted_and_scored(cli: Cli, tmp_path: Path) -> None:
    path, predicted = write_squad(tmp_path, impossible=False, moved=1), tmp_path / "given.json"
    predicted.write_text(json.dumps({"a": "horse"}))
    result = cli(*squad(path, "--predictions-in", predicted, "--json"))
    assert "3 of 3 answers are not at the offset in their context" in result.err
    assert result.document["exact_match"] == pytest.approx(100 / 3)


def test_a_file_is_replaced_only_when_asked(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path, out = write_squad(tmp_path, impossible=False), tmp_path / "predictions.json"
    out.write_text("mine")
    command = squad(path, "-m", tiny("span"), "--predictions", out)
    refused = cli(*command)
    assert refused.code == 2 and "--overwrite" in refused.err and out.read_text() == "mine"
    assert cli(*command, "--overwrite").code == 0
    assert list(json.loads(out.read_text())) == list("abc")


def test_what_cannot_be_meant_is_refused(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path, empty = write_squad(tmp_path, impossible=False), tmp_path / "empty.json"
    empty.write_text('{"data": []}')
    for arguments, complaint in [
        (squad(path), "either --model or"),
        (squad(path, "-m", "x", "--predictions-in", path), "either --model or"),
        (squad(path, "--predictions-in", path, "--predictions", "y"), "pass --model"),
        (squad(path, "-m", "x", "--predictions", tmp_path / "no" / "p.json"), "there is no folder"),
        (squad(path, "-m", "x", "--limit", 0), "--limit is 0"),
        (squad(path, "-m", "x", "--top-k", 0), "--top-k is 0"),
        (squad(empty, "-m", "x"), "there is no question"),
        (squad(tmp_path / "none.json", "-m", "x"), "cannot be read"),
        (squad(path, "--predictions-in", path), "question 'data': not a text"),
        (squad(path, "-m", tiny("embed")), "no 'span' head"),
        (squad(path, "-m", tiny("span"), "--stride", 64), "stride is 64"),
        (["evaluate", "--task", "chess", "--input", path], "chess"),
        (["evaluate", "--task", "squad"], "input"),
    ]:
        result = cli(*arguments)
        assert result.code == 2 and complaint in result.err, result.err
        assert len(result.err.splitlines()[-1:]) == 1 and "Traceback" not in result.err
