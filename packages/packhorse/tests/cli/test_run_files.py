"""`packhorse run` on files as others write them: dialects, columns, devices; killed anywhere."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import packhorse

from ..runtime import retrieval_models

pytestmark = pytest.mark.machine

Cli = Callable[..., Any]
Tiny = Callable[[str], Path]

TEXTS = ["the horse, carries; sacks", 'a "good"\nmule', "tab\there | there", "bad market"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# What others write ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, []),
        ({"sep": ";"}, []),
        ({"sep": "\t"}, []),
        ({"sep": "|", "quoting": csv.QUOTE_ALL}, []),
        ({"sep": ":"}, ["--delimiter", ":"]),
        ({"quotechar": "'"}, ["--quote", "'"]),
        ({"escapechar": "\\", "doublequote": False}, ["--escape", "\\"]),
        ({"encoding": "utf-8-sig", "lineterminator": "\r\n"}, []),
        ({"encoding": "utf-16"}, []),
        ({"encoding": "utf-16", "sep": ";"}, []),
        ({"encoding": "cp1252", "sep": ";"}, ["--encoding", "cp1252"]),
    ],
)
def test_csv_as_pandas_writes_it(
    options: dict[str, Any], flags: list[str], cli: Cli, tiny: Tiny, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    names = ["Ännchen", "b", "c;d", "e,f"]
    path = tmp_path / "table.csv"
    pandas.DataFrame({"who": names, "text": TEXTS, "n": [1, 2, 3, 4]}).to_csv(
        path, index=False, **options
    )
    out = tmp_path / "out.jsonl"
    command = ["run", "--input", path, "--task", "embed", "-m", tiny("embed"), "--out", out]
    result = cli(*command, *flags)
    assert result.code == 0, result.err
    rows = rows_of(out)
    assert [row["who"] for row in rows] == names and [row["text"] for row in rows] == TEXTS
    assert [row["n"] for row in rows] == ["1", "2", "3", "4"]
    assert [list(row) for row in rows] == [["id", "who", "text", "n", "vector"]] * 4
    if flags:  # the control: the file needs them
        assert cli(*command, "--overwrite").code == 2 or rows_of(out) != rows


def test_tsv_without_quoting(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "table.tsv"
    path.write_text('text\tn\n5" of rain\t1\n"a\t2\n')
    command = ["run", "--input", path, "--task", "embed", "-m", tiny("embed")]
    command += ["--out", out := tmp_path / "out.jsonl"]
    assert cli(*command).code == 2
    assert cli(*command, "--quote", "none", "--overwrite").code == 0
    assert [(row["text"], row["n"]) for row in rows_of(out)] == [('5" of rain', "1"), ('"a', "2")]


def test_mistakes_about_files(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("text;n\nj\u00e4h;1\n".encode("cp1252"))
    (tmp_path / "b.csv").write_text("text,vector\none,two\n")
    (tmp_path / "c.jsonl").write_text('{"text": "one", "n": 1}\n{"text": "two", "n": "x"}\n')
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "one", "n": 2**70}))
    (tmp_path / "e.jsonl").write_text(json.dumps({"text": "one", "n": "\ud800"}))
    embed = ["--task", "embed", "-m", tiny("embed")]
    out = ["--out", tmp_path / "o.jsonl"]
    cases = [
        (["--input", tmp_path / "a.csv", *out], "line 2: not UTF-8 (byte 1); name its encoding"),
        (["--input", tmp_path / "a.csv", "--encoding", "klingon"], "unknown encoding 'klingon'"),
        (["--input", tmp_path / "a.csv", "--encoding", "hex"], "unknown encoding 'hex'"),
        (["--input", tmp_path / "a.csv", "--delimiter", "::"], "it is a single character"),
        (["--input", tmp_path / "b.csv", *out], "has a column 'vector', as the results have"),
        (["--input", tmp_path / "b.csv", *out, "--keep", "x"], "no column 'x' to keep; there are"),
        (["--input", tmp_path / "b.csv", *out, "--keep", "text=id"], "the id is kept anyway"),
        (["--input", tmp_path / "b.csv", "--keep", "text"], "--keep is for files with columns"),
        (["x", "--out", tmp_path / "o.npy", "--keep", "text"], "--keep is for files with columns"),
        (["--input", tmp_path / "c.jsonl", "--out", tmp_path / "o.parquet"], "different kinds"),
        (["--input", tmp_path / "d.jsonl", "--out", tmp_path / "o.parquet"], "has no type of a"),
        (["--input", tmp_path / "e.jsonl", "--out", tmp_path / "o.parquet"], "has no type of a"),
        (["x", "--devices", "cpu,cpu"], "--devices is for --out"),
        (["x", *out, "--devices", "cpu,abacus"], "unknown device 'abacus'"),
        (["--skip-empty", "--keep-empty"], "contradict each other"),
    ]
    for arguments, message in cases:
        result = cli("run", *embed, *arguments)
        assert result.code == 2 and message in result.err, (arguments, result.err)
        assert result.err.splitlines()[-1].startswith("packhorse: ")
    assert not list(tmp_path.glob("o.*"))


def test_a_missing_model_fails_before_a_slow_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()  # which is never written to
    command = [sys.executable, "-m", "packhorse", "run", "--input", "-", "-m", tmp_path / "no"]
    with os.fdopen(read), os.fdopen(write, "w"):
        failed = subprocess.run(command, stdin=read, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and len(failed.stderr.splitlines()) == 1, failed.stderr
    assert "is no folder" in failed.stderr


# Columns ----------------------------------------------------------------------------------------

TYPED = pa.table(
    {
        "id": pa.array(["a", "b", "c"]),
        "text": pa.array(["the horse", "good mule", "bad market"]),
        "when": pa.array([datetime.date(2026, 1, 2), None, datetime.date(1999, 12, 31)]),
        "at": pa.array([1, 2, None], pa.timestamp("us", "UTC")),
        "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("2.25")]),
        "tags": pa.array([["x"], [], None], pa.list_(pa.string())),
        "raw": pa.array([b"\x00\xff", b"", None], pa.binary()),
        "kind": pa.array(["p", "q", "p"]).dictionary_encode(),
        "place": pa.array([{"x": 1, "y": 0.5}, None, {"x": 2, "y": None}]),
        "small": pa.array([1, 2, 3], pa.int8()),
        "nothing": pa.nulls(3, pa.string()),
    }
)


def test_columns_of_parquet_keep_their_types(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    parquet.write_table(TYPED, path := tmp_path / "in.parquet")
    command = ["run", "--input", path, "--task", "embed", "-m", tiny("embed"), "--chunk", "2"]
    assert cli(*command, "--out", tmp_path / "out.parquet").code == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    kept = table.drop_columns(["vector"])
    assert kept.to_pylist() == TYPED.to_pylist()
    types = {field.name: field.type for field in TYPED.schema} | {"kind": pa.string()}
    assert {field.name: field.type for field in kept.schema} == types
    vectors = packhorse.load(tiny("embed")).embed(TYPED["text"].to_pylist())
    assert np.abs(np.array(table["vector"].to_pylist()) - vectors).max() < 1e-6
    assert cli(*command, "--out", tmp_path / "out.jsonl").code == 0
    first = rows_of(tmp_path / "out.jsonl")[0]
    assert (first["when"], first["price"], first["raw"]) == ("2026-01-02", "1.50", "AP8=")
    assert first["place"] == {"x": 1, "y": 0.5} and first["tags"] == ["x"]


def test_which_columns_are_kept(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("title,text,label\na,good horse,x\nb,bad mule,y\n")
    command = ["run", "--input", path, "--task", "classify", "-m", tiny("classify"), "--overwrite"]
    out = tmp_path / "out.parquet"
    results = ["label", "score", "scores"]

    def names(*flags: str) -> list[str]:
        result = cli(*command, "--out", out, *flags)
        assert result.code == 0, result.err
        return parquet.read_schema(out).names

    assert "--keep label=NEW" in cli(*command, "--out", out).err
    assert names("--keep", "none") == ["id", *results]
    assert names("--keep", "title") == ["id", "title", *results]
    renamed = names("--keep", "label=gold", "--keep", "text")
    assert renamed == ["id", "gold", "text", *results]
    assert [row["gold"] for row in rows_of(out)] == ["x", "y"]


def test_lines_of_json_have_the_columns_of_all_lines(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        {"text": "good horse", "n": 1, "tags": []},
        {"text": "bad mule", "n": 2.5, "more": {"a": None}},
        {"text": "market", "id": "x", "more": {"a": "b"}, "tags": ["c"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["run", "--input", path, "--task", "embed", "-m", tiny("embed"), "--chunk", "1"]
    assert cli(*command, "--out", tmp_path / "out.jsonl").code == 0
    for row, line in zip(rows_of(tmp_path / "out.jsonl"), lines, strict=True):
        assert {name: row[name] for name in line} == line
        assert row.keys() == line.keys() | {"id", "vector"}
    lines[2]["id"] = 2  # whole numbers as the others
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = cli(*command, "--out", tmp_path / "out.parquet")
    assert result.code == 0, result.err
    rows = rows_of(tmp_path / "out.parquet")
    assert [row["n"] for row in rows] == [1.0, 2.5, None]
    assert [row["tags"] for row in rows] == [[], None, ["c"]]
    assert [row["more"] for row in rows] == [None, {"a": None}, {"a": "b"}]
    path.write_text(json.dumps({"text": "good horse", "id": 2**70}))
    assert cli(*command, "--overwrite", "--out", tmp_path / "out.parquet").code == 0
    assert [row["id"] for row in rows_of(tmp_path / "out.parquet")] == [str(2**70)]


def test_columns_of_a_saved_dataset(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y"])}
    )
    columns = {"text": ["good horse", "bad mule"], "label": [0, 1]}
    datasets.Dataset.from_dict(columns, features).save_to_disk(tmp_path / "in")
    command = ["run", "--input", tmp_path / "in", "--task", "embed", "-m", tiny("embed")]
    assert cli(*command, "--out", tmp_path / "out.parquet").code == 0
    table = parquet.read_table(tmp_path / "out.parquet").select(["text", "label"])
    assert table.to_pydict() == columns and table.schema.field("label").type == pa.int64()


# Empty texts and files --------------------------------------------------------------------------


def test_an_empty_text_has_the_librarys_vector(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("n,text\n1,good horse\n2,\n3,bad mule\n")
    out = tmp_path / "v.npy"
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--input", path, "--out", out]
    assert "--skip-empty or --keep-empty" in cli(*command).err
    assert cli(*command, "--keep-empty").code == 0
    encoder = packhorse.load(tiny("embed"))
    texts = ["good horse", "", "bad mule"]
    assert np.abs(np.load(out) - encoder.embed(texts)).max() < 1e-6
    assert np.abs(encoder.encode([""]) - np.load(out)[1]).max() < 1e-6
    (row,) = cli("run", "", "--keep-empty", *command[1:5], "--json").document["results"]
    assert np.abs(np.array(row["vector"]) - encoder.embed([""])[0]).max() < 1e-6


@pytest.mark.parametrize(
    "flags", [("--skip-empty", "--keep-empty"), ("--keep-empty", "--skip-empty")]
)
def test_empty_texts_are_not_skipped_in_one_half_and_kept_in_the_other(
    flags: tuple[str, str], cli: Cli, tiny: Tiny, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    good = "".join(json.dumps({"text": text}) + "\n" for text in ("good", "", "bad", "mule"))
    path.write_text(good + '{"text": "end"!')
    modified = path.stat().st_mtime_ns
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--input", path, "--chunk", "1"]
    command += ["--out", out := tmp_path / "v.jsonl"]
    assert cli(*command, flags[0]).code == 2
    path.write_text(good + '{"text": "end"}')  # of the same length and time: the same input
    os.utime(path, ns=(modified, modified))
    result = cli(*command, flags[1])
    assert result.code == 2 and "--skip-empty and --keep-empty" in result.err
    assert cli(*command, flags[0]).code == 0
    assert [row["id"] for row in rows_of(out)] == [0, *([1] if "keep" in flags[0] else []), 2, 3, 4]


@pytest.mark.parametrize("content", ["", "text,n\n", "text,n\n,1\n"])
@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
def test_a_file_without_texts_gives_a_file_without_rows(
    content: str, suffix: str, cli: Cli, tiny: Tiny, tmp_path: Path
) -> None:
    """As `embed([])` gives an array without rows."""
    path = tmp_path / "in.csv"
    path.write_text(content)
    out = tmp_path / f"out{suffix}"
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--input", path, "--skip-empty"]
    result = cli(*command, "--out", out, "--json")
    assert result.code == 0 and result.document["rows"] == 0, result.err
    assert "in.csv holds no text" in result.err
    empty = packhorse.load(tiny("embed")).embed([])
    if suffix == ".npy":
        assert np.load(out).shape == empty.shape == (0, 32) and np.load(out).dtype == empty.dtype
    else:
        assert rows_of(out) == []
    if suffix == ".parquet":
        assert {"id", "vector"} <= set(parquet.read_schema(out).names)
    assert not list(tmp_path.glob("*.partial*"))


# Progress ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "cp1252"])
def test_rows_are_counted_before_they_are_read(suffix: str, encoding: str, tmp_path: Path) -> None:
    from packhorse.data.columns import row_count
    from packhorse.data.delimited import CsvFormat
    from packhorse.data.tables import read_texts

    draw = random.Random(suffix)
    words = ["a", 'quoted "word"', "two\nlines", "comma, here", "\u00e4"]
    texts = [" ".join(draw.choices(words, k=9)) for _ in range(500)]
    path = tmp_path / f"in{suffix}"
    buffer = io.StringIO(newline="")
    if suffix == ".txt":
        buffer.write("\n".join(text.replace("\n", " ") for text in texts))
    elif suffix == ".jsonl":
        buffer.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    else:
        table = csv.writer(buffer, "excel" if suffix == ".csv" else "excel-tab")
        table.writerows([("text", "n"), *((text, 1) for text in texts)])
    if suffix == ".parquet":
        parquet.write_table(pa.table({"text": texts}), path)
    else:
        path.write_bytes(buffer.getvalue().encode(encoding))
    form = CsvFormat(encoding="cp1252" if encoding == "cp1252" else "")
    assert row_count(str(path), form) == 500
    assert len(list(read_texts(path, form=form))) == 500


def test_a_file_as_standard_input_is_counted_beside_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packhorse.data.columns import row_count
    from packhorse.data.delimited import CsvFormat

    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\nthree")
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert row_count("-", CsvFormat()) == 3
        assert stdin.read() == "one\ntwo\nthree"
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert row_count("-", CsvFormat()) == 0


def test_time_left_is_told(
    cli: Cli, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.progress.PAUSE", 0.0)
    path = tmp_path / "in.txt"
    path.write_text("the horse carries sacks to market\n" * 4000)
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--input", path, "--chunk", "100"]
    result = cli(*command, "--out", tmp_path / "v.npy")
    lines = [line for line in result.err.splitlines() if "of 4,000" in line]
    assert len(lines) >= 3 and any(line.endswith(" left") for line in lines), result.err


# Devices and kills ------------------------------------------------------------------------------


def numbered(path: Path, count: int, seed: str = "") -> Path:
    draw = random.Random(seed)
    words = ["the", "horse", "mule", "carries", "sacks", "to", "market"]
    with path.open("w") as file:
        for i in range(count):
            text = " ".join(draw.choices(words, k=draw.randint(1, 40)))
            file.write(json.dumps({"text": text, "n": i, "tags": words[: i % 3]}) + "\n")
    return path


def test_devices_take_turns(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path = numbered(tmp_path / "in.jsonl", 203)
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--input", path, "--chunk", "10"]
    for name, flags in {"one": [], "two": ["--devices", "cpu,cpu"]}.items():
        result = cli(*command, *flags, "--out", tmp_path / f"{name}.jsonl", "--json")
        assert result.code == 0 and result.document["rows"] == 203, result.err
    assert result.document["device"] == "cpu,cpu"
    # One thread each, as one device has here: so the bytes are the same.
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def launch(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "packhorse", *map(str, arguments)]
    # As many threads as in this process: how sums are split shows in the last digit.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)


def kill_and_resume(cli: Cli, command: list[object], out: Path, delays: list[float]) -> None:
    """Kill the command so many seconds after its first rows, again and again; then let it end."""
    state = Path(f"{out}.partial.json")
    for delay in delays:
        process = launch(*command, "--out", out)
        before = state.read_bytes() if state.exists() else b""
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if state.exists() and state.read_bytes() != before:
                time.sleep(delay)
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():
            break
    else:
        document = cli(*command, "--out", out, "--json").document
        assert document["resumed_after"] > 0
    whole = out.with_name(f"whole{out.suffix}")
    assert cli(*command, "--out", whole).code == 0
    assert out.read_bytes() == whole.read_bytes()
    for suffix in (".ids.jsonl", ".meta.json"):
        files = [Path(f"{path}{suffix}") for path in (out, whole)]
        contents = [file.read_bytes() if file.exists() else None for file in files]
        assert contents[0] == contents[1]


def test_two_devices_are_killed_and_go_on(cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    path = numbered(tmp_path / "in.jsonl", 600)
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--input", path, "--chunk", "8"]
    command += ["--devices", "cpu,cpu", "--precision", "ubinary"]
    kill_and_resume(cli, command, tmp_path / "killed.parquet", [0.05])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "precision", "devices"),
    [
        (".npy", "float32", "cpu,cpu"),
        (".npy", "int8", "cpu"),
        (".jsonl", "ubinary", "cpu,cpu"),
        (".jsonl", "float32", "cpu"),
        (".parquet", "float32", "cpu,cpu"),
        (".parquet", "binary", "cpu"),
    ],
)
def test_kills_at_many_moments(
    suffix: str, precision: str, devices: str, cli: Cli, tiny: Tiny, tmp_path: Path
) -> None:
    path = numbered(tmp_path / "in.jsonl", 3000, seed=suffix)
    command = ["run", "--task", "embed", "-m", tiny("embed"), "--input", path, "--chunk", "16"]
    command += ["--precision", precision, "--devices", devices]
    draw = random.Random(suffix + precision + devices)
    delays = [draw.uniform(0, 0.2) for _ in range(4)]
    kill_and_resume(cli, command, tmp_path / f"killed{suffix}", delays)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "suffix"),
    [("classify", ".parquet"), ("label", ".jsonl"), ("fill", ".parquet"), ("hidden", ".parquet")],
)
def test_kills_of_other_tasks(task: str, suffix: str, cli: Cli, tiny: Tiny, tmp_path: Path) -> None:
    head = {"hidden": "embed", "fill": "mlm", "label": "tokens"}.get(task, task)
    path = numbered(tmp_path / "in.jsonl", 1000, seed=task)
    if task == "fill":
        path.write_text(path.read_text().replace('{"text": "', '{"text": "[MASK] '))
    command = ["run", "--task", task, "-m", tiny(head), "--input", path, "--chunk", "8"]
    command += ["--devices", "cpu,cpu"]
    kill_and_resume(cli, command, tmp_path / f"killed{suffix}", [0.03, 0.1])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".parquet"])
@pytest.mark.parametrize("task", ["sparse", "multi"])
def test_kills_of_sparse_and_multi(suffix: str, task: str, cli: Cli, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sentence_transformers")
        base = retrieval_models.bert(tmp_path / "base", "BertModel")
        retrieval_models.m3(base, tmp_path / "m3")
    path = numbered(tmp_path / "in.jsonl", 600, seed=task)
    command = ["run", "--task", task, "-m", tmp_path / "m3", "--input", path, "--chunk", "8"]
    kill_and_resume(cli, command, tmp_path / f"killed{suffix}", [0.02, 0.1])


def test_ctrl_c_ends_it_between_batches(tiny: Tiny, tmp_path: Path) -> None:
    """With a pipe that brings nothing more, and in the middle of a chunk."""
    out = tmp_path / "v.jsonl"
    command = ["run", "--task", "embed", "-m", str(tiny("embed")), "--input", "-", "--chunk", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "packhorse", *command, "--out", str(out)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write("one\ntwo\nthree\n")
        process.stdin.flush()
        state = Path(f"{out}.partial.json")
        deadline = time.monotonic() + 60
        while not state.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        message = process.stderr.read()
    assert code == 130, message
    assert "2 rows are kept" in message and "Traceback" not in message, message
