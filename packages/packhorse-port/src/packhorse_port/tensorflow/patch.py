"""`packhorse port --patch` of a TensorFlow script: what a person would write without an IPU.

Imports, configuration and settings of the IPU are deleted, scopes are dissolved and their bodies
moved out, `strategy.run(f, args=[x])` becomes `f(x)`, operations and layers become TensorFlow's,
and accumulated gradients become `gradient_accumulation_steps` of the optimizer. What has no
counterpart in a line or two (queues, loops of the IPU, pipelines, estimators) is kept, marked and
reported.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from importlib.util import decode_source

from packhorse_port.patch import (
    ATOMS,
    MARK,
    CallArguments,
    PatchedScript,
    SourceText,
    leading_imports,
    needs_brackets,
    separate_expressions,
    statement_parts,
)
from packhorse_port.syntax import NameOrigins, Untranslatable, assignments, dotted
from packhorse_port.tensorflow.names import CONFIGS, METHODS, lookup, short_name, shorter_name

STRATEGIES = (
    "ipu.ipu_strategy.IPUStrategy",
    "ipu.ipu_strategy.IPUStrategyV1",
    "ipu.distributed.PopDistStrategy",
    "ipu.distributed.popdist_strategy.PopDistStrategy",
)
# Calls that a plain script does not need, where they are statements
NEEDLESS = {
    "ipu.config.configure_ipu_system",
    "ipu.config.reset_ipu_configuration",
    "ipu.utils.configure_ipu_system",
    "ipu.utils.reset_ipu_configuration",
    "ipu.utils.move_variable_initialization_to_cpu",
    "ipu.utils.use_synthetic_data_for",
    "popdist.init",
    "popdist.tensorflow.set_ipu_config",
    "Model.set_asynchronous_callbacks",
    "Model.set_infeed_queue_options",
    "Model.set_outfeed_queue_options",
    "Model.set_pipeline_stage_assignment",
    "Model.reset_pipeline_stage_assignment",
    "Model.print_pipeline_stage_assignment_summary",
}
ACCUMULATING = ("Model.set_pipelining_options", "Model.set_gradient_accumulation_options")
CONSTANTS = {
    "ipu.config.running_on_ipu_model": "False",
    "ipu.utils.running_on_ipu_model": "False",
    "ipu.utils.get_num_of_ipus_in_device": "1",
    "ipu.replication_ops.replication_index": "0",
    "popdist.isPopdistEnvSet": "False",
    "popdist.getNumInstances": "1",
    "popdist.getInstanceIndex": "0",
    "popdist.getNumTotalReplicas": "1",
    "popdist.getNumLocalReplicas": "1",
    "popdist.getNumIpusPerReplica": "1",
}
# Calls that return their first argument
IDENTITIES = {
    "ipu.outlined_function",
    "ipu.functional_ops.outlined_function",
    "ipu.pipelining_ops.recomputation_checkpoint",
    "ipu.cross_replica_ops.cross_replica_sum",
    "ipu.cross_replica_ops.cross_replica_mean",
    "ipu.cross_replica_ops.assume_equal_across_replicas",
    "ipu.internal_ops.remap",
    "ipu.internal_ops.remap_deduce",
    "ipu.optimizers.CrossReplicaOptimizer",
    "ipu.cross_replica_optimizer.CrossReplicaOptimizer",
    "ipu.distributed.allreduce",
    "ipu.distributed.broadcast",
}
# (TensorFlow's name, the parameters by position, those that are dropped, text that is added)
OPERATIONS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "ipu.nn_ops.gelu": ("nn.gelu", ("x", "approximate"), (), "approximate=True"),
    "ipu.nn_ops.swish": ("nn.silu", ("x",), (), ""),
    "ipu.nn_ops.softmax": ("nn.softmax", ("x", "stable"), ("stable",), ""),
    "ipu.math_ops.segment_sum": ("math.unsorted_segment_sum", (), (), ""),
    "ipu.math_ops.serialized_matmul": (
        "matmul",
        ("a", "b", "serialization_factor", "serialization_dimension"),
        ("serialization_factor", "serialization_dimension"),
        "",
    ),
    "ipu.embedding_ops.embedding_lookup": (
        "gather",
        ("params", "ids", "serialization_factor", "indices_are_sorted"),
        ("serialization_factor", "indices_are_sorted"),
        "",
    ),
    "ipu.utils.reset_ipu_seed": (
        "random.set_seed",
        ("seed", "device", "cpu_device"),
        ("device", "cpu_device", "experimental_identical_replicas"),
        "",
    ),
}
# Functions that are passed on instead of called
FUNCTIONS = {
    "ipu.nn_ops.gelu": "lambda x: {tf}.nn.gelu(x, approximate=True)",
    "ipu.nn_ops.swish": "{tf}.nn.silu",
    "ipu.nn_ops.softmax": "{tf}.nn.softmax",
    "ipu.embedding_ops.embedding_lookup": "{tf}.gather",
}
SCOPES = {
    "keras.ipu.PipelineStage",
    "ipu.scopes.ipu_scope",
    "ipu.scopes.ipu_jit_scope",
    "ipu.scopes.ipu_shard",
    "ipu.scopes.outside_compilation_scope",
    "ipu.scopes.frontend_attribute",
    "ipu.scopes.stochastic_rounding",
    "ipu.scopes.partials_type",
}
LAYERS = "ipu_tensorflow_addons.keras.layers"
OPTIMIZERS = "ipu_tensorflow_addons.keras.optimizers"
# Classes of the addons that Keras has; their arguments of the IPU are dropped.
KERAS = {
    f"{LAYERS}.Embedding": "layers.Embedding",
    f"{LAYERS}.LayerNormalization": "layers.LayerNormalization",
    f"{LAYERS}.LayerNorm": "layers.LayerNormalization",
    f"{LAYERS}.Dropout": "layers.Dropout",
    f"{LAYERS}.LSTM": "layers.LSTM",
    f"{LAYERS}.PopnnLSTM": "layers.LSTM",
    f"{LAYERS}.GRU": "layers.GRU",
    f"{LAYERS}.PopnnGRU": "layers.GRU",
    f"{LAYERS}.SerialDense": "layers.Dense",
    f"{OPTIMIZERS}.SGDIpuOptimizer": "optimizers.SGD",
    f"{OPTIMIZERS}.AdamIpuOptimizer": "optimizers.Adam",
    f"{OPTIMIZERS}.IpuOptimizerBase": "optimizers.Optimizer",
}
POSITIONAL = {
    f"{LAYERS}.SerialDense": ("units", "serialization_factor", "serialization_dimension"),
}
IPU_ARGUMENTS = (
    "serialization_factor",
    "serialization_dimension",
    "partials_dtype",
    "options",
    "options_bwd",
    "optimizer_compute_precisions",
    "outline_apply_gradients",
    "m_dtype",
    "v_dtype",
    "debiasing",
)
ADVICE = {
    "ipu.ipu_outfeed_queue": "return the results of the tf.function; of a loop as a TensorArray",
    "ipu.ipu_infeed_queue": "iterate over the tf.data.Dataset",
    "ipu.loops": "write a loop in a tf.function",
    "ipu.ipu_compiler": "write a tf.function and call it",
    "ipu.pipelining_ops": "call the stages one after the other, under a tf.GradientTape",
    "ipu.ipu_estimator": "write a model and call its fit",
    "ipu.ipu_pipeline_estimator": "write a model and call its fit",
    "ipu.ipu_run_config": "write a model and call its fit",
}


def uses_ipu(source: bytes) -> bool:
    """Whether a script uses a module of TensorFlow's for the IPU; not if it cannot be parsed."""
    try:
        tree = ast.parse(decode_source(source))
    except (SyntaxError, ValueError):
        return False
    origins = NameOrigins(tree)
    paths = [*origins.imported.values()]
    paths += [
        origins.path(node)  # tf.keras.ipu
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "ipu"
    ]
    return any(map(short_name, paths))


def translate(source: bytes) -> PatchedScript:
    """Translate a script for TensorFlow on IPUs to plain TensorFlow."""
    text = decode_source(source)
    tree = ast.parse(text)
    script = IpuScriptPatcher(SourceText(text), tree)
    script.block(tree.body)
    script.report_replicas()
    untranslated = sorted(dict.fromkeys(script.untranslated), key=lambda entry: entry[0])
    for line, reason in untranslated:
        script.insert_line(line, line, MARK + reason)
    script.header()
    script.write_lines()
    return PatchedScript(script.text.result(), tuple(untranslated))


class IpuScriptPatcher:
    """A script being translated: its edits, and what stays."""

    def __init__(self, text: SourceText, tree: ast.Module) -> None:
        self.text = text
        self.tree = tree
        self.origins = NameOrigins(tree)
        self.untranslated: list[tuple[int, str]] = []
        self.needs_tensorflow = False
        self.line = 1  # of the current statement
        self.dedents: dict[int, int] = {}  # columns to remove by line
        self.inserted: list[tuple[int, int, str]] = []  # (above, with the indentation of, text)
        self.stages = 1  # of a pipeline
        self.system: tuple[int, int | None] | None = None  # (line, IPUs, if known) configured
        names = {name for name, path in self.origins.imported.items() if path == "tensorflow"}
        self.tf = min(names) if names else "tf"
        self.separate = set(map(id, separate_expressions(tree)))
        self.configs = self.variables(CONFIGS)
        self.strategies = self.variables(STRATEGIES)
        self.kept_strategies: set[str] = set()
        self.kept_strategies = set(self.used_otherwise())

    def variables(self, classes: tuple[str, ...]) -> set[str]:
        """Variables that hold an object of one of these classes."""
        return {
            name
            for name, value in assignments(self.tree)
            if isinstance(value, ast.Call) and self.name(value.func) in classes
        }

    def name(self, node: ast.AST) -> str:
        """The short name of the SDK's that an expression refers to, or an empty string."""
        name = short_name(self.origins.path(node))
        return shorter_name(name) or name

    def used_otherwise(self) -> Iterator[str]:
        """Strategies that are more than a scope and something to run in."""
        simple: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.With) and all(map(self.is_scope, node.items)):
                simple |= {id(part) for item in node.items for part in ast.walk(item)}
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
                simple |= {id(node.func.value)} if node.func.attr == "run" else set()
        for node in ast.walk(self.tree):
            is_read = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
            if is_read and dotted(node) in self.strategies and id(node) not in simple:
                yield dotted(node)

    # Statements

    def block(self, body: list[ast.stmt]) -> bool:
        """Translate a block; True if nothing of it is left."""
        deleted = [statement for statement in body if self.statement(statement)]
        for statement in deleted:
            if not isinstance(statement, ast.With):  # a scope that is left empty deleted itself
                self.text.delete(statement, only_one=False)
        return len(deleted) == len(body)

    def statement(self, node: ast.stmt) -> bool:
        """Translate a statement with those inside it; True if it is to be deleted."""
        self.line = node.lineno
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self.imports(node)
        if self.is_needless(node):
            return True
        if isinstance(node, ast.With) and all(self.is_scope(item) for item in node.items):
            return self.dissolve(node)
        decorators = getattr(node, "decorator_list", [])
        for part in statement_parts(node):
            if part in decorators and self.decorator(part):
                continue
            self.expression(part)
        for name in ("body", "orelse", "finalbody"):
            self.inner_block(getattr(node, name, None) or [])
        for handler in getattr(node, "handlers", []):
            self.inner_block(handler.body)
        for case in getattr(node, "cases", []):
            self.inner_block(case.body)
        return False

    def inner_block(self, body: list[ast.stmt]) -> None:
        """A block that must not be left empty."""
        if body and isinstance(body[0], ast.stmt) and self.block(body):
            self.insert_line(body[0].lineno, body[0].lineno, "pass")

    def is_needless(self, node: ast.stmt) -> bool:
        """Whether a statement only configures the IPU."""
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            paths = [dotted(target) for target in targets]
            if isinstance(value, ast.Call) and self.name(value.func) in CONFIGS:
                return True
            if isinstance(value, ast.Call) and self.name(value.func) in STRATEGIES:
                return not self.kept_strategies & set(paths)
            if any(path.rpartition(".")[0] and self.is_config(path) for path in paths):
                self.record_system(paths[0], value)
                return True
        if not isinstance(node, ast.Expr) or not isinstance(value, ast.Call):
            return False
        if isinstance(value.func, ast.Attribute) and self.is_config(dotted(value.func)):
            return True
        name = self.name(value.func) or self.method(value.func)
        if name in ACCUMULATING and isinstance(value.func, ast.Attribute):
            return self.accumulation(node, value, value.func)
        return name in NEEDLESS

    def is_config(self, path: str) -> bool:
        return any(path.startswith(f"{name}.") for name in self.configs)

    def record_system(self, path: str, value: ast.AST | None) -> None:
        if not path.endswith(".auto_select_ipus"):
            return
        values = [known for name, known in assignments(self.tree) if name == dotted(value)]
        value = values[0] if len(values) == 1 else value
        self.system = (self.line, _number(value))

    @staticmethod
    def method(node: ast.AST) -> str:
        return METHODS.get(node.attr, "") if isinstance(node, ast.Attribute) else ""

    def accumulation(self, node: ast.stmt, call: ast.Call, function: ast.Attribute) -> bool:
        """Set the optimizer's accumulation, after the model is compiled."""
        words = {word.arg: word.value for word in call.keywords}
        steps = words.get("gradient_accumulation_steps_per_replica")
        if steps is None and call.args:
            steps = call.args[0]
        model = dotted(function.value)
        compiling = [
            statement
            for statement in ast.walk(self.tree)
            if isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and dotted(statement.value.func) == f"{model}.compile"
        ]
        if (
            steps is None
            or _number(steps) == 1
            or not compiling
            or not _has_optimizer(compiling[0].value)
        ):
            return True
        count = ast.unparse(steps)
        method = words.get("gradient_accumulation_reduction_method", ast.Constant("sum"))
        is_mean = isinstance(method, ast.Constant) and str(method.value).lower() != "sum"
        if not is_mean and not ast.unparse(method).upper().endswith("MEAN"):
            self.report(
                f"gradients are averaged over {count} steps and the IPU added them:"
                f" with SGD multiply the learning rate by {count}"
            )
        text = f"{model}.optimizer.gradient_accumulation_steps = {count}"
        if compiling[0].lineno < node.lineno:
            self.text.replace_node(node, text)
            return False
        self.insert_line((compiling[0].end_lineno or 0) + 1, compiling[0].lineno, text)
        return True

    def insert_line(self, above: int, like: int, text: str) -> None:
        """Insert a line above a line, with the indentation that the line `like` will have."""
        self.inserted.append((above, like, text))

    def is_scope(self, item: ast.withitem) -> bool:
        """Whether an item of a `with` is a scope of the IPU, which is not bound to a name."""
        call = item.context_expr
        if not isinstance(call, ast.Call) or item.optional_vars is not None:
            return False
        if self.name(call.func) == "keras.ipu.PipelineStage" and call.args:
            self.stages = max(self.stages, (_number(call.args[0]) or 0) + 1)
        owner, _, last = dotted(call.func).rpartition(".")
        is_strategy = last == "scope" and owner in self.strategies - self.kept_strategies
        return is_strategy or self.name(call.func) in SCOPES

    def dissolve(self, node: ast.With) -> bool:
        """Move the body of a scope out of it; True if nothing is left of it."""
        first = node.body[0]
        start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
        if start == node.lineno:  # with …: statement
            self.text.replace(self.text.begin(node), self.text.begin(first), "")
            return self.block(node.body)
        header = node.items[-1].context_expr.end_lineno or node.lineno
        while header < start - 1 and not _ends_header(self.text.lines[header - 1]):
            header += 1
        starts = self.text.line_starts
        self.text.replace(starts[node.lineno - 1], starts[header], "")
        columns = first.col_offset - node.col_offset
        for line in range(header + 1, (node.end_lineno or header) + 1):
            self.dedents[line] = self.dedents.get(line, 0) + columns
        return self.block(node.body)

    def decorator(self, node: ast.AST) -> bool:
        """Delete a decorator without effect."""
        function = node.func if isinstance(node, ast.Call) else node
        if self.name(function) not in IDENTITIES or not isinstance(node, ast.expr):
            return False
        starts = self.text.line_starts
        self.text.replace(starts[node.lineno - 1], starts[node.end_lineno or node.lineno], "")
        return True

    def imports(self, node: ast.Import | ast.ImportFrom) -> bool:
        """Delete the SDK's names; those of the addons that Keras has are imported from there."""
        if isinstance(node, ast.Import):
            kept = [alias for alias in node.names if not short_name(alias.name)]
            lines = [ast.unparse(ast.Import(kept))] if kept else []
        else:
            kept = [alias for alias in node.names if not short_name(f"{node.module}.{alias.name}")]
            lines = [ast.unparse(ast.ImportFrom(node.module, kept, node.level))] if kept else []
            lines += self.keras_imports(node)
        if lines == [ast.unparse(node)]:
            return False
        if not lines:
            return True
        self.text.replace_node(node, ("\n" + " " * node.col_offset).join(lines))
        return False

    def keras_imports(self, node: ast.ImportFrom) -> Iterator[str]:
        for alias in node.names:
            if equal := KERAS.get(f"{node.module}.{alias.name}"):
                module, name = equal.split(".")
                bound = alias.asname or alias.name
                renamed = "" if bound == name else f" as {bound}"
                yield f"from tensorflow.keras.{module} import {name}{renamed}"

    def report(self, reason: str) -> None:
        self.untranslated.append((self.line, reason))

    def report_replicas(self) -> None:
        """Say that fewer replicas are left, if the system had more than one."""
        if self.system is None:
            return
        line, ipus = self.system
        if ipus is None:
            reason = "if several replicas ran, multiply the batch size by their number"
            self.untranslated.append((self.kept_line(line), reason))
            return
        replicas = ipus // (1 << (self.stages - 1).bit_length())
        if replicas > 1:
            reason = (
                f"{replicas} replicas ran and added their gradients: multiply the batch size by"
                f" {replicas}, and with SGD the learning rate"
            )
            self.untranslated.append((self.kept_line(line), reason))

    def kept_line(self, line: int) -> int:
        """The next line that is not deleted."""
        while line < len(self.text.lines) and self.is_replaced(self.text.line_starts[line - 1]):
            line += 1
        return line

    def is_replaced(self, offset: int) -> bool:
        return any(begin <= offset < end for begin, end, _ in self.text.edits)

    # Expressions

    def expression(self, node: ast.AST) -> None:
        """Translate an expression and everything inside it."""
        try:
            remaining = self.translate_node(node)
        except Untranslatable as reasons:
            for reason in reasons.args:
                self.report(reason)
            remaining = list(ast.iter_child_nodes(node))[1:] if isinstance(node, ast.Call) else []
        for child in remaining:
            self.expression(child)

    def translate_node(self, node: ast.AST) -> list[ast.AST]:
        """Translate one node; returns the parts of it that are still to be translated."""
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Attribute | ast.Name) and (name := self.name(node)):
            if name in FUNCTIONS:
                self.needs_tensorflow = True
                text = FUNCTIONS[name].format(tf=self.tf)
                is_whole = id(node) in self.separate or not text.startswith("lambda")
                self.text.replace_node(node, text if is_whole else f"({text})")
                return []
            if name in KERAS:
                if isinstance(node, ast.Attribute):  # a name was imported from Keras
                    self.replace_name(node, f"keras.{KERAS[name]}")
                return []
            raise Untranslatable(_advice(name))
        if isinstance(node, ast.Attribute) and (name := self.method(node)):
            raise Untranslatable(_advice(name))
        return list(ast.iter_child_nodes(node))

    def replace_name(self, node: ast.expr, name: str) -> None:
        self.needs_tensorflow = True
        self.text.replace_node(node, f"{self.tf}.{name}")

    def call(self, node: ast.Call) -> list[ast.AST]:
        name = self.name(node.func)
        owner, _, last = dotted(node.func).rpartition(".")
        if last == "run" and owner in self.strategies - self.kept_strategies and node.args:
            return self.run(node)
        if self.origins.path(node.func) == "tensorflow.function":
            return self.function(node)
        if name in STRATEGIES:
            self.replace_name(node, "distribute.get_strategy()")
            return []
        if name in CONSTANTS:
            self.text.replace_node(node, CONSTANTS[name])
            return []
        if name in IDENTITIES and node.args:
            first = node.args[0]
            opening, closing = (
                "()" if needs_brackets(first, id(node) in self.separate) else ("", "")
            )
            self.text.replace(self.text.begin(node), self.text.begin(first), opening)
            self.text.replace(self.text.end(first), self.text.end(node), closing)
            return [first]
        if name in OPERATIONS:
            return self.operation(node, name)
        if name in KERAS:
            arguments = CallArguments(self.text, node, POSITIONAL.get(name, ()))
            arguments.drop(*IPU_ARGUMENTS)
            return [node.func, *arguments.write()]
        return list(ast.iter_child_nodes(node))

    def run(self, node: ast.Call) -> list[ast.AST]:
        """`strategy.run(f, args=[x, y], kwargs={"z": z})` is `f(x, y, z=z)`."""
        words = {word.arg: word.value for word in node.keywords}
        args = words.get("args") or (node.args[1] if len(node.args) > 1 else None)
        kwargs = words.get("kwargs") or (node.args[2] if len(node.args) > 2 else None)
        function = node.args[0]
        pieces: list[tuple[str, ast.expr]] = [("", function)]
        if isinstance(args, ast.List | ast.Tuple):
            pieces += [("", element) for element in args.elts]
        elif args is not None:
            pieces.append(("*", args))
        if kwargs is not None:
            pieces.append(("**", kwargs))
        if (
            kwargs is not None
            and args is not None
            and self.text.begin(kwargs) < self.text.end(args)
        ):
            raise Untranslatable("strategy.run: write args= before kwargs=")
        is_atom = isinstance(function, ATOMS)
        between = "" if is_atom else "("
        end = self.text.begin(node)
        for number, (stars, piece) in enumerate(pieces):
            self.text.replace(end, self.text.begin(piece), between + stars)
            between = ", " if number else "(" if is_atom else ")("
            end = self.text.end(piece)
        closing = ")" if len(pieces) > 1 else f"{between})"
        self.text.replace(end, self.text.end(node), closing)
        return [piece for _, piece in pieces]

    def function(self, node: ast.Call) -> list[ast.AST]:
        """`tf.function` without XLA, which compiles no iterators."""
        kept = [
            word
            for word in node.keywords
            if word.arg not in ("jit_compile", "experimental_compile")
        ]
        if len(kept) < len(node.keywords):
            if not kept and not node.args:
                self.text.replace(self.text.end(node.func), self.text.end(node), "")
                return []
            arguments = CallArguments(self.text, node, ("func",))
            arguments.drop("jit_compile", "experimental_compile")
            return arguments.write()
        return list(ast.iter_child_nodes(node))

    def operation(self, node: ast.Call, name: str) -> list[ast.AST]:
        plain, positional, dropped, added = OPERATIONS[name]
        arguments = CallArguments(self.text, node, positional)
        arguments.drop(*dropped)
        if added and arguments.value(added.partition("=")[0]) is None:
            arguments.add(added)
        self.replace_name(node.func, plain)
        return arguments.write()

    # The end

    def header(self) -> None:
        """Import TensorFlow, if only modules of it were imported."""
        if self.needs_tensorflow and self.tf not in self.origins.imported:
            line = max((node.end_lineno or 0 for node in leading_imports(self.tree)), default=0)
            self.text.insert(self.text.line_starts[line], "import tensorflow as tf\n")

    def write_lines(self) -> None:
        """Move the lines of dissolved scopes out, and insert the new lines."""
        text = self.text
        inside_strings = set(_lines_inside_strings(text.source))
        moved = {}
        for line, columns in self.dedents.items():
            start = text.line_starts[line - 1]
            if line not in inside_strings and not self.is_replaced(start):
                moved[line] = min(columns, _indentation(text.lines[line - 1]))
        for line, columns in moved.items():
            start = text.line_starts[line - 1]
            text.replace(start, start + columns, "")
        for above, like, line_text in self.inserted:
            line = text.lines[like - 1]
            columns = max(0, _indentation(line) - self.dedents.get(like, 0))
            text.insert(text.line_starts[above - 1], f"{line[:columns].decode()}{line_text}\n")


def _indentation(line: bytes) -> int:
    return len(line) - len(line.lstrip(b" \t"))


def _advice(name: str) -> str:
    for prefix, text in ADVICE.items():
        if name.startswith(prefix):
            return f"{name}: {text}"
    entry = lookup(name)
    if entry.kind == "fails":
        return f"{name}: {entry.meaning}"
    return f"{name} is for an IPU: delete it, or write it in TensorFlow"


def _has_optimizer(call: ast.AST) -> bool:
    """Whether a call of `compile` sets an optimizer: one for prediction only does not."""
    return isinstance(call, ast.Call) and (
        bool(call.args) or any(word.arg in ("optimizer", "loss") for word in call.keywords)
    )


def _number(node: ast.AST | None) -> int | None:
    """The value of an integer that is written out, else None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    return None


def _ends_header(line: bytes) -> bool:
    return line.partition(b"#")[0].rstrip().endswith(b":")


def _lines_inside_strings(source: bytes) -> Iterator[int]:
    """Lines that begin within a string."""
    starts: list[int] = []
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            yield from range(token.start[0] + 1, token.end[0] + 1)
        elif kind == "FSTRING_START":
            starts.append(token.start[0])
        elif kind == "FSTRING_END":
            yield from range(starts.pop() + 1, token.end[0] + 1)
