"""Recover a model's weights from the graph of an ONNX file: names, orientation, precision.

Exporters fold a transposition into a weight and give it a new name (`onnx::MatMul_329`, `val_83`),
let equal tensors share one name, and quantisers put scale and zero point beside it. What a tensor
is, is told by what the graph does with it, in this order: the module in which the node stands (its
path as torch writes it, or its `pkg.torch.onnx.name_scopes`), the tensor's own name, the name of
the bias that is added next. torch's orientation [out, in] is the one with which the graph computes
x Wᵀ. Constants are followed symbolically, a `Weight` each, so that nothing is computed or held but
what is asked for, and each stored tensor is dequantised at most once.

A tensor of floats that nothing explains keeps its own name: names that are strict find it. Numbers
that only steer the graph (indices, shapes, scalars) are left out and counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packhorse.errors import CheckpointError

MODULE = re.compile(r"\w+(\.\w+)*\.(weight|bias|gamma|beta)")
WEIGHT_LIMIT = 10_000  # BERT-Large has 400
FLOATS = (1, 10, 11, 16)  # TensorProto.DataType: float, float16, double, bfloat16
QUANTISED = (2, 3, 4, 5, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26)
# The result of a product passes these unchanged, but for rounding, on its way to its bias.
TRANSPARENT = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear")
# Made of several modules by ONNX Runtime's optimizer, or not dequantised here.
REFUSED = (
    *("Attention", "MultiHeadAttention", "EmbedLayerNormalization", "PackedAttention"),
    *("QAttention", "QEmbedLayerNormalization", "QLinearMatMul", "MatMulNBits"),
    *("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "FusedMatMul", "FusedGemm"),
)


@dataclass(frozen=True)
class Stored:
    """A tensor of the file, not read yet."""

    name: str
    dtype: int  # of TensorProto.DataType
    shape: tuple[int, ...]
    at: Any = field(repr=False)  # where its bytes lie, as its file knows it

    @property
    def count(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Node:
    """One operation of the graph."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]  # int, float, tuple of int, Stored
    module: str  # in which it stands, dotted; empty: unknown


@dataclass(frozen=True)
class Graph:
    """The main graph of a file; those inside its nodes are not looked at."""

    nodes: tuple[Node, ...]
    initializers: Mapping[str, Stored]


@dataclass(frozen=True)
class Weight:
    """A stored tensor and what the graph makes of it before it is used."""

    stored: Stored
    transposed: bool = False
    scale: Stored | None = None
    zero: Stored | None = None
    axis: int = 0  # of the stored tensor, along which scale and zero point run


@dataclass(frozen=True)
class Recovered:
    """The weights by the names of their modules, and what a user should know."""

    weights: dict[str, Weight]
    notes: tuple[str, ...]


def recover(graph: Graph) -> Recovered:
    """Every weight of the graph."""
    for node in graph.nodes:
        if node.op in REFUSED:
            raise CheckpointError(
                f"node {node.name!r} is a {node.op}, in which weights are fused or packed; "
                f"pass the model as it was exported, before it was optimised"
            )
    flow = _Flow(graph)
    weights = _name(flow)
    left_out = _keep_the_rest(flow, weights)
    _check(weights)
    return Recovered(weights, tuple(_notes(weights, left_out)))


def _check(weights: Mapping[str, Weight]) -> None:
    if not 0 < len(weights) <= WEIGHT_LIMIT:
        raise CheckpointError(f"{len(weights)} tensors: none, or more than {WEIGHT_LIMIT}")
    for name, weight in weights.items():
        if weight.scale is None and weight.stored.dtype not in FLOATS:
            raise CheckpointError(
                f"{name!r} has the type {weight.stored.dtype} of TensorProto; weights are floats, "
                f"or int8 with a scale"
            )


class _Flow:
    """Who makes and who uses each value, and which values are constant."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.maker = {value: node for node in graph.nodes for value in node.outputs}
        self.users: dict[str, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for value in dict.fromkeys(node.inputs):
                self.users[value].append(node)
        self.constants = {name: Weight(stored) for name, stored in graph.initializers.items()}
        self.label = {name: own for name in graph.initializers if (own := _own_name(name))}
        self.scales: set[Stored] = set()  # of weights; they are no weights themselves
        for node in graph.nodes:
            self._fold(node)

    def _fold(self, node: Node) -> None:
        """Make the outputs of a node constant, if it changes only how a weight is looked at."""
        if node.op == "Constant":
            made = node.attributes.get("value")
            weight = Weight(made) if isinstance(made, Stored) else None
        else:
            weight = self._follow(node, [self.constants.get(value) for value in node.inputs])
        if weight and len(node.outputs) == 1:
            self._define(node.outputs[0], weight, node.inputs)

    def _follow(self, node: Node, inputs: list[Weight | None]) -> Weight | None:
        weight = inputs[0] if inputs else None
        if weight is None:
            return None
        if node.op == "Identity" or (node.op == "Cast" and node.attributes.get("to") in FLOATS):
            return weight
        if node.op == "Transpose" and len(weight.stored.shape) == 2:
            perm = node.attributes.get("perm", (1, 0))
            turned = replace(weight, transposed=weight.transposed ^ (perm == (1, 0)))
            return turned if perm in ((0, 1), (1, 0)) else None
        if node.op == "DequantizeLinear":
            return self.dequantised_by(weight, node)
        if node.op == "Mul" and weight.stored.dtype in QUANTISED and not weight.transposed:
            return self.dequantised(weight, inputs[1] if len(inputs) > 1 else None, "", 0)
        return None

    def _define(self, value: str, weight: Weight, inputs: tuple[str, ...]) -> None:
        if value in self.constants:
            raise CheckpointError(f"{value!r} is there twice")
        self.constants[value] = weight
        before = self.label.get(inputs[0], "") if inputs else ""
        if label := _own_name(value) or before:
            self.label[value] = label

    def dequantised_by(self, weight: Weight, node: Node) -> Weight | None:
        """As a DequantizeLinear has it."""
        scale, zero = (*node.inputs[1:3], "", "")[:2]
        if node.attributes.get("block_size"):
            return None
        return self.dequantised(
            weight, self.constants.get(scale), zero, node.attributes.get("axis", 1)
        )

    def dequantised(
        self, weight: Weight, scale: Weight | None, zero_point: str, axis: int
    ) -> Weight | None:
        """The weight with its scale and zero point, which must be stored as they are."""
        zero = self.constants.get(zero_point)
        others = [scale, zero] if zero_point else [scale]
        if scale is None or not all(part and part == Weight(part.stored) for part in others):
            return None
        if weight.stored.dtype in FLOATS:
            raise CheckpointError(f"{weight.stored.name!r} has a scale, but is not quantised")
        rank = len(weight.stored.shape)
        axis = axis + rank if axis < 0 else axis
        made = replace(
            weight,
            scale=scale.stored,
            zero=zero.stored if zero else None,
            axis=rank - 1 - axis if weight.transposed and rank == 2 else axis,
        )
        if weight.scale and made != weight:
            raise CheckpointError(f"{weight.stored.name!r} is dequantised twice")
        self.scales.update({made.scale, made.zero} - {None})  # pyright: ignore[reportArgumentType]
        return made

    def next(self, node: Node) -> Node | None:
        """The one node that uses the result."""
        users = self.users[node.outputs[0]] if node.outputs else []
        return users[0] if len(users) == 1 else None

    def other(self, node: Node, value: str) -> str:
        """The operand of a sum or product that is not `value`."""
        return next((name for name in node.inputs if name != value), "")

    def scaled_after(self, node: Node) -> Weight | None:
        """The scale that an integer product is multiplied with, but for that of its input."""
        cast = self.next(node)
        product = self.next(cast) if cast and cast.op == "Cast" else None
        if cast is None or product is None or product.op != "Mul":
            return None
        maker = self.maker.get(self.other(product, cast.outputs[0]))
        scales = maker.inputs if maker and maker.op == "Mul" else ()
        stored = [self.constants[name] for name in scales if name in self.constants]
        return stored[0] if len(stored) == 1 else None  # the other is found as the model runs


@dataclass(frozen=True)
class _Use:
    """A constant in the place of a module's weight or bias."""

    value: str
    weight: Weight
    kind: str  # weight, bias
    module: str  # empty: unknown
    beside: str = ""  # the value in the other place of the same module


def _uses(flow: _Flow) -> Iterator[_Use]:
    for node in flow.nodes:
        if node.op in ("MatMul", "Gemm", "MatMulInteger"):
            yield from _linear(flow, node)
        elif node.op == "LayerNormalization":
            yield from _norm(flow, node)
        elif node.op == "Gather" and not node.attributes.get("axis", 0):
            yield from _embedding(flow, node)
    for node in flow.nodes:  # when it is known which constants are scales
        if node.op in ("Add", "Mul"):
            yield from _elementwise(flow, node)


def _linear(flow: _Flow, node: Node) -> Iterator[_Use]:
    value = node.inputs[1] if len(node.inputs) > 1 else ""
    weight = flow.constants.get(value)
    if weight is None or len(weight.stored.shape) != 2:
        return
    if node.op == "Gemm":
        _check_plain(node)
    if node.op == "MatMulInteger":
        zero = node.inputs[3] if len(node.inputs) > 3 else ""
        weight = flow.dequantised(weight, flow.scaled_after(node), zero, axis=1)
        if weight is None:
            return
    if not node.attributes.get("transB"):
        weight = replace(weight, transposed=not weight.transposed)
    bias, module = _bias(flow, node)
    yield _Use(value, weight, "weight", module, beside=bias)
    if bias:
        yield _Use(bias, flow.constants[bias], "bias", module, beside=value)


def _check_plain(node: Node) -> None:
    said = node.attributes
    if said.get("alpha", 1) != 1 or said.get("beta", 1) != 1 or said.get("transA"):
        raise CheckpointError(f"node {node.name!r} scales or turns what it multiplies: not read")


def _bias(flow: _Flow, node: Node) -> tuple[str, str]:
    """The constant that is added to a product, or none, and the module they stand in."""
    if node.op == "Gemm":
        bias = node.inputs[2] if len(node.inputs) > 2 else ""
        return bias if bias in flow.constants else "", node.module
    value, user = node.outputs[0] if node.outputs else "", flow.next(node)
    passes = (*TRANSPARENT, "Mul") if node.op == "MatMulInteger" else TRANSPARENT
    for _ in range(4):
        if user is None or user.op not in passes or not user.outputs:
            break
        value, user = user.outputs[0], flow.next(user)
    if user is None or user.op != "Add":
        return "", node.module
    bias = flow.other(user, value)
    constant = flow.constants.get(bias)
    if constant is None or len(constant.stored.shape) != 1:
        return "", node.module
    return bias, node.module or user.module


def _norm(flow: _Flow, node: Node) -> Iterator[_Use]:
    for value, kind in zip(node.inputs[1:3], ("weight", "bias"), strict=False):
        if value in flow.constants:
            yield _Use(value, flow.constants[value], kind, node.module)


def _embedding(flow: _Flow, node: Node) -> Iterator[_Use]:
    weight = flow.constants.get(node.inputs[0]) if node.inputs else None
    if weight is None or len(weight.stored.shape) != 2:
        return
    user = flow.next(node)
    if weight.stored.dtype in QUANTISED and weight.scale is None:
        if user is None or user.op != "DequantizeLinear":
            return
        weight = flow.dequantised_by(weight, user)
    if weight and (weight.scale or weight.stored.dtype in FLOATS):
        yield _Use(node.inputs[0], weight, "weight", node.module)


def _elementwise(flow: _Flow, node: Node) -> Iterator[_Use]:
    """Scale and shift of a norm that was exported operation by operation."""
    constant = [value for value in node.inputs if value in flow.constants]
    if len(constant) != 1 or len(node.inputs) != 2 or constant[0] in flow.label:
        return
    weight = flow.constants[constant[0]]
    if len(weight.stored.shape) == 1 and weight.stored.count > 1 and _is_weight(flow, weight):
        kind = "bias" if node.op == "Add" else "weight"
        yield _Use(constant[0], weight, kind, node.module)


def _is_weight(flow: _Flow, weight: Weight) -> bool:
    numbers = weight.scale is not None or weight.stored.dtype in FLOATS
    return numbers and weight.stored not in flow.scales


def _name(flow: _Flow) -> dict[str, Weight]:
    """The weights by name: first those whose module is known, then those that have a name."""
    uses = list(dict.fromkeys(_uses(flow)))
    times = Counter(flow.label.get(use.value) for use in uses)
    result: dict[str, Weight] = {}
    for use in uses:
        if use.module:
            _put(result, f"{use.module}.{use.kind}", use.weight)
    labelled: dict[str, Weight] = {}
    for use in uses:
        if label := flow.label.get(use.value):
            _put(labelled, label, use.weight)
        elif not use.module and (name := _beside(flow, use, times)):
            _put(result, name, use.weight)
    for value, label in flow.label.items():
        weight = flow.constants[value]
        if value == label or weight.scale:
            labelled.setdefault(label, weight)
    return {**labelled, **result}


def _beside(flow: _Flow, use: _Use, times: Mapping[str | None, int]) -> str:
    """The module of a tensor without a name: that of the bias added next, if no other shares it."""
    label = flow.label.get(use.beside)
    if label is None or times[label] != 1:
        return ""
    return f"{label.rpartition('.')[0]}.{use.kind}"


def _put(result: dict[str, Weight], name: str, weight: Weight) -> None:
    if result.setdefault(name, weight) != weight:
        raise CheckpointError(
            f"{name!r} could be {result[name].stored.name!r} or {weight.stored.name!r}"
        )


def _own_name(value: str) -> str:
    """The name of a module's tensor, if this is one; quantisers add to it."""
    name = value.removesuffix("_quantized")
    return name if MODULE.fullmatch(name) else ""


def _keep_the_rest(flow: _Flow, weights: dict[str, Weight]) -> int:
    """Keep tensors of floats that nothing explains; count the numbers that are left out."""
    used = {weight.stored for weight in weights.values()} | flow.scales
    left_out = 0
    for weight in {weight.stored: weight for weight in flow.constants.values()}.values():
        stored = weight.stored
        if stored in used:
            continue
        if stored.count > 1 and stored.dtype in QUANTISED and len(stored.shape) > 1:
            raise CheckpointError(f"{stored.name!r} is quantised in a way that is not read here")
        if stored.count > 1 and stored.dtype in FLOATS:
            _put(weights, stored.name, Weight(stored))
        else:
            left_out += 1
    return left_out


def _notes(weights: Mapping[str, Weight], left_out: int) -> Iterator[str]:
    renamed = sum(weight.stored.name != name for name, weight in weights.items())
    dequantised = len({weight.stored for weight in weights.values() if weight.scale})
    if renamed:
        yield f"{renamed} tensors got their names back from the graph"
    if dequantised:
        yield f"{dequantised} tensors were dequantised to float32"
    if left_out:
        yield f"{left_out} constants that only steer the graph were left out"
