"""TFRecord files of tf.train.Example messages, read without TensorFlow.

    for block in read_blocks(path):
        columns = read_features(block, ("input_ids", "input_mask"))     # name: [records, values]

A record is its length, the length's masked crc32c, its bytes and theirs; both checksums are always
compared. A file may be compressed with gzip or zlib as a whole, which its first bytes reveal.
Nothing is allocated before a limit has allowed it: a false length or a decompression bomb costs no
more than `RECORD_LIMIT`, and a file of any size no more than `BLOCK_BYTES`. A file that was cut
between two records looks complete: the format has no end mark. Records count from 0.

All records of a block are decoded together. They were written by one program, so their bytes have
one order of tags, and numpy walks a thousand of them in step (`_in_step`) in the time that Python
takes for ten; varints differ in width, but those of all lists end to end are a handful of calls.
Where a record was written in another order, `_one_by_one` walks them field by field; it is the
reference. The price is that the records of a block must have one shape, as TensorFlow's
fixed-length features must. Messages that protobuf would merge (a feature's values in two parts, or
of two kinds) are refused, because no program writes them.

Follows TensorFlow's record_writer.cc, example.proto and feature.proto.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, final

import numpy as np

from packhorse import wire
from packhorse.errors import CheckpointError, InputError

RECORD_LIMIT = 1 << 22  # bytes; BERT's have some 4,000, packed ones of 4,096 tokens 60,000
BLOCK_BYTES = 1 << 22  # of a block
BLOCK_RECORDS = 1024  # of a block
READ_BYTES = 1 << 18  # of a compressed file at a time
HEAD = struct.Struct("<QI")
EITHER_HEADER = zlib.MAX_WBITS + 32  # accept gzip's or zlib's


@dataclass(frozen=True, slots=True)
class TFRecordBlock:
    """Consecutive records of a file."""

    path: Path
    first: int  # the number of the first
    offsets: tuple[int, ...]  # position of each record in the (decompressed) file
    data: tuple[bytes, ...]

    def place(self, record: int) -> str:
        """How messages name a record of this block."""
        return f"{self.path}, record {self.first + record} (byte {self.offsets[record]})"


def sniff(path: Path) -> bool:
    """Whether the file begins like a TFRecord, compressed or not."""
    with _readable(path), path.open("rb") as file:
        try:
            head = _stream(file).read(HEAD.size)
        except (zlib.error, InputError):
            return False
        return _is_valid_head(head)


def read_blocks(path: Path) -> Iterator[TFRecordBlock]:
    """The records of a file, in order, in blocks of limited size."""
    offsets: list[int] = []
    data: list[bytes] = []
    first = size = 0
    for offset, record in read(path):
        if data and (len(data) == BLOCK_RECORDS or size + len(record) > BLOCK_BYTES):
            yield TFRecordBlock(path, first, tuple(offsets), tuple(data))
            first += len(data)
            size = 0
            offsets = []
            data = []
        offsets.append(offset)
        data.append(record)
        size += len(record)
    if data:
        yield TFRecordBlock(path, first, tuple(offsets), tuple(data))


def read(path: Path) -> Iterator[tuple[int, bytes]]:
    """The position in the (decompressed) file and the bytes of each record, verified."""
    with _readable(path), path.open("rb") as file:
        stream = _stream(file)
        offset = 0
        number = 0
        while (record := _next(stream, f"{path}, record {number} (byte {offset})")) is not None:
            yield offset, record
            offset += HEAD.size + len(record) + 4
            number += 1


def _next(stream: BinaryIO, place: str) -> bytes | None:
    try:
        head = stream.read(HEAD.size)
        if not head:
            return None
        length = _length(head)
        body = stream.read(length + 4)
        if len(body) < length + 4:
            raise InputError(f"the file ends after {len(body)} of the record's {length + 4} bytes")
        record = body[:length]
        if wire.mask(wire.crc32c(record)) != int.from_bytes(body[length:], "little"):
            raise InputError("the checksum of its data is wrong: the file is damaged")
        return record
    except zlib.error as error:
        raise InputError(f"{place}: the compressed data is damaged: {error}") from error
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _length(head: bytes) -> int:
    if len(head) < HEAD.size:
        raise InputError(f"the file ends after {len(head)} of a record's first {HEAD.size} bytes")
    if not _is_valid_head(head):
        raise InputError("the checksum of its length is wrong: damaged, or not a TFRecord")
    length, _ = HEAD.unpack(head)
    if length > RECORD_LIMIT:
        raise InputError(f"a record of {length} bytes; more than {RECORD_LIMIT} are not read")
    return length


def _is_valid_head(head: bytes) -> bool:
    return len(head) == HEAD.size and wire.mask(wire.crc32c(head[:8])) == HEAD.unpack(head)[1]


def _stream(file: BinaryIO) -> BinaryIO:
    """The content of the file, decompressed if it is compressed.

    A length may look like the magic of either compression; then its checksum decides.
    """
    head = file.read(HEAD.size)
    file.seek(0)
    is_zlib = head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0
    if _is_valid_head(head) or not (is_zlib or head[:2] == b"\x1f\x8b"):
        return file
    return io.BufferedReader(_Inflated(file), READ_BYTES)


@final
class _Inflated(io.RawIOBase):
    """The content of a gzip or zlib file, never decompressed further than it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.decoder = zlib.decompressobj(EITHER_HEADER)
        self.waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        part = b""
        while not part:
            self.waiting = self.waiting or self.file.read(READ_BYTES)
            if self.decoder.eof:
                if not self.waiting:
                    return 0
                self.decoder = zlib.decompressobj(
                    EITHER_HEADER
                )  # gzip files may have several members
            part = self.decoder.decompress(self.waiting, len(buffer))
            if not (part or self.waiting or self.decoder.eof):
                raise InputError("the compressed file is cut")
            self.waiting = self.decoder.unused_data or self.decoder.unconsumed_tail
        buffer[: len(part)] = part
        return len(part)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


FLOATS = 2  # kind of list in a Feature; 1 are bytes
INTEGERS = 3
ELEMENT = {FLOATS: wire.FIXED32, INTEGERS: wire.VARINT}
FIRST, SECOND, THIRD = (number << 3 | wire.BYTES for number in (1, 2, 3))  # the tags in use
NAME_LIMIT = 32  # bytes of a name; longer ones are read one by one
FEATURE_LIMIT = 64  # features of a record; with more, records are read one by one


class _Irregular(Exception):
    """Raised for records whose bytes do not have one order of tags."""


class Values(NamedTuple):
    """The values of a feature, end to end and still encoded."""

    kind: int
    data: bytes | memoryview


def feature_names(block: TFRecordBlock) -> set[str]:
    """The names of numeric features in the first record of a block."""
    with _error_place(block, 0):
        return set(features(block.data[0]))


def read_features(block: TFRecordBlock, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The features of these names as arrays, [records, values]."""
    try:
        columns = _in_step(block.data, names)
    except _Irregular:
        columns = _one_by_one(block, names)
    return {name: _column(block, name, values) for name, values in columns.items()}


def _one_by_one(block: TFRecordBlock, names: Sequence[str]) -> dict[str, list[Values]]:
    columns: dict[str, list[Values]] = {name: [] for name in names}
    for record, data in enumerate(block.data):
        with _error_place(block, record):
            available = features(data)
            for name, column in columns.items():
                if name not in available:
                    raise InputError(f"has no feature {name!r}")
                column.append(available[name])
    return columns


def features(example: bytes) -> dict[str, Values]:
    """The numeric features of one Example, by name; of two with one name the last counts."""
    view = memoryview(example)
    by_name: dict[str, Values | None] = {}
    for features in _messages(view, 0, len(view)):
        for entry in _messages(view, features.begin, features.end):
            name, values = _entry(view, entry)
            by_name[name] = values
    return {name: values for name, values in by_name.items() if values is not None}


def _messages(view: memoryview, begin: int, end: int) -> Iterator[wire.Field]:
    """The messages in field 1; other fields are not needed."""
    for field in wire.fields(view, begin, end):
        if field.number == 1:
            if field.kind != wire.BYTES:
                raise CheckpointError(f"byte {field.begin}: a number where a message belongs")
            yield field


def _entry(view: memoryview, entry: wire.Field) -> tuple[str, Values | None]:
    inner = _members(view, entry, (1, 2))
    name = wire.text(view, inner[1]) if 1 in inner else ""
    kinds = _members(view, inner[2], (1, 2, 3)) if 2 in inner else {}
    if len(kinds) > 1:
        raise InputError(f"has two kinds of values in the feature {name!r}")
    for kind, values in kinds.items():
        if kind in ELEMENT:
            return name, Values(kind, _values(view, values, ELEMENT[kind]))
    return name, None


def _members(view: memoryview, message: wire.Field, known: Sequence[int]) -> dict[int, wire.Field]:
    """The known fields of a message by number; each may occur once."""
    fields: dict[int, wire.Field] = {}
    for field in wire.fields(view, message.begin, message.end):
        if field.number in known:
            if field.kind != wire.BYTES or field.number in fields:
                raise CheckpointError(f"byte {field.begin}: not a valid Example")
            fields[field.number] = field
    return fields


def _values(view: memoryview, values: wire.Field, element: int) -> bytes:
    """The values of a list end to end, whether it was written packed or one by one."""
    joined = bytearray()
    for field in wire.fields(view, values.begin, values.end):
        if field.number == 1:
            if field.kind not in (wire.BYTES, element):
                raise CheckpointError(f"byte {field.begin}: a list with a value of another kind")
            joined += view[field.begin : field.end]
    return bytes(joined)


def _in_step(records: Sequence[bytes], names: Sequence[str]) -> dict[str, list[Values]]:
    """The result of `_one_by_one` for records whose features have the usual order of tags.

    Each feature is then six tags and lengths, and every length must reach to the same end. The
    records may have their features in any order.
    """
    sizes = np.array([len(record) for record in records])
    # Padding at the end, so that reading ahead never leaves the array.
    joined = b"".join([*records, bytes(2 * NAME_LIMIT)])
    data = np.frombuffer(joined, np.uint8)
    ends = np.cumsum(sizes)
    # Kind, begin and end of each feature's values, in all records.
    spans = {name: np.zeros((3, len(records)), np.int64) for name in names}
    position, end = _open_field(data, ends - sizes, FIRST)
    _require(end == ends)
    for _ in range(FEATURE_LIMIT):
        if (position == ends).all():
            break
        position = _read_feature(data, position, ends, spans)
    _require(position == ends)
    for span in spans.values():
        _require(span[0] > 0)
    view = memoryview(joined)
    return {
        name: [Values(kind, view[begin:end]) for kind, begin, end in span.T.tolist()]
        for name, span in spans.items()
    }


def _read_feature(
    data: np.ndarray, position: np.ndarray, ends: np.ndarray, spans: dict[str, np.ndarray]
) -> np.ndarray:
    """Note the spans of one feature's values in each record; return where the next one begins."""
    name, end = _open_field(data, position, FIRST)
    _require(end <= ends)
    name, name_end = _open_field(data, name, FIRST)
    sizes = name_end - name
    _require(sizes <= NAME_LIMIT)
    feature, feature_end = _open_field(data, name_end, SECOND)
    values, values_end = _open_field(data, feature, SECOND, THIRD)
    values, packed_end = _open_field(data, values, FIRST)
    _require((feature_end == end) & (values_end == end) & (packed_end == end))
    letters = data[name[:, None] + np.arange(NAME_LIMIT)]
    letters = np.where(np.arange(NAME_LIMIT) < sizes[:, None], letters, 0)
    _require(letters < 0x80)  # beyond ASCII only `wire.text` can decide whether it is valid
    text = letters.astype(np.uint8).view(f"S{NAME_LIMIT}")[:, 0]
    for known, span in spans.items():
        records = np.flatnonzero((text == known.encode()) & (sizes == len(known)))
        span[:, records] = data[feature[records]] >> 3, values[records], end[records]
    return end


def _open_field(
    data: np.ndarray, position: np.ndarray, *tags: int
) -> tuple[np.ndarray, np.ndarray]:
    """Read a tag and a length in each record; return begin and end of the field's content."""
    _require(np.isin(data[position], tags))
    size = (data[position + 1] & 0x7F).astype(np.int64)
    begin = position + 2
    for byte in range(1, 4):
        more = data[begin - 1] >= 0x80
        if not more.any():
            break
        size += np.where(more, (data[begin] & 0x7F).astype(np.int64) << 7 * byte, 0)
        begin = begin + more
    _require(data[begin - 1] < 0x80)
    return begin, begin + size


def _require(regular: np.ndarray) -> None:
    if not regular.all():
        raise _Irregular


def _column(block: TFRecordBlock, name: str, values: Sequence[Values]) -> np.ndarray:
    """The values of a feature in all records, [n, width]; all must be as wide as the first."""
    kind = values[0].kind
    for record, value in enumerate(values):
        if value.kind != kind:
            raise InputError(f"{block.place(record)}: {name!r} is of another kind than before it")
    data = np.frombuffer(b"".join(value.data for value in values), np.uint8)
    ends = np.cumsum([len(value.data) for value in values])
    stops = np.arange(0, len(data) + 1, 4) if kind == FLOATS else _varint_stops(data)
    last = np.searchsorted(stops, ends, side="right") - 1  # the last value that ends in a record
    widths = np.diff(last, prepend=0)
    bad = (stops[last] != ends) | (widths != widths[0])
    if bad.any():
        record = int(bad.argmax())
        raise InputError(
            f"{block.place(record)}: {name!r} is cut, or has {widths[record]} values where "
            f"record {block.first} has {widths[0]}"
        )
    if kind == FLOATS:
        return data.view("<f4").reshape(len(values), -1)
    numbers, fits = _varints(data, stops)
    if not fits.all():
        record = int(np.searchsorted(ends, stops[fits.argmin()], side="right"))
        raise InputError(f"{block.place(record)}: {name!r} has a number of more than 64 bits")
    return numbers.reshape(len(values), -1)


def _varint_stops(data: np.ndarray) -> np.ndarray:
    """The end of each varint, which is the begin of the next; the first entry is 0."""
    return np.concatenate([[0], np.flatnonzero(data < 0x80) + 1])


def _varints(data: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The signed numbers between `stops`, and whether each fits into 64 bits.

    Computed in 32 bits where four bytes suffice, as they do for all numbers of BERT's records.
    """
    if len(stops) > len(data):  # masks and segment ids: each number is one byte
        return data.astype(np.int32), np.ones(len(data), bool)
    starts = stops[:-1]
    widths = np.diff(stops)
    fits = (widths < 10) | (widths == 10) & (data[stops[1:] - 1] < 2)
    widest = int(widths.max(initial=1))
    low = (data & 0x7F).astype(np.int32 if widest <= 4 else np.int64)
    values = low[starts]
    for byte in range(1, min(widest, 10)):
        longer = np.flatnonzero(widths > byte)
        values[longer] |= low[starts[longer] + byte] << 7 * byte
    return values, fits


@contextmanager
def _error_place(block: TFRecordBlock, record: int) -> Iterator[None]:
    """Add the record's place to errors."""
    try:
        yield
    except (CheckpointError, InputError) as error:
        raise InputError(f"{block.place(record)}: {error}") from error
