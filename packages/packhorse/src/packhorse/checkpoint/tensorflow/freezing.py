"""Freeze a TensorFlow checkpoint without TensorFlow: a graph (`.meta`) and its weights in one file.

The nodes that the outputs need are kept, and every variable becomes a constant. Which entry of the
checkpoint belongs to which variable is taken from the graph's own restore operations, so that
renamed and partitioned variables come out right. Nothing is simplified: the result has the nodes of
TensorFlow's `convert_variables_to_constants`, and the same outputs to the last bit. Nodes are
copied as bytes wherever possible; a changed node is put together from parts of the old one, and the
bytes of a weight are never copied.

Variables that a function takes by handle, and graphs that assign variables on the way to their
outputs, are refused by name.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from packhorse import wire
from packhorse.atomic import new_file
from packhorse.checkpoint import files
from packhorse.checkpoint.tensorflow import graphdef, tf1
from packhorse.checkpoint.tensorflow.frozen import OTHERS, VARIABLES, kind_of, parse_error
from packhorse.checkpoint.tensorflow.graphdef import GraphNode, Span
from packhorse.errors import CheckpointError, InputError

Chunk = bytes | memoryview

SIZE_LIMIT = (1 << 31) - 1  # bytes of a protobuf message
CHUNK = 8 << 20  # bytes between two calls of `progress`

MESSAGES = {
    "graph": "this is a GraphDef; pass the checkpoint's .meta",
    "unknown": "this is no graph of a checkpoint (.meta); it may be truncated",
}
BOUNDS = re.compile(r"(\d{1,18},\d{1,18}|-)(:(\d{1,18},\d{1,18}|-))*")  # of a slice
# Operations that pass a variable's handle on.
CARRIERS = {"Identity", "Enter", "Exit", "NextIteration", "Switch", "Merge"}
# Operations that read a variable by its handle → those that read a constant. All other operations
# on a handle need the variable itself and cannot be frozen.
READERS = {
    "ReadVariableOp": "Identity",
    "ResourceGather": "GatherV2",
    "ResourceGatherNd": "GatherNd",
}
# Operations on the reference of a (TensorFlow 1) variable that change it or test its state.
ASSIGNMENTS = re.compile(r"Ref[A-Z].*|Assign.*|Scatter.*|(Sparse)?Apply.*|CountUpTo|.*Initialized")


@dataclass(frozen=True, slots=True)
class FreezeSummary:
    """Sizes of a graph before and after freezing."""

    nodes_before: int
    nodes: int
    variables: int
    bytes: int


@dataclass(frozen=True, slots=True)
class UnfrozenGraph:
    """The part of a graph that the outputs need."""

    data: memoryview
    span: Span  # of the GraphDef in the data
    total: int  # nodes before the others were dropped
    nodes: dict[str, GraphNode]
    variables: dict[str, str]  # node → the variable that it is, or whose handle it passes on
    entries: dict[str, tuple[str, str]]  # variable → its entry in the checkpoint, and the slice


def freeze(
    meta: Path | None,
    prefix: Path,
    outputs: Sequence[str],
    target: Path,
    *,
    clear_devices: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> FreezeSummary:
    """Write the graph that computes `outputs`, with the checkpoint's weights in it, to `target`.

    prefix: or any other path of a checkpoint (a folder, its index). meta: None is PREFIX.meta.
    """
    prefix = tf1.find(prefix) or prefix
    meta = meta or prefix.with_name(f"{prefix.name}.meta")
    if not files.exists(meta.parent, meta.name):
        raise CheckpointError(
            f"there is no {meta}: a checkpoint by itself has weights but no graph, so nothing says "
            f"how outputs come about (the published BERT checkpoints lack the graph of a task). "
            f"Training or fine-tuning with the model's own code saves it beside its checkpoint; "
            f"where you have that graph, export it: "
            f"tf.compat.v1.train.export_meta_graph('{meta.name}'). To run the weights no graph is "
            f"needed: packhorse run --model {prefix}"
        )
    with files.open_file(meta.parent, meta.name) as file:
        try:
            graph = _needed_graph(memoryview(file.read()), outputs)
            _check_uses(graph)
        except CheckpointError as error:
            raise CheckpointError(f"{meta}: {error}") from error.__cause__
        names = {_entry(graph, node)[0] for node in _variable_nodes(graph)}
        stored, used = tf1.read_entries(prefix, names)
        if any(target.exists() and target.samefile(source) for source in (meta, *used)):
            raise InputError(
                f"{target} is one of the files that are read; choose another name for the "
                f"frozen graph"
            )
        values = _values(graph, stored, prefix)
        nodes = [chunk for node in _frozen_nodes(graph, values, clear_devices) for chunk in node]
        chunks = [*nodes, *_versions_and_library(graph)]
        size = _write(target, chunks, progress or (lambda count, total: None))
    added = sum(node.op == "ResourceGather" for node in graph.nodes.values())
    return FreezeSummary(graph.total, len(graph.nodes) + added, len(values), size)


def _needed_graph(data: memoryview, outputs: Sequence[str]) -> UnfrozenGraph:
    """The nodes on which the outputs depend, in the order of the file."""
    if (kind := kind_of(data)) != "meta":
        message = (OTHERS | MESSAGES)[kind]
        raise CheckpointError(message + (parse_error(data) if kind == "unknown" else ""))
    fields = graphdef.single(data, (0, len(data)), {2, 3})  # MetaGraphDef.graph_def, saver_def
    span = (fields[2].begin, fields[2].end)
    nodes = graphdef.nodes(data, *span)
    names = [graphdef.source(name.strip()) for name in outputs if name.strip()]
    if not names:
        raise InputError("name the nodes that are the outputs")
    for name in names:
        if name not in nodes:
            raise InputError(f"the graph has no node {name!r}; {_suggestion(name, list(nodes))}")
    reached = _reached(nodes, names)
    needed = {name: node for name, node in nodes.items() if name in reached}
    for node in needed.values():
        graphdef.check(data, node.begin, node.end, "NodeDef")
    return UnfrozenGraph(
        data=data,
        span=span,
        total=len(nodes),
        nodes=needed,
        variables=_variables(needed),
        entries=_entries(data, nodes, fields.get(3)),
    )


def _suggestion(name: str, nodes: list[str]) -> str:
    same = [node for node in nodes if node.rpartition("/")[2] == name][:3]
    near = same or difflib.get_close_matches(name, nodes, 3)
    return f"did you mean {', '.join(near)}?" if near else "none has a name like it"


def _reached(nodes: dict[str, GraphNode], names: Iterable[str]) -> set[str]:
    """These nodes and all that they depend on, by control inputs too."""
    reached = set(names)
    pending = list(names)
    while pending:
        node = nodes[pending.pop()]
        for origin in node.sources:
            if origin not in nodes:
                raise CheckpointError(
                    f"{node.name!r}: byte {node.begin}: reads {origin!r}, which does not exist"
                )
            if origin not in reached:
                reached.add(origin)
                pending.append(origin)
    return reached


def _variables(nodes: dict[str, GraphNode]) -> dict[str, str]:
    """Node → variable, for the variables themselves and the nodes that pass their handle on."""
    receivers: defaultdict[str, list[str]] = defaultdict(list)
    for node in nodes.values():
        for reference in node.inputs if node.op in CARRIERS else ():
            if not reference.startswith("^"):
                receivers[graphdef.source(reference)].append(node.name)
    variables = {name: name for name, node in nodes.items() if node.op in VARIABLES}
    pending = [name for name, node in nodes.items() if node.op == "VarHandleOp"]
    while pending:
        name = pending.pop()
        for receiver in receivers[name]:
            if receiver not in variables:
                variables[receiver] = variables[name]
                pending.append(receiver)
            elif variables[receiver] != variables[name]:
                raise CheckpointError(
                    f"{receiver!r} chooses between variables, which is not frozen"
                )
    return variables


def _entries(
    data: memoryview, nodes: dict[str, GraphNode], saver: wire.Field | None
) -> dict[str, tuple[str, str]]:
    """Variable → the entry of the checkpoint that is restored to it, and the slice of it."""
    # SaverDef.restore_op_name
    field = graphdef.single(data, (saver.begin, saver.end), {3}).get(3) if saver else None
    restore = wire.text(data, field) if field else ""
    entries: dict[str, tuple[str, str]] = {}
    texts: dict[str, list[list[str]]] = {}
    for name in _reached(nodes, [restore]) if restore in nodes else ():
        node = nodes[name]
        if node.op not in ("Assign", "AssignVariableOp") or len(node.inputs) < 2:
            continue
        reader, output = _origin(nodes, node.inputs[1])
        if reader.op != "RestoreV2" or len(reader.inputs) < 3:
            continue
        if reader.name not in texts:  # RestoreV2(prefix, tensor_names, shape_and_slices)
            constants = [nodes[graphdef.source(reference)] for reference in reader.inputs[1:3]]
            texts[reader.name] = [_texts(data, constant) for constant in constants]
        names, slices = texts[reader.name]
        if output >= min(len(names), len(slices)):
            raise CheckpointError(f"{name!r} is restored from what {reader.name!r} does not read")
        entries[graphdef.source(node.inputs[0])] = (names[output], slices[output])
    return entries


def _origin(nodes: dict[str, GraphNode], reference: str) -> tuple[GraphNode, int]:
    """The node that computes a value, and which of its outputs; Identity nodes are skipped."""
    node = nodes[graphdef.source(reference)]
    for _ in range(8):  # a bound, since the file may hold a cycle
        if node.op != "Identity" or not node.inputs:
            break
        reference = node.inputs[0]
        node = nodes[graphdef.source(reference)]
    output = reference.partition(":")[2]
    return node, int(output) if output.isdecimal() else 0


def _texts(data: memoryview, node: GraphNode) -> list[str]:
    """The strings of a Const (TensorProto.string_val, field 8)."""
    value = graphdef.attributes(data, node).get("value", (node.end, node.end))
    tensor = graphdef.single(data, value, {8}).get(8)  # AttrValue.tensor
    fields = wire.fields(data, tensor.begin, tensor.end) if tensor else ()
    return [wire.text(data, field) for field in fields if field.number == 8]


def _check_uses(graph: UnfrozenGraph) -> None:
    """Raise if a node needs a variable itself and not only its value."""
    for node in graph.nodes.values():
        if node.op in READERS:
            _check_reader(graph, node)
        for reference in node.inputs:
            # Control inputs (`^name`) match no variable and need none.
            variable = graph.variables.get(reference.partition(":")[0])
            if variable is None:
                continue
            by_handle = graph.nodes[variable].op == "VarHandleOp"
            if by_handle and node.op not in CARRIERS and node.op not in READERS:
                raise CheckpointError(
                    f"{node.name!r} ({node.op}) takes the variable {variable!r} itself, not its "
                    f"value, as functions and assignments do; choose outputs that do not need it, "
                    f"or freeze with TensorFlow"
                )
            if not by_handle and ASSIGNMENTS.fullmatch(node.op):
                raise CheckpointError(
                    f"{node.name!r} ({node.op}) changes or tests the variable {variable!r} on the "
                    f"way to the outputs; choose outputs of inference"
                )


def _check_reader(graph: UnfrozenGraph, node: GraphNode) -> None:
    attributes = graphdef.attributes(graph.data, node)
    value = attributes.get("batch_dims", (node.end, node.end))
    batch_dims = graphdef.single(graph.data, value, {3}).get(3)  # AttrValue.i
    if not node.inputs or graphdef.source(node.inputs[0]) not in graph.variables:
        raise CheckpointError(f"{node.name!r} ({node.op}) reads no variable of this graph")
    by_batch = batch_dims and batch_dims.value
    if node.op == "ResourceGather" and (len(node.inputs) < 2 or by_batch):
        raise CheckpointError(f"{node.name!r} ({node.op}) gathers by batch, which is not frozen")
    for name in ("dtype", "Tindices") if node.op == "ResourceGather" else ("dtype",):
        if graphdef.dtype_of(graph.data, attributes.get(name)) not in graphdef.DTYPES:
            raise CheckpointError(f"{node.name!r} ({node.op}) has no known {name}")


def _values(graph: UnfrozenGraph, stored: Mapping[str, Tensor], prefix: Path) -> dict[str, Tensor]:
    """The value of each variable that is needed."""
    nodes = _variable_nodes(graph)
    missing = [entry for node in nodes if (entry := _entry(graph, node)[0]) not in stored]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{prefix}: the checkpoint does not have {', '.join(missing[:3])}{more}, which the "
            f"outputs need; is it the checkpoint of this graph?"
        )
    return {node.name: _value(graph, node, stored) for node in nodes}


def _variable_nodes(graph: UnfrozenGraph) -> list[GraphNode]:
    return [node for node in graph.nodes.values() if node.op in VARIABLES]


def _entry(graph: UnfrozenGraph, node: GraphNode) -> tuple[str, str]:
    return graph.entries.get(node.name, (node.name, ""))


def _value(graph: UnfrozenGraph, node: GraphNode, stored: Mapping[str, Tensor]) -> Tensor:
    entry, part = _entry(graph, node)
    value = _sliced(stored[entry], part)
    attributes = graphdef.attributes(graph.data, node)
    dtype, _ = graphdef.DTYPES.get(
        graphdef.dtype_of(graph.data, attributes.get("dtype")), ("no number", 0)
    )
    sizes = _sizes(graph.data, attributes.get("shape"))
    if dtype != value.dtype or sizes not in (None, tuple(value.shape)):
        shape = "of any shape" if sizes is None else list(sizes)
        raise CheckpointError(
            f"{entry!r} is {list(value.shape)} of {value.dtype} in the checkpoint, but the graph's "
            f"variable {node.name!r} is {shape} of {dtype}; is it the checkpoint of this graph?"
        )
    return value


def _sliced(value: Tensor, part: str) -> Tensor:
    """The slice of a partitioned variable, as TensorFlow writes it: `80 32 0,27:-`."""
    *whole, bounds = part.split() or [""]
    if not part:
        return value
    if whole != [str(size) for size in value.shape] or not BOUNDS.fullmatch(bounds):
        raise CheckpointError(f"the slice {part!r} is not of a tensor {list(value.shape)}")
    spans = [span.split(",") for span in bounds.split(":")]  # start,length in each dimension
    return value[
        tuple(
            slice(int(span[0]), int(span[0]) + int(span[1])) if len(span) == 2 else slice(None)
            for span in spans
        )
    ]


def _sizes(data: memoryview, attribute: Span | None) -> tuple[int, ...] | None:
    """The shape in an attribute (AttrValue.shape); None if it leaves a size open."""
    field = graphdef.single(data, attribute, {7}).get(7) if attribute else None
    try:
        return graphdef.shape(data, field) if field else None
    except CheckpointError:
        return None


def _frozen_nodes(
    graph: UnfrozenGraph, values: Mapping[str, Tensor], clear_devices: bool
) -> Iterator[list[Chunk]]:
    """The nodes of the frozen graph, each a field of GraphDef."""
    for node in graph.nodes.values():
        attributes = graphdef.attributes(graph.data, node)
        if node.name in values:
            dtype = graphdef.dtype_of(graph.data, attributes["dtype"])
            yield _message(1, _constant(node.name, dtype, values[node.name]))
            continue
        if node.op == "ResourceGather":  # GatherV2 takes the axis as a third input
            dtype = graphdef.dtype_of(graph.data, attributes.get("Tindices"))
            zero = torch.zeros((), dtype=graphdef.DTYPES[dtype][0])
            yield _message(1, _constant(_axis_name(graph, node), dtype, zero))
        changes = _changes(graph, node, attributes)
        yield _message(1, _copied(graph, node, changes, clear_devices))


def _axis_name(graph: UnfrozenGraph, node: GraphNode) -> str:
    name = f"{node.name}/axis"
    while name in graph.nodes:
        name += "_"
    return name


def _constant(name: str, dtype: int, value: Tensor) -> list[Chunk]:
    """A Const NodeDef; the bytes of the tensor are not copied."""
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
    dims = [wire.write_field(2, wire.write_field(1, size)) for size in value.shape]
    tensor: list[Chunk] = [wire.write_field(1, dtype), wire.write_field(2, b"".join(dims))]
    if len(content):
        tensor += _message(4, [content])
    head = wire.write_field(1, name) + wire.write_field(2, "Const")
    head += _attribute("dtype", wire.write_field(6, dtype))
    attribute = [wire.write_field(1, "value"), *_message(2, _message(8, tensor))]
    return [head, *_message(5, attribute)]


def _attribute(name: str, value: bytes) -> bytes:
    return wire.write_field(5, wire.write_field(1, name) + wire.write_field(2, value))


def _message(number: int, chunks: list[Chunk]) -> list[Chunk]:
    """A field whose value is these chunks, without joining them."""
    head = wire.write_varint(number << 3 | wire.BYTES)
    return [head + wire.write_varint(sum(map(len, chunks))), *chunks]


def _changes(
    graph: UnfrozenGraph, node: GraphNode, attributes: Mapping[str, Span]
) -> dict[str, bytes | None]:
    """The attributes that change: name → new AttrValue, or None to drop it."""
    changes = _colocation(graph, attributes.get("_class"))
    if node.op in READERS:
        dtype = graphdef.dtype_of(graph.data, attributes.get("dtype"))
        changes |= dict.fromkeys(("dtype", "validate_indices", "batch_dims"))
        changes["T" if node.op == "ReadVariableOp" else "Tparams"] = wire.write_field(6, dtype)
        if node.op == "ResourceGather":
            indices = graphdef.dtype_of(graph.data, attributes.get("Tindices"))
            changes["Taxis"] = wire.write_field(6, indices)
    elif variable := graph.variables.get(node.name):
        attribute = graphdef.attributes(graph.data, graph.nodes[variable]).get("dtype")
        dtype = graphdef.dtype_of(graph.data, attribute)
        changes |= {"T": wire.write_field(6, dtype), "_output_shapes": None}
    return changes


def _colocation(graph: UnfrozenGraph, attribute: Span | None) -> dict[str, bytes | None]:
    """The change to `_class`, which places a node with others: without those that are gone."""
    # AttrValue.list, and its strings in ListValue.s
    value = graphdef.single(graph.data, attribute, {1}).get(1) if attribute else None
    if value is None:
        return {}
    fields = wire.fields(graph.data, value.begin, value.end)
    names = [wire.text(graph.data, field) for field in fields if field.number == 2]
    remaining = [name for name in names if _remains(graph, name.removeprefix("loc:@"))]
    if remaining == names:
        return {}
    entries = b"".join(wire.write_field(2, name) for name in remaining)
    return {"_class": wire.write_field(1, entries) if remaining else None}


def _remains(graph: UnfrozenGraph, name: str) -> bool:
    return name in graph.nodes and graph.nodes[name].op not in VARIABLES


def _copied(
    graph: UnfrozenGraph,
    node: GraphNode,
    changes: Mapping[str, bytes | None],
    clear_devices: bool,
) -> list[Chunk]:
    """A NodeDef with these changes; without any, its bytes as they are."""
    data = graph.data
    if not changes and not clear_devices:
        return [data[node.begin : node.end]]
    inputs = list(node.inputs)
    if node.op == "ResourceGather":
        inputs.insert(2, _axis_name(graph, node))
    chunks: list[Chunk] = [
        wire.write_field(1, node.name),
        wire.write_field(2, READERS.get(node.op, node.op)),
        *(wire.write_field(3, reference) for reference in inputs),
    ]
    at = node.begin
    for field in wire.fields(data, node.begin, node.end):
        # name, op and input are written above; 4 is the device
        dropped = field.number <= 3 or (field.number == 4 and clear_devices)
        if field.number == 5:  # an attribute
            key = graphdef.single(data, (field.begin, field.end), {1}).get(1)
            dropped = key is not None and wire.text(data, key) in changes
        elif field.number == 7:  # experimental_type, which describes the old outputs
            dropped = bool(changes)
        if not dropped:
            chunks.append(data[at : field.end])
        at = field.end
    new = [_attribute(name, value) for name, value in changes.items() if value is not None]
    return [*chunks, *new]


def _versions_and_library(graph: UnfrozenGraph) -> Iterator[Chunk]:
    """The other fields of GraphDef: versions, and the library if a node calls a function."""
    at = graph.span[0]
    for field in wire.fields(graph.data, *graph.span):
        if field.number == 4:
            graphdef.check(graph.data, field.begin, field.end, "VersionDef")
        if field.number in (3, 4) or (field.number == 2 and _is_called(graph, field)):
            yield graph.data[at : field.end]
        at = field.end


def _is_called(graph: UnfrozenGraph, library: wire.Field) -> bool:
    """Does a node call a function of this FunctionDefLibrary?"""
    data = graph.data
    graphdef.check(data, library.begin, library.end, "Library")
    fields = wire.fields(data, library.begin, library.end)
    functions = [field for field in fields if field.number == 1]
    names = {_function_name(data, field) for field in functions}
    nodes = graph.nodes.values()
    if not any(node.op in names or _has_function_attribute(data, node) for node in nodes):
        return False
    for function in functions:
        for field in wire.fields(data, function.begin, function.end):
            op = graphdef.single(data, (field.begin, field.end), {2}).get(2)
            if field.number == 3 and op and wire.text(data, op) in VARIABLES:  # node_def
                raise CheckpointError(
                    f"byte {field.begin}: there is a variable in the function "
                    f"{_function_name(data, function)!r}; freeze with TensorFlow"
                )
    return True


def _function_name(data: memoryview, function: wire.Field) -> str:
    """FunctionDef.signature.name."""
    signature = graphdef.single(data, (function.begin, function.end), {1}).get(1)
    name = signature and graphdef.single(data, (signature.begin, signature.end), {1}).get(1)
    return wire.text(data, name) if name else ""


def _has_function_attribute(data: memoryview, node: GraphNode) -> bool:
    """Is one of its attributes a function (AttrValue.func), or a list of functions?"""
    for span in graphdef.attributes(data, node).values():
        values = graphdef.single(data, span, {1, 10})
        listed = values.get(1)
        inner = wire.fields(data, listed.begin, listed.end) if listed else ()
        if 10 in values or any(field.number == 9 for field in inner):
            return True
    return False


def _write(target: Path, chunks: list[Chunk], progress: Callable[[int, int], None]) -> int:
    """Write a file whole or not at all, and return its size in bytes."""
    size = sum(map(len, chunks))
    if size > SIZE_LIMIT:
        raise CheckpointError(
            f"the frozen graph would have {size} bytes, and protobuf allows {SIZE_LIMIT}; "
            f"keep the checkpoint and the graph apart"
        )
    written = 0
    with new_file(target) as file:
        for chunk in chunks:
            for at in range(0, len(chunk), CHUNK):
                file.write(chunk[at : at + CHUNK])
                written += min(CHUNK, len(chunk) - at)
                progress(written, size)
    return size
