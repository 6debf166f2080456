"""`packhorse pack`: its table, its JSON, its one-line complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

KEYS = {"packs", "efficiency", "factor", "lower_bound", "complete", "seconds", "algorithm"}


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"a": [0, 4, 4, 0, 2], "b": [1]}))
    return path


def test_one_plan(cli, counts: Path) -> None:
    result = cli("pack", "--histogram", f"{counts}:a", "--json")
    assert result.code == 0
    document = result.document
    assert document.keys() >= KEYS
    assert document["sequences"] == 10 and document["tokens"] == 30 and document["capacity"] == 5
    assert document["packs"] == document["lower_bound"] == 6 and document["efficiency"] == 1.0
    assert document["factor"] == pytest.approx(10 / 6)
    assert "optimum" in result.err and "60.00% full" in result.err


def test_a_search_that_stops_early_says_so(cli, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([0] * 49 + [57] * 350))
    arguments = ("pack", "--histogram", path, "--capacity", 512, "--max-per-pack", 3, "--json")
    stopped = cli(*arguments, "--effort", 1)
    assert stopped.document["complete"] is False
    assert stopped.document["packs"] > stopped.document["lower_bound"]
    assert "stopped after 1 linear programs" in stopped.err and "--effort" in stopped.err
    whole = cli(*arguments)
    assert whole.document["complete"] is True and "--effort" not in whole.err


def test_all_algorithms_side_by_side(cli, counts: Path) -> None:
    result = cli(
        *("pack", "--histogram", f"{counts}:a", "--capacity", 8, "--max-per-pack", 2),
        *("--algorithm", "all", "--json"),
    )
    results = result.document["results"]
    assert [row["algorithm"] for row in results] == ["optimum", "spfhp", "lpfhp", "nnlshp"]
    assert result.document["max_per_pack"] == 2 and result.document["capacity"] == 8
    assert min(row["packs"] for row in results) == results[0]["packs"] == 5


def test_lengths_a_line(cli, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\n4\n1\n")
    document = cli("pack", "--lengths", path, "--json").document
    assert document["packs"] == 2 and document["capacity"] == 4


def test_csv_and_plot(cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "counts.csv"
    path.write_text("length,count\n5,2\n")
    result = cli("pack", "--histogram", path, "--plot", tmp_path / "a.png")
    assert result.code == 0 and "plotted" in result.err
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "--histogram FILE"),
        (["--histogram", "a.json", "--lengths", "b"], "one of them"),
        (["--histogram", "none.json"], "none.json cannot be read"),
        (["--histogram", "{counts}"], "holds a, b"),
        (["--histogram", "{counts}:a", "--capacity", "3"], "longer than the capacity"),
        (["--histogram", "{counts}:a", "--capacity", "0"], "capacity"),
        (["--histogram", "{counts}:a", "--max-per-pack", "0"], "pass 1 or more"),
        (["--histogram", "{counts}:a", "--effort", "0"], "effort must be at least 1"),
        (["--histogram", "{counts}:a", "--plot", "a.gif"], "ends in"),
        (["--histogram", "{counts}:a", "--algorithm", "best"], "best"),
        (["--lengths", "{counts}"], "line 1"),
    ],
)
def test_mistakes_are_one_line(cli, counts: Path, arguments: list[str], part: str) -> None:
    result = cli("pack", *(argument.format(counts=counts) for argument in arguments))
    assert result.code == 2 and part in result.err
    assert result.err.startswith("packhorse: ") and result.err.count("\n") == 1


def test_what_one_algorithm_cannot_do_is_an_error(cli, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("5,1\n500,1\n")
    result = cli("pack", "--histogram", path, "--algorithm", "nnlshp")
    assert result.code == 2 and "too many" in result.err
