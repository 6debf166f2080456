"""Texts of Arrow streams, row by row; a folder that `datasets` saved consists of such files.

A stream has no table of contents, but it is mapped: skipping a batch costs no more than its header,
so a worker can start anywhere in a file, and `datasets` is not needed. Offsets are checked before a
text is touched, because a damaged one could point anywhere. Text that is not UTF-8 is reported by
the reader of documents, which knows the row.

Follows Apache Arrow's IPC streaming format.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"\xff\xff\xff\xff"  # the mark before a message's length; a stream begins with one


def schema_and_rows(path: Path) -> tuple[pa.Schema, int]:
    """The schema and the number of rows; all batches are visited, so that a cut file is noticed."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error

    try:
        with pa.memory_map(str(path)) as file:
            if any(_is_compressed(message) for message in pa.ipc.MessageReader.open_stream(file)):
                raise InputError(f"{path}: a compressed Arrow stream; save it uncompressed")
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            return stream.schema, sum(batch.num_rows for batch in stream)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a whole Arrow stream: {error}; save it again") from error


def _is_compressed(message: pa.Message) -> bool:
    """Whether the message is compressed; such data is refused, because its size is not bounded.

    pyarrow does not expose the field, so it is looked up in the message, a FlatBuffer of
    Message.fbs. `datasets` compresses nothing.
    """
    if message.type not in ("record batch", "dictionary"):
        return False
    data = message.metadata.to_pybytes()
    header = _child(data, int.from_bytes(data[:4], "little"), 2)
    if message.type == "dictionary":
        header = _child(data, header, 1)  # its record batch
    return _child(data, header, 3) > 0  # BodyCompression


def _child(data: bytes, table: int, number: int) -> int:
    """The position of the table in field `number` of a FlatBuffer's table; 0 if it is absent."""
    vtable = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    size = int.from_bytes(data[vtable : vtable + 2], "little")
    slot = 4 + 2 * number
    offset = int.from_bytes(data[vtable + slot : vtable + slot + 2], "little") if slot < size else 0
    field = table + offset
    return field + int.from_bytes(data[field : field + 4], "little") if offset else 0


def lengths(path: Path, column: str) -> Iterator[int]:
    """The length of each row's text in bytes; the texts themselves are not read."""
    import pyarrow as pa
    from pyarrow import compute

    try:
        for texts in _columns(path, column):
            texts.validate(full=True)
            sizes = compute.call_function("binary_length", [texts])
            yield from (size or 0 for size in sizes.to_pylist())
    except pa.ArrowException as error:
        raise InputError(f"{path}: a damaged Arrow stream: {error}; save it again") from error


def texts_between(path: Path, column: str, begin: int, end: int) -> Iterator[bytes | None]:
    """The texts of rows `begin` to `end`."""
    first = 0  # row of the batch
    for texts in _columns(path, column):
        last = first + len(texts)
        if last > begin:
            selected = texts[max(0, begin - first) : end - first]
            selected.validate(full=True)
            yield from selected.to_pylist()
        if last >= end:
            return
        first = last
    raise InputError(
        f"{path} is not what it was when the build began; do not change sources during a build"
    )


def _columns(path: Path, column: str) -> Iterator[Any]:
    """The column of each batch, as binary values; not read from disk yet."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            texts = batch.column(column)
            large = pa.types.is_large_string(texts.type)
            yield texts.view(pa.large_binary() if large else pa.binary())
