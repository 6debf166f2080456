"""Read a model's weights from a frozen graph of TensorFlow (GraphDef, `.pb`).

Freezing turns each variable into a Const of its name, which an Identity reads; so does TensorFlow 1
(`convert_variables_to_constants`) with both kinds of variables, and TensorFlow 2 (`…_v2`) with
graphs that TensorFlow 1 saved. In a function of TensorFlow 2 a constant is named after the place
where the variable is used (`L/MatMul/ReadVariableOp/resource`); the weight's name (`L/kernel`) is
derived from that. Where TensorFlow generated the name of a constant, the name of the Identity that
reads it is used instead.

Grappler, TensorFlow's optimizer, folds that Identity into the constant, which then has its name
(`L/kernel/read`), and the transposition of a head's weights, which keep no name but that of the
bias beside them. A partitioned variable is joined again, in the order in which the graph looks its
rows up.

A graph has hundreds of constants that are not weights. A constant is taken for a weight if it is
floating point with at least one dimension, unless its name is generated and only arithmetic uses
it, like the ones of a mask. The graph is never built or run; only the constants are read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from packhorse import wire
from packhorse.checkpoint import files
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.gelu import forms_in_nodes
from packhorse.checkpoint.tensorflow import graphdef
from packhorse.checkpoint.tensorflow.graphdef import GraphNode, Span, StoredConstant
from packhorse.errors import CheckpointError

TENSOR_LIMIT = 10_000  # BERT-Large has 400
# A TensorProto may give one value for all its elements, so a small file could ask for any amount of
# memory: repeated values may take as many bytes as the file has, and this many more.
REPEATED_LIMIT = 64 << 20
FILE_LIMIT = 1 << 31  # bytes; protobuf's limit for a message is one less

VARIABLES = {"Variable", "VariableV2", "VarHandleOp"}
WEIGHT_USERS = {  # operations that take weights, besides arithmetic
    "BatchMatMul",
    "BatchMatMulV2",
    "BiasAdd",
    "Einsum",
    "Gather",
    "GatherV2",
    "Identity",
    "MatMul",
    "Reshape",
    "Transpose",
    "_FusedBatchMatMulV2",
    "_FusedMatMul",
}
PRODUCTS = {"MatMul", "_FusedMatMul"}
STEPS = 8  # nodes at most between a constant or product and what uses it
FOLDED = re.compile(r"(.*/)?transpose(_\d+)?")  # a transposition of a constant, made one itself
PART = re.compile(r"(.+)/part_(0|[1-9][0-9]{0,4})")
GENERATED = re.compile(
    r"(.*/)?(Const|Identity|ReadVariableOp|resource|(ones|zeros)(_like)?|x|y|\d+)(_\d+)?"
    r"|.*_const|ConstantFolding/.*"
)
READ_SUFFIX = re.compile(r"/(read|Read/ReadVariableOp)$")
READ_SITE = re.compile(
    r"(.+)/(MatMul|Tensordot|BiasAdd|batchnorm/mul|batchnorm|einsum/Einsum|add)(?:_\d+)?"
    r"/ReadVariableOp(?:_\d+)?(?:/resource)?"
)
SITE_ROLES = {  # where a variable is read → its name in the layer
    "MatMul": "kernel",
    "Tensordot": "kernel",
    "einsum/Einsum": "kernel",
    "BiasAdd": "bias",
    "add": "bias",
    "batchnorm/mul": "gamma",
    "batchnorm": "beta",
}

FREEZE = (
    "packhorse freeze --input-meta-graph PREFIX.meta --input-checkpoint PREFIX "
    "--output-node-names NAME --output-graph frozen.pb"
)
OTHERS = {
    "saved": "this is a SavedModel, whose weights are the TensorFlow checkpoint beside it: "
    "packhorse run --model DIR/variables/variables. For a graph, freeze it with TensorFlow: "
    "convert_variables_to_constants_v2(tf.saved_model.load('DIR').signatures['serving_default'])",
    "meta": "this is a MetaGraphDef: a graph without its weights. Pass the prefix of its "
    f"checkpoint, which is this name without .meta, or freeze both: {FREEZE}",
    "text": "this is a graph written as text; write it as binary with TensorFlow: "
    "tf.io.write_graph(graph, 'DIR', 'frozen.pb', as_text=False)",
    "hlo": "this is a program of XLA (HLO), which does not name its weights; pass the frozen graph "
    "or the checkpoint that it was compiled from",
    "unknown": "this is no frozen graph of TensorFlow (a binary GraphDef), nor another file that "
    "is read here; it may be truncated",
}


def read(path: Path) -> Contents:
    """Read the weights of a frozen graph."""
    if path.is_dir():
        raise CheckpointError(_folder_message(path))
    with files.open_file(path.parent, path.name) as file:
        try:
            weights, notes, forms = _survey(file, path.parent)
            tensors = {name: weight.read(file, name) for name, weight in weights.items()}
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return Contents("frozen", path.parent, (path,), tensors, notes=notes, gelu=forms, graph=path)


@dataclass(frozen=True)
class FrozenWeight:
    """The constants that are a weight, and how they are put together."""

    parts: tuple[StoredConstant, ...]
    axis: int = 0  # along which parts follow each other
    in_turn: bool = False  # row i is in part i modulo their number
    transposed: bool = False

    def read(self, file: BinaryIO, name: str) -> Tensor:
        parts = [_load(file, name, part) for part in self.parts]
        if self.in_turn:
            result = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
            for number, part in enumerate(parts):
                result[number :: len(parts)] = part
        else:
            result = torch.cat(parts, self.axis) if len(parts) > 1 else parts[0]
        return result.T.contiguous() if self.transposed else result


def _survey(
    file: BinaryIO, folder: Path
) -> tuple[dict[str, FrozenWeight], tuple[str, ...], frozenset[str]]:
    """Where the weights are, notes, and the forms of GELU that the nodes compute.

    A function of its own, so that the file's bytes are freed before the weights are allocated.
    """
    data = _bytes_of(file)
    if (kind := kind_of(data)) != "graph":
        message = OTHERS[kind].replace("DIR", str(folder))
        raise CheckpointError(message + (parse_error(data) if kind == "unknown" else ""))
    nodes = _nodes(data)
    weights, notes = _find(data, nodes, file)
    return weights, notes, forms_in_nodes(data, nodes, file)


def sniff(path: Path) -> bool:
    """Is this file a GraphDef, by its first node?"""
    return _kind(path) == "graph"


def known(path: Path) -> bool:
    """Is this file a GraphDef, or one that `read` explains (see OTHERS)?"""
    return _kind(path) != "unknown"


def _kind(path: Path) -> str:
    try:
        with files.open_file(path.parent, path.name) as file:
            return kind_of(_bytes_of(file))
    except (CheckpointError, OSError):
        return "unknown"


def _folder_message(path: Path) -> str:
    if any(files.exists(path, f"saved_model.{suffix}") for suffix in ("pb", "pbtxt")):
        return f"{path}: {OTHERS['saved'].replace('DIR', str(path))}"
    graphs = ", ".join(sorted(file.name for file in path.glob("*.pb"))) or "there is none here"
    return f"{path} is a folder; pass the frozen graph in it ({graphs})"


def _bytes_of(file: BinaryIO) -> memoryview:
    """The whole file; not mapped, because truncating a mapped file would kill the process."""
    size = file.seek(0, 2)
    if size > FILE_LIMIT:
        raise CheckpointError(f"it has {size:,} bytes, and a graph at most {FILE_LIMIT:,}")
    file.seek(0)
    return memoryview(file.read(size))


def _nodes(data: memoryview) -> dict[str, GraphNode]:
    """The nodes of a graph, which must have no variables."""
    graphdef.check(data, 0, len(data))
    nodes = graphdef.nodes(data, 0, len(data))
    if variables := [node.name for node in nodes.values() if node.op in VARIABLES]:
        raise CheckpointError(
            f"the graph is not frozen: {variables[0]!r} and {len(variables) - 1} more are "
            f"variables, whose values are in a checkpoint; {FREEZE}"
        )
    return nodes


def _find(
    data: memoryview, nodes: dict[str, GraphNode], file: BinaryIO
) -> tuple[dict[str, FrozenWeight], tuple[str, ...]]:
    """The weights by name, and notes about the other constants."""
    constants = _constants(data, nodes.values())
    readers, users = _readers(nodes)
    names = _names(constants, readers)
    folded = _folded(nodes, constants, names)
    names |= folded
    weights = {
        names[name]: constant
        for name, constant in constants.items()
        if not GENERATED.fullmatch(names[name]) or users[name] & WEIGHT_USERS
    }
    _check_limits(weights, len(data))
    total = sum(node.op == "Const" for node in nodes.values())
    renamed = [(name, names[name]) for name in constants if names[name] != name]
    notes = _notes(total - len(weights), renamed, _functions(data))
    turned = set(folded.values())
    whole = {
        name: FrozenWeight((constant,), transposed=name in turned)
        for name, constant in weights.items()
    }
    joined = _joined(_PartReader(data, nodes, file), weights, names)
    for name in joined:
        for number in range(len(joined[name].parts)):
            del whole[f"{name}/part_{number}"]
    joins = [f"{name} was joined of {len(weight.parts)} parts" for name, weight in joined.items()]
    return whole | joined, (*notes, *joins)


def _folded(
    nodes: dict[str, GraphNode], constants: dict[str, StoredConstant], names: dict[str, str]
) -> dict[str, str]:
    """Folded transpositions of heads' weights, by node: the names of what was transposed."""
    biases: dict[str, str] = {}  # by product
    for node in nodes.values():
        sources = tuple(node.sources)
        if node.op == "BiasAdd" and len(sources) > 1:
            biases[_origin(nodes, sources[0], ("Identity", "Reshape"))] = sources[1]
        elif node.op == "_FusedMatMul" and len(sources) > 2:
            biases[node.name] = sources[2]
    folded: dict[str, str] = {}
    for node in nodes.values():
        value = _source(node, 1) if node.op in PRODUCTS else ""
        bias = names.get(_origin(nodes, biases.get(node.name, "")), "")
        if value in constants and FOLDED.fullmatch(value) and bias.endswith("output_bias"):
            weights = f"{bias.removesuffix('bias')}weights"
            if weights not in names.values():
                folded[value] = weights
    return folded


def _origin(
    nodes: dict[str, GraphNode], name: str, through: tuple[str, ...] = ("Identity",)
) -> str:
    """The node that nodes of these operations lead back to, in a few steps."""
    for _ in range(STEPS):
        if name not in nodes or nodes[name].op not in through:
            break
        name = _source(nodes[name], 0)
    return name


def _source(node: GraphNode, number: int) -> str:
    """The node that an input comes from; "" if there is no such input."""
    return next(islice(node.sources, number, None), "")


@dataclass(frozen=True)
class _PartReader:
    """How a graph puts the parts of a variable together."""

    data: memoryview
    nodes: dict[str, GraphNode]
    file: BinaryIO

    def axis(self, name: str) -> int:
        """The axis of the node that joins the parts of a variable; 0 if none does."""
        node = self.nodes.get(f"{name}/ConcatPartitions/concat/axis")
        if node is None or node.op != "Const":
            return 0
        attributes = graphdef.attributes(self.data, node)
        dtype = graphdef.dtype_of(self.data, attributes.get("dtype"))
        stored = graphdef.stored(self.data, attributes.get("value", (node.end, node.end)), dtype)
        if stored.shape or dtype not in graphdef.INTEGERS:
            raise CheckpointError(f"{node.name!r} is no axis")
        return int(graphdef.read(self.file, stored))

    def in_turn(self, parts: set[str]) -> bool:
        """Are rows looked up by their number modulo that of the parts (strategy "mod")?"""
        for node in self.nodes.values():
            if node.op != "GatherV2" or _origin(self.nodes, _source(node, 0)) not in parts:
                continue
            divided = self._before(_source(node, 1))
            if divided is None or divided.op != "DynamicPartition":
                continue
            number = self._before(_source(divided, 1))
            if number is not None and number.op in ("FloorMod", "Mod"):
                return True
        return False

    def _before(self, name: str) -> GraphNode | None:
        return self.nodes.get(_origin(self.nodes, name, ("Identity", "Cast")))


def _joined(
    graph: _PartReader, weights: dict[str, StoredConstant], names: dict[str, str]
) -> dict[str, FrozenWeight]:
    """The partitioned variables: `X/part_0` and so on, as X."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in weights:
        if match := PART.fullmatch(name):
            numbers[match[1]].add(int(match[2]))
    joined: dict[str, FrozenWeight] = {}
    for name, present in numbers.items():
        if name in weights or present != set(range(len(present))):
            raise CheckpointError(
                f"{name!r} has the parts {', '.join(map(str, sorted(present)))}, which do not make "
                f"one variable"
            )
        parts = [weights[f"{name}/part_{number}"] for number in range(len(present))]
        axis = graph.axis(name)
        rest = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
        if not 0 <= axis < len(parts[0].shape) or len(rest) > 1:
            raise CheckpointError(
                f"{name!r}: parts of {[list(part.shape) for part in parts]} do not fit together "
                f"along axis {axis}"
            )
        of_variable = {node for node, called in names.items() if called.startswith(f"{name}/part_")}
        in_turn = axis == 0 and graph.in_turn(of_variable)
        rows = [part.shape[0] for part in parts]
        if in_turn and rows != [len(range(i, sum(rows), len(parts))) for i in range(len(parts))]:
            raise CheckpointError(
                f"{name!r}: parts of {rows} rows do not follow each other in turn"
            )
        joined[name] = FrozenWeight(tuple(parts), axis, in_turn)
    return joined


def _constants(data: memoryview, nodes: Iterable[GraphNode]) -> dict[str, StoredConstant]:
    """The constants of floating point with at least one dimension, by name."""
    constants: dict[str, StoredConstant] = {}
    for node in nodes:
        if node.op != "Const":
            continue
        try:
            attributes = graphdef.attributes(data, node)
            dtype = graphdef.dtype_of(data, attributes.get("dtype"))
            # From 100 on DataType means references, which no constant is.
            if not 0 < dtype < 100 or dtype in graphdef.QUANTIZED:
                raise CheckpointError(f"byte {node.begin}: dtype {dtype} is not read")
            value = attributes.get("value", (node.end, node.end))
            stored = graphdef.stored(data, value, dtype)
            if stored.shape and dtype in graphdef.FLOATS:
                constants[node.name] = stored
        except CheckpointError as error:
            raise CheckpointError(f"{node.name!r}: {error}") from error.__cause__
    return constants


def _readers(nodes: dict[str, GraphNode]) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """By node: the Identity nodes that lead back to it, and the operations that use it."""
    identities: dict[str, list[str]] = defaultdict(list)  # that read a node directly
    users: dict[str, set[str]] = defaultdict(set)
    unreached = 0
    for node in nodes.values():
        for number, origin in enumerate(node.sources):
            if origin not in nodes:
                raise CheckpointError(
                    f"{node.name!r}: byte {node.begin}: reads {origin!r}, which does not exist"
                )
            users[origin].add(node.op)
            if number == 0 and node.op == "Identity":
                identities[origin].append(node.name)
                unreached += 1
    # Each Identity has one input, so from the other nodes each is reached once, unless it is in a
    # cycle, which is reached from nowhere.
    readers: dict[str, list[str]] = defaultdict(list)
    for name, node in nodes.items():
        pending = list(identities.get(name, ())) if node.op != "Identity" else []
        while pending:
            readers[name].append(reader := pending.pop())
            unreached -= 1
            pending += identities.get(reader, ())
    if unreached:
        raise CheckpointError("the Identity nodes form a cycle")
    return readers, users


def _names(constants: dict[str, StoredConstant], readers: dict[str, list[str]]) -> dict[str, str]:
    """Node name → weight name, which must be unique; else the weight keeps the node's name."""
    preferred = {name: _name(name, readers.get(name, [])) for name in constants}
    counts = Counter(preferred.values())
    return {
        name: new if counts[new] == 1 and (new == name or new not in constants) else name
        for name, new in preferred.items()
    }


def _name(name: str, readers: list[str]) -> str:
    variable = variable_of(name)
    if variable == name and GENERATED.fullmatch(name):
        named = (READ_SUFFIX.sub("", reader) for reader in readers)
        return next((r for r in sorted(named) if not GENERATED.fullmatch(r)), name)
    return variable


def variable_of(name: str) -> str:
    """The variable that a constant was, by the constant's name or the place where it is read."""
    read = READ_SUFFIX.sub("", name)  # the name of an Identity that was folded
    if not GENERATED.fullmatch(read):
        return read
    site = READ_SITE.fullmatch(name)
    return f"{site[1]}/{SITE_ROLES[site[2]]}" if site else name


def _check_limits(weights: dict[str, StoredConstant], size: int) -> None:
    """Bound the memory that the weights take, before anything is allocated."""
    if not weights:
        raise CheckpointError("the graph holds no weights (constants of floating point)")
    if len(weights) > TENSOR_LIMIT:
        raise CheckpointError(f"the graph holds {len(weights)} weights, more than {TENSOR_LIMIT}")
    missing = {name: weight.missing for name, weight in weights.items()}
    if sum(missing.values()) > size + REPEATED_LIMIT:
        name = max(missing, key=lambda name: missing[name])
        raise CheckpointError(
            f"{name!r}: byte {weights[name].begin}: the shape {list(weights[name].shape)} takes "
            f"{weights[name].bytes} bytes, of which the file lacks {missing[name]}"
        )


def _functions(data: memoryview) -> int:
    """The number of functions in the graph's library (FunctionDefLibrary)."""
    count = 0
    for library in wire.fields(data):
        if library.number == 2 and library.kind == wire.BYTES:
            fields = wire.fields(data, library.begin, library.end)
            count += sum(field.number == 1 for field in fields)
    return count


def _notes(left_out: int, renamed: list[tuple[str, str]], functions: int) -> Iterable[str]:
    if left_out:
        yield f"{left_out} constants that are no weights (numbers, shapes, texts) are left out"
    if renamed:
        old, new = renamed[0]
        yield f"{len(renamed)} weights are called after what reads them, as {old} is {new}"
    if functions:
        yield f"the constants of {functions} functions in the graph's library are not read"


def _load(file: BinaryIO, name: str, weight: StoredConstant) -> Tensor:
    try:
        return graphdef.read(file, weight)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from error.__cause__


_TEXT = re.compile(
    rb"\s*(#[^\n]*\n\s*)*(node|library|versions|meta_info_def|graph_def|meta_graphs"
    rb"|saved_model_schema_version)\s*[:{<]"
)
_OPERATION = re.compile(r"[A-Za-z_][A-Za-z0-9_>]*")


def kind_of(data: memoryview) -> str:
    """What a file holds, recognized by its beginning: `graph`, or a key of `OTHERS`."""
    if _TEXT.match(bytes(data[:4096])):
        return "text"
    whole = (0, len(data))
    tests = {"graph": _is_graph, "meta": _is_meta, "saved": _is_saved, "hlo": _is_hlo}
    for kind, test in tests.items():
        if test(data, whole):
            return kind
    # A truncated graph is recognized as if it went on, so that its reader says where it ends.
    longer = (0, len(data) + FILE_LIMIT)
    return next((kind for kind in ("graph", "meta") if tests[kind](data, longer)), "unknown")


def parse_error(data: memoryview) -> str:
    """The byte at which a file stops being a protobuf message, for the end of an error message."""
    try:
        for _ in wire.fields(data):
            pass
    except CheckpointError as error:
        return f" ({error})"
    return f" (its {len(data)} bytes)"


def _first_fields(data: memoryview, span: Span) -> list[wire.Field]:
    try:
        return list(islice(wire.fields(data, *span), 4))
    except (CheckpointError, IndexError):
        return []


def _is_graph(data: memoryview, span: Span) -> bool:
    """A GraphDef begins with a NodeDef, and that with its name and its operation."""
    first = _first_fields(data, span)[:1]
    node = _first_fields(data, (first[0].begin, first[0].end)) if _begin_with(first, 1) else []
    return _begin_with(node, 1, 2) and bool(_OPERATION.fullmatch(_text(data, node[1])))


def _is_meta(data: memoryview, span: Span) -> bool:
    """A MetaGraphDef has a GraphDef in field 2."""
    fields = _first_fields(data, span)
    graphs = [field for field in fields if field.number == 2 and field.kind == wire.BYTES]
    return bool(graphs) and _is_graph(data, (graphs[0].begin, graphs[0].end))


def _is_saved(data: memoryview, span: Span) -> bool:
    """A SavedModel begins with its version; field 2 is a MetaGraphDef."""
    fields = _first_fields(data, span)
    if not fields or fields[0].number != 1 or fields[0].kind != wire.VARINT:
        return False
    meta = fields[1:2]
    return _begin_with(meta, 2) and _is_meta(data, (meta[0].begin, meta[0].end))


def _is_hlo(data: memoryview, span: Span) -> bool:
    """An HloModuleProto begins with its name and that of its entry; HloProto wraps one."""
    fields = _first_fields(data, span)
    if not _begin_with(fields, 1):
        return False
    inner = _first_fields(data, (fields[0].begin, fields[0].end))
    return any(
        _begin_with(module, 1, 2) and all(_text(data, name).isprintable() for name in module[:2])
        for module in (fields, inner)
    )


def _begin_with(fields: list[wire.Field], *numbers: int) -> bool:
    """Are these the numbers of the first fields, all length-delimited?"""
    return [(f.number, f.kind) for f in fields[: len(numbers)]] == [
        (number, wire.BYTES) for number in numbers
    ]


def _text(data: memoryview, field: wire.Field) -> str:
    try:
        return bytes(data[field.begin : min(field.end, field.begin + 256)]).decode()
    except UnicodeDecodeError:
        return "\0"
