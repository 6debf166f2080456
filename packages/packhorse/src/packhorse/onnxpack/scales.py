"""Give every sequence int8 scales of its own, where a graph takes them from the whole batch.

Dynamic quantization (ONNX's DynamicQuantizeLinear, before MatMulInteger) takes one scale and one
zero point of a whole tensor. In a batch a neighbor with a larger number would thus round every
text more coarsely. Here range, scale and zero point are computed per sequence, by the formulas of
the operator, so that a text is rounded exactly as it is when the original model runs it alone.

ONNX Runtime's MatMulInteger takes only one zero point for its left side. With zero points z_i per
row the product is split, exactly, in int32:

    sum_k (a_ik - z_i) (b_kj - y_j) = sum_k a_ik (b_kj - y_j) - z_i sum_k (b_kj - y_j)

The last sum is a constant of the weights. Products of two activations (attention, where a quantizer
was told to quantize it) are computed in fp32 from the same rounded numbers.

Shapes: R rows, C tokens a row, S sequences, L tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from packhorse.errors import CheckpointError
from packhorse.onnxpack.graph import Graph, refuse
from packhorse.onnxpack.layout import Layout
from packhorse.onnxpack.probe import BATCH, TOKEN, Axes, Axis, Observed

DYNAMIC = "DynamicQuantizeLinear"
LEVELS = 255  # of uint8, from 0
FLAT = Axis(batch=True, token=True, size=1)  # rows and tokens as one axis
REMEDY = "pack the fp32 model, or one with static scales (onnxruntime.quantization.quantize_static)"


@dataclass(frozen=True)
class Quantized:
    """The three results of the operator, per sequence."""

    values: str  # uint8, shaped as the input
    scale: str  # float; this and the zero point broadcast against the values
    zero: str  # float, a whole number


def dynamic_nodes(graph: Graph) -> list[NodeProto]:
    """The nodes that choose a scale while the model runs."""
    return [node for node in graph.live() if node.op_type == DYNAMIC]


def isolate(graph: Graph, seen: Observed, layout: Layout, unpacked: Collection[str]) -> list[str]:
    """Replace every dynamic quantization by one per sequence; the names of their inputs.

    unpacked: values that hold a sequence per row ([S, L, ...]), inside attentions in repack mode.
    """
    quantized: dict[str, Quantized] = {}
    nodes = dynamic_nodes(graph)
    for node in nodes:
        # The results still have the names under which they were observed, the input may not.
        axes = seen.axes.get(node.output[0], ())
        own_rows = node.output[0] in unpacked
        quantized[node.output[0]] = _quantize(graph, node, axes, layout, own_rows)
    for node in nodes:
        values, scale, _ = node.output
        for reader in list(graph.readers[values]):
            _connect(graph, reader, quantized)
        graph.replace(scale, quantized[values].scale)
        graph.remove(node)
    return [node.input[0] for node in nodes]


def _quantize(
    graph: Graph, node: NodeProto, axes: Axes, layout: Layout, own_rows: bool
) -> Quantized:
    source = node.input[0]
    kept, shape = _broadcast(node, axes)
    others = [number for number in range(len(axes)) if number not in kept]
    zero, one = graph.constant(0, np.float32), graph.constant(1, np.float32)
    bounds = []
    for reduce, limit in (("ReduceMin", "Min"), ("ReduceMax", "Max")):
        bound = graph.reduce(reduce, source, others)
        if axes[0] == FLAT:
            bound = graph.op("Reshape", bound, graph.op("Shape", layout.called["ids"]))
        if axes[0] == FLAT or len(kept) == 2:
            over = layout.over_row if own_rows else layout.over_sequence
            bound = over(reduce, bound)
        bound = graph.op(limit, bound, zero)  # zero is always within the range
        bounds.append(graph.op("Reshape", bound, graph.constant(shape)))
    low, high = bounds
    span = graph.op("Sub", high, low)
    step = graph.op("Div", span, graph.constant(LEVELS, np.float32))
    scale = graph.op("Where", graph.op("Equal", span, zero), one, step)
    zero_point = graph.op("Round", graph.op("Div", graph.op("Neg", low), scale))
    rounded = graph.op("Round", graph.op("Div", source, scale))
    # At scale 1 this only saturates to uint8: the numbers are whole already.
    values = graph.op("QuantizeLinear", graph.op("Add", rounded, zero_point), one, _zero(graph))
    return Quantized(values, scale, zero_point)


def _broadcast(node: NodeProto, axes: Axes) -> tuple[tuple[int, ...], list[int]]:
    """The axes of rows and tokens, and the shape in which their bounds broadcast."""
    if axes[:1] == (FLAT,):
        return (0,), [-1, *(1 for _ in axes[1:])]
    if axes[:1] != (BATCH,):
        raise refuse(node, f"scales values that are not [rows, ...] over a whole batch; {REMEDY}")
    if TOKEN not in axes:  # one per sequence, as what a pooler takes
        return (0,), [-1, *(1 for _ in axes[1:])]
    token = axes.index(TOKEN)  # of two, as in attention, the first is the queries'
    return (0, token), [0, *(-1 if at == token else 1 for at in range(1, len(axes)))]


def _zero(graph: Graph) -> str:
    return graph.constant(0, np.uint8)


def _connect(graph: Graph, reader: NodeProto, quantized: dict[str, Quantized]) -> None:
    """Let a node that takes quantized values take those of each sequence."""
    if reader not in graph.nodes:
        return  # a product of two, replaced when the other was connected
    if reader.op_type == "MatMulInteger" and graph.is_constant(reader.input[1]):
        _multiply_weights(graph, reader, quantized[reader.input[0]])
    elif reader.op_type == "MatMulInteger" and set(reader.input[:2]) <= quantized.keys():
        sides = [_centered(graph, quantized[name]) for name in reader.input[:2]]
        graph.remove(reader)
        graph.op("MatMul", *sides, result=reader.output[0])
    elif reader.op_type == "DequantizeLinear":
        taken = quantized[reader.input[0]]
        graph.remove(reader)
        graph.op("Mul", _centered(graph, taken), taken.scale, result=reader.output[0])
    else:
        raise refuse(
            reader,
            f"takes int8 values whose scale depends on the whole batch, so that a neighbor would "
            f"change a text's result; {REMEDY}",
        )


def _multiply_weights(graph: Graph, reader: NodeProto, taken: Quantized) -> None:
    """The product with constant weights, in int32; see the module's formula."""
    weights = reader.input[1]
    offsets = [reader.input[3]] if len(reader.input) > 3 and reader.input[3] else []
    right = (weights, _zero(graph), *offsets)
    shape = _shape(graph, weights)
    if len(shape) != 2:
        raise refuse(reader, f"multiplies by int8 weights that are no matrix; {REMEDY}")
    graph.remove(reader)
    product = graph.op("MatMulInteger", taken.values, *right)
    ones = graph.constant(np.ones((1, shape[0]), np.uint8), np.uint8, f"ones_{shape[0]}")
    sums = graph.op("MatMulInteger", ones, *right)  # [1, N]; ONNX Runtime folds it into a constant
    zero_point = graph.op("Cast", taken.zero, to=TensorProto.INT32)
    excess = graph.op("Mul", zero_point, sums)
    graph.op("Sub", product, excess, result=reader.output[0])


def _shape(graph: Graph, weights: str) -> tuple[int, ...]:
    if weights not in graph.stored:
        raise CheckpointError(f"the int8 weights {weights!r} are not stored in the graph; {REMEDY}")
    return tuple(graph.stored[weights].dims)


def _centered(graph: Graph, taken: Quantized) -> str:
    """Values minus zero point, as floats."""
    return graph.op("Sub", graph.op("Cast", taken.values, to=TensorProto.FLOAT), taken.zero)
