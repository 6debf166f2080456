"""`packhorse port --check`: how each line of a script would be handled, without running it.

The script is parsed (`ast`), its imports are looked up but not executed. So the check is fast and
safe, and does not see what only a run would show: a name created at run time, an installed package
that fails when it is imported. Each finding is one of four kinds: it runs *as is*, is *emulated*,
is *ignored* (and why), or *fails* (and what to do). Nothing here imports torch.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.util import decode_source, find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

from packhorse_port import enums
from packhorse_port.names import (
    CUSTOM_OPS,
    EXTRAS,
    NAMES,
    POPDIST,
    Kind,
    Name,
    install_line,
    nearest,
)
from packhorse_port.patch import SCALING
from packhorse_port.script import IPU_MODULES, SDK
from packhorse_port.syntax import NameOrigins, dotted
from packhorse_port.tensorflow import names as tensorflow
from packhorse_port.torchvision import PROVIDES

ENUMS = {
    name: [member.name for member in value]
    for name, value in vars(enums).items()
    if isinstance(value, type) and issubclass(value, Enum) and value.__module__ == enums.__name__
}


class Finding(NamedTuple):
    """One name in one line: how it is handled, and why or what to do."""

    line: int
    kind: Kind
    name: str
    meaning: str
    source: str = ""


@dataclass(frozen=True)
class CheckReport:
    """The findings of a script, by line."""

    findings: tuple[Finding, ...]
    plain: int  # lines with a statement and no finding

    def count(self, kind: Kind) -> int:
        return sum(finding.kind == kind for finding in self.findings)

    def document(self) -> dict[str, Any]:
        """The report as plain values, for --json."""
        return {
            "findings": [finding._asdict() for finding in self.findings],
            "counts": {kind: self.count(kind) for kind in get_args(Kind)},
            "plain_lines": self.plain,
            "runs": not self.count("fails"),
        }

    def last_line(self) -> str:
        """The counts, in one line."""
        counts = ", ".join(f"{self.count(kind)} {kind}" for kind in get_args(Kind))
        return f"{counts}; {self.plain} other lines are plain Python and run as they are"


def examine(source: bytes, path: Path) -> CheckReport:
    """Check the script at `path`."""
    try:
        text = decode_source(source)
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        return CheckReport((Finding(line, "fails", "syntax", f"{error}"),), 0)
    lines = text.splitlines()
    origins = NameOrigins(tree, functions=True)
    findings = {
        (finding.line, finding.name): finding._replace(source=lines[finding.line - 1].strip())
        for finding in _all_findings(tree, path.parent, origins)
    }
    ordered = sorted(findings.values(), key=lambda finding: (finding.line, finding.name))
    statements = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    return CheckReport(tuple(ordered), len(statements - {finding.line for finding in ordered}))


def _all_findings(tree: ast.Module, folder: Path, origins: NameOrigins) -> Iterator[Finding]:
    yield from _imports(tree, folder)
    yield from _uses(tree, origins)
    yield from _scaling_arguments(tree, origins)
    yield from _ipu_uses(tree, origins)


def _scaling_arguments(tree: ast.Module, origins: NameOrigins) -> Iterator[Finding]:
    """Arguments of PopTorch's optimizers that have no effect."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and origins.path(node.func).startswith("poptorch.optim."):
            for word in node.keywords:
                if word.arg in SCALING:
                    reason = "kept, not applied: it only keeps half precision in range"
                    yield Finding(word.value.lineno, "ignored", word.arg, reason)


def _imports(tree: ast.Module, folder: Path) -> Iterator[Finding]:
    """Every imported module, wherever the statement is."""
    guarded = _guarded(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}"]
            if f"{node.module}.{node.names[0].name}".startswith(IPU_MODULES):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            kind, meaning = _module(name, folder)
            if kind == "fails" and node in guarded:
                kind, meaning = "as is", "missing here, which the script expects"
            yield Finding(node.lineno, kind, name, meaning)


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


def _module(name: str, folder: Path) -> Name:
    top = name.partition(".")[0]
    if not top:
        return Name("fails", "a script has no package: import it by its name")
    if name in POPDIST:
        return Name("emulated", POPDIST[name])
    if name.startswith(IPU_MODULES):
        return _ipu_module(name)
    if (folder / f"{top}.py").exists() or (folder / top).is_dir():
        return Name("as is", "a file of yours")
    if top == "poptorch":
        return _poptorch_module(name)
    if top in SDK:
        return Name("fails", SDK[top])
    for module, meaning in tensorflow.KERAS_2.items():
        if name == module or name.startswith(f"{module}."):
            return Name("fails", meaning)
    if top == "__future__" or top in sys.stdlib_module_names:
        return Name("as is", "Python's own")
    if find_spec(top):
        return Name("as is", "installed")
    if top == "torchvision":
        return Name("emulated", "packhorse's datasets and transforms: it is not installed")
    return Name("fails", f"not installed: {install_line(name)}")


def _ipu_module(name: str) -> Name:
    top = "keras" if name.startswith("keras.") else "tensorflow"
    if not find_spec(top):
        return Name("fails", f"{top} is not installed: pip install 'packhorse[{EXTRAS[top]}]'")
    return tensorflow.lookup(tensorflow.short_name(name))


def _ipu_uses(tree: ast.Module, origins: NameOrigins) -> Iterator[Finding]:
    uses = [*tensorflow.uses(tree, origins), *tensorflow.refused_connections(tree)]
    for line, name, entry in uses:
        yield Finding(line, entry.kind, name, entry.meaning)


def _poptorch_module(name: str) -> Name:
    if name == "poptorch":
        return Name("emulated", "packhorse_port")
    return _lookup(name.removeprefix("poptorch."))


def _uses(tree: ast.Module, origins: NameOrigins) -> Iterator[Finding]:
    """Every use of a name of PopTorch, and of torchvision if ours replaces it."""
    provided = find_spec("torchvision") is None
    for node, name in imported_names(tree):
        top, _, rest = name.partition(".")
        if top == "poptorch" and rest != "*":
            entry = _lookup(rest)
            yield Finding(node.lineno, entry.kind, rest, entry.meaning)
        elif top == "torchvision" and provided:
            yield from _torchvision_use(node, rest)
    pending: list[ast.AST] = [tree]
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Attribute | ast.Name):
            path = origins.path(node)
            if name := origins.name(node):
                entry = _lookup(name, id(node) in called)
                yield Finding(_line(node), entry.kind, name, entry.meaning)
                node = _root(node)
            elif path.startswith("torchvision.") and provided:
                yield from _torchvision_use(node, path.removeprefix("torchvision."))
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


def _lookup(name: str, is_called: bool = False) -> Name:
    """The entry of a name in `NAMES`; a missing one fails, with the nearest name."""
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
        return _lookup(rest, is_called)
    if first == "Strategy":
        return NAMES["PipelinedExecution"]
    if first == "PoplarExecutor":
        return Name("emulated", "the module's own")
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
