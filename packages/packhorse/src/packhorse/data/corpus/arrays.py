"""Files of named arrays and a few facts: the intermediate files of a corpus build.

One Arrow IPC file of a single row, with one list column per array and the facts as JSON in its
metadata. It is written whole or not at all, the same arrays give the same bytes, and reading maps
the file. Its last four bytes are the crc32c of all before them. A process checks that once per
file, because a shard is filled from many parts and a part goes into many shards: a worker reads
each part one time more than necessary, at gigabytes per second, and no flipped bit gets packed.
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
from packhorse.data.output import import_pyarrow
from packhorse.errors import InputError
from packhorse.wire import crc32c

FACTS = b"packhorse"
CRC = Struct("<I")


def write(path: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Write one-dimensional arrays and facts that JSON can hold."""
    pa = import_pyarrow()
    columns = []
    for array in arrays.values():
        bounds = np.array([0, len(array)], np.int64)
        columns.append(pa.LargeListArray.from_arrays(_to_arrow(pa, bounds), _to_arrow(pa, array)))
    metadata = {FACTS: json.dumps(facts, sort_keys=True).encode()}
    fields = [pa.field(name, column.type) for name, column in zip(arrays, columns, strict=True)]
    schema = pa.schema(fields, metadata=metadata)
    with new_file(path) as file:
        checksummed = _ChecksummedFile(file)
        with pa.ipc.new_file(pa.PythonFile(checksummed, "w"), schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))
        file.write(CRC.pack(checksummed.crc))


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a file, as views of the mapped file, and its facts."""
    pa = import_pyarrow()
    try:
        # The map lives as long as any array that is a view of it.
        whole = pa.memory_map(str(path)).read_buffer()
        status = path.stat()
        if not _is_intact(path, (status.st_ino, status.st_size, status.st_mtime_ns)):
            raise ValueError("its checksum is wrong")
        reader = pa.ipc.open_file(pa.BufferReader(whole.slice(0, whole.size - CRC.size)))
        batch = reader.get_batch(0)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(
            f"{path} is damaged: {error}; remove it and run the same command to continue"
        ) from error
    arrays = {
        name: _to_numpy(batch.column(index).values) for index, name in enumerate(batch.schema.names)
    }
    return arrays, json.loads(reader.schema.metadata[FACTS])


class _ChecksummedFile:
    """A file that computes the checksum of all bytes written to it."""

    closed = False  # read by Arrow

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.crc = 0

    def write(self, data: Any) -> int:
        self.crc = crc32c(data, self.crc)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


@lru_cache(maxsize=1 << 16)
def _is_intact(path: Path, identity: tuple[int, ...]) -> bool:
    """Whether the checksum is right; `identity` makes the cache miss if the file has changed."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if len(data) <= CRC.size:
            return False
        body = memoryview(data)[: -CRC.size]
        try:
            return crc32c(body) == CRC.unpack(data[-CRC.size :])[0]
        finally:
            body.release()


def _to_numpy(values: Any) -> np.ndarray:
    dtype = np.dtype(str(values.type))
    if not len(values):
        return np.zeros(0, dtype)
    return np.frombuffer(values.buffers()[1], dtype, len(values))


def _to_arrow(pa: Any, array: np.ndarray) -> Any:
    """An Arrow array in numpy's memory; `pa.array` would import pandas, if that is installed."""
    memory = pa.py_buffer(np.ascontiguousarray(array))
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [None, memory])
