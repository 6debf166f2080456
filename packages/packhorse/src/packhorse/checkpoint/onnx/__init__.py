"""ONNX models: the weights of the main graph, without the onnx package.

The file is a protobuf message, walked field by field (`wire`) and never parsed whole; only nodes
and the places of tensors are noted (`data`), and graphs inside nodes are not entered. What the
graph says about the tensors is `graph`'s to know; each is then read into memory of its own.

Follows onnx.proto and https://onnx.ai/onnx/repo-docs/IR.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse import wire
from packhorse.checkpoint import files
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.onnx import graph as onnx_graph
from packhorse.checkpoint.onnx.data import PAGE, File, Loader, Parts, read_stored
from packhorse.checkpoint.onnx.graph import Graph, Node, Stored, Weight
from packhorse.errors import CheckpointError
from packhorse.wire import BYTES, FIXED32, VARINT, Field

TENSOR_LIMIT, NODE_LIMIT = 10_000, 50_000  # BERT-Large has 400, and some 3,000 nodes
COPY_LIMIT = 16 << 20  # bytes of tensors copied for having several names: norms, biases

# The fields of each message that are looked at, and their wire types.
MODEL = {7: BYTES}
GRAPH = {1: BYTES, 5: BYTES, 15: BYTES}
NODE = {1: BYTES, 2: BYTES, 3: BYTES, 4: BYTES, 5: BYTES, 9: BYTES}
ATTRIBUTE = {1: BYTES, 2: FIXED32, 3: VARINT, 5: BYTES, 8: None}
FLOAT, INTEGER, TENSOR, INTEGERS = 2, 3, 5, 8
ATTRIBUTES = {
    "Cast": {"to": INTEGER},
    "Constant": {"value": TENSOR},
    "DequantizeLinear": {"axis": INTEGER, "block_size": INTEGER},
    "Gather": {"axis": INTEGER},
    "Gemm": {"alpha": FLOAT, "beta": FLOAT, "transA": INTEGER, "transB": INTEGER},
    "Transpose": {"perm": INTEGERS},
}
SCOPES = "pkg.torch.onnx.name_scopes"


def sniff(path: Path) -> bool:
    """Does a file begin like an ONNX model: a message whose field 7 is its graph?"""
    if not path.is_file():
        return False
    numbers = []
    try:
        with files.open_file(path.parent, path.name) as file:
            head = file.read(PAGE)
        for field in wire.fields(head, 0, 1 << 62):
            numbers.append(field.number)
            if field.number == 7:
                return field.kind == BYTES and numbers[0] == 1
    except (CheckpointError, IndexError, OSError):
        pass  # not ours to report
    return False


def read(path: Path) -> Contents:
    """The weights of a model under the names of their modules, in torch's orientation."""
    with ExitStack() as stack:
        try:
            data = File(stack.enter_context(files.open_file(path.parent, path.name)))
            found = onnx_graph.recover(read_graph(data))
            loader = Loader(data, path.parent, stack)
            tensors = _load(found.weights, loader)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    used = (path, *(path.parent / name for name in loader.beside))
    return Contents("onnx", path.parent, used, tensors, notes=found.notes)


def _load(weights: Mapping[str, Weight], loader: Loader) -> dict[str, Tensor]:
    """Read every tensor once. One with several names is copied, or, if large, shared."""
    needed = [
        part for weight in weights.values() for part in (weight.stored, weight.scale, weight.zero)
    ]
    loader.check(dict.fromkeys(part for part in needed if part))
    tensors: dict[str, Tensor] = {}
    made: dict[Stored, tuple[Weight, Tensor]] = {}
    room = COPY_LIMIT
    for name, weight in weights.items():
        if weight.stored not in made:
            made[weight.stored] = (weight, _evaluate(weight, loader))
            tensor = made[weight.stored][1]
        else:
            first, tensor = made[weight.stored]
            if (first.scale, first.zero, first.axis) != (weight.scale, weight.zero, weight.axis):
                raise CheckpointError(f"{weight.stored.name!r} is dequantised in two ways")
            if tensor.nbytes <= room:
                room -= tensor.nbytes
                tensor = tensor.clone()
        tensors[name] = tensor.t() if weight.transposed else tensor
    return tensors


def _evaluate(weight: Weight, loader: Loader) -> Tensor:
    """The stored tensor, dequantised where it has a scale."""
    tensor = loader.read(weight.stored)
    if weight.scale is None:
        return tensor
    scale = loader.read(weight.scale)
    zero = loader.read(weight.zero) if weight.zero else None
    try:
        return dequantise(tensor, scale, zero, weight.axis)
    except CheckpointError as error:
        raise CheckpointError(f"{weight.stored.name!r}: {error}") from error


def dequantise(quantised: Tensor, scale: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """(quantised − zero) × scale in float32, as ONNX's DequantizeLinear has it.

    Scale and zero point are single numbers, run along `axis`, or have as many axes as the tensor.
    """
    if quantised.is_floating_point() or not scale.is_floating_point():
        raise CheckpointError(f"{quantised.dtype} with a scale of {scale.dtype} is not read")
    scale = _along(scale, quantised.shape, axis)
    centred = quantised.to(torch.int32)
    if zero is not None:
        centred.sub_(_along(zero.to(torch.int32), quantised.shape, axis))
    return centred.to(torch.float32).mul_(scale.float())


def _along(factor: Tensor, shape: torch.Size, axis: int) -> Tensor:
    if factor.numel() == 1:
        return factor.reshape([1] * len(shape))
    if factor.ndim == 1 and 0 <= axis < len(shape) and len(factor) == shape[axis]:
        return factor.reshape([-1 if number == axis else 1 for number in range(len(shape))])
    fits = zip(factor.shape, shape, strict=False)
    if factor.ndim != len(shape) or any(mine not in (1, whole) for mine, whole in fits):
        raise CheckpointError(
            f"a scale or zero point of the shape {list(factor.shape)} does not fit {list(shape)}"
        )
    return factor


def read_graph(data: File) -> Graph:
    """The nodes and the places of the tensors."""
    graph = data.one(data.parts(MODEL), 7)
    if graph is None:
        raise CheckpointError("there is no graph: the file is truncated, or no ONNX model")
    parts = data.parts(GRAPH, graph.begin, graph.end)
    if 15 in parts:
        raise CheckpointError(f"byte {parts[15][0].begin}: sparse tensors are not read")
    for number, limit, what in ((1, NODE_LIMIT, "nodes"), (5, TENSOR_LIMIT, "tensors")):
        if len(parts.get(number, [])) > limit:
            raise CheckpointError(f"byte {graph.begin}: more than {limit} {what}")
    tensors = [read_stored(data, field) for field in parts.get(5, [])]
    nodes = tuple(_read_node(data, field) for field in parts.get(1, []))
    values = [tensor.name for tensor in tensors]
    values += [value for node in nodes for value in node.outputs if value]
    if len(set(values)) < len(values):
        seen: set[str] = set()
        name = next(name for name in values if name in seen or seen.add(name))
        raise CheckpointError(f"byte {graph.begin}: {name!r} is there twice")
    return Graph(nodes, {tensor.name: tensor for tensor in tensors})


def _read_node(data: File, field: Field) -> Node:
    parts = data.parts(NODE, field.begin, field.end)
    inputs, outputs = (tuple(map(data.text, parts.get(number, []))) for number in (1, 2))
    name, op = data.text(data.one(parts, 3)), data.text(data.one(parts, 4))
    attributes: dict[str, Any] = {}
    for place in parts.get(5, []) if op in ATTRIBUTES else ():
        said = data.parts(ATTRIBUTE, place.begin, place.end)
        key = data.text(data.one(said, 1))
        if key in ATTRIBUTES[op]:
            kind = ATTRIBUTES[op][key]
            if key in attributes or said.keys() != {1, kind}:
                raise CheckpointError(f"byte {place.begin}: {key!r} of {name!r} has no one value")
            attributes[key] = _value(data, said, kind, outputs[0] if outputs else "")
    module = _module(name, op, _scopes(data, parts.get(9, [])))
    return Node(op, name, inputs, outputs, attributes, module)


def _scopes(data: File, properties: Iterable[Field]) -> str:
    for key, value in map(data.pair, properties):
        if key == SCOPES:
            return data.text(value)
    return ""


def _module(name: str, op: str, scopes: str) -> str:
    """The module a node stands in: by `['', 'a', 'a.b', 'linear']`, or by `/a/b.0/c/MatMul_1`."""
    if scopes:
        modules = re.findall(r"'([^']*)'", scopes)
        return modules[-2] if len(modules) > 1 else ""
    path = name.split("/")[1:-1] if name.startswith("/") else []
    while path and path[-1].startswith(op):  # an optimizer puts its nodes below those they replace
        path.pop()
    # A container that is called itself is there twice: /net/net.0/
    pairs = pairwise([*path, ""])
    return ".".join(part for part, inner in pairs if not inner.startswith(f"{part}."))


def _value(data: File, parts: Parts, kind: int, name: str) -> Any:
    """The value of an attribute; a tensor gets this name."""
    if kind == INTEGERS:
        return data.numbers(parts[kind], 64)
    field = data.one(parts, kind) or parts[kind][0]
    if kind == TENSOR:
        return read_stored(data, field, name)
    if kind == FLOAT:
        return float(np.uint32(field.value).view(np.float32))
    return wire.signed(field.value)
