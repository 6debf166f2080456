"""Curves of runs: read from their logs, averaged, held against each other, drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packhorse.errors import InputError
from packhorse_bench import curves_plot


def write_log(folder: Path, losses: list[float]) -> Path:
    folder.mkdir()
    lines: list[dict] = [{"step": n, "loss": loss, "x": n} for n, loss in enumerate(losses, 1)]
    lines.insert(1, {"step": 1, "sequences": 3, "evaluation": {"loss": 99.0}})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_steps_are_read_and_evaluations_are_not(tmp_path: Path) -> None:
    run = write_log(tmp_path / "a", [3.0, 2.0])
    assert curves_plot.read(run) == curves_plot.read(run / "log.jsonl") == [(1, 3.0), (2, 2.0)]
    assert curves_plot.read(run, "x") == [(1, 1), (2, 2)]
    with pytest.raises(InputError, match="has no 'y'; it has loss, x"):
        curves_plot.read(run, "y")


@pytest.mark.parametrize(
    ("text", "match"),
    [(None, "cannot be read"), ("no log\n", "not the log"), ("[1]\n", "it has nothing")],
)
def test_what_is_no_log(text: str | None, match: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=match):
        curves_plot.read(path)


def test_an_average_is_of_neighbors() -> None:
    curve = [(0, 0.0), (1, 3.0), (2, 6.0), (3, 9.0)]
    assert curves_plot.averaged(curve, 1) == curve
    assert curves_plot.averaged(curve, 3) == [(0, 1.5), (1, 3.0), (2, 6.0), (3, 7.5)]
    assert curves_plot.smoothed(curve) == curve  # too short to be averaged
    noisy = [(step, float(step % 2)) for step in range(400)]
    assert {y for _, y in curves_plot.smoothed(noisy)[10:-10]} == {0.5}


def test_curves_are_held_against_the_first() -> None:
    first = [(1, 5.0), (2, 4.0), (3, 3.0)]
    endings = curves_plot.endings(
        {"a": first, "b": [(2, 4.5), (3, 2.0), (4, 1.0)], "c": [(9, 1.0)], "d": first[:2]}
    )
    a, b, c, d = endings
    assert (a.apart, a.apart_most, a.last) == (0, 0, 3.0)
    assert (b.steps, b.last, b.apart, b.apart_most) == (3, 1.0, -0.25, -1.0)
    assert (c.apart, c.apart_most) == (None, None) and d.apart == 0


def test_a_line_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.svg"
    long = [(float(step), 1.0 / step) for step in range(1, 100)]
    curves_plot.draw({"bf16": long, "float8": long[:7], "none": []}, path, "two runs", "loss")
    drawn = path.read_text("utf-8")
    for word in ("bf16", "float8", "two runs", "loss"):
        assert f"<!-- {word} -->" in drawn or f">{word}<" in drawn  # as paths, or as text
