"""What a script sets its options to, read from its lines without running them.

    plans = settle(tree, origins)
    plans.at("opts", line=40).factor("iterations", "accumulation")      # "args.steps * 8"

A value is kept as the text that the script has for it, and is followed in the order of the lines,
by the variable's name. A setting inside an `if` or a loop may or may not be made: it is taken as
made, and noted.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from packhorse_port.edit import Left
from packhorse_port.names import NAMES
from packhorse_port.origins import Origins, dotted

NUMBERS = {
    "Options.deviceIterations": "iterations",
    "Options.replicationFactor": "replicas",
    "Options.Training.gradientAccumulation": "accumulation",
}
READ = {
    "Options.device_iterations": "iterations",
    "Options.replication_factor": "replicas",
    "Options.gradient_accumulation": "accumulation",
    "Options.Training.gradient_accumulation": "accumulation",
}
REDUCTIONS = {
    "Options.Training.accumulationAndReplicationReductionType",
    "Options.Training.accumulationReductionType",
}
# Settings with a meaning that changes no number of a plain script.
SILENT = {
    *("Options.clone", "Options.randomSeed", "Options.enableExecutableCaching"),
    *("Options.modelName", "Options.setExecutionStrategy", "Options.compileStep"),
    "Options.broadcastBuffers",
}
MODES = {"All": "all", "Final": "final", "Sum": "sum", "EveryN": "every", "Default": ""}


@dataclass(frozen=True)
class Plan:
    """The settings that change numbers, each as the script writes it."""

    iterations: str = "1"
    replicas: str = "1"
    accumulation: str = "1"
    mean: str = "True"
    outputs: str = ""
    every: str = "1"

    def factor(self, *names: str) -> str:
        """The product of settings; nothing where it is one."""
        texts = [text for name in names if (text := getattr(self, name)) != "1"]
        if all(text.isdigit() for text in texts):
            return str(prod(map(int, texts))) if texts else ""
        return " * ".join(t if t.replace(".", "").isalnum() else f"({t})" for t in texts)

    def words(self, names: tuple[str, ...]) -> list[str]:
        """Those that are not as they were, as arguments."""
        fresh = Plan()
        changed = [name for name in names if getattr(self, name) != getattr(fresh, name)]
        return [f"{name}={self._quoted(name)}" for name in changed]

    def _quoted(self, name: str) -> str:
        return f'"{self.outputs}"' if name == "outputs" else getattr(self, name)

    def after(self, name: str, call: ast.Call) -> Plan | None:
        """With one more setting made; None where it cannot be told what it does."""
        given = [ast.unparse(each) for each in [*call.args, *(w.value for w in call.keywords)]]
        if name in SILENT or (name in NAMES and NAMES[name].kind == "ignored"):
            return self
        if name in NUMBERS and len(given) == 1:
            return replace(self, **{NUMBERS[name]: given[0]})
        choice = given[0].rpartition(".")[2] if given else ""
        if name in REDUCTIONS and choice in ("Mean", "Sum"):
            return replace(self, mean=str(choice == "Mean"))
        if name in ("Options.outputMode", "Options.anchorMode") and choice in MODES:
            return replace(self, outputs=MODES[choice], every=(*given, "1")[1])
        return None


@dataclass
class Plans:
    """What each variable that holds options is set to, from which line on."""

    known: dict[str, list[tuple[int, Plan]]] = field(default_factory=lambda: defaultdict(list))
    left: list[tuple[int, str]] = field(default_factory=list)

    def at(self, name: str, line: int) -> Plan | None:
        """As set by then; in a function that stands before, as set in the end."""
        plans = self.known.get(name, [])
        before = [plan for at, plan in plans if at <= line]
        return (before or [plan for _, plan in plans] or [None])[-1]


def settle(tree: ast.Module, origins: Origins) -> Plans:
    """Follow every statement that makes options or sets them."""
    plans = Plans()
    for node, conditional in sorted(statements(tree), key=lambda each: each[0].lineno):
        value = node.value if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) else None
        if value is None or not origins.kind(value).startswith("Options"):
            continue
        root, calls = chain(value, origins)
        before = Plan() if origins.path(root) else plans.at(dotted(root), node.lineno)
        try:
            plan = made(before, calls, origins)
        except Left as why:
            plans.left += [(node.lineno, each) for each in why.args]
            continue
        if conditional and plan != before:
            plans.left.append((node.lineno, "set under a condition; taken as set"))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", root)]
        for name in {dotted(target) for target in targets}:
            plans.known[name].append((node.lineno, plan))
    return plans


def made(plan: Plan | None, calls: list[ast.Call], origins: Origins) -> Plan:
    """A plan with more settings made."""
    if plan is None:
        raise Left("where these options come from cannot be told")
    unknown = []
    for call in calls:
        if (name := origins.name(call.func)) != "Options":
            after = plan.after(name, call)
            if after is None:
                unknown.append(meaning(name))
            plan = after or plan
    if unknown:
        raise Left(*unknown)
    return plan


def meaning(name: str) -> str:
    """A name with what the table says of it."""
    return f"{name}: {NAMES[name].meaning}" if name in NAMES else f"{name}: not known"


def preloads(call: ast.Call) -> bool:
    """May a loader begin to read when it is made, and so draw its order before others draw?"""
    given = {word.arg: word.value for word in call.keywords}
    inside = given.get("async_options")
    if isinstance(inside, ast.Dict):
        keys = [getattr(key, "value", None) for key in inside.keys]
        given |= dict(zip(keys, inside.values, strict=True))
    early = given.get("early_preload", None if isinstance(inside, ast.Dict) else inside)
    return early is not None and not (isinstance(early, ast.Constant) and not early.value)


def chain(value: ast.expr, origins: Origins) -> tuple[ast.expr, list[ast.Call]]:
    """`opts` and its calls in order, of `opts.Training.a(1).b(2)`."""
    calls: list[ast.Call] = []
    while isinstance(value, ast.Call | ast.Attribute) and dotted(value) not in origins.made:
        if isinstance(value, ast.Call):
            calls.insert(0, value)
        value = value.func if isinstance(value, ast.Call) else value.value
    return value, calls


def statements(tree: ast.AST, conditional: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement, and whether it stands in a branch or a loop."""
    for node in ast.iter_child_nodes(tree):
        branch = isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.match_case)
        inside = conditional or (branch and not is_main(node))
        if isinstance(node, ast.stmt):
            yield node, conditional
        yield from statements(node, inside)


def is_main(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`, which a script always enters."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    return ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")
