"""The files of a project: which a script imports, what its folders define, what its packages have.

    project = Project.of(Path("train.py"))
    project.files      # train.py, and the modules of the user's own that it imports, in turn
    project.defined    # names of functions, classes and attributes in them

Files are parsed and packages are looked up; nothing is imported. A module is the user's own if it
lies in a folder that Python would search: the script's, or the project's; where a file changes
`sys.path`, also the three folders above it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, find_spec
from pathlib import Path

from packhorse.errors import InputError

SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}
FOLDERS_ABOVE = 3
# A module that says one of these may have names that its text does not show.
DYNAMIC = re.compile(r"import \*|__getattr__|__path__|globals\(|sys\.modules|[Ll]azy|setattr\(")


@dataclass
class Project:
    """A script or a folder, and the files that belong to it."""

    path: Path
    files: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> Project:
        """All scripts of a folder; or a script and the modules of its own that it imports."""
        project = cls(path)
        if path.is_dir():
            project.files = sorted(scripts(path))
            if not project.files:
                raise InputError(f"{path} has no Python files; name a script, or its folder")
            return project
        pending = [path]
        while pending:
            file = pending.pop(0)
            if file not in project.files:
                project.files.append(file)
                pending += [own for own in project.imported_files(file) if own.exists()]
        return project

    def parsed(self, file: Path) -> ast.Module | None:
        """The syntax tree of a file; None if it cannot be read or parsed."""
        try:
            return ast.parse(decode_source(file.read_bytes()))
        except (OSError, SyntaxError, ValueError):
            return None

    def imported_files(self, file: Path) -> Iterator[Path]:
        """The user's own files that a file imports."""
        tree = self.parsed(file)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self.own_module(alias.name, file) or ()
            elif isinstance(node, ast.ImportFrom):
                members = [alias.name for alias in node.names]
                name = "." * node.level + (node.module or "")
                yield from self.own_module(name, file, members) or ()

    def own_module(self, name: str, file: Path, members: Iterable[str] = ()) -> list[Path] | None:
        """The files that an import of a module of the user's own reads; None if it is not one."""
        parts = [part for part in name.lstrip(".").split(".") if part]
        level = len(name) - len(name.lstrip("."))
        folders = [file.parents[level - 1]] if level else self.search_path(file)
        for folder in folders:
            files = _walk(folder, parts, members)
            if files or (files is not None and (level or not _spec(parts[0]))):
                return files
        return None

    def search_path(self, file: Path) -> list[Path]:
        """The folders in which a file's own modules may lie."""
        top = self.path if self.path.is_dir() else self.path.parent
        folders = dict.fromkeys([top, file.parent])
        for changed in (self.path, file):
            if changed.is_file() and b"sys.path" in changed.read_bytes():
                folders |= dict.fromkeys(changed.resolve().parents[1 : 1 + FOLDERS_ABOVE])
        return list(folders)

    @cached_property
    def defined(self) -> frozenset[str]:
        """Names of functions, classes and attributes that the files define."""
        names = set()
        for file in self.files:
            if tree := self.parsed(file):
                names |= definitions(tree)
        return frozenset(names)

    @cached_property
    def requirements(self) -> dict[str, Path]:
        """By package, the requirements.txt beside the project's files that names it."""
        start = self.path.resolve()
        start = start if start.is_dir() else start.parent
        folders = {*(file.resolve().parent for file in self.files), start}
        for above in start.parents[:FOLDERS_ABOVE]:
            folders.add(above)
        named = {}
        for file in sorted(folder / "requirements.txt" for folder in folders):
            if file.is_file():
                for line in file.read_text("utf-8", errors="replace").splitlines():
                    if match := re.match(r"[A-Za-z0-9._-]+", line.strip()):
                        named[normalized(match[0])] = file
        return named


def normalized(package: str) -> str:
    """The name of a package as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def scripts(folder: Path) -> Iterator[Path]:
    """The Python files of a folder, without hidden ones and installed packages."""
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        is_skipped = any(part.startswith(".") or part in SKIPPED for part in parts)
        if not is_skipped and path.is_file():
            yield path


def definitions(tree: ast.AST) -> set[str]:
    """Names of functions and classes, and of attributes that are assigned."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def _walk(folder: Path, parts: list[str], members: Iterable[str]) -> list[Path] | None:
    """The files that importing `parts` from a folder reads; None if there is no such module."""
    files = []
    for index, part in enumerate(parts):
        package = folder / part
        init = package / "__init__.py"
        module = folder / f"{part}.py"
        if init.is_file() or (package.is_dir() and not module.is_file()):
            files += [init] if init.is_file() else []
            folder = package
        elif module.is_file():
            return [*files, module]
        elif index:
            return files  # a name in the package, or a module that is missing
        else:
            return None
    for member in members:
        files += [
            path
            for path in (folder / f"{member}.py", folder / member / "__init__.py")
            if path.is_file()
        ]
    return files


# What is installed


def _spec(module: str) -> ModuleSpec | None:
    """Where a module without dots is installed."""
    try:
        return find_spec(module)
    except (ImportError, ValueError):  # as of `__main__`
        return None


def missing_in_installed(module: str, members: Iterable[str]) -> str:
    """A submodule or name that the installed package surely lacks, or ""."""
    top, *rest = module.split(".")
    spec = _spec(top)
    locations = [Path(path) for path in (spec and spec.submodule_search_locations) or ()]
    for index, part in enumerate(rest):
        if not locations or _is_dynamic(locations[0] / "__init__.py"):
            return ""
        folder = locations[0]
        if (folder / part).is_dir():
            locations = [folder / part]
        elif (folder / f"{part}.py").is_file() and index + 1 == len(rest):
            return _missing_name(folder / f"{part}.py", members)
        else:
            return "" if any(folder.glob(f"{part}.*")) else ".".join([top, *rest[: index + 1]])
    if not locations:
        return ""
    return _missing_name(locations[0] / "__init__.py", members, locations[0])


def _is_dynamic(file: Path) -> bool:
    return not file.is_file() or bool(DYNAMIC.search(file.read_text("utf-8", errors="replace")))


def _missing_name(file: Path, members: Iterable[str], folder: Path | None = None) -> str:
    """A name that the text of a module does not have."""
    if _is_dynamic(file):
        return ""
    words = set(re.findall(r"\w+", file.read_text("utf-8", errors="replace")))
    for member in members:
        submodule = folder and (any(folder.glob(f"{member}.*")) or (folder / member).is_dir())
        if member != "*" and member not in words and not submodule:
            return member
    return ""
