"""Imports between the rooms of packhorse.data point down, as its docstring tells."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import packhorse.data

HOME = Path(packhorse.data.__file__).parent
LEVELS = re.search(r"^`(.* > .*)`$", packhorse.data.__doc__ or "", re.M)


def levels() -> dict[str, int]:
    """Each room by its level, the highest first."""
    assert LEVELS is not None
    rooms = [level.split(" | ") for level in LEVELS[1].split(" > ")]
    return {room: level for level, names in enumerate(rooms) for room in names}


def imported(source: str) -> set[str]:
    """The rooms that a module imports from, wherever the statement stands."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    return {name.split(".")[2] for name in names if name.startswith("packhorse.data.")}


def against(room: str, source: str) -> set[str]:
    level = levels()
    return {second for second in imported(source) - {room} if level[second] <= level[room]}


def test_every_room_has_its_level() -> None:
    result = {path.stem for path in HOME.iterdir() if path.stem.isidentifier()}
    assert result - {"__init__", "__pycache__"} == levels().keys()


def test_imports_between_rooms_point_down() -> None:
    for path in HOME.rglob("*.py"):
        if path != HOME / "__init__.py":
            room = path.relative_to(HOME).parts[0].removesuffix(".py")
            assert not against(room, path.read_text("utf-8")), path


def test_an_import_that_points_up_is_found() -> None:
    lazy = "def late():\n    from packhorse.data import tasks\n"
    assert against("tables", lazy) == {"tasks"}
    assert against("packed", "from packhorse.data.sources.files import find") == {"sources"}
    assert against("tasks", lazy) == set()
