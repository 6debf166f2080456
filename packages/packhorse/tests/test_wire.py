"""Protobuf's own library is the reference; what it could not have written is refused by place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse import wire
from packhorse.errors import CheckpointError
from packhorse.wire import BYTES, FIXED32, FIXED64, VARINT, Field

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def reference_message(name: str) -> Any:
    """A module of protobuf's own messages."""
    return pytest.importorskip(f"google.protobuf.{name}_pb2", reason="protobuf is not installed")


@given(INT64)
def test_numbers_as_protobuf_writes_them(number: int) -> None:
    written = reference_message("wrappers").Int64Value(value=number).SerializeToString()
    assert (wire.write_field(1, number) if number else b"") == written
    for field in wire.fields(written):
        assert field == (1, VARINT, number % (1 << 64), 1, len(written))
        assert wire.signed(field.value) == number


@given(st.text(), st.lists(st.text()), st.lists(st.integers(0, (1 << 31) - 1)))
def test_a_message_of_texts_and_numbers(name: str, texts: list[str], numbers: list[int]) -> None:
    kind = reference_message("descriptor").FileDescriptorProto
    written = kind(name=name, dependency=texts, public_dependency=numbers).SerializeToString()
    actual = wire.write_field(1, name)
    actual += b"".join(wire.write_field(3, text) for text in texts)
    actual += b"".join(wire.write_field(10, number) for number in numbers)
    assert actual == written
    result = list(wire.fields(memoryview(b"..." + written), 3))
    assert wire.text(b"..." + written, result[0]) == name
    assert [wire.text(b"..." + written, field) for field in result if field.number == 3] == texts
    assert [field.value for field in result if field.number == 10] == numbers


def test_fixed_widths_and_packed_numbers() -> None:
    single = reference_message("wrappers").FloatValue(value=1.0).SerializeToString()
    (four,) = wire.fields(single)
    (eight,) = wire.fields(reference_message("wrappers").DoubleValue(value=1.0).SerializeToString())
    assert four == Field(1, FIXED32, 0x3F800000, 1, 5)
    assert eight == Field(1, FIXED64, 0x3FF << 52, 1, 9)
    assert wire.write_fixed32(1, 0x3F800000) == single
    place = reference_message("descriptor").SourceCodeInfo.Location(path=[0, 1, 300, 70_000])
    packed = place.SerializeToString()
    (path,) = wire.fields(packed)
    assert list(wire.varints(packed, path.begin, path.end)) == [0, 1, 300, 70_000]


def test_a_message_ends_where_it_is_said_to() -> None:
    inner = wire.write_field(1, 5) + wire.write_field(2, b"abc")
    outer = wire.write_field(7, inner) + wire.write_field(8, 1)
    seven, eight = wire.fields(outer)
    assert [f.number for f in wire.fields(outer, seven.begin, seven.end)] == [1, 2]
    assert eight.begin == len(outer) - 1
    for end in range(seven.begin + 1, seven.end):
        whole = end in (seven.begin + 2,)  # after the first field
        if whole:
            assert len(list(wire.fields(outer, seven.begin, end))) == 1
        else:
            with pytest.raises(CheckpointError, match=r"byte \d+"):
                list(wire.fields(outer, seven.begin, end))


BAD = {
    "a number without end": (b"\x08" + b"\x80" * 11, "byte 1: a number that does not end"),
    "a number cut off": (b"\x08\x80", "byte 1: a number that does not end"),
    "a number of 65 bits": (b"\x08" + b"\xff" * 9 + b"\x02", "byte 1: .* larger than 64 bits"),
    "more bytes than there are": (b"\x0a\x05abcd", "byte 0: a field that does not fit"),
    "2**63 bytes": (b"\x0a" + wire.write_varint(1 << 63), "byte 0: a field that does not fit"),
    "half a fixed32": (b"\x0d\0\0", "byte 0: a field that does not fit"),
    "half a fixed64": (b"\x09" + bytes(7), "byte 0: a field that does not fit"),
    "field 0": (b"\x00\x01", "byte 0: a field that does not fit"),
    "field 2**29": (wire.write_varint(1 << 32) + b"\x01", "byte 0: a field that does not fit"),
    "a group": (b"\x0b\x0c", "wire type 3 of field 1 is not read"),
    "the end of a group": (b"\x0c", "wire type 4 of field 1 is not read"),
    "wire type 6": (b"\x0e", "wire type 6 of field 1 is not read"),
    "wire type 7": (b"\x0f", "wire type 7 of field 1 is not read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages(case: str) -> None:
    content, message = BAD[case]
    with pytest.raises(CheckpointError, match=message):
        list(wire.fields(content))


def test_a_message_of_too_many_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FIELD_LIMIT", 3)
    assert len(list(wire.fields(b"\x08\x01" * 2))) == 2
    with pytest.raises(CheckpointError, match="more than 3 fields"):
        list(wire.fields(b"\x08\x01" * 4))


def test_texts_that_are_none() -> None:
    (number,) = wire.fields(b"\x08\x01")
    with pytest.raises(CheckpointError, match="byte 1: field 1 holds no text"):
        wire.text(b"\x08\x01", number)
    (broken,) = wire.fields(b"\x0a\x01\xff")
    with pytest.raises(CheckpointError, match="byte 2: a text that is not UTF-8"):
        wire.text(b"\x0a\x01\xff", broken)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_crc32c_of_rfc_3720(kind: type) -> None:
    sums = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E, b"": 0}
    for data, crc in sums.items():
        assert wire.crc32c(kind(data)) == crc
        assert wire.crc32c(kind(data[5:]), wire.crc32c(kind(data[:5]))) == crc


def test_the_mask_can_be_taken_off() -> None:
    for crc in (0, 1, 0x8A9136AA, 0xFFFFFFFF):
        turned = (wire.mask(crc) - 0xA282EAD8) & 0xFFFFFFFF
        assert (turned << 15 | turned >> 17) & 0xFFFFFFFF == crc
    assert wire.mask(0) == 0xA282EAD8


def test_the_wire_types_are_told_apart() -> None:
    kinds = {VARINT: b"\x08\x00", FIXED64: b"\x09" + bytes(8), BYTES: b"\x0a\x00"}
    for kind, message in (kinds | {FIXED32: b"\x0d" + bytes(4)}).items():
        assert [(f.number, f.kind, f.value) for f in wire.fields(message)] == [(1, kind, 0)]
