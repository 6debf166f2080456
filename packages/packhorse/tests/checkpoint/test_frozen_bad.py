"""Frozen graphs, damaged or malicious: refused by name, or read as TensorFlow reads them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.checkpoint.tensorflow import frozen, graphdef
from packhorse.errors import CheckpointError
from packhorse.wire import write_field as field
from packhorse.wire import write_fixed32, write_varint

FLOAT, DOUBLE, INT32, STRING, QINT8, BFLOAT16, HALF = 1, 2, 3, 7, 11, 14, 19


def node(name: str, op: str, *inputs: str, more: bytes = b"", **attributes: bytes) -> bytes:
    """A node, as the field of a graph."""
    parts = [field(1, name), field(2, op), *(field(3, item) for item in inputs)]
    parts += [field(5, field(1, key) + field(2, value)) for key, value in attributes.items()]
    return field(1, b"".join(parts) + more)


def shape(*sizes: int) -> bytes:
    return field(2, b"".join(field(2, field(1, size)) for size in sizes))


def const(
    name: str, dtype: int, *parts: bytes, declared: int | None = None, more: bytes = b""
) -> bytes:
    """A Const whose tensor has these parts."""
    value = field(8, field(1, dtype) + b"".join(parts))
    return node(name, "Const", more=more, dtype=field(6, declared or dtype), value=value)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def function(name: str, *nodes: bytes) -> bytes:
    """A library of one function."""
    inside = b"".join(b"\x1a" + item[1:] for item in nodes)  # field 3 there, field 1 in a graph
    return field(2, field(1, field(1, field(1, name)) + inside))


WEIGHT = const("w", FLOAT, shape(2, 3), field(4, floats(*range(6))))
READ = node("w/read", "Identity", "w", T=field(6, FLOAT), _class=field(1, field(2, "loc:@w")))
VERSIONS = field(4, field(1, 1882))
GOOD = b"".join(
    [
        node("ids", "Placeholder", dtype=field(6, INT32), shape=field(7, field(3, 1))),
        WEIGHT,
        READ,
        const("half", HALF, shape(3), field(13, write_varint(15360) + write_varint(49152))),
        const("brain", BFLOAT16, shape(2), field(13, 16256), field(13, 49024)),
        const("double", DOUBLE, shape(2, 1), field(6, np.array([0.5, -2.0]).tobytes())),
        const("splat", FLOAT, shape(2, 2), field(5, floats(7))),
        const("zeros/kernel", FLOAT, shape(4)),
        const("mixed", FLOAT, shape(4), write_fixed32(5, 1), field(5, floats(1, 2))),
        const("sizes", INT32, shape(2), field(7, b"\x01\x02")),
        const("text", STRING, field(8, b"\xff")),
        const("eps", FLOAT, shape(), field(5, floats(1e-12))),
        node("MatMul", "MatMul", "ids", "w/read", "^eps", more=field(4, "/cpu:0") + field(99, 5)),
        function("f", WEIGHT, node("call", "Identity", "w")),
        VERSIONS,
    ]
)
PARTS = b"".join(
    const(f"a/part_{number}", FLOAT, shape(rows, 1), field(4, floats(*range(rows))))
    for number, rows in enumerate((4, 1))
)
META = field(1, field(5, "2.21")) + field(2, GOOD)


def deep(levels: int) -> bytes:
    """A function as an attribute of a function as an attribute …"""
    heads, size = [], 0
    for number in levels * (2, 2, 10):  # from the inside: AttrValue, attribute, function
        heads.append(bytes([number << 3 | 2]) + write_varint(size))
        size += len(heads[-1])
    return node("w/deep", "Identity", "w", f=b"".join(reversed(heads)))


VARIABLE = node("v", "VariableV2", dtype=field(6, FLOAT), shape=field(7, b""))
LONG = b"\x80" * 10 + b"\x01"

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no frozen graph"),
    "noise": (bytes(range(256)), "no frozen graph"),
    "a torch file": (b"PK\x03\x04" + bytes(100), "no frozen graph"),
    "text": (b"# graph\nnode {\n  name: 'w'\n}", "as text.*as_text=False"),
    "text of a SavedModel": (b"saved_model_schema_version: 1\n", "as text"),
    "SavedModel": (field(1, 1) + field(2, META), "SavedModel.*packhorse run --model"),
    "MetaGraphDef": (META, "MetaGraphDef.*packhorse freeze"),
    "HLO module": (field(1, "jit_f.1") + field(2, "main.3") + field(3, b"x"), "XLA"),
    "HLO": (field(1, field(1, "jit_f.1") + field(2, "main.3")) + field(3, b""), "XLA"),
    "truncated": (GOOD[:-20], "byte [0-9]+: a field that does not fit"),
    "truncated in its first node": (GOOD[:20], "byte 0: a field that does not fit"),
    "truncated in its first name": (GOOD[:3], "no frozen graph.*byte 0: a field that does not fit"),
    "length beyond the file": (GOOD + b"\x0a\x10abc", "byte [0-9]+: a field that does not fit"),
    "length of 2 GiB": (GOOD + b"\x0a" + write_varint(1 << 31) + b"abc", "does not fit"),
    "length of 2**63": (GOOD + b"\x0a" + write_varint(1 << 63), "does not fit"),
    "length without end": (GOOD + b"\x0a" + LONG, "does not end"),
    "nested 40 deep": (GOOD + deep(13), "nested more than 32 deep"),
    "nested 100,000 deep": (GOOD + deep(33_334), "nested more than 32 deep"),
    "group": (GOOD + b"\x0b\x0c", "wire type 3"),
    "group in a tensor": (GOOD + const("g", FLOAT, b"\x4b\x4c"), "wire type 3"),
    "wire type 7": (GOOD + b"\x0f", "wire type 7"),
    "field number 0": (GOOD + b"\x02\x00", "does not fit"),
    "field number of 40 bits": (GOOD + write_varint(1 << 43) + b"\x00", "does not fit"),
    "padded head": (GOOD + b"\xa0\x86\x80\x00\x05", "head is not"),
    "name of no UTF-8": (GOOD + field(1, b"\x0a\x01\xff\x12\x01X"), "not UTF-8"),
    "input of no UTF-8": (GOOD + node("x", "X", more=field(3, b"\xff")), "not UTF-8"),
    "two nodes of one name": (GOOD + WEIGHT, "two nodes called 'w'"),
    "node without a name": (GOOD + node("", "Const"), "a node without a name"),
    "input that is not there": (GOOD + node("x", "X", "y:1"), "'x': byte .* reads 'y'"),
    "missing weight": (READ, "'w/read': byte .* reads 'w', which does not exist"),
    "circle": (
        GOOD + node("a", "Identity", "b") + node("b", "Identity", "a"),
        "form a cycle",
    ),
    "circle of one": (GOOD + node("a", "Identity", "a"), "form a cycle"),
    "not frozen": (GOOD + VARIABLE, "not frozen: 'v' and 0 more.*packhorse freeze"),
    "handle": (GOOD + node("h", "VarHandleOp"), "not frozen: 'h'"),
    "no weights": (node("x", "Placeholder") + VERSIONS, "no weights"),
    "weights in a function only": (node("x", "f") + function("f", WEIGHT), "no weights"),
    "content too short": (
        const("c", FLOAT, shape(2, 3), field(4, bytes(20))),
        r"'c': byte \d+: 20 bytes of content, the shape \[2, 3\] of torch.float32 takes 24",
    ),
    "content too long": (const("c", FLOAT, shape(2), field(4, bytes(9))), "9 bytes of content"),
    "content of nothing": (const("c", FLOAT, shape(0), field(4, b"\0")), "1 bytes of content"),
    "too many values": (const("c", FLOAT, shape(2), field(5, floats(1, 2, 3))), "more values"),
    "too many unpacked": (const("c", FLOAT, shape(1), write_fixed32(5, 1) * 2), "more values"),
    "too many halves": (const("c", HALF, shape(1), field(13, b"\1\1")), "more values"),
    "half of 17 bits": (const("c", HALF, shape(1), field(13, 1 << 16)), "does not fit"),
    "negative half": (const("c", BFLOAT16, shape(1), field(13, -1)), "does not fit"),
    "half a float": (const("c", FLOAT, shape(2), field(5, bytes(6))), "6 bytes for numbers of 4"),
    "half a double": (
        const("c", DOUBLE, shape(2), field(6, bytes(12))),
        "12 bytes for",
    ),
    "number without end": (const("c", HALF, shape(2), field(13, b"\x80")), "does not end"),
    "number of 71 bits": (const("c", HALF, shape(99), field(13, LONG * 9)), "64 bits|not end"),
    "number of 65 bits": (
        const("c", HALF, shape(99), field(13, (b"\xff" * 9 + b"\x02") * 9)),
        "more than 64 bits",
    ),
    "splat of 10**12": (
        const("c", FLOAT, shape(10**6, 10**6), field(5, floats(1))),
        r"'c': byte \d+: the shape \[1000000, 1000000\] takes 4000000000000 bytes",
    ),
    "zeros of 10**12": (const("c", FLOAT, shape(10**12)), "takes 4000000000000 bytes"),
    "zeros of 90 MB, twice": (
        const("c", FLOAT, shape(10_000_000)) + const("d", FLOAT, shape(10_000_000)),
        "of which the file lacks 40000000",
    ),
    "shape that overflows": (const("c", FLOAT, shape(1 << 62, 1 << 62)), "takes"),
    "negative size": (const("c", FLOAT, shape(-1, 4)), r"the shape \[-1\] is not a tensor's"),
    "unknown rank": (const("c", FLOAT, field(2, field(3, 1))), "unknown rank"),
    "nine dimensions": (const("c", FLOAT, shape(*[1] * 9)), "is not a tensor's"),
    "two shapes": (const("c", FLOAT, shape(1), shape(1)), "field 2 is there twice"),
    "two contents": (const("c", FLOAT, shape(1), field(4, bytes(4)) * 2), "field 4 is there twice"),
    "two dtypes": (const("c", FLOAT, field(1, FLOAT)), "field 1 is there twice"),
    "two values": (
        const("c", FLOAT, shape(1), more=field(5, field(1, "value") + field(2, field(8, b"")))),
        "two attributes 'value'",
    ),
    "dtype that disagrees": (
        const("c", FLOAT, shape(1), declared=HALF),
        "dtype 1, the node says 19",
    ),
    "no dtype": (node("c", "Const", value=field(8, field(1, FLOAT))), "dtype 0 is not read"),
    "dtype beyond 32 bits": (const("c", (1 << 32) + 1, shape(1)), "dtype 4294967297 is not read"),
    "quantized": (const("c", QINT8, shape(4)), "'c': byte .* dtype 11 is not read"),
    "no value": (node("c", "Const", dtype=field(6, FLOAT)), "holds no tensor"),
    "value of another kind": (
        node("c", "Const", dtype=field(6, FLOAT), value=field(2, "x")),
        "holds no tensor",
    ),
    "damage in a function": (
        WEIGHT + field(2, field(1, field(3, field(1, b"\xff")))),
        "not UTF-8",
    ),
    "many fields": (
        GOOD + node("x", "X", more=field(98, 1) * (graphdef.FIELD_LIMIT + 1)),
        "more than 300000 fields",
    ),
    "an axis that is no number": (
        PARTS + const("a/ConcatPartitions/concat/axis", FLOAT, shape(), field(5, floats(np.nan))),
        "'a/ConcatPartitions/concat/axis' is no axis",
    ),
    "rows that cannot be looked up in turn": (
        PARTS
        + const("two", INT32, shape(), field(7, b"\x02"))
        + node("ids", "Placeholder")
        + node("part", "FloorMod", "ids", "two")
        + node("ids_of_part", "DynamicPartition", "ids", "part")
        + node("rows", "GatherV2", "a/part_0", "ids_of_part"),
        r"'a': parts of \[4, 1\] rows do not follow each other in turn",
    ),
    "many weights": (
        b"".join(const(f"c{n}", FLOAT, shape(1)) for n in range(10_001)),
        "10001 weights, more than 10000",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    content, message = BAD[case]
    path = tmp_path / "frozen.pb"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        frozen.read(path)
    assert str(path) in str(caught.value)
    assert time.process_time() - start < 10  # not a speed claim: none may loop on and on


@pytest.mark.parametrize("number", ["00", "9" * 5000])
def test_a_part_is_numbered_as_tensorflow_does(number: str, tmp_path: Path) -> None:
    path = tmp_path / "frozen.pb"
    path.write_bytes(const(f"a/part_{number}", FLOAT, shape(1), field(4, floats(1))))
    assert frozen.read(path).tensors.keys() == {f"a/part_{number}"}


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """The peak of a process that reads them all grows by no more than 64 MiB and the largest."""
    for number, (content, _) in enumerate(BAD.values()):
        (tmp_path / f"{number}.pb").write_bytes(content)
    (tmp_path / "good.pb").write_bytes(GOOD)
    script = """
import resource, sys
from pathlib import Path
from packhorse.checkpoint.tensorflow import frozen
from packhorse.errors import CheckpointError
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
frozen.read(Path(sys.argv[1]) / "good.pb")
before = peak()
for path in Path(sys.argv[1]).glob("[0-9]*.pb"):
    try:
        frozen.read(path)
    except CheckpointError:
        continue
    sys.exit(f"{path} was read")
print(peak() - before)
"""
    completed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    largest = max(len(content) for content, _ in BAD.values())
    assert int(completed.stdout) * 1024 < largest + (64 << 20)


def test_places_that_are_no_file(tmp_path: Path) -> None:
    outside, folder = tmp_path / "elsewhere.pb", tmp_path / "model"
    folder.mkdir()
    outside.write_bytes(GOOD)
    (folder / "link.pb").symlink_to(outside)
    os.mkfifo(folder / "pipe.pb")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "saved_model.pb").write_bytes(field(1, 1) + field(2, META))
    for path, message in {
        folder / "link.pb": "outside the model's folder",
        folder / "pipe.pb": "not a regular file",
        folder / "none.pb": "there is no none.pb",
        folder: r"is a folder; pass the frozen graph in it \(link.pb, pipe.pb\)",
        saved: f"SavedModel.*--model {saved}/variables/variables",
        saved / "saved_model.pb": f"SavedModel.*--model {saved}/variables/variables",
    }.items():
        assert not frozen.sniff(path)
        with pytest.raises(CheckpointError, match=message):
            frozen.read(path)


@pytest.fixture(scope="module")
def agrees(tf: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], bool]:
    """Refused, or read as TensorFlow reads it; True when it was read."""
    path = tmp_path_factory.mktemp("mutants") / "frozen.pb"

    def reference(content: bytes) -> dict[str, np.ndarray]:
        result = tf.compat.v1.GraphDef.FromString(content)
        tensors = [(n.name, n.attr["value"].tensor) for n in result.node if n.op == "Const"]
        return {
            name: tf.make_ndarray(tensor)
            for name, tensor in tensors
            if tensor.tensor_shape.dim and tf.as_dtype(tensor.dtype).is_floating
        }

    def agrees(content: bytes) -> bool:
        path.write_bytes(content)
        try:
            result = frozen.read(path).tensors
        except CheckpointError:
            return False
        want = reference(content)  # what protobuf refuses must have been refused
        plain = {name for name in want if not frozen.GENERATED.fullmatch(name)}
        assert plain <= result.keys() and len(result) <= len(want)
        for name, tensor in result.items():
            same = [want[name]] if name in want else list(want.values())
            loaded = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert any(x.shape == tensor.shape and x.tobytes() == loaded for x in same), name
        return True

    return agrees


def test_the_good_one_is_good(agrees: Callable[[bytes], bool]) -> None:
    assert agrees(GOOD)
    assert agrees(WEIGHT) and agrees(GOOD + field(7, "unknown") + field(1000, 3))
    assert agrees(GOOD + deep(5))


def test_a_reader_that_is_wrong_is_caught(
    agrees: Callable[[bytes], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = graphdef.read
    monkeypatch.setattr(graphdef, "read", lambda file, tensor: right(file, tensor) + 1)
    with pytest.raises(AssertionError):
        agrees(GOOD)


def test_truncations(agrees: Callable[[bytes], bool]) -> None:
    """Where a node ends, a graph may end; everywhere else it may not."""
    read = sum(agrees(GOOD[:size]) for size in range(len(GOOD)))
    assert 0 < read < 20


@pytest.mark.parametrize("flips", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_bit_flips(flips: int, agrees: Callable[[bytes], bool]) -> None:
    rng = random.Random(3)
    read = 0
    for _ in range(flips):
        content = bytearray(GOOD)
        content[rng.randrange(len(GOOD))] ^= 1 << rng.randrange(8)
        read += agrees(bytes(content))
    assert 0 < read < flips  # flips of values and names pass


def mutated(data: st.DataObject) -> bytes:
    """Pieces cut out, doubled, moved and overwritten."""
    content = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(begin, min(len(content), begin + 40)))
        at = data.draw(st.integers(0, len(content)))
        new = data.draw(
            st.one_of(
                st.binary(max_size=12),
                st.just(content[begin:end]),
                st.integers(0, 1 << 64).map(write_varint),
            )
        )
        content = content[:at] + new + content[data.draw(st.sampled_from([at, at + len(new)])) :]
    return content


@pytest.mark.parametrize("examples", [200, pytest.param(5_000, marks=pytest.mark.slow)])
def test_mutations(examples: int, agrees: Callable[[bytes], bool]) -> None:
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        agrees(mutated(data))

    run()


def test_a_file_that_is_cut_while_it_is_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped into memory, its bytes would be gone: a bus error, which ends the process."""
    path = tmp_path / "frozen.pb"
    path.write_bytes(GOOD)
    find = frozen._find

    def cut_then_find(*arguments: Any) -> object:
        os.truncate(path, 0)
        return find(*arguments)

    monkeypatch.setattr(frozen, "_find", cut_then_find)
    with pytest.raises(CheckpointError, match=r"frozen\.pb: '.*'"):
        frozen.read(path)
