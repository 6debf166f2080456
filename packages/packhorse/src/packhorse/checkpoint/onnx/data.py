"""Locate and read the tensors of an ONNX file.

The file is read in pages, since its weights are gigabytes and its other fields are not; it is not
mapped, because truncating a mapped file kills the process. The numbers of a tensor are in
`raw_data`, in the field of their type, or in another file, which must be in the model's folder.
Everything is checked before anything is allocated. Where protobuf would take the last of a repeated
field, or skip one of the wrong wire type, the file is refused, so that all readers read the same.

Follows TensorProto of onnx.proto and https://onnx.ai/onnx/repo-docs/ExternalData.html.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from packhorse import wire
from packhorse.checkpoint import files
from packhorse.checkpoint.onnx.graph import StoredTensor
from packhorse.errors import CheckpointError
from packhorse.wire import BYTES, VARINT, Field

FIELD_LIMIT = 1_000_000  # in all messages together, bounds time; BERT-Large has some 150,000
TEXT_LIMIT = 1 << 16  # bytes of a name
RANK_LIMIT = 8  # numbers in TensorProto.dims
SIZE_LIMIT = 1 << 40  # each of them
PAGE = 1 << 16  # bytes that are read at a time to parse fields
CHUNK = 1 << 20  # bytes of packed numbers that are decoded at a time

# TensorProto.DataType → our dtype, the field of numbers that are not raw, and their range: that
# field may be wider than the dtype (int32_data holds int8 too), and wider values are refused.
DTYPES = {
    1: (torch.float32, 4, None),
    2: (torch.uint8, 5, (0, 255)),
    3: (torch.int8, 5, (-128, 127)),
    4: (torch.uint16, 5, (0, 65_535)),
    5: (torch.int16, 5, (-32_768, 32_767)),
    6: (torch.int32, 5, (-(1 << 31), (1 << 31) - 1)),
    7: (torch.int64, 7, None),
    9: (torch.bool, 5, (0, 1)),
    10: (torch.float16, 5, (0, 65_535)),
    11: (torch.float64, 10, None),
    12: (torch.uint32, 11, (0, (1 << 32) - 1)),
    13: (torch.uint64, 11, None),
    16: (torch.bfloat16, 5, (0, 65_535)),
    21: (torch.uint8, 5, (0, 15)),
    22: (torch.int8, 5, (-8, 7)),
}
HALVES = (21, 22)  # uint4 and int4: two in a byte, the low bits first; read from raw bytes only
# Numbers of fields in TensorProto.
DIMS = 1
DATA_TYPE = 2
SEGMENT = 3
STRING_DATA = 6
NAME = 8
RAW_DATA = 9
EXTERNAL_DATA = 13
DATA_LOCATION = 14
TYPED = (4, 5, 7, 10, 11)  # float_data, int32_data, int64_data, double_data, uint64_data
FIXED = (4, 10)  # those of fixed width; the others are varints
# The wire type of each field; None: numbers, packed or not.
TENSOR: Mapping[int, int | None] = {
    DIMS: None,
    DATA_TYPE: VARINT,
    SEGMENT: BYTES,
    STRING_DATA: BYTES,
    NAME: BYTES,
    RAW_DATA: BYTES,
    EXTERNAL_DATA: BYTES,
    DATA_LOCATION: VARINT,
    **dict.fromkeys(TYPED, BYTES),
}
PAIR = {1: BYTES, 2: BYTES}  # StringStringEntryProto: key, value
EXTERNAL_KEYS = {"location", "offset", "length", "checksum"}
FieldsByNumber = dict[int, list[Field]]


@dataclass(frozen=True)
class DataLocation:
    """Where the numbers of a tensor are."""

    begin: int
    end: int
    field: int = 0  # the one they are packed in, of TYPED; 0: raw
    file: str | None = None  # external file, relative to the model's folder; None: the model's
    to_end_of_file: bool = False  # no length is stated: they must end where the file ends
    checksum: str = ""  # SHA1 of the external file


class MessageFile:
    """A file of protobuf messages, indexed like bytes but read page by page."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.page = b""
        self.page_begin = 0
        self.remaining_fields = FIELD_LIMIT

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, int):
            return self.bytes(key.start, min(key.stop, self.size))
        if not self.page_begin <= key < self.page_begin + len(self.page):
            self.page_begin = key - key % PAGE
            self.page = self.bytes(self.page_begin, min(self.page_begin + PAGE, self.size))
        return self.page[key - self.page_begin]

    def bytes(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`; raises if the file ends before."""
        self.file.seek(begin)
        data = self.file.read(max(end - begin, 0))
        if len(data) < end - begin:
            raise CheckpointError(f"byte {begin + len(data)}: the file ends here")
        return data

    def fields(
        self, known: Mapping[int, int | None], begin: int = 0, end: int | None = None
    ) -> FieldsByNumber:
        """The fields of a message that are in `known`, which maps numbers to wire types.

        A wire type of None stands for a repeated number, packed or not.
        """
        result: FieldsByNumber = {}
        for field in wire.fields(cast(wire.Buffer, self), begin, self.size if end is None else end):
            self.remaining_fields -= 1
            if self.remaining_fields < 0:
                raise CheckpointError(f"byte {field.begin}: more than {FIELD_LIMIT} fields")
            if field.number not in known:
                continue
            kind = known[field.number]
            if field.kind not in ((VARINT, BYTES) if kind is None else (kind,)):
                raise CheckpointError(
                    f"byte {field.begin}: field {field.number} has the wire type {field.kind}"
                )
            result.setdefault(field.number, []).append(field)
        return result

    def single(self, fields: FieldsByNumber, number: int) -> Field | None:
        """The field of this number; None if it is absent. Raises if it is repeated."""
        occurrences = fields.get(number, [])
        if len(occurrences) > 1:
            raise CheckpointError(f"byte {occurrences[1].begin}: field {number} is there twice")
        return occurrences[0] if occurrences else None

    def text(self, field: Field | None) -> str:
        """A short text; empty if the field is absent."""
        if field is None:
            return ""
        if field.value > TEXT_LIMIT:
            raise CheckpointError(f"byte {field.begin}: a text of {field.value} bytes")
        return wire.text(cast(wire.Buffer, self), field)

    def pair(self, field: Field) -> tuple[str, Field | None]:
        """Key and value of a StringStringEntryProto."""
        fields = self.fields(PAIR, field.begin, field.end)
        return self.text(self.single(fields, 1)), self.single(fields, 2)

    def numbers(self, fields: Iterable[Field], limit: int) -> tuple[int, ...]:
        """Signed numbers, packed or not; raises if there are more than `limit`."""
        result: list[int] = []
        for field in fields:
            if field.kind == VARINT:
                result.append(wire.signed(field.value))
            elif field.value > 10 * limit:  # a varint has at most 10 bytes
                raise CheckpointError(f"byte {field.begin}: more than {limit} numbers")
            else:
                packed = self.bytes(field.begin, field.end)
                result += [wire.signed(value) for value in wire.varints(packed, 0, len(packed))]
        if len(result) > limit:
            raise CheckpointError(f"more than {limit} numbers: {result[:limit]} …")
        return tuple(result)


def read_stored(data: MessageFile, field: Field, name: str | None = None) -> StoredTensor:
    """Describe a TensorProto, after checking its shape against the bytes of its numbers.

    name: of a tensor in an attribute, which has none.
    """
    fields = data.fields(TENSOR, field.begin, field.end)
    name = data.text(data.single(fields, NAME)) if name is None else name
    try:
        shape = data.numbers(fields.get(DIMS, []), RANK_LIMIT)
        if any(not 0 <= size < SIZE_LIMIT for size in shape):
            raise CheckpointError(f"the shape {list(shape)} has sizes that are no counts")
        if SEGMENT in fields:
            raise CheckpointError("a tensor in segments is not read")
        data_type = data.single(fields, DATA_TYPE)
        dtype = data_type.value if data_type else 0
        location = _locate(data, fields, dtype, math.prod(shape))
        return StoredTensor(name, dtype, shape, location)
    except CheckpointError as error:
        raise CheckpointError(f"byte {field.begin}: {name!r}: {error}") from error.__cause__


def _locate(
    data: MessageFile, fields: FieldsByNumber, dtype: int, count: int
) -> DataLocation | None:
    """Where the numbers are; None for a dtype that is not read."""
    raw = data.single(fields, RAW_DATA)
    data_location = data.single(fields, DATA_LOCATION)
    typed = [field for number in TYPED if (field := data.single(fields, number)) and field.value]
    external = data_location is not None and data_location.value == 1  # DataLocation.EXTERNAL
    places = len(typed) + sum([raw is not None, external, STRING_DATA in fields])
    if external != (EXTERNAL_DATA in fields) or places > 1:
        raise CheckpointError("it is not clear where its numbers are: there are several places")
    if dtype not in DTYPES:
        return None
    size = -(-count // 2) if dtype in HALVES else count * DTYPES[dtype][0].itemsize
    if external:
        return _external_location(data, fields[EXTERNAL_DATA], size)
    if typed:
        return _typed_location(typed[0], dtype, count)
    begin, end = (raw.begin, raw.end) if raw else (0, 0)
    _check_size(end - begin, size)
    return DataLocation(begin, end)


def _check_size(present: int, needed: int) -> None:
    if present != needed:
        raise CheckpointError(f"it has {present} bytes, its shape and type {needed}")


def _typed_location(field: Field, dtype: int, count: int) -> DataLocation:
    torch_dtype, number, _ = DTYPES[dtype]
    if field.number != number or dtype in HALVES:
        raise CheckpointError(f"the numbers of type {dtype} are not in the field for them")
    if number in FIXED:
        _check_size(field.value, count * torch_dtype.itemsize)
    elif not count <= field.value <= 10 * count:
        raise CheckpointError(f"{count} numbers do not fit {field.value} bytes")
    return DataLocation(field.begin, field.end, field=number)


def _external_location(data: MessageFile, entries: Iterable[Field], size: int) -> DataLocation:
    values: dict[str, str] = {}
    for key, value in map(data.pair, entries):
        if key in values or key not in EXTERNAL_KEYS:
            raise CheckpointError(f"external data with the key {key!r}, unknown or there twice")
        values[key] = data.text(value)
    offset = values.get("offset", "0")
    length = values.get("length", str(size))
    # The format has decimal numbers as text; 18 digits are below 2^63.
    if not all(re.fullmatch(r"[0-9]{1,18}", number) for number in (offset, length)):
        raise CheckpointError(f"external data of {length!r} bytes from {offset!r}: no counts")
    _check_size(int(length), size)
    return DataLocation(
        int(offset),
        int(offset) + size,
        file=values.get("location", ""),
        to_end_of_file="length" not in values,
        checksum=values.get("checksum", ""),
    )


class TensorLoader:
    """Read tensors of a model and of its external files, which are opened when needed."""

    def __init__(self, data: MessageFile, folder: Path, stack: ExitStack) -> None:
        self.data = data
        self.folder = folder
        self.stack = stack  # closes the files
        self.external: dict[str, BinaryIO] = {}
        self.digests: dict[str, str] = {}

    def check(self, tensors: Iterable[StoredTensor]) -> None:
        """Raise if one of the tensors cannot be read, or two overlap in an external file.

        Without overlaps the tensors take no more memory than the files have bytes.
        """
        ranges: dict[str, list[tuple[int, int, str]]] = {}
        for stored in tensors:
            location: DataLocation | None = stored.location
            if location is None:
                raise CheckpointError(f"{stored.name!r} has the type {stored.dtype}, not read here")
            if location.file is not None:
                self._check_external(stored, location)
            if location.file is not None and location.begin < location.end:
                ranges.setdefault(location.file, []).append(
                    (location.begin, location.end, stored.name)
                )
        for file, in_file in ranges.items():
            for (_, end, name), (begin, _, next_name) in pairwise(sorted(in_file)):
                if begin < end:
                    raise CheckpointError(
                        f"{name!r} and {next_name!r} overlap at byte {begin} of {file}"
                    )

    def _check_external(self, stored: StoredTensor, location: DataLocation) -> None:
        name = location.file or ""
        try:
            size = os.fstat(self._open(name).fileno()).st_size
            is_misplaced = location.to_end_of_file and location.end != size
            if location.end > size or is_misplaced:
                raise CheckpointError(f"{name} of {size} bytes does not end at {location.end}")
            if location.checksum and location.checksum.lower() != self._digest(name):
                raise CheckpointError(f"the checksum of {name} is another")
        except CheckpointError as error:
            raise CheckpointError(
                f"{stored.name!r} at byte {location.begin}: {error}"
            ) from error.__cause__

    def _open(self, location: str) -> BinaryIO:
        """The file at a relative path, whose parts must not lead out of the model's folder."""
        if location not in self.external:
            folder = self.folder
            *parents, name = location.split("/")
            for parent in parents:
                folder = files.inside(folder, parent)
            self.external[location] = self.stack.enter_context(files.open_file(folder, name))
        return self.external[location]

    def _digest(self, location: str) -> str:
        if location not in self.digests:
            file = self.external[location]
            file.seek(0)
            self.digests[location] = hashlib.file_digest(cast(Any, file), "sha1").hexdigest()
        return self.digests[location]

    def read(self, stored: StoredTensor) -> Tensor:
        """Read a tensor into new memory."""
        location: DataLocation = stored.location
        file = self.data.file if location.file is None else self._open(location.file)
        try:
            if location.field and location.field not in FIXED:
                return _unpack(file, stored).reshape(stored.shape)
            buffer = torch.empty(location.end - location.begin, dtype=torch.uint8)
            file.seek(location.begin)
            if len(buffer) and file.readinto(buffer.numpy()) != len(buffer):  # pyright: ignore
                raise CheckpointError("the file ends before its last byte")
            if stored.dtype in HALVES:
                buffer = _halves(buffer, stored)
            return buffer.view(DTYPES[stored.dtype][0]).reshape(stored.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{stored.name!r} at byte {location.begin}: {error}") from error


def _halves(data: Tensor, stored: StoredTensor) -> Tensor:
    """Numbers of four bits, as bytes; the sign of an int4 is its highest bit."""
    numbers = torch.stack([data & 15, data >> 4], dim=-1).flatten()[: stored.count]
    if DTYPES[stored.dtype][0] == torch.int8:
        return ((numbers.to(torch.int8) ^ 8) - 8).view(torch.uint8)
    return numbers


def _unpack(file: BinaryIO, stored: StoredTensor) -> Tensor:
    """Read numbers that are packed as varints, a chunk at a time."""
    location: DataLocation = stored.location
    dtype, _, limits = DTYPES[stored.dtype]
    # float16 and bfloat16 are stored as their bits.
    bits = torch.uint16 if dtype.is_floating_point else dtype
    result = torch.empty(stored.count, dtype=bits)
    target = result.numpy()
    count = 0
    rest = b""  # the beginning of a number that the next chunk continues
    file.seek(location.begin)
    remaining = location.end - location.begin
    while remaining:
        chunk = file.read(min(CHUNK, remaining))
        if not chunk:
            raise CheckpointError("the file ends before its last byte")
        remaining -= len(chunk)
        values, rest = _varints(rest + chunk)
        if stored.dtype == 13:  # uint64
            values = values.view(np.uint64)
        if limits and len(values) and not limits[0] <= values.min() <= values.max() <= limits[1]:
            raise CheckpointError(f"numbers outside of {limits[0]} to {limits[1]}")
        if count + len(values) > len(target):
            break
        target[count : count + len(values)] = values
        count += len(values)
    if remaining or rest or count != len(target):
        raise CheckpointError(f"it does not have the {len(target)} numbers of its shape")
    return result.view(dtype)


def _varints(data: bytes) -> tuple[np.ndarray, bytes]:
    """The complete varints in the data, as int64, and the bytes of an incomplete last one."""
    codes = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(codes < 0x80)  # the last byte of a varint has no continuation bit
    begins = np.concatenate([[0], ends + 1])
    rest = data[int(begins[-1]) :]
    begins = begins[:-1]
    widths = ends - begins + 1
    # Nine bytes hold 63 bits, so a tenth byte may only be 0 or 1.
    if (widths > 10).any() or len(rest) > 10 or (codes[ends[widths == 10]] > 1).any():
        raise CheckpointError("a number that does not end, or is larger than 64 bits")
    values = np.zeros(len(ends), np.uint64)
    # Seven bits per byte, the lowest first; numbers that have ended drop out of `longer`.
    for byte in range(int(widths.max(initial=0))):
        longer = widths > byte
        part = codes[begins[longer] + byte].astype(np.uint64) & np.uint64(0x7F)
        values[longer] |= part << np.uint64(7 * byte)
    return values.view(np.int64), rest
