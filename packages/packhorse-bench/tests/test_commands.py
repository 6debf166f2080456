"""`packhorse bench`: tables, JSON, plots and notes of both benches, and their complaints."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest


def test_encode_with_a_model(cli, tiny, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    note, plot = tmp_path / "note.md", tmp_path / "a.png"
    result = cli(
        *("bench", "encode", "-m", tiny("embed"), "--peers", "transformers", "--count", 12),
        *("--workload", "squad", "--max-length", 40, "--repeats", 1, "-bs", 4),
        *("--note", note, "--plot", plot, "--json"),
    )
    assert result.code == 0
    document = result.document
    engines = [(row["engine"], row["order"]) for row in document["rows"]]
    assert engines == [
        (engine, order)
        for engine in ("packhorse", "transformers")
        for order in ("arrival", "sorted")
    ]
    assert all(row["cosine_min"] > 0.9999 for row in document["rows"])
    assert (
        document["date"] == date.today().isoformat()
        and "squad: 12 sequences" in document["workload"]
    )
    assert "x hf sorted" in result.err
    text = note.read_text("utf-8")
    assert document["date"] in text and "| transformers | fp32 | sorted |" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_encode_with_random_weights_and_a_histogram(cli, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("5,3\n30,1\n900,1\n")
    result = cli(
        *("bench", "encode", "--config", "tiny", "--histogram", path, "--max-length", 32),
        *("--count", 8, "--peers", "none", "--repeats", 1, "--json"),
    )
    assert result.code == 0
    assert [row["engine"] for row in result.document["rows"]] == ["packhorse"] * 2
    assert result.document["model"] == "random weights, tiny"
    assert "(5 to 32)" in result.document["workload"]


def test_packing_of_a_mix(cli, tmp_path: Path) -> None:
    result = cli(
        *("bench", "packing", "--workload", "normal", "--count", 2000, "--depths", "2, 0"),
        *("--algorithms", "optimum,lpfhp", "--plot", tmp_path / "a.svg", "--json"),
    )
    assert result.code == 0
    rows = result.document["rows"]
    assert [(row["max_per_pack"], row["algorithm"]) for row in rows] == [
        *((2, "optimum"), (2, "lpfhp"), (None, "optimum"), (None, "lpfhp"))
    ]
    assert all(row["packs"] >= row["lower_bound"] for row in rows)
    assert "unlimited" in result.err and (tmp_path / "a.svg").exists()


def test_a_note_holds_the_command(tmp_path: Path) -> None:
    """In a process of its own: the command is the process's."""
    command = ["bench", "packing", "--count", "500", "--depths", "3", "--note", "a note.md"]
    subprocess.run(
        [sys.executable, "-m", "packhorse", *command],
        *(0, None),
        cwd=tmp_path,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    text = (tmp_path / "a note.md").read_text("utf-8")
    assert "packhorse bench packing --count 500 --depths 3 --note 'a note.md'" in text
    assert date.today().isoformat() in text and "| 3 | optimum |" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["encode", "--peers", "keras"], "unknown peer 'keras'"),
        (["encode", "--count", "0"], "--count 0"),
        (["encode", "--texts", "a.txt", "--workload", "squad"], "pass one"),
        (["encode", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["encode", "--histogram", "none.json"], "cannot be read"),
        (["encode", "--workload", "books"], "books"),
        (["encode", "--note", "none/a.md"], "no folder"),
        (["encode", "--repeats", "0"], "--repeats 0"),
        (["packing", "--depths", "two"], "'two' is not a number"),
        (["packing", "--algorithms", "best"], "'best'"),
        (["packing", "--capacity", "3", "--count", "9"], "longer than the capacity"),
        (["packing", "--plot", "a.txt"], "ends in"),
    ],
)
def test_mistakes_are_one_line(cli, arguments: list[str], part: str) -> None:
    result = cli("bench", *arguments)
    assert result.code == 2 and part in result.err
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1


def test_help_says_what_there_is(cli) -> None:
    result = cli("bench", "--help")
    assert result.code == 0 and "encode" in result.out and "packing" in result.out
