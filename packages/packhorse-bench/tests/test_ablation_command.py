"""`packhorse bench ablation`: table, JSON, two plots and a note of one run."""

from __future__ import annotations

import email
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from packhorse.reports import docstrings
from packhorse_bench import ablation
from packhorse_bench.commands.ablation import AblationFlags


def test_everything_in_one_run(
    cli: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(str(email.__file__)).parent  # the whole library takes seconds to read
    monkeypatch.setattr(docstrings, "read", partial(docstrings.read, folder))
    note, plot = tmp_path / "note.md", tmp_path / "a.png"
    small = ("--steps", 2, "--rows", 2, "--capacity", 32, "--seeds", 1, "--evaluate-every", 1)
    result = cli("bench", "ablation", *small, "--note", note, "--plot", plot, "--json")
    assert result.code == 0, result.err
    ways = [run["way"] for run in result.document["runs"]]
    assert ways == ["unpacked", "packed", "packed, no mask", "packed, no position reset"]
    assert len(result.document["spread"]) == 2 and "no position reset" in result.out
    text = note.read_text("utf-8")
    assert "| packed, no mask | 0 |" in text and "- noise: 1 unpacked seeds" in text
    for drawn in (plot, tmp_path / "a-training.png"):
        assert drawn.read_bytes().startswith(b"\x89PNG") and drawn.name in result.err


def test_its_flags_are_its_setup() -> None:
    assert asdict(AblationFlags()) == asdict(ablation.AblationSetup())


def test_a_mistake_is_one_line(cli: Callable) -> None:
    result = cli("bench", "ablation", "--max-length", 200)
    assert (
        result.code == 2 and "the 128 tokens of a row" in result.err and result.err.count("\n") == 1
    )
