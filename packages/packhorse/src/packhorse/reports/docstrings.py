"""The docstrings of Python's own standard library: real English of very uneven length, everywhere.

Files are parsed with `ast` and never imported. Tests, editors and what is installed beside the
library are left out; so are private names, and texts that say nothing (a word or two) or say what
another one says.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "encodings"),
}
SHORTEST = 20  # characters


@dataclass(frozen=True, slots=True)
class Docstring:
    """A text and the dotted name of what it documents."""

    name: str
    text: str


def read(
    root: Path | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Docstring]:
    """Every docstring below `root` (the standard library by default), by name, each text once."""
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    places = [path.relative_to(folder) for path in sorted(folder.rglob("*.py"))]
    places = [place for place in places if _wanted(place)]
    found: dict[str, Docstring] = {}
    for done, place in enumerate(places, 1):
        for name, text in _of_file(folder / place, ".".join(place.with_suffix("").parts)):
            if len(text) >= SHORTEST:
                found.setdefault(text, Docstring(name, text))
        if progress is not None:
            progress(done, len(places))
    return list(found.values())


def _wanted(place: Path) -> bool:
    public = (part.startswith("__init__") or not part.startswith("_") for part in place.parts)
    return SKIPPED.isdisjoint(place.parts) and all(public)


def _of_file(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own strings
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # a broken file has no docstrings to offer
        return
    yield from _below(tree, module.removesuffix(".__init__"))


def _below(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_"):
                continue
            yield from _below(child, f"{name}.{child.name}")
        elif isinstance(child, ast.If | ast.Try):
            yield from _below(child, name)
