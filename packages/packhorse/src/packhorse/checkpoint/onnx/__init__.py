"""Read the weights of an ONNX model's main graph, without the onnx package.

The file is a protobuf message that is walked field by field (`wire`), never parsed whole: only
nodes and the locations of tensors (`data`) become objects, and graphs inside nodes are not read.
`graph` derives the weights' names and orientation; each is then read into memory of its own.

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
from packhorse.checkpoint.onnx.data import (
    PAGE,
    FieldsByNumber,
    MessageFile,
    TensorLoader,
    read_stored,
)
from packhorse.checkpoint.onnx.graph import OnnxGraph, OnnxNode, StoredTensor, Weight
from packhorse.errors import CheckpointError
from packhorse.wire import BYTES, FIXED32, VARINT, Field

TENSOR_LIMIT = 10_000  # BERT-Large has 400
NODE_LIMIT = 50_000  # BERT-Large has some 3,000
PERM_LIMIT = 64  # numbers in a list attribute
# Bytes of tensors that are copied because they have several names (norms, biases). Beyond it they
# share memory, so that a file cannot multiply its size by naming a tensor often.
COPY_LIMIT = 16 << 20

# The fields of each message that are read, and their wire types.
MODEL = {7: BYTES}  # graph
GRAPH = {1: BYTES, 5: BYTES, 15: BYTES}  # node, initializer, sparse_initializer
NODE = {
    1: BYTES,  # input
    2: BYTES,  # output
    3: BYTES,  # name
    4: BYTES,  # op_type
    5: BYTES,  # attribute
    7: BYTES,  # domain
    9: BYTES,  # metadata_props
}
ATTRIBUTE = {  # name, f, i, s, t, ints
    1: BYTES,
    2: FIXED32,
    3: VARINT,
    4: BYTES,
    5: BYTES,
    8: None,
}
FLOAT = 2
INTEGER = 3
TEXT = 4
TENSOR = 5
INTEGERS = 8
ATTRIBUTES = {  # of each operation, those that are read, and the field of their value
    "Cast": {"to": INTEGER},
    "Constant": {"value": TENSOR},
    "DequantizeLinear": {"axis": INTEGER, "block_size": INTEGER},
    "FusedGemm": {"alpha": FLOAT, "beta": FLOAT, "transA": INTEGER, "transB": INTEGER},
    "FusedMatMul": {
        "alpha": FLOAT,
        "transA": INTEGER,
        "transB": INTEGER,
        "transBatchA": INTEGER,
        "transBatchB": INTEGER,
    },
    "Gather": {"axis": INTEGER},
    "Gelu": {"approximate": TEXT},
    "Gemm": {"alpha": FLOAT, "beta": FLOAT, "transA": INTEGER, "transB": INTEGER},
    "MatMulNBits": {"K": INTEGER, "N": INTEGER, "bits": INTEGER, "block_size": INTEGER},
    "Transpose": {"perm": INTEGERS},
}
NAME_SCOPES = "pkg.torch.onnx.name_scopes"


def sniff(path: Path) -> bool:
    """Does a file begin like a ModelProto: with its ir_version, and with a graph in field 7?"""
    if not path.is_file():
        return False
    numbers: list[int] = []
    try:
        with files.open_file(path.parent, path.name) as file:
            head = file.read(PAGE)
        for field in wire.fields(head, 0, 1 << 62):
            numbers.append(field.number)
            if field.number == 7:
                return field.kind == BYTES and numbers[0] == 1
    except (CheckpointError, IndexError, OSError):
        pass  # another reader, or the caller, reports what is wrong with it
    return False


def read(path: Path) -> Contents:
    """The weights of a model under the names of their modules, in torch's orientation."""
    with ExitStack() as stack:
        try:
            data = MessageFile(stack.enter_context(files.open_file(path.parent, path.name)))
            recovered = onnx_graph.recover(read_graph(data))
            loader = TensorLoader(data, path.parent, stack)
            tensors = _load(recovered.weights, loader)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    paths = (path, *(path.parent / name for name in loader.external))
    return Contents(
        "onnx",
        path.parent,
        paths,
        tensors,
        notes=recovered.notes,
        gelu=recovered.gelu,
        graph=path,
        max_positions=recovered.max_positions,
    )


def _load(weights: Mapping[str, Weight], loader: TensorLoader) -> dict[str, Tensor]:
    """Read every tensor once; one with several names is copied, or shared if it is large."""
    needed = [
        part for weight in weights.values() for part in (weight.stored, weight.scale, weight.zero)
    ]
    loader.check(dict.fromkeys(part for part in needed if part))
    tensors: dict[str, Tensor] = {}
    evaluated: dict[StoredTensor, tuple[Weight, Tensor]] = {}
    room = COPY_LIMIT
    for name, weight in weights.items():
        if weight.stored not in evaluated:
            tensor = _evaluate(weight, loader)
            evaluated[weight.stored] = (weight, tensor)
        else:
            first, tensor = evaluated[weight.stored]
            if _dequantization(first) != _dequantization(weight):
                raise CheckpointError(f"{weight.stored.name!r} is dequantized in two ways")
            if tensor.nbytes <= room and not weight.part:
                room -= tensor.nbytes
                tensor = tensor.clone()
        tensor = tensor[0] if weight.is_row else tensor
        tensor = tensor.t() if weight.transposed else tensor
        tensors[name] = _third(tensor, weight) if weight.part else tensor
    return tensors


def _dequantization(weight: Weight) -> tuple[Any, ...]:
    return weight.scale, weight.zero, weight.axis, weight.block, weight.bits


def _third(tensor: Tensor, weight: Weight) -> Tensor:
    if not tensor.ndim or len(tensor) % 3:
        raise CheckpointError(
            f"{weight.stored.name!r} has {len(tensor) if tensor.ndim else 0} columns, which are no "
            f"queries, keys and values of one size"
        )
    return tensor.chunk(3)[weight.part - 1]


def _evaluate(weight: Weight, loader: TensorLoader) -> Tensor:
    """The stored tensor, dequantized if it has a scale."""
    tensor = loader.read(weight.stored)
    if weight.scale is None:
        return tensor
    scale = loader.read(weight.scale)
    zero = loader.read(weight.zero) if weight.zero else None
    try:
        if weight.bits:
            return dequantize_packed(tensor, scale, zero, weight.axis, weight.block, weight.bits)
        return dequantize(tensor, scale, zero, weight.axis, weight.block)
    except CheckpointError as error:
        raise CheckpointError(f"{weight.stored.name!r}: {error}") from error


def dequantize(
    quantized: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int = 0
) -> Tensor:
    """(quantized − zero) × scale in float32, as in ONNX's DequantizeLinear.

    Scale and zero point are single numbers, vary along `axis`, with each `block` of numbers along
    it, or have as many axes as the tensor.
    """
    if quantized.is_floating_point() or not scale.is_floating_point():
        raise CheckpointError(f"{quantized.dtype} with a scale of {scale.dtype} is not read")
    if block and quantized.ndim:
        scale = _spread(scale, quantized.shape, axis, block)
        zero = None if zero is None else _spread(zero, quantized.shape, axis, block)
    scale = _broadcastable(scale, quantized.shape, axis)
    centered = quantized.to(torch.int32)
    if zero is not None:
        centered.sub_(_broadcastable(zero.to(torch.int32), quantized.shape, axis))
    return centered.to(torch.float32).mul_(scale.float())


def dequantize_packed(
    packed: Tensor, scale: Tensor, zero: Tensor | None, columns: int, block: int, bits: int
) -> Tensor:
    """The weight [out, in] of ONNX Runtime's MatMulNBits, in float32.

    packed: [out, blocks, bytes]; the lowest bits of a byte come first. Zero points are packed in
    the same way by rows, or floats; without them a number is as far from the middle as it is.
    """
    rows, blocks, _ = packed.shape
    if scale.numel() != rows * blocks or not scale.is_floating_point():
        raise CheckpointError(f"{scale.numel()} scales for {rows * blocks} blocks")
    middle = float(1 << (bits - 1))
    if zero is None:
        zeros = torch.full((rows, blocks, 1), middle)
    elif zero.is_floating_point():
        if zero.numel() != rows * blocks:
            raise CheckpointError(f"{zero.numel()} zero points for {rows * blocks} blocks")
        zeros = zero.float().reshape(rows, blocks, 1)
    else:
        width = -(-blocks * bits // 8)
        if zero.dtype != torch.uint8 or zero.numel() != rows * width:
            raise CheckpointError(f"{zero.numel()} bytes of zero points for {rows} rows")
        zeros = _numbers(zero.reshape(rows, width), bits)[:, :blocks].reshape(rows, blocks, 1)
    values = _numbers(packed, bits).float().sub_(zeros)
    values.mul_(scale.float().reshape(rows, blocks, 1))
    return values.reshape(rows, blocks * block)[:, :columns].contiguous()


def _numbers(packed: Tensor, bits: int) -> Tensor:
    """Numbers of some bits in bytes, unpacked along the last axis."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    numbers = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)


def _spread(factor: Tensor, shape: torch.Size, axis: int, block: int) -> Tensor:
    """Scales or zero points of blocks, repeated for each number of a block."""
    axis = axis % len(shape)
    blocks = [-(-size // block) if i == axis else size for i, size in enumerate(shape)]
    if list(factor.shape) != blocks:
        raise CheckpointError(
            f"a scale or zero point of shape {list(factor.shape)} for blocks of {block} along axis "
            f"{axis} of {list(shape)}"
        )
    block = min(block, shape[axis])  # a larger one would be allocated
    return factor.repeat_interleave(block, axis).narrow(axis, 0, shape[axis])


def _broadcastable(factor: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """A scale or zero point in a shape that broadcasts against a tensor of this shape."""
    if factor.numel() == 1:
        return factor.reshape([1 for _ in shape])
    if factor.ndim == 1 and 0 <= axis < len(shape) and len(factor) == shape[axis]:
        return factor.reshape([-1 if number == axis else 1 for number in range(len(shape))])
    sizes = zip(factor.shape, shape, strict=False)
    if factor.ndim != len(shape) or any(size not in (1, whole) for size, whole in sizes):
        raise CheckpointError(
            f"a scale or zero point of shape {list(factor.shape)} does not fit {list(shape)}"
        )
    return factor


def read_graph(data: MessageFile) -> OnnxGraph:
    """The nodes of the main graph, and the locations of its tensors."""
    graph = data.single(data.fields(MODEL), 7)
    if graph is None:
        raise CheckpointError("there is no graph: the file is truncated, or no ONNX model")
    fields = data.fields(GRAPH, graph.begin, graph.end)
    if 15 in fields:
        raise CheckpointError(f"byte {fields[15][0].begin}: sparse tensors are not read")
    for number, limit, items in ((1, NODE_LIMIT, "nodes"), (5, TENSOR_LIMIT, "tensors")):
        if len(fields.get(number, [])) > limit:
            raise CheckpointError(f"byte {graph.begin}: more than {limit} {items}")
    tensors = [read_stored(data, field) for field in fields.get(5, [])]
    nodes = tuple(_read_node(data, field) for field in fields.get(1, []))
    values = [tensor.name for tensor in tensors]
    values += [value for node in nodes for value in node.outputs if value]
    if len(set(values)) < len(values):
        seen: set[str] = set()
        name = next(name for name in values if name in seen or seen.add(name))
        raise CheckpointError(f"byte {graph.begin}: {name!r} is there twice")
    return OnnxGraph(nodes, {tensor.name: tensor for tensor in tensors})


def _read_node(data: MessageFile, message: Field) -> OnnxNode:
    """A NodeProto, with those of its attributes that are in ATTRIBUTES."""
    fields = data.fields(NODE, message.begin, message.end)
    inputs = tuple(map(data.text, fields.get(1, [])))
    outputs = tuple(map(data.text, fields.get(2, [])))
    name = data.text(data.single(fields, 3))
    op = data.text(data.single(fields, 4))
    domain = data.text(data.single(fields, 7))
    attributes: dict[str, Any] = {}
    for attribute in fields.get(5, []) if op in ATTRIBUTES else ():
        values = data.fields(ATTRIBUTE, attribute.begin, attribute.end)
        key = data.text(data.single(values, 1))
        if key in ATTRIBUTES[op]:
            number = ATTRIBUTES[op][key]
            if key in attributes or values.keys() != {1, number}:
                raise CheckpointError(
                    f"byte {attribute.begin}: {key!r} of {name!r} does not have exactly one value"
                )
            attributes[key] = _value(data, values, number, outputs[0] if outputs else "")
    module = _module(name, op, _scopes(data, fields.get(9, [])))
    if not module and outputs and op in onnx_graph.NAMED_BY_OUTPUT:
        module = _module(outputs[0], op, "")
    return OnnxNode(op, domain, name, inputs, outputs, attributes, module)


def _scopes(data: MessageFile, properties: Iterable[Field]) -> str:
    """The name scopes that torch's newer exporter writes into a node's metadata; "" if none."""
    for key, value in map(data.pair, properties):
        if key == NAME_SCOPES:
            return data.text(value)
    return ""


def _module(name: str, op: str, scopes: str) -> str:
    """A node's module: from scopes as `['', 'a', 'a.b', 'linear']`, or `/a/b.0/c/MatMul_1`."""
    if scopes:
        modules = re.findall(r"'([^']*)'", scopes)
        return modules[-2] if len(modules) > 1 else ""
    path = name.split("/")[1:-1] if name.startswith("/") else []
    # Optimizers name a node after the one it replaces: /a/b/MatMul/MatMul_quant.
    while path and path[-1].startswith(op):
        path.pop()
    # torch repeats the name of a container: /net/net.0/
    pairs = pairwise([*path, ""])
    return ".".join(part for part, inner in pairs if not inner.startswith(f"{part}."))


def _value(data: MessageFile, fields: FieldsByNumber, number: int, name: str) -> Any:
    """The value of an attribute, in field `number`; a tensor gets this name."""
    if number == INTEGERS:
        return data.numbers(fields[number], PERM_LIMIT)
    field = data.single(fields, number) or fields[number][0]
    if number == TENSOR:
        return read_stored(data, field, name)
    if number == TEXT:
        return data.text(field)
    if number == FLOAT:
        return float(np.uint32(field.value).view(np.float32))
    return wire.signed(field.value)
