"""Graphs that optimizers and quantizers have rewritten: ONNX Runtime computes what we load of them.

The optimizers are those of ONNX Runtime and of onnxruntime.transformers, which run here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    QuantFormat,
)
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model
from torch import Tensor, nn
from torch.testing import assert_close

from packhorse.checkpoint import load
from packhorse.checkpoint import onnx as reader
from packhorse.checkpoint.inspection import inspect
from packhorse.errors import CheckpointError
from packhorse.packing.batch import Packed

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48} | {
    key: SIZES[key] for key in ("vocab_size", "max_position_embeddings")
}
CONFIG = SIZES | {"model_type": "bert"}
INPUTS = ["input_ids", "attention_mask", "token_type_ids"]
LENGTH = 9


class Inner(nn.Module):
    """A model that takes its inputs in the order of INPUTS and gives hidden states first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Any:
        named = {} if types is None else {"token_type_ids": types}
        return self.inner(input_ids=ids, attention_mask=mask, **named)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    onnxruntime.set_default_logger_severity(4)
    logging.disable(logging.WARNING)  # the optimizers tell of every node
    yield
    logging.disable(logging.NOTSET)


def make(transformers: ModuleType, kind: str = "Bert", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **(DISTIL if kind == "DistilBert" else SIZES), **settings, return_dict=False
    )
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():  # zeros and ones would hide a bias or a norm that went astray
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def export(model: nn.Module, to: Path, *, dynamo: bool = False, **settings: Any) -> Path:
    inputs = INPUTS[:2] if "DistilBert" in type(model).__name__ else INPUTS
    ids = torch.randint(0, 50, (2, LENGTH))
    args = (ids, torch.ones_like(ids), torch.zeros_like(ids))[: len(inputs)]
    if not dynamo:
        axes = {0: "batch", 1: "sequence"}
        settings = {"dynamic_axes": dict.fromkeys(inputs, axes), **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter itself
        torch.onnx.export(
            Inner(model),
            args,
            str(to),
            input_names=inputs,
            dynamo=dynamo,
            verbose=False,
            **settings,
        )
    return to


@pytest.fixture(scope="module")
def plain(transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph as torch writes it, with attention as single operations, as optimizers know it."""
    folder = tmp_path_factory.mktemp("plain")
    return export(make(transformers, attn_implementation="eager"), folder / "model.onnx")


def optimized(plain: Path, to: Path, **options: bool) -> Path:
    """The graph after onnxruntime.transformers.optimizer; options: attributes of FusionOptions."""
    fusions = FusionOptions("bert")
    for name, value in options.items():
        setattr(fusions, name, value)
    model = optimize_model(
        str(plain), "bert", num_heads=4, hidden_size=32, optimization_options=fusions, opt_level=0
    )
    model.save_model_to_file(str(to))
    return to


def extended(plain: Path, to: Path) -> Path:
    """The graph after ONNX Runtime's own optimizer, with all fusions for a CPU."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(to)
    onnxruntime.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
    return to


def operations(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


def theirs(path: Path, lengths: tuple[int, ...]) -> tuple[Tensor, Packed]:
    """The hidden states that ONNX Runtime computes, of real tokens, and the same batch packed."""
    rng = np.random.default_rng(1)
    rows = [SimpleNamespace(ids=rng.integers(0, 50, n), types=np.arange(n) % 2) for n in lengths]
    padded = {key: np.zeros((len(rows), LENGTH), np.int64) for key in INPUTS}
    for number, row in enumerate(rows):
        for key, values in zip(INPUTS, (row.ids, 1, row.types), strict=True):
            padded[key][number, : len(row.ids)] = values
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    types = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
    fed = {
        value.name: padded[value.name].astype(types[value.type]) for value in session.get_inputs()
    }
    hidden = session.run(None, fed)[0]
    if "token_type_ids" not in fed:
        rows = [SimpleNamespace(ids=row.ids, types=np.zeros_like(row.ids)) for row in rows]
    tokens = [torch.from_numpy(np.array(hidden)[i, :n]) for i, n in enumerate(lengths)]
    return torch.cat(tokens), Packed.build(rows)  # pyright: ignore[reportArgumentType]


def ours(path: Path, packed: Packed, config: dict[str, Any] = CONFIG) -> Tensor:
    model = load(path, config=config).model
    with torch.inference_mode():
        return model.bert(packed)


def check(path: Path, config: dict[str, Any] = CONFIG, lengths: tuple[int, ...] = (9, 4)) -> None:
    want, packed = theirs(path, lengths)
    assert_close(ours(path, packed, config), want, atol=1e-5, rtol=0)


FUSIONS: dict[str, dict[str, bool]] = {
    "Attention": {},
    "MultiHeadAttention": {"use_multi_head_attention": True},
    "FastGelu": {"enable_gelu_approximation": True},
}


@pytest.mark.parametrize("op", FUSIONS)
def test_transformers_optimizer(op: str, plain: Path, tmp_path: Path) -> None:
    path = optimized(plain, tmp_path / "model.onnx", **FUSIONS[op])
    assert {op, "EmbedLayerNormalization", "SkipLayerNormalization"} <= operations(path)
    check(path)
    weights = reader.read(plain).tensors  # the same, bit for bit
    result = reader.read(path).tensors
    assert result.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in result.items())


def test_queries_and_keys_change_places(plain: Path, tmp_path: Path) -> None:
    """The control: other thirds of the fused weight are another model."""
    path = optimized(plain, tmp_path / "model.onnx")
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == "Attention_0_qkv_weight":
            parts = np.split(numpy_helper.to_array(tensor), 3, axis=1)
            turned = np.concatenate([parts[1], parts[0], parts[2]], axis=1)
            tensor.CopyFrom(numpy_helper.from_array(turned, tensor.name))
    onnx.save(model, tmp_path / "turned.onnx")
    want, packed = theirs(path, (9, 4))
    assert not torch.allclose(ours(tmp_path / "turned.onnx", packed), want, atol=1e-3)
    check(tmp_path / "turned.onnx")


def test_form_of_gelu_is_that_of_the_graph(plain: Path, tmp_path: Path) -> None:
    path = optimized(plain, tmp_path / "model.onnx", enable_gelu_approximation=True)
    assert load(path, config=CONFIG).gelu.form == "tanh"
    assert load(plain, config=CONFIG).gelu.form == "erf"
    want, packed = theirs(path, (9, 4))
    exact = load(path, config=CONFIG, gelu="erf").model
    with torch.inference_mode():
        assert not torch.allclose(exact.bert(packed), want, atol=1e-5)


def test_distilbert(transformers: ModuleType, tmp_path: Path) -> None:
    """Its projections have other names, which the module after the attention tells."""
    model = make(transformers, "DistilBert", attn_implementation="eager")
    path = export(model, tmp_path / "plain.onnx")
    config = DISTIL | {"model_type": "distilbert"}
    fused = optimized(path, tmp_path / "fused.onnx")
    assert "Attention" in operations(fused)
    check(fused, config)
    check(extended(path, tmp_path / "extended.onnx"), config)


def test_onnx_runtimes_own_optimizer(plain: Path, tmp_path: Path) -> None:
    path = extended(plain, tmp_path / "model.onnx")
    assert {"FusedMatMul", "BiasGelu"} <= operations(path)
    check(path)


@pytest.mark.parametrize("opset", [pytest.param(18, marks=pytest.mark.slow), 23])
def test_newer_exporter(opset: int, transformers: ModuleType, tmp_path: Path) -> None:
    """Attention of opset 23, one length only, and both after ONNX Runtime's optimizer."""
    path = tmp_path / "static.onnx"
    export(make(transformers), path, dynamo=True, opset_version=opset, external_data=False)
    assert ("Attention" in operations(path)) == (opset == 23)
    for graph in (path, extended(path, tmp_path / "fused.onnx")):
        checkpoint = load(graph, config=CONFIG)
        assert checkpoint.max_length == checkpoint.config.max_positions == LENGTH
        assert any("exported for 9 tokens" in note for note in checkpoint.notes)
        check(graph, lengths=(LENGTH, LENGTH))


NBITS = [(4, True), (4, False), (8, False), (2, False)]


@pytest.mark.parametrize(("bits", "symmetric"), NBITS)
def test_few_bits(bits: int, symmetric: bool, plain: Path, tmp_path: Path) -> None:
    quantized = quantize(plain, tmp_path / "model.onnx", bits, symmetric)
    assert "MatMulNBits" in operations(quantized)
    check(quantized)
    check(quantize(optimized(plain, tmp_path / "fused.onnx"), quantized, bits, symmetric))


def test_four_bits_as_qdq(plain: Path, tmp_path: Path) -> None:
    path = quantize(plain, tmp_path / "model.onnx", 4, False, QuantFormat.QDQ)
    tensors = onnx.load(path).graph.initializer
    assert {TensorProto.UINT4, TensorProto.INT4} & {tensor.data_type for tensor in tensors}
    check(path)


def quantize(
    plain: Path, to: Path, bits: int, symmetric: bool, kind: QuantFormat = QuantFormat.QOperator
) -> Path:
    settings: dict[str, Any] = {"block_size": 16, "is_symmetric": symmetric, "bits": bits}
    config = DefaultWeightOnlyQuantConfig(**settings, quant_format=kind)
    quantizer = MatMulNBitsQuantizer(onnx.load(plain), algo_config=config)
    quantizer.process()
    onnx.save(quantizer.model.model, to)  # pyright: ignore
    return to


@pytest.mark.parametrize("fused", [True, False])
def test_dynamically_quantized_after_fusion(fused: bool, plain: Path, tmp_path: Path) -> None:
    """Weights of whole numbers come back as ONNX Runtime's own arithmetic has them."""
    graph = optimized(plain, tmp_path / "fused.onnx") if fused else plain
    path = tmp_path / "int8.onnx"
    quantize_dynamic(graph, path, extra_options={"MatMulConstBOnly": True, "DefaultTensorType": 1})
    again = extended(path, tmp_path / "again.onnx")
    assert {"QAttention", "QEmbedLayerNormalization"} <= operations(path) or not fused
    assert {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"} & operations(again)
    want = reader.read(plain).tensors
    for tensors in (reader.read(path).tensors, reader.read(again).tensors):
        assert tensors.keys() == want.keys()
        for name, tensor in tensors.items():
            step = 2 * want[name].abs().max() / 254  # of eight bits around zero
            assert (tensor - want[name]).abs().max() <= 1.01 * step, name
    hidden, packed = theirs(path, (9, 4))
    # Activations are whole numbers there, floats here: 0.05. Without VNNI it also cuts sums of two
    # products off at 16 bits ("saturation" in its documents): 0.076.
    assert_close(ours(path, packed), hidden, atol=0.1, rtol=0)
    other = {name: tensor.roll(1, 0) for name, tensor in want.items()}
    assert any((tensors[name] - other[name]).abs().max() > 0.1 for name in want)


def test_inspect_tells_what_was_fused(plain: Path, tmp_path: Path) -> None:
    inspection = inspect(optimized(plain, tmp_path / "model.onnx"), config=CONFIG)
    assert inspection.runs
    notes = " ".join(inspection.notes)
    assert "2 Attention, 2 BiasGelu, 1 EmbedLayerNormalization, 4 SkipLayerNormalization" in notes


def graph(folder: Path, nodes: list[NodeProto], tensors: dict[str, Any]) -> Path:
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph(nodes, "graph", [value], [result], stored))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def node(op: str, inputs: str, output: str, name: str, **attributes: Any) -> NodeProto:
    inputs_of_node = ["" if value == "-" else value for value in inputs.split()]
    return helper.make_node(
        op, inputs_of_node, [output], name=name, domain="com.microsoft", **attributes
    )


Q = np.zeros((4, 2, 8), np.uint8)
SCALES = np.ones((4, 2), np.float32)
SHAPE = {"K": 32, "N": 4, "bits": 4, "block_size": 16}
BAD: dict[str, tuple[Callable[[], tuple[list[NodeProto], dict[str, Any]]], str]] = {
    "an attention before a module of no known model": (
        lambda: (
            [
                node("Attention", "x w", "a", "fused"),
                node("MatMul", "a o", "y", "/strange/MatMul"),
            ],
            {"w": np.ones((4, 12), np.float32), "o": np.ones((4, 4), np.float32)},
        ),
        "'fused' is a Attention before 'strange', which belongs to no model",
    ),
    "an attention that ends the graph": (
        lambda: ([node("Attention", "x w", "y", "fused")], {"w": np.ones((4, 12), np.float32)}),
        "'fused': the result of Attention is not projected",
    ),
    "no thirds": (
        lambda: (
            [
                node("Attention", "x w", "a", "fused"),
                node("MatMul", "a o", "y", "/encoder/layer.0/attention/output/dense/MatMul"),
            ],
            {"w": np.ones((4, 13), np.float32), "o": np.ones((4, 4), np.float32)},
        ),
        "'w' has 13 columns, which are no queries, keys and values of one size",
    ),
    "a cycle after an attention": (
        lambda: (
            [
                node("Attention", "x w", "a", "fused"),
                node("Reshape", "a c", "b", "there"),
                node("Reshape", "b", "c", "back"),
            ],
            {"w": np.ones((4, 12), np.float32)},
        ),
        "'fused': the result of Attention is not projected",
    ),
    "a trillion ways after an attention": (
        lambda: (
            [
                node("Attention", "x w", "a0", "fused"),
                *(node("Cast", f"a{n}", f"b{n}", "") for n in range(40)),
                *(node("Cast", f"a{n}", f"c{n}", "") for n in range(40)),
                *(node("Reshape", f"b{n} c{n}", f"a{n + 1}", "") for n in range(40)),
            ],
            {"w": np.ones((4, 12), np.float32)},
        ),
        "'fused': the result of Attention is not projected",
    ),
    "a bias without axes": (
        lambda: (
            [
                node("Attention", "x w b", "a", "fused"),
                node("MatMul", "a o", "y", "/encoder/layer.0/attention/output/dense/MatMul"),
            ],
            {"w": np.ones((4, 12), np.float32), "b": np.float32(1), "o": np.ones((4, 4))},
        ),
        "'b' has 0 columns",
    ),
    "blocks that do not fill their bytes": (
        lambda: (
            [node("MatMulNBits", "x q s", "y", "few", K=5, N=4, bits=2, block_size=5)],
            {"q": np.zeros((4, 1, 1), np.uint8), "s": np.ones((4, 1), np.float32)},
        ),
        "'few': MatMulNBits holds weights in a form not read here",
    ),
    "bits that do not exist": (
        lambda: (
            [node("MatMulNBits", "x q s", "y", "few", **SHAPE | {"bits": 3})],
            {"q": Q, "s": SCALES},
        ),
        "'few': MatMulNBits holds weights in a form not read here",
    ),
    "columns in another order": (
        lambda: (
            [node("MatMulNBits", "x q s - g", "y", "few", **SHAPE)],
            {"q": Q, "s": SCALES, "g": np.arange(32, dtype=np.int32)},
        ),
        "'few': MatMulNBits holds weights in a form not read here",
    ),
    "too few scales": (
        lambda: (
            [node("MatMulNBits", "x q s", "y", "/a/MatMul", **SHAPE)],
            {"q": Q, "s": SCALES[:3]},
        ),
        "'q': 6 scales for 8 blocks",
    ),
    "too few zero points": (
        lambda: (
            [node("MatMulNBits", "x q s z", "y", "/a/MatMul", **SHAPE)],
            {"q": Q, "s": SCALES, "z": np.zeros((3, 1), np.uint8)},
        ),
        "'q': 3 bytes of zero points for 4 rows",
    ),
    "a quantized product with a quantized bias": (
        lambda: ([node("QGemm", "x", "y", "product")], {}),
        "'product' is a QGemm, a quantized product whose bias .* before it was optimized",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_understood_is_named(case: str, tmp_path: Path) -> None:
    build, message = BAD[case]
    path = graph(tmp_path, *build())
    with pytest.raises(CheckpointError, match=message):
        reader.read(path)


@pytest.mark.parametrize("block", [6, 7, 1 << 62])
def test_a_block_may_be_larger_than_the_axis(block: int) -> None:
    numbers = torch.arange(12, dtype=torch.int8).reshape(2, 6)
    scale = torch.tensor([[2.0], [3.0]])
    assert torch.equal(reader.dequantize(numbers, scale, None, 1, block), numbers * scale)
    one = reader.dequantize(numbers[0, 1], scale[0, 0], None, 0, block)
    assert one == 2 and not one.ndim
