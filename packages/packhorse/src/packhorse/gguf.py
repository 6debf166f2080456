"""Read what a GGUF file says: its metadata, and where its tensors are.

GGUF is llama.cpp's format of models: little-endian, a list of keys with typed values, a list of
tensors, and their numbers from the next multiple of the alignment on. Everything is bounded by the
size of the file before it is allocated. Nothing here knows what keys or tensors mean.

Follows https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from packhorse.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
KEY_LIMIT = 10_000  # llama.cpp's own files have some 40
TENSOR_LIMIT = 10_000  # BERT-Large has 400
ITEM_LIMIT = 5_000_000  # of a list; the largest vocabularies have a fifth of it
RANK_LIMIT = 4  # ggml's own
SIZE_LIMIT = 1 << 40  # of an axis
STRING, LIST = 8, 9
# Type of a value → that of numpy.
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True)
class StoredGguf:
    """A tensor of the file, not read yet."""

    name: str
    shape: tuple[int, ...]  # row-major: ggml's in reverse
    kind: int  # GGMLQuantizationType
    begin: int  # byte in the file

    @property
    def count(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """The metadata, lists of numbers as arrays, and the tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredGguf]
    size: int  # of the file in bytes


def read_header(file: BinaryIO) -> GgufFile:
    """Read everything but the numbers of the tensors."""
    header = _Header(file)
    if header.take(4) != MAGIC:
        raise CheckpointError("it does not begin as GGUF does")
    version = header.number("<u4")
    if version not in VERSIONS:
        raise CheckpointError(
            f"it has GGUF's version {version}, or is big-endian; versions 2 and 3 are read, which "
            f"llama.cpp writes since August 2023"
        )
    tensors = header.count(TENSOR_LIMIT, "tensors")
    keys = header.count(KEY_LIMIT, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = header.text()
        if key in metadata:
            raise CheckpointError(f"byte {header.at}: the key {key!r} is there twice")
        metadata[key] = header.value(header.number("<u4"), key)
    stored = [_tensor(header) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"the alignment {alignment!r} is no number of bytes")
    begin = -(-header.at // alignment) * alignment
    by_name = {
        tensor.name: StoredGguf(tensor.name, tensor.shape, tensor.kind, begin + tensor.begin)
        for tensor in stored
    }
    if len(by_name) < len(stored):
        raise CheckpointError("two tensors have one name")
    return GgufFile(metadata, by_name, header.size)


def _tensor(header: _Header) -> StoredGguf:
    name = header.text()
    rank = header.number("<u4")
    if not 0 < rank <= RANK_LIMIT:
        raise CheckpointError(f"{name!r}: byte {header.at}: {rank} axes")
    shape = tuple(header.number("<u8") for _ in range(rank))[::-1]
    if not all(0 < size <= SIZE_LIMIT for size in shape):
        raise CheckpointError(f"{name!r}: the shape {list(shape)} has sizes that are no counts")
    return StoredGguf(name, shape, header.number("<u4"), header.number("<u8"))


class _Header:
    """A file that is read from its beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = file.seek(0, 2)
        self.at = file.seek(0)

    def take(self, count: int) -> bytes:
        """The next bytes; raises if the file has fewer, before any are read."""
        if count > self.size - self.at:
            raise CheckpointError(f"byte {self.at}: {count} bytes are missing: it is truncated")
        self.at += count
        return self.file.read(count)

    def number(self, kind: str) -> Any:
        return np.frombuffer(self.take(np.dtype(kind).itemsize), kind)[0].item()

    def count(self, limit: int, items: str) -> int:
        (count,) = struct.unpack("<Q", self.take(8))
        if count > limit:
            raise CheckpointError(f"byte {self.at}: {count} {items}, more than {limit}")
        return count

    def text(self) -> str:
        try:
            return self.take(self.number("<u8")).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"byte {self.at}: a text that is not UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        """The value of a key: a number, a text, an array of numbers, or a list of texts."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.text()
        if kind != LIST:
            raise CheckpointError(f"byte {self.at}: {key!r} has a value of the unknown type {kind}")
        inner = self.number("<u4")
        count = self.count(ITEM_LIMIT, f"items of {key!r}")
        if inner in NUMBERS:
            dtype = np.dtype(NUMBERS[inner])
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if inner != STRING:
            raise CheckpointError(f"byte {self.at}: {key!r} is a list of the unknown type {inner}")
        return [self.text() for _ in range(count)]
