"""The tensors of an ONNX file: where their numbers lie, and reading them.

A file is a buffer that is read page by page, since its weights are gigabytes and its fields are
not; mapped into memory it would be simpler, but then truncating it would end the process. The
numbers of a tensor are raw, or packed in a field of their type, or in another file that must lie in
the model's folder. All is checked before anything is allocated. Where protobuf takes the last of a
field that is there twice, or overlooks one of the wrong kind, the file is refused: what is read is
what every reader reads.

Follows TensorProto of onnx.proto and https://onnx.ai/onnx/repo-docs/ExternalData.html.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
from packhorse.checkpoint.onnx.graph import Stored
from packhorse.errors import CheckpointError
from packhorse.wire import BYTES, VARINT, Field

FIELD_LIMIT = 1_000_000  # of all messages together; BERT-Large has some 150,000
TEXT_LIMIT = 1 << 16  # bytes of a name
PAGE = 1 << 16
CHUNK = 1 << 20

# TensorProto.DataType: what it is here, and the field and limits of numbers that are not raw.
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
}
TYPED = (4, 5, 7, 10, 11)  # the fields of numbers that are not raw
FIXED = (4, 10)  # of these those that are not varints
PAIR = {1: BYTES, 2: BYTES}
TENSOR: Mapping[int, int | None] = {
    1: None,  # the shape
    2: VARINT,  # the type
    3: BYTES,  # a segment
    6: BYTES,  # texts
    8: BYTES,  # the name
    9: BYTES,  # raw
    13: BYTES,  # external data
    14: VARINT,  # here or external
    **dict.fromkeys(TYPED, BYTES),
}
EXTERNAL_KEYS = {"location", "offset", "length", "checksum"}
Parts = dict[int, list[Field]]


@dataclass(frozen=True)
class Place:
    """Where the numbers of a tensor lie."""

    begin: int
    end: int
    typed: int = 0  # the field they are packed in; 0: raw
    file: str | None = None  # beside the model; None: in it
    last: bool = False  # nothing follows them in the file
    checksum: str = ""


class File:
    """A file of protobuf messages, opened for reading."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.page, self.begin = b"", 0
        self.fields_left = FIELD_LIMIT

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self.bytes(key.start, min(key.stop, self.size))
        if not self.begin <= key < self.begin + len(self.page):
            self.begin = key - key % PAGE
            self.page = self.bytes(self.begin, min(self.begin + PAGE, self.size))
        return self.page[key - self.begin]

    def bytes(self, begin: int, end: int) -> bytes:
        """These bytes, all of them."""
        self.file.seek(begin)
        found = self.file.read(max(end - begin, 0))
        if len(found) < end - begin:
            raise CheckpointError(f"byte {begin + len(found)}: the file ends here")
        return found

    def parts(
        self, known: Mapping[int, int | None], begin: int = 0, end: int | None = None
    ) -> Parts:
        """The `known` fields of a message; their wire type None: numbers, one by one or packed."""
        result: Parts = {}
        for field in wire.fields(cast(wire.Buffer, self), begin, self.size if end is None else end):
            self.fields_left -= 1
            if self.fields_left < 0:
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

    def one(self, parts: Parts, number: int) -> Field | None:
        """The field, if it is there."""
        found = parts.get(number, [])
        if len(found) > 1:
            raise CheckpointError(f"byte {found[1].begin}: field {number} is there twice")
        return found[0] if found else None

    def text(self, field: Field | None) -> str:
        """A short text; empty if it is not there."""
        if field is None:
            return ""
        if field.value > TEXT_LIMIT:
            raise CheckpointError(f"byte {field.begin}: a text of {field.value} bytes")
        return wire.text(cast(wire.Buffer, self), field)

    def pair(self, field: Field) -> tuple[str, Field | None]:
        """Key and value of an entry."""
        parts = self.parts(PAIR, field.begin, field.end)
        return self.text(self.one(parts, 1)), self.one(parts, 2)

    def numbers(self, found: Iterable[Field], limit: int) -> tuple[int, ...]:
        """A few signed numbers."""
        result: list[int] = []
        for field in found:
            if field.kind == VARINT:
                result.append(wire.signed(field.value))
            elif field.value > 10 * limit:
                raise CheckpointError(f"byte {field.begin}: more than {limit} numbers")
            else:
                packed = self.bytes(field.begin, field.end)
                result += [wire.signed(value) for value in wire.varints(packed, 0, len(packed))]
        if len(result) > limit:
            raise CheckpointError(f"more than {limit} numbers: {result[:limit]} …")
        return tuple(result)


def read_stored(data: File, field: Field, name: str | None = None) -> Stored:
    """What a TensorProto says of its numbers, checked against the room they have."""
    parts = data.parts(TENSOR, field.begin, field.end)
    name = data.text(data.one(parts, 8)) if name is None else name
    try:
        shape = data.numbers(parts.get(1, []), 8)
        if any(not 0 <= size < 1 << 40 for size in shape):
            raise CheckpointError(f"the shape {list(shape)} has sizes that are no counts")
        if 3 in parts:
            raise CheckpointError("a tensor in segments is not read")
        dtype = data.one(parts, 2)
        kind = dtype.value if dtype else 0
        return Stored(name, kind, shape, _place(data, parts, kind, math.prod(shape)))
    except CheckpointError as error:
        raise CheckpointError(f"byte {field.begin}: {name!r}: {error}") from error.__cause__


def _place(data: File, parts: Parts, dtype: int, count: int) -> Place | None:
    """Where the numbers lie; None: of a type that is not read."""
    raw, where = data.one(parts, 9), data.one(parts, 14)
    typed = [field for number in TYPED if (field := data.one(parts, number)) and field.value]
    external = where is not None and where.value == 1
    if external != (13 in parts) or (raw is not None) + len(typed) + external + (6 in parts) > 1:
        raise CheckpointError("it is not clear where its numbers are: there are several places")
    if dtype not in DTYPES:
        return None
    width = DTYPES[dtype][0].itemsize
    if external:
        return _external(data, parts[13], count * width)
    if typed:
        return _typed(typed[0], dtype, count)
    begin, end = (raw.begin, raw.end) if raw else (0, 0)
    _same(end - begin, count * width)
    return Place(begin, end)


def _same(bytes_there: int, bytes_needed: int) -> None:
    if bytes_there != bytes_needed:
        raise CheckpointError(f"it has {bytes_there} bytes, its shape and type {bytes_needed}")


def _typed(field: Field, dtype: int, count: int) -> Place:
    kind, number, _ = DTYPES[dtype]
    if field.number != number:
        raise CheckpointError(f"the numbers of type {dtype} are not in the field for them")
    if number in FIXED:
        _same(field.value, count * kind.itemsize)
    elif not count <= field.value <= 10 * count:
        raise CheckpointError(f"{count} numbers do not fit {field.value} bytes")
    return Place(field.begin, field.end, typed=number)


def _external(data: File, entries: Iterable[Field], size: int) -> Place:
    said: dict[str, str] = {}
    for key, value in map(data.pair, entries):
        if key in said or key not in EXTERNAL_KEYS:
            raise CheckpointError(f"external data with the key {key!r}, unknown or there twice")
        said[key] = data.text(value)
    offset, length = said.get("offset", "0"), said.get("length", str(size))
    if not all(re.fullmatch(r"[0-9]{1,18}", number) for number in (offset, length)):
        raise CheckpointError(f"external data of {length!r} bytes from {offset!r}: no counts")
    _same(int(length), size)
    return Place(
        int(offset),
        int(offset) + size,
        file=said.get("location", ""),
        last="length" not in said,
        checksum=said.get("checksum", ""),
    )


class Loader:
    """Reads tensors of a model and of the files beside it, which it opens as they are needed."""

    def __init__(self, data: File, folder: Path, stack: ExitStack) -> None:
        self.data, self.folder, self.stack = data, folder, stack
        self.beside: dict[str, BinaryIO] = {}
        self.digests: dict[str, str] = {}

    def check(self, every: Iterable[Stored]) -> None:
        """Refuse what cannot be read, before anything is."""
        ranges: dict[str, list[tuple[int, int, str]]] = {}
        for stored in every:
            if stored.at is None:
                raise CheckpointError(f"{stored.name!r} has the type {stored.dtype}, not read here")
            if stored.at.file is not None:
                self._check_external(stored)
                ranges.setdefault(stored.at.file, []).append(
                    (stored.at.begin, stored.at.end, stored.name)
                )
        for name, places in ranges.items():
            for (_, end, one), (begin, _, other) in _neighbours(places):
                if begin < end:
                    raise CheckpointError(
                        f"{one!r} and {other!r} overlap at byte {begin} of {name}"
                    )

    def _check_external(self, stored: Stored) -> None:
        place: Place = stored.at
        try:
            file = self._open(place.file or "")
            size = os.fstat(file.fileno()).st_size
            if place.end > size or (place.last and place.end != size):
                raise CheckpointError(f"{place.file} of {size} bytes does not end at {place.end}")
            if place.checksum and place.checksum.lower() != self._digest(place.file or ""):
                raise CheckpointError(f"the checksum of {place.file} is another")
        except CheckpointError as error:
            raise CheckpointError(
                f"{stored.name!r} at byte {place.begin}: {error}"
            ) from error.__cause__

    def _open(self, location: str) -> BinaryIO:
        """The file at a relative path; no part of it may lead out of the model's folder."""
        if location not in self.beside:
            folder, (*above, name) = self.folder, location.split("/")
            for part in above:
                folder = files.inside(folder, part)
            self.beside[location] = self.stack.enter_context(files.open_file(folder, name))
        return self.beside[location]

    def _digest(self, location: str) -> str:
        if location not in self.digests:
            file = self.beside[location]
            file.seek(0)
            self.digests[location] = hashlib.file_digest(cast(Any, file), "sha1").hexdigest()
        return self.digests[location]

    def read(self, stored: Stored) -> Tensor:
        """The numbers, in memory of their own."""
        place: Place = stored.at
        file = self.data.file if place.file is None else self._open(place.file)
        try:
            if place.typed and place.typed not in FIXED:
                return _unpack(file, stored).reshape(stored.shape)
            buffer = torch.empty(place.end - place.begin, dtype=torch.uint8)
            file.seek(place.begin)
            if len(buffer) and file.readinto(buffer.numpy()) != len(buffer):  # pyright: ignore
                raise CheckpointError("the file ends before its last byte")
            return buffer.view(DTYPES[stored.dtype][0]).reshape(stored.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{stored.name!r} at byte {place.begin}: {error}") from error


def _neighbours(places: list[tuple[int, int, str]]) -> Iterator[tuple[Any, Any]]:
    ordered = sorted(place for place in places if place[0] < place[1])
    return pairwise(ordered)


def _unpack(file: BinaryIO, stored: Stored) -> Tensor:
    """Numbers that are packed as varints, a chunk at a time."""
    place: Place = stored.at
    dtype, _, limits = DTYPES[stored.dtype]
    # float16 and bfloat16 are there as their bits.
    bits = torch.uint16 if dtype.is_floating_point else dtype
    result = torch.empty(stored.count, dtype=bits)
    into, done, rest = result.numpy(), 0, b""
    file.seek(place.begin)
    left = place.end - place.begin
    while left:
        chunk = file.read(min(CHUNK, left))
        if not chunk:
            raise CheckpointError("the file ends before its last byte")
        left -= len(chunk)
        values, rest = _varints(rest + chunk)
        if stored.dtype == 13:
            values = values.view(np.uint64)
        if limits and len(values) and not limits[0] <= values.min() <= values.max() <= limits[1]:
            raise CheckpointError(f"numbers outside of {limits[0]} to {limits[1]}")
        if done + len(values) > len(into):
            break
        into[done : done + len(values)] = values
        done += len(values)
    if left or rest or done != len(into):
        raise CheckpointError(f"it does not have the {len(into)} numbers of its shape")
    return result.view(dtype)


def _varints(data: bytes) -> tuple[np.ndarray, bytes]:
    """The whole numbers in the data, as int64, and what is left of one that goes on."""
    codes = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(codes < 0x80)
    if not len(ends):
        ends = np.array([-1])
    begins = np.concatenate([[0], ends[:-1] + 1])
    widths = ends - begins + 1
    rest = data[int(ends[-1]) + 1 :]
    if widths.max() > 10 or len(rest) > 10 or np.any(codes[ends[widths == 10]] > 1):
        raise CheckpointError("a number that does not end, or is larger than 64 bits")
    values = np.zeros(len(ends), np.uint64)
    for place in range(int(widths.max())):
        goes_on = widths > place
        part = codes[begins[goes_on] + place].astype(np.uint64) & np.uint64(0x7F)
        values[goes_on] |= part << np.uint64(7 * place)
    return values[: len(values) if widths[0] else 0].view(np.int64), rest
