"""`packhorse port --check`: how each line of a script would be handled, without running it.

A script is parsed (`ast`), and so are the modules of its own that it imports, or all files of a
folder (`project`); other imports are looked up but not executed. So the check is fast and safe, and
does not see what only a run would show: a name created at run time, an installed package that
fails when it is imported. Each finding is one of four kinds: it runs *as is*, is *emulated*,
is *ignored* (and why), or *fails* (and what to do). Nothing here imports torch.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.util import decode_source, find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

from packhorse.errors import InputError
from packhorse_port import enums
from packhorse_port.names import (
    COMPANIONS,
    CUSTOM_OPS,
    EXTRAS,
    NAMES,
    OF_MODULES,
    PACKAGES,
    POPDIST,
    Kind,
    Name,
    install_line,
    nearest,
)
from packhorse_port.patch import SCALING
from packhorse_port.project import Project, definitions, missing_in_installed, normalized
from packhorse_port.script import IPU_MODULES, POPART, SDK
from packhorse_port.syntax import NameOrigins, dotted
from packhorse_port.tensorflow import names as tensorflow
from packhorse_port.torchvision import PROVIDES

ENUMS = {
    name: [member.name for member in value]
    for name, value in vars(enums).items()
    if isinstance(value, type) and issubclass(value, Enum) and value.__module__ == enums.__name__
}
COMPANION_TOPS = {name.partition(".")[0] for name in COMPANIONS}


class Finding(NamedTuple):
    """One name in one line: how it is handled, and why or what to do."""

    line: int
    kind: Kind
    name: str
    meaning: str
    source: str = ""
    file: str = ""


@dataclass(frozen=True)
class CheckReport:
    """The findings of one file or several, by file and line."""

    findings: tuple[Finding, ...]
    plain: int  # lines with a statement and no finding

    def count(self, kind: Kind) -> int:
        return sum(finding.kind == kind for finding in self.findings)

    @property
    def lines(self) -> int:
        """Lines with a statement or a finding."""
        return self.plain + len({(finding.file, finding.line) for finding in self.findings})

    @property
    def share(self) -> float:
        """The share of these lines that run as they are, emulated or not."""
        failing = {(item.file, item.line) for item in self.findings if item.kind == "fails"}
        return 1 - len(failing) / self.lines if self.lines else 1.0

    def document(self) -> dict[str, Any]:
        """The report as plain values, for --json."""
        return {
            "findings": [finding._asdict() for finding in self.findings],
            "counts": {kind: self.count(kind) for kind in get_args(Kind)},
            "plain_lines": self.plain,
            "lines": self.lines,
            "share": round(self.share, 4),
            "runs": not self.count("fails"),
        }

    def last_line(self) -> str:
        """The counts, in one line."""
        counts = ", ".join(f"{self.count(kind)} {kind}" for kind in get_args(Kind))
        share = int(1000 * self.share) / 10  # rounded down, so that 100 % is all of them
        return f"{counts}; of {self.lines:,} lines {share:g} % run as they are"


def examine_project(project: Project) -> dict[Path, CheckReport]:
    """Check every file of a project."""
    reports = {}
    for file in project.files:
        try:
            reports[file] = examine(file.read_bytes(), file, project)
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    return reports


def together(reports: Iterable[CheckReport]) -> CheckReport:
    """One report of several files."""
    reports = list(reports)
    findings = tuple(finding for report in reports for finding in report.findings)
    return CheckReport(findings, sum(report.plain for report in reports))


def examine(source: bytes, path: Path, project: Project | None = None) -> CheckReport:
    """Check one file, the one at `path`."""
    try:
        text = decode_source(source)
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        return CheckReport((Finding(line, "fails", "syntax", f"{error}", "", str(path)),), 0)
    lines = text.split("\n")  # as Python numbers them; splitlines also ends them at a form feed
    project = project or Project(path, [path])
    file = CheckedFile(path, tree, NameOrigins(tree, functions=True), project)
    findings = {
        (finding.line, finding.name): finding._replace(
            source=lines[finding.line - 1].strip(), file=str(path)
        )
        for finding in file.findings()
    }
    ordered = sorted(findings.values(), key=lambda finding: (finding.line, finding.name))
    statements = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    return CheckReport(tuple(ordered), len(statements - {finding.line for finding in ordered}))


@dataclass(frozen=True)
class CheckedFile:
    """A file that is checked, and the project that it belongs to."""

    path: Path
    tree: ast.Module
    origins: NameOrigins
    project: Project

    def findings(self) -> Iterator[Finding]:
        yield from self.imports()
        yield from _uses(self.tree, self.origins, self.project.defined | definitions(self.tree))
        yield from _scaling_arguments(self.tree, self.origins)
        yield from _ipu_uses(self.tree, self.origins)

    def imports(self) -> Iterator[Finding]:
        """Every imported module, wherever the statement is."""
        guarded = _guarded(self.tree)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                modules = [(alias.name, []) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                members = [alias.name for alias in node.names]
                modules = [(f"{'.' * node.level}{node.module or ''}", members)]
                if f"{node.module}.{members[0]}".startswith(IPU_MODULES):
                    modules = [(f"{node.module}.{member}", []) for member in members]
            else:
                continue
            for name, members in modules:
                kind, meaning = self.module(name, members)
                if kind == "fails" and node in guarded:
                    kind, meaning = "as is", "missing here, which the script expects"
                yield Finding(node.lineno, kind, name, meaning)

    def module(self, name: str, members: list[str]) -> Name:
        """How an import of a module, or of these members of it, is handled."""
        top = name.partition(".")[0]
        if not top and self.path == self.project.path:
            return Name("fails", "a script has no package: import it by its name")
        if name in POPDIST:
            return Name("emulated", POPDIST[name])
        if top in COMPANION_TOPS and not find_spec(top):
            return _companion(name)
        if name.startswith(IPU_MODULES):
            return _ipu_module(name)
        if self.project.own_module(name, self.path) is not None:
            return Name("as is", "a file of yours")
        if not top:
            return Name("fails", "there is no such file")
        if top == "poptorch":
            return _poptorch_module(name)
        if top in SDK:
            return Name("fails", SDK[top])
        for module, meaning in tensorflow.KERAS_2.items():
            if name == module or name.startswith(f"{module}."):
                return Name("fails", meaning)
        if top in ("__future__", "__main__") or top in sys.stdlib_module_names:
            return Name("as is", "Python's own")
        if find_spec(top):
            if missing := missing_in_installed(name, members):
                return Name("fails", f"the installed {top} has no {missing}")
            return Name("as is", "installed")
        if top == "torchvision":
            return Name("emulated", "packhorse's datasets and transforms: it is not installed")
        return Name("fails", f"not installed: {self.install_line(top)}")

    def install_line(self, module: str) -> str:
        """How to install a missing module, or which requirements of the project name it."""
        package = normalized(PACKAGES.get(module, module))
        if file := self.project.requirements.get(package):
            return f"it is in {file.name}"
        return install_line(module)


def _scaling_arguments(tree: ast.Module, origins: NameOrigins) -> Iterator[Finding]:
    """Arguments of PopTorch's optimizers that have no effect."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and origins.path(node.func).startswith("poptorch.optim."):
            for word in node.keywords:
                if word.arg in SCALING:
                    reason = "kept, not applied: it only keeps half precision in range"
                    yield Finding(word.value.lineno, "ignored", word.arg, reason)


def _guarded(tree: ast.Module) -> set[ast.AST]:
    """Nodes inside a `try` that catches a failed import."""
    catching = {"", "ImportError", "ModuleNotFoundError", "Exception"}
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for handler in node.handlers
        if catching & set(map(dotted, _exception_types(handler.type)))
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _exception_types(expression: ast.expr | None) -> list[ast.expr | None]:
    return list(expression.elts) if isinstance(expression, ast.Tuple) else [expression]


def _ipu_module(name: str) -> Name:
    top = "keras" if name.startswith("keras.") else "tensorflow"
    if not find_spec(top):
        return Name("fails", f"{top} is not installed: pip install 'packhorse[{EXTRAS[top]}]'")
    return tensorflow.lookup(tensorflow.short_name(name))


def _ipu_uses(tree: ast.Module, origins: NameOrigins) -> Iterator[Finding]:
    uses = [*tensorflow.uses(tree, origins), *tensorflow.refused_connections(tree)]
    for line, name, entry in uses:
        yield Finding(line, entry.kind, name, entry.meaning)


def _companion(name: str) -> Name:
    """How a module beside poptorch is handled, or a name of it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        known = ".".join(parts[:end])
        if known in COMPANIONS and (end == len(parts) or known.removeprefix("popart.") != known):
            return Name("emulated", COMPANIONS[known])
    meaning = POPART if parts[0] == "popart" else "it is not provided here"
    return Name("fails", meaning + nearest(name, COMPANIONS))


def _poptorch_module(name: str) -> Name:
    if name == "poptorch":
        return Name("emulated", "packhorse_port")
    return _lookup(name.removeprefix("poptorch."))


def _uses(tree: ast.Module, origins: NameOrigins, defined: Collection[str]) -> Iterator[Finding]:
    """Every use of a name of PopTorch, and of torchvision if ours replaces it."""
    provided = find_spec("torchvision") is None
    absent = {top for top in COMPANION_TOPS if not find_spec(top)}
    for node, name in imported_names(tree):
        top, _, rest = name.partition(".")
        if top == "poptorch" and rest != "*":
            entry = _lookup(rest)
            yield Finding(node.lineno, entry.kind, rest, entry.meaning)
        elif top == "torchvision" and provided:
            yield from _torchvision_use(node, rest)
        elif top in absent:
            entry = _companion(name)
            yield Finding(node.lineno, entry.kind, name, entry.meaning)
    pending: list[ast.AST] = [tree]
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Attribute | ast.Name):
            path = origins.path(node)
            if name := origins.name(node):
                entry = _lookup(name, id(node) in called, defined)
                yield Finding(_line(node), entry.kind, name, entry.meaning)
                node = _root(node)
            elif path.startswith("torchvision.") and provided:
                yield from _torchvision_use(node, path.removeprefix("torchvision."))
                node = _root(node)
            elif "." in path and path.partition(".")[0] in absent:
                entry = _companion(path)
                yield Finding(_line(node), entry.kind, path, entry.meaning)
                node = _root(node)
        pending += ast.iter_child_nodes(node)


def _line(node: ast.AST) -> int:
    """The line of the last part of a chain, which may be lines below its beginning."""
    return getattr(node, "end_lineno", None) or node.lineno  # pyright: ignore[reportAttributeAccessIssue]


def _root(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def imported_names(tree: ast.AST) -> Iterator[tuple[ast.ImportFrom, str]]:
    """`poptorch.Options` of `from poptorch import Options`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def _lookup(name: str, is_called: bool = False, defined: Collection[str] = ()) -> Name:
    """The entry of a name in `NAMES`; a missing one fails, with the nearest name.

    defined: what the project defines, and so what an executor may have of the user's own module.
    """
    first, _, rest = name.partition(".")
    if name == "custom_op" and not os.environ.get(CUSTOM_OPS):
        return Name("fails", f"write the operation in PyTorch, in a file that {CUSTOM_OPS} names")
    if name in NAMES:
        return NAMES[name]
    if first in ENUMS:
        if not rest or rest.split(".")[0] in ENUMS[first]:
            return Name("emulated", "a value that an option takes")
        return Name("fails", f"{first} has {', '.join(ENUMS[first])}")
    if first in ("enums", "options", "ops"):
        return _lookup(rest, is_called, defined)
    if first == "Strategy":
        return NAMES["PipelinedExecution"]
    if first == "PoplarExecutor":
        if rest in OF_MODULES or rest in defined:
            return Name("emulated", "the module's own")
        near = nearest(name, [known for known in NAMES if known.startswith("PoplarExecutor.")])
        if any(map(str.isupper, rest[1:])):  # as PopTorch's own methods are written
            return Name("fails", f"PopTorch's models have no such method{near}")
        return Name("emulated", "the module's own, if it has it")
    if first not in ("Options", "optim") and first in NAMES:
        return NAMES[first]
    if first == "Options" and not is_called and name.rpartition(".")[2].islower():
        return Name("emulated", "a setting, read")
    return Name("fails", f"PopTorch has no such name{nearest(name, [*NAMES, *ENUMS])}")


def _torchvision_use(node: ast.AST, name: str) -> Iterator[Finding]:
    """Whether packhorse's torchvision has the name."""
    module, _, rest = name.partition(".")
    name = f"torchvision.{name}"
    line = _line(node)
    if module not in PROVIDES:
        meaning = f"packhorse's torchvision has {', '.join(PROVIDES)} only: pip install torchvision"
        yield Finding(line, "fails", name, meaning)
    elif rest and rest.split(".")[0] not in PROVIDES[module]:
        near = nearest(rest, PROVIDES[module])
        meaning = f"packhorse's torchvision lacks it{near}; or pip install torchvision"
        yield Finding(line, "fails", name, meaning)
    else:
        yield Finding(line, "emulated", name, "packhorse's, with torchvision's results")
