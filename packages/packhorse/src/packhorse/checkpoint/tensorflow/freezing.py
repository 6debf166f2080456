"""Freeze a TensorFlow checkpoint without TensorFlow: a graph (`.meta`) and its weights in one file.

The nodes that the outputs need are kept; `folding` turns variables into constants. Which entry of
the checkpoint belongs to which variable is taken from the graph's own restore operations, so that
renamed and partitioned variables come out right. Nothing is simplified: the result has the nodes of
TensorFlow's `convert_variables_to_constants`, and the same outputs to the last bit.

Variables that a function takes by handle, and graphs that assign variables on the way to their
outputs, are refused by name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from packhorse import wire
from packhorse.atomic import new_file
from packhorse.checkpoint import files
from packhorse.checkpoint.tensorflow import folding, graphdef, tf1
from packhorse.checkpoint.tensorflow.folding import Graph, Piece
from packhorse.checkpoint.tensorflow.frozen import OTHERS, VARIABLES, kind_of, stop
from packhorse.checkpoint.tensorflow.graphdef import Node, Place
from packhorse.errors import CheckpointError, InputError

SIZE_LIMIT = (1 << 31) - 1  # bytes of a protobuf message
CHUNK = 8 << 20  # bytes between two calls of `progress`

GRAPHS = {
    "graph": "this is a GraphDef; pass the checkpoint's .meta",
    "unknown": "this is no graph of a checkpoint (.meta); it may be truncated",
}
BOUNDS = re.compile(r"(\d{1,18},\d{1,18}|-)(:(\d{1,18},\d{1,18}|-))*")


@dataclass(frozen=True, slots=True)
class Frozen:
    """What freezing did."""

    nodes_before: int
    nodes: int
    variables: int
    bytes: int


def freeze(
    meta: Path | None,
    prefix: Path,
    outputs: Sequence[str],
    target: Path,
    *,
    clear_devices: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Frozen:
    """Write the graph that computes `outputs`, with the checkpoint's weights in it, to `target`.

    prefix: or whatever else leads to a checkpoint (a folder, its index). meta: None is PREFIX.meta.
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
            graph = _needed(memoryview(file.read()), outputs)
            folding.check(graph)
        except CheckpointError as error:
            raise CheckpointError(f"{meta}: {error}") from error.__cause__
        wanted = {_entry(graph, node)[0] for node in _variables(graph)}
        stored, used = tf1.read_entries(prefix, wanted)
        if any(target.exists() and target.samefile(one) for one in (meta, *used)):
            raise InputError(f"{target} is read from; choose another name for the frozen graph")
        values = _values(graph, stored, prefix)
        nodes = [piece for node in folding.nodes(graph, values, clear_devices) for piece in node]
        written = _write(
            target, [*nodes, *folding.rest(graph)], progress or (lambda done, total: None)
        )
    added = sum(node.op == "ResourceGather" for node in graph.nodes.values())
    return Frozen(len(graph.all), len(graph.nodes) + added, len(values), written)


def _needed(data: memoryview, outputs: Sequence[str]) -> Graph:
    """The nodes on which the outputs depend, in the order of the file."""
    if (kind := kind_of(data)) != "meta":
        raise CheckpointError((OTHERS | GRAPHS)[kind] + (stop(data) if kind == "unknown" else ""))
    parts = graphdef.single(data, (0, len(data)), {2, 3})
    place = (parts[2].begin, parts[2].end)
    every = graphdef.nodes(data, *place)
    names = [graphdef.source(name.strip()) for name in outputs if name.strip()]
    if not names:
        raise InputError("name the nodes that are the outputs")
    for name in names:
        if name not in every:
            raise InputError(f"the graph has no node {name!r}; {_nearest(name, list(every))}")
    kept = _reached(every, names)
    nodes = {name: node for name, node in every.items() if name in kept}
    for node in nodes.values():
        graphdef.check(data, node.begin, node.end, "NodeDef")
    return Graph(
        data, place, every, nodes, folding.holders(nodes), _entries(data, every, parts.get(3))
    )


def _nearest(name: str, nodes: list[str]) -> str:
    same = [node for node in nodes if node.rpartition("/")[2] == name][:3]
    near = same or difflib.get_close_matches(name, nodes, 3)
    return f"did you mean {', '.join(near)}?" if near else "none has a name like it"


def _reached(nodes: dict[str, Node], names: Iterable[str]) -> set[str]:
    """These nodes and all from which they take, control included."""
    found, todo = set(names), list(names)
    while todo:
        node = nodes[todo.pop()]
        for origin in node.sources:
            if origin not in nodes:
                raise CheckpointError(
                    f"{node.name!r}: byte {node.begin}: takes from {origin!r}, which is not there"
                )
            if origin not in found:
                found.add(origin)
                todo.append(origin)
    return found


def _entries(
    data: memoryview, nodes: dict[str, Node], saver: wire.Field | None
) -> dict[str, tuple[str, str]]:
    """By variable: the entry of the checkpoint that is restored to it, and the slice of it."""
    said = graphdef.single(data, (saver.begin, saver.end), {3}).get(3) if saver else None
    restore = wire.text(data, said) if said else ""
    found, texts = {}, {}
    for name in _reached(nodes, [restore]) if restore in nodes else ():
        node = nodes[name]
        if node.op not in ("Assign", "AssignVariableOp") or len(node.inputs) < 2:
            continue
        reader, output = _origin(nodes, node.inputs[1])
        if reader.op != "RestoreV2" or len(reader.inputs) < 3:
            continue
        if reader.name not in texts:
            lists = [nodes[graphdef.source(written)] for written in reader.inputs[1:3]]
            texts[reader.name] = [_texts(data, one) for one in lists]
        names, slices = texts[reader.name]
        if output >= min(len(names), len(slices)):
            raise CheckpointError(f"{name!r} is restored from what {reader.name!r} does not read")
        found[graphdef.source(node.inputs[0])] = (names[output], slices[output])
    return found


def _origin(nodes: dict[str, Node], written: str) -> tuple[Node, int]:
    """The node that makes a value, and as which output; Identity nodes are passed."""
    node = nodes[graphdef.source(written)]
    for _ in range(8):
        if node.op != "Identity" or not node.inputs:
            break
        written = node.inputs[0]
        node = nodes[graphdef.source(written)]
    output = written.partition(":")[2]
    return node, int(output) if output.isdecimal() else 0


def _texts(data: memoryview, node: Node) -> list[str]:
    """The texts of a Const."""
    value = graphdef.attributes(data, node).get("value", (node.end, node.end))
    tensor = graphdef.single(data, value, {8}).get(8)
    parts = wire.fields(data, tensor.begin, tensor.end) if tensor else ()
    return [wire.text(data, part) for part in parts if part.number == 8]


def _values(graph: Graph, values: Mapping[str, Tensor], prefix: Path) -> dict[str, Tensor]:
    """The value of each variable that is needed."""
    wanted = _variables(graph)
    missing = [entry for node in wanted if (entry := _entry(graph, node)[0]) not in values]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{prefix}: the checkpoint does not have {', '.join(missing[:3])}{more}, which the "
            f"outputs need; is it the checkpoint of this graph?"
        )
    return {node.name: _value(graph, node, values) for node in wanted}


def _variables(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes.values() if node.op in VARIABLES]


def _entry(graph: Graph, node: Node) -> tuple[str, str]:
    return graph.entries.get(node.name, (node.name, ""))


def _value(graph: Graph, node: Node, values: Mapping[str, Tensor]) -> Tensor:
    entry, part = _entry(graph, node)
    value = _sliced(values[entry], part)
    said = graphdef.attributes(graph.data, node)
    dtype, _ = graphdef.DTYPES.get(
        graphdef.dtype_of(graph.data, said.get("dtype")), ("no number", 0)
    )
    sizes = _sizes(graph.data, said.get("shape"))
    if dtype != value.dtype or sizes not in (None, tuple(value.shape)):
        shape = "of any shape" if sizes is None else list(sizes)
        raise CheckpointError(
            f"{entry!r} is {list(value.shape)} of {value.dtype} in the checkpoint, but the graph's "
            f"variable {node.name!r} is {shape} of {dtype}; is it the checkpoint of this graph?"
        )
    return value


def _sliced(value: Tensor, part: str) -> Tensor:
    """The part of a partitioned variable, as TensorFlow writes it: `80 32 0,27:-`."""
    *whole, bounds = part.split() or [""]
    if not part:
        return value
    if whole != [str(size) for size in value.shape] or not BOUNDS.fullmatch(bounds):
        raise CheckpointError(f"the slice {part!r} is not of a tensor {list(value.shape)}")
    spans = [span.split(",") for span in bounds.split(":")]
    return value[
        tuple(
            slice(int(span[0]), int(span[0]) + int(span[1])) if len(span) == 2 else slice(None)
            for span in spans
        )
    ]


def _sizes(data: memoryview, attribute: Place | None) -> tuple[int, ...] | None:
    """The shape that an attribute says; None where it leaves something open."""
    said = graphdef.single(data, attribute, {7}).get(7) if attribute else None
    try:
        return graphdef.shape(data, said) if said else None
    except CheckpointError:
        return None


def _write(target: Path, pieces: list[Piece], progress: Callable[[int, int], None]) -> int:
    """Write a file whole or not at all; the count of its bytes."""
    size, done = sum(map(len, pieces)), 0
    if size > SIZE_LIMIT:
        raise CheckpointError(
            f"the frozen graph would have {size} bytes, and protobuf allows {SIZE_LIMIT}; "
            f"keep the checkpoint and the graph apart"
        )
    with new_file(target) as file:
        for piece in pieces:
            for at in range(0, len(piece), CHUNK):
                file.write(piece[at : at + CHUNK])
                done += min(CHUNK, len(piece) - at)
                progress(done, size)
    return size
