"""What the index of a TensorFlow checkpoint says: which tensors there are, where their bytes lie.

Under the empty key is a header (BundleHeaderProto), under each name an entry (BundleEntryProto). A
partitioned variable's entry lists its slices, each of which has an entry of its own under a key
that begins with a zero byte. TensorFlow can store any set of boxes that way but its partitioners
cut along one axis; only such slices are joined here, and they must cover the tensor exactly.

A field that stands twice, a wire type that does not fit and a slice that belongs to no tensor are
refused, where protobuf and TensorFlow would take the last, skip it or never look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch

from packhorse import wire
from packhorse.checkpoint.tensorflow import sstable
from packhorse.errors import CheckpointError

DTYPES = {  # of tensorflow/core/framework/types.proto
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    8: torch.complex64,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    17: torch.uint16,
    18: torch.complex128,
    19: torch.float16,
    22: torch.uint32,
    23: torch.uint64,
}
NO_TENSORS = {7: "string", 20: "resource", 21: "variant"}
TENSOR_LIMIT = 10_000  # BERT-Large with its optimizer has 1,200
SHARD_LIMIT = 256  # all are open at once
DIMENSION_LIMIT = 8
VERSION = 1  # of the format that we know
V1 = (
    "the V1 format, of TensorFlow before 0.12, is not read: "
    "restore the checkpoint in TensorFlow and save it with tf.compat.v1.train.Saver"
)

Extents = tuple[tuple[int, int], ...]  # start and length in each dimension; length -1 is all of it


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes in a data file: a tensor, or a slice of one."""

    shard: int
    offset: int
    size: int
    crc: int  # masked
    left: int = 0  # where, in each row of the tensor's bytes, its part begins

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its bytes are `rows` rows, in each of which the pieces lie side by side."""

    name: str
    dtype: torch.dtype | None  # None: strings and the like, which are no tensors
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rows: int = 1


@dataclass(frozen=True, slots=True)
class _Message:
    """A BundleEntryProto."""

    code: int
    shape: tuple[int, ...]
    piece: Piece
    slices: tuple[Extents, ...]


def read(file: BinaryIO) -> tuple[int, list[Entry]]:
    """The number of data files, and the tensors in the order of their names."""
    table, items = sstable.read(file)
    if not items or items[0].key != b"":
        raise CheckpointError("the index has no header")
    shards = _read_header(table, items[0])
    whole: dict[str, _Message] = {}
    slices: dict[bytes, _Message] = {}
    for item in items[1:]:
        try:
            message = _read_entry(table, item, shards)
        except CheckpointError as error:
            raise CheckpointError(f"{_name(item)!r}: {error}") from error.__cause__
        if item.key[0] == 0:
            slices[item.key] = message
        else:
            whole[_name(item)] = message
    if len(whole) > TENSOR_LIMIT:
        raise CheckpointError(f"{len(whole)} tensors are more than {TENSOR_LIMIT}")
    entries = [_entry(name, message, slices) for name, message in whole.items()]
    if slices:
        raise CheckpointError(f"{min(slices)!r}: a slice of a tensor that does not list it")
    return shards, entries


def _name(item: sstable.Item) -> str:
    try:
        return item.key.decode("utf-8")
    except UnicodeDecodeError:
        if item.key[0] == 0:  # of a slice; its numbers are no text
            return repr(item.key)
        raise CheckpointError(f"byte {item.begin}: the name {item.key!r} is not UTF-8") from None


def _fields(
    table: bytes, begin: int, end: int, once: Mapping[int, int], many: int | None = None
) -> tuple[dict[int, wire.Field], list[wire.Field]]:
    """The fields that are known, by number, and those of the one that is repeated."""
    single: dict[int, wire.Field] = {}
    repeated: list[wire.Field] = []
    for field in wire.fields(table, begin, end):
        kind = wire.BYTES if field.number == many else once.get(field.number)
        if kind is None:
            continue
        if field.kind != kind or field.number in single or len(repeated) > sstable.ITEM_LIMIT:
            raise CheckpointError(f"byte {field.begin}: a field {field.number} that does not fit")
        if field.number == many:
            repeated.append(field)
        else:
            single[field.number] = field
    return single, repeated


def _number(fields: Mapping[int, wire.Field], number: int, absent: int = 0) -> int:
    return wire.signed(fields[number].value) if number in fields else absent


def _read_header(table: bytes, item: sstable.Item) -> int:
    """The number of data files."""
    try:
        once = {1: wire.VARINT, 2: wire.VARINT, 3: wire.BYTES}
        found, _ = _fields(table, item.begin, item.end, once)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, for the header of a V2 checkpoint; {V1}") from None
    shards = _number(found, 1)
    if not 0 < shards <= SHARD_LIMIT:
        raise CheckpointError(f"byte {item.begin}: {shards} data files, not 1 to {SHARD_LIMIT}")
    if _number(found, 2):
        raise CheckpointError(f"byte {item.begin}: the tensors are big-endian; these are not read")
    if 3 in found:
        place = found[3]
        version, bad = _fields(
            table, place.begin, place.end, {1: wire.VARINT, 2: wire.VARINT}, many=3
        )
        if bad or _number(version, 2) > VERSION or not 0 <= _number(version, 1) < 1 << 31:
            raise CheckpointError(f"byte {place.begin}: a version of the format that is not known")
    return shards


def _read_entry(table: bytes, item: sstable.Item, shards: int) -> _Message:
    once = {number: wire.VARINT for number in (1, 3, 4, 5)} | {2: wire.BYTES, 6: wire.FIXED32}
    found, slices = _fields(table, item.begin, item.end, once, many=7)
    code, shard, offset, size = (_number(found, number) for number in (1, 3, 4, 5))
    if code not in DTYPES and code not in NO_TENSORS:
        raise CheckpointError(f"byte {item.begin}: TensorFlow's data type {code} is not read")
    if not 0 <= shard < shards or offset < 0 or size < 0:
        raise CheckpointError(
            f"byte {item.begin}: {size} bytes from {offset} in file {shard} of {shards}"
        )
    shape = _read_shape(table, found[2]) if 2 in found else ()
    if code in DTYPES and not slices and size != math.prod(shape) * DTYPES[code].itemsize:
        raise CheckpointError(
            f"byte {item.begin}: {size} bytes, but its shape {list(shape)} and "
            f"{DTYPES[code]} ask for {math.prod(shape) * DTYPES[code].itemsize}"
        )
    crc = found[6].value if 6 in found else 0
    extents = tuple(_read_slice(table, field) for field in slices)
    return _Message(code, shape, Piece(shard, offset, size, crc), extents)


def _read_shape(table: bytes, place: wire.Field) -> tuple[int, ...]:
    """A TensorShapeProto."""
    found, dimensions = _fields(table, place.begin, place.end, {3: wire.VARINT}, many=2)
    sizes = [
        _number(_fields(table, field.begin, field.end, {1: wire.VARINT})[0], 1)
        for field in dimensions[: DIMENSION_LIMIT + 1]
    ]
    if _number(found, 3) or len(sizes) > DIMENSION_LIMIT or any(size < 0 for size in sizes):
        raise CheckpointError(f"byte {place.begin}: the shape {sizes} is none of a stored tensor")
    return tuple(sizes)


def _read_slice(table: bytes, place: wire.Field) -> Extents:
    """A TensorSliceProto."""
    _, extents = _fields(table, place.begin, place.end, {}, many=1)
    found = [
        _fields(table, field.begin, field.end, {1: wire.VARINT, 2: wire.VARINT})[0]
        for field in extents[: DIMENSION_LIMIT + 1]
    ]
    return tuple((_number(extent, 1), _number(extent, 2, -1)) for extent in found)


def _entry(name: str, message: _Message, slices: dict[bytes, _Message]) -> Entry:
    dtype = DTYPES.get(message.code)
    if not message.slices:
        return Entry(name, dtype, message.shape, (message.piece,))
    try:
        return _join(name, message, slices)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from error.__cause__


def _join(name: str, message: _Message, slices: dict[bytes, _Message]) -> Entry:
    """The entry of a partitioned variable; takes its slices away."""
    shape = message.shape
    parts = [
        (*_box(extents, shape), slices.pop(slice_key(name, extents), None))
        for extents in message.slices
    ]
    cut = {d for _, sizes, _ in parts for d, size in enumerate(sizes) if size != shape[d]}
    if len(cut) > 1:
        raise CheckpointError(f"its slices are cut along the axes {sorted(cut)}, not along one")
    axis = min(cut, default=0)
    dtype = DTYPES.get(message.code)
    step = math.prod(shape[axis + 1 :]) * (dtype.itemsize if dtype else 0)
    pieces, covered = [], 0
    for starts, sizes, part in sorted(parts, key=lambda part: (part[0][axis], part[1][axis])):
        if part is None or part.slices or part.code != message.code or part.shape != sizes:
            raise CheckpointError(f"its slice at {list(starts)} is missing, or of another kind")
        if starts[axis] != covered:
            raise CheckpointError(f"its slices do not meet: {covered}, then {starts[axis]}")
        covered += sizes[axis]
        at = part.piece
        pieces.append(Piece(at.shard, at.offset, at.size, at.crc, starts[axis] * step))
    if covered != shape[axis]:
        raise CheckpointError(f"its slices end at {covered} of {shape[axis]}")
    return Entry(name, dtype, shape, tuple(pieces), math.prod(shape[:axis]))


def _box(extents: Extents, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a slice begins, and its shape."""
    if not shape or len(extents) != len(shape):
        raise CheckpointError(f"a slice of {len(extents)} dimensions, where it has {len(shape)}")
    for (start, length), size in zip(extents, shape, strict=True):
        whole = length == -1 and start == 0
        if not whole and not (start >= 0 and length > 0 and start + length <= size):
            raise CheckpointError(f"a slice of {length} from {start}, in a dimension of {size}")
    sizes = (d if n == -1 else n for (_, n), d in zip(extents, shape, strict=True))
    return tuple(start for start, _ in extents), tuple(sizes)


def slice_key(name: str, extents: Extents) -> bytes:
    """The key of a slice, in the ordered code: keys sort as what they encode does."""
    escaped = name.encode().replace(b"\0", b"\0\xff")  # UTF-8 has no 0xff, the other to escape
    key = b"\0" + escaped + b"\0\1" + _ordered(len(extents))
    return key + b"".join(_ordered_signed(n) for extent in extents for n in extent)


def _ordered(value: int) -> bytes:
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _ordered_signed(value: int) -> bytes:
    """Big-endian, with as many leading ones as there are bytes; all inverted when negative."""
    size = (value if value >= 0 else ~value).bit_length() // 7 + 1
    ones = ((1 << size) - 1) << 7 * size
    return ((value ^ ones) & ((1 << 8 * size) - 1)).to_bytes(size, "big")
