"""`packhorse bench port`: a table, JSON, a note."""

from __future__ import annotations

from pathlib import Path

SMALL = ("--batch", "2", "--iterations", "2", "--steps", "2", "--repeats", "1", "--device", "cpu")


def test_table_json_and_note(cli, tmp_path: Path) -> None:
    result = cli("bench", "port", *SMALL, "--json", "--note", tmp_path / "note.md")
    assert result.code == 0, result.err
    ways = [row["way"] for row in result.document["rows"]]
    assert ways == ["plain loop", "port", "port, traced"]
    assert result.document["rows"][2]["largest_difference"] == 0
    assert "x plain" in result.err
    assert "packhorse" in (tmp_path / "note.md").read_text()


def test_what_cannot_be_measured_is_one_line(cli) -> None:
    result = cli("bench", "port", "--steps", "3", "--iterations", "2")
    assert result.code == 2 and "--iterations 2" in result.err
