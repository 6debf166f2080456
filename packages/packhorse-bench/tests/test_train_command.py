"""`packhorse bench train`: table, JSON, CSV, plot and note of one run, and its complaints."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest

from packhorse_bench.training import TrainRow

KEYS = {field.name for field in fields(TrainRow)}
SMALL = ("--device", "cpu", "--batch", 4, "--steps", 1, "--repeats", 1)


def test_everything_in_one_run(cli, tiny, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    note, plot, table = (tmp_path / name for name in ("note.md", "a.png", "a.csv"))
    result = cli(
        *("bench", "train", "-m", tiny("embed"), "--max-length", 32, "--peers", "padded", *SMALL),
        *("--note", note, "--plot", plot, "--csv", table, "--json"),
    )
    assert result.code == 0, result.err
    document = result.document
    packhorse_row, padded = document["rows"]
    assert set(packhorse_row) == set(padded) == KEYS and packhorse_row["fill"] == 1 > padded["fill"]
    assert packhorse_row["loss"] == pytest.approx(padded["loss"], abs=1e-5)
    assert "pretraining, like Wikipedia" in document["workload"] and document["dtype"] == "fp32"
    assert "x padded" in result.err and "transformers, padded to 32" in result.err
    assert "| packhorse, packed |" in note.read_text("utf-8")
    assert plot.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["way"] for line in lines] == [packhorse_row["way"], padded["way"]]


@pytest.mark.slow
def test_fine_tuning_alone(cli) -> None:
    result = cli(
        *("bench", "train", "--config", "tiny", "--task", "classify", "--peers", "none", *SMALL),
        "--json",
    )
    assert result.code == 0, result.err
    (row,) = result.document["rows"]
    assert row["over_padded"] is None and row["tokens_per_second"] > 0
    assert "fine-tuning, like SST-2" in result.document["workload"]
    assert result.document["learning"] == "AdamW, dropout 0.1"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--batch", "0"], "--batch 0"),
        (["--peers", "keras"], "unknown peer 'keras'"),
        (["--task", "answer"], "answer"),
        (["--dtype", "fp16"], "fp16"),
        (["--csv", "none/a.csv"], "no folder"),
        (["--plot", "a.txt"], "ends in"),
    ],
)
def test_mistakes_are_one_line(cli, arguments: list[str], part: str) -> None:
    result = cli("bench", "train", "--config", "tiny", *arguments)
    assert result.code == 2 and part in result.err
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1
