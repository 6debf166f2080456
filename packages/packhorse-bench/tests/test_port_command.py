"""`packhorse bench port`: a table, JSON, a note."""

from __future__ import annotations

from pathlib import Path

SMALL = ("--batch", "2", "--iterations", "2", "--steps", "2", "--repeats", "1", "--device", "cpu")


def test_table_json_and_note(cli, tmp_path: Path) -> None:
    said = cli("bench", "port", *SMALL, "--json", "--note", tmp_path / "note.md")
    assert said.code == 0, said.err
    ways = [row["way"] for row in said.document["rows"]]
    assert ways == ["plain loop", "port", "port, traced"]
    assert said.document["rows"][2]["largest_difference"] == 0
    assert "x plain" in said.err
    assert "packhorse" in (tmp_path / "note.md").read_text()


def test_what_cannot_be_measured_is_one_line(cli) -> None:
    said = cli("bench", "port", "--steps", "3", "--iterations", "2")
    assert said.code == 2 and "--iterations 2" in said.err
