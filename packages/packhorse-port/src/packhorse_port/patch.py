"""`packhorse port --patch`: the plain PyTorch script that is equivalent to a PopTorch script.

The text is edited where PopTorch's names are and left alone elsewhere, including comments and
layout. Settings of `Options` are read from the syntax tree (`syntax`) and written where they act:
as a factor of a batch size, and in the loops over micro batches that take the place of calls
(`plain_loops`). Where a call cannot be written as a loop, they are arguments of `call_training` and
`call_inference`, whose source (`plain`) is written once at the top. A line that cannot be
translated (a setting made under a condition, options returned by a function, an operation without a
counterpart) is kept, marked and reported.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import decode_source
from io import BytesIO
from pathlib import Path
from tokenize import detect_encoding
from typing import NamedTuple

from packhorse.errors import InputError
from packhorse_port import __version__
from packhorse_port.names import NAMES
from packhorse_port.plain_loops import ExecutorLoop, executor_loops
from packhorse_port.syntax import (
    ATTRIBUTES,
    NameOrigins,
    OptionsPlan,
    Untranslatable,
    apply_calls,
    describe,
    dotted,
    option_plans,
    preloads,
    split_chain,
)

MARK = "# packhorse port, not translated: "
VERSION = "__version__"
DEVICE = 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'
EXECUTORS = ("poptorch.trainingModel", "poptorch.inferenceModel")
LOADERS = ("DataLoader", "AsynchronousDataAccessor")
# Statements that a plain script does not need
NEEDLESS = {
    "setLogLevel",
    "DataLoader.terminate",
    "removeBlocks",
    "Block.start",
    "PoplarExecutor.detachFromDevice",
    "PoplarExecutor.attachToDevice",
    "PoplarExecutor.destroy",
    "PoplarExecutor.compile",
    "PoplarExecutor.copyWeightsToHost",
    "PoplarExecutor.copyWeightsToHostIfNeeded",
    "PoplarExecutor.copyWeightsToDevice",
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
# Calls that return their first argument; a recomputationCheckpoint returns all of them.
IDENTITIES = {
    "recomputationCheckpoint",
    "nop",
    "ipu_print_tensor",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "BeginBlock",
    "CPU",
    "AsynchronousDataAccessor",
}
# Expressions that need no brackets, whatever stands around them
ATOMS = (
    ast.Name,
    ast.Attribute,
    ast.Call,
    ast.Subscript,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.Set,
)
CONTEXTS = {"Block", "Stage", "Phase", "NameScope", "Attribute", "MultiConv"}
# Arguments of PopTorch's optimizers that only keep half precision in range
SCALING = (
    "loss_scaling",
    "velocity_scaling",
    "use_combined_accum",
    "accum_type",
    "velocity_accum_type",
    "first_order_momentum_accum_type",
    "second_order_momentum_accum_type",
)
LOADER_POSITIONAL = ("options", "dataset", "batch_size", "shuffle", "num_workers", "drop_last")
LOADER_ONLY = ("mode", "async_options", "rebatched_worker_size", "auto_distributed_partitioning")
BATCH_FACTORS = ("iterations", "accumulation", "replicas")
# The function of `plain` by what creates the model, and whether a call is more than one batch
STEPS = {
    ("trainingModel", False): "train_once",
    ("trainingModel", True): "call_training",
    ("inferenceModel", False): "infer_once",
    ("inferenceModel", True): "call_inference",
}
# Names of the executor that are the module's
MODULE_NAMES = {
    "PoplarExecutor.state_dict",
    "PoplarExecutor.load_state_dict",
    "PoplarExecutor.model",
}


def separate_expressions(tree: ast.Module) -> Iterator[ast.AST]:
    """Expressions that a comma, a bracket or the end of a statement sets off on both sides."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr):
            yield from [node.value] if node.value else []
        elif isinstance(node, ast.Call):
            yield from [*node.args, *(word.value for word in node.keywords)]


def needs_brackets(expression: ast.expr, is_separate: bool) -> bool:
    """Whether an expression that loses the brackets around it must get new ones."""
    has_one_line = expression.lineno == expression.end_lineno
    return not isinstance(expression, ATOMS) and not (is_separate and has_one_line)


@dataclass(frozen=True)
class PatchedScript:
    """The new text, and (line, reason) of what could not be translated."""

    text: str
    untranslated: tuple[tuple[int, str], ...]

    def encode(self) -> bytes:
        """The text as a file, in the encoding that its first lines name."""
        text = self.text.encode()
        encoding, _ = detect_encoding(BytesIO(text).readline)
        return self.text.encode(encoding)


def translate(source: bytes, name: str) -> PatchedScript:
    """Translate a PopTorch script to plain PyTorch."""
    try:
        text = decode_source(source)
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{name} cannot be parsed as Python: {error}") from error
    script = ScriptPatcher(SourceText(text), tree, NameOrigins(tree))
    for body in bodies(tree):
        deleted = [statement for statement in body if script.statement(statement)]
        for statement in deleted:
            last = len(deleted) == len(body) and statement is deleted[-1]
            script.text.delete(statement, only_one=last)
    untranslated = sorted(dict.fromkeys(script.untranslated), key=lambda entry: entry[0])
    for line, reason in untranslated:
        script.text.insert_line(line, MARK + reason)
    script.header()
    return PatchedScript(script.text.result(), tuple(untranslated))


@dataclass
class ScriptPatcher:
    """A script being translated: its edits, what stays, and what the new one needs."""

    text: SourceText
    tree: ast.Module
    origins: NameOrigins
    untranslated: list[tuple[int, str]] = field(default_factory=list)
    steps: set[str] = field(default_factory=set)  # functions of `plain` that are called
    modules: set[str] = field(default_factory=set)  # to import
    line: int = 1  # of the current statement

    def __post_init__(self) -> None:
        self.separate = set(map(id, separate_expressions(self.tree)))
        self.plans = option_plans(self.tree, self.origins)
        self.untranslated += self.plans.untranslated
        bound = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self.device = "device" if "device" not in bound else "torch_device"
        self.loops = executor_loops(
            self.tree, self.origins, self.executor_plans(), self.text.has_own_lines
        )
        self.statement_loops = {
            statement: loop for loop in self.loops.values() for statement in loop.calls
        }
        self.set_modes()

    def executor_plans(self) -> dict[ast.Call, OptionsPlan]:
        """The settings of each executor where it is created, if they are known."""
        plans = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self.origins.path(node.func) in EXECUTORS:
                words = {word.arg: word.value for word in node.keywords}
                self.line = node.lineno
                with suppress(Untranslatable):
                    second = node.args[1] if len(node.args) > 1 else None
                    plans[node] = self.plan(words.get("options", second))
        return plans

    def set_modes(self) -> None:
        """Where a script changes modes, set a loop's before it: an executor keeps the mode it had.

        Where it changes none, all of its executors and the module have the same one.
        """
        created = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        self.trains = any(self.origins.path(node.func) == EXECUTORS[0] for node in created)
        self.mode_changes, of_parts = mode_changes(self.tree)
        if not self.mode_changes:
            return
        lines = set()
        for statement, loop in self.statement_loops.items():
            mode = "train" if loop.training else "eval"
            lines.add((self.whole_loop(statement).lineno, f"{loop.variable}.{mode}()"))
        for line, text in sorted(lines):
            self.text.insert_line(line, text)
        if lines:
            reason = "the mode of a part: the model's is set before each loop, so set this after it"
            self.untranslated += [(line, reason) for line in of_parts]

    def whole_loop(self, statement: ast.stmt) -> ast.stmt:
        """The innermost `for` around a call, if nothing in it may change the module's mode."""
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.For) and statement in ast.walk(node)
        ]
        if not around:
            return statement
        node = max(around, key=lambda node: node.lineno)
        inside = [inner for part in node.body for inner in ast.walk(part)]
        loop = self.statement_loops[statement]
        others = any(
            call in inside for call, other in self.statement_loops.items() if other is not loop
        )
        created = any(
            isinstance(inner, ast.Name)
            and inner.id == loop.variable
            and isinstance(inner.ctx, ast.Store)
            for inner in inside
        )
        methods = {
            inner.name for inner in ast.walk(self.tree) if isinstance(inner, ast.FunctionDef)
        }
        unknown = any(
            name not in (loop.variable, *dir(builtins))
            if isinstance(inner.func, ast.Name)
            else name.rpartition(".")[2] in {"train", "eval", *methods}
            for inner in inside
            if isinstance(inner, ast.Call)
            for name in [dotted(inner.func)]
        )
        return statement if others or created or unknown else node

    # Statements

    def statement(self, node: ast.stmt) -> bool:
        """Translate one statement without those inside it; True if it is to be deleted."""
        self.line = node.lineno
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self.imports(node)
        value = getattr(node, "value", None)
        if (loop := self.statement_loops.get(node)) and self.call_in_loop(node, loop):
            return False
        if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) and value is not None:
            if (kind := self.origins.kind(value)).startswith("Options"):
                return self.options(node, value)
            if kind in ("Strategy", "TensorLocationSettings"):
                return True
            called = value.func if isinstance(value, ast.Call) else value
            if isinstance(node, ast.Expr) and self.origins.name(called) in NEEDLESS:
                return True
            if self.executor(node, called):
                return isinstance(node, ast.Expr)
        for part in statement_parts(node):
            if not (part in getattr(node, "decorator_list", []) and self.decorator(part)):
                self.expression(part)
        return False

    def executor(self, node: ast.stmt, called: ast.expr) -> bool:
        """Whether this creates an executor that becomes loops, or sets its optimizer, as it is."""
        name = self.origins.name(called)
        if isinstance(called, ast.Attribute) and name == "PoplarExecutor.setOptimizer":
            return dotted(called.value) in self.loops
        if name not in ("trainingModel", "inferenceModel") or not isinstance(node, ast.Assign):
            return False
        loop = self.loops.get(dotted(node.targets[0]))
        if loop is None:
            return False
        self.modules.add("torch")
        self.text.replace_node(node.value, f"{ast.unparse(loop.model)}.to({self.device})")
        return True

    def call_in_loop(self, node: ast.stmt, loop: ExecutorLoop) -> bool:
        """Write a call as a loop; False if the rest of its statement is still to be translated."""
        self.modules.add("torch")
        indent = self.text.indent(node.lineno)
        if loop.training:
            lines = loop.lines(node, self.device)
            self.text.replace_node(node, f"\n{indent}".join(lines))
            return True
        self.text.insert(self.text.begin(node), f"with torch.no_grad():\n{indent}    ")
        for call in loop.calls[node]:
            for value in [*call.args, *(word.value for word in call.keywords)]:
                self.text.insert(self.text.end(value), f".to({self.device})")
            if getattr(node, "value", None) is not call:  # then it is used as a tensor
                self.text.insert(self.text.end(call), ".cpu()")
        return False

    def imports(self, node: ast.Import | ast.ImportFrom) -> bool:
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").partition(".")[0] == "poptorch" and not node.level
        remaining = [alias for alias in node.names if alias.name.partition(".")[0] != "poptorch"]
        if remaining and len(remaining) < len(node.names):
            self.text.replace_node(node, ast.unparse(ast.Import(remaining)))
        return not remaining

    def options(self, node: ast.stmt, value: ast.expr) -> bool:
        """Delete settings, which act where they are used; only a seed acts here."""
        if node.lineno in dict(self.plans.untranslated) or self.is_ambiguous(node):
            return False
        seeds = [
            ast.unparse(call.args[0])
            for call in ast.walk(value)
            if isinstance(call, ast.Call) and call.args
            if self.origins.name(call.func) == "Options.randomSeed"
        ]
        if not seeds:
            return True
        self.modules.add("torch")
        self.text.replace_node(node, f"torch.manual_seed({seeds[-1]})")
        return False

    def is_ambiguous(self, node: ast.stmt) -> bool:
        """Whether a target also holds something else, so that its use cannot be followed."""
        names = [dotted(target) for target in getattr(node, "targets", [])]
        if ambiguous := [name for name in names if name not in self.origins.variables]:
            self.report(f"the value of {ambiguous[0]} is not known")
        return bool(ambiguous)

    def decorator(self, node: ast.AST) -> bool:
        """Delete the decorator of a block."""
        if not isinstance(node, ast.Call) or self.origins.name(node.func) != "BlockFunction":
            return False
        starts = self.text.line_starts
        self.text.replace(starts[node.lineno - 1], starts[node.end_lineno or node.lineno], "")
        return True

    def report(self, *reasons: str) -> None:
        """Record why the current statement is not fully translated."""
        self.untranslated += [(self.line, reason) for reason in reasons]

    # Expressions

    def expression(self, node: ast.AST) -> None:
        """Translate an expression and everything inside it."""
        try:
            remaining = self.translate_node(node)
        except Untranslatable as reasons:
            self.report(*reasons.args)
            children = list(ast.iter_child_nodes(node)) if isinstance(node, ast.Call) else []
            remaining = children[1:]  # the arguments, without the function
        for child in remaining:
            self.expression(child)

    def translate_node(self, node: ast.AST) -> list[ast.AST]:
        """Translate one node; returns the parts of it that are still to be translated."""
        if isinstance(node, ast.Call) and (name := self.origins.name(node.func)):
            return self.call(node, name)
        if isinstance(node, ast.FormattedValue) and self.has_version(node.value):
            return self.formatted(node)
        if isinstance(node, ast.Attribute | ast.Name):
            if name := self.origins.name(node):
                return self.name(node, name)
            if self.origins.kind(node) == "Options" and isinstance(node.ctx, ast.Load):
                self.text.replace_node(node, "None")
                return []
        return list(ast.iter_child_nodes(node))

    def call(self, node: ast.Call, name: str) -> list[ast.AST]:
        if name in CONSTANTS:
            self.text.replace_node(node, CONSTANTS[name])
            return []
        if name in CONTEXTS:
            self.modules.add("contextlib")
            self.text.replace_node(node, "contextlib.nullcontext()")
            return []
        if name in LOADERS and preloads(node):
            self.report(f"{name}: early_preload would draw the order before the loop begins")
        if name in IDENTITIES and node.args:
            returned = node.args if name == "recomputationCheckpoint" else node.args[:1]
            return self.identity(node, returned)
        if name == "identity_loss" and node.args:
            return self.loss(node)
        if name == "PoplarExecutor.setOptimizer" and isinstance(node.func, ast.Attribute):
            return self.set_optimizer(node, node.func)
        if name == "DataLoader":
            return self.loader(CallArguments(self.text, node, LOADER_POSITIONAL))
        if name in ("trainingModel", "inferenceModel"):
            positional = ("model", "options", "optimizer")
            return self.model(CallArguments(self.text, node, positional), name)
        if name.startswith("optim.") and name != "optim.LAMB":
            return self.optimizer(CallArguments(self.text, node, ()), name)
        return [*self.name(node.func, name), *node.args, *node.keywords]

    def name(self, node: ast.expr, name: str) -> list[ast.AST]:
        """Translate a name that is not called, or whose arguments stay."""
        if name in TYPES:
            self.modules.add("torch")
            self.text.replace_node(node, TYPES[name])
        elif name == VERSION:
            self.text.replace_node(node, f'"{__version__}"')
        elif isinstance(node, ast.Attribute) and name.startswith(f"{VERSION}."):
            return [node.value]
        elif isinstance(node, ast.Attribute) and name == "DataLoader.combinedBatchSize":
            self.text.replace(self.text.end(node.value), self.text.end(node), ".batch_size")
        elif name in ATTRIBUTES and (
            plan := self.plans.at(dotted(node).partition(".")[0], self.line)
        ):
            self.text.replace_node(node, getattr(plan, ATTRIBUTES[name]))
        elif isinstance(node, ast.Attribute) and dotted(node.value) in self.loops:
            if not _is_of_module(name):
                raise Untranslatable(describe(name))
            if name.endswith(".model"):
                self.text.replace(self.text.end(node.value), self.text.end(node), "")
        elif isinstance(node, ast.Attribute) and _is_of_module(name):
            # The model is the first argument that functools.partial holds.
            attribute = "" if name.endswith(".model") else f".{node.attr}"
            begin = self.text.end(node.value)
            self.text.replace(begin, self.text.end(node), f".args[0]{attribute}")
        else:
            raise Untranslatable(describe(name))
        return []

    def has_version(self, node: ast.AST) -> bool:
        return any(self.origins.name(inner) == VERSION for inner in ast.walk(node))

    def formatted(self, node: ast.FormattedValue) -> list[ast.AST]:
        """Write the version into an f-string as text: quotes might end the string."""
        begin = self.text.begin(node.value)
        end = self.text.end(node.value)
        before = self.text.source[:begin].rstrip()
        after = self.text.source[end:].lstrip()
        if self.origins.name(node.value) != VERSION or (before[-1:], after[:1]) != (b"{", b"}"):
            raise Untranslatable(f"{VERSION}: inside an f-string")
        close = len(self.text.source) - len(after) + 1
        self.text.replace(len(before) - 1, close, __version__)
        return []

    def identity(self, node: ast.Call, returned: list[ast.expr]) -> list[ast.AST]:
        """Replace a call by the arguments that it returns."""
        in_brackets = len(returned) > 1 or needs_brackets(returned[0], id(node) in self.separate)
        self.text.replace(
            self.text.begin(node), self.text.begin(returned[0]), "(" if in_brackets else ""
        )
        self.text.replace(
            self.text.end(returned[-1]), self.text.end(node), ")" if in_brackets else ""
        )
        return list(returned)

    def loss(self, node: ast.Call) -> list[ast.AST]:
        keywords = {word.arg: word.value for word in node.keywords}
        default = keywords.get("reduction", ast.Constant("none"))
        reduction = node.args[1] if len(node.args) > 1 else default
        method = reduction.value if isinstance(reduction, ast.Constant) else None
        if method not in ("mean", "sum", "none"):
            raise Untranslatable("identity_loss: its reduction is not written out")
        loss = node.args[0]
        text = self.text
        plain = method == "none" or isinstance(loss, ast.Name | ast.Attribute | ast.Call)
        text.replace(text.begin(node), text.begin(loss), "" if plain else "(")
        after = ("" if plain else ")") + ("" if method == "none" else f".{method}()")
        text.replace(text.end(loss), text.end(node), after)
        return [loss]

    def set_optimizer(self, node: ast.Call, func: ast.Attribute) -> list[ast.AST]:
        if len(node.args) != 1:
            raise Untranslatable("setOptimizer: its optimizer is not written out")
        begin = self.text.end(func.value)
        end = self.text.begin(node.args[0])
        self.text.replace(begin, end, ".keywords.update(optimizer=")
        return [func.value, *node.args]

    # Calls whose arguments change

    def plan(self, options: ast.expr | None) -> OptionsPlan:
        """What the options passed to a loader or model are set to."""
        if options is None or (isinstance(options, ast.Constant) and options.value is None):
            return OptionsPlan()
        if plan := self.plans.at(dotted(options), self.line):
            return plan
        root, calls = split_chain(options, self.origins)
        if self.origins.kind(options) == "Options" and self.origins.path(root):
            return apply_calls(OptionsPlan(), calls, self.origins)
        raise Untranslatable(f"the value of {ast.unparse(options)} is not known")

    def loader(self, arguments: CallArguments) -> list[ast.AST]:
        factor = self.plan(arguments.value("options")).factor(*BATCH_FACTORS)
        arguments.drop("options", *LOADER_ONLY)
        arguments.name_positional(except_for="dataset")
        if (size := arguments.value("batch_size")) is not None and factor:
            arguments.multiply(size, factor)
        elif factor:
            arguments.add(f"batch_size={factor}")
        workers = arguments.value("num_workers")
        if workers is not None and not (isinstance(workers, ast.Constant) and workers.value == 0):
            # Scripts for an IPU's host often request more workers than there are cores; and
            # PopTorch's workers persist across epochs.
            self.modules.add("os")
            self.text.surround(workers, "min(", ", os.cpu_count() or 1)")
            if arguments.value("persistent_workers") is None:
                literal = isinstance(workers, ast.Constant)
                persistent = "True" if literal else ast.unparse(workers) + " > 0"
                arguments.add(f"persistent_workers={persistent}")
        if arguments.value("drop_last") is None:
            arguments.add("drop_last=True")
        return self.renamed_call(arguments, "torch.utils.data.DataLoader")

    def model(self, arguments: CallArguments, name: str) -> list[ast.AST]:
        plan = self.plan(arguments.value("options"))
        training = name == "trainingModel"
        if training and arguments.value("optimizer") is None:
            raise Untranslatable("trainingModel: without an optimizer")
        if "eval" in self.mode_changes and self.trains and not self.is_done_before_eval(arguments):
            method = "train" if training else "eval"
            self.report(
                f"{name}: it keeps its mode; call {method}() of the module before its calls"
            )
        if plan.replicas != "1" and b"BatchNorm" in self.text.source:
            self.report("BatchNorm counts all replicas, not the first alone")
        training_only = ("accumulation", "mean") if training else ()
        keywords = plan.keywords(("iterations", *training_only, "replicas", "outputs", "every"))
        step = STEPS[name, bool(keywords)]
        arguments.drop("options")
        arguments.name_positional(except_for="model")
        arguments.unname_first("model", before=f"{step}, ")
        for keyword in keywords:
            arguments.add(keyword)
        self.steps.add(step)
        self.modules |= {"functools", "typing"}
        return self.renamed_call(arguments, "functools.partial")

    def is_done_before_eval(self, arguments: CallArguments) -> bool:
        """Whether the script itself, line by line, last uses an executor before any `eval()`."""
        statements = self.tree.body
        names = {
            target.id
            for statement in statements
            if isinstance(statement, ast.Assign) and statement.value is arguments.call
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        uses = [
            (place, isinstance(statement, ast.FunctionDef | ast.ClassDef))
            for place, statement in enumerate(statements)
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and node.id in names
        ]
        evals = [
            (place, isinstance(statement, ast.Expr))
            for place, statement in enumerate(statements)
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute) and node.attr == "eval"
        ]
        in_order = not any(called for _, called in uses) and all(alone for _, alone in evals)
        return bool(uses) and in_order and max(uses)[0] < min(evals)[0]

    def optimizer(self, arguments: CallArguments, name: str) -> list[ast.AST]:
        kind = name.removeprefix("optim.")
        poptorch_only = ("max_grad_norm", "bias_correction", "use_tf_variant")
        if used := [word for word in poptorch_only if arguments.value(word) is not None]:
            raise Untranslatable(*(f"torch.optim.{kind} has no {word}" for word in used))
        arguments.drop(*SCALING)
        return self.renamed_call(arguments, f"torch.optim.{kind}")

    def renamed_call(self, arguments: CallArguments, name: str) -> list[ast.AST]:
        self.modules.add("torch")
        self.text.replace_node(arguments.call.func, name)
        return arguments.write()

    # The top of the new script

    def header(self) -> None:
        """Insert imports and functions after the imports at the top."""
        bound = {name for name, home in self.origins.imported.items() if name == home}
        imports = [f"import {name}" for name in sorted(self.modules - bound - {"typing"})]
        if "typing" in self.modules:
            imports.append("from typing import Any")
        if not imports and not self.loops:
            return
        functions = plain_functions(self.steps)
        defined = {node.name for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        if clash := sorted(defined & set(functions)):
            raise InputError(f"the script has a function {clash[0]} of its own; rename it first")
        line = max((node.end_lineno or 0 for node in leading_imports(self.tree)), default=0)
        text = "\n".join(imports) + ("\n" if imports else "")
        if self.loops:
            text += f"\n{self.device} = {DEVICE}\n"
        text += "".join(f"\n\n{function}\n" for function in functions.values())
        self.text.insert(self.text.line_starts[line], text + ("\n\n" if functions else ""))


def _is_of_module(name: str) -> bool:
    """Whether the executor only forwards this name to the wrapped module."""
    return name in MODULE_NAMES or (name.startswith("PoplarExecutor.") and name not in NAMES)


def mode_changes(tree: ast.Module) -> tuple[set[str], list[int]]:
    """Which of `net.eval()` and `net.train()` are called; and the lines of those of parts of it."""
    items = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.For)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    }
    in_modules = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(getattr(method, "name", "") == "forward" for method in node.body)
        for inner in ast.walk(node)
    }
    wholes: set[str] = set()
    parts: list[int] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_module = all(isinstance(getattr(word, "value", None), bool) for word in node.args)
        if node.func.attr not in ("eval", "train") or not of_module:
            continue
        root, *attributes = dotted(node.func.value).split(".")
        is_part = len(attributes) > (root == "self" and node not in in_modules) or root in items
        if is_part or not root:
            parts.append(node.lineno)
        else:
            wholes.add(node.func.attr)
    return wholes, parts


def plain_functions(steps: set[str]) -> dict[str, str]:
    """The source of these functions of `plain`, and of those they call."""
    text = (Path(__file__).parent / "plain.py").read_text("utf-8")
    functions = {
        node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
    }
    needed = set()
    pending = list(steps)
    while pending:
        if (name := pending.pop()) not in needed:
            needed.add(name)
            used = {node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)}
            pending += used & functions.keys()
    return {
        name: ast.get_source_segment(text, node) or ""
        for name, node in functions.items()
        if name in needed
    }


def leading_imports(tree: ast.Module) -> Iterator[ast.stmt]:
    """The imports at the top, up to the first statement that is neither import nor string."""
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


def statement_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child


# Editing source text at positions that the syntax tree names

EditableNode = ast.expr | ast.stmt | ast.keyword


class SourceText:
    """A text and its pending edits.

    Edits are applied in one pass at the end, so that all offsets are those of the original text;
    what is not edited keeps its layout and comments. Offsets count bytes, as `ast` does.
    """

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.lines = self.source.splitlines(keepends=True)
        self.line_starts = [0]
        for line in self.lines:
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.edits: list[tuple[int, int, str]] = []

    def begin(self, node: EditableNode) -> int:
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: EditableNode) -> int:
        return self.line_starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def replace(self, begin: int, end: int, text: str) -> None:
        self.edits.append((begin, end, text))

    def insert(self, offset: int, text: str) -> None:
        self.edits.append((offset, offset, text))

    def replace_node(self, node: EditableNode, text: str) -> None:
        self.replace(self.begin(node), self.end(node), text)

    def surround(self, node: EditableNode, before: str, after: str) -> None:
        self.insert(self.begin(node), before)
        self.insert(self.end(node), after)

    def insert_line(self, line: int, text: str) -> None:
        """Insert a line above a line, with the same indentation."""
        self.insert(self.line_starts[line - 1], f"{self.indent(line)}{text}\n")

    def indent(self, line: int) -> str:
        """The spaces or tabs that a line begins with."""
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip())].decode()

    def has_own_lines(self, node: ast.stmt) -> bool:
        """Whether nothing but a comment is on the lines of a statement beside it."""
        before = self.lines[node.lineno - 1][: node.col_offset].strip()
        after = self.lines[(node.end_lineno or 1) - 1][node.end_col_offset :].strip()
        return not before and (not after or after.startswith(b"#"))

    def delete(self, node: ast.stmt, only_one: bool) -> None:
        """Delete a statement with its lines; write `pass` if its line or block has nothing else."""
        first = node.lineno - 1
        last = (node.end_lineno or node.lineno) - 1
        before = self.lines[first][: node.col_offset]
        after = self.lines[last][node.end_col_offset :].strip()
        shares_line = before.strip() or (after and not after.startswith(b"#"))
        if shares_line or (only_one and before):
            self.replace_node(node, "pass")
        else:
            self.replace(self.line_starts[first], self.line_starts[last + 1], "")

    def result(self) -> str:
        """The text with all edits applied."""
        parts = []
        position = 0
        for begin, end, text in sorted(self.edits, key=lambda edit: edit[:2]):
            parts += [self.source[position:begin], text.encode()]
            position = end
        parts.append(self.source[position:])
        return b"".join(parts).decode()


class CallArgument(NamedTuple):
    """One argument of a call: its name, its node (a keyword's includes the name), its value."""

    name: str | None
    node: ast.expr | ast.keyword
    value: ast.expr


class CallArguments:
    """The arguments of a call, to be dropped, named and added to."""

    def __init__(self, text: SourceText, call: ast.Call, names: tuple[str, ...]) -> None:
        """names: of the positional parameters."""
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            raise Untranslatable("its arguments are not written out")
        self.text = text
        self.call = call
        arguments = [
            CallArgument(names[i] if i < len(names) else None, value, value)
            for i, value in enumerate(call.args)
        ]
        arguments += [CallArgument(word.arg, word, word.value) for word in call.keywords]
        self.arguments = sorted(arguments, key=lambda argument: text.begin(argument.node))
        self.dropped: set[str | None] = set()
        self.added: list[str] = []

    def value(self, name: str) -> ast.expr | None:
        return next((argument.value for argument in self.arguments if argument.name == name), None)

    def drop(self, *names: str) -> None:
        self.dropped |= set(names)

    def add(self, text: str) -> None:
        self.added.append(text)

    def name_positional(self, except_for: str) -> None:
        """Turn positional arguments into keywords, except the one that both calls have first."""
        for argument in self.remaining():
            if argument.node is argument.value and argument.name not in (except_for, None):
                self.text.insert(self.text.begin(argument.node), f"{argument.name}=")

    def unname_first(self, name: str, before: str = "") -> None:
        """Make the argument `name`, which must be first, positional, after the text `before`."""
        argument = next(iter(self.remaining()), None)
        if argument is None or argument.name != name:
            raise Untranslatable(f"write the {name} first")
        begin = self.text.begin(argument.node)
        self.text.replace(begin, self.text.begin(argument.value), before)

    def multiply(self, value: ast.expr, factor: str) -> None:
        plain = isinstance(value, ast.Name | ast.Attribute | ast.Constant | ast.Call)
        opening, closing = ("", "") if plain else ("(", ")")
        self.text.surround(value, opening, f"{closing} * {factor}")

    def remaining(self) -> list[CallArgument]:
        return [
            argument
            for argument in self.arguments
            if argument.name not in self.dropped or argument.name is None
        ]

    def write(self) -> list[ast.AST]:
        """Write all changes; returns the remaining values, which are still to be translated."""
        remaining = self.remaining()
        text = self.text
        added = ", ".join(self.added)
        if not remaining:
            text.replace(text.end(self.call.func) + 1, text.end(self.call) - 1, added)
            return []
        last = text.end(remaining[-1].node)
        text.insert(last, f", {added}" if added else "")
        for argument, following in zip(self.arguments, self.arguments[1:], strict=False):
            if argument not in remaining and text.begin(argument.node) < last:
                text.replace(text.begin(argument.node), text.begin(following.node), "")
        if (end := text.end(self.arguments[-1].node)) > last:
            text.replace(last, end, "")
        return [argument.value for argument in remaining]
