"""Fold variables into a graph: what holds or reads one becomes a constant or reads a constant.

Nodes stay the bytes they were wherever they can; a changed node is put together from the pieces of
the old one, and the bytes of a weight are never copied.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse import wire
from packhorse.checkpoint.tensorflow import graphdef
from packhorse.checkpoint.tensorflow.frozen import VARIABLES
from packhorse.checkpoint.tensorflow.graphdef import Node, Place
from packhorse.errors import CheckpointError

Piece = bytes | memoryview

# What hands a handle on, and what reads by it with what reads a constant; all else would need the
# variable itself.
CARRIERS = {"Identity", "Enter", "Exit", "NextIteration", "Switch", "Merge"}
READERS = {
    "ReadVariableOp": "Identity",
    "ResourceGather": "GatherV2",
    "ResourceGatherNd": "GatherNd",
}
ASSIGNS = re.compile(r"Ref[A-Z].*|Assign.*|Scatter.*|(Sparse)?Apply.*|CountUpTo|.*Initialized")


@dataclass(frozen=True, slots=True)
class Graph:
    """The part of a graph that the outputs need."""

    data: memoryview
    place: Place  # of the GraphDef
    all: dict[str, Node]
    nodes: dict[str, Node]
    holds: dict[str, str]  # by node the variable that it is, or whose handle it hands on
    entries: dict[str, tuple[str, str]]  # by variable its entry in the checkpoint, and the slice


def holders(nodes: dict[str, Node]) -> dict[str, str]:
    """The variables, each under its own name and those of the nodes that hand its handle on."""
    takers = defaultdict(list)
    for node in nodes.values():
        for written in node.inputs if node.op in CARRIERS else ():
            if not written.startswith("^"):
                takers[graphdef.source(written)].append(node.name)
    found = {name: name for name, node in nodes.items() if node.op in VARIABLES}
    todo = [name for name, node in nodes.items() if node.op == "VarHandleOp"]
    while todo:
        name = todo.pop()
        for taker in takers[name]:
            if taker not in found:
                found[taker] = found[name]
                todo.append(taker)
            elif found[taker] != found[name]:
                raise CheckpointError(f"{taker!r} chooses between variables, which is not frozen")
    return found


def check(graph: Graph) -> None:
    """Refuse what needs a variable, not its value."""
    for node in graph.nodes.values():
        if node.op in READERS:
            _check_reader(graph, node)
        for written in node.inputs:
            held = graph.holds.get(written.partition(":")[0])  # control (^) is no matter
            if held is None:
                continue
            by_handle = graph.nodes[held].op == "VarHandleOp"
            if by_handle and node.op not in CARRIERS and node.op not in READERS:
                raise CheckpointError(
                    f"{node.name!r} ({node.op}) takes the variable {held!r} itself, not its value, "
                    f"as functions and assignments do; choose outputs that do not need it, or "
                    f"freeze with TensorFlow"
                )
            if not by_handle and ASSIGNS.fullmatch(node.op):
                raise CheckpointError(
                    f"{node.name!r} ({node.op}) changes or tests the variable {held!r} on the way "
                    f"to the outputs; choose outputs of inference"
                )


def _check_reader(graph: Graph, node: Node) -> None:
    said = graphdef.attributes(graph.data, node)
    batch = graphdef.single(graph.data, said.get("batch_dims", (node.end, node.end)), {3}).get(3)
    if not node.inputs or graphdef.source(node.inputs[0]) not in graph.holds:
        raise CheckpointError(f"{node.name!r} ({node.op}) reads no variable of this graph")
    if node.op == "ResourceGather" and (len(node.inputs) < 2 or (batch and batch.value)):
        raise CheckpointError(f"{node.name!r} ({node.op}) gathers by batch, which is not frozen")
    for name in ("dtype", "Tindices") if node.op == "ResourceGather" else ("dtype",):
        if graphdef.dtype_of(graph.data, said.get(name)) not in graphdef.DTYPES:
            raise CheckpointError(f"{node.name!r} ({node.op}) has no known {name}")


def nodes(graph: Graph, values: Mapping[str, Tensor], clear_devices: bool) -> Iterator[list[Piece]]:
    """The nodes of the frozen graph, each a field of GraphDef."""
    for node in graph.nodes.values():
        said = graphdef.attributes(graph.data, node)
        if node.name in values:
            number = graphdef.dtype_of(graph.data, said["dtype"])
            yield _message(1, _constant(node.name, number, values[node.name]))
            continue
        if node.op == "ResourceGather":
            number = graphdef.dtype_of(graph.data, said.get("Tindices"))
            zero = torch.zeros((), dtype=graphdef.DTYPES[number][0])
            yield _message(1, _constant(_axis(graph, node), number, zero))
        yield _message(1, _copied(graph, node, _changes(graph, node, said), clear_devices))


def _axis(graph: Graph, node: Node) -> str:
    name = f"{node.name}/axis"
    while name in graph.nodes:
        name += "_"
    return name


def _constant(name: str, number: int, value: Tensor) -> list[Piece]:
    """A node; the bytes of the tensor are not copied."""
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
    sizes = [wire.write_field(2, wire.write_field(1, size)) for size in value.shape]
    tensor = [wire.write_field(1, number), wire.write_field(2, b"".join(sizes))]
    inner = [*tensor, *(_message(4, [content]) if len(content) else [])]
    head = wire.write_field(1, name) + wire.write_field(2, "Const")
    head += _attribute("dtype", wire.write_field(6, number))
    return [head, *_message(5, [wire.write_field(1, "value"), *_message(2, _message(8, inner))])]


def _attribute(name: str, value: bytes) -> bytes:
    return wire.write_field(5, wire.write_field(1, name) + wire.write_field(2, value))


def _message(number: int, pieces: list[Piece]) -> list[Piece]:
    head = wire.write_varint(number << 3 | wire.BYTES)
    return [head + wire.write_varint(sum(map(len, pieces))), *pieces]


def _changes(graph: Graph, node: Node, said: Mapping[str, Place]) -> dict[str, bytes | None]:
    """The attributes that are new, or None and gone."""
    changes = _neighbours(graph, said.get("_class"))
    if node.op in READERS:
        dtype = graphdef.dtype_of(graph.data, said.get("dtype"))
        changes |= dict.fromkeys(("dtype", "validate_indices", "batch_dims"))
        changes["T" if node.op == "ReadVariableOp" else "Tparams"] = wire.write_field(6, dtype)
        if node.op == "ResourceGather":
            indices = graphdef.dtype_of(graph.data, said.get("Tindices"))
            changes["Taxis"] = wire.write_field(6, indices)
    elif held := graph.holds.get(node.name):
        place = graphdef.attributes(graph.data, graph.nodes[held]).get("dtype")
        dtype = graphdef.dtype_of(graph.data, place)
        changes |= {"T": wire.write_field(6, dtype), "_output_shapes": None}
    return changes


def _neighbours(graph: Graph, attribute: Place | None) -> dict[str, bytes | None]:
    """The change to `_class`, which wishes a node near others: not near what is gone."""
    held = graphdef.single(graph.data, attribute, {1}).get(1) if attribute else None
    if held is None:
        return {}
    near = [f for f in wire.fields(graph.data, held.begin, held.end) if f.number == 2]
    names = [wire.text(graph.data, field) for field in near]
    kept = [name for name in names if _stays(graph, name.removeprefix("loc:@"))]
    if kept == names:
        return {}
    entries = b"".join(wire.write_field(2, name) for name in kept)
    return {"_class": wire.write_field(1, entries) if kept else None}


def _stays(graph: Graph, name: str) -> bool:
    return name in graph.nodes and graph.nodes[name].op not in VARIABLES


def _copied(
    graph: Graph, node: Node, changes: Mapping[str, bytes | None], clear_devices: bool
) -> list[Piece]:
    """A node with these changes; without any, its bytes as they are."""
    data, at = graph.data, node.begin
    if not changes and not clear_devices:
        return [data[node.begin : node.end]]
    inputs = list(node.inputs)
    if node.op == "ResourceGather":
        inputs.insert(2, _axis(graph, node))
    new = [wire.write_field(1, node.name), wire.write_field(2, READERS.get(node.op, node.op))]
    pieces: list[Piece] = [*new, *(wire.write_field(3, written) for written in inputs)]
    for field in wire.fields(data, node.begin, node.end):
        gone = field.number <= 3 or (field.number == 4 and clear_devices)
        if field.number == 5:
            key = graphdef.single(data, (field.begin, field.end), {1}).get(1)
            gone = key is not None and wire.text(data, key) in changes
        elif field.number == 7:
            gone = bool(changes)  # the type of what it was
        if not gone:
            pieces.append(data[at : field.end])
        at = field.end
    kept = (_attribute(name, value) for name, value in changes.items() if value is not None)
    return [*pieces, *kept]


def rest(graph: Graph) -> Iterator[Piece]:
    """Versions, and the library if a node calls a function."""
    at = graph.place[0]
    for field in wire.fields(graph.data, *graph.place):
        if field.number == 4:
            graphdef.check(graph.data, field.begin, field.end, "VersionDef")
        if field.number in (3, 4) or (field.number == 2 and _calls(graph, field)):
            yield graph.data[at : field.end]
        at = field.end


def _calls(graph: Graph, library: wire.Field) -> bool:
    """Does a node call one of these functions?"""
    data = graph.data
    graphdef.check(data, library.begin, library.end, "Library")
    functions = [f for f in wire.fields(data, library.begin, library.end) if f.number == 1]
    names = {_signature(data, field) for field in functions}
    if not any(node.op in names or _passes(data, node) for node in graph.nodes.values()):
        return False
    for function in functions:
        for field in wire.fields(data, function.begin, function.end):
            op = graphdef.single(data, (field.begin, field.end), {2}).get(2)
            if field.number == 3 and op and wire.text(data, op) in VARIABLES:
                raise CheckpointError(
                    f"byte {field.begin}: there is a variable in the function "
                    f"{_signature(data, function)!r}; freeze with TensorFlow"
                )
    return True


def _signature(data: memoryview, function: wire.Field) -> str:
    operation = graphdef.single(data, (function.begin, function.end), {1}).get(1)
    name = operation and graphdef.single(data, (operation.begin, operation.end), {1}).get(1)
    return wire.text(data, name) if name else ""


def _passes(data: memoryview, node: Node) -> bool:
    """Has it an attribute that is a function, or several?"""
    for place in graphdef.attributes(data, node).values():
        held = graphdef.single(data, place, {1, 10})
        several = held.get(1)
        inner = wire.fields(data, several.begin, several.end) if several else ()
        if 10 in held or any(field.number == 9 for field in inner):
            return True
    return False
