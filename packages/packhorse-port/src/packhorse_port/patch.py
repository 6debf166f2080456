"""`packhorse port --patch`: the plain PyTorch script that a PopTorch script stands for.

The text is edited where PopTorch's names stand and left alone elsewhere, comments and layout
included. Settings of `Options` are read from the script's lines (`settle`) and written where they
act: as a factor of a batch size, as arguments of `call_training` and `call_inference`, whose source
(`plain`) is written once at the top. A setting made under a condition, options that come out of a
function, an operation without a counterpart: such a line is kept, marked and reported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import decode_source
from pathlib import Path

from packhorse.errors import InputError
from packhorse_port import __version__
from packhorse_port.edit import Left, Slots, Text
from packhorse_port.names import NAMES
from packhorse_port.origins import Origins, dotted
from packhorse_port.settle import READ, Plan, chain, made, meaning, preloads, settle

MARK = "# packhorse port, not translated: "
VERSION = "__version__"
LOADERS = ("DataLoader", "AsynchronousDataAccessor")
# Statements that need no counterpart: nothing has to happen.
NEEDLESS = {
    *("setLogLevel", "DataLoader.terminate", "removeBlocks", "Block.start"),
    *("PoplarExecutor.detachFromDevice", "PoplarExecutor.attachToDevice"),
    *("PoplarExecutor.destroy", "PoplarExecutor.compile", "PoplarExecutor.copyWeightsToHost"),
    *("PoplarExecutor.copyWeightsToHostIfNeeded", "PoplarExecutor.copyWeightsToDevice"),
    "PoplarExecutor.copyNamedBuffersToDevice",
}
CONSTANTS = {
    "ipuHardwareIsAvailable": "False",
    "ipuHardwareVersion": "0",
    "PoplarExecutor.isCompiled": "True",
    "PoplarExecutor.isAttachedToDevice": "True",
}
TYPES = {
    "Options": "object",
    "PoplarExecutor": "object",
    "DataLoader": "torch.utils.data.DataLoader",
}
# Calls that give back what they are given: the first argument, a checkpoint all of them.
THROUGH = {
    *("recomputationCheckpoint", "nop", "ipu_print_tensor", "set_available_memory"),
    *("set_overlap_for_input", "set_overlap_for_output", "BeginBlock", "CPU"),
    "AsynchronousDataAccessor",
}
CONTEXTS = {"Block", "Stage", "Phase", "NameScope", "Attribute", "MultiConv"}
# Arguments of PopTorch's optimizers that only keep half precision in range.
SCALING = (
    *("loss_scaling", "velocity_scaling", "use_combined_accum", "accum_type"),
    *("velocity_accum_type", "first_order_momentum_accum_type"),
    "second_order_momentum_accum_type",
)
LOADER = ("options", "dataset", "batch_size", "shuffle", "num_workers", "drop_last")
LOADER_OWN = ("mode", "async_options", "rebatched_worker_size", "auto_distributed_partitioning")
SHARES = ("iterations", "accumulation", "replicas")
# By what makes the model, and whether a call is more than one batch.
STEPS = {
    ("trainingModel", False): "train_once",
    ("trainingModel", True): "call_training",
    ("inferenceModel", False): "infer_once",
    ("inferenceModel", True): "call_inference",
}
# Of the executor's names, those that are the module's.
MODULES = {"PoplarExecutor.state_dict", "PoplarExecutor.load_state_dict", "PoplarExecutor.model"}


@dataclass(frozen=True)
class Patched:
    """The new text, and what of the old could not be translated: line, why."""

    text: str
    left: tuple[tuple[int, str], ...]


def translate(source: bytes, name: str) -> Patched:
    """The plain PyTorch script of the script `source`."""
    try:
        text = decode_source(source)
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{name} is no Python that can be read: {error}") from error
    script = Script(Text(text), tree, Origins(tree))
    for body in bodies(tree):
        gone = [statement for statement in body if script.statement(statement)]
        for statement in gone:
            last = len(gone) == len(body) and statement is gone[-1]
            script.text.delete(statement, alone=last)
    left = sorted(dict.fromkeys(script.left), key=lambda each: each[0])
    for line, why in left:
        script.text.above(line, MARK + why)
    script.header()
    return Patched(script.text.result(), tuple(left))


@dataclass
class Script:
    """A script under translation: what of it is edited, what stays, and what the new one needs."""

    text: Text
    tree: ast.Module
    origins: Origins
    left: list[tuple[int, str]] = field(default_factory=list)
    steps: set[str] = field(default_factory=set)
    needs: set[str] = field(default_factory=set)
    at: int = 1  # the line of the statement under translation

    def __post_init__(self) -> None:
        self.plans = settle(self.tree, self.origins)
        self.left += self.plans.left

    # Statements

    def statement(self, node: ast.stmt) -> bool:
        """Translate one statement without those inside it; True where nothing is left of it."""
        self.at = node.lineno
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self.imports(node)
        value = getattr(node, "value", None)
        if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) and value is not None:
            if (kind := self.origins.kind(value)).startswith("Options"):
                return self.options(node, value)
            if kind in ("Strategy", "TensorLocationSettings"):
                return True
            called = value.func if isinstance(value, ast.Call) else value
            if isinstance(node, ast.Expr) and self.origins.name(called) in NEEDLESS:
                return True
        for part in own_parts(node):
            if not (part in getattr(node, "decorator_list", []) and self.decorator(part)):
                self.expression(part)
        return False

    def imports(self, node: ast.Import | ast.ImportFrom) -> bool:
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").partition(".")[0] == "poptorch" and not node.level
        kept = [alias for alias in node.names if alias.name.partition(".")[0] != "poptorch"]
        if kept and len(kept) < len(node.names):
            self.text.instead_of(node, ast.unparse(ast.Import(kept)))
        return not kept

    def options(self, node: ast.stmt, value: ast.expr) -> bool:
        """Settings act where they are used; a seed alone acts at once."""
        if node.lineno in dict(self.plans.left) or self.lost(node):
            return False
        seeds = [
            ast.unparse(call.args[0])
            for call in ast.walk(value)
            if isinstance(call, ast.Call) and call.args
            if self.origins.name(call.func) == "Options.randomSeed"
        ]
        if not seeds:
            return True
        self.needs.add("torch")
        self.text.instead_of(node, f"torch.manual_seed({seeds[-1]})")
        return False

    def lost(self, node: ast.stmt) -> bool:
        """Is it assigned to a variable that also holds something else, so that its use is lost?"""
        names = [dotted(target) for target in getattr(node, "targets", [])]
        if lost := [name for name in names if name not in self.origins.made]:
            self.tell(f"what {lost[0]} is set to cannot be told")
        return bool(lost)

    def decorator(self, node: ast.AST) -> bool:
        """A function that was a block is one no more."""
        if not isinstance(node, ast.Call) or self.origins.name(node.func) != "BlockFunction":
            return False
        lines = self.text.starts
        self.text.replace(lines[node.lineno - 1], lines[node.end_lineno or node.lineno], "")
        return True

    def tell(self, *reasons: str) -> None:
        """What of the statement is not translated."""
        self.left += [(self.at, why) for why in reasons]

    # Expressions

    def expression(self, node: ast.AST) -> None:
        """Translate what stands for something of PopTorch's, and everything inside."""
        try:
            inner = self.parts(node)
        except Left as why:
            self.tell(*why.args)
            inner = [each for each in ast.iter_child_nodes(node) if isinstance(node, ast.Call)][1:]
        for each in inner:
            self.expression(each)

    def parts(self, node: ast.AST) -> list[ast.AST]:
        """Translate this one; the parts of it that are still to be translated."""
        if isinstance(node, ast.Call) and (name := self.origins.name(node.func)):
            return self.call(node, name)
        if isinstance(node, ast.FormattedValue) and self.has_version(node.value):
            return self.formatted(node)
        if isinstance(node, ast.Attribute | ast.Name):
            if name := self.origins.name(node):
                return self.name(node, name)
            if self.origins.kind(node) == "Options" and isinstance(node.ctx, ast.Load):
                self.text.instead_of(node, "None")
                return []
        return list(ast.iter_child_nodes(node))

    def call(self, node: ast.Call, name: str) -> list[ast.AST]:
        if name in CONSTANTS:
            self.text.instead_of(node, CONSTANTS[name])
            return []
        if name in CONTEXTS:
            self.needs.add("contextlib")
            self.text.instead_of(node, "contextlib.nullcontext()")
            return []
        if name in LOADERS and preloads(node):
            self.tell(f"{name}: early_preload would draw the order before the loop begins")
        if name in THROUGH and node.args:
            return self.through(node, node.args[: None if name == "recomputationCheckpoint" else 1])
        if name == "identity_loss" and node.args:
            return self.loss(node)
        if name == "PoplarExecutor.setOptimizer" and isinstance(node.func, ast.Attribute):
            return self.set_optimizer(node, node.func)
        if name == "DataLoader":
            return self.loader(Slots(self.text, node, LOADER))
        if name in ("trainingModel", "inferenceModel"):
            return self.model(Slots(self.text, node, ("model", "options", "optimizer")), name)
        if name.startswith("optim.") and name != "optim.LAMB":
            return self.optimizer(Slots(self.text, node, ()), name)
        return [*self.name(node.func, name), *node.args, *node.keywords]

    def name(self, node: ast.expr, name: str) -> list[ast.AST]:
        """A name that is not called, or whose arguments stay."""
        if name in TYPES:
            self.needs.add("torch")
            self.text.instead_of(node, TYPES[name])
        elif name == VERSION:
            self.text.instead_of(node, f'"{__version__}"')
        elif isinstance(node, ast.Attribute) and name.startswith(f"{VERSION}."):
            return [node.value]
        elif isinstance(node, ast.Attribute) and name == "DataLoader.combinedBatchSize":
            self.text.replace(self.text.end(node.value), self.text.end(node), ".batch_size")
        elif name in READ and (plan := self.plans.at(dotted(node).partition(".")[0], self.at)):
            self.text.instead_of(node, getattr(plan, READ[name]))
        elif isinstance(node, ast.Attribute) and _is_modules(name):
            # The model is the first argument that functools.partial holds.
            own = "" if name.endswith(".model") else f".{node.attr}"
            self.text.replace(self.text.end(node.value), self.text.end(node), f".args[0]{own}")
        else:
            raise Left(meaning(name))
        return []

    def has_version(self, node: ast.AST) -> bool:
        return any(self.origins.name(each) == VERSION for each in ast.walk(node))

    def formatted(self, node: ast.FormattedValue) -> list[ast.AST]:
        """The version in an f-string becomes text: a literal's quotes might end the string."""
        begin, end = self.text.begin(node.value), self.text.end(node.value)
        before, after = self.text.source[:begin].rstrip(), self.text.source[end:].lstrip()
        if self.origins.name(node.value) != VERSION or (before[-1:], after[:1]) != (b"{", b"}"):
            raise Left(f"{VERSION}: inside an f-string")
        close = len(self.text.source) - len(after) + 1
        self.text.replace(len(before) - 1, close, __version__)
        return []

    def through(self, node: ast.Call, kept: list[ast.expr]) -> list[ast.AST]:
        opening, closing = ("(", ")") if len(kept) > 1 else ("", "")
        self.text.replace(self.text.begin(node), self.text.begin(kept[0]), opening)
        self.text.replace(self.text.end(kept[-1]), self.text.end(node), closing)
        return list(kept)

    def loss(self, node: ast.Call) -> list[ast.AST]:
        given = {word.arg: word.value for word in node.keywords}
        how = node.args[1] if len(node.args) > 1 else given.get("reduction", ast.Constant("none"))
        method = how.value if isinstance(how, ast.Constant) else None
        if method not in ("mean", "sum", "none"):
            raise Left("identity_loss: its reduction is not written out")
        loss, text = node.args[0], self.text
        plain = method == "none" or isinstance(loss, ast.Name | ast.Attribute | ast.Call)
        text.replace(text.begin(node), text.begin(loss), "" if plain else "(")
        after = ("" if plain else ")") + ("" if method == "none" else f".{method}()")
        text.replace(text.end(loss), text.end(node), after)
        return [loss]

    def set_optimizer(self, node: ast.Call, func: ast.Attribute) -> list[ast.AST]:
        if len(node.args) != 1:
            raise Left("setOptimizer: its optimizer is not written out")
        begin, end = self.text.end(func.value), self.text.begin(node.args[0])
        self.text.replace(begin, end, ".keywords.update(optimizer=")
        return [func.value, *node.args]

    # Calls whose arguments change

    def plan(self, given: ast.expr | None) -> Plan:
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            return Plan()
        if plan := self.plans.at(dotted(given), self.at):
            return plan
        root, calls = chain(given, self.origins)
        if self.origins.kind(given) == "Options" and self.origins.path(root):
            return made(Plan(), calls, self.origins)
        raise Left(f"what {ast.unparse(given)} is set to cannot be told")

    def loader(self, slots: Slots) -> list[ast.AST]:
        factor = self.plan(slots.value("options")).factor(*SHARES)
        slots.drop("options", *LOADER_OWN)
        slots.name_positional(but="dataset")
        if (size := slots.value("batch_size")) is not None and factor:
            slots.times(size, factor)
        elif factor:
            slots.add(f"batch_size={factor}")
        workers = slots.value("num_workers")
        if workers is not None and not (isinstance(workers, ast.Constant) and workers.value == 0):
            # More workers than cores is what a host of IPUs has; and they live through the epochs.
            self.needs.add("os")
            self.text.around(workers, "min(", ", os.cpu_count() or 1)")
            if slots.value("persistent_workers") is None:
                some = isinstance(workers, ast.Constant)
                slots.add(f"persistent_workers={'True' if some else ast.unparse(workers) + ' > 0'}")
        if slots.value("drop_last") is None:
            slots.add("drop_last=True")
        return self.renamed(slots, "torch.utils.data.DataLoader")

    def model(self, slots: Slots, name: str) -> list[ast.AST]:
        plan, training = self.plan(slots.value("options")), name == "trainingModel"
        if training and slots.value("optimizer") is None:
            raise Left("trainingModel: without an optimizer")
        if plan.replicas != "1" and b"BatchNorm" in self.text.source:
            self.tell("BatchNorm counts all replicas, not the first alone")
        trained = ("accumulation", "mean") if training else ()
        words = plan.words(("iterations", *trained, "replicas", "outputs", "every"))
        step = STEPS[name, bool(words)]
        slots.drop("options")
        slots.name_positional(but="model")
        slots.first("model", before=f"{step}, ")
        for word in words:
            slots.add(word)
        self.steps.add(step)
        self.needs |= {"functools", "typing"}
        return self.renamed(slots, "functools.partial")

    def optimizer(self, slots: Slots, name: str) -> list[ast.AST]:
        kind = name.removeprefix("optim.")
        words = ("max_grad_norm", "bias_correction", "use_tf_variant")
        if given := [word for word in words if slots.value(word) is not None]:
            raise Left(*(f"torch.optim.{kind} has no {word}" for word in given))
        slots.drop(*SCALING)
        return self.renamed(slots, f"torch.optim.{kind}")

    def renamed(self, slots: Slots, name: str) -> list[ast.AST]:
        self.needs.add("torch")
        self.text.instead_of(slots.call.func, name)
        return slots.done()

    # The top of the new script

    def header(self) -> None:
        """What the new text needs, behind the imports at the top."""
        bound = {name for name, home in self.origins.imported.items() if name == home}
        wanted = [f"import {name}" for name in sorted(self.needs - bound - {"typing"})]
        wanted += ["from typing import Any"] if "typing" in self.needs else []
        if not wanted:
            return
        functions = plain_functions(self.steps)
        taken = {node.name for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        if clash := sorted(taken & set(functions)):
            raise InputError(f"the script has a function {clash[0]} of its own; rename it first")
        line = max((node.end_lineno or 0 for node in leading(self.tree)), default=0)
        text = "\n".join(wanted) + "\n"
        text += "".join(f"\n\n{function}\n" for function in functions.values())
        self.text.insert(self.text.starts[line], text + ("\n\n" if functions else ""))


def _is_modules(name: str) -> bool:
    """Is it the wrapped module's, which the executor only hands on?"""
    return name in MODULES or (name.startswith("PoplarExecutor.") and name not in NAMES)


def plain_functions(steps: set[str]) -> dict[str, str]:
    """The source of functions of `plain`, with those they call."""
    text = (Path(__file__).parent / "plain.py").read_text("utf-8")
    every = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    needed, waiting = set(), list(steps)
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed.add(name)
            used = {node.id for node in ast.walk(every[name]) if isinstance(node, ast.Name)}
            waiting += used & every.keys()
    wanted = [node for name, node in every.items() if name in needed]
    return {node.name: ast.get_source_segment(text, node) or "" for node in wanted}


def leading(tree: ast.Module) -> Iterator[ast.stmt]:
    """The imports at the top, among texts alone."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return


def bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every block of statements."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def own_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
