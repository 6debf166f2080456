"""Where the names in a script come from: read from its syntax, never run.

    origins = Origins(ast.parse("import poptorch as pt\\nopts = pt.Options()"))
    origins.name(expression)     # "Options.deviceIterations" of `opts.deviceIterations`

A name is what an import bound, or a variable that holds what a call of PopTorch made. Variables are
followed by name only, through the whole file: one that is also given something else is not trusted,
and then only a name that could be nobody else's (`detachFromDevice`) is taken for PopTorch's.
"""

from __future__ import annotations

import ast
from collections import defaultdict

from packhorse_port.names import NAMES

MADE_BY = {
    "poptorch.Options": "Options",
    "poptorch.trainingModel": "PoplarExecutor",
    "poptorch.inferenceModel": "PoplarExecutor",
    "poptorch.load": "PoplarExecutor",
    "poptorch.PoplarExecutor": "PoplarExecutor",
    "poptorch.DataLoader": "DataLoader",
    "poptorch.AsynchronousDataAccessor": "DataLoader",
    "poptorch.TensorLocationSettings": "TensorLocationSettings",
    "poptorch.PipelinedExecution": "Strategy",
    "poptorch.ShardedExecution": "Strategy",
    "poptorch.SerialPhasedExecution": "Strategy",
    "poptorch.ParallelPhasedExecution": "Strategy",
}
CHAINING = ("Options", "Strategy", "TensorLocationSettings")  # a call gives the same again
GROUPS = {
    name
    for name in NAMES
    if name.startswith("Options.") and any(other.startswith(f"{name}.") for other in NAMES)
}
# A capital inside: `deviceIterations` is PopTorch's, `options` or `load` may be anybody's.
OWN_TAILS = {
    name.rpartition(".")[2]: name
    for name in NAMES
    if name.split(".")[0] in ("Options", "PoplarExecutor", "DataLoader")
    and name.count(".")
    and any(map(str.isupper, name.rpartition(".")[2][1:]))
}


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` of a chain of attributes, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


class Origins:
    """What the imports and assignments of one script bind."""

    def __init__(self, tree: ast.AST, functions: bool = False) -> None:
        """functions: believe what the script's own functions return, whatever they were given."""
        self.imported = dict(imported(tree))
        self.made: dict[str, str] = {}
        self.returned: dict[str, str] = {}
        # `opts = opts.clone()` says something only of an `opts` that is known: believe first, then
        # doubt, and doubt once more for what was made from what was believed wrongly.
        for doubt in (False, True, True):
            self.made = self._assigned(tree, doubt)
            self.returned = self._returns(tree) if functions else {}

    def path(self, node: ast.AST | None) -> str:
        """The full name of something imported: `poptorch.optim.SGD`; or nothing."""
        first, dot, rest = dotted(node).partition(".")
        return self.imported[first] + dot + rest if first in self.imported else ""

    def kind(self, node: ast.AST | None) -> str:
        """What an expression makes: `Options`, `Options.Training`, `PoplarExecutor`; or nothing."""
        if isinstance(node, ast.Call):
            if made := MADE_BY.get(self.path(node.func)) or self.returned.get(dotted(node.func)):
                return made
            before = self.kind(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            return before if before.split(".")[0] in CHAINING else ""
        if made := self.made.get(dotted(node), ""):
            return made
        if isinstance(node, ast.Attribute):
            group = f"{self.kind(node.value)}.{node.attr}"
            return group if group in GROUPS else ""
        return ""

    def name(self, node: ast.AST) -> str:
        """The name in the table of names that an expression stands for, known there or not."""
        path = self.path(node)
        if path.startswith("poptorch."):
            return path.removeprefix("poptorch.").removeprefix("ops.")
        if not isinstance(node, ast.Attribute):
            return ""
        if kind := self.kind(node.value):
            return f"{kind}.{node.attr}"
        return "" if path else OWN_TAILS.get(node.attr, "")

    def _returns(self, tree: ast.AST) -> dict[str, str]:
        """What a function makes, where all that it returns is of one kind."""
        found = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
                kinds = {self.kind(each.value) for each in given}
                found[node.name] = kinds.pop() if len(kinds) == 1 else ""
        return {name: kind for name, kind in found.items() if kind}

    def _assigned(self, tree: ast.AST, doubt: bool) -> dict[str, str]:
        kinds: dict[str, set[str]] = defaultdict(set)
        for name, value in assignments(tree):
            if (kind := self.kind(value)) or doubt:
                kinds[name].add(kind)
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and (made := MADE_BY.get(self.path(node.annotation), "")):
                kinds[node.arg].add(made)
        return {name: made.pop() for name, made in kinds.items() if len(made) == 1 and any(made)}


def imported(tree: ast.AST) -> list[tuple[str, str]]:
    """The names that import statements bind, and the full names of what they bind them to."""
    bound = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound.append((alias.asname, alias.name) if alias.asname else (top, top))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                bound.append((alias.asname or alias.name, f"{node.module}.{alias.name}"))
    return bound


def assignments(tree: ast.AST) -> list[tuple[str, ast.expr | None]]:
    """Every `name = value`, in whatever form; a value that cannot be told is None."""
    found: list[tuple[str, ast.expr | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found += _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            found += _pairs(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            found += _pairs(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars:
            found += _pairs(node.optional_vars, node.context_expr)
    return [(name, value) for name, value in found if name]


def _pairs(target: ast.expr, value: ast.expr | None) -> list[tuple[str, ast.expr | None]]:
    if not isinstance(target, ast.Tuple | ast.List):
        return [(dotted(target), value)]
    values = list(value.elts) if isinstance(value, ast.Tuple | ast.List) else []
    if len(values) != len(target.elts):
        return [pair for each in target.elts for pair in _pairs(each, None)]
    return [
        pair for each, its in zip(target.elts, values, strict=True) for pair in _pairs(each, its)
    ]
