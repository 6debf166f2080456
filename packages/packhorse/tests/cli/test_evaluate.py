"""`packhorse evaluate`: scores of models and of files, equal to those of other libraries."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Cli = Callable[..., Any]
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
        (squad(path, "-m", "x", "--precision", "int8"), "--precision is for --task stsb or sts"),
        (
            [*task("stsb", path), "--precision", "int8", "--beside", "transformers"],
            "leave out --beside",
        ),
        ([*task("stsb", path), "--calibration", path], "pass --precision int8"),
        (
            [*task("stsb", path), "--precision", "int8", "--calibration", path],
            "not an array that numpy.save wrote",
        ),
        (["evaluate", "--task", "chess", "--input", path], "chess"),
        (["evaluate", "--task", "squad"], "input"),
    ]:
        result = cli(*arguments)
        assert result.code == 2 and complaint in result.err, result.err
        assert len(result.err.splitlines()[-1:]) == 1 and "Traceback" not in result.err


# Similarity, retrieval and classification, compared with another library -----------------------

PAIRS = [
    ("the good horse", "the horse", 4.5),
    ("the bad mule carries sacks", "hello", 0.5),
    ("the mule carries sacks to market", "the horse carries the sacks", 3.0),
    ("hello", "good market", 1.0),
]


def task(name: str, path: Path, *more: object) -> list[object]:
    return ["evaluate", "--task", name, "--input", path, *more]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.csv"
    path.write_text("".join(f"{a},{b},{score}\n" for a, b, score in PAIRS))
    return path


@pytest.fixture
def labeled(tmp_path: Path) -> Path:
    path = tmp_path / "labeled.tsv"
    rows = [f"{a}\t{int(score > 2)}\n" for a, _, score in PAIRS]
    path.write_text("sentence\tlabel\n" + "".join(rows))
    return path


def sides(document: dict[str, Any]) -> list[str]:
    return [side["engine"] for side in document["engines"]]


@pytest.mark.parametrize("name", ["sentence-transformers", "transformers"])
def test_real_pairs_are_equal_to_four_digits(
    name: str, cli: Cli, minilm: Path, shared_data: Path
) -> None:
    pytest.importorskip(name.replace("-", "_"))
    path = shared_data / "glue" / "stsb-en-dev.csv"
    flags = ("-m", minilm, "--device", "cpu", "--dtype", "fp32", "--limit", 64, "--json")
    result = cli(*task("stsb", path, *flags, "--beside", name))
    assert result.code == 0, result.err
    document = result.document
    assert document["pairs"] == 64 and sides(document) == ["packhorse", name]
    our_metrics, their_metrics = (side["metrics"] for side in document["engines"])
    assert len(our_metrics) == 8 and our_metrics["cosine_spearman"] > 0.85
    for measure, value in our_metrics.items():
        assert f"{value:.4f}" == f"{their_metrics[measure]:.4f}", measure
    assert document["equal_to_four_digits"] is True and document["largest_difference"] < 5e-5
    assert document["ratio"] == pytest.approx(
        document["engines"][1]["seconds"] / document["engines"][0]["seconds"]
    )


def test_vectors_in_fewer_bytes_are_scored_beside_floats(
    cli: Cli, minilm: Path, shared_data: Path, tmp_path: Path
) -> None:
    """Equal to scipy's correlation over what sentence-transformers' function makes of vectors."""
    stats = pytest.importorskip("scipy.stats")
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    import packhorse
    from packhorse.runtime.precision import unit_ranges

    source = shared_data / "glue" / "stsb-en-dev.csv"
    rows = list(csv.reader(source.read_text("utf-8").splitlines()[:64]))
    texts = tmp_path / "texts.csv"
    with texts.open("w", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([row[0]] for row in rows)])
    model = ("-m", minilm, "--device", "cpu", "--dtype", "fp32")
    ranges = tmp_path / "ranges.npy"
    written = cli("run", "--task", "embed", "--input", texts, *model, "--write-calibration", ranges)
    assert written.code == 0 and "64 texts calibrate badly" in written.err, written.err
    flags = ("--limit", 64, "--precision", "int8", "--precision", "ubinary", "--json")
    document = cli(*task("stsb", source, *model, *flags, "--calibration", ranges)).document
    assert sides(document) == [
        *("packhorse", "packhorse int8", "packhorse int8 calibrated", "packhorse ubinary")
    ]
    assert document["largest_difference"] is None

    vectors = packhorse.load(minilm).embed([row[0] for row in rows] + [row[1] for row in rows])
    scores = [float(row[2]) for row in rows]
    own_ranges = np.stack([vectors[:64].min(axis=0), vectors[:64].max(axis=0)])
    assert np.abs(np.load(ranges) - own_ranges).max() < 1e-6
    expected = [
        vectors,
        quantization.quantize_embeddings(vectors, "int8", unit_ranges(384)),
        quantization.quantize_embeddings(vectors, "int8", np.load(ranges)),
        np.sign(vectors),
    ]
    correlations = []
    for engine, matrix in zip(document["engines"], expected, strict=True):
        unit = matrix.astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        # Pearson's: ties of bits are broken by rounding, which moves Spearman's.
        correlation = stats.pearsonr((unit[:64] * unit[64:]).sum(axis=1), scores).statistic
        assert engine["metrics"]["cosine_pearson"] == pytest.approx(correlation, abs=1e-4)
        correlations.append(correlation)
    assert abs(correlations[0] - correlations[3]) > 1e-3, "the control: bits are others"


@pytest.mark.slow
def test_the_whole_of_stsb(cli: Cli, minilm: Path, shared_data: Path) -> None:
    pytest.importorskip("sentence_transformers")
    path = shared_data / "glue" / "stsb-en-dev.csv"
    document = cli(*task("stsb", path, "-m", minilm, "--dtype", "fp32", "--json")).document
    for side in document["engines"]:
        assert f"{side['metrics']['cosine_spearman']:.4f}" == "0.8672"


def test_columns_by_name_and_the_note(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path, note = tmp_path / "rows.jsonl", tmp_path / "note.md"
    rows = [{"left": a, "right": b, "worth": 20 * score} for a, b, score in PAIRS]
    path.write_text("\n".join(map(json.dumps, rows)))
    columns = ("--text", "left", "--text", "right", "--label", "worth")
    result = cli(
        *task("sts", path, "-m", tiny("embed"), *columns, "--beside", "none", "--note", note)
    )
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[:2] == ["measure", "packhorse"] and "cosine spearman" in lines[2]
    assert "| cosine spearman |" in note.read_text() and "- pairs: 4" in note.read_text()


def test_retrieval_of_a_folder_and_of_squad(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    texts = {f"d{i}": a for i, (a, _, _) in enumerate(PAIRS)}
    corpus = [json.dumps({"_id": id, "title": "", "text": text}) for id, text in texts.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(corpus))
    (tmp_path / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": PAIRS[0][0]}))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td0\t1\n")
    flags = ("-m", tiny("embed"), "--beside", "transformers", "--json")
    document = cli(*task("retrieval", tmp_path, *flags)).document
    assert (document["documents"], document["queries"]) == (4, 1)
    for side in document["engines"]:
        assert side["metrics"]["ndcg@10"] == side["metrics"]["recall@1"] == 1
        assert side["texts"] == 5
    paragraphs = [
        {
            "context": a,
            "qas": [{"id": a, "question": a, "answers": [{"text": a, "answer_start": 0}]}],
        }
        for a in texts.values()
    ]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    flags = ("-m", tiny("embed"), "--beside", "none", "--limit", 2, "--similarity", "dot", "--json")
    document = cli(*task("retrieval", path, *flags)).document
    assert (document["documents"], document["queries"]) == (4, 2) and document["ratio"] is None
    assert document["engines"][0]["metrics"]["map"] == 1 and sides(document) == ["packhorse"]


def test_classification_by_head_or_by_vectors(cli: Cli, tiny: Tiny, labeled: Path) -> None:
    flags = ("-m", tiny("classify"), "--json")
    result = cli(*task("classification", labeled, *flags))
    assert result.code == 0, result.err
    document = result.document  # labels are numbers in the file and names in the model
    assert sides(document)[0] == "packhorse" and document["labels"] == 2
    assert list(document["engines"][0]["metrics"]) == ["accuracy", "f1", "matthews"]
    if len(document["engines"]) > 1:
        assert sides(document)[1] == "transformers" and document["equal_to_four_digits"] is True
    pytest.importorskip("sklearn")
    learned = ("-m", tiny("embed"), "--train", labeled, "--beside", "none", "--json")
    document = cli(*task("classification", labeled, *learned)).document
    assert document["train_rows"] == 4 and document["engines"][0]["metrics"]["accuracy"] >= 0.5


def test_a_library_nobody_asked_for_may_fail(
    cli: Cli, tiny: Tiny, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packhorse.reports import text_peers

    def broken(setting: object) -> None:
        raise RuntimeError("no such luck\nat all")

    # It may fail when it is opened, and when it reads.
    for opened in (broken, lambda setting: lambda *texts: broken(texts)):
        peers = {"transformers": text_peers.TextPeer(opened, ("embed",), "hf")}
        monkeypatch.setattr(text_peers, "PEERS", peers)
        result = cli(*task("sts", pairs, "-m", tiny("embed"), "--json"))
        assert result.code == 0 and sides(result.document) == ["packhorse"]
        assert "ours alone is scored: transformers fails on embed (RuntimeError: no" in result.err
        chosen = cli(*task("sts", pairs, "-m", tiny("embed"), "--beside", "transformers"))
        assert chosen.code == 2 and "pass --beside none" in chosen.err.splitlines()[-1]
    monkeypatch.setattr(text_peers, "_installed", lambda name: False)
    alone = cli(*task("sts", pairs, "-m", tiny("embed")))
    assert alone.code == 0 and "neither sentence-transformers nor transformers is" in alone.err
    missing = cli(*task("sts", pairs, "-m", tiny("embed"), "--beside", "transformers"))
    assert missing.code == 2 and "packhorse[hf]" in missing.err


def test_what_is_refused(cli: Cli, tiny: Tiny, pairs: Path, labeled: Path, tmp_path: Path) -> None:
    empty, high = tmp_path / "empty.csv", tmp_path / "high.csv"
    empty.write_text("")
    high.write_text("a,b,5.5\n")
    embed, span = tiny("embed"), tiny("span")
    alone = ("--beside", "none")
    for arguments, complaint in [
        (task("stsb", empty), "holds no rows"),
        (task("stsb", high), "5.5 is not within 0 to 5"),
        (task("sts", labeled), "similarity needs pairs"),
        (task("sts", pairs, "--text", "left", "--text", "right"), "no column 'left'"),
        (task("sts", tmp_path / "none.csv"), "cannot be read"),
        (task("sts", pairs, "-m", span, *alone), "no 'embed' head"),
        (task("retrieval", pairs), "not JSON"),
        (task("retrieval", tmp_path), "corpus.jsonl cannot be read"),
        (task("classification", labeled, "-m", embed, *alone), "pass --train FILE"),
        (task("classification", labeled, "-m", span, *alone), "has no head that classifies"),
        (task("classification", pairs, "-m", tiny("classify"), *alone), "is none of 'good', 'bad'"),
        (
            task("classification", labeled, "-m", tiny("classify"), "--train", labeled),
            "leave --train out",
        ),
        (
            task(
                "classification",
                labeled,
                "-m",
                tiny("classify"),
                "--beside",
                "none",
                "--split",
                "x",
            ),
            "--split is for --task retrieval",
        ),
        (
            task(
                "classification",
                *(labeled, "-m", tiny("classify"), "--beside", "sentence-transformers"),
            ),
            "no 'classify' head to compare with",
        ),
        (task("sts", pairs, "--top-k", 2), "--top-k is for --task squad"),
        (task("squad", pairs, "-m", span, *alone), "--beside is for --task stsb or sts or"),
        (task("sts", pairs, "--batch-size", 0), "--batch-size is 0"),
        (task("sts", pairs, "--note", tmp_path / "no" / "n.md"), "there is no folder"),
        (task("sts", pairs, "-m", embed, *alone, "--max-length", 999), "takes 64 tokens"),
        (task("chess", pairs), "chess"),
    ]:
        result = cli(*arguments)
        assert result.code == 2 and complaint in result.err.splitlines()[-1], (
            arguments,
            result.err,
        )
        assert "Traceback" not in result.err and result.out == ""
