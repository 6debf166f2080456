"""What a script's names refer to and what it sets its options to, read from its syntax tree.

    origins = NameOrigins(ast.parse("import poptorch as pt\\nopts = pt.Options()"))
    origins.name(expression)     # "Options.deviceIterations" of `opts.deviceIterations`
    plans = option_plans(tree, origins)
    plans.at("opts", line=40).factor("iterations", "accumulation")      # "args.steps * 8"

Nothing is run. A name is what an import bound, or a variable that holds what a call of PopTorch
returned. Variables are followed by name only, through the whole file: one that is also assigned
something else is not trusted, and then only an attribute that can only be PopTorch's
(`detachFromDevice`) is taken for it.

The value of a setting is kept as the script's text, and followed in the order of lines by the name
of the variable. A setting inside an `if` or a loop may or may not be made: it is taken as made, and
reported.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from packhorse_port.names import NAMES

# The kind of object that a call returns
RETURNS = {
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
CHAINING = ("Options", "Strategy", "TensorLocationSettings")  # their methods return the object
GROUPS = {
    name
    for name in NAMES
    if name.startswith("Options.") and any(known.startswith(f"{name}.") for known in NAMES)
}
# Attributes with a capital inside: `deviceIterations` is PopTorch's, `options` or `load` may be of
# any object.
UNMISTAKABLE = {
    name.rpartition(".")[2]: name
    for name in NAMES
    if name.split(".")[0] in ("Options", "PoplarExecutor", "DataLoader")
    and name.count(".")
    and any(map(str.isupper, name.rpartition(".")[2][1:]))
}


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` for a chain of attributes, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


class NameOrigins:
    """What the imports and assignments of one script bind."""

    def __init__(self, tree: ast.AST, functions: bool = False) -> None:
        """functions: also trust what the script's functions return, whatever their arguments."""
        self.imported = dict(imported(tree))
        self.variables: dict[str, str] = {}  # kinds of objects by variable
        self.returned: dict[str, str] = {}  # and by function
        # `opts = opts.clone()` means something only if `opts` is known. So the first pass trusts
        # every assignment, the second drops variables with several kinds, and the third drops what
        # was derived from those.
        for strict in (False, True, True):
            self.variables = self._variable_kinds(tree, strict)
            self.returned = self._function_kinds(tree) if functions else {}

    def path(self, node: ast.AST | None) -> str:
        """The full name of something imported, as `poptorch.optim.SGD`; or an empty string."""
        first, dot, rest = dotted(node).partition(".")
        return self.imported[first] + dot + rest if first in self.imported else ""

    def kind(self, node: ast.AST | None) -> str:
        """The kind of an expression: `Options`, `Options.Training`, `PoplarExecutor`; or ""."""
        if isinstance(node, ast.Call):
            if kind := RETURNS.get(self.path(node.func)) or self.returned.get(dotted(node.func)):
                return kind
            owner = self.kind(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            return owner if owner.split(".")[0] in CHAINING else ""
        if kind := self.variables.get(dotted(node), ""):
            return kind
        if isinstance(node, ast.Attribute):
            group = f"{self.kind(node.value)}.{node.attr}"
            return group if group in GROUPS else ""
        return ""

    def name(self, node: ast.AST) -> str:
        """The name of PopTorch that an expression refers to, whether or not `NAMES` has it."""
        path = self.path(node)
        if path.startswith("poptorch."):
            return path.removeprefix("poptorch.").removeprefix("ops.")
        if not isinstance(node, ast.Attribute):
            return ""
        if kind := self.kind(node.value):
            return f"{kind}.{node.attr}"
        return "" if path else UNMISTAKABLE.get(node.attr, "")

    def _function_kinds(self, tree: ast.AST) -> dict[str, str]:
        """The kind that a function returns, if all its returns agree."""
        functions = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                returns = [inner for inner in ast.walk(node) if isinstance(inner, ast.Return)]
                kinds = {self.kind(statement.value) for statement in returns}
                functions[node.name] = kinds.pop() if len(kinds) == 1 else ""
        return {name: kind for name, kind in functions.items() if kind}

    def _variable_kinds(self, tree: ast.AST, strict: bool) -> dict[str, str]:
        kinds: dict[str, set[str]] = defaultdict(set)
        for name, value in assignments(tree):
            if (kind := self.kind(value)) or strict:
                kinds[name].add(kind)
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and (kind := RETURNS.get(self.path(node.annotation), "")):
                kinds[node.arg].add(kind)
        return {
            name: candidates.pop()
            for name, candidates in kinds.items()
            if len(candidates) == 1 and any(candidates)
        }


def imported(tree: ast.AST) -> list[tuple[str, str]]:
    """(bound name, full name) of everything that import statements bind."""
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
    """(name, value) of every assignment in any form; None for a value that is not known."""
    pairs: list[tuple[str, ast.expr | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs += _target_pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            pairs += _target_pairs(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            pairs += _target_pairs(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars:
            pairs += _target_pairs(node.optional_vars, node.context_expr)
    return [(name, value) for name, value in pairs if name]


def _target_pairs(target: ast.expr, value: ast.expr | None) -> list[tuple[str, ast.expr | None]]:
    if not isinstance(target, ast.Tuple | ast.List):
        return [(dotted(target), value)]
    values: list[ast.expr | None] = []
    if isinstance(value, ast.Tuple | ast.List):
        values = list(value.elts)
    if len(values) != len(target.elts):
        values = [None for _ in target.elts]
    return [
        pair
        for element, element_value in zip(target.elts, values, strict=True)
        for pair in _target_pairs(element, element_value)
    ]


# What a script sets its options to

NUMBERS = {
    "Options.deviceIterations": "iterations",
    "Options.replicationFactor": "replicas",
    "Options.Training.gradientAccumulation": "accumulation",
}
ATTRIBUTES = {
    "Options.device_iterations": "iterations",
    "Options.replication_factor": "replicas",
    "Options.gradient_accumulation": "accumulation",
    "Options.Training.gradient_accumulation": "accumulation",
}
REDUCTIONS = {
    "Options.Training.accumulationAndReplicationReductionType",
    "Options.Training.accumulationReductionType",
}
# Settings that do not change the results of a plain script
WITHOUT_RESULT = {
    "Options.clone",
    "Options.randomSeed",
    "Options.enableExecutableCaching",
    "Options.modelName",
    "Options.setExecutionStrategy",
    "Options.compileStep",
    "Options.broadcastBuffers",
}
OUTPUT_MODES = {"All": "all", "Final": "final", "Sum": "sum", "EveryN": "every", "Default": ""}


class Untranslatable(Exception):
    """Why something cannot be translated: one reason, or several."""


@dataclass(frozen=True)
class OptionsPlan:
    """The settings that change results, each as the script's text."""

    iterations: str = "1"
    replicas: str = "1"
    accumulation: str = "1"
    mean: str = "True"
    outputs: str = ""
    every: str = "1"

    def factor(self, *names: str) -> str:
        """The product of settings; an empty string if it is one."""
        texts = [text for name in names if (text := getattr(self, name)) != "1"]
        if all(text.isdigit() for text in texts):
            return str(prod(map(int, texts))) if texts else ""
        return " * ".join(t if t.replace(".", "").isalnum() else f"({t})" for t in texts)

    def keywords(self, names: tuple[str, ...]) -> list[str]:
        """Keyword arguments for the settings that are not at their defaults."""
        defaults = OptionsPlan()
        changed = [name for name in names if getattr(self, name) != getattr(defaults, name)]
        return [f"{name}={self._quoted(name)}" for name in changed]

    def _quoted(self, name: str) -> str:
        return f'"{self.outputs}"' if name == "outputs" else getattr(self, name)

    def after(self, name: str, call: ast.Call) -> OptionsPlan | None:
        """The plan after one more setting; None if its effect is not known."""
        values = [*call.args, *(word.value for word in call.keywords)]
        arguments = [ast.unparse(value) for value in values]
        if name in WITHOUT_RESULT or (name in NAMES and NAMES[name].kind == "ignored"):
            return self
        if name in NUMBERS and len(arguments) == 1:
            return replace(self, **{NUMBERS[name]: arguments[0]})
        choice = arguments[0].rpartition(".")[2] if arguments else ""
        if name in REDUCTIONS and choice in ("Mean", "Sum"):
            return replace(self, mean=str(choice == "Mean"))
        if name in ("Options.outputMode", "Options.anchorMode") and choice in OUTPUT_MODES:
            return replace(self, outputs=OUTPUT_MODES[choice], every=(*arguments, "1")[1])
        return None


@dataclass
class OptionsPlans:
    """What each variable that holds options is set to, from which line on."""

    by_variable: dict[str, list[tuple[int, OptionsPlan]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    untranslated: list[tuple[int, str]] = field(default_factory=list)

    def at(self, name: str, line: int) -> OptionsPlan | None:
        """The plan at a line; for a function above all settings, the final one."""
        plans = self.by_variable.get(name, [])
        before = [plan for start, plan in plans if start <= line]
        return (before or [plan for _, plan in plans] or [None])[-1]


def option_plans(tree: ast.Module, origins: NameOrigins) -> OptionsPlans:
    """Follow every statement that creates options or sets them."""
    plans = OptionsPlans()
    for node, conditional in sorted(statements(tree), key=lambda pair: pair[0].lineno):
        value = node.value if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) else None
        if value is None or not origins.kind(value).startswith("Options"):
            continue
        root, calls = split_chain(value, origins)
        before = OptionsPlan() if origins.path(root) else plans.at(dotted(root), node.lineno)
        try:
            plan = apply_calls(before, calls, origins)
        except Untranslatable as reasons:
            plans.untranslated += [(node.lineno, reason) for reason in reasons.args]
            continue
        if conditional and plan != before:
            plans.untranslated.append((node.lineno, "set under a condition; taken as set"))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", root)]
        for name in {dotted(target) for target in targets}:
            plans.by_variable[name].append((node.lineno, plan))
    return plans


def apply_calls(
    plan: OptionsPlan | None, calls: list[ast.Call], origins: NameOrigins
) -> OptionsPlan:
    """The plan after these calls; raises `Untranslatable` if one's effect is not known."""
    if plan is None:
        raise Untranslatable("the origin of these options is not known")
    unknown = []
    for call in calls:
        if (name := origins.name(call.func)) != "Options":
            after = plan.after(name, call)
            if after is None:
                unknown.append(describe(name))
            plan = after or plan
    if unknown:
        raise Untranslatable(*unknown)
    return plan


def describe(name: str) -> str:
    """A name with its meaning from `NAMES`."""
    return f"{name}: {NAMES[name].meaning}" if name in NAMES else f"{name}: not known"


def preloads(call: ast.Call) -> bool:
    """Whether a loader may start reading when created, and so draw its order before others draw."""
    arguments = {word.arg: word.value for word in call.keywords}
    async_options = arguments.get("async_options")
    if isinstance(async_options, ast.Dict):
        keys = [getattr(key, "value", None) for key in async_options.keys]
        arguments |= dict(zip(keys, async_options.values, strict=True))
        early = arguments.get("early_preload")
    else:
        early = arguments.get("early_preload", async_options)
    return early is not None and not (isinstance(early, ast.Constant) and not early.value)


def split_chain(value: ast.expr, origins: NameOrigins) -> tuple[ast.expr, list[ast.Call]]:
    """`opts` and its calls in order, for `opts.Training.a(1).b(2)`."""
    calls: list[ast.Call] = []
    while isinstance(value, ast.Call | ast.Attribute) and dotted(value) not in origins.variables:
        if isinstance(value, ast.Call):
            calls.insert(0, value)
        value = value.func if isinstance(value, ast.Call) else value.value
    return value, calls


def statements(tree: ast.AST, conditional: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it is in a branch or a loop."""
    for node in ast.iter_child_nodes(tree):
        branch = isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.match_case)
        if isinstance(node, ast.stmt):
            yield node, conditional
        yield from statements(node, conditional or (branch and not is_main_guard(node)))


def is_main_guard(node: ast.AST) -> bool:
    """Whether it is `if __name__ == "__main__":`, which a script always enters."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    return ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")
