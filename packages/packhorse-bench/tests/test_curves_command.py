"""`packhorse bench curves`: the logs of runs as a table, JSON and a figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = []
    for name, last in (("one", 1.0), ("two", 1.5)):
        (tmp_path / name).mkdir()
        lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": last}]
        log = tmp_path / name / "log.jsonl"
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        folders.append(tmp_path / name)
    return folders


def test_table_json_and_figure(cli, runs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "a.png"
    result = cli("bench", "curves", runs[0], runs[1] / "log.jsonl", "--plot", plot, "--json")
    assert result.code == 0, result.err
    first, second = result.document["runs"]
    assert (first["run"], second["run"]) == ("one", "two")
    assert (second["steps"], second["last"], second["apart"], second["apart_most"]) == (
        2,
        1.5,
        0.25,
        0.5,
    )
    assert "at most" in result.err and "0.2500" in result.err
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_named_twice_goes_by_its_path(cli, runs: list[Path]) -> None:
    result = cli("bench", "curves", runs[0], runs[0] / "log.jsonl", "--json")
    assert [run["run"] for run in result.document["runs"]] == [
        str(runs[0]),
        str(runs[0] / "log.jsonl"),
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no run is named"),
        (["nowhere"], "cannot be read"),
        (["nowhere", "--plot", "a.txt"], "ends in"),
    ],
)
def test_mistakes_are_one_line(cli, arguments: list[str], part: str) -> None:
    result = cli("bench", "curves", *arguments)
    assert result.code == 2 and part in result.err
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1
