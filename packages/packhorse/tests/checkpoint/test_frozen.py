"""Frozen graphs: every way in which TensorFlow writes one, with TensorFlow as the reference."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.checkpoint import load
from packhorse.checkpoint.tensorflow import frozen, graphdef
from packhorse.errors import CheckpointError
from packhorse.packing.batch import Packed
from packhorse.wire import write_field as field
from packhorse.wire import write_fixed32, write_varint


def same(result: dict[str, torch.Tensor], weights: dict[str, np.ndarray]) -> bool:
    """The same names, shapes, dtypes and bits."""
    assert result.keys() == weights.keys()
    return all(
        result[name].numpy().dtype == value.dtype and np.array_equal(result[name].numpy(), value)
        for name, value in weights.items()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"resource": True},
        {"heads": ("squad", "classifier"), "slots": "adam", "step": 3},
        {"dtype": "float16"},
        {"dtype": "float64", "resource": True},
    ],
)
def test_what_tensorflow_1_freezes(
    settings: dict[str, Any], tf: ModuleType, tf_bert: ModuleType, tmp_path: Path
) -> None:
    built = tf_bert.build(tf, **settings)
    path = tf_bert.freeze(tf, built, tmp_path / "frozen.pb")
    result = frozen.read(path)
    assert result.format == "frozen" and result.folder == tmp_path and result.files == (path,)
    assert same(result.tensors, built.weights)
    assert result.config is None and not result.slots and result.step is None
    assert len(result.notes) == 1 and "constants that are no weights" in result.notes[0]
    assert frozen.sniff(path)


def test_only_what_the_outputs_need(tf: ModuleType, tf_bert: ModuleType, tmp_path: Path) -> None:
    built = tf_bert.build(tf)
    path = tf_bert.freeze(tf, built, tmp_path / "frozen.pb", ["sequence_output"])
    names = {name for name in built.weights if "pooler" not in name and not name.startswith("cls")}
    assert frozen.read(path).tensors.keys() == names


def test_an_import_keeps_its_prefix(tf: ModuleType, tf_bert: ModuleType, tmp_path: Path) -> None:
    built = tf_bert.build(tf, {"num_hidden_layers": 1}, heads=())
    tf_bert.freeze(tf, built, tmp_path / "frozen.pb")
    with tf.Graph().as_default() as graph:
        definition = tf.compat.v1.GraphDef.FromString((tmp_path / "frozen.pb").read_bytes())
        tf.import_graph_def(definition)
    (tmp_path / "imported.pb").write_bytes(graph.as_graph_def().SerializeToString())
    result = frozen.read(tmp_path / "imported.pb").tensors
    assert same(result, {f"import/{name}": value for name, value in built.weights.items()})


@pytest.mark.parametrize("resource", [False, True])
def test_what_tensorflow_2_freezes_of_tensorflow_1(
    resource: bool, tf: ModuleType, tf_bert: ModuleType, tmp_path: Path
) -> None:
    built = tf_bert.build(tf, {"num_hidden_layers": 1}, resource=resource)
    with built.graph.as_default():
        v1 = tf.compat.v1.saved_model
        v1.simple_save(built.session, str(tmp_path / "saved"), built.inputs, built.outputs)
    assert not frozen.sniff(tmp_path / "saved" / "saved_model.pb")
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    path = freeze_v2(loaded.signatures["serving_default"], tmp_path)
    assert same(frozen.read(path).tensors, built.weights)


def freeze_v2(function: Any, folder: Path) -> Path:
    from tensorflow.python.framework import convert_to_constants

    built = convert_to_constants.convert_variables_to_constants_v2(function)
    (folder / "frozen.pb").write_bytes(built.graph.as_graph_def().SerializeToString())
    return folder / "frozen.pb"


def test_what_tensorflow_2_freezes(tf: ModuleType, tmp_path: Path) -> None:
    """A function forgets the names of its variables; where they are used tells what they are."""
    rng = np.random.default_rng(0)
    shapes = {"words": (5, 3), "dense/kernel": (3, 4), "dense/bias": (4,), "norm/gamma": (4,)}
    shapes["norm/beta"] = (4,)
    values = {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    held = {name: tf.Variable(value, name=name) for name, value in values.items()}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def run(ids: Any) -> Any:
        x = tf.gather(held["words"], ids)
        with tf.name_scope("dense"):
            x = tf.nn.bias_add(tf.matmul(x, held["dense/kernel"]), held["dense/bias"])
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        with tf.name_scope("norm"):
            return tf.nn.batch_normalization(
                x, mean, variance, held["norm/beta"], held["norm/gamma"], 1e-12
            )

    result = frozen.read(freeze_v2(run.get_concrete_function(), tmp_path))
    values["Gather/resource"] = values.pop("words")  # nothing says what it was called
    assert same(result.tensors, values)
    assert any("4 weights are called after what reads them" in note for note in result.notes)


def graph(tf: ModuleType, path: Path, *nodes: tuple[str, str, list[str], Any]) -> frozen.Contents:
    """What is read of a graph of these nodes: name, operation, inputs, the value of a Const."""
    built = tf.compat.v1.GraphDef()
    for name, op, inputs, value in nodes:
        node = built.node.add(name=name, op=op, input=inputs)
        if value is not None:
            node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    (path / "graph.pb").write_bytes(built.SerializeToString())
    return frozen.read(path / "graph.pb")


def test_names(tf: ModuleType, tmp_path: Path) -> None:
    ones = np.ones((2, 3), "f4")
    result = graph(
        tf,
        tmp_path,
        ("a/kernel", "Const", [], ones),
        ("a/kernel/read", "Identity", ["a/kernel"], None),
        ("output", "Identity", ["a/kernel/read"], None),  # no name for a weight that has one
        ("b/kernel_const", "Const", [], ones * 2),
        ("b/kernel", "Identity", ["b/kernel_const:0"], None),
        ("Const_7", "Const", [], ones * 3),
        ("c/kernel/Read/ReadVariableOp", "Identity", ["Const_7"], None),
        ("x/ReadVariableOp/resource", "Const", [], ones * 4),
        ("x/ReadVariableOp", "Identity", ["x/ReadVariableOp/resource"], None),
        ("d/MatMul/ReadVariableOp/resource", "Const", [], ones * 5),
        ("d/MatMul_1/ReadVariableOp/resource", "Const", [], ones * 6),  # would be d/kernel too
        ("d/MatMul/ReadVariableOp", "Identity", ["d/MatMul/ReadVariableOp/resource"], None),
        ("d/MatMul_1/ReadVariableOp", "Identity", ["d/MatMul_1/ReadVariableOp/resource"], None),
        ("e/beta", "Const", [], ones[0] * 7),  # read by nothing, and still a weight
        ("bert/encoder/ones", "Const", [], ones * 8),  # arithmetic
        ("bert/encoder/mul", "Mul", ["bert/encoder/ones", "a/kernel/read"], None),
        ("mul/y", "Const", [], np.float32(0.5)),
        ("counts", "Const", [], np.arange(3)),
        ("names", "Const", [], np.array(["a", "b"])),
    )
    assert {name: float(value.flatten()[0]) for name, value in result.tensors.items()} == {
        "a/kernel": 1,
        "b/kernel": 2,
        "c/kernel": 3,
        "x/ReadVariableOp/resource": 4,
        "d/MatMul/ReadVariableOp/resource": 5,
        "d/MatMul_1/ReadVariableOp/resource": 6,
        "e/beta": 7,
    }
    assert result.notes == (
        "4 constants that are no weights (numbers, shapes, texts) are left out",
        "2 weights are called after what reads them, as b/kernel_const is b/kernel",
    )


def test_a_long_chain_of_identities(tf: ModuleType, tmp_path: Path) -> None:
    chain = [(f"Identity_{n}", "Identity", [f"Identity_{n - 1}"], None) for n in range(1, 3_000)]
    first = ("Identity_0", "Identity", ["Const"], None)
    last = ("w", "Identity", ["Identity_2999"], None)
    nodes = [("Const", "Const", [], np.ones(2, "f4")), last, *reversed(chain), first]
    assert graph(tf, tmp_path, *nodes).tensors.keys() == {"w"}


def read_tensor(number: int, *parts: bytes) -> torch.Tensor:
    """The tensor in a TensorProto of these parts."""
    value = field(8, field(1, number) + b"".join(parts))
    return graphdef.read(io.BytesIO(value), graphdef.stored(value, (0, len(value)), number))


def bits(array: Any) -> bytes:
    return array.view(torch.uint8).numpy().tobytes() if torch.is_tensor(array) else array.tobytes()


def packed(values: list[int], width: int | None) -> bytes:
    if width:
        return b"".join(value.to_bytes(width, "little") for value in values)
    return b"".join(map(write_varint, values))


def written(number: int, values: list[int], way: str) -> bytes:
    """Values (of floats their bits) as a field of a TensorProto."""
    place = graphdef.DTYPES[number][1]
    width = {5: 4, 6: 8}.get(place)

    def one(value: int) -> bytes:
        if width is None:
            return field(place, value)
        if width == 4:
            return write_fixed32(place, value)
        return write_varint(place << 3 | 1) + value.to_bytes(8, "little")

    if way == "packed":
        return field(place, packed(values, width))
    if way == "unpacked":
        return b"".join(map(one, values))
    return (
        one(values[0]) + field(place, packed(values[1:3], width)) + b"".join(map(one, values[3:]))
    )


@pytest.mark.parametrize("count", [6, 3, 1, 0])
@pytest.mark.parametrize("way", ["packed", "unpacked", "mixed"])
@pytest.mark.parametrize("number", graphdef.DTYPES)
def test_listed_values(number: int, way: str, count: int, tf: ModuleType) -> None:
    """Of all the values, of some (the last one repeated), of none (zeros)."""
    dtype = graphdef.DTYPES[number][0]
    if dtype.is_floating_point:
        source = torch.tensor([1.5, -2, 0, float("nan"), float("-inf"), 1e-4], dtype=dtype)
        whole = source.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        values = [value % (1 << 8 * dtype.itemsize) for value in whole.tolist()]
    elif dtype is torch.bool:
        values = [1, 0, 1, 1, 0, 1]
    else:
        limits = torch.iinfo(dtype)
        values = [limits.max, limits.min, 0, 1, 127, 100]
    shape = field(2, field(2, field(1, 2)) + field(2, field(1, 3)))
    parts = written(number, values[:count], way) if count else b""
    proto = field(1, number) + shape + parts
    want = tf.make_ndarray(type(tf.make_tensor_proto(0)).FromString(proto))
    result = read_tensor(number, shape, parts)
    assert result.dtype == dtype and result.shape == want.shape and bits(result) == bits(want)


@pytest.mark.parametrize("number", graphdef.DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 1)])
def test_content(number: int, shape: tuple[int, ...], tf: ModuleType) -> None:
    values = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    want = values.astype(tf.as_dtype(number).as_numpy_dtype)
    as_it_likes, as_bytes = tf.make_tensor_proto(want), tf.make_tensor_proto(want)
    for values_field in ("int_val", "bool_val", "half_val", "float_val", "double_val", "int64_val"):
        as_bytes.ClearField(values_field)
    as_bytes.tensor_content = want.tobytes()
    for proto in (as_it_likes, as_bytes):
        value = field(8, proto.SerializeToString())
        result = graphdef.read(io.BytesIO(value), graphdef.stored(value, (0, len(value)), number))
        assert result.shape == want.shape and bits(result.reshape(-1)) == bits(want)


@pytest.mark.parametrize("number", [1, 14, 19, 9])
def test_more_values_than_a_window(number: int, tf: ModuleType) -> None:
    """Windows end within a number of several bytes, wherever that is."""
    dtype, place = graphdef.DTYPES[number]
    rng = np.random.default_rng(number)
    top = 1 << (63 if number == 9 else 8 * dtype.itemsize)
    values = (rng.integers(0, top, 150_000) >> rng.integers(0, 9, 150_000)).tolist()
    content = packed(values, 4 if place == 5 else None)
    assert len(content) > graphdef.WINDOW
    result = read_tensor(number, field(2, field(2, field(1, len(values)))), field(place, content))
    kind = {2: torch.uint16, 4: torch.uint32, 8: torch.int64}[dtype.itemsize]
    assert result.view(kind).tolist() == values


def test_the_layout_is_tensorflows(tf: ModuleType) -> None:
    """The messages and their fields, as TensorFlow's own descriptors have them."""
    checked: set[str] = set()

    def compare(message: str, descriptor: Any) -> None:
        if descriptor.full_name in checked:
            return
        checked.add(descriptor.full_name)
        fields = {item.number: item for item in descriptor.fields}
        for number, item in fields.items():
            text = graphdef.SCHEMA[message].get(number)
            if item.message_type is not None:
                compare(str(text), item.message_type)
            elif item.type == item.TYPE_STRING:
                assert text == graphdef.TEXT, (message, number)
            elif not item.is_repeated or item.type == item.TYPE_BYTES:
                assert text is None, (message, number)
            else:
                fixed = {item.TYPE_FLOAT: "4", item.TYPE_DOUBLE: "8", item.TYPE_FIXED64: "8"}
                assert text == fixed.get(item.type, graphdef.VARINTS), (message, number)
        assert graphdef.SCHEMA[message].keys() <= fields.keys()

    compare("GraphDef", tf.compat.v1.GraphDef.DESCRIPTOR)
    assert len(checked) > 30


def test_sniffing(tf: ModuleType, tf_bert: ModuleType, tmp_path: Path) -> None:
    built = tf_bert.build(tf, {"num_hidden_layers": 1}, heads=())
    prefix = tf_bert.save(tf, built, tmp_path / "model.ckpt")
    tf_bert.freeze(tf, built, tmp_path / "frozen.pb")
    tf.io.write_graph(built.graph, str(tmp_path), "graph.pbtxt")
    result = {path.name for path in tmp_path.iterdir() if frozen.sniff(path)}
    assert result == {"frozen.pb"}
    assert not frozen.sniff(tmp_path) and not frozen.sniff(prefix)


def test_weights_are_in_memory_once(
    rng: np.random.Generator, tf: ModuleType, tmp_path: Path
) -> None:
    """160 MB of weights take 160 MB, not twice as much, and they are aligned."""
    tables = [rng.random((10_000, 1_000), "f4") for _ in range(4)]
    names = "abcd"
    graph(tf, tmp_path, *((n, "Const", [], t) for n, t in zip(names, tables, strict=True)))
    script = """
import resource, sys
from pathlib import Path
import torch
from packhorse.checkpoint.tensorflow import frozen
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
tensors = frozen.read(Path(sys.argv[1])).tensors
assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())
print(peak() - before, sum(tensor.nbytes for tensor in tensors.values()))
"""
    completed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "graph.pb")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    grown, weights = map(int, completed.stdout.split())
    assert weights == 160_000_000 and grown < weights + (64 << 20)


def grappled(tf: ModuleType, path: Path, outputs: list[str], to: Path) -> Path:
    """The graph after TensorFlow's optimizer, with constants folded and operations fused."""
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.grappler import tf_optimizer

    definition = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    for node in definition.node:
        node.device = "/device:CPU:0"  # it fuses only what runs there
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    meta = tf.compat.v1.train.export_meta_graph(graph_def=definition, graph=graph)
    meta.collection_def["train_op"].node_list.value.extend(outputs)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.optimizers.extend(["constfold", "arithmetic", "remap"])
    config.graph_options.rewrite_options.min_graph_nodes = -1
    to.write_bytes(tf_optimizer.OptimizeGraph(config, meta).SerializeToString())
    return to


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("heads", [("mlm", "nsp"), ("squad",)])
def test_what_grappler_optimizes(
    heads: tuple[str, ...], partitions: int, tf: ModuleType, tf_bert: ModuleType, tmp_path: Path
) -> None:
    built = tf_bert.build(tf, heads=heads, partitions=partitions)
    plain = tf_bert.freeze(tf, built, tmp_path / "frozen.pb")
    assert same(frozen.read(plain).tensors, built.weights)
    path = grappled(tf, plain, list(built.outputs), tmp_path / "grappled.pb")
    names = [node.name for node in tf.compat.v1.GraphDef.FromString(path.read_bytes()).node]
    assert "bert/pooler/dense/kernel" not in names and "bert/pooler/dense/kernel/read" in names
    result = frozen.read(path).tensors
    # The scores of words are their table, whose folded transposition has become a copy.
    words = result.pop("cls/predictions/output_weights", None)
    assert same(result, built.weights)
    if "mlm" in heads:
        assert words is not None and torch.equal(words, result["bert/embeddings/word_embeddings"])


def test_a_grappled_graph_computes_the_same(
    tf: ModuleType, tf_bert: ModuleType, tmp_path: Path
) -> None:
    built = tf_bert.build(tf, partitions=3)
    plain = tf_bert.freeze(tf, built, tmp_path / "plain" / "frozen.pb")
    path = grappled(tf, plain, list(built.outputs), tmp_path / "frozen.pb")
    (tmp_path / "bert_config.json").write_text(json.dumps(built.config))
    ids, mask, segments = tf_bert.batch(built.config)
    names = ["sequence_output", "mlm_logits"]
    hidden, scores = tf_bert.run_frozen(tf, path, names, (ids, mask, segments))
    rows: list[Any] = [
        SimpleNamespace(ids=row[:n], types=types[:n])
        for row, types, n in zip(ids, segments, mask.sum(1), strict=True)
    ]
    checkpoint = load(path)
    assert checkpoint.gelu.form == "erf" and set(checkpoint.model.heads) >= {"mlm", "nsp"}
    packed = Packed.build(rows)
    with torch.inference_mode():
        result = checkpoint.model.bert(packed)
        words = checkpoint.model.head("mlm")(result, packed)
    real = mask.astype(bool)
    assert torch.allclose(result, torch.from_numpy(hidden[real]), atol=2e-5)
    assert torch.allclose(words, torch.from_numpy(scores[real]), atol=1e-4)
    other = torch.from_numpy(hidden[real]).roll(1, 0)
    assert not torch.allclose(result, other, atol=0.1)


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_parts_are_joined_as_the_graph_looks_them_up(
    strategy: str, optimize: bool, tf: ModuleType, tmp_path: Path
) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        ids = v1.placeholder(tf.int32, [None], "ids")
        table = v1.get_variable(
            "a/table", [8, 3], partitioner=v1.fixed_size_partitioner(3), use_resource=False
        )
        rows = v1.nn.embedding_lookup(table, ids, partition_strategy=strategy)
        tf.identity(rows, "rows")
        session.run(v1.global_variables_initializer())
        want = session.run("rows:0", {"ids:0": np.arange(8)})
        definition = v1.graph_util.convert_variables_to_constants(
            session, graph.as_graph_def(), ["rows"]
        )
    path = tmp_path / "frozen.pb"
    path.write_bytes(definition.SerializeToString())
    if optimize:
        path = grappled(tf, path, ["rows"], tmp_path / "grappled.pb")
    contents = frozen.read(path)
    assert same(contents.tensors, {"a/table": want})
    assert "a/table was joined of 3 parts" in contents.notes


def test_parts_of_columns(tf: ModuleType, tmp_path: Path) -> None:
    """Equal shapes do not show the axis; the node that joins them does."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        cut = v1.fixed_size_partitioner(2, axis=1)
        kernel = v1.get_variable("a/kernel", [2, 4], partitioner=cut, use_resource=False)
        tf.identity(tf.convert_to_tensor(kernel), "out")
        session.run(v1.global_variables_initializer())
        want = session.run("out:0")
        definition = v1.graph_util.convert_variables_to_constants(
            session, graph.as_graph_def(), ["out"]
        )
    (tmp_path / "frozen.pb").write_bytes(definition.SerializeToString())
    assert same(frozen.read(tmp_path / "frozen.pb").tensors, {"a/kernel": want})


def test_a_part_that_is_missing(tf: ModuleType, tf_bert: ModuleType, tmp_path: Path) -> None:
    path = tf_bert.freeze(tf, tf_bert.build(tf, partitions=3), tmp_path / "frozen.pb")
    data = path.read_bytes().replace(b"word_embeddings/part_1", b"word_embeddings/part_7")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"word_embeddings' has the parts 0, 2, 7, which do"):
        frozen.read(path)
