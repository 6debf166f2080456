"""`packhorse bench serve`: table, JSON, CSV, plot and note of one run over real servers."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest

from packhorse_bench.serving_figures import Point, ServeRow

SMALL = ("--config", "tiny", "--device", "cpu", "--threads", 1, "--rounds", 1, "--repeats", 1)
SMALL += ("--short", 0.3, "--long", 0.3, "--connections", 16)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short texts of the random model's own words."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    lines = (" ".join(f"w{i}" for i in range(count)) for count in range(4, 40))
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


@pytest.mark.slow
def test_everything_in_one_run(cli, texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    note, plot, table = (tmp_path / name for name in ("note.md", "a.png", "a.csv"))
    result = cli(
        *("bench", "serve", *SMALL, "--texts", texts, "--peers", "infinity"),
        *(
            "--infinity",
            tmp_path / "none",
            "--note",
            note,
            "--plot",
            plot,
            "--csv",
            table,
            "--json",
        ),
    )
    assert result.code == 0, result.err
    document = result.document
    packhorse_row, infinity = document["rows"]
    assert set(packhorse_row) == names(ServeRow) and packhorse_row["problem"] is None
    assert (
        packhorse_row["cosine_min"] > 0.99999
        and packhorse_row["most_rate"] > 0
        and packhorse_row["of_runner"] > 0
    )
    assert "make peers" in infinity["problem"] and "make peers" in result.err
    assert {point["purpose"] for point in document["points"]} >= {"most", "search", "confirm"}
    assert document["runner"]["alone"] > 0 and "36 texts of a file" in document["workload"]
    assert "| packhorse |" in note.read_text("utf-8")
    assert plot.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(document["points"]) and set(lines[0]) == names(Point)


@pytest.mark.slow
def test_against_sentence_transformers(cli, texts: Path) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("fastapi")
    result = cli(
        *("bench", "serve", *SMALL, "--texts", texts, "--peers", "sentence-transformers"),
        *("--limit-ms", 5000, "--json"),
    )
    assert result.code == 0, result.err
    packhorse_row, peer = result.document["rows"]
    assert (
        peer["problem"] is None and min(packhorse_row["cosine_min"], peer["cosine_min"]) > 0.99999
    )
    assert packhorse_row["held_rate"] > 0 and peer["over_peer"] == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--rounds", "0"], "--rounds 0"),
        (["--peers", "keras"], "unknown peer 'keras'"),
        (["--texts", "none.txt"], "none.txt"),
        (["--csv", "none/a.csv"], "no folder"),
        (["--plot", "a.txt"], "ends in"),
    ],
)
def test_mistakes_are_one_line(cli, arguments: list[str], part: str) -> None:
    result = cli("bench", "serve", "--config", "tiny", *arguments)
    assert result.code == 2 and part in result.err
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1
