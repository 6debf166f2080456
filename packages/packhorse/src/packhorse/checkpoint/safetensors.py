"""Read safetensors files: 8 bytes with the length of a JSON header, the header, the numbers.

Not by the safetensors library, which only writes files here and is the reference in the tests: the
header must be bounded and free of duplicates before it is used, the file that was checked must be
the one that is read, and weights must be in memory of their own, because truncating a mapped file
kills the process. This reader accepts a subset of the files that the library accepts, and returns
the same tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from packhorse.checkpoint import files
from packhorse.errors import CheckpointError
from packhorse.json_types import is_list, is_object

HEADER_LIMIT = 4 << 20  # bytes; a header of ten thousand tensors has 1 MB
RANK_LIMIT = 8  # dimensions in `shape`
MESSAGE_LIMIT = 1_000  # characters of an error, which quotes names and numbers of the file
TENSOR_LIMIT = 10_000  # BERT-Large has 400
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _HeaderEntry:
    """One tensor of a header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of one safetensors file."""
    with files.open_file(folder, name) as file:
        try:
            start, entries = _read_header(file)
            return {entry.name: _read_tensor(file, start, entry) for entry in entries}
        except CheckpointError as error:
            message = str(error)[:MESSAGE_LIMIT]
            raise CheckpointError(f"{folder / name}: {message}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error


def _read_header(file: BinaryIO) -> tuple[int, list[_HeaderEntry]]:
    """The offset of the first tensor's bytes, and the tensors in the order of their bytes."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        ends = f": its header would end at byte {8 + length}" if size >= 8 else ""
        raise CheckpointError(f"the file of {size} bytes is truncated or no safetensors file{ends}")
    if length > HEADER_LIMIT:
        raise CheckpointError(f"the header has {length} bytes, more than {HEADER_LIMIT}")
    entries = _parse_header(file.read(length))
    # The format allows neither gaps nor overlaps, so tensors cannot take more than the file's size.
    expected = 0
    for entry in entries:
        if entry.begin != expected:
            raise CheckpointError(f"{entry.name!r} begins at byte {entry.begin}, not {expected}")
        expected = entry.end
    _check_size(entries, 8 + length, size)
    return 8 + length, entries


def _check_size(entries: list[_HeaderEntry], start: int, size: int) -> None:
    """Raise unless the file ends where its last tensor does."""
    needed = start + (entries[-1].end if entries else 0)
    if size < needed:
        cut = next(entry for entry in entries if start + entry.end > size)
        raise CheckpointError(
            f"the file is truncated: it has {size} bytes and needs {needed}; the first tensor that "
            f"is not whole is {cut.name!r}, at bytes {start + cut.begin} to {start + cut.end}"
        )
    if size > needed:
        raise CheckpointError(f"the last tensor ends at byte {needed}, the file at byte {size}")


def _parse_header(text: bytes) -> list[_HeaderEntry]:
    # Counted before parsing, since a million entries would take gigabytes as objects. An entry has
    # four colons and, with eight dimensions, twelve commas; names and metadata may have more.
    limits = {
        b"{": TENSOR_LIMIT + 2,
        b"[": 2 * TENSOR_LIMIT,
        b":": 8 * TENSOR_LIMIT,
        b",": 32 * TENSOR_LIMIT,
    }
    if any(text.count(character) > limit for character, limit in limits.items()):
        raise CheckpointError(f"the header lists more than {TENSOR_LIMIT} tensors")
    if not text.startswith(b"{"):
        raise CheckpointError("the header is no JSON object")
    try:
        header: dict[str, Any] = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is not valid JSON: {error}") from error
    metadata = header.pop("__metadata__", {})
    if not is_object(metadata) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("the header's __metadata__ does not map names to texts")
    entries = [_parse_entry(name, fields) for name, fields in header.items()]
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise CheckpointError(f"{name!r} is there {times} times")
    return result


def _parse_entry(name: str, fields: Any) -> _HeaderEntry:
    if not is_object(fields) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{name!r} is not described by dtype, shape and data_offsets")
    dtype = fields["dtype"]
    shape = fields["shape"]
    offsets = fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{name!r} has the dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not (
        _are_counts(shape)
        and _are_counts(offsets)
        and len(shape) <= RANK_LIMIT
        and len(offsets) == 2
    ):
        raise CheckpointError(
            f"{name!r} has the shape {shape!r} at {offsets!r}, which are no counts"
        )
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(f"{name!r} has {end - begin} bytes, its shape and dtype {expected}")
    return _HeaderEntry(name, DTYPES[dtype], tuple(shape), begin, end)


def _are_counts(values: Any) -> bool:
    # `type(...) is int`, because JSON's true and false are bools, which are ints to isinstance.
    return is_list(values) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _read_tensor(file: BinaryIO, start: int, entry: _HeaderEntry) -> Tensor:
    data = read_bytes(file, start + entry.begin, entry.end - entry.begin, entry.name)
    return data.view(entry.dtype).reshape(entry.shape)


def read_bytes(file: BinaryIO, offset: int, size: int, name: str) -> Tensor:
    """Read bytes of a file into new memory; `name` is for the error."""
    try:
        data = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:  # a sparse file can be larger than memory
        raise CheckpointError(f"{name!r}: there is no memory for its {size} bytes") from error
    file.seek(offset)
    if size and file.readinto(data.numpy()) != size:  # pyright: ignore
        raise CheckpointError(f"{name!r} ends before its last byte")
    return data
