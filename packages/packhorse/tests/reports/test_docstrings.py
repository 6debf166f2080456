"""Docstrings are read, never run."""

from __future__ import annotations

import email
from pathlib import Path

from packhorse.reports import docstrings

SOURCE = '''"""What this module is about, in a line."""
raise RuntimeError("this file must never be imported")

class Horse:
    """An animal that carries other people's sacks."""
    def carry(self):
        """Carry one sack to the market and come back."""
    def _secret(self):
        """Nobody is supposed to read about this one."""

if True:
    async def trot():
        """Two beats, diagonal, for as long as it takes."""

def short():
    """Too short."""

def same():
    """Carry one sack to the market and come back."""
'''


def names(root: Path) -> list[str]:
    return [docstrings_read.name for docstrings_read in docstrings.read(root)]


def test_what_is_read(tmp_path: Path) -> None:
    for place in ("stable/__init__.py", "test/stable.py", "stable/_private.py", "idlelib/a.py"):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCE, "utf-8")
    (tmp_path / "broken.py").write_text('"""A file that does not parse."""\ndef', "utf-8")
    assert names(tmp_path) == ["stable", "stable.Horse", "stable.Horse.carry", "stable.trot"]


def test_progress_and_texts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE, "utf-8")
    steps = []
    docstrings_read = docstrings.read(tmp_path, lambda *at: steps.append(at))
    assert steps == [(1, 1)]
    assert docstrings_read[0].text == "What this module is about, in a line."


def test_the_library_has_real_ones() -> None:
    docstrings_read = docstrings.read(Path(str(email.__file__)).parent)
    assert len(docstrings_read) > 100
    assert any(docstring.name == "message.Message.as_string" for docstring in docstrings_read)
    assert len({docstring.text for docstring in docstrings_read}) == len(docstrings_read)
