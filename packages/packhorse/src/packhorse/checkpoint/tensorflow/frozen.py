"""Read a model's weights from a frozen graph of TensorFlow (GraphDef, `.pb`).

Freezing turns each variable into a Const of its name, which an Identity reads; so does TensorFlow 1
(`convert_variables_to_constants`) with both kinds of variables, and TensorFlow 2 (`…_v2`) with
graphs that TensorFlow 1 saved. In a function of TensorFlow 2 a constant is named after the place
where the variable is used (`L/MatMul/ReadVariableOp/resource`); the weight's name (`L/kernel`) is
derived from that. Where TensorFlow generated the name of a constant, the name of the Identity that
reads it is used instead.

A graph has hundreds of constants that are not weights. A constant is taken for a weight if it is
floating point with at least one dimension, unless its name is generated and only arithmetic uses
it, like the ones of a mask. The graph is never built or run; only the constants are read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import BinaryIO

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
}
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
            tensors = {name: _load(file, name, weights[name]) for name in weights}
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return Contents("frozen", path.parent, (path,), tensors, notes=notes, gelu=forms, graph=path)


def _survey(
    file: BinaryIO, folder: Path
) -> tuple[dict[str, StoredConstant], tuple[str, ...], frozenset[str]]:
    """Where the weights are, notes, and the forms of GELU that the nodes compute.

    A function of its own, so that the file's bytes are freed before the weights are allocated.
    """
    data = _bytes_of(file)
    if (kind := kind_of(data)) != "graph":
        message = OTHERS[kind].replace("DIR", str(folder))
        raise CheckpointError(message + (parse_error(data) if kind == "unknown" else ""))
    nodes = _nodes(data)
    weights, notes = _find(data, nodes)
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
    data: memoryview, nodes: dict[str, GraphNode]
) -> tuple[dict[str, StoredConstant], tuple[str, ...]]:
    """The weights by name, and notes about the other constants."""
    constants = _constants(data, nodes.values())
    readers, users = _readers(nodes)
    names = _names(constants, readers)
    weights = {
        names[name]: constant
        for name, constant in constants.items()
        if not GENERATED.fullmatch(names[name]) or users[name] & WEIGHT_USERS
    }
    _check_limits(weights, len(data))
    total = sum(node.op == "Const" for node in nodes.values())
    renamed = [(name, names[name]) for name in constants if names[name] != name]
    return weights, tuple(_notes(total - len(weights), renamed, _functions(data)))


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
    if not GENERATED.fullmatch(name):
        return name
    for reader in sorted(READ_SUFFIX.sub("", reader) for reader in readers):
        if not GENERATED.fullmatch(reader):
            return reader
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
