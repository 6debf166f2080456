"""`packhorse run`: what the tool it replaces did, its mistakes left out, and files that survive."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from packhorse.cli import perf

pytestmark = pytest.mark.machine

Cli = Callable[..., Any]
Tiny = Callable[[str], Path]

TEXTS = ["The horse carries sacks.", "hello", "A mule is good, the market is bad!"]


def choices(err: str) -> str:
    """The one line that says what was chosen."""
    lines = [line for line in err.splitlines() if " kernel" in line]
    assert len(lines) == 1, err
    return lines[0]


# On the screen --------------------------------------------------------------------------------


def test_without_text_it_greets_the_world(cli: Cli, minilm: Path) -> None:
    result = cli("run")
    assert result.code == 0
    assert "all-MiniLM-L6-v2" in choices(result.err) and ", fp32, " in choices(result.err)
    lines = result.out.splitlines()
    assert lines[0] == "Hello world!: [5, 384]"
    assert [line.split()[0] for line in lines[3:]] == [
        *("[CLS]", "hello", "world", "!", "[SEP]", "pooled")
    ]
    assert max(map(len, lines)) <= 80


def test_the_states_are_those_of_transformers(cli: Cli, minilm: Path) -> None:
    """Numbers of all-MiniLM-L6-v2, read once from transformers' BertModel in fp32."""
    (row,) = cli("run", "--json").document["results"]
    states = np.array(row["states"])
    assert states.shape == (5, 384) and len(row["pooled"]) == 384
    assert states[0, :3] == pytest.approx([0.1611, 0.0383, 0.0337], abs=1e-4)
    assert row["pooled"][:3] == pytest.approx([-0.0365, 0.0217, -0.0122], abs=1e-4)


def test_embed_agrees_with_the_library(cli: Cli, tiny: Tiny) -> None:
    import packhorse

    document = cli("run", *TEXTS, "--task", "embed", "-m", tiny("embed"), "--json").document
    vectors = np.array([row["vector"] for row in document["results"]], np.float32)
    assert np.array_equal(vectors, packhorse.load(tiny("embed")).embed(TEXTS))
    assert [(row["id"], row["text"]) for row in document["results"]] == list(enumerate(TEXTS))
    assert document["dtype"] == "fp32" and document["task"] == "embed"
    shown = cli("run", *TEXTS, "--task", "embed", "-m", tiny("embed")).out
    assert shown.startswith("vectors: [3, 32]\n") and "A mule is good" in shown


def test_every_task_on_the_screen_and_as_json(cli: Cli, tiny: Tiny) -> None:
    pair = "who carries\tThe horse carries sacks."
    flags = {
        "hidden": ("span", ["a horse"]),
        "fill": ("mlm", ["the [MASK] carries [MASK]", "--top-k", "2"]),
        "classify": ("classify", ["good horse", "bad"]),
        "label": ("tokens", ["the horse carries sacks to market"]),
        "rerank": ("rerank", ["--query", "who carries", *TEXTS, "--top-k", "2"]),
        "answer": ("span", ["--question", "who carries", TEXTS[0], TEXTS[2]]),
    }
    documents = {}
    for task, (head, arguments) in flags.items():
        command = ["run", "--task", task, "-m", tiny(head), *arguments]
        assert cli(*command).code == 0
        documents[task] = cli(*command, "--json").document["results"]
    assert documents["hidden"][0]["pooled"] is None
    masks = documents["fill"][0]["masks"]
    assert [len(words) for words in masks] == [2, 2] and masks[0][0]["word"] in masks[0][0]["text"]
    assert set(documents["classify"][0]["scores"]) == {"good", "bad"}
    ranked = documents["rerank"]
    assert len(ranked) == 2 and ranked[0]["score"] >= ranked[1]["score"]
    assert all(row["text"] == TEXTS[row["id"]] for row in ranked)
    for row, text in zip(documents["answer"], (TEXTS[0], TEXTS[2]), strict=True):
        (answer,) = row["answers"]
        assert text[answer["start"] : answer["end"]] == answer["text"]
    paired = cli("run", "--task", "answer", "--pair", pair, "-m", tiny("span"), "--json").document
    assert paired["results"][0]["answers"] == documents["answer"][0]["answers"]


def test_the_old_spellings(cli: Cli, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from packhorse import executable

    compiled: list[object] = []
    monkeypatch.setattr(executable, "compiled", lambda layers: compiled.extend(layers) or [*layers])
    monkeypatch.setattr(executable, "why_uncompiled", lambda: "")  # also without a compiler
    model = tiny("embed")
    old = cli(
        "run", "--use_graphs", "-bs", "3", "-i", "2", "-ml", "8", "-cp", model, "-p", "--json"
    )
    assert old.code == 0, old.err
    new = cli(
        *("run", "--graphs", "--batch-size", 3, "--iterations=2", "--max-length", 8),
        *("--checkpoint", model, "--perf", "--json"),
    )
    fields = ("tokens", "sequences", "batch_size", "iterations", "graphs", "model")
    assert [old.document[k] for k in fields] == [new.document[k] for k in fields]
    assert old.document["tokens"] == 8 * 3 * 2
    assert len(compiled) == 2 * 2, "two runs, two layers each"
    assert cli("run", "--batch_size", "2", "--max_length", "-1", "-m", model).code == 0


def test_a_batch_is_one_batch(cli: Cli, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of N copies, not a text N times as long, and not cut by the encoder's own budget."""
    from packhorse.runtime.backend import TorchBackend

    seen, real = [], TorchBackend.__call__

    def watching(self, packed, *more, **options):
        seen.append(packed.lengths.tolist())
        return real(self, packed, *more, **options)

    monkeypatch.setattr(TorchBackend, "__call__", watching)
    copies = 700
    single = cli("run", TEXTS[0], "-m", tiny("embed"), "--task", "embed", "--json").document
    several = cli(
        *("run", TEXTS[0], "-m", tiny("embed"), "--task", "embed", "--json", "-bs", copies)
    ).document
    (length,) = seen[0]
    assert length * copies > 4096 and seen[1:] == [[length] * copies]
    vectors = [document["results"][0]["vector"] for document in (single, several)]
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-6) and len(several["results"]) == 1


def test_cut_texts_are_reported_once(cli: Cli, tiny: Tiny) -> None:
    result = cli("run", "horse " * 99, "-m", tiny("embed"), "-i", "3", "-ml", "16")
    assert result.code == 0 and "[16, 32]" in result.out
    assert result.err.count("warning: 1 of 1 texts were cut to 16 tokens") == 1


# Against the clock ----------------------------------------------------------------------------


def test_perf_counts_real_tokens(cli: Cli, tiny: Tiny) -> None:
    command = ["run", "the horse", "hello", "-m", tiny("embed"), "-p", "-bs", "3", "-i", "4"]
    document = cli(*command, "--json").document
    assert document["tokens"] == (4 + 3) * 3 * 4 and document["sequences"] == 2 * 3 * 4
    assert document["tokens_per_second"] == pytest.approx(document["tokens"] / document["seconds"])
    assert document["sequences_per_second"] == pytest.approx(24 / document["seconds"])
    p50, p90, p99 = (document[name] for name in ("p50_ms", "p90_ms", "p99_ms"))
    assert 0 < p50 <= p90 <= p99 <= document["seconds"] * 1000
    assert document["tokenizing_seconds"] > 0
    assert [document[k] for k in ("dtype", "device", "graphs")] == ["fp32", "cpu", False]
    shown = cli(*command).out
    assert "tokens per second" in shown and "p99, ms per batch" in shown


def test_the_clock_stops_after_the_device(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that works on after the call returns; and the warm-up does not count."""
    import packhorse
    from packhorse import device

    encoder, now = packhorse.load(tiny("embed")), [0.0]
    monkeypatch.setattr(perf, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(device, "synchronize", lambda _: now.append(now.pop() + 0.5))
    document = perf.measure(encoder, TEXTS, "embed", batch_size=2, iterations=4, max_length=0)
    assert now[0] == 0.5 * len(TEXTS) * (perf.WARM_UP + 4)
    assert document["seconds"] == 0.5 * len(TEXTS) * 4
    assert [document[p] for p in ("p50_ms", "p90_ms", "p99_ms")] == [500.0] * 3
    assert document["sequences_per_second"] == 4.0 and document["tokenizing_seconds"] == 0


@pytest.mark.parametrize("task", ["fill", "answer", "rerank", "classify", "label"])
def test_perf_of_every_task(task: str, cli: Cli, tiny: Tiny) -> None:
    head = {"fill": "mlm", "answer": "span", "label": "tokens"}.get(task, task)
    query = ["--query", "who"] if task in ("answer", "rerank") else []
    result = cli(
        "run", "the [MASK] horse", "--task", task, "-m", tiny(head), "-p", "--json", *query
    )
    assert result.code == 0 and result.document["sequences"] == 1


# Mistakes -------------------------------------------------------------------------------------


def test_mistakes_are_one_line(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    # Without a usable HOME the hub's library fails before it sees that it is offline.
    lane = os.environ.get("PACKHORSE_TEST_LANE")
    reasons = {"home": "set HF_HOME", "network": "cannot be reached"}
    not_fetched = reasons.get(lane or "", "HF_HUB_OFFLINE")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "gaps.txt").write_text("one\n\n")
    (tmp_path / "a.csv").write_text("title,body\nx,y\n")
    (tmp_path / "a.jsonl").write_text('"one"\n{"text"\n')
    (tmp_path / "bytes.txt").write_bytes(b"\xff\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    shutil.copytree(tiny("embed"), odd := tmp_path / "odd")
    with (odd / "vocab.txt").open("a") as words:
        words.write("extra\n")
    model, out = ["-m", tiny("embed")], ["--out", tmp_path / "o.jsonl"]
    int8 = ["--task", "embed", "--precision", "int8"]
    np.save(tmp_path / "five.npy", np.array([[0.0] * 5, [1.0] * 5]))
    cases = [
        ([""], "text 1 is empty"),
        (["one", "  "], "text 2 is empty"),
        (["--input", tmp_path / "empty.txt"], "empty.txt holds no text"),
        (["--input", tmp_path / "gaps.txt", *model], "line 2: the text is empty"),
        (["--input", tmp_path / "a.csv"], "no column 'text'; name one with --column: 'title'"),
        (["--input", tmp_path / "a.jsonl", *model], "a.jsonl, line 2: not JSON"),
        (["--input", tmp_path / "bytes.txt"], "bytes.txt, line 1: not UTF-8"),
        (["--input", tmp_path / "a.docx"], "cannot read texts from .docx"),
        (["--input", tmp_path / "no.txt"], "no.txt cannot be read: No such file"),
        (["-bs", "0"], "--batch-size is 0"),
        (["-i", "0", "-p"], "--iterations is 0"),
        (["--top-k", "0"], "--top-k is 0"),
        (["--chunk", "0"], "--chunk is 0"),
        (["-m", "nobody/nothing"], not_fetched),
        (["-m", tmp_path / "bare"], "no weights"),
        (["-m", odd], "a vocabulary that does not fit"),
        (["--kernel", "magic"], "unknown kernel 'magic'"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["-ml", "65", *model], "max_length is 65"),
        (["--task", "fill", *model], "has no 'mlm' head"),
        (["--task", "fill", "no mask", "-m", tiny("mlm")], "no [MASK] to fill"),
        (["--task", "embed", "--prompt", "x", *model], "no prompt 'x'"),
        (["--task", "rerank", *model], "rerank needs --query"),
        (["--task", "answer", *model], "answer needs --question"),
        (["--precision", "int8", *model], "--precision is for the task embed"),
        (["--write-calibration", tmp_path / "r.npy", *model], "--write-calibration is for the"),
        ([*int8, "--write-calibration", tmp_path / "r.npy"], "leave out --out, --perf and"),
        (["--task", "embed", "--precision", "binary", "-p"], "leave out --precision"),
        (["--task", "embed", "--calibration", odd], "--calibration is for --precision int8"),
        ([*int8, "--calibration", tmp_path / "gaps.txt"], "not an array that numpy.save wrote"),
        ([*int8, "--calibration", tmp_path / "five.npy", *model], "the ranges have 5 dimensions"),
        (["--query", "x"], "--query is for the tasks rerank and answer"),
        (["--pair", "alone"], "text 1: not a pair"),
        (["--task", "fill", "--pair", "a\tb"], "fill takes single texts"),
        (["a", "--input", "b.txt"], "TEXT and --input both name texts"),
        (["-p", *out], "--perf measures and writes no results"),
        (["-bs", "2", *out], "--out writes each text once"),
        (["--task", "rerank", "--query", "q", *out], "rerank orders all texts at once"),
        (["--out", tmp_path / "o.txt", *model], "cannot write results as .txt"),
        (["--out", tmp_path / "o.npy", *model], "npy holds one vector per text"),
        (["--out", tmp_path / "no" / "o.jsonl", *model], "cannot be written: No such file"),
    ]
    for arguments, message in cases:
        result = cli("run", *arguments)
        assert result.code == 2 and message in result.err, (arguments, result)
        complaint = result.err.splitlines()[-1]
        assert complaint.startswith("packhorse: ") and result.err.count("\n") <= 2, result.err
        assert result.out == ""
    assert not list(tmp_path.glob("*.partial*"))


def test_pyarrow_is_an_extra(
    cli: Cli, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for flag in ("--input", "--out"):
        result = cli("run", "-m", tiny("embed"), flag, tmp_path / "a.parquet")
        assert result.code == 2 and "pip install 'packhorse[data]'" in result.err


# Files ----------------------------------------------------------------------------------------


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Texts of very uneven length, with ids of their own."""
    draw, path = random.Random(0), tmp_path / "many.jsonl"
    words = ["the", "horse", "mule", "carries", "sacks", "to", "market", "good", "bad", "hello"]
    with path.open("w") as file:
        for i in range(300):
            text = " ".join(draw.choices(words, k=draw.choice([1, 3, 8, 40])))
            file.write(json.dumps({"id": f"t{i}", "text": text}) + "\n")
    return path


def read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_format_holds_the_same(cli: Cli, tiny: Tiny, several: Path, tmp_path: Path) -> None:
    command = ["run", "--input", several, "--task", "embed", "-m", tiny("embed"), "--chunk", "100"]
    shown = cli(*command, "--json").document["results"]
    for suffix in (".npy", ".jsonl", ".parquet"):
        result = cli(*command, "--out", tmp_path / f"v{suffix}", "--json")
        assert result.code == 0 and result.document["rows"] == 300, result.err
    vectors = np.array([row["vector"] for row in shown], np.float32)
    written = np.load(tmp_path / "v.npy")
    assert written.dtype == np.float32 and np.abs(written - vectors).max() < 1e-6
    ids = [json.loads(line) for line in (tmp_path / "v.npy.ids.jsonl").read_text().splitlines()]
    for name in ("v.jsonl", "v.parquet"):
        rows = read(tmp_path / name)
        assert [row["id"] for row in rows] == ids == [f"t{i}" for i in range(300)]
        assert np.array_equal(np.array([row["vector"] for row in rows], np.float32), written)
    assert not list(tmp_path.glob("*.partial*"))


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_vectors_in_fewer_bytes(
    precision: str, cli: Cli, tiny: Tiny, several: Path, tmp_path: Path
) -> None:
    """They are those of `encode`, and so of sentence-transformers' own function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("sentence_transformers.util.quantization")
    import packhorse
    from packhorse.runtime import calibrate

    encoder = packhorse.load(tiny("embed"))
    texts = [json.loads(line)["text"] for line in several.read_text().splitlines()]
    np.save(tmp_path / "ranges.npy", ranges := calibrate(vectors := encoder.embed(texts)))
    command = ["run", "--input", several, "--task", "embed", "-m", tiny("embed"), "--chunk", "100"]
    command += ["--precision", precision]
    if precision.endswith("int8"):
        command += ["--calibration", tmp_path / "ranges.npy"]
    for suffix in (".npy", ".jsonl", ".parquet"):
        result = cli(*command, "--out", tmp_path / f"v{suffix}")
        assert result.code == 0, result.err
    expected = quantization.quantize_embeddings(vectors, precision, ranges)
    assert (encoder.encode(texts, precision=precision, ranges=ranges) == expected).all()
    written = np.load(tmp_path / "v.npy")
    assert written.dtype == expected.dtype and written.shape == expected.shape
    # Batches are cut otherwise, so that a number in ten thousand is on the other side of a step.
    different = written != expected
    assert different.mean() < 1e-3 and (abs(1.0 * written - expected) <= 1)[different].all()
    assert (expected[1:] != expected[:-1]).mean() > 0.1, "the control: vectors differ"
    for name in ("v.jsonl", "v.parquet"):
        assert [row["vector"] for row in read(tmp_path / name)] == written.tolist()
    (column,) = {str(parquet.read_schema(tmp_path / "v.parquet").field("vector").type)}
    assert column == f"list<element: {expected.dtype}>"
    metadata = json.loads((tmp_path / "v.npy.meta.json").read_text())
    assert metadata["precision"] == precision
    assert bool(metadata["calibration"]) == precision.endswith("int8")


def test_bytes_without_calibration_do_not_depend_on_the_other_texts(
    cli: Cli, tiny: Tiny, several: Path, tmp_path: Path
) -> None:
    """They are the server's, by fixed ranges; `several` is cut into three chunks."""
    import packhorse
    from packhorse.runtime.precision import quantize, unit_ranges

    command = ["run", "--task", "embed", "-m", tiny("embed"), "--precision", "int8"]
    out = tmp_path / "v.npy"
    assert cli(*command, "--input", several, "--chunk", "100", "--out", out).code == 0
    texts = [json.loads(line)["text"] for line in several.read_text().splitlines()]
    vectors = packhorse.load(tiny("embed")).embed(texts)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = quantize(vectors, "int8", unit_ranges(vectors.shape[1]))
    assert (np.load(out) != expected).mean() < 1e-3
    (row,) = cli(*command, texts[0], "--json").document["results"]
    assert abs(np.array(row["vector"]) - expected[0]).max() <= 1
    shown = cli(*command, texts[0]).out
    assert f" {row['vector'][0]} " in shown and "." not in shown.splitlines()[-1].split()[-1]


def test_ranges_are_written_in_chunks(cli: Cli, tiny: Tiny, several: Path, tmp_path: Path) -> None:
    import packhorse
    from packhorse.runtime import calibrate

    out = tmp_path / "ranges.npy"
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--write-calibration", out]
    document = cli(*command, "--input", several, "--chunk", "70", "--json").document
    texts = [json.loads(line)["text"] for line in several.read_text().splitlines()]
    expected = calibrate(packhorse.load(tiny("embed")).embed(texts))
    assert np.abs(np.load(out) - expected).max() < 1e-6 and document["rows"] == 300
    assert np.load(out).dtype == np.float32
    assert "pass --overwrite" in cli(*command, "hello").err
    result = cli(*command, "hello", "--overwrite")
    assert result.code == 0 and "1 texts calibrate badly" in result.err


def test_bytes_are_not_continued_with_other_ranges(
    cli: Cli, tiny: Tiny, several: Path, tmp_path: Path
) -> None:
    np.save(ranges := tmp_path / "ranges.npy", np.array([[-1.0] * 32, [1.0] * 32]))
    whole = several.read_text()
    several.write_text(whole + "{broken\n")
    out = tmp_path / "v.npy"
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--precision", "int8", "--chunk", "9"]
    command += ["--input", several, "--out", out]
    calibrated = [*command, "--calibration", ranges]
    assert "line 301" in cli(*calibrated).err
    again = cli(*calibrated)
    assert "resuming after 297 rows" in again.err and "line 301" in again.err
    assert "another calibration" in cli(*command).err
    np.save(ranges, np.array([[-2.0] * 32, [1.0] * 32]))
    assert "another calibration" in cli(*calibrated).err
    command[command.index("int8")] = "uint8"
    assert "another precision" in cli(*command).err


@pytest.mark.parametrize("task", ["hidden", "fill", "classify", "label", "answer"])
def test_other_tasks_into_files(task: str, cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    head = {"hidden": "span", "fill": "mlm", "label": "tokens", "answer": "span"}.get(task, task)
    path = tmp_path / "texts.csv"
    mask = " [MASK]" if task == "fill" else ""
    path.write_text("text,ask\n" + "".join(f'"{text}{mask}",who\n' for text in TEXTS))
    columns = ["ask", "text"] if task == "answer" else ["text"]
    command = ["run", "--input", path, "--task", task, "-m", tiny(head), "--chunk", "2"]
    command += [part for column in columns for part in ("--column", column)]
    shown = cli(*command, "--json").document["results"]
    for name in ("o.jsonl", "o.parquet"):
        result = cli(*command, "--out", tmp_path / name)
        assert result.code == 0, result.err
        rows = read(tmp_path / name)
        assert [row["id"] for row in rows] == [0, 1, 2]
        for row, expected in zip(rows, shown, strict=True):
            assert row.pop("ask") == "who" and row.pop("text") in expected["text"]
            same(row, {key: value for key, value in expected.items() if key != "text"})


def test_windows_over_long_texts(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    import packhorse

    long = "The good horse carries sacks to market. " * 40
    out = tmp_path / "o.jsonl"
    command = ["run", long, "--task", "label", "-m", tiny("tokens"), "--stride", "9"]
    assert cli(*command, "--out", out).code == 0
    (row,) = read(out)
    (entities,) = packhorse.load(tiny("tokens")).label([long], stride=9)
    places = [(entity.label, entity.start, entity.end) for entity in entities]
    assert [(e["label"], e["start"], e["end"]) for e in row["entities"]] == places
    assert places[-1][2] > len(long) - 100
    assert cli(*command[:-2], "--json").document["results"][0]["entities"][-1]["end"] < 500
    refused = cli("run", "--stride", "9")
    assert refused.code == 2 and "--stride is for the tasks label and answer" in refused.err


def same(first: object, second: object) -> None:
    """Equal but for the last digits of a number: batches are cut otherwise in a file."""
    if isinstance(first, dict) and isinstance(second, dict):
        assert set(first) == set(second)
        for key in first:
            same(first[key], second[key])
    elif isinstance(first, list) and isinstance(second, list):
        assert len(first) == len(second)
        for pair in zip(first, second, strict=True):
            same(*pair)
    else:
        assert first == (pytest.approx(second, abs=1e-5) if isinstance(second, float) else second)


def launch(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "packhorse", *map(str, arguments)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # As many threads as here: how sums are split between them shows in the last digit.
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)


def kill_after(process: subprocess.Popen[bytes], state: Path, rows: int, delay: float) -> int:
    """Kill it once so many rows are vouched for, and some milliseconds later; how many then are."""
    written, deadline = 0, time.monotonic() + 60
    while written < rows and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
        written = json.loads(state.read_text())["rows"] if state.exists() else 0
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    return json.loads(state.read_text())["rows"]


@pytest.mark.parametrize(
    "suffix",
    [
        pytest.param(".npy", marks=pytest.mark.slow),
        pytest.param(".jsonl", marks=pytest.mark.slow),
        ".parquet",
    ],
)
def test_a_killed_process_is_continued(suffix: str, cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    """A real signal at no particular moment; what comes out is what an undisturbed run writes."""
    texts, draw = tmp_path / "texts.txt", random.Random(suffix)
    words = ["the", "horse", "mule", "carries", "sacks", "to", "market"]
    lines = [" ".join(draw.choices(words, k=draw.randint(1, 40))) for _ in range(800)]
    texts.write_text("\n".join(lines) + "\n")
    out, state = tmp_path / f"killed{suffix}", tmp_path / f"killed{suffix}.partial.json"
    command = ["run", "--input", texts, "--task", "embed", "-m", tiny("embed"), "--chunk", "8"]
    confirmed = [0]
    for more in (40, 120):
        process = launch(*command, "--out", out)
        confirmed.append(kill_after(process, state, confirmed[-1] + more, draw.uniform(0, 0.02)))
        assert not out.exists()
    assert all(later > earlier for earlier, later in pairwise(confirmed)) and confirmed[-1] < len(
        lines
    )
    continued = cli(*command, "--out", out, "--json").document
    assert continued["resumed_after"] == confirmed[-1] and continued["rows"] == len(lines)
    whole = tmp_path / f"whole{suffix}"
    assert cli(*command, "--out", whole).code == 0
    assert out.read_bytes() == whole.read_bytes()
    metadata_files = (
        [] if suffix == ".parquet" else [Path(f"{path}.meta.json") for path in (out, whole)]
    )
    assert sorted(tmp_path.iterdir()) == sorted([texts, out, whole, *metadata_files])


def test_what_is_not_continued(cli: Cli, tiny: Tiny, several: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    embed = ["run", "--task", "embed", "--chunk", "100", "--out", out, "-m", tiny("embed")]
    command = [*embed, "--input", several]
    bad = several.read_text() + "{broken\n"
    several.write_text(bad)
    result = cli(*command)
    assert result.code == 2 and "line 301: not JSON" in result.err
    assert Path(f"{out}.partial").exists() and not out.exists()
    for change, setting in (
        (["-ml", "8"], "max_length"),
        (["--dtype", "bf16"], "dtype"),
        (["--kernel", "reference"], "kernel"),
        (["--column", "text"], "column"),
    ):
        result = cli(*command, *change)
        assert result.code == 2 and f"another {setting}" in result.err, result.err
    os.utime(several, (0, 0))
    assert "was begun with another input" in cli(*command).err
    several.write_text(bad.removesuffix("{broken\n"))
    assert cli(*command).code == 2, "the rows before may have changed as well"
    result = cli(*command, "--overwrite", "--json")
    assert result.code == 0 and result.document["resumed_after"] == 0
    result = cli(*command)
    assert result.code == 2 and "v.npy exists already; pass --overwrite" in result.err


def test_an_empty_row_found_late_can_be_skipped(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "v.npy"
    texts.write_text("horse\n" * 5 + "\n" + "mule\n")
    command = ["run", "--task", "embed", "--input", texts, "--out", out, "-m", tiny("embed")]
    command += ["--chunk", "2"]
    assert "line 6: the text is empty" in cli(*command).err
    result = cli(*command, "--skip-empty", "--json")
    assert result.document["resumed_after"] == 4 and result.document["rows"] == 6
    assert "resuming after 4 rows" in result.err
    ids = (tmp_path / "v.npy.ids.jsonl").read_text().split()
    assert ids == ["0", "1", "2", "3", "4", "6"]


def test_standard_input(
    cli: Cli, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "--task", "embed", "--input", "-", "-m", tiny("embed")]

    def fed(text: bytes, *more: object) -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return cli(*command, *more)

    assert len(fed(b"one\ntwo\n", "--json").document["results"]) == 2
    assert "standard input holds no text" in fed(b"").err
    out = ["--out", tmp_path / "v.jsonl", "--chunk", "1"]
    assert fed(b"one\n\n", *out).code == 2
    assert "another input" in fed(b"one\ntwo\n", *out).err, "it cannot be read again"
    assert fed(b"one\ntwo\n", *out, "--overwrite").code == 0


def test_only_the_first_texts_of_a_file_are_shown(cli: Cli, tiny: Tiny, several: Path) -> None:
    result = cli("run", "--input", several, "--task", "embed", "-m", tiny("embed"))
    assert result.out.startswith("vectors: [20, 32]") and "the first 20 texts" in result.err


def test_arguments_into_a_file(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    assert cli("run", *TEXTS, "--task", "embed", "-m", tiny("embed"), "--out", out).code == 0
    assert np.load(out).shape == (3, 32)
    assert sorted(tmp_path.iterdir()) == [out, tmp_path / "v.npy.meta.json"]


def test_texts_are_written_as_they_come(
    cli: Cli, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever feeds it sees results on disk a few chunks behind: nothing is collected first."""
    out, backlog = tmp_path / "v.jsonl", []

    def feed() -> Iterator[bytes]:
        for number in range(40):
            partial = Path(f"{out}.partial")
            written = partial.read_bytes().count(b"\n") if partial.exists() else 0
            backlog.append(number - written)
            yield b"hello horse\n"

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=feed()))
    result = cli(
        *("run", "--input", "-", "--task", "embed", "-m", tiny("embed"), "--chunk", 5, "--out", out)
    )
    assert result.code == 0 and max(backlog) <= 4 * 5


@pytest.mark.slow
def test_memory_stays_flat(tiny: Tiny, tmp_path: Path) -> None:
    """Ten times the texts, no more memory: what is held is one chunk."""
    peak = (
        "import resource, sys; from packhorse.cli import main; code = main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    peaks = []
    for count in (4_000, 40_000):
        texts = tmp_path / f"{count}.txt"
        texts.write_text("the horse carries sacks to market\n" * count)
        command = ["run", "--task", "embed", "-m", tiny("embed"), "--chunk", 500, "--input", texts]
        command += ["--out", tmp_path / f"{count}.jsonl"]
        completed = subprocess.run(
            [sys.executable, "-c", peak, *map(str, command)], capture_output=True, text=True
        )
        assert completed.returncode == 0, completed.stderr
        peaks.append(int(completed.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 12, f"MB at the peak: {peaks}; all rows at once take over 30"


@pytest.mark.slow
def test_piped_text_is_read_however_long_it_takes(tiny: Tiny) -> None:
    command = [sys.executable, "-m", "packhorse", "run", "-m", str(tiny("embed")), "--json"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **streams) as slow:
        assert slow.stderr is not None and "waiting for text" in slow.stderr.readline()
        result, _ = slow.communicate("hello\n", timeout=120)
    assert [row["text"] for row in json.loads(result)["results"]] == ["hello"]
    empty = subprocess.run(command, input="", capture_output=True, text=True, timeout=120)
    assert empty.returncode == 2 and "standard input holds no text" in empty.stderr
    none = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert [row["text"] for row in json.loads(none.stdout)["results"]] == ["Hello world!"]
