"""Bad ONNX files: each is one CheckpointError that names the file, soon and without much memory.

Files are built field by field. What is accepted after a mutation must be what the onnx package
reads.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from packhorse.checkpoint import onnx as reader
from packhorse.checkpoint.onnx import data as onnx_data
from packhorse.errors import CheckpointError
from packhorse.wire import fields, write_field, write_fixed32, write_varint

FLOAT, INT8, STRING, INT64 = 1, 3, 8, 7
NUMBERS = np.arange(6, dtype=np.float32).tobytes()
A = "encoder.a.weight"


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    return b"".join(write_field(number, value) for number, value in fields)


def tensor(
    *more: tuple[int, Any],
    name: str = A,
    dims: Iterable[int] = (2, 3),
    kind: int | None = FLOAT,
    raw: bytes | None = NUMBERS,
) -> bytes:
    """A TensorProto."""
    fields = [(1, size) for size in dims]
    fields += [(2, kind)] if kind is not None else []
    fields += [(9, raw)] if raw is not None else []
    return message(*fields, (8, name), *more)


def attribute(name: str, *value: tuple[int, Any]) -> bytes:
    return message((1, name), *value)


def node(op: str, inputs: Iterable[str], outputs: Iterable[str], *more: tuple[int, Any]) -> bytes:
    fields = [*((1, value) for value in inputs), *((2, value) for value in outputs)]
    return message(*fields, (4, op), *more)


def model(*graph: tuple[int, bytes]) -> bytes:
    """A ModelProto with these fields of its graph."""
    return message((1, 8), (2, "test"), (7, message(*graph)), (8, message((1, ""), (2, 17))))


def one_tensor(*more: tuple[int, Any], **settings: Any) -> bytes:
    """A model with one tensor."""
    return model((5, tensor(*more, **settings)))


def external(*pairs: tuple[str, str], **settings: Any) -> bytes:
    entries = [(13, message((1, key), (2, value))) for key, value in pairs]
    return one_tensor(*entries, (14, 1), **{"raw": None, **settings})


def packed(number: int, values: Iterable[int]) -> tuple[int, bytes]:
    return number, b"".join(map(write_varint, values))


def dequantized(scale: list[int], numbers: bytes, kind: int = INT8, **more: Any) -> bytes:
    """An int8 tensor with a scale of some shape."""
    fields = [(5, attribute(key, (3, value))) for key, value in more.items()]
    return model(
        (5, tensor(name="a.weight_quantized", kind=kind, raw=bytes(6))),
        (5, tensor(name="s", dims=scale, raw=numbers)),
        (1, node("DequantizeLinear", ["a.weight_quantized", "s"], ["y"], *fields)),
    )


def nested(depth: int) -> bytes:
    """A node with a graph with a node with a graph …"""
    content = node("Identity", ["x"], ["y"])
    for _ in range(depth):
        content = node("If", [], [], (5, attribute("then_branch", (6, message((1, content))))))
    return content


GOOD = one_tensor()
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "there is no graph"),
    "no graph": (message((1, 8), (2, "test")), "there is no graph"),
    "no tensors": (model(), "0 tensors"),
    "text": (b"ONNX" * 9, "byte"),
    "two graphs": (GOOD + GOOD, "byte .*field 7 is there twice"),
    "a graph that is a number": (message((7, 1)), "byte .*field 7 has the wire type 0"),
    "a group": (message((1, 8)) + b"\x3b", "byte .*wire type 3"),
    "raw data too short": (
        one_tensor(raw=NUMBERS[:-1]),
        "byte .*'encoder.a.weight'.*23 bytes, .* 24",
    ),
    "raw data too long": (one_tensor(raw=NUMBERS + b"\0"), "25 bytes, .* 24"),
    "no data": (one_tensor(raw=None), "0 bytes, .* 24"),
    "dims overflow": (one_tensor(dims=(1 << 39, 1 << 39)), f"24 bytes, .* {1 << 80}"),
    "dims wrap to 0": (one_tensor(dims=(1 << 32, 1 << 32), raw=b""), "0 bytes"),
    "dims beyond any": (one_tensor(dims=(1 << 62,)), "no counts"),
    "negative dims": (one_tensor(dims=(-2, -3)), "no counts"),
    "a hundred dims": (one_tensor(dims=[1] * 100, raw=bytes(4)), "more than 8 numbers"),
    "a million dims": (one_tensor((1, bytes(1_000_000)), dims=()), "more than 8 numbers"),
    "raw and typed": (one_tensor((4, NUMBERS)), "several places"),
    "two kinds of typed": (
        one_tensor((4, NUMBERS), packed(5, range(6)), raw=None),
        "several places",
    ),
    "typed in another field": (
        one_tensor(packed(7, range(6)), raw=None),
        "not in the field for them",
    ),
    "typed too short": (one_tensor((4, NUMBERS[:-4]), raw=None), "20 bytes, .* 24"),
    "typed one by one": (
        model(
            (5, tensor(raw=None) + b"".join(write_fixed32(4, n) for n in range(6))),
        ),
        "field 4 has the wire type 5",
    ),
    "too few varints": (
        one_tensor(packed(5, [300] * 5), kind=10, raw=None),
        "not have the 6 numbers",
    ),
    "too many varints": (
        one_tensor(packed(5, range(7)), kind=10, raw=None),
        "not have the 6 numbers",
    ),
    "too few bytes": (
        one_tensor(packed(5, range(5)), kind=10, raw=None),
        "6 numbers do not fit 5 bytes",
    ),
    "varint without end": (
        one_tensor((5, b"\x80" * 6), kind=10, raw=None),
        "not have the 6 numbers",
    ),
    "varint of 11 bytes": (
        one_tensor((5, bytes(5) + b"\x80" * 10 + b"\0"), kind=10, raw=None),
        "does not end",
    ),
    "varint of 70 bits": (
        one_tensor((5, bytes(5) + b"\xff" * 9 + b"\x7f"), kind=10, raw=None),
        "larger than 64 bits",
    ),
    "float16 of 17 bits": (one_tensor(packed(5, [1 << 16] * 6), kind=10, raw=None), "outside of 0"),
    "a negative float16": (one_tensor(packed(5, [-1] * 6), kind=10, raw=None), "outside of 0"),
    "two raw data": (one_tensor((9, NUMBERS)), "field 9 is there twice"),
    "two types": (one_tensor((2, 1)), "field 2 is there twice"),
    "two names": (one_tensor((8, "b")), "field 8 is there twice"),
    "a type that is a text": (one_tensor((2, b"\x01"), kind=None), "field 2 has the wire type 2"),
    "no type": (one_tensor(kind=None), "has the type 0"),
    "unknown type": (one_tensor(kind=99), "has the type 99"),
    "strings": (one_tensor((6, "a"), (6, "b"), dims=(2,), kind=STRING, raw=None), "has the type 8"),
    "int4": (one_tensor(kind=22, raw=bytes(3)), "has the type 22"),
    "float8": (one_tensor(kind=17, raw=bytes(6)), "has the type 17"),
    "int64 as a weight": (one_tensor(kind=INT64, raw=bytes(48)), "has the type 7"),
    "int8 without a scale": (one_tensor(kind=INT8, raw=bytes(6)), "has the type 3"),
    "int8 that no name explains": (
        one_tensor(name="x", kind=INT8, raw=bytes(6)),
        "in a way that is not",
    ),
    "a segment": (one_tensor((3, message((1, 0), (2, 6)))), "segments"),
    "a sparse tensor": (model((15, tensor())), "sparse"),
    "name that is not UTF-8": (one_tensor((8, b"\xff"), name=A), "field 8 is there twice"),
    "name of bad bytes": (model((5, message((2, 1), (8, b"\xff\xfe")))), "not UTF-8"),
    "a name of 100 kB": (one_tensor(name="a" * 100_000), "a text of 100000 bytes"),
    "two tensors of one name": (model((5, tensor()), (5, tensor())), f"'{A}' is there twice"),
    "a value made twice": (
        model((5, tensor()), (1, node("Identity", [A], ["b"])), (1, node("Neg", ["x"], ["b"]))),
        "'b' is there twice",
    ),
    "a tensor made again": (
        model((5, tensor()), (1, node("Neg", ["x"], [A]))),
        f"'{A}' is there twice",
    ),
    "many tensors": (
        model(*((5, tensor(name=str(n), dims=(), raw=bytes(4))) for n in range(10_001))),
        "more than 10000 tensors",
    ),
    "many nodes": (model(*[(1, b"")] * 50_001), "more than 50000 nodes"),
    "many fields": (model((1, b"\x30\x01" * 1_100_000)), "more than 1000000 fields"),
    "an attribute twice": (
        model((5, tensor()), (1, node("Gemm", "xa", "y", *[(5, attribute("transB", (3, 1)))] * 2))),
        "'transB' of '' does not have exactly one value",
    ),
    "an attribute of another kind": (
        model((5, tensor()), (1, node("Gather", [A, "x"], "y", (5, attribute("axis", (8, 1)))))),
        "'axis' of '' does not have exactly one value",
    ),
    "an attribute without a value": (
        model((5, tensor()), (1, node("Gather", [A, "x"], "y", (5, attribute("axis"))))),
        "'axis' of '' does not have exactly one value",
    ),
    "fused": (
        model((5, tensor()), (1, node("PackedAttention", ["x", A], ["y"], (3, "fused")))),
        "'fused' is a PackedAttention.* before it was optimized",
    ),
    "blocks of int8": (
        dequantized([2, 1], bytes(8), block_size=2),
        r"for blocks of 2 along axis 1 of \[2, 3\]",
    ),
    "a scale that does not fit": (
        dequantized([5], bytes(20)),
        r"shape \[5\] does not fit \[2, 3\]",
    ),
    "a scale along no axis": (dequantized([3], bytes(12), axis=7), "does not fit"),
    "a float with a scale": (
        model(
            (5, tensor()),
            (5, tensor(name="s", dims=(), raw=bytes(4))),
            (1, node("DequantizeLinear", [A, "s"], ["y"])),
        ),
        "has a scale, but is not quantized",
    ),
    "two scales": (
        model(
            (5, tensor(name="a.weight_quantized", kind=INT8, raw=bytes(6))),
            *((5, tensor(name=f"s{n}", dims=(), raw=bytes(4))) for n in range(2)),
            *(
                (1, node("DequantizeLinear", ["a.weight_quantized", f"s{n}"], [f"{n}.weight"]))
                for n in range(2)
            ),
        ),
        "dequantized in two ways",
    ),
    "a scale of a scale": (
        model(
            (5, tensor(name="a.weight_quantized", kind=INT8, raw=bytes(6))),
            *((5, tensor(name=f"s{n}", dims=(), raw=bytes(4))) for n in range(2)),
            (1, node("DequantizeLinear", ["a.weight_quantized", "s0"], ["b"])),
            (1, node("DequantizeLinear", ["b", "s1"], ["c"])),
        ),
        "dequantized twice",
    ),
    "a zero point that is computed": (
        model(
            (5, tensor(name="a.weight_quantized", kind=INT8, raw=bytes(6))),
            (5, tensor(name="s", dims=(), raw=bytes(4))),
            (1, node("DequantizeLinear", ["a.weight_quantized", "s", "x"], ["y"])),
        ),
        "in a way that is not read",
    ),
    "the scale of a product and its input's": (
        model(
            (5, tensor(name="a.weight_quantized", kind=INT8, raw=bytes(6))),
            *((5, tensor(name=f"s{n}", dims=(), raw=bytes(4))) for n in range(2)),
            (1, node("MatMulInteger", ["x", "a.weight_quantized"], ["p"])),
            (1, node("Cast", ["p"], ["c"], (5, attribute("to", (3, 1))))),
            (1, node("Mul", ["s0", "s1"], ["s"])),
            (1, node("Mul", ["c", "s"], ["y"])),
        ),
        "in a way that is not read",
    ),
    "a product that scales": (
        model(
            (5, tensor()),
            (1, node("Gemm", ["x", A], ["y"], (5, attribute("alpha") + write_fixed32(2, 1 << 30)))),
        ),
        "scales or turns",
    ),
    "a weight both ways round": (
        model(
            (5, tensor()),
            (1, node("MatMul", ["x", A], ["y"])),
            (1, node("Gemm", ["x", A], ["z"], (5, attribute("transB", (3, 1))))),
        ),
        f"'{A}' could be",
    ),
    "external and raw": (external(("location", "w"), raw=NUMBERS), "several places"),
    "external without a place": (one_tensor((14, 1), raw=None), "several places"),
    "a place but not external": (
        one_tensor((13, message((1, "location"), (2, "w"))), raw=None),
        "several places",
    ),
    "external without location": (external(("offset", "0")), "'' is not a plain file name"),
    "an unknown key": (external(("location", "w"), ("prefix", "/")), "the key 'prefix'"),
    "a key twice": (external(("location", "w"), ("location", "w")), "the key 'location'"),
    "missing file": (external(("location", "nothing")), "there is no nothing"),
    "up": (external(("location", "../outside/w")), "'..' is not a plain file name"),
    "absolute": (external(("location", "/etc/passwd")), "'' is not a plain file name"),
    "through another folder": (external(("location", "sub/../../outside/w")), "not a plain"),
    "backslash": (external(("location", "..\\outside\\w")), "not a plain"),
    "NUL": (external(("location", "w\0")), "not a plain"),
    "a link out": (external(("location", "link")), "outside the model's folder"),
    "a folder linked out": (external(("location", "linked/w")), "outside the model's folder"),
    "a link to itself": (external(("location", "itself")), "cannot be opened|no itself|outside"),
    "a device": (external(("location", "zero")), "outside the model's folder"),
    "a pipe": (external(("location", "pipe")), "not a regular file"),
    "a folder": (external(("location", "sub")), "not a regular file|cannot be opened"),
    "negative offset": (external(("location", "w"), ("offset", "-4")), "no counts"),
    "offset of floats": (external(("location", "w"), ("offset", "4.0")), "no counts"),
    "offset in another script": (external(("location", "w"), ("offset", "٤")), "no counts"),
    "offset beyond the file": (
        external(("location", "w"), ("offset", "48"), ("length", "24")),
        "w of 48 bytes does not end at 72",
    ),
    "offset beyond any file": (external(("location", "w"), ("offset", "9" * 18)), "w of 48 bytes"),
    "offset of 10**5000": (external(("location", "w"), ("offset", "9" * 5000)), "no counts"),
    "negative length": (external(("location", "w"), ("length", "-24")), "no counts"),
    "length of another size": (external(("location", "w"), ("length", "48")), "48 bytes, .* 24"),
    "no length, and more follows": (external(("location", "w")), "48 bytes does not end at 24"),
    "another checksum": (
        external(("location", "w"), ("length", "24"), ("checksum", "00")),
        "'encoder.a.weight' at byte 0: the checksum of w",
    ),
    "overlapping": (
        model(
            *(
                (
                    5,
                    tensor(
                        *(
                            (13, message((1, key), (2, value)))
                            for key, value in (
                                ("location", "w"),
                                ("offset", str(offset)),
                                ("length", "24"),
                            )
                        ),
                        (14, 1),
                        name=f"{offset}.weight",
                        raw=None,
                    ),
                )
                for offset in (0, 20)
            )
        ),
        r"'0\.weight' and '20\.weight' overlap at byte 20 of w",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with everything in it that could lead astray."""
    outside, folder = tmp_path / "outside", tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    outside.mkdir()
    for place in (outside, folder, folder / "sub"):
        (place / "w").write_bytes(NUMBERS * 2)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(outside / "w")
    (folder / "linked").symlink_to(outside)
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "itself").symlink_to(folder / "itself")
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, folder: Path) -> None:
    content, message = BAD[case]
    path = folder / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        reader.read(path)  # one that hangs ends with pytest's own timeout
    assert str(path) in str(caught.value)


FINE: dict[str, bytes] = {
    "as it is": GOOD,
    "fields that are not known": one_tensor((99, "x"), (1000, 7)),
    "dims in one piece": one_tensor(packed(1, (2, 3)), dims=()),
    "typed": one_tensor((4, NUMBERS), raw=None),
    "external": external(("location", "w"), ("length", "24")),
    "external to the end": external(("location", "sub/w"), ("offset", "24")),
    "a hard link": external(("location", "hard"), ("offset", "24")),
    "a link inside": external(("location", "inside"), ("offset", "24")),
    "graphs in graphs": model((5, tensor()), (1, nested(5_000))),
    "a cycle": model(
        (5, tensor()), (1, node("Identity", ["b"], ["c"])), (1, node("Identity", ["c"], ["b"]))
    ),
}


@pytest.mark.parametrize("case", FINE)
def test_fine_files(case: str, folder: Path) -> None:
    os.link(folder / "w", folder / "hard")
    (folder / "inside").symlink_to(folder / "w")
    (folder / "model.onnx").write_bytes(FINE[case])
    result = reader.read(folder / "model.onnx").tensors
    assert result.keys() == {A} and result[A].numpy().tobytes() == NUMBERS


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a regular file|cannot be"):
        reader.read(tmp_path)
    with pytest.raises(CheckpointError, match="there is no"):
        reader.read(tmp_path / "model.onnx")


def seed() -> bytes:
    """A small model with everything that is looked at."""
    scopes = "['', 'm', 'm.b', 'linear']"
    return model(
        (1, node("Transpose", ["m.a.weight"], ["t"], (5, attribute("perm", (8, 1), (8, 0))))),
        (1, node("MatMul", ["x", "t"], ["y"], (3, "/m/a/MatMul"))),
        (1, node("MatMul", ["y", "v"], ["z"], (9, message((1, reader.NAME_SCOPES), (2, scopes))))),
        (1, node("Add", ["z", "m.b.bias"], ["u"])),
        (1, node("Constant", [], ["c.bias"], (5, attribute("value", (5, tensor(name="q")))))),
        (1, node("DequantizeLinear", ["d.weight_quantized", "s"], ["w"])),
        (5, tensor(name="m.a.weight")),
        (5, tensor((4, NUMBERS), name="v", dims=(3, 2), raw=None)),
        (5, tensor(packed(5, [1, 300, 70]), name="m.b.bias", dims=(3,), kind=10, raw=None)),
        (5, tensor(name="d.weight_quantized", kind=INT8, raw=bytes(range(250, 256)))),
        (5, tensor(name="s", dims=(), raw=NUMBERS[-4:])),
        (5, tensor(packed(7, [0, -1]), name="shape", dims=(2,), kind=INT64, raw=None)),
    )


SEED = seed()


def read_with_onnx(content: bytes) -> dict[str, onnx.TensorProto]:
    """Every tensor of the graph as the onnx package reads it."""
    try:
        graph = onnx.ModelProto.FromString(content).graph
    except DecodeError:  # in a part that is not looked at here: inner graphs, types, versions
        return initializers(content)
    constants = {
        built.output[0] if built.output else "": settings.t
        for built in graph.node
        for settings in built.attribute
        if built.op_type == "Constant" and settings.name == "value"
    }
    return {t.name: t for t in graph.initializer} | constants


def initializers(content: bytes) -> dict[str, onnx.TensorProto]:
    """One by one, as the whole cannot be parsed."""
    graph = next(field for field in fields(content) if field.number == 7)
    parts = [part for part in fields(content, graph.begin, graph.end) if part.number == 5]
    result = {}
    for part in parts:
        with suppress(DecodeError):
            tensor = onnx.TensorProto.FromString(content[part.begin : part.end])
            result[tensor.name] = tensor
    return result


def agrees(folder: Path, content: bytes) -> bool:
    """Refused, or each tensor of the file read as the onnx package reads it."""
    path = folder / "model.onnx"
    path.write_bytes(content)
    try:
        weights = reader.read(path).tensors
    except CheckpointError:
        return False
    want = read_with_onnx(content)
    with ExitStack() as stack:
        data = onnx_data.MessageFile(stack.enter_context(path.open("rb")))
        graph = reader.read_graph(data)
        loader = onnx_data.TensorLoader(data, folder, stack)
        constants = [node.attributes.get("value") for node in graph.nodes if node.op == "Constant"]
        for stored in (*graph.initializers.values(), *filter(None, constants)):
            try:
                result = loader.read(stored) if stored.location else None
            except CheckpointError:  # not a weight, and so left out unread
                assert stored.name not in weights
                continue
            if result is not None and (stored.name in want or stored.name in graph.initializers):
                array = numpy_helper.to_array(want[stored.name], str(folder))
                assert tuple(result.shape) == array.shape
                assert result.reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()
    return True


def test_the_seed_is_good(tmp_path: Path) -> None:
    assert agrees(tmp_path, SEED)
    result = reader.read(tmp_path / "model.onnx").tensors
    assert result.keys() == {"m.a.weight", "m.b.weight", "m.b.bias", "c.bias", "d.weight"}


def test_truncations(tmp_path: Path) -> None:
    """The end is opset_import, which nothing here needs; all before it is."""
    needed = len(SEED) - len(message((8, message((1, ""), (2, 17)))))
    assert not any(agrees(tmp_path, SEED[:size]) for size in range(needed))


@pytest.mark.parametrize("flips", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_bit_flips(flips: int, tmp_path: Path) -> None:
    rng = random.Random(3)
    read = 0
    for _ in range(flips):
        content = bytearray(SEED)
        content[rng.randrange(len(SEED))] ^= 1 << rng.randrange(8)
        read += agrees(tmp_path, bytes(content))
    assert 0 < read < flips  # flips of weights pass, flips of the graph mostly do not


def mutated(content: bytes, edits: list[tuple[str, float, float, bytes]]) -> bytes:
    for variant, begin, end, new in edits:
        first, last = sorted((int(begin * len(content)), int(end * len(content))))
        old = {"replace": b"", "repeat": content[first:last] * 2, "insert": content[first:last]}
        content = content[:first] + old[variant] + new + content[last:]
    return content


edits = st.tuples(
    st.sampled_from(["replace", "repeat", "insert"]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.binary(max_size=12),
)


def test_mutations(tmp_path: Path) -> None:
    @settings(max_examples=200)
    @given(st.lists(edits, min_size=1, max_size=4))
    def check(changes: list[tuple[str, float, float, bytes]]) -> None:
        agrees(tmp_path, mutated(SEED, changes))

    check()


@pytest.mark.slow
def test_many_mutations(tmp_path: Path) -> None:
    @settings(max_examples=20_000)
    @given(st.lists(edits, min_size=1, max_size=6))
    def check(changes: list[tuple[str, float, float, bytes]]) -> None:
        agrees(tmp_path, mutated(SEED, changes))

    check()


OPS = {
    "Identity": (),
    "Transpose": ("perm",),
    "Cast": ("to",),
    "MatMul": (),
    "MatMulInteger": (),
    "Gemm": ("transB", "alpha"),
    "DequantizeLinear": ("axis",),
    "Gather": ("axis",),
    "LayerNormalization": (),
    "Add": (),
    "Mul": (),
    "Constant": ("value",),
}
VALUES = ("x", "a.weight", "a.weight_quantized", "b", "s", "z", "c", "d", "e.bias", "")
ATTRIBUTES = {
    "perm": st.permutations([0, 1]).map(lambda axes: [(8, axis) for axis in axes]),
    "to": st.sampled_from([1, 3, 7, 10]).map(lambda kind: [(3, kind)]),
    "transB": st.integers(0, 1).map(lambda number: [(3, number)]),
    "alpha": st.just([]),
    "axis": st.integers(-3, 3).map(lambda number: [(3, number)]),
    "value": st.just([(5, tensor(name=""))]),
}


@st.composite
def odd_nodes(draw: st.DrawFn) -> bytes:
    """An operation on values that need not fit it."""
    op = draw(st.sampled_from(list(OPS)))
    inputs = draw(st.lists(st.sampled_from(VALUES), max_size=4))
    outputs = draw(st.lists(st.sampled_from(VALUES[5:]), max_size=2, unique=True))
    text = [(name, draw(ATTRIBUTES[name])) for name in OPS[op] if draw(st.booleans())]
    fields: list[tuple[int, Any]] = [(5, attribute(name, *value)) for name, value in text if value]
    if draw(st.booleans()):
        fields.append((3, draw(st.sampled_from(["/m/MatMul", "/m/n/Add", "/", "//", "MatMul"]))))
    return node(op, inputs, outputs, *fields)


STORED = (
    tensor(name="a.weight"),
    tensor(name="a.weight_quantized", kind=INT8, raw=bytes(6)),
    tensor(name="b", dims=(3,), raw=NUMBERS[:12]),
    tensor(name="s", dims=(), raw=NUMBERS[:4]),
    tensor(name="z", dims=(), kind=INT8, raw=bytes(1)),
)


@pytest.mark.parametrize("count", [200, pytest.param(5_000, marks=pytest.mark.slow)])
def test_odd_graphs(count: int, tmp_path: Path) -> None:
    """Whatever the nodes say: weights or one error."""
    read: list[bool] = []

    @settings(max_examples=count)
    @given(st.lists(odd_nodes(), max_size=6), st.sets(st.sampled_from(STORED), min_size=1))
    def check(nodes: list[bytes], tensors: set[bytes]) -> None:
        content = model(
            *((1, built) for built in nodes), *((5, one_tensor) for one_tensor in sorted(tensors))
        )
        read.append(agrees(tmp_path, content))

    check()
    assert 0 < sum(read) < len(read)


CONFINED = r"""
import re, sys
from pathlib import Path
from packhorse.checkpoint import onnx
from packhorse.errors import CheckpointError

opened = []

def hook(event, args):
    if event == "open" and not isinstance(args[0], int):
        opened.append(str(args[0]))
    elif event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn")):
        opened.append(event)

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

Path("/proc/self/clear_refs").write_text("5")  # or the peak is that of the parent process
before = peak()
sys.addaudithook(hook)
for path in map(Path, sys.argv[1:]):
    try:
        onnx.read(path)
    except CheckpointError:
        pass
print(*sorted(set(opened)), peak() - before, sep=chr(10))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux does")
def test_files_memory_and_nothing_else(folder: Path) -> None:
    """64 MiB of weights, many names for them, and the files that point elsewhere."""
    paths = []
    for case in ("up", "absolute", "a link out", "a device", "a folder linked out"):
        paths.append(folder / f"{case}.onnx")
        paths[-1].write_bytes(BAD[case][0])
    size = 64 << 20
    large = tensor(dims=(4096, 4096), raw=bytes(size))
    names = [(1, node("Identity", [A], [f"{n}.weight"])) for n in range(200)]
    turned = (1, node("MatMul", ["x", A], ["y"]))
    paths.append(folder / "large.onnx")
    paths[-1].write_bytes(model((5, large), *names, turned))
    command = [sys.executable, "-c", CONFINED, *map(str, paths)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    *opened, risen = completed.stdout.splitlines()
    assert size <= int(risen) <= size + (64 << 20)
    real = os.path.realpath(folder)
    assert {path for path in opened if not path.startswith(real)} == set()
    assert str(folder / "large.onnx") in opened  # the audit sees what is opened
