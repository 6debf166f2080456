"""A graph that can be edited, with an index: which node computes a value, which nodes read it.

Values are names, as in ONNX. The methods that change the graph keep the index up to date; `finish`
drops nodes that no output needs and sorts the others. New operations are limited to those whose
meaning is the same from opset 11 on, so that old exports need no conversion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    helper,
    numpy_helper,
)

from packhorse.errors import CheckpointError

OLDEST_OPSET = 11
SHAPE_OPS = ("Shape", "Size")  # read a value's shape, not its numbers


class EditableGraph:
    """The main graph of a model; `folder` has its external data."""

    def __init__(self, model: ModelProto, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.nodes: list[NodeProto] = list(model.graph.node)
        self.stored = {tensor.name: tensor for tensor in model.graph.initializer}  # constants
        self.inputs = [value.name for value in model.graph.input if value.name not in self.stored]
        self.outputs = [value.name for value in model.graph.output]
        self.added = 0  # operations, for their names
        self.producer: dict[str, NodeProto] = {}
        self.readers: defaultdict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            self._index(node)
        self.variable = self.follow(self.inputs, shapes=True)  # what depends on the inputs
        self.opset = _opset(model)

    def _index(self, node: NodeProto) -> None:
        for name in filter(None, node.output):
            self.producer[name] = node
        for name in _reads(node):
            self.readers[name].append(node)

    def is_constant(self, value: str) -> bool:
        """Is it independent of the inputs, and of their shapes?"""
        return value not in self.variable

    def follow(
        self, values: Iterable[str], *, shapes: bool = False, until: Collection[str] = ()
    ) -> set[str]:
        """The values and all that is computed from them.

        shapes: also what is computed from their shapes or ranges only. until: values after which
        to stop.
        """
        reached = set(values)
        pending = list(reached)
        while pending:
            for node in self.readers[pending.pop()]:
                if node.op_type in SHAPE_OPS and not shapes:
                    continue
                # The second and third output are scale and zero point, which depend on the range.
                quantizes = node.op_type == "DynamicQuantizeLinear" and not shapes
                outputs = node.output[:1] if quantizes else node.output
                new = [name for name in outputs if name and name not in reached]
                reached.update(new)
                pending += [name for name in new if name not in until]
        return reached

    def op(self, kind: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """Add an operation and return the name of its result, which is `result` if given."""
        self.added += 1
        name = f"packhorse/{kind}_{self.added}"
        node = helper.make_node(kind, inputs, [result or name], name=name, **attributes)
        self.nodes.append(node)
        self._index(node)
        if any(name in self.variable for name in inputs):
            self.variable.add(result or name)
        return result or name

    def reduce(self, kind: str, value: str, axes: list[int], *, keep: bool = False) -> str:
        """Add ReduceMin or ReduceMax over axes, which became an input in opset 18."""
        if self.opset >= 18:
            return self.op(kind, value, self.constant(axes), keepdims=int(keep))
        return self.op(kind, value, axes=axes, keepdims=int(keep))

    def constant(self, value: Any, dtype: Any = np.int64, label: str = "") -> str:
        """Add a constant, named after its numbers or, if they are many, after a `label`."""
        array = np.array(value, dtype)
        name = f"packhorse/{array.dtype}{label or array.tolist()}".replace(" ", "")
        self.stored.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def add_input(self, name: str) -> str:
        """Add an input of integers to the graph; `rewrite` declares its shape."""
        if name in self.variable or name in self.stored:
            raise CheckpointError(f"the model uses the name {name!r} for something else")
        self.inputs.append(name)
        self.variable.add(name)
        return name

    def set_input(self, node: NodeProto, index: int, value: str) -> None:
        """Let a node read another value at this input."""
        old = node.input[index]
        node.input[index] = value
        self.readers[value].append(node)
        if old not in _reads(node):
            self.readers[old] = [reader for reader in self.readers[old] if reader is not node]

    def replace(self, old: str, new: str, *, among: Iterable[NodeProto] | None = None) -> None:
        """Let the readers of `old`, or those `among` them, read `new`."""
        for node in list(self.readers[old] if among is None else among):
            for index, name in enumerate(node.input):
                if name == old:
                    self.set_input(node, index, new)

    def remove(self, node: NodeProto) -> None:
        """Remove a node, whose results another node has to compute."""
        self.nodes = [present for present in self.nodes if present is not node]
        for name in _reads(node):
            self.readers[name] = [reader for reader in self.readers[name] if reader is not node]

    def live(self) -> list[NodeProto]:
        """The nodes that the outputs need, in topological order, without recursion."""
        order: list[NodeProto] = []
        visited: set[int] = set()
        # A node is pushed again with True, below its producers, to be appended after them.
        stack = [(self.producer[name], False) for name in self.outputs if name in self.producer]
        while stack:
            node, producers_done = stack.pop()
            if producers_done:
                order.append(node)
            elif id(node) not in visited:
                visited.add(id(node))
                stack.append((node, True))
                producers = (self.producer.get(name) for name in _reads(node))
                stack += [(producer, False) for producer in producers if producer is not None]
        return order

    def used(self) -> set[str]:
        """The values that the outputs need."""
        return {name for node in self.live() for name in _reads(node)} | set(self.outputs)

    def finish(self) -> None:
        """Write the graph back into the model."""
        graph = self.model.graph
        nodes = self.live()
        used = self.used()
        tensors = [tensor for name, tensor in self.stored.items() if name in used]
        del graph.node[:]
        del graph.initializer[:]
        del graph.value_info[:]  # shapes of the old graph
        graph.node.extend(nodes)
        graph.initializer.extend(tensors)


def node_error(node: NodeProto, problem: str) -> CheckpointError:
    """The error for a node that cannot be packed."""
    return CheckpointError(f"node {node.name or node.output[0]!r} ({node.op_type}) {problem}")


def _reads(node: NodeProto) -> list[str]:
    """A node's inputs, and the values that graphs inside it (branches, loops) capture."""
    names = list(dict.fromkeys(filter(None, node.input)))
    for attribute in node.attribute:
        if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            for inner in (attribute.g, *attribute.graphs):
                names += _captured(inner)
    return names


def _captured(graph: GraphProto) -> list[str]:
    inner = {name for node in graph.node for name in node.output}
    inner |= {value.name for value in [*graph.input, *graph.initializer]}
    read = [name for node in graph.node for name in _reads(node)]
    return [name for name in dict.fromkeys(read) if name not in inner]


def _opset(model: ModelProto) -> int:
    opset = max((i.version for i in model.opset_import if i.domain in ("", "ai.onnx")), default=0)
    if opset < OLDEST_OPSET:
        raise CheckpointError(
            f"the model is of opset {opset}; packing needs {OLDEST_OPSET} or newer: export it "
            f"again, or use onnx.version_converter"
        )
    return opset
