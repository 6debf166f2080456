"""Which executors of a script `--patch` can write as plain loops, and the text of those loops.

    loops = executor_loops(tree, origins, plans)
    loops["training_model"].lines(statement)       # "optimizer.zero_grad()", …

A training call becomes the loop that a person would write, where it is a statement of its own that
assigns its results to names, one of which says that it is the loss. An inference call becomes one
of the module under `torch.no_grad()`. All that the script does with an executor must be known for
that: one that is passed on, is called inside another expression while it trains, returns more than
the last results of a call, or has replicas, is left to the functions in `plain`. So is an inference
on several batches at once, of which an executor returns as many scalars.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from packhorse_port.syntax import NameOrigins, OptionsPlan, dotted

# What may run after the `with` that is written around it, or let others run inside it
DEFERRED = (ast.Yield, ast.YieldFrom, ast.Await, ast.GeneratorExp, ast.Lambda)
# Names beside the loss that may be the one that the model marks
OTHER_LOSS = re.compile(
    r"total|cost|objective|nll|err|penalty|^(ce|kl|mse|mlm|nsp)$", re.IGNORECASE
)
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
INPUTS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
OUTPUTS = {True: ("", "final"), False: ("", "all")}  # that a loop gives, by whether it trains
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class ExecutorLoop:
    """An executor of a script that needs no function of ours."""

    variable: str
    model: ast.expr
    training: bool
    plan: OptionsPlan
    optimizer: str
    calls: dict[ast.stmt, list[ast.Call]] = field(default_factory=dict)

    def lines(self, node: ast.stmt, device: str) -> list[str]:
        """The loop of the training call that is this statement."""
        (call,) = self.calls[node]
        names = target_names(node)
        loss = next(name for name in names if "loss" in name.lower())
        values: list[ast.expr] = [*call.args, *(word.value for word in call.keywords)]
        parts = self.plan.factor("accumulation")
        lines: list[str] = []
        depth = 0

        def begin_loop(count: str, suffix: str) -> None:
            nonlocal depth
            bases = [
                value.id.removesuffix("_step") if isinstance(value, ast.Name) else f"input{index}"
                for index, value in enumerate(values)
            ]
            if len({*bases}) < len(bases):  # `x` and `x_step`
                bases = [f"input{index}" for index in range(len(values))]
            chunks = [f"{ast.unparse(value)}.chunk({count})" for value in values]
            source = chunks[0] if len(chunks) == 1 else f"zip({', '.join(chunks)})"
            values[:] = [ast.Name(f"{base}_{suffix}") for base in bases]
            add(f"for {', '.join(map(ast.unparse, values))} in {source}:")
            depth += 1

        def add(line: str) -> None:
            lines.append("    " * depth + line)

        if count := self.plan.factor("iterations"):
            begin_loop(count, "step")
        add(f"{self.optimizer}.zero_grad()")
        if parts:
            begin_loop(parts, "part")
        inputs = [f"{ast.unparse(value)}.to({device})" for value in values]
        for index, word in enumerate(call.keywords, len(call.args)):
            inputs[index] = f"{word.arg}={inputs[index]}"
        results = ", ".join(names)
        add(f"{results} = {self.variable}({', '.join(inputs)})")
        mean = bool(parts) and self.plan.mean == "True"
        divisor = parts if parts.isalnum() else f"({parts})"
        add(f"({loss} / {divisor}).backward()" if mean else f"{loss}.backward()")
        depth -= bool(parts)
        add(f"{self.optimizer}.step()")
        depth = 0
        for name in names:
            if name != "_":
                add(f"{name} = {name}.detach().cpu()")
        return lines


def target_names(node: ast.stmt) -> list[str]:
    """The plain names that a statement assigns; empty if there are other targets."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return []
    target = node.targets[0]
    elements = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [element.id for element in elements if isinstance(element, ast.Name)]
    return names if len(names) == len(elements) else []


def executor_loops(
    tree: ast.Module,
    origins: NameOrigins,
    plans: Mapping[ast.Call, OptionsPlan],
    has_own_lines: Callable[[ast.stmt], bool],
) -> dict[str, ExecutorLoop]:
    """By variable, the executors that become plain loops; `plans` are those of their creations.

    has_own_lines: whether nothing else is on the lines of a statement.
    """
    scopes = dict(_scopes(tree))
    created: dict[str, list[ast.Assign]] = defaultdict(list)
    for node in scopes:
        if isinstance(node, ast.Assign) and origins.kind(node.value) == "PoplarExecutor":
            created[dotted(node.targets[0])].append(node)
    loops = {}
    for variable, (creation, *others) in created.items():
        loop = _begin(creation, origins, plans) if variable.isidentifier() and not others else None
        if loop is not None and _follow(
            loop, scopes[creation], scopes, tree, origins, has_own_lines
        ):
            loops[variable] = loop
    return loops


def _begin(
    creation: ast.Assign, origins: NameOrigins, plans: Mapping[ast.Call, OptionsPlan]
) -> ExecutorLoop | None:
    """What the creation of an executor says; None if it cannot become a loop."""
    call = creation.value
    plan = plans.get(call) if isinstance(call, ast.Call) else None
    if plan is None or not isinstance(call, ast.Call) or len(creation.targets) != 1:
        return None
    training = origins.path(call.func).endswith("trainingModel")
    words = {word.arg: word.value for word in call.keywords}
    positional = dict(zip(("model", "options", "optimizer"), call.args, strict=False))
    model = words.get("model", positional.get("model"))
    optimizer = words.get("optimizer", positional.get("optimizer"))
    name = optimizer.id if isinstance(optimizer, ast.Name) else ""
    if not isinstance(model, ast.Name) or (training and not name):
        return None
    if plan.replicas != "1" or plan.outputs not in OUTPUTS[training]:
        return None
    if not training and plan.factor("iterations"):
        return None
    return ExecutorLoop(dotted(creation.targets[0]), model, training, plan, name)


def _follow(
    loop: ExecutorLoop,
    scope: Scope,
    scopes: dict[ast.stmt, Scope],
    tree: ast.Module,
    origins: NameOrigins,
    has_own_lines: Callable[[ast.stmt], bool],
) -> bool:
    """Find the calls of an executor; False if something else is done with it."""
    for statement, ancestors in _uses(tree, loop.variable):
        use, parent, *above = ancestors
        if isinstance(parent, ast.Attribute):
            if parent.attr != "setOptimizer":
                continue
            call = above[0] if above else None
            arguments = call.args if isinstance(call, ast.Call) else []
            if [dotted(argument) for argument in arguments] != [loop.optimizer]:
                return False
        elif (
            isinstance(parent, ast.Call)
            and parent.func is use
            and scope in (tree, scopes[statement])
            and isinstance(statement, SIMPLE)
            and not any(isinstance(inner, DEFERRED) for inner in ast.walk(statement))
            and has_own_lines(statement)
            and _has_plain_inputs(parent, origins)
            and (_assigns_loss(statement, parent) or not loop.training)
        ):
            loop.calls.setdefault(statement, []).append(parent)
        else:
            return False
    return bool(loop.calls)


def _scopes(tree: ast.Module) -> Iterator[tuple[ast.stmt, Scope]]:
    """Every statement with the function that it is in, or the module."""
    pending: list[tuple[ast.AST, Scope]] = [(tree, tree)]
    while pending:
        node, scope = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield child, scope
            inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else scope
            pending.append((child, inner))


def _uses(tree: ast.Module, variable: str) -> Iterator[tuple[ast.stmt, list[ast.AST]]]:
    """Each place that reads a variable: its statement; the name, and what it is in, outwards."""
    pending: list[tuple[ast.AST, list[ast.AST]]] = [(tree, [])]
    while pending:
        node, ancestors = pending.pop()
        if isinstance(node, ast.Name) and node.id == variable and isinstance(node.ctx, ast.Load):
            statement = next(above for above in ancestors if isinstance(above, ast.stmt))
            yield statement, [node, *ancestors]
        for child in ast.iter_child_nodes(node):
            pending.append((child, [node, *ancestors]))


def _has_plain_inputs(call: ast.Call, origins: NameOrigins) -> bool:
    """Whether the arguments are written out, and have no names of PopTorch in them."""
    values = [*call.args, *(word.value for word in call.keywords)]
    return (
        bool(values)
        and all(word.arg for word in call.keywords)
        and all(isinstance(value, INPUTS) for value in values)
        and not any(
            origins.name(inner) or origins.kind(inner)
            for value in values
            for inner in ast.walk(value)
            if isinstance(inner, ast.Name | ast.Attribute)
        )
    )


def _assigns_loss(statement: ast.stmt, call: ast.Call) -> bool:
    """`output, loss = executor(…)`, where one name says that it is the loss."""
    names = target_names(statement)
    losses = [name for name in names if "loss" in name.lower()]
    others = [name for name in names if name not in losses and OTHER_LOSS.search(name)]
    return getattr(statement, "value", None) is call and len(losses) == 1 and not others
