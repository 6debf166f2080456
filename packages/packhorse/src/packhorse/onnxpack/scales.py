"""Compute int8 scales per sequence, where a graph computes them over the whole batch.

Dynamic quantization (ONNX's DynamicQuantizeLinear, before MatMulInteger) uses one scale and one
zero point for a whole tensor. In a batch, a neighbor with a larger number would thus round every
text more coarsely. Here range, scale and zero point are computed per sequence, by the formulas of
the operator, so that a text is rounded exactly as when the original model runs it alone.

ONNX Runtime's MatMulInteger takes only one zero point for its left side. With zero points z_i per
row the product is split, exactly, in int32:

    sum_k (a_ik - z_i) (b_kj - y_j) = sum_k a_ik (b_kj - y_j) - z_i sum_k (b_kj - y_j)

The last sum is a constant of the weights. Products of two activations (in attention, if a quantizer
included it) are computed in fp32 from the same rounded numbers.

Shapes: R rows, C tokens per row, S sequences, L tokens of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from packhorse.errors import CheckpointError
from packhorse.onnxpack.graph import EditableGraph, node_error
from packhorse.onnxpack.layout import PackedLayout
from packhorse.onnxpack.probe import BATCH, TOKEN, Axes, Axis, Observation

DYNAMIC = "DynamicQuantizeLinear"
LEVELS = 255  # the largest uint8
FLAT = Axis(batch=True, token=True, size=1)  # rows and tokens as one axis
REMEDY = "pack the fp32 model, or one with static scales (onnxruntime.quantization.quantize_static)"


@dataclass(frozen=True)
class Quantized:
    """The three results of DynamicQuantizeLinear, with a scale and a zero point per sequence."""

    values: str  # uint8, shaped as the input
    scale: str  # float; scale and zero point broadcast against the values
    zero: str  # float that holds an integer


def dynamic_nodes(graph: EditableGraph) -> list[NodeProto]:
    """The nodes that compute a scale at run time."""
    return [node for node in graph.live() if node.op_type == DYNAMIC]


def quantize_per_sequence(
    graph: EditableGraph, observed: Observation, layout: PackedLayout, unpacked: Collection[str]
) -> list[str]:
    """Replace dynamic quantization by one per sequence; returns the names of its inputs.

    unpacked: values that hold a sequence per row ([S, L, ...]), inside attentions in repack mode.
    """
    quantized: dict[str, Quantized] = {}
    nodes = dynamic_nodes(graph)
    for node in nodes:
        # The results still have the names under which they were observed, the input may not.
        axes = observed.axes.get(node.output[0], ())
        one_per_row = node.output[0] in unpacked
        quantized[node.output[0]] = _quantize(graph, node, axes, layout, one_per_row)
    for node in nodes:
        values, scale, _ = node.output
        for reader in list(graph.readers[values]):
            _connect(graph, reader, quantized)
        graph.replace(scale, quantized[values].scale)
        graph.remove(node)
    return [node.input[0] for node in nodes]


def _quantize(
    graph: EditableGraph, node: NodeProto, axes: Axes, layout: PackedLayout, one_per_row: bool
) -> Quantized:
    source = node.input[0]
    token_axes, shape = _broadcast(node, axes)
    reduced = [number for number in range(len(axes)) if number not in token_axes]
    zero = graph.constant(0, np.float32)
    unit = graph.constant(1, np.float32)
    bounds = []
    for reduce, limit in (("ReduceMin", "Min"), ("ReduceMax", "Max")):
        bound = graph.reduce(reduce, source, reduced)
        # So far one bound per token, as [R, C] or flat, or already one per sequence, [S].
        if axes[0] == FLAT:
            bound = graph.op("Reshape", bound, graph.op("Shape", layout.input_names["ids"]))
        if axes[0] == FLAT or len(token_axes) == 2:
            reduce_tokens = layout.over_row if one_per_row else layout.over_sequence
            bound = reduce_tokens(reduce, bound)
        bound = graph.op(limit, bound, zero)  # the operator's range always includes zero
        bounds.append(graph.op("Reshape", bound, graph.constant(shape)))
    low, high = bounds
    span = graph.op("Sub", high, low)
    step = graph.op("Div", span, graph.constant(LEVELS, np.float32))
    scale = graph.op("Where", graph.op("Equal", span, zero), unit, step)
    zero_point = graph.op("Round", graph.op("Div", graph.op("Neg", low), scale))
    rounded = graph.op("Round", graph.op("Div", source, scale))
    # At scale 1 this only saturates to uint8, since the numbers are integers already.
    values = graph.op("QuantizeLinear", graph.op("Add", rounded, zero_point), unit, _zero(graph))
    return Quantized(values, scale, zero_point)


def _broadcast(node: NodeProto, axes: Axes) -> tuple[tuple[int, ...], list[int]]:
    """The axes of rows and tokens, and the shape in which their bounds broadcast.

    The shape is for ONNX's Reshape: 0 keeps the size of an axis, -1 takes what remains.
    """
    if axes[:1] == (FLAT,):
        return (0,), [-1, *(1 for _ in axes[1:])]
    if axes[:1] != (BATCH,):
        raise node_error(
            node, f"scales values that are not [rows, ...] over a whole batch; {REMEDY}"
        )
    if TOKEN not in axes:  # one per sequence, as the input of a pooler
        return (0,), [-1, *(1 for _ in axes[1:])]
    token = axes.index(TOKEN)  # of two, as in attention, the first is that of the queries
    return (0, token), [0, *(-1 if axis == token else 1 for axis in range(1, len(axes)))]


def _zero(graph: EditableGraph) -> str:
    return graph.constant(0, np.uint8)


def _connect(graph: EditableGraph, reader: NodeProto, quantized: dict[str, Quantized]) -> None:
    """Let a node that reads quantized values read those quantized per sequence."""
    if reader not in graph.nodes:
        return  # a product of two quantized values, replaced when the first was connected
    if reader.op_type == "MatMulInteger" and graph.is_constant(reader.input[1]):
        _multiply_weights(graph, reader, quantized[reader.input[0]])
    elif reader.op_type == "MatMulInteger" and set(reader.input[:2]) <= quantized.keys():
        sides = [_centered(graph, quantized[name]) for name in reader.input[:2]]
        graph.remove(reader)
        graph.op("MatMul", *sides, result=reader.output[0])
    elif reader.op_type == "DequantizeLinear":
        values = quantized[reader.input[0]]
        graph.remove(reader)
        graph.op("Mul", _centered(graph, values), values.scale, result=reader.output[0])
    else:
        raise node_error(
            reader,
            f"takes int8 values whose scale depends on the whole batch, so that a neighbor would "
            f"change a text's result; {REMEDY}",
        )


def _multiply_weights(graph: EditableGraph, reader: NodeProto, activations: Quantized) -> None:
    """The product with constant weights, in int32; see the module's formula."""
    weights = reader.input[1]
    offsets = [reader.input[3]] if len(reader.input) > 3 and reader.input[3] else []
    right = (weights, _zero(graph), *offsets)
    shape = _weights_shape(graph, weights)
    if len(shape) != 2:
        raise node_error(reader, f"multiplies by int8 weights that are no matrix; {REMEDY}")
    graph.remove(reader)
    product = graph.op("MatMulInteger", activations.values, *right)
    ones = graph.constant(np.ones((1, shape[0]), np.uint8), np.uint8, f"ones_{shape[0]}")
    sums = graph.op("MatMulInteger", ones, *right)  # [1, N]; ONNX Runtime folds it into a constant
    zero_point = graph.op("Cast", activations.zero, to=TensorProto.INT32)
    excess = graph.op("Mul", zero_point, sums)
    graph.op("Sub", product, excess, result=reader.output[0])


def _weights_shape(graph: EditableGraph, weights: str) -> tuple[int, ...]:
    if weights not in graph.stored:
        raise CheckpointError(f"the int8 weights {weights!r} are not stored in the graph; {REMEDY}")
    return tuple(graph.stored[weights].dims)


def _centered(graph: EditableGraph, quantized: Quantized) -> str:
    """Values minus zero point, as floats."""
    values = graph.op("Cast", quantized.values, to=TensorProto.FLOAT)
    return graph.op("Sub", values, quantized.zero)
