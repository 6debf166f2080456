"""`packhorse bench data` on a few docstrings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packhorse.cli import main

pytest.importorskip("pyarrow")


@pytest.mark.slow
def test_three_methods_and_what_surrounds_them(
    tmp_path: Path, vocab: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    note, plot = tmp_path / "note.md", tmp_path / "plot.svg"
    flags = f"--tokenizer {vocab} --megabytes 0.02 --repeats 1 --workers 1 --duplicates 2"
    files = ["--note", str(note), "--plot", str(plot), "--json"]
    assert main(["bench", "data", *flags.split(), *files]) == 0
    document = json.loads(capfd.readouterr().out.splitlines()[-1])
    rows = {row["method"]: row for row in document["rows"]}
    assert set(rows) == {"packhorse", "lists", "reference"}
    assert not any(row["problem"] for row in rows.values())
    assert rows["packhorse"]["over_reference"] > 0 and document["loading_tokens_per_second"] > 0
    assert "| packhorse |" in note.read_text("utf-8") and plot.stat().st_size


def test_an_unknown_method_is_named(vocab: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "data", "--tokenizer", str(vocab), "--methods", "magic"]) == 2
    assert "magic" in capfd.readouterr().err


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(words) + "\n", "utf-8")
    return path
