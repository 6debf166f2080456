"""Protobuf's wire format and masked crc32c, for the files of TensorFlow and ONNX.

A message is read in place: `fields` walks a buffer and yields the position of each field, so that
nothing is copied, a reader descends only into fields it knows, and every error can name the byte.
No message is ever built as a whole, and nothing here recurses, so a file nested a million levels
deep does no harm. Groups, deprecated since 2008 and not used by these formats, raise an error.

Follows https://protobuf.dev/programming-guides/encoding and the mask of LevelDB's log format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from packhorse.errors import CheckpointError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # the wire types
FIELD_LIMIT = 2_000_000  # fields per message; the graph of BERT-Large has about ten thousand
Buffer = bytes | memoryview


class Field(NamedTuple):
    """One field of a message."""

    number: int
    kind: int  # VARINT, FIXED64, BYTES, FIXED32
    value: int  # unsigned; for BYTES their length
    begin: int  # position of the value in the buffer; for BYTES after the length
    end: int


def fields(data: Buffer, begin: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of the message in `data[begin:end]`, in file order."""
    at = begin
    end = len(data) if end is None else end
    for _ in range(FIELD_LIMIT):
        if at >= end:
            return
        tag, after_tag = varint(data, at, end)
        field = _field(data, tag >> 3, tag & 7, after_tag, end)
        if not 0 < tag >> 3 < 1 << 29 or field.end > end:
            raise CheckpointError(f"byte {at}: a field that does not fit its message")
        yield field
        at = field.end
    raise CheckpointError(f"byte {begin}: a message of more than {FIELD_LIMIT} fields")


def _field(data: Buffer, number: int, kind: int, at: int, end: int) -> Field:
    if kind == VARINT:
        value, after = varint(data, at, end)
        return Field(number, kind, value, at, after)
    if kind == BYTES:
        count, at = varint(data, at, end)
        return Field(number, kind, count, at, at + count)
    if kind in (FIXED32, FIXED64):
        width = 4 if kind == FIXED32 else 8
        return Field(number, kind, int.from_bytes(data[at : at + width], "little"), at, at + width)
    raise CheckpointError(f"byte {at}: wire type {kind} of field {number} is not read")


def varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """The unsigned number at `at`, of at most 64 bits, and the position after it."""
    if at < end and (byte := data[at]) < 0x80:  # most are a single byte
        return byte, at + 1
    value = shift = 0
    for position in range(at, min(at + 10, end)):  # 64 bits take at most 10 bytes of 7 bits
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, position + 1
        shift += 7
    raise CheckpointError(f"byte {at}: a number that does not end, or is larger than 64 bits")


def varints(data: Buffer, begin: int, end: int) -> Iterator[int]:
    """The numbers of a packed field."""
    while begin < end:
        value, begin = varint(data, begin, end)
        yield value


def signed(value: int) -> int:
    """The int64 (or negative int32) that protobuf stores as this unsigned varint."""
    return value - (1 << 64) if value >> 63 else value


def text(data: Buffer, field: Field) -> str:
    """The value of a text field."""
    if field.kind != BYTES:
        raise CheckpointError(f"byte {field.begin}: field {field.number} holds no text")
    try:
        return bytes(data[field.begin : field.end]).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"byte {field.begin}: a text that is not UTF-8") from error


def write_varint(value: int) -> bytes:
    """Encode a number of at most 64 bits; negative ones as protobuf writes an int64."""
    value &= (1 << 64) - 1
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def write_field(number: int, value: int | str | bytes) -> bytes:
    """Encode a field: a number as a varint, text and bytes (an inner message) with a length."""
    if isinstance(value, int):
        return write_varint(number << 3 | VARINT) + write_varint(value)
    content = value.encode("utf-8") if isinstance(value, str) else value
    return write_varint(number << 3 | BYTES) + write_varint(len(content)) + content


def write_fixed32(number: int, value: int) -> bytes:
    """Encode a field of four bytes."""
    return write_varint(number << 3 | FIXED32) + value.to_bytes(4, "little")


def crc32c(data: Buffer, before: int = 0) -> int:
    """The checksum of `data`, continued from the checksum `before`; holds the GIL."""
    import google_crc32c
    import numpy as np

    # The library does not accept a memoryview, whose buffer could be released while it reads.
    return google_crc32c.extend(before, np.frombuffer(data, np.uint8))  # pyright: ignore


def mask(crc: int) -> int:
    """Mask a checksum as TensorFlow stores it: a CRC over data that contains CRCs is weak."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
