"""Named arrays and a few facts in one file: what a build puts down on its way.

One Arrow IPC file of a single row, a list column for each array, the facts as JSON in its metadata.
It is written whole or not at all, the same arrays give the same bytes, and reading maps the file:
only what is looked at is fetched from the disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.atomic import new_file
from packhorse.errors import InputError, MissingExtra

FACTS = b"packhorse"


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
    with new_file(path) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of the file, mapped, and its facts."""
    pa = _arrow()
    try:
        # The map lives as long as an array that shows a part of it.
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batch = reader.get_batch(0)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(
            f"{path} is damaged: {error}; remove it and run the same command to go on"
        ) from error
    arrays = {
        name: _mapped(batch.column(place).values) for place, name in enumerate(batch.schema.names)
    }
    return arrays, json.loads(reader.schema.metadata[FACTS])


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
