"""The docstrings of Python's standard library: real English of uneven length, on every machine.

Files are parsed with `ast` and never imported. Tests, editors and installed packages are skipped;
so are private names, texts of a word or two, and duplicates.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "encodings",
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
    """Read each docstring below `root` (default: the standard library), each text once."""
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*.py"))]
    paths = [path for path in paths if _is_public(path)]
    by_text: dict[str, Docstring] = {}
    for done, path in enumerate(paths, 1):
        for name, text in _read_file(folder / path, ".".join(path.with_suffix("").parts)):
            if len(text) >= SHORTEST:
                by_text.setdefault(text, Docstring(name, text))
        if progress is not None:
            progress(done, len(paths))
    return list(by_text.values())


def _is_public(path: Path) -> bool:
    public = (part.startswith("__init__") or not part.startswith("_") for part in path.parts)
    return SKIPPED_FOLDERS.isdisjoint(path.parts) and all(public)


def _read_file(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escape sequences in the library's strings
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # a broken file has no docstrings
        return
    yield from _docstrings_below(tree, module.removesuffix(".__init__"))


def _docstrings_below(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_"):
                continue
            yield from _docstrings_below(child, f"{name}.{child.name}")
        elif isinstance(child, ast.If | ast.Try):
            yield from _docstrings_below(child, name)
