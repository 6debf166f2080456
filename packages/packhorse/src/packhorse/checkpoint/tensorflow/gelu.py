"""Which GELU a TensorFlow graph computes, read from its nodes.

Google's BERT calls both forms `gelu` in its configuration: the exact one, by Erf, until February
2019, and since then the approximation 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks
and Gimpel 2016). Results differ in the fourth digit. The nodes tell which it is: Erf (Erfc in newer
TensorFlow), or a Tanh with the constant 0.044715 before it; the pooler's Tanh has no such constant.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from packhorse.checkpoint import files
from packhorse.checkpoint.tensorflow import graphdef
from packhorse.checkpoint.tensorflow.graphdef import Node
from packhorse.errors import CheckpointError

COEFFICIENT = 0.044715
CLOSE = 0.01  # of it: bf16 keeps 8 bits
STEPS = 6  # nodes from a Tanh up to the constant at most; there are 4 in Google's code
META_LIMIT = 1 << 30  # bytes; the training graph of BERT-Large has some 20 MB


def of_checkpoint(prefix: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """What the graph beside a checkpoint (PREFIX.meta) computes, and a note if it is damaged."""
    name = f"{prefix.name}.meta"
    if not files.exists(prefix.parent, name):
        return frozenset(), ()
    try:
        with files.open_file(prefix.parent, name) as file:
            return _of_meta(file), ()
    except (CheckpointError, OSError) as error:
        return frozenset(), (f"{name} is not read, so it does not tell which GELU it is: {error}",)


def _of_meta(file: BinaryIO) -> frozenset[str]:
    data = memoryview(file.read(META_LIMIT))
    graph = graphdef.single(data, (0, len(data)), {2}).get(2)
    if graph is None:
        raise CheckpointError("it is no graph of a checkpoint")
    return of_nodes(data, graphdef.nodes(data, graph.begin, graph.end), file)


def of_nodes(data: memoryview, nodes: dict[str, Node], file: BinaryIO) -> frozenset[str]:
    """The forms ("erf", "tanh") that these nodes of `file` compute; empty where there is none."""
    forms = set()
    constants: dict[str, bool] = {}  # is it the coefficient?
    for node in nodes.values():
        if node.op in ("Erf", "Erfc"):
            forms.add("erf")
        elif node.op == "Tanh" and "tanh" not in forms:
            before = _before(node, nodes)
            for other in before:
                if other.op == "Const" and other.name not in constants:
                    constants[other.name] = _is_coefficient(data, other, file)
            if any(constants.get(other.name) for other in before):
                forms.add("tanh")
    return frozenset(forms)


def _before(node: Node, nodes: dict[str, Node]) -> list[Node]:
    """The nodes that lead to this one in a few steps."""
    reached = {node.name: node}
    level = [node]
    for _ in range(STEPS):
        sources = {source for other in level for source in other.sources}
        level = [nodes[name] for name in sources if name in nodes and name not in reached]
        reached |= {other.name: other for other in level}
    return list(reached.values())


def _is_coefficient(data: memoryview, node: Node, file: BinaryIO) -> bool:
    attributes = graphdef.attributes(data, node)
    dtype = graphdef.dtype_of(data, attributes.get("dtype"))
    if dtype not in graphdef.FLOATS or "value" not in attributes:
        return False
    stored = graphdef.stored(data, attributes["value"], dtype)
    if stored.shape:
        return False
    return abs(float(graphdef.read(file, stored)) / COEFFICIENT - 1) < CLOSE
