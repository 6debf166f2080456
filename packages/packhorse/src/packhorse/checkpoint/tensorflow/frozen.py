"""Frozen graphs of TensorFlow (GraphDef, `.pb`): the constants that are a model's weights.

Freezing turns each variable into a Const of its name, which an Identity reads; so does TensorFlow 1
(`convert_variables_to_constants`) with both kinds of variables, and TensorFlow 2 (`…_v2`) with what
was saved by TensorFlow 1. A function of TensorFlow 2 keeps only the place where a variable is used
(`L/MatMul/ReadVariableOp/resource`); its weight is named after that (`L/kernel`). A weight has one
name: names that TensorFlow gave by itself give way to that of the Identity that reads them.

A graph has hundreds of constants that are no weights. Kept are those of floating point with at
least one dimension, unless they have a name of TensorFlow's own and only arithmetic uses them, as
the ones of a mask. Nothing is ever built or run; only the constants are read.
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
from packhorse.checkpoint.tensorflow import gelu, graphdef
from packhorse.checkpoint.tensorflow.graphdef import Node, Stored
from packhorse.errors import CheckpointError

TENSOR_LIMIT = 10_000  # BERT-Large has 400
SPARE = 64 << 20  # bytes of values that stand for many, besides the size of the file

VARIABLES = {"Variable", "VariableV2", "VarHandleOp"}
USES = {  # of a weight
    *("Identity", "Gather", "GatherV2", "MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum"),
    *("BiasAdd", "Reshape", "Transpose"),
}
AUTOMATIC = re.compile(
    r"(.*/)?(Const|Identity|ReadVariableOp|resource|(ones|zeros)(_like)?|x|y|\d+)(_\d+)?"
    r"|.*_const|ConstantFolding/.*"
)
READ = re.compile(r"/(read|Read/ReadVariableOp)$")
PLACE = re.compile(
    r"(.+)/(MatMul|Tensordot|BiasAdd|batchnorm/mul|batchnorm|einsum/Einsum|add)(?:_\d+)?"
    r"/ReadVariableOp(?:_\d+)?(?:/resource)?"
)
ROLES = {
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
    """The weights of a frozen graph."""
    if path.is_dir():
        raise CheckpointError(_folder(path))
    with files.open_file(path.parent, path.name) as file:
        try:
            weights, notes, forms = _surveyed(file, path.parent)
            tensors = {name: _load(file, name, weights[name]) for name in weights}
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return Contents("frozen", path.parent, (path,), tensors, notes=notes, gelu=forms, graph=path)


def _surveyed(
    file: BinaryIO, folder: Path
) -> tuple[dict[str, Stored], tuple[str, ...], frozenset[str]]:
    """Where the weights lie, notes, and the forms of GELU that the nodes compute.

    The bytes are let go before weights take their place.
    """
    data = _bytes_of(file)
    if (kind := kind_of(data)) != "graph":
        said = OTHERS[kind].replace("DIR", str(folder))
        raise CheckpointError(said + (stop(data) if kind == "unknown" else ""))
    nodes = _nodes(data)
    weights, notes = _find(data, nodes)
    return weights, notes, gelu.of_nodes(data, nodes, file)


def sniff(path: Path) -> bool:
    """Is this file a GraphDef, by its first node?"""
    return _kind(path) == "graph"


def known(path: Path) -> bool:
    """Is this file a GraphDef, or one of which `read` says what it is instead?"""
    return _kind(path) != "unknown"


def _kind(path: Path) -> str:
    try:
        with files.open_file(path.parent, path.name) as file:
            return kind_of(_bytes_of(file))
    except (CheckpointError, OSError):
        return "unknown"


def _folder(path: Path) -> str:
    if any(files.exists(path, f"saved_model.{suffix}") for suffix in ("pb", "pbtxt")):
        return f"{path}: {OTHERS['saved'].replace('DIR', str(path))}"
    found = ", ".join(sorted(one.name for one in path.glob("*.pb"))) or "there is none here"
    return f"{path} is a folder; pass the frozen graph in it ({found})"


def _bytes_of(file: BinaryIO) -> memoryview:
    """The whole file; not mapped into memory, because truncating it would then end the process."""
    size = file.seek(0, 2)
    if size > WHOLE:
        raise CheckpointError(f"it has {size:,} bytes, and a graph at most {WHOLE:,}")
    file.seek(0)
    return memoryview(file.read(size))


def _nodes(data: memoryview) -> dict[str, Node]:
    """The nodes of a graph that is frozen."""
    graphdef.check(data, 0, len(data))
    nodes = graphdef.nodes(data, 0, len(data))
    if variables := [node.name for node in nodes.values() if node.op in VARIABLES]:
        raise CheckpointError(
            f"the graph is not frozen: {variables[0]!r} and {len(variables) - 1} more are "
            f"variables, whose values lie in a checkpoint; {FREEZE}"
        )
    return nodes


def _find(data: memoryview, nodes: dict[str, Node]) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """The weights by name, and what to say about the rest."""
    constants = _constants(data, nodes.values())
    readers, uses = _readers(nodes)
    names = _names(constants, readers)
    kept = {
        names[name]: constant
        for name, constant in constants.items()
        if not AUTOMATIC.fullmatch(names[name]) or uses[name] & USES
    }
    _limit(kept, len(data))
    every = sum(node.op == "Const" for node in nodes.values())
    renamed = [(name, names[name]) for name in constants if names[name] != name]
    return kept, tuple(_notes(every - len(kept), renamed, _functions(data)))


def _constants(data: memoryview, nodes: Iterable[Node]) -> dict[str, Stored]:
    """Those of floating point with at least one dimension."""
    found = {}
    for node in nodes:
        if node.op != "Const":
            continue
        try:
            attributes = graphdef.attributes(data, node)
            dtype = graphdef.dtype_of(data, attributes.get("dtype"))
            if not 0 < dtype < 100 or dtype in graphdef.QUANTISED:
                raise CheckpointError(f"byte {node.begin}: dtype {dtype} is not read")
            value = attributes.get("value", (node.end, node.end))
            stored = graphdef.stored(data, value, dtype)
            if stored.shape and dtype in graphdef.FLOATS:
                found[node.name] = stored
        except CheckpointError as error:
            raise CheckpointError(f"{node.name!r}: {error}") from error.__cause__
    return found


def _readers(nodes: dict[str, Node]) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """By node: the Identity nodes that lead back to it, and the operations that use it."""
    readers: dict[str, list[str]] = defaultdict(list)
    uses: dict[str, set[str]] = defaultdict(set)
    identities = 0
    for node in nodes.values():
        for place, origin in enumerate(node.sources):
            if origin not in nodes:
                raise CheckpointError(
                    f"{node.name!r}: byte {node.begin}: takes from {origin!r}, which is not there"
                )
            uses[origin].add(node.op)
            if place == 0 and node.op == "Identity":
                readers[origin].append(node.name)
                identities += 1
    found: dict[str, list[str]] = defaultdict(list)
    for name, node in nodes.items():
        todo = list(readers.get(name, ())) if node.op != "Identity" else []
        while todo:
            found[name].append(reader := todo.pop())
            identities -= 1
            todo += readers.get(reader, ())
    if identities:
        raise CheckpointError("there are Identity nodes that take from each other in a circle")
    return found, uses


def _names(constants: dict[str, Stored], readers: dict[str, list[str]]) -> dict[str, str]:
    """What each constant is called: its own name, or a better one that no other has."""
    better = {name: _name(name, readers.get(name, [])) for name in constants}
    times = Counter(better.values())
    return {
        name: new if times[new] == 1 and (new == name or new not in constants) else name
        for name, new in better.items()
    }


def _name(name: str, readers: list[str]) -> str:
    if not AUTOMATIC.fullmatch(name):
        return name
    for reader in sorted(READ.sub("", reader) for reader in readers):
        if not AUTOMATIC.fullmatch(reader):
            return reader
    used = PLACE.fullmatch(name)
    return f"{used[1]}/{ROLES[used[2]]}" if used else name


def _limit(weights: dict[str, Stored], size: int) -> None:
    """Before anything is allocated."""
    if not weights:
        raise CheckpointError("the graph holds no weights (constants of floating point)")
    if len(weights) > TENSOR_LIMIT:
        raise CheckpointError(f"the graph holds {len(weights)} weights, more than {TENSOR_LIMIT}")
    missing = {name: weight.missing for name, weight in weights.items()}
    if sum(missing.values()) > size + SPARE:
        name = max(missing, key=lambda name: missing[name])
        raise CheckpointError(
            f"{name!r}: byte {weights[name].begin}: the shape {list(weights[name].shape)} takes "
            f"{weights[name].bytes} bytes, of which the file lacks {missing[name]}"
        )


def _functions(data: memoryview) -> int:
    libraries = [f for f in wire.fields(data) if f.number == 2 and f.kind == wire.BYTES]
    parts = (part for one in libraries for part in wire.fields(data, one.begin, one.end))
    return sum(part.number == 1 for part in parts)


def _notes(others: int, renamed: list[tuple[str, str]], functions: int) -> Iterable[str]:
    if others:
        yield f"{others} constants that are no weights (numbers, shapes, texts) are left out"
    if renamed:
        old, new = renamed[0]
        yield f"{len(renamed)} weights are called after what reads them, as {old} is {new}"
    if functions:
        yield f"the constants of {functions} functions in the graph's library are not read"


def _load(file: BinaryIO, name: str, weight: Stored) -> Tensor:
    try:
        return graphdef.read(file, weight)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from error.__cause__


_TEXT = re.compile(
    rb"\s*(#[^\n]*\n\s*)*(node|library|versions|meta_info_def|graph_def|meta_graphs"
    rb"|saved_model_schema_version)\s*[:{<]"
)
WHOLE = 1 << 31  # bytes, more than any message has
_OPERATION = re.compile(r"[A-Za-z_][A-Za-z0-9_>]*")


def kind_of(data: memoryview) -> str:
    """What a file holds, told from its beginning; a key of `OTHERS`, or `graph`."""
    if _TEXT.match(bytes(data[:4096])):
        return "text"
    whole = (0, len(data))
    looks = {"graph": _is_graph, "meta": _is_meta, "saved": _is_saved, "hlo": _is_hlo}
    for kind, look in looks.items():
        if look(data, whole):
            return kind
    # One that was cut short is still what it was: its reader then says at which byte it ends.
    longer = (0, len(data) + WHOLE)
    return next((kind for kind in ("graph", "meta") if looks[kind](data, longer)), "unknown")


def stop(data: memoryview) -> str:
    """At which byte a file is no message any more, as a part of an error."""
    try:
        for _ in wire.fields(data):
            pass
    except CheckpointError as error:
        return f" ({error})"
    return f" (its {len(data)} bytes)"


def _first(data: memoryview, place: graphdef.Place) -> list[wire.Field]:
    try:
        return list(islice(wire.fields(data, *place), 4))
    except (CheckpointError, IndexError):
        return []


def _is_graph(data: memoryview, place: graphdef.Place) -> bool:
    """A GraphDef begins with a node, a node with its name and its operation."""
    whole = _first(data, place)[:1]
    parts = _first(data, (whole[0].begin, whole[0].end)) if _bytes(whole, 1) else []
    return _bytes(parts, 1, 2) and bool(_OPERATION.fullmatch(_text(data, parts[1])))


def _is_meta(data: memoryview, place: graphdef.Place) -> bool:
    graphs = [f for f in _first(data, place) if f.number == 2 and f.kind == wire.BYTES]
    return bool(graphs) and _is_graph(data, (graphs[0].begin, graphs[0].end))


def _is_saved(data: memoryview, place: graphdef.Place) -> bool:
    fields = _first(data, place)
    numbered = bool(fields) and fields[0].number == 1 and fields[0].kind == wire.VARINT
    return numbered and _bytes(fields[1:], 2) and _is_meta(data, (fields[1].begin, fields[1].end))


def _is_hlo(data: memoryview, place: graphdef.Place) -> bool:
    """A module begins with its name and that of its entry; it may lie in a message of its own."""
    fields = _first(data, place)
    if not _bytes(fields, 1):
        return False
    inner = _first(data, (fields[0].begin, fields[0].end))
    return any(
        _bytes(some, 1, 2) and all(_text(data, part).isprintable() for part in some[:2])
        for some in (fields, inner)
    )


def _bytes(fields: list[wire.Field], *numbers: int) -> bool:
    return [(f.number, f.kind) for f in fields[: len(numbers)]] == [
        (number, wire.BYTES) for number in numbers
    ]


def _text(data: memoryview, field: wire.Field) -> str:
    try:
        return bytes(data[field.begin : min(field.end, field.begin + 256)]).decode()
    except UnicodeDecodeError:
        return "\0"
