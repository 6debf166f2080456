"""Named arrays and a few facts in one file: what a build puts down on its way.

One Arrow IPC file of a single row, a list column for each array, the facts as JSON in its metadata.
It is written whole or not at all, the same arrays give the same bytes, and reading maps the file.
Its last four bytes are the crc32c of all before them. A process checks that once for each file, for
a shard is filled from many parts and a part goes into many shards: a worker reads each part once
more than it must, at gigabytes a second, and no flipped bit is packed.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO

import numpy as np

from packhorse.atomic import new_file
from packhorse.errors import InputError, MissingExtra
from packhorse.wire import crc32c

FACTS = b"packhorse"
CRC = Struct("<I")


def write(path: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Put one-dimensional arrays and JSON-able facts into the file `path`."""
    pa = _arrow()
    columns = []
    for array in arrays.values():
        ends = np.array([0, len(array)], np.int64)
        columns.append(pa.LargeListArray.from_arrays(_flat(pa, ends), _flat(pa, array)))
    told = {FACTS: json.dumps(facts, sort_keys=True).encode()}
    fields = [pa.field(name, column.type) for name, column in zip(arrays, columns, strict=True)]
    schema = pa.schema(fields, metadata=told)
    with new_file(path) as file:
        summed = _Summed(file)
        with pa.ipc.new_file(pa.PythonFile(summed, "w"), schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))
        file.write(CRC.pack(summed.crc))


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of the file, mapped, and its facts."""
    pa = _arrow()
    try:
        # The map lives as long as an array that shows a part of it.
        whole = pa.memory_map(str(path)).read_buffer()
        state = path.stat()
        if not _sound(path, (state.st_ino, state.st_size, state.st_mtime_ns)):
            raise ValueError("its checksum is wrong")
        reader = pa.ipc.open_file(pa.BufferReader(whole.slice(0, whole.size - CRC.size)))
        batch = reader.get_batch(0)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(
            f"{path} is damaged: {error}; remove it and run the same command to go on"
        ) from error
    arrays = {
        name: _mapped(batch.column(place).values) for place, name in enumerate(batch.schema.names)
    }
    return arrays, json.loads(reader.schema.metadata[FACTS])


class _Summed:
    """A file whose bytes are summed up on their way."""

    closed = False  # Arrow asks

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.crc = file, 0

    def write(self, data: Any) -> int:
        self.crc = crc32c(data, self.crc)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """The file is closed by who opened it."""


@lru_cache(maxsize=1 << 16)
def _sound(path: Path, state: tuple[int, ...]) -> bool:
    """Whether the file holds what was written; asked anew when it is another (`state`)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if len(data) <= CRC.size:
            return False
        body = memoryview(data)[: -CRC.size]
        try:
            return crc32c(body) == CRC.unpack(data[-CRC.size :])[0]
        finally:
            body.release()


def _mapped(values: Any) -> np.ndarray:
    dtype = np.dtype(str(values.type))
    return (
        np.frombuffer(values.buffers()[1], dtype, len(values))
        if len(values)
        else np.zeros(0, dtype)
    )


def _flat(pa: Any, array: np.ndarray) -> Any:
    """As Arrow's, from its memory: `pa.array` would import pandas first, if that is installed."""
    memory = pa.py_buffer(np.ascontiguousarray(array))
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [None, memory])


def _arrow() -> Any:
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error
    return pyarrow
