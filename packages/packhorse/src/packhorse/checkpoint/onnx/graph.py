"""Recover a model's weights from the graph of an ONNX file: names, orientation, precision.

Exporters fold a transposition into a weight and rename it (`onnx::MatMul_329`, `val_83`), let equal
tensors share one name, and quantizers add a scale and a zero point. So a tensor is identified by
its use in the graph, in this order: by the module of the node that uses it (the node's path as
torch writes it, or its `pkg.torch.onnx.name_scopes`), by the tensor's own name, or by the name of
the bias that is added next. torch's orientation [out, in] is the one in which the graph computes
x Wᵀ. Constants are followed symbolically, as `Weight`s, so that only what is needed is read, and
each stored tensor is dequantized at most once.

ONNX Runtime's optimizers fuse several modules into one operation. The tables below say which of its
inputs are weights; queries, keys and values that were concatenated are divided again, under the
names that they have in the family of the module behind them (`names.siblings`).

tf2onnx keeps the names of TensorFlow's variables, which tell what they are and how they are turned.

A tensor of floats whose use is not understood keeps its own name, so that loading, which is strict,
reports it. Numbers that only control the graph (indices, shapes, scalars) are left out and counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packhorse.checkpoint.names import siblings, tf1
from packhorse.checkpoint.tensorflow.frozen import variable_of
from packhorse.errors import CheckpointError

MODULE = re.compile(r"\w+(\.\w+)*\.(weight|bias|gamma|beta)")
# What ONNX Runtime puts before the names of weights that it casts.
PREFIXES = re.compile("(InsertedPrecisionFreeCast_|InsertedCast_|FusedBack_)+")
WEIGHT_LIMIT = 10_000  # BERT-Large has 400
NODES_TO_BIAS = 4  # between a product and its bias at most; quantizers put Cast and Mul there
ONNX_RUNTIME = "com.microsoft"  # the domain of its operations
UINT8 = 2  # of TensorProto.DataType, as those below
FLOATS = (1, 10, 11, 16)  # float, float16, double, bfloat16
# uint8, int8, uint16, int16, and the types of 8, 4 and 2 bits that were added later
QUANTIZED = (2, 3, 4, 5, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26)
# Operations that do not change the result of a product, except for rounding, before its bias.
TRANSPARENT = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Reshape")


@dataclass(frozen=True)
class ProductInputs:
    """Which inputs of an operation are its weight, the weight's scale and zero point, its bias."""

    weight: int
    scale: int = 0  # 0: none
    zero: int = 0
    bias: int = 0


PRODUCTS = {
    "Attention": ProductInputs(1, bias=2),  # ORT's; the one of opset 23 has no weights
    "DynamicQuantizeMatMul": ProductInputs(1, scale=2, zero=3, bias=4),
    "FusedGemm": ProductInputs(1, bias=2),
    "FusedMatMul": ProductInputs(1),
    "Gemm": ProductInputs(1, bias=2),
    "MatMul": ProductInputs(1),
    "MatMulInteger": ProductInputs(1, zero=3),
    "MatMulIntegerToFloat": ProductInputs(1, scale=3, zero=5, bias=6),
    "MatMulNBits": ProductInputs(1, scale=2, zero=3, bias=5),
    "QAttention": ProductInputs(1, scale=4, zero=7, bias=2),
    "QLinearMatMul": ProductInputs(3, scale=4, zero=5),
}
FUSED_ATTENTION = ("Attention", "QAttention")  # their weight is that of query, key and value
# Operations that add a bias to a product, and which input that is.
BIASES = {"Add": None, "BiasGelu": 1, "FastGelu": 1, "SkipLayerNormalization": 4}
NORMS = {  # and which inputs are their weight and bias
    "EmbedLayerNormalization": (5, 6),
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}
# Norms and attention that were fused have no path, but the value of the last fused node keeps it.
NAMED_BY_OUTPUT = (*FUSED_ATTENTION, "MultiHeadAttention", *NORMS)
# Inputs of a fused embedding: table, scale, zero point; the last two tables are the norm's.
EMBEDDINGS = {
    "EmbedLayerNormalization": ((2, 0, 0), (3, 0, 0), (4, 0, 0)),
    "QEmbedLayerNormalization": ((2, 8, 13), (3, 9, 14), (4, 10, 15), (5, 11, 16), (6, 12, 17)),
}
# Operations that hold weights in a form that is not understood here, and what they stand for.
REFUSED = {
    "PackedAttention": "an attention that ONNX Runtime packed for CUDA",
    "PackedMultiHeadAttention": "an attention that ONNX Runtime packed for CUDA",
    "QGemm": "a quantized product whose bias is quantized by two scales",
    "QuickGelu": "an activation that no model here has",
}
GELUS = {"BiasGelu": "erf", "FastGelu": "tanh", "Gelu": "erf"}  # operation → form, as in `gelu`


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, not read yet."""

    name: str
    dtype: int  # TensorProto.DataType
    shape: tuple[int, ...]
    location: Any = field(repr=False)  # a `data.DataLocation`; None: of a dtype that is not read

    @property
    def count(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class OnnxNode:
    """One operation of the graph."""

    op: str
    domain: str  # "com.microsoft": of ONNX Runtime; empty: of ONNX itself
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]  # int, float, tuple of int, StoredTensor
    module: str  # that it belongs to, dotted; empty: unknown


@dataclass(frozen=True)
class OnnxGraph:
    """The main graph of a file; graphs inside its nodes are not read."""

    nodes: tuple[OnnxNode, ...]
    initializers: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Weight:
    """A stored tensor, and what the graph does to it before it is used."""

    stored: StoredTensor
    transposed: bool = False
    scale: StoredTensor | None = None
    zero: StoredTensor | None = None
    axis: int = 0  # of the stored tensor, along which scale and zero point vary
    block: int = 0  # numbers along that axis that share a scale; 0: it varies with each, or not
    bits: int = 0  # of a number, where MatMulNBits has several in a byte
    is_row: bool = False  # its first axis, of size 1, is dropped
    part: int = 0  # which third of the rows [out, in] it is; 0: all


@dataclass(frozen=True)
class RecoveredWeights:
    """The weights by the names of their modules, notes for the user, and the forms of GELU."""

    weights: dict[str, Weight]
    notes: tuple[str, ...]
    gelu: frozenset[str]
    max_positions: int | None = None  # of a graph that was exported for one length


def recover(graph: OnnxGraph) -> RecoveredWeights:
    """Find all weights of the graph."""
    for node in graph.nodes:
        if node.op in REFUSED:
            raise CheckpointError(
                f"node {node.name!r} is a {node.op}, {REFUSED[node.op]}; "
                f"pass the model as it was exported, before it was optimized"
            )
    flow = _DataFlow(graph)
    variables = _variables(flow)
    weights = _tensorflow_weights(flow, variables) if variables else _named_weights(flow)
    left_out = _add_unexplained(flow, weights)
    _check(weights)
    lengths = [weight.stored.shape[1] for weight in weights.values() if weight.is_row]
    return RecoveredWeights(
        weights,
        tuple(_notes(graph, weights, left_out)),
        _gelu_forms(graph),
        max_positions=lengths[0] if lengths else None,
    )


def _gelu_forms(graph: OnnxGraph) -> frozenset[str]:
    """The forms of the operations that are GELUs; one that is spelled out shows nothing here."""
    return frozenset(
        "tanh" if node.attributes.get("approximate") == "tanh" else GELUS[node.op]
        for node in graph.nodes
        if node.op in GELUS
    )


def _check(weights: Mapping[str, Weight]) -> None:
    if not 0 < len(weights) <= WEIGHT_LIMIT:
        raise CheckpointError(f"{len(weights)} tensors: none, or more than {WEIGHT_LIMIT}")
    for name, weight in weights.items():
        if weight.scale is None and weight.stored.dtype not in FLOATS:
            raise CheckpointError(
                f"{name!r} has the type {weight.stored.dtype} of TensorProto; weights are floats, "
                f"or int8 with a scale"
            )


class _DataFlow:
    """The node that computes each value, the nodes that use it, and which values are constant."""

    def __init__(self, graph: OnnxGraph) -> None:
        self.nodes = graph.nodes
        self.producer = {value: node for node in graph.nodes for value in node.outputs}
        self.users: dict[str, list[OnnxNode]] = defaultdict(list)
        for node in graph.nodes:
            for value in dict.fromkeys(node.inputs):
                self.users[value].append(node)
        self.constants = {name: Weight(stored) for name, stored in graph.initializers.items()}
        # Constant → the name of a module's tensor, where its own name, or that of the constant it
        # is computed from, is one.
        self.label = {name: label for name in graph.initializers if (label := _tensor_name(name))}
        self.scales: set[StoredTensor] = set()  # scales and zero points, which are no weights
        for node in graph.nodes:
            self._fold(node)

    def _fold(self, node: OnnxNode) -> None:
        """Record the output of a node as constant, if the node only changes a weight's form."""
        if node.op == "Constant":
            value = node.attributes.get("value")
            weight = Weight(value) if isinstance(value, StoredTensor) else None
        else:
            weight = self._transformed(node, [self.constants.get(value) for value in node.inputs])
        if weight and len(node.outputs) == 1:
            self._define(node.outputs[0], weight, node.inputs)

    def _transformed(self, node: OnnxNode, inputs: list[Weight | None]) -> Weight | None:
        """The weight that a node computes from constants; None if it is not understood."""
        weight = inputs[0] if inputs else None
        if weight is None:
            return None
        if node.op == "Identity" or (node.op == "Cast" and node.attributes.get("to") in FLOATS):
            return weight
        if node.op == "Transpose" and len(weight.stored.shape) == 2:
            perm = node.attributes.get("perm", (1, 0))
            transposed = replace(weight, transposed=weight.transposed ^ (perm == (1, 0)))
            return transposed if perm in ((0, 1), (1, 0)) else None
        if node.op == "DequantizeLinear":
            return self.dequantized_by(weight, node)
        if node.op == "Mul" and weight.stored.dtype in QUANTIZED and not weight.transposed:
            return self.dequantized(weight, inputs[1] if len(inputs) > 1 else None, "", 0)
        return None

    def _define(self, value: str, weight: Weight, inputs: tuple[str, ...]) -> None:
        if value in self.constants:
            raise CheckpointError(f"{value!r} is there twice")
        self.constants[value] = weight
        inherited = self.label.get(inputs[0], "") if inputs else ""
        if label := _tensor_name(value) or inherited:
            self.label[value] = label

    def dequantized_by(self, weight: Weight, node: OnnxNode) -> Weight | None:
        """The weight after a DequantizeLinear; None if that is not understood."""
        scale = node.inputs[1] if len(node.inputs) > 1 else ""
        zero = node.inputs[2] if len(node.inputs) > 2 else ""
        return self.dequantized(
            weight,
            self.constants.get(scale),
            zero,
            node.attributes.get("axis", 1),
            node.attributes.get("block_size", 0),
        )

    def dequantized(
        self, weight: Weight, scale: Weight | None, zero_point: str, axis: int, block: int = 0
    ) -> Weight | None:
        """The weight with its scale and zero point, which must be plain stored tensors."""
        zero = self.constants.get(zero_point)
        parameters = [scale, zero] if zero_point else [scale]
        if scale is None or not all(part and part == Weight(part.stored) for part in parameters):
            return None
        if weight.stored.dtype in FLOATS:
            raise CheckpointError(f"{weight.stored.name!r} has a scale, but is not quantized")
        rank = len(weight.stored.shape)
        axis = axis + rank if axis < 0 else axis
        dequantized = replace(
            weight,
            scale=scale.stored,
            zero=zero.stored if zero else None,
            axis=rank - 1 - axis if weight.transposed and rank == 2 else axis,
            block=block,
        )
        if weight.scale and dequantized != weight:
            raise CheckpointError(f"{weight.stored.name!r} is dequantized twice")
        self.scales.add(scale.stored)
        if zero:
            self.scales.add(zero.stored)
        return dequantized

    def only_user(self, node: OnnxNode) -> OnnxNode | None:
        """The node that uses the result; None if there are several or none."""
        users = self.users[node.outputs[0]] if node.outputs else []
        return users[0] if len(users) == 1 else None

    def product_after(self, node: OnnxNode) -> OnnxNode | None:
        """The product that the result goes to, quantized or in another shape; None if several."""
        pending = list(node.outputs[:1])
        reached = set(pending)  # a graph may join again, or be a cycle
        products: list[OnnxNode] = []
        while pending:
            for user in self.users[pending.pop()]:
                if reached.issuperset(user.outputs[:1]):
                    continue
                reached.update(user.outputs[:1])
                if user.op in PRODUCTS:
                    products.append(user)
                elif user.op in (*TRANSPARENT, "DynamicQuantizeLinear"):
                    pending += user.outputs[:1]
        return products[0] if len(products) == 1 else None

    def second_operand(self, node: OnnxNode, value: str) -> str:
        """The operand of a sum or product that is not `value`."""
        return next((name for name in node.inputs if name != value), "")

    def scaled_after(self, node: OnnxNode) -> Weight | None:
        """The weight's scale, by which the result of a MatMulInteger is multiplied.

        Dynamic quantization computes MatMulInteger → Cast → Mul(input's scale × weight's scale).
        """
        cast = self.only_user(node)
        product = self.only_user(cast) if cast and cast.op == "Cast" else None
        if cast is None or product is None or product.op != "Mul":
            return None
        producer = self.producer.get(self.second_operand(product, cast.outputs[0]))
        scales = producer.inputs if producer and producer.op == "Mul" else ()
        stored = [self.constants[name] for name in scales if name in self.constants]
        return stored[0] if len(stored) == 1 else None  # the input's is computed at run time


@dataclass(frozen=True)
class _Use:
    """A constant that is used as a module's weight or bias."""

    value: str
    weight: Weight
    kind: str  # weight, bias
    module: str  # empty: unknown
    partner: str = ""  # the value used as the bias of the same weight, or vice versa


def _uses(flow: _DataFlow) -> Iterator[_Use]:
    """All uses of constants as weights or biases."""
    for node in flow.nodes:
        if node.op in PRODUCTS:
            yield from _linear(flow, node, PRODUCTS[node.op])
        elif node.op == "MultiHeadAttention" and (bias := _input(node, 3)) in flow.constants:
            yield from _divided(flow, node, bias, flow.constants[bias], "bias")
        elif node.op == "Gather" and not node.attributes.get("axis", 0):
            yield from _embedding(flow, node)
        if node.op in EMBEDDINGS:
            yield from _fused_embedding(flow, node)
        if node.op in NORMS:
            yield from _norm(flow, node)
    # Only now, when all scales are known, which are constants of sums and products too.
    for node in flow.nodes:
        if node.op in ("Add", "Mul"):
            yield from _elementwise(flow, node)


def _input(node: OnnxNode, number: int) -> str:
    """The name of an input; "" if it is left out, or has the number 0, which no weight has."""
    return node.inputs[number] if 0 < number < len(node.inputs) else ""


def _linear(flow: _DataFlow, node: OnnxNode, inputs: ProductInputs) -> Iterator[_Use]:
    """The weight and the bias of a linear layer."""
    value = _input(node, inputs.weight)
    weight = flow.constants.get(value)
    if weight is None or len(weight.stored.shape) != (3 if node.op == "MatMulNBits" else 2):
        return
    _check_plain(node)
    scale = flow.constants.get(_input(node, inputs.scale))
    zero = _input(node, inputs.zero)
    if node.op == "MatMulNBits":
        weight = _packed_weight(flow, node, weight, scale, zero)
    elif node.op == "MatMulInteger":
        weight = flow.dequantized(weight, flow.scaled_after(node), zero, axis=1)
    elif inputs.scale:
        weight = flow.dequantized(weight, scale, zero, axis=1)
    if weight is None:
        return
    if not node.attributes.get("transB") and node.op != "MatMulNBits":
        weight = replace(weight, transposed=not weight.transposed)
    bias, module = _bias(flow, node, inputs.bias)
    if node.op in FUSED_ATTENTION:
        yield from _divided(flow, node, value, weight, "weight")
        if bias:
            yield from _divided(flow, node, bias, flow.constants[bias], "bias")
        return
    yield _Use(value, weight, "weight", module, partner=bias)
    if bias:
        yield _Use(bias, flow.constants[bias], "bias", module, partner=value)


def _check_plain(node: OnnxNode) -> None:
    attributes = node.attributes
    scaled = attributes.get("alpha", 1) != 1 or attributes.get("beta", 1) != 1
    batched = attributes.get("transBatchA") or attributes.get("transBatchB")
    if scaled or batched or attributes.get("transA"):
        raise CheckpointError(f"node {node.name!r} scales or turns what it multiplies: not read")


def _packed_weight(
    flow: _DataFlow, node: OnnxNode, weight: Weight, scale: Weight | None, zero_point: str
) -> Weight:
    """The weight [out, in] of a MatMulNBits: [out, blocks, bytes], with a scale per block."""
    zero = flow.constants.get(zero_point)
    bits = node.attributes.get("bits", 4)
    block = node.attributes.get("block_size", 0)
    shape = (node.attributes.get("N", 0), node.attributes.get("K", 0))
    blocks = -(-shape[1] // block) if block > 0 else 0
    if (
        scale is None
        or bits not in (2, 4, 8)
        or block * bits % 8
        or weight.stored.dtype != UINT8
        or weight.stored.shape != (shape[0], blocks, block * bits // 8)
        or (zero_point and zero is None)
        or _input(node, 4)  # the order of the columns
    ):
        raise CheckpointError(
            f"node {node.name!r}: {node.op} holds weights in a form not read here"
        )
    parameters = [scale.stored, zero.stored] if zero else [scale.stored]
    flow.scales.update(parameters)
    return replace(
        weight,
        scale=scale.stored,
        zero=zero.stored if zero else None,
        axis=shape[1],
        block=block,
        bits=bits,
    )


def _divided(
    flow: _DataFlow, node: OnnxNode, value: str, weight: Weight, kind: str
) -> Iterator[_Use]:
    """The weights or biases of query, key and value, which an attention has concatenated."""
    modules = _projections(flow, node)
    if len(modules) == 1:  # the family has them in one tensor itself
        yield _Use(value, weight, kind, modules[0])
        return
    for number, module in enumerate(modules, 1):
        yield _Use(value, replace(weight, part=number), kind, module)


def _projections(flow: _DataFlow, node: OnnxNode) -> tuple[str, ...]:
    """The modules of query, key and value, by the name of the one after an attention."""
    after = flow.product_after(node)
    if after is None:
        raise CheckpointError(
            f"node {node.name!r}: the result of {node.op} is not projected, so that its queries, "
            f"keys and values have no names"
        )
    inputs = PRODUCTS[after.op]
    bias, module = _bias(flow, after, inputs.bias)
    labels = (flow.label.get(value, "") for value in (_input(after, inputs.weight), bias))
    module = module or next((label.rpartition(".")[0] for label in labels if label), "")
    modules = siblings(module, "attention.out", "attention.qkv")
    if not modules:
        raise CheckpointError(
            f"node {node.name!r} is a {node.op} before {module or after.name!r}, which belongs to "
            f"no model that is known here; pass the model as it was exported, before it was "
            f"optimized"
        )
    return modules


def _bias(flow: _DataFlow, node: OnnxNode, number: int) -> tuple[str, str]:
    """The constant that is added to a product (or ""), and the module of both."""
    bias = _input(node, number)
    if bias in flow.constants or node.op in ("Gemm", "FusedGemm", *FUSED_ATTENTION):
        return bias if bias in flow.constants else "", node.module
    value = node.outputs[0] if node.outputs else ""
    user = flow.only_user(node)
    skipped = (*TRANSPARENT, "Mul") if node.op == "MatMulInteger" else TRANSPARENT
    for _ in range(NODES_TO_BIAS):
        if user is None or user.op not in skipped or not user.outputs:
            break
        value = user.outputs[0]
        user = flow.only_user(user)
    if user is None or user.op not in BIASES:
        return "", node.module
    place = BIASES[user.op]
    bias = flow.second_operand(user, value) if place is None else _input(user, place)
    constant = flow.constants.get(bias)
    if constant is None or len(constant.stored.shape) != 1:
        return "", node.module
    # A fused operation has the module of the activation or norm after the bias.
    return bias, node.module or (user.module if user.op == "Add" else "")


def _norm(flow: _DataFlow, node: OnnxNode) -> Iterator[_Use]:
    for number, kind in zip(NORMS[node.op], ("weight", "bias"), strict=False):
        if (value := _input(node, number)) in flow.constants:
            yield _Use(value, flow.constants[value], kind, node.module)


def _fused_embedding(flow: _DataFlow, node: OnnxNode) -> Iterator[_Use]:
    """The tables of a fused embedding, which keep their own names, and its quantized norm."""
    for number, scale, zero in EMBEDDINGS[node.op]:
        value = _input(node, number)
        weight = flow.constants.get(value)
        if weight and scale and weight.stored.dtype in QUANTIZED:
            scales = flow.constants.get(_input(node, scale))
            weight = flow.dequantized(weight, scales, _input(node, zero), axis=0)
        if weight:
            kind = (flow.label.get(value) or ".weight").rpartition(".")[2]
            yield _Use(value, weight, kind, "")


def _embedding(flow: _DataFlow, node: OnnxNode) -> Iterator[_Use]:
    """The table of a lookup; a quantized one is dequantized after it, row by row."""
    weight = flow.constants.get(node.inputs[0]) if node.inputs else None
    if weight is None or len(weight.stored.shape) != 2:
        return
    user = flow.only_user(node)
    if weight.stored.dtype in QUANTIZED and weight.scale is None:
        if user is None or user.op != "DequantizeLinear":
            return
        weight = flow.dequantized_by(weight, user)
    if weight and (weight.scale or weight.stored.dtype in FLOATS):
        yield _Use(node.inputs[0], weight, "weight", node.module)


def _elementwise(flow: _DataFlow, node: OnnxNode) -> Iterator[_Use]:
    """Weight and bias of a norm that was exported as single operations."""
    constant = [value for value in node.inputs if value in flow.constants]
    if len(constant) != 1 or len(node.inputs) != 2 or constant[0] in flow.label:
        return
    weight = flow.constants[constant[0]]
    if len(weight.stored.shape) == 1 and weight.stored.count > 1 and _is_weight(flow, weight):
        kind = "bias" if node.op == "Add" else "weight"
        yield _Use(constant[0], weight, kind, node.module)


def _is_weight(flow: _DataFlow, weight: Weight) -> bool:
    is_float = weight.scale is not None or weight.stored.dtype in FLOATS
    return is_float and weight.stored not in flow.scales


def _variables(flow: _DataFlow) -> dict[str, str]:
    """TensorFlow's variables by constant, in a graph of tf2onnx; empty if it is of another."""
    names = {
        value: variable_of(value.removesuffix(":0"))
        for value, weight in flow.constants.items()
        if value.endswith(":0") and weight.stored.shape and _is_weight(flow, weight)
    }
    return names if any(tf1.ENCODER.fullmatch(variable) for variable in names.values()) else {}


def _tensorflow_weights(flow: _DataFlow, variables: Mapping[str, str]) -> dict[str, Weight]:
    """The weights of a graph of tf2onnx; `variables` are those that its constants are named by.

    The scores of words and labels are [out, in] in TensorFlow and were transposed by tf2onnx; only
    the bias beside them shows what they are.
    """
    scope = tf1.scope(list(variables.values()))
    weights: dict[str, Weight] = {}
    for node in flow.nodes:
        bias = _bias(flow, node, 0)[0] if node.op == "MatMul" else ""
        variable = variables.get(bias, "")
        value = _input(node, 1)
        if variable.endswith("output_bias") and value in flow.constants:
            head = f"{variable.removesuffix('bias')}weights".removeprefix(scope)
            weight = flow.constants[value]
            _put(weights, tf1.canonical_name(head)[0], replace(weight, transposed=True))
    used = {weight.stored for weight in weights.values()}
    for value, variable in variables.items():
        weight = flow.constants[value]
        if weight.stored not in used:
            name, is_kernel = tf1.canonical_name(variable.removeprefix(scope))
            turned = is_kernel and len(weight.stored.shape) == 2
            _put(weights, name, replace(weight, transposed=turned))
    return weights


def _named_weights(flow: _DataFlow) -> dict[str, Weight]:
    """The weights by name: by their module if it is known, else by their own name."""
    uses = list(dict.fromkeys(_uses(flow)))
    uses_of_label = Counter(flow.label.get(use.value) for use in uses)
    by_use: dict[str, Weight] = {}
    for use in uses:
        if use.module:
            _put(by_use, f"{use.module}.{use.kind}", use.weight)
    by_label: dict[str, Weight] = {}
    for use in uses:
        if label := flow.label.get(use.value):
            _put(by_label, label, use.weight)
        elif not use.module and (name := _name_by_partner(flow, use, uses_of_label)):
            _put(by_use, name, use.weight)
    by_label |= _word_table(flow, uses, by_use) | _static_positions(flow, uses)
    # Labels without a use that is understood: of the constants that have a label, take the one
    # stored under it, or what it is dequantized to.
    for value, label in flow.label.items():
        weight = flow.constants[value]
        if value == label or weight.scale:
            by_label.setdefault(label, weight)
    return {**by_label, **by_use}


def _word_table(
    flow: _DataFlow, uses: list[_Use], by_use: Mapping[str, Weight]
) -> dict[str, Weight]:
    """A table that has the name of the word scores, because they were the same, under its own."""
    for use in uses:
        scores = by_use.get(flow.label.get(use.value, ""))
        if use.kind != "weight" or scores is None or scores.stored == use.weight.stored:
            continue
        for label in flow.label.values():
            position = label.removesuffix(".weight")
            for words in siblings(position, "embed.positions", "embed.words"):
                return {f"{words}.weight": use.weight}
    return {}


def _static_positions(flow: _DataFlow, uses: list[_Use]) -> dict[str, Weight]:
    """The positions of a graph of one length: a constant [1, length, E] added to the words.

    Token types are looked up all the same, where the graph has an input of them; if they are
    constant too, exporters have added both, and there is no telling them apart.
    """
    tables = {
        f"{module}.weight": use
        for use in uses
        for module in [use.module or flow.label.get(use.value, "").removesuffix(".weight")]
    }
    for name, use in tables.items():
        positions = siblings(name.removesuffix(".weight"), "embed.words", "embed.positions")
        types = siblings(name.removesuffix(".weight"), "embed.words", "embed.types")
        if not positions or f"{positions[0]}.weight" in tables:
            continue
        if any(f"{module}.weight" not in tables for module in types):
            continue
        width = use.weight.stored.shape[-1]
        constants = [
            weight
            for node in flow.nodes
            if node.op == "Add"
            for value in node.inputs
            if (weight := flow.constants.get(value))
            and len(weight.stored.shape) == 3
            and weight.stored.shape[::2] == (1, width)
        ]
        if len(constants) == 1:
            return {f"{positions[0]}.weight": replace(constants[0], is_row=True)}
    return {}


def _name_by_partner(flow: _DataFlow, use: _Use, uses_of_label: Mapping[str | None, int]) -> str:
    """The name of a tensor by its partner's, if that is used only once; "" otherwise."""
    label = flow.label.get(use.partner)
    if label is None or uses_of_label[label] != 1:
        return ""
    return f"{label.rpartition('.')[0]}.{use.kind}"


def _put(result: dict[str, Weight], name: str, weight: Weight) -> None:
    if result.setdefault(name, weight) != weight:
        raise CheckpointError(
            f"{name!r} could be {result[name].stored.name!r} or {weight.stored.name!r}"
        )


def _tensor_name(value: str) -> str:
    """The name of a module's tensor, without what optimizers add; "" if it is no such name."""
    name = PREFIXES.sub("", value.removesuffix("_quantized"))
    return name if MODULE.fullmatch(name) else ""


def _add_unexplained(flow: _DataFlow, weights: dict[str, Weight]) -> int:
    """Add tensors of floats whose use is not understood; return the number of others."""
    used = {weight.stored for weight in weights.values()} | flow.scales
    choices = {_input(node, 2) for node in flow.nodes if node.op == "OneHot"}  # its 0 and 1
    used |= {flow.constants[value].stored for value in choices if value in flow.constants}
    left_out = 0
    for weight in {weight.stored: weight for weight in flow.constants.values()}.values():
        stored = weight.stored
        if stored in used:
            continue
        if stored.count > 1 and stored.dtype in QUANTIZED and len(stored.shape) > 1:
            raise CheckpointError(f"{stored.name!r} is quantized in a way that is not read here")
        if stored.count > 1 and stored.dtype in FLOATS:
            _put(weights, stored.name, Weight(stored))
        else:
            left_out += 1
    return left_out


def _notes(graph: OnnxGraph, weights: Mapping[str, Weight], left_out: int) -> Iterator[str]:
    fused = Counter(node.op for node in graph.nodes if node.domain == ONNX_RUNTIME)
    if fused:
        counts = ", ".join(f"{count} {op}" for op, count in sorted(fused.items()))
        yield f"ONNX Runtime's own operations are read as the modules they stand for: {counts}"
    for weight in weights.values():
        if weight.is_row:
            yield (
                f"the graph was exported for {weight.stored.shape[1]} tokens and has no positions "
                f"beyond those: longer texts are cut"
            )
    renamed = sum(weight.stored.name != name for name, weight in weights.items())
    dequantized = len({weight.stored for weight in weights.values() if weight.scale})
    if renamed:
        yield f"{renamed} tensors got their names back from the graph"
    if dequantized:
        yield f"{dequantized} tensors were dequantized to float32"
    if left_out:
        yield f"{left_out} constants that only steer the graph were left out"
