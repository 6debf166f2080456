"""Checkpoints that are damaged or lie: one error that says where; never what TensorFlow refuses."""

from __future__ import annotations

import os
import random
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.checkpoint.tensorflow import sstable, tf1
from packhorse.checkpoint.tensorflow.tf1_index import slice_key
from packhorse.errors import CheckpointError
from packhorse.wire import crc32c, mask, varint, write_field, write_fixed32, write_varint

INDEX, DATA = "x.index", "x.data-00000-of-00001"
HEADER = write_field(1, 1) + write_field(3, write_field(1, 1))
NUMBERS = struct.pack("<12f", *range(12))


def shape(*sizes: int) -> bytes:
    return b"".join(write_field(2, write_field(1, size)) for size in sizes)


def extents(*pairs: tuple[int, int] | None) -> bytes:
    spelled = (b"" if p is None else write_field(1, p[0]) + write_field(2, p[1]) for p in pairs)
    return b"".join(write_field(1, item) for item in spelled)


@dataclass(frozen=True)
class Tensor:
    """A BundleEntryProto, as wrong as need be."""

    sizes: tuple[int, ...] = (2, 2)
    offset: int = 0
    size: int | None = None
    crc: int | None = None
    dtype: int = 1
    shard: int = 0
    slices: tuple[bytes, ...] = ()
    more: bytes = b""
    shape_more: bytes = b""

    def entry(self, data: bytes) -> bytes:
        size = int(np.prod(self.sizes)) * 4 if self.size is None else self.size
        crc = mask(crc32c(data[self.offset : self.offset + size])) if self.crc is None else self.crc
        return (
            write_field(1, self.dtype)
            + write_field(2, shape(*self.sizes) + self.shape_more)
            + write_field(3, self.shard)
            + write_field(4, self.offset)
            + write_field(5, size)
            + write_fixed32(6, crc)
            + b"".join(write_field(7, item) for item in self.slices)
            + self.more
        )


@dataclass(frozen=True)
class Bundle:
    """A checkpoint of two plain tensors and a partitioned one."""

    header: bytes = HEADER
    tensors: dict[str, Tensor] = field(
        default_factory=lambda: {
            "a": Tensor(),
            "b": Tensor((3,), 16),
            "c": Tensor((5,), slices=(extents((0, 2)), extents((2, 3)))),
        }
    )
    slices: dict[bytes, Tensor] = field(
        default_factory=lambda: {
            slice_key("c", ((0, 2),)): Tensor((2,), 28),
            slice_key("c", ((2, 3),)): Tensor((3,), 36),
        }
    )
    data: bytes = NUMBERS

    def change(self, name: str, **changes: Any) -> Bundle:
        return replace(self, tensors=self.tensors | {name: replace(self.tensors[name], **changes)})

    def index(self) -> bytes:
        items = {b"": self.header}
        items |= {key: tensor.entry(self.data) for key, tensor in self.slices.items()}
        items |= {name.encode(): tensor.entry(self.data) for name, tensor in self.tensors.items()}
        return sstable.build(sorted(items.items()))

    def write(self, folder: Path) -> Path:
        (folder / INDEX).write_bytes(self.index())
        (folder / DATA).write_bytes(self.data)
        return folder / "x"


GOOD = Bundle()
A, C = GOOD.tensors["a"], GOOD.tensors["c"]
FIRST, SECOND = GOOD.slices
LOOSE = slice_key("b", ((0, 3),))


def sliced(*slices: bytes, **parts: Any) -> Bundle:
    """The partitioned variable alone, differently cut; parts are the sizes of its slices."""
    built = replace(GOOD, tensors={"c": replace(C, slices=slices)})
    return replace(built, slices=parts["entries"]) if parts else built


def named(tensors: dict[str, Tensor]) -> Bundle:
    """Plain tensors alone."""
    return replace(GOOD, tensors=tensors, slices={})


BAD: dict[str, tuple[Bundle, str]] = {
    "no header": (replace(GOOD, header=b""), f"{INDEX}: byte .*: 0 data files, not 1 to 256"),
    "no shards": (replace(GOOD, header=write_field(1, 0)), "0 data files"),
    "minus one shards": (replace(GOOD, header=write_field(1, -1)), "-1 data files"),
    "2**31 shards": (replace(GOOD, header=write_field(1, 1 << 31)), "2147483648 data files"),
    "more shards than there are": (
        replace(GOOD, header=write_field(1, 2)),
        r"there is no x\.data-00000-of-00002",
    ),
    "big-endian": (replace(GOOD, header=HEADER + write_field(2, 1)), "big-endian"),
    "a newer version": (
        replace(GOOD, header=write_field(1, 1) + write_field(3, write_field(2, 2))),
        "version of the format that is not known",
    ),
    "a version that is bad for us": (
        replace(GOOD, header=write_field(1, 1) + write_field(3, write_field(3, b"\1"))),
        "version of the format that is not known",
    ),
    "V1 within": (replace(GOOD, header=write_field(1, b"meta")), "V1 format"),
    "half a header": (replace(GOOD, header=b"\x08"), "does not end"),
    "half an entry": (GOOD.change("b", more=b"\x7a\x05"), f"{INDEX}: 'b': byte .* does not fit"),
    "a field twice": (GOOD.change("a", more=write_field(4, 4)), "'a': byte .*: a field 4"),
    "two shapes": (GOOD.change("a", more=write_field(2, shape(1))), "'a': byte .*: a field 2"),
    "a shape that is a number": (GOOD.change("a", more=write_field(2, 1)), "'a': byte .* field 2"),
    "a group": (GOOD.change("a", more=b"\x43\x44"), "'a': byte .*: wire type 3"),
    "unknown dtype": (GOOD.change("a", dtype=99), "'a': byte .*: TensorFlow's data type 99"),
    "quantized": (GOOD.change("a", dtype=11), "TensorFlow's data type 11 is not read"),
    "no dtype": (GOOD.change("a", dtype=0), "TensorFlow's data type 0 is not read"),
    "dtype of another size": (GOOD.change("a", dtype=2), "16 bytes, but .* need 32"),
    "negative dimension": (GOOD.change("a", sizes=(-2, -2), size=16), r"the shape \[-2, -2\]"),
    "shape overflows": (GOOD.change("a", sizes=(1 << 62, 1 << 62), size=16), "need 8507"),
    "shape wraps to 0": (GOOD.change("a", sizes=(1 << 32, 1 << 32), size=0), "0 bytes, but"),
    "a thousand dimensions": (GOOD.change("a", sizes=(1,) * 1000, size=4), "the shape"),
    "unknown rank": (GOOD.change("a", shape_more=write_field(3, 1)), "'a': byte .*: the shape"),
    "too few bytes": (GOOD.change("a", size=12), "12 bytes, but"),
    "negative size": (GOOD.change("a", size=-16), "-16 bytes from 0"),
    "negative offset": (GOOD.change("a", offset=-4, crc=0), "16 bytes from -4"),
    "offset beyond": (GOOD.change("a", offset=1 << 62, crc=0), f"{DATA}: 'a' is at bytes 4611"),
    "offset and size overflow": (
        GOOD.change("a", offset=(1 << 63) - 4, crc=0),
        "'a' is at bytes 9223372036854775804 to 9223372036854775820, but the file has 48",
    ),
    "one byte beyond": (GOOD.change("b", sizes=(5,), offset=29, crc=0), "to 49, but the file has"),
    "a shard that is not there": (GOOD.change("a", shard=1), "in file 1 of 1"),
    "a negative shard": (GOOD.change("a", shard=-1), "in file -1 of 1"),
    "bad checksum": (GOOD.change("b", crc=1), f"{DATA}: 'b': the checksum of its 12 bytes at b"),
    "no checksum": (GOOD.change("b", crc=0), "'b': the checksum"),
    "checksum of a slice": (
        replace(GOOD, slices=GOOD.slices | {FIRST: Tensor((2,), 28, crc=1)}),
        f"{DATA}: 'c': the checksum of its 8 bytes at byte 28",
    ),
    "the same bytes twice": (
        GOOD.change("b", offset=12),
        f"{DATA}: 'b' at byte 12 overlaps 'a'",
    ),
    "no bytes": (replace(GOOD, data=b"", tensors={"a": replace(A, crc=0)}, slices={}), "has 0$"),
    "a name that is no text": (
        replace(GOOD, slices=GOOD.slices | {b"\xff": Tensor((1,))}),
        r"the name b'\\xff' is not UTF-8",
    ),
    "a slice of no tensor": (
        replace(GOOD, slices=GOOD.slices | {LOOSE: Tensor((3,), 16)}),
        "a slice that no tensor lists",
    ),
    "a slice that is missing": (
        replace(GOOD, slices={FIRST: GOOD.slices[FIRST]}),
        r"'c': its slice at \[2\] is missing",
    ),
    "a gap": (sliced(extents((0, 1)), extents((2, 3))), r"'c': its slice at \[0\] is missing"),
    "a gap between slices": (
        sliced(
            extents((0, 1)),
            extents((2, 3)),
            entries={slice_key("c", ((0, 1),)): Tensor((1,), 28), SECOND: GOOD.slices[SECOND]},
        ),
        "'c': its slices do not meet: 1, then 2",
    ),
    "an overlap": (
        sliced(
            extents((0, 2)),
            extents((1, 4)),
            entries={
                FIRST: GOOD.slices[FIRST],
                slice_key("c", ((1, 4),)): Tensor((4,), 32),
            },
        ),
        "'c': its slices do not meet: 2, then 1",
    ),
    "a gap at the end": (
        sliced(extents((0, 2)), entries={FIRST: GOOD.slices[FIRST]}),
        "'c': its slices end at 2 of 5",
    ),
    "one slice twice": (sliced(extents((0, 2)), extents((0, 2))), "is missing, or of another"),
    "a slice beyond the tensor": (sliced(extents((0, 2)), extents((2, 4))), "a slice of 4 from 2"),
    "a slice that overflows": (sliced(extents((1, (1 << 63) - 1))), "in a dimension of 5"),
    "a negative start": (sliced(extents((-1, 2))), "a slice of 2 from -1"),
    "a negative length": (sliced(extents((0, -2))), "a slice of -2 from 0"),
    "a start without a length": (sliced(write_field(1, write_field(1, 2))), "of -1 from 2"),
    "a slice of nothing": (sliced(extents((0, 0))), "a slice of 0 from 0"),
    "another rank": (sliced(extents((0, 2), None)), "a slice of 2 dimensions, where it has 1"),
    "slices of a scalar": (
        replace(GOOD, tensors={"c": replace(C, sizes=(), slices=(b"",))}),
        "a slice of 0 dimensions",
    ),
    "a slice of another dtype": (
        replace(GOOD, slices=GOOD.slices | {FIRST: Tensor((2,), 28, dtype=3)}),
        r"its slice at \[0\] is missing, or of another kind",
    ),
    "a slice of another shape": (
        replace(GOOD, slices=GOOD.slices | {FIRST: Tensor((1, 2), 28)}),
        r"its slice at \[0\] is missing, or of another kind",
    ),
    "slices of a slice": (
        replace(GOOD, slices=GOOD.slices | {FIRST: Tensor((2,), 28, slices=(extents((0, 2)),))}),
        r"its slice at \[0\] is missing, or of another kind",
    ),
    "many slices": (sliced(*(b"",) * 25_000), "'c': byte .*: a field 7 that does not fit"),
    "names with and without the ending of TF2": (
        replace(
            GOOD, tensors={"a": A, "a/.ATTRIBUTES/VARIABLE_VALUE": Tensor((1,), 16)}, slices={}
        ),
        "'a' is there twice",
    ),
    "many tensors": (
        replace(
            GOOD, tensors={f"{n:05}": Tensor((0,), crc=mask(0)) for n in range(10_001)}, slices={}
        ),
        "10001 tensors are more than 10000",
    ),
}


def test_the_good_one(tf: Any, tmp_path: Path) -> None:
    assert agrees(tf, GOOD.write(tmp_path))
    result = tf1.read(tmp_path).tensors
    assert {name: tensor.tolist() for name, tensor in result.items()} == {
        "a": [[0, 1], [2, 3]],
        "b": [4, 5, 6],
        "c": [7, 8, 9, 10, 11],
    }


@pytest.mark.parametrize("case", BAD)
def test_bad_bundles(case: str, tmp_path: Path) -> None:
    bundle, message = BAD[case]
    prefix = bundle.write(tmp_path)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        tf1.read(prefix)
    assert str(tmp_path) in str(caught.value)
    assert time.process_time() - start < 10  # not a speed claim: none may loop on and on


@pytest.mark.parametrize("code", [7, 20, 21])
def test_what_is_no_tensor_is_left_out(code: int, tmp_path: Path) -> None:
    """Strings, resources, variants; those that keep a checkpoint's books are not worth a word."""
    second = Tensor((3,), 16, size=5, dtype=code)
    built = replace(GOOD, tensors={"a": A, "b": second}, slices={})
    contents = tf1.read(built.write(tmp_path))
    assert contents.tensors.keys() == {"a"}
    assert contents.notes == ("1 entries that are no numbers left out: b",)
    built = replace(built, tensors={"a": A, "_CHECKPOINTABLE_OBJECT_GRAPH": second})
    assert tf1.read(built.write(tmp_path)).notes == ()
    beyond = replace(built, tensors={"a": A, "b": replace(second, size=500)})
    with pytest.raises(CheckpointError, match="'b' is at bytes 16 to 516"):
        tf1.read(beyond.write(tmp_path))


def _link(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return link


def _pipe(folder: Path) -> None:
    (folder / DATA).unlink()
    os.mkfifo(folder / DATA)


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no data": (lambda folder: (folder / DATA).unlink(), rf"there is no {DATA}"),
    "no index": (lambda folder: (folder / INDEX).unlink(), rf"there is no {INDEX}"),
    "empty data": (lambda folder: (folder / DATA).write_bytes(b""), rf"{DATA}: .* file has 0"),
    "empty index": (lambda folder: (folder / INDEX).write_bytes(b""), rf"{INDEX}: the 0 bytes"),
    "a huge index": (lambda folder: os.truncate(folder / INDEX, 1 << 40), "larger than 4194304"),
    "another table's ending": (
        lambda folder: (folder / INDEX).write_bytes(GOOD.index()[:-8] + bytes(8)),
        rf"{INDEX}: .* do not end as an index does",
    ),
    "data in a pipe": (_pipe, "is not a regular file"),
    "data elsewhere": (_link(DATA), "outside the model's folder"),
    "the index elsewhere": (_link(INDEX), "outside the model's folder"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_files(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    spoil, message = FILES[case]
    prefix = GOOD.write(folder)
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        tf1.read(prefix)


def test_a_v1_checkpoint(tf: Any, tmp_path: Path) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("w", (3,))
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver(write_version=v1.train.SaverDef.V1)
        saver.save(session, str(tmp_path / "old.ckpt"))
    assert not (tmp_path / "old.ckpt.index").exists()
    with pytest.raises(CheckpointError, match=r"old\.ckpt: the V1 format.*save it with"):
        tf1.read(tmp_path / "old.ckpt")
    shutil.copy(tmp_path / "old.ckpt", tmp_path / "renamed.index")
    with pytest.raises(CheckpointError, match=r"renamed\.index: byte .* V1 format"):
        tf1.read(tmp_path / "renamed")


def read_with_tensorflow(tf: Any, prefix: Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(prefix))
    kinds = reader.get_variable_to_dtype_map()
    others = (tf.string, tf.resource, tf.variant)
    return {name: reader.get_tensor(name) for name, kind in kinds.items() if kind not in others}


def agrees(tf: Any, prefix: Path) -> bool:
    """Refused, or read as TensorFlow reads it; True when it was read."""
    try:
        contents = tf1.read(prefix, slots=True)
    except CheckpointError:
        return False
    try:
        want = read_with_tensorflow(tf, prefix)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise AssertionError("read what TensorFlow refuses") from error
    assert contents.tensors.keys() == want.keys() - {"global_step"}
    for name, tensor in contents.tensors.items():
        assert str(tensor.dtype).removeprefix("torch.") == want[name].dtype.name
        assert tuple(tensor.shape) == want[name].shape
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == want[name].tobytes()
    return True


def refused(prefix: Path) -> bool:
    try:
        tf1.read(prefix)
    except CheckpointError:
        return True
    return False


def test_truncations(tmp_path: Path) -> None:
    prefix = GOOD.write(tmp_path)
    for name in (INDEX, DATA):
        content = (tmp_path / name).read_bytes()
        for size in range(len(content)):
            (tmp_path / name).write_bytes(content[:size])
            assert refused(prefix), (name, size)
        (tmp_path / name).write_bytes(content)
    assert not refused(prefix)


@pytest.mark.parametrize("flips", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_bit_flips(flips: int, tmp_path: Path) -> None:
    """Every byte is under a checksum, so every flip is found."""
    rng = random.Random(3)
    prefix = GOOD.write(tmp_path)
    for _ in range(flips):
        path = tmp_path / rng.choice((INDEX, INDEX, INDEX, DATA))
        content = path.read_bytes()
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert refused(prefix)
        path.write_bytes(content)


def mutated(data: st.DataObject, content: bytes) -> bytes:
    """A few bytes changed, taken out or put in."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1)) if changed else 0
        kind = data.draw(st.sampled_from(("set", "flip", "cut", "insert", "number")))
        if kind == "set" and changed:
            changed[at] = data.draw(st.integers(0, 255))
        elif kind == "flip" and changed:
            changed[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del changed[at : at + data.draw(st.integers(1, 4))]
        elif kind == "insert":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=6))
        else:
            changed[at : at + 1] = write_varint(data.draw(st.integers(-2, 1 << 64)))
    return bytes(changed)


def try_mutants(tf: Any, folder: Path, data: st.DataObject) -> None:
    """One value of the index mutated under checksums made good again."""
    items = {b"": GOOD.header}
    items |= {key: tensor.entry(GOOD.data) for key, tensor in GOOD.slices.items()}
    items |= {name.encode(): tensor.entry(GOOD.data) for name, tensor in GOOD.tensors.items()}
    key = data.draw(st.sampled_from(sorted(items)))
    if key and data.draw(st.integers(0, 9)) == 0:
        items[mutated(data, key) or b"x"] = items.pop(key)
    else:
        items[key] = mutated(data, items[key])
    (folder / INDEX).write_bytes(sstable.build(sorted(items.items())))
    agrees(tf, folder / "x")


SHARED = [HealthCheck.function_scoped_fixture]


@settings(max_examples=300, suppress_health_check=SHARED)
@given(st.data())
def test_mutations(tf: Any, tmp_path: Path, data: st.DataObject) -> None:
    GOOD.write(tmp_path)
    try_mutants(tf, tmp_path, data)


@pytest.mark.slow
@settings(max_examples=5_000, suppress_health_check=SHARED)
@given(st.data())
def test_many_mutations(tf: Any, tmp_path: Path, data: st.DataObject) -> None:
    GOOD.write(tmp_path)
    try_mutants(tf, tmp_path, data)


@settings(max_examples=200, suppress_health_check=SHARED)
@given(st.data())
def test_mutations_of_a_block(tf: Any, tmp_path: Path, data: st.DataObject) -> None:
    """The table's structure, of the keys or of the handles, under a checksum made good again."""
    prefix = GOOD.write(tmp_path)
    index = bytearray(GOOD.index())
    begin, size = data.draw(st.sampled_from(blocks(bytes(index))))
    index[begin + data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    crc = mask(crc32c(bytes(index[begin : begin + size + 1])))
    index[begin + size + 1 : begin + size + 5] = crc.to_bytes(4, "little")
    (tmp_path / INDEX).write_bytes(index)
    agrees(tf, prefix)


def blocks(index: bytes) -> list[tuple[int, int]]:
    """The one block of keys, which ends where that of metadata begins, and that of handles."""
    numbers, at = [], len(index) - sstable.FOOTER
    for _ in range(4):
        number, at = varint(index, at, len(index))
        numbers.append(number)
    return [(0, numbers[0] - sstable.TRAILER), (numbers[2], numbers[3])]


def test_bad_bundles_take_little_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    for bundle, _ in BAD.values():
        prefix = bundle.write(tmp_path)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert refused(prefix)
        assert tracemalloc.get_traced_memory()[1] - before < 64 << 20
    tracemalloc.stop()
    assert sstable.KEY_LIMIT * sstable.ITEM_LIMIT < 48 << 20  # all keys, however they share bytes
