"""`packhorse port --check`: what would become of each line of a script, before anything runs.

The script is read as syntax (`ast`), its imports are looked up but not executed. So the answer
comes at once and does no harm, and cannot know what only a run would show: a name made at run time,
an installed package that fails when it is imported. What is found is one of four kinds: it runs *as
is*, is *emulated*, is *ignored* (and why), or *fails* (and what to do).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.util import decode_source, find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

from packhorse_port import enums
from packhorse_port.names import EXTRAS, NAMES, Kind, Name, install_line, nearest
from packhorse_port.origins import Origins, dotted
from packhorse_port.patch import SCALING
from packhorse_port.script import IPU
from packhorse_port.tensorflow import uses as tensorflow
from packhorse_port.torchvision import PROVIDES

ENUMS = {
    name: [member.name for member in each]
    for name, each in vars(enums).items()
    if isinstance(each, type) and issubclass(each, Enum) and each.__module__ == enums.__name__
}
SDK = {
    "popart": "graphs of PopART cannot run here; write the model in PyTorch",
    "popxl": "graphs of PopXL cannot run here; write the model in PyTorch",
    "poplar": "Poplar programs cannot run here",
    "popdist": "start several processes with torchrun",
    "poprt": "packhorse.PackRunner packs and runs requests; see docs/coming-from.md",
    "gcipuinfo": "packhorse monitor --json tells about devices",
    "poptorch_geometric": "use torch_geometric",
}


class Finding(NamedTuple):
    """One thing in one line: what becomes of it, and why or what to do."""

    line: int
    kind: Kind
    name: str
    meaning: str
    source: str = ""


@dataclass(frozen=True)
class Report:
    """What was found in a script, by line."""

    findings: tuple[Finding, ...]
    plain: int  # lines with a statement and nothing to tell

    def count(self, kind: Kind) -> int:
        return sum(each.kind == kind for each in self.findings)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "findings": [each._asdict() for each in self.findings],
            "counts": {kind: self.count(kind) for kind in get_args(Kind)},
            "plain_lines": self.plain,
            "runs": not self.count("fails"),
        }

    def last_line(self) -> str:
        """The whole in one line."""
        counts = ", ".join(f"{self.count(kind)} {kind}" for kind in get_args(Kind))
        return f"{counts}; {self.plain} other lines are plain Python and run as they are"


def examine(source: bytes, path: Path) -> Report:
    """Read the script at `path`; what can be told of each of its lines."""
    try:
        text = decode_source(source)
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        return Report((Finding(line, "fails", "syntax", f"{error}"),), 0)
    lines, origins = text.splitlines(), Origins(tree, functions=True)
    found = {
        (each.line, each.name): each._replace(source=lines[each.line - 1].strip())
        for each in _everything(tree, path.parent, origins)
    }
    ordered = sorted(found.values(), key=lambda each: (each.line, each.name))
    statements = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    return Report(tuple(ordered), len(statements - {each.line for each in ordered}))


def _everything(tree: ast.Module, folder: Path, origins: Origins) -> Iterator[Finding]:
    yield from _imports(tree, folder)
    yield from _uses(tree, origins)
    yield from _scalings(tree, origins)
    yield from _ipu_uses(tree, origins)


def _scalings(tree: ast.Module, origins: Origins) -> Iterator[Finding]:
    """Arguments of PopTorch's optimizers that nothing follows from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and origins.path(node.func).startswith("poptorch.optim."):
            for word in node.keywords:
                if word.arg in SCALING:
                    why = "kept, not applied: it only keeps half precision in range"
                    yield Finding(word.value.lineno, "ignored", word.arg, why)


def _imports(tree: ast.Module, folder: Path) -> Iterator[Finding]:
    """Every module that is imported, wherever the statement stands."""
    spared = _spared(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module or ''}"]
            if f"{node.module}.{node.names[0].name}".startswith(IPU):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            kind, meaning = _module(name, folder)
            if kind == "fails" and node in spared:
                kind, meaning = "as is", "missing here, which the script expects"
            yield Finding(node.lineno, kind, name, meaning)


def _spared(tree: ast.Module) -> set[ast.AST]:
    """What stands in a `try` that catches a failed import."""
    catching = {"", "ImportError", "ModuleNotFoundError", "Exception"}
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for handler in node.handlers
        if catching & set(map(dotted, _kinds(handler.type)))
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _kinds(caught: ast.expr | None) -> list[ast.expr | None]:
    return list(caught.elts) if isinstance(caught, ast.Tuple) else [caught]


def _module(name: str, folder: Path) -> Name:
    top = name.partition(".")[0]
    if not top:
        return Name("fails", "a script has no package: import it by its name")
    if name.startswith(IPU):
        return _ipu(top, name)
    if (folder / f"{top}.py").exists() or (folder / top).is_dir():
        return Name("as is", "a file of yours")
    if top == "poptorch":
        return _poptorch_module(name)
    if top in SDK:
        return Name("fails", SDK[top])
    if top == "__future__" or top in sys.stdlib_module_names:
        return Name("as is", "Python's own")
    if find_spec(top):
        return Name("as is", "installed")
    if top == "torchvision":
        return Name("emulated", "packhorse's datasets and transforms: it is not installed")
    return Name("fails", f"not installed: {install_line(name)}")


def _ipu(top: str, name: str) -> Name:
    if not find_spec(top):
        return Name("fails", f"{top} is not installed: pip install 'packhorse[{EXTRAS[top]}]'")
    return tensorflow.known(tensorflow.short(name))


def _ipu_uses(tree: ast.Module, origins: Origins) -> Iterator[Finding]:
    for line, name, known in tensorflow.uses(tree, origins):
        yield Finding(line, *_row(name, known))


def _poptorch_module(name: str) -> Name:
    if name == "poptorch":
        return Name("emulated", "packhorse_port")
    return _known(name.removeprefix("poptorch."))


def _uses(tree: ast.Module, origins: Origins) -> Iterator[Finding]:
    """Every use of a name of PopTorch's, and of torchvision's where ours takes its place."""
    provided = find_spec("torchvision") is None
    for node, name in imported_names(tree):
        top, _, rest = name.partition(".")
        if top == "poptorch" and rest != "*":
            yield Finding(node.lineno, *_row(rest, _known(rest)))
        elif top == "torchvision" and provided:
            yield from _stand_in(node, rest)
    waiting: list[ast.AST] = [tree]
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute | ast.Name):
            path = origins.path(node)
            if name := origins.name(node):
                yield Finding(_line(node), *_row(name, _known(name, id(node) in called)))
                node = _root(node)
            elif path.startswith("torchvision.") and provided:
                yield from _stand_in(node, path.removeprefix("torchvision."))
                node = _root(node)
        waiting += ast.iter_child_nodes(node)


def _row(name: str, known: Name) -> tuple[Kind, str, str]:
    return known.kind, name, known.meaning


def _line(node: ast.AST) -> int:
    """Of the last part of a chain, which may stand lines below its beginning."""
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


def _known(name: str, is_called: bool = False) -> Name:
    """What the table says of a name; one that it lacks fails, with the nearest that it has."""
    first, _, rest = name.partition(".")
    if name in NAMES:
        return NAMES[name]
    if first in ENUMS:
        if not rest or rest.split(".")[0] in ENUMS[first]:
            return Name("emulated", "a value that an option takes")
        return Name("fails", f"{first} has {', '.join(ENUMS[first])}")
    if first in ("enums", "options", "ops"):
        return _known(rest, is_called)
    if first == "Strategy":
        return NAMES["PipelinedExecution"]
    if first == "PoplarExecutor":
        return Name("emulated", "the module's own")
    if first not in ("Options", "optim") and first in NAMES:
        return NAMES[first]
    if first == "Options" and not is_called and name.rpartition(".")[2].islower():
        return Name("emulated", "a setting, read")
    return Name("fails", f"PopTorch has no such name{nearest(name, [*NAMES, *ENUMS])}")


def _stand_in(node: ast.AST, name: str) -> Iterator[Finding]:
    """Whether packhorse's torchvision has the name."""
    room, _, rest = name.partition(".")
    name, line = f"torchvision.{name}", _line(node)
    if room not in PROVIDES:
        how = f"packhorse's torchvision has {', '.join(PROVIDES)} only: pip install torchvision"
        yield Finding(line, "fails", name, how)
    elif rest and rest.split(".")[0] not in PROVIDES[room]:
        near = nearest(rest, PROVIDES[room])
        how = f"packhorse's torchvision lacks it{near}; or pip install torchvision"
        yield Finding(line, "fails", name, how)
    else:
        yield Finding(line, "emulated", name, "packhorse's, with torchvision's results")
