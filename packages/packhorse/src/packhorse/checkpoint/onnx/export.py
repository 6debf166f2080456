"""Write a model as ONNX: the padded graph, for ONNX Runtime and other readers of ONNX.

Each module of the model becomes standard operations of opset 17, in the patterns that runtimes
fuse: products with weights [in, out] with the bias added after, LayerNormalization, GELU by Erf.
Only this graph uses padding: rows of tokens and a mask. A masked token gets the lowest finite
score, so that a row of only padding gives numbers, not NaN.

The weights keep their names in transformers, so that reading the file returns the same tensors.
Tied word scores are computed from the one table. Beyond what protobuf can hold (2 GB), the weights
go to a file beside the model, written one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor, nn

from packhorse import __version__
from packhorse.errors import CheckpointError, MissingExtra
from packhorse.model.bert import AddNorm, Bert, BertEmbeddings, BertLayer, SelfAttention
from packhorse.model.heads import (
    Embed,
    Mlm,
    PooledLabels,
    Pooler,
    ReplacedTokenDetection,
    TokenLabels,
)
from packhorse.model.model import Model

OPSET = 17
IR_VERSION = 8
INLINE_LIMIT = 1_500_000_000  # bytes of weights in the model's own file
ALIGNMENT = 4096  # of weights in the file beside it, which runtimes map into memory
# dtype → TensorProto.DataType, for dtypes that ONNX Runtime computes with on the CPU: it cannot add
# bfloat16, and lacks Erf for float64.
DTYPES = {torch.float32: 1, torch.float16: 10}
INT64 = 7
BOOL = 9
LENGTHS = ("batch", "sequence")
# transformers' names of the scores, for models with two heads that compute scores.
SCORES = {"mlm": "prediction_logits", "nsp": "seq_relationship_logits"}


def write(
    path: Path,
    model: Model,
    tensors: Mapping[str, Tensor],
    *,
    inline_limit: int = INLINE_LIMIT,
) -> None:
    """Write `path`, and `path` + ".data" if the weights exceed `inline_limit` bytes.

    tensors: those of the model under foreign names, sharing its memory (`names.export`).
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingExtra("onnx", "onnx") from error
    large = sum(tensor.nbytes for tensor in tensors.values()) > inline_limit
    with ExitStack() as stack:
        external = path.with_name(f"{path.name}.data") if large else None
        file = stack.enter_context(external.open("wb")) if external else None
        graph = _GraphWriter(onnx, tensors, _dtype(model), file)
        _write_model(graph, model)
        path.write_bytes(graph.finish().SerializeToString())


def _dtype(model: Model) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise CheckpointError(
            f"weights of {names} make no ONNX model that ONNX Runtime runs on the CPU; "
            f"pass --dtype fp32 or --dtype fp16"
        )
    return dtypes.pop()


class _GraphWriter:
    """A graph under construction; values are strings, the names of ONNX."""

    def __init__(
        self,
        onnx: ModuleType,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        external: BinaryIO | None,
    ) -> None:
        self.onnx = onnx
        self.tensors = tensors
        self.dtype = dtype
        self.external = external  # file for the weights; None: in the model's file
        # The exported tensors share the memory of the modules' parameters.
        self.names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        self.transposed: dict[str, bool] = {}  # weights that are written, and their orientation
        self.initializers: dict[str, Any] = {}
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.shapes: list[Any] = []

    def op(self, kind: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """Add an operation and return the name of its result, which is `result` if given."""
        name = f"{kind}_{len(self.nodes)}"
        node = self.onnx.helper.make_node(kind, inputs, [result or name], name=name, **attributes)
        self.nodes.append(node)
        return result or name

    def integers(self, value: int | list[int]) -> str:
        """A constant of one or several integers: an index, a shape."""
        name = f"integers_{value}".replace(" ", "")
        tensor = self.onnx.numpy_helper.from_array(np.array(value, np.int64), name)
        self.initializers.setdefault(name, tensor)
        return name

    def number(self, value: float) -> str:
        """A constant number of the weights' dtype."""
        name = f"number_{value}"
        if name not in self.initializers:
            self._store(name, torch.tensor(value, dtype=self.dtype), inline=True)
        return name

    def weight(self, parameter: Tensor, *, transposed: bool = False) -> str:
        """A weight of the model; with `transposed`, as [in, out]."""
        name = self.names[parameter.data_ptr()]
        if name not in self.transposed:
            self.transposed[name] = transposed
            self._store(name, parameter.t() if transposed else parameter)
        same = self.transposed[name] == transposed
        return name if same else self.op("Transpose", name, perm=[1, 0])

    def _store(self, name: str, tensor: Tensor, inline: bool = False) -> None:
        types = self.onnx
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        proto = types.TensorProto(name=name, data_type=DTYPES[tensor.dtype], dims=tensor.shape)
        if self.external is None or inline:
            proto.raw_data = content.tobytes()
        else:
            self.external.write(bytes(-self.external.tell() % ALIGNMENT))
            entries = {
                "location": Path(self.external.name).name,
                "offset": str(self.external.tell()),
                "length": str(len(content)),
            }
            self.external.write(content.data)
            proto.data_location = types.TensorProto.EXTERNAL
            proto.external_data.extend(
                types.StringStringEntryProto(key=key, value=value) for key, value in entries.items()
            )
        self.initializers[name] = proto

    def input(self, name: str) -> str:
        """Add an input of integers, [batch, sequence]."""
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, INT64, LENGTHS))
        return name

    def output(self, name: str, *shape: str | int) -> None:
        """Declare a value as an output."""
        self.outputs.append(self._described(name, shape))

    def shape(self, name: str, *shape: str | int) -> None:
        """Declare a shape that runtimes cannot infer and need to know to fuse operations."""
        self.shapes.append(self._described(name, shape))

    def _described(self, name: str, shape: tuple[str | int, ...]) -> Any:
        return self.onnx.helper.make_tensor_value_info(name, DTYPES[self.dtype], shape)

    def linear(self, x: str, layer: nn.Linear, result: str = "") -> str:
        """A linear layer: product and bias."""
        return self._affine(x, layer.weight, layer.bias, result)

    def _affine(self, x: str, weight: Tensor, bias: Tensor, result: str = "") -> str:
        product = self.op("MatMul", x, self.weight(weight, transposed=True))
        return self.op("Add", product, self.weight(bias), result=result)

    def split(self, x: str, layer: nn.Linear, count: int) -> list[str]:
        """The results of a linear layer that the file has as `count` separate layers."""
        parts = zip(layer.weight.chunk(count), layer.bias.chunk(count), strict=True)
        return [self._affine(x, weight, bias) for weight, bias in parts]

    def norm(self, x: str, layer: nn.LayerNorm | AddNorm, result: str = "") -> str:
        """A layer norm over the last axis."""
        inputs = (x, self.weight(layer.weight), self.weight(layer.bias))
        return self.op("LayerNormalization", *inputs, result=result, axis=-1, epsilon=layer.eps)

    def activate(self, x: str, activation: str) -> str:
        """An activation, as `model.bert.ACTIVATIONS` computes it."""
        return ACTIVATIONS[activation](self, x)

    def _add_unused(self, name: str) -> None:
        """Add a tensor that no operation uses: as an alias of an equal one if there is one.

        Runtimes warn about initializers that nothing uses.
        """
        tensor = self.tensors[name]
        for written in list(self.transposed):
            equal = self.tensors[written]
            if equal.shape == tensor.shape and torch.equal(equal, tensor):
                self.op("Identity", self.weight(equal), result=name)
                return
        self._store(name, tensor)

    def finish(self) -> Any:
        """The complete ModelProto."""
        for name in [name for name in self.tensors if name not in self.transposed]:
            self._add_unused(name)
        helper = self.onnx.helper
        graph = helper.make_graph(
            self.nodes,
            "packhorse",
            self.inputs,
            self.outputs,
            list(self.initializers.values()),
            value_info=self.shapes,
        )
        return helper.make_model(
            graph,
            producer_name="packhorse",
            producer_version=__version__,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )


def _gelu(graph: _GraphWriter, x: str) -> str:
    erf = graph.op("Erf", graph.op("Div", x, graph.number(math.sqrt(2))))
    both = graph.op("Mul", x, graph.op("Add", erf, graph.number(1.0)))
    return graph.op("Mul", both, graph.number(0.5))


def _gelu_tanh(graph: _GraphWriter, x: str) -> str:
    cube = graph.op("Mul", graph.op("Pow", x, graph.number(3.0)), graph.number(0.044715))
    inner = graph.op("Mul", graph.op("Add", x, cube), graph.number(math.sqrt(2 / math.pi)))
    both = graph.op("Add", graph.op("Tanh", inner), graph.number(1.0))
    return graph.op("Mul", graph.op("Mul", x, both), graph.number(0.5))


ACTIVATIONS: dict[str, Callable[[_GraphWriter, str], str]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda graph, x: graph.op("Relu", x),
    "silu": lambda graph, x: graph.op("Mul", x, graph.op("Sigmoid", x)),
    "tanh": lambda graph, x: graph.op("Tanh", x),
}


def _write_model(graph: _GraphWriter, model: Model) -> None:
    """Add the encoder and all heads to the graph."""
    bert = model.bert
    hidden = _encoder(graph, bert)
    graph.output(hidden, *LENGTHS, bert.config.hidden_size)
    heads = dict(model.heads)
    scored = [name for name in heads if name not in ("pooled", "span", "embed")]
    for name, head in heads.items():
        scores = "logits" if len(scored) == 1 else SCORES.get(name, f"{name}_logits")
        _head(graph, hidden, head, name, scores)


def _encoder(graph: _GraphWriter, bert: Bert) -> str:
    ids = graph.input("input_ids")
    mask = graph.input("attention_mask")
    x = _embed(graph, bert.embed, ids)
    lowest = torch.finfo(graph.dtype).min
    visible = graph.op("Cast", graph.op("Unsqueeze", mask, graph.integers([1, 2])), to=BOOL)
    shift = graph.op("Where", visible, graph.number(0.0), graph.number(lowest))
    for number, layer in enumerate(bert.layers, 1):
        last = number == len(bert.layers)
        x = _layer(graph, x, cast(BertLayer, layer), shift, "last_hidden_state" if last else "")
    return x


def _embed(graph: _GraphWriter, embed: BertEmbeddings, ids: str) -> str:
    x = graph.op("Gather", graph.weight(embed.words.weight), ids)
    if embed.types is not None:
        types = graph.weight(embed.types.weight)
        if embed.types.num_embeddings > 1:
            types = graph.op("Gather", types, graph.input("token_type_ids"))
        x = graph.op("Add", x, types)
    if embed.positions is None or not isinstance(embed.norm, nn.LayerNorm):
        raise CheckpointError("positions that are computed cannot be written as ONNX")
    positions = _after_padding(graph, ids, embed.offset) if embed.offset else _range(graph, ids)
    x = graph.op("Add", x, graph.op("Gather", graph.weight(embed.positions.weight), positions))
    x = graph.norm(x, embed.norm)
    graph.shape(x, *LENGTHS, embed.words.embedding_dim)
    return graph.linear(x, embed.project) if isinstance(embed.project, nn.Linear) else x


def _range(graph: _GraphWriter, ids: str) -> str:
    """0, 1, 2 …, one number per column."""
    length = graph.op("Gather", graph.op("Shape", ids), graph.integers(1))
    return graph.op("Range", graph.integers(0), length, graph.integers(1))


def _after_padding(graph: _GraphWriter, ids: str, offset: int) -> str:
    """RoBERTa's positions, as `model.bert.after_padding` computes them."""
    padding = graph.integers(offset - 1)
    counted = graph.op("Cast", graph.op("Not", graph.op("Equal", ids, padding)), to=INT64)
    numbers = graph.op("CumSum", counted, graph.integers(1))
    return graph.op("Add", graph.op("Mul", numbers, counted), padding)


def _layer(graph: _GraphWriter, x: str, layer: BertLayer, shift: str, result: str) -> str:
    attention = cast("SelfAttention", layer.attention)  # only classic layers are written
    attended = graph.op("Add", x, _attention(graph, x, attention, shift))
    x = graph.norm(attended, layer.attention_norm)
    up = graph.activate(graph.linear(x, layer.up.dense), layer.up.activation)
    return graph.norm(graph.op("Add", x, graph.linear(up, layer.down)), layer.norm, result)


def _attention(graph: _GraphWriter, x: str, attention: SelfAttention, shift: str) -> str:
    count, heads, width = attention.shape
    q, k, v = (
        graph.op("Reshape", part, graph.integers([0, 0, heads, width]))
        for part in graph.split(x, attention.qkv, count)
    )
    q, v = (graph.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, v))
    scores = graph.op("MatMul", q, graph.op("Transpose", k, perm=[0, 2, 3, 1]))
    scores = graph.op("Div", scores, graph.number(math.sqrt(width)))
    weights = graph.op("Softmax", graph.op("Add", scores, shift), axis=-1)
    context = graph.op("Transpose", graph.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    flat = graph.op("Reshape", context, graph.integers([0, 0, heads * width]))
    return graph.linear(flat, attention.out)


def _head(graph: _GraphWriter, hidden: str, head: nn.Module, name: str, scores: str) -> None:
    if isinstance(head, Embed):
        return  # vectors are computed from the hidden states outside the graph
    if isinstance(head, Pooler):
        graph.op("Identity", _pool(graph, hidden, head), result="pooler_output")
        graph.output("pooler_output", LENGTHS[0], head.dense.out_features)
    elif isinstance(head, PooledLabels):
        graph.linear(_pool(graph, hidden, head.pooler), head.dense, scores)
        graph.output(scores, LENGTHS[0], head.dense.out_features)
    elif isinstance(head, Mlm):
        x = graph.activate(graph.linear(hidden, head.dense), head.activation)
        graph.linear(graph.norm(x, head.norm), head.decoder, scores)
        graph.output(scores, *LENGTHS, head.decoder.out_features)
    elif isinstance(head, ReplacedTokenDetection):
        x = graph.activate(graph.linear(hidden, head.dense), head.activation)
        graph.op("Squeeze", graph.linear(x, head.score), graph.integers([2]), result=scores)
        graph.output(scores, *LENGTHS)
    elif isinstance(head, TokenLabels) and name == "span":
        both = graph.linear(hidden, head.dense)
        for number, end in enumerate(("start_logits", "end_logits")):
            graph.op("Gather", both, graph.integers(number), result=end, axis=2)
            graph.output(end, *LENGTHS)
    elif isinstance(head, TokenLabels):
        graph.linear(hidden, head.dense, scores)
        graph.output(scores, *LENGTHS, head.dense.out_features)
    else:
        raise CheckpointError(f"the head {name!r} cannot be written as ONNX")


def _pool(graph: _GraphWriter, hidden: str, pooler: Pooler) -> str:
    first = graph.op("Gather", hidden, graph.integers(0), axis=1)
    return graph.activate(graph.linear(first, pooler.dense), pooler.activation)
