"""Results as bytes that can be appended to: npy, jsonl, parquet.

A format turns rows (plain dicts, each with an `id`) into bytes that are good as soon as they are on
disk, and makes the finished file of them at the end. npy and jsonl grow as they are. parquet has
its index at the end and cannot, so its rows wait as an Arrow stream, whose messages can be appended
one by one, and are rewritten once. npy has no room for ids, so they grow beside it.

Follows the npy format 1.0, JSON Lines, and Arrow's IPC streaming format.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from packhorse.errors import InputError, MissingExtra

Row = dict[str, Any]
Shape = Mapping[str, Any]  # column: str, int, float, "float32", [a list's item], {a struct's}


@dataclass(frozen=True, slots=True)
class Format:
    """How rows become a file, or a file and others beside it."""

    beside: tuple[str, ...]  # suffixes of files beside the one the user named
    head: Callable[[Sequence[Row], Shape], Sequence[bytes]]  # of each file, from the first rows
    body: Callable[[Sequence[Row], bytes], Sequence[bytes]]  # of each, and the first one's head
    finish: Callable[[BinaryIO, int, Path], None]  # the partial, its rows, where to rewrite it


def format_of(path: Path, shape: Shape) -> Format:
    """The format that the file's suffix names, if it can hold such rows."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise InputError(f"{path}: cannot write results as {suffix or 'this'}; use one of {known}")
    if suffix == ".npy" and set(shape) != {"vector"}:
        raise InputError(f"{path}: npy holds one vector a text, these are not; write .jsonl")
    if suffix == ".parquet":
        arrow()
    return FORMATS[suffix]


def to_plain(value: Any) -> Any:
    """As JSON has it: arrays are lists, what is not a number is null.

    Numbers of a float32 array get the nine digits that tell any two of them apart, not seventeen.
    """
    if hasattr(value, "tolist"):
        digits = 9 if str(value.dtype) == "float32" else 17
        return _rounded(value.tolist(), digits)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _json_line(value: Any) -> str:
    return json.dumps(to_plain(value), ensure_ascii=False, separators=(",", ":")) + "\n"


def _jsonl_head(rows: Sequence[Row], shape: Shape) -> list[bytes]:
    return [b""]


def _jsonl_body(rows: Sequence[Row], head: bytes) -> list[bytes]:
    return ["".join(map(_json_line, rows)).encode()]


def _keep(partial: BinaryIO, rows: int, whole: Path) -> None:
    """The partial file is the whole file already."""


def _npy_header(width: int, rows: int) -> bytes:
    """Of the same length for any number of rows: numpy leaves room for it to grow."""
    import numpy as np

    buffer = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def _npy_head(rows: Sequence[Row], shape: Shape) -> list[bytes]:
    return [_npy_header(len(rows[0]["vector"]), 0), b""]


def _npy_body(rows: Sequence[Row], head: bytes) -> list[bytes]:
    import numpy as np

    vectors = np.stack([row["vector"] for row in rows])
    ids = "".join(_json_line(row["id"]) for row in rows)
    return [vectors.astype("<f4").tobytes(), ids.encode()]


def _npy_finish(partial: BinaryIO, rows: int, whole: Path) -> None:
    import numpy as np

    partial.seek(0)
    np.lib.format.read_magic(partial)
    (_, width), _, _ = np.lib.format.read_array_header_1_0(partial)
    partial.seek(0)
    partial.write(_npy_header(width, rows))


def _parquet_head(rows: Sequence[Row], shape: Shape) -> list[bytes]:
    pa = arrow()
    fields = {"id": pa.int64() if all(map(_numbered, rows)) else pa.string()}
    fields |= {name: _arrow_type(kind) for name, kind in shape.items()}
    return [pa.schema(fields).serialize().to_pybytes()]


def _numbered(row: Row) -> bool:
    return isinstance(row["id"], int) and abs(row["id"]) < 1 << 63


def _parquet_body(rows: Sequence[Row], head: bytes) -> list[bytes]:
    pa = arrow()
    schema = pa.ipc.read_schema(pa.py_buffer(head))
    in_words = schema.field("id").type == pa.string()
    odd = next((row["id"] for row in rows if not (in_words or _numbered(row))), None)
    if odd is not None:
        raise InputError(f"the id {odd!r:.40} is not a whole number as those before; write .jsonl")
    ready = [_flat(row) | ({"id": str(row["id"])} if in_words else {}) for row in rows]
    return [pa.RecordBatch.from_pylist(ready, schema=schema).serialize().to_pybytes()]


def _flat(row: Row) -> Row:
    """Arrow takes arrays of one dimension; one of two becomes a list of them."""
    return {name: list(x) if getattr(x, "ndim", 1) > 1 else x for name, x in row.items()}


def _parquet_finish(partial: BinaryIO, rows: int, whole: Path) -> None:
    """Rewrite the stream, a batch at a time, into a file that takes its place."""
    pa = arrow()
    from pyarrow import parquet

    with (
        pa.OSFile(partial.name) as source,
        pa.ipc.open_stream(source) as stream,
        parquet.ParquetWriter(whole, stream.schema) as writer,
    ):
        for batch in stream:
            writer.write_batch(batch)


def _arrow_type(kind: Any) -> Any:
    pa = arrow()
    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, Mapping):
        return pa.struct({name: _arrow_type(item) for name, item in kind.items()})
    return {str: pa.string(), int: pa.int64(), float: pa.float64(), "float32": pa.float32()}[kind]


def arrow() -> Any:
    """pyarrow, or what to install to have it."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error
    return pyarrow


FORMATS = {
    ".npy": Format((".ids.jsonl",), _npy_head, _npy_body, _npy_finish),
    ".jsonl": Format((), _jsonl_head, _jsonl_body, _keep),
    ".parquet": Format((), _parquet_head, _parquet_body, _parquet_finish),
}
