"""ONNX files as the onnx package writes them: every way to hold a tensor, every hint of the graph.

What exporters really write is in test_onnx_exports.py, what is wrong in test_onnx_bad.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from packhorse.checkpoint import onnx as reader
from packhorse.checkpoint.contents import Contents
from packhorse.errors import CheckpointError

Array = np.ndarray[Any, Any]
W = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(4, dtype=np.float32)
SCOPES = "pkg.torch.onnx.name_scopes"


def save(
    folder: Path, nodes: Sequence[NodeProto], tensors: dict[str, Any] | Sequence[TensorProto]
) -> Path:
    """A model of these nodes and tensors."""
    if isinstance(tensors, dict):
        tensors = [numpy_helper.from_array(np.asarray(a), name) for name, a in tensors.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph(nodes, "graph", [x], [y], tensors))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def node(op: str, inputs: str, output: str, name: str = "", scope: str = "", **more: Any):
    """A node; `scope` as torch's newer exporter writes it."""
    built = helper.make_node(op, inputs.split(), [output], name=name, **more)
    if scope:
        modules = scope.split(".")
        names = ["", *(".".join(modules[: n + 1]) for n in range(len(modules))), "linear_3"]
        built.metadata_props.add(key="namespace", value="of no interest")
        built.metadata_props.add(key=SCOPES, value=str(names))
    return built


def read(folder: Path, nodes: Sequence[NodeProto], tensors: dict[str, Any]) -> Contents:
    return reader.read(save(folder, nodes, tensors))


def same(tensor: torch.Tensor, array: Any) -> bool:
    return torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"])
def test_floats(kind: str, raw: bool, tmp_path: Path) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(kind))
    values = np.array([0, -0.0, 1.5, -2, 1e-7, np.inf, 3e4, 2**-14], dtype).reshape(2, 4)
    tensor = (
        numpy_helper.from_array(values, "a.weight")
        if raw
        else helper.make_tensor("a.weight", TensorProto.DataType.Value(kind), (2, 4), values)
    )
    assert tensor.HasField("raw_data") == raw
    result = reader.read(save(tmp_path, [], [tensor])).tensors["a.weight"]
    assert result.shape == (2, 4)
    assert result.view(torch.uint8).numpy().tobytes() == numpy_helper.to_array(tensor).tobytes()


QUANTIZED = ("INT8", "UINT8", "INT16", "UINT16", "INT32")


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("channels", [None, 0, 1, -1])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_dequantized_as_onnx_does(
    kind: str, channels: int | None, raw: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(kind))
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    values = rng.integers(low, high, (3, 4), dtype, endpoint=True)
    shape = () if channels is None else (values.shape[channels],)
    zero = rng.integers(max(low, -100), 100, shape, dtype)
    zero = np.zeros_like(zero) if kind == "INT32" else zero
    scale = rng.random(shape).astype(np.float32)
    arrays = {"a.weight_quantized": values, "s": scale, "z": zero}
    tensors = [
        numpy_helper.from_array(np.asarray(a), name)
        if raw
        else helper.make_tensor(
            name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a.flatten()
        )
        for name, a in arrays.items()
    ]
    axis = {} if channels is None else {"axis": channels}
    path = save(
        tmp_path, [node("DequantizeLinear", "a.weight_quantized s z", "y", **axis)], tensors
    )
    result = reader.read(path)
    assert "1 tensors were dequantized to float32" in result.notes
    want = ReferenceEvaluator(onnx.load(path)).run(None, {"x": W})[0]
    assert result.tensors.keys() == {"a.weight"} and same(result.tensors["a.weight"], want)


def test_long_varints(tmp_path: Path) -> None:
    """More numbers than a chunk holds, of one, two and three bytes."""
    values = (np.arange(700_000) % 40_000).astype(np.uint16).view(np.float16)
    tensor = helper.make_tensor("a.weight", TensorProto.FLOAT16, values.shape, values)
    result = reader.read(save(tmp_path, [], [tensor])).tensors["a.weight"]
    assert result.view(torch.uint8).numpy().tobytes() == values.tobytes()


def test_external_data(tmp_path: Path) -> None:
    tensors = {"a.weight": W, "b.weight": W + 1, "c.weight": W[:0], "d.bias": B}
    path = save(tmp_path, [], tensors)
    model = onnx.load(path)
    (tmp_path / "sub").mkdir()
    for location in ("weights.bin", "sub/weights.bin"):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        onnx.save(copy, path, save_as_external_data=True, location=location, size_threshold=0)
        result = reader.read(path)
        assert result.files == (path, tmp_path / location)
        assert all(same(result.tensors[name], array) for name, array in tensors.items())
        (tmp_path / location).unlink()


@pytest.mark.parametrize("good", [True, False])
def test_checksum_of_external_data(good: bool, tmp_path: Path) -> None:
    content = W.tobytes()
    (tmp_path / "w").write_bytes(content)
    digest = hashlib.sha1(content if good else b"").hexdigest()
    tensor = TensorProto(name="a.weight", data_type=1, dims=W.shape, data_location=1)
    for key, value in {"location": "w", "checksum": digest}.items():
        tensor.external_data.add(key=key, value=value)
    path = save(tmp_path, [], [tensor])
    if good:
        assert same(reader.read(path).tensors["a.weight"], W)
    else:
        with pytest.raises(CheckpointError, match="checksum of w"):
            reader.read(path)


def test_what_steers_the_graph_is_left_out(tmp_path: Path) -> None:
    constant = helper.make_tensor("", TensorProto.FLOAT, (2, 2), np.arange(4.0))
    nodes = [
        helper.make_node("Constant", [], ["e.weight"], value=constant),
        helper.make_node("Constant", [], ["shape"], value_ints=[1, 2]),
        helper.make_node("Constant", [], ["words"], value_strings=["a"]),
    ]
    tensors = {
        "a.weight": W,
        "classifier.bias": np.ones(1, np.float32),
        "half": np.float32(0.5),
        "one": np.ones((1, 1), np.float32),
        "a.position_ids": np.arange(4),
        "mask": np.ones((2, 2), bool),
        "texts": np.array(["a", "b"], object),
        "mystery": B,
    }
    result = read(tmp_path, nodes, tensors)
    assert result.tensors.keys() == {"a.weight", "classifier.bias", "e.weight", "mystery"}
    assert result.notes == ("5 constants that only steer the graph were left out",)
    assert result.format == "onnx" and result.folder == tmp_path and result.config is None


LINEAR: dict[str, tuple[list[NodeProto], dict[str, Array], str]] = {
    "own name, [in, out]": ([node("MatMul", "x m.weight", "y")], {"m.weight": W}, "m"),
    "own name, turned back": (
        [node("Transpose", "m.weight", "t"), node("MatMul", "x t", "y")],
        {"m.weight": W.T},
        "m",
    ),
    "Gemm": ([node("Gemm", "x m.weight m.bias", "y")], {"m.weight": W, "m.bias": B}, "m"),
    "Gemm, transB": ([node("Gemm", "x m.weight", "y", transB=1)], {"m.weight": W.T}, "m"),
    "Gemm in its module": (
        [node("Gemm", "x w b", "y", "/m/0/Gemm", transB=1)],
        {"w": W.T, "b": B},
        "m.0",
    ),
    "beside its bias": (
        [node("MatMul", "x onnx::MatMul_1", "t"), node("Add", "m.a.bias t", "y")],
        {"onnx::MatMul_1": W, "m.a.bias": B},
        "m.a",
    ),
    "bias beside its weight": (
        [node("MatMul", "x m.weight", "t"), node("Add", "t b", "y")],
        {"m.weight": W, "b": B},
        "m",
    ),
    "in a module by path": (
        [node("MatMul", "x w", "t", "/m/layer.0/m/MatMul"), node("Add", "t cls.bias", "y")],
        {"w": W, "cls.bias": B},
        "m.layer.0.m",
    ),
    "below a node that was replaced": (
        [node("Gemm", "x w b", "y", "/m/Gemm/Gemm_fused")],
        {"w": W, "b": B},
        "m",
    ),
    "in a container that is called": (
        [node("MatMul", "x w", "y", "/m/net/net.0/MatMul")],
        {"w": W},
        "m.net.0",
    ),
    "in a module by metadata": (
        [node("MatMul", "x val_7", "t", scope="m.layer.0"), node("Add", "t b", "y")],
        {"val_7": W, "b": B},
        "m.layer.0",
    ),
    "through a cast": (
        [node("Cast", "m.weight", "t", to=1), node("MatMul", "x t", "y")],
        {"m.weight": W.astype(np.float16)},
        "m",
    ),
    "turned twice": (
        [
            node("Transpose", "w", "t", perm=[1, 0]),
            node("Identity", "t", "u"),
            node("Transpose", "u", "v", perm=[0, 1]),
            node("MatMul", "x v", "y", "/m/MatMul"),
        ],
        {"w": W.T},
        "m",
    ),
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear(case: str, tmp_path: Path) -> None:
    """All compute x W + b with W [3, 4]: torch's weight is its transposition."""
    nodes, tensors, module = LINEAR[case]
    result = read(tmp_path, nodes, tensors).tensors
    assert same(result[f"{module}.weight"].float(), W.T)
    assert f"{module}.bias" not in result or same(result[f"{module}.bias"], B)
    biased = any(len(array.shape) == 1 for array in tensors.values())
    assert (f"{module}.bias" in result) == biased


def test_a_shared_bias_tells_nothing(tmp_path: Path) -> None:
    """Exporters let equal biases share one name; without modules, weights keep what they had."""
    nodes = [
        node("MatMul", "x v1", "a"),
        node("Add", "a m.bias", "b"),
        node("MatMul", "x v2", "c"),
        node("Add", "c m.bias", "d"),
    ]
    result = read(tmp_path, nodes, {"v1": W, "v2": W + 1, "m.bias": B}).tensors
    assert result.keys() == {"v1", "v2", "m.bias"} and same(result["v1"], W)


def test_equal_tensors_that_share_a_name(tmp_path: Path) -> None:
    """Each module gets its tensor, in memory of its own."""
    nodes = [
        node("Identity", "n.weight", "m.n.weight"),
        node("LayerNormalization", "x n.weight n.bias", "a", scope="n"),
        node("LayerNormalization", "a m.n.weight n.bias", "b", scope="m.n"),
        node("MatMul", "b v", "c", scope="m.dense"),
        node("Add", "c n.bias", "y", scope="m.dense"),
    ]
    result = read(tmp_path, nodes, {"n.weight": B + 1, "n.bias": B, "v": W}).tensors
    names = {"n.weight", "n.bias", "m.n.weight", "m.n.bias", "m.dense.weight", "m.dense.bias"}
    assert result.keys() == names
    assert same(result["m.n.weight"], B + 1) and same(result["m.dense.bias"], B)
    places = {tensor.data_ptr() for tensor in result.values()}
    assert len(places) == len(result)


def test_tied_words(tmp_path: Path) -> None:
    """Under the name of one module in the file, used by two."""
    nodes = [
        node("Cast", "x", "ids", to=7),
        node("Gather", "head.weight ids", "a", "/m/words/Gather"),
        node("Transpose", "head.weight", "t", perm=[1, 0]),
        node("MatMul", "a t", "y", "/head/MatMul"),
    ]
    result = read(tmp_path, nodes, {"head.weight": W}).tensors
    assert result.keys() == {"head.weight", "m.words.weight"}
    assert same(result["head.weight"], W) and same(result["m.words.weight"], W)


def test_norms_and_embeddings_by_module(tmp_path: Path) -> None:
    nodes = [
        node("Cast", "x", "ids", to=7),
        node("Gather", "v1 ids", "a", "/m/words/Gather"),
        node("LayerNormalization", "a v2 v3", "b", "/m/norm/LayerNormalization"),
        node("Mul", "b v4", "c", "/m/old/Mul"),
        node("Add", "v5 c", "d", "/m/old/Add_1"),
        node("Gather", "x ids", "e", axis=1),
    ]
    tensors = {"v1": W, "v2": B, "v3": B + 1, "v4": B + 2, "v5": B + 3}
    result = read(tmp_path, nodes, tensors).tensors
    names = ("m.words.weight", "m.norm.weight", "m.norm.bias", "m.old.weight", "m.old.bias")
    assert result.keys() == set(names)
    assert all(same(result[name], tensors[f"v{n}"]) for n, name in enumerate(names, 1))


def test_two_candidates_for_a_name(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x v1", "a", "/m/MatMul"), node("MatMul", "x v2", "b", "/m/MatMul_1")]
    with pytest.raises(CheckpointError, match=r"'m\.weight' could be 'v1' or 'v2'"):
        read(tmp_path, nodes, {"v1": W, "v2": W + 1})


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_integer_products(
    channels: bool, named: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """MatMulInteger as quantize_dynamic writes it, its module known or told by the bias."""
    values = rng.integers(-128, 127, (3, 4), np.int8)
    zero = rng.integers(-3, 3, 4 if channels else (), np.int8)
    scale = rng.random(4 if channels else ()).astype(np.float32)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
        node("MatMulInteger", "xq w_quantized xz z", "p", "/m/MatMul_quant" if named else ""),
        node("Cast", "p", "c", to=1),
        node("Mul", "xs s", "both"),
        node("Mul", "c both", "q"),
        node("Add", "m.bias q", "y"),
    ]
    tensors = {"w_quantized": values, "z": zero, "s": scale, "m.bias": B}
    path = save(tmp_path, nodes, tensors)
    result = reader.read(path).tensors
    assert result.keys() == {"m.weight", "m.bias"}
    want = (values.astype(np.float32) - zero) * scale
    assert same(result["m.weight"], want.T)
    # What the weights mean: close to what the graph computes.
    x = rng.random((5, 3)).astype(np.float32)
    got = x @ want + B
    np.testing.assert_allclose(
        got, ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})[0], atol=0.01 * abs(got).max()
    )


def test_quantized_embeddings(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.uint8).reshape(3, 4)
    nodes = [
        node("Cast", "x", "ids", to=7),
        node("Gather", "m.weight_quantized ids", "g"),
        node("DequantizeLinear", "g s z", "y"),
    ]
    tensors = {"m.weight_quantized": values, "s": np.float32(0.25), "z": np.uint8(3)}
    result = read(tmp_path, nodes, tensors).tensors
    assert result.keys() == {"m.weight"}
    assert same(result["m.weight"], (values.astype(np.float32) - 3) / 4)


def test_quantized_by_a_product(tmp_path: Path) -> None:
    """int8, cast and multiplied with a scale that has as many axes."""
    values = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    scale = np.array([[1.0], [2.0], [4.0]], np.float32)
    nodes = [
        node("Cast", "q", "f", to=1),
        node("Mul", "f s", "w"),
        node("MatMul", "x w", "t"),
        node("Add", "t m.bias", "y"),
    ]
    result = read(tmp_path, nodes, {"q": values, "s": scale, "m.bias": B}).tensors
    assert result.keys() == {"m.weight", "m.bias"}
    assert same(result["m.weight"], (values * scale).T)


def test_half_precision_stays(tmp_path: Path) -> None:
    tensors = {"m.weight": W.astype(np.float16)}
    result = read(tmp_path, [node("MatMul", "x m.weight", "y")], tensors).tensors
    assert result["m.weight"].dtype == torch.float16


def test_sniff(tmp_path: Path) -> None:
    path = save(tmp_path, [], {"a.weight": W})
    content = path.read_bytes()
    (tmp_path / "half").write_bytes(content[: len(content) // 2])
    others = {
        "saved_model.pb": b"\x08\x01\x12\x04\x0a\x02\x08\x01",
        "frozen.pb": b"\x0a\x05\x0a\x01x\x12\x00",
        "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
        "pytorch_model.bin": b"PK\x03\x04\x00\x00",
        "notes.txt": b"Nothing of interest: \xff\xff",
        "empty": b"",
    }
    assert reader.sniff(path)
    assert reader.sniff(tmp_path / "half")  # so that it is reported as what it was
    for name, head in others.items():
        (tmp_path / name).write_bytes(head)
        assert not reader.sniff(tmp_path / name), name
    assert not reader.sniff(tmp_path) and not reader.sniff(tmp_path / "nothing")
