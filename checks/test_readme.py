"""README's own lines run, its picture is that of the notes, and the commands of the site exist."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from packhorse.cli import COMMANDS, PLUGINS

from .documented import NEEDS, REPOSITORY, blocks, documents

README = REPOSITORY / "README.md"


def test_the_six_lines_of_python(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks(README) if block.language == "python")
    names: dict = {}
    exec(block.text, names)
    assert names["vectors"].shape == (2, 384)
    assert "Encoder(" in capsys.readouterr().out


def test_every_command_is_in_the_table_of_commands() -> None:
    page = (REPOSITORY / "docs" / "reference" / "commands.md").read_text("utf-8")
    assert [name for name in (*COMMANDS, *PLUGINS) if f"`packhorse {name}" not in page] == []


def test_the_picture_is_drawn_from_the_notes() -> None:
    picture = runpy.run_path(str(REPOSITORY / "docs" / "picture.py"))
    drawn = (REPOSITORY / "docs" / "picture.svg").read_text("utf-8")
    assert drawn == picture["draw"](), "run `python docs/picture.py`"
    shown = README.read_text("utf-8")
    assert [group.note for group in picture["GROUPS"] if group.note not in shown] == []


def test_blocks_say_what_they_need_in_known_words() -> None:
    """`make wheel` runs the blocks of these documents that need nothing."""
    all_blocks = [block for document in documents() for block in blocks(document)]
    assert {block.needs for block in all_blocks} <= {"", *NEEDS}
    assert sum(block.language in ("sh", "python") and not block.needs for block in all_blocks) >= 15


def test_marks_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs: gpu -->\n```sh\na \\\n  b\n# c\nd  # e\n```\n\n<!-- needs: no -->\n\n"
        "Text.\n\n```python\nf\n```\n"
    )
    first, second = blocks(page)
    assert (first.language, first.needs, first.line) == ("sh", "gpu", 3)
    assert first.commands == ["a    b", "d  # e"]
    assert (second.language, second.needs, second.text) == ("python", "", "f\n")
