"""The README's own lines run, and the commands it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packhorse.cli import COMMANDS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_six_lines_of_python(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(block, names)
    assert names["vectors"].shape == (2, 384)
    assert "Encoder(" in capsys.readouterr().out


def test_the_commands_are_there() -> None:
    named = set(re.findall(r"packhorse (\w+)", README))
    assert set(COMMANDS) <= named
    assert named & {"demo", "run", "pack"}
