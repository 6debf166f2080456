"""A model's graph with an index over it: who makes a value, who reads it, what follows from what.

Values are names, as in ONNX. The index is kept up to date by the few ways to change the graph that
are here; `finish` drops what nothing needs any more and puts the rest in order. New operations are
limited to those whose meaning is the same from opset 11 on, so that old exports stay as they are.
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

OLDEST = 11  # opset
ASK_SHAPE = ("Shape", "Size")


class Graph:
    """The main graph of a model; `folder` is where its external data lies."""

    def __init__(self, model: ModelProto, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.nodes: list[NodeProto] = list(model.graph.node)
        self.stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self.inputs = [value.name for value in model.graph.input if value.name not in self.stored]
        self.outputs = [value.name for value in model.graph.output]
        self.added = 0
        self.maker: dict[str, NodeProto] = {}
        self.readers: defaultdict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            self._index(node)
        self.variable = self.follow(self.inputs, shapes=True)
        self.opset = _opset(model)

    def _index(self, node: NodeProto) -> None:
        for name in filter(None, node.output):
            self.maker[name] = node
        for name in _reads(node):
            self.readers[name].append(node)

    def is_constant(self, value: str) -> bool:
        """Is it the same whatever goes in, and of whatever shape?"""
        return value not in self.variable

    def follow(
        self, values: Iterable[str], *, shapes: bool = False, until: Collection[str] = ()
    ) -> set[str]:
        """All that is computed from `values`; with `shapes` also from shapes or ranges alone."""
        found = set(values)
        open_ends = list(found)
        while open_ends:
            for node in self.readers[open_ends.pop()]:
                if node.op_type in ASK_SHAPE and not shapes:
                    continue
                ranges = node.op_type == "DynamicQuantizeLinear" and not shapes
                outputs = node.output[:1] if ranges else node.output  # the others: its scale
                new = [name for name in outputs if name and name not in found]
                found.update(new)
                open_ends += [name for name in new if name not in until]
        return found

    def op(self, kind: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """Add an operation; its result, called as asked."""
        self.added += 1
        name = f"packhorse/{kind}_{self.added}"
        node = helper.make_node(kind, inputs, [result or name], name=name, **attributes)
        self.nodes.append(node)
        self._index(node)
        if any(name in self.variable for name in inputs):
            self.variable.add(result or name)
        return result or name

    def reduce(self, kind: str, value: str, axes: list[int], *, keep: bool = False) -> str:
        """ReduceMin or ReduceMax over some axes, which became an input in opset 18."""
        if self.opset >= 18:
            return self.op(kind, value, self.constant(axes), keepdims=int(keep))
        return self.op(kind, value, axes=axes, keepdims=int(keep))

    def constant(self, value: Any, dtype: Any = np.int64, called: str = "") -> str:
        """A number or a few; more than a few need a name."""
        array = np.array(value, dtype)
        name = f"packhorse/{array.dtype}{called or array.tolist()}".replace(" ", "")
        self.stored.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def add_input(self, name: str) -> str:
        """A new input of the graph, of integers; `finish` is told its shape."""
        if name in self.variable or name in self.stored:
            raise CheckpointError(f"the model uses the name {name!r} for something else")
        self.inputs.append(name)
        self.variable.add(name)
        return name

    def set_input(self, node: NodeProto, index: int, value: str) -> None:
        """Let one node read another value."""
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
        """Take a node out; something else is to make its results."""
        self.nodes = [other for other in self.nodes if other is not node]
        for name in _reads(node):
            self.readers[name] = [other for other in self.readers[name] if other is not node]

    def live(self) -> list[NodeProto]:
        """What the outputs need, in an order in which it can be computed."""
        order: list[NodeProto] = []
        done: set[int] = set()
        stack = [(self.maker[name], False) for name in self.outputs if name in self.maker]
        while stack:
            node, ready = stack.pop()
            if ready:
                order.append(node)
            elif id(node) not in done:
                done.add(id(node))
                stack.append((node, True))
                makers = (self.maker.get(name) for name in _reads(node))
                stack += [(maker, False) for maker in makers if maker is not None]
        return order

    def used(self) -> set[str]:
        """The values that the outputs need."""
        return {name for node in self.live() for name in _reads(node)} | set(self.outputs)

    def finish(self) -> None:
        """Write the graph back into the model."""
        graph, nodes, used = self.model.graph, self.live(), self.used()
        tensors = [tensor for name, tensor in self.stored.items() if name in used]
        del graph.node[:], graph.initializer[:], graph.value_info[:]  # the last: old shapes
        graph.node.extend(nodes)
        graph.initializer.extend(tensors)


def refuse(node: NodeProto, why: str) -> CheckpointError:
    """The error for a node that stands in the way."""
    return CheckpointError(f"node {node.name or node.output[0]!r} ({node.op_type}) {why}")


def _reads(node: NodeProto) -> list[str]:
    """Its inputs, and what graphs inside it (branches, loops) take from outside."""
    names = list(dict.fromkeys(filter(None, node.input)))
    for attribute in node.attribute:
        if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            for inner in (attribute.g, *attribute.graphs):
                names += _captured(inner)
    return names


def _captured(graph: GraphProto) -> list[str]:
    own = {name for node in graph.node for name in node.output}
    own |= {value.name for value in (*graph.input, *graph.initializer)}
    read = [name for node in graph.node for name in _reads(node)]
    return [name for name in dict.fromkeys(read) if name not in own]


def _opset(model: ModelProto) -> int:
    opset = max((i.version for i in model.opset_import if i.domain in ("", "ai.onnx")), default=0)
    if opset < OLDEST:
        raise CheckpointError(
            f"the model is of opset {opset}; packing needs {OLDEST} or newer: export it again, or "
            f"use onnx.version_converter"
        )
    return opset
