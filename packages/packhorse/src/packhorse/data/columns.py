"""The number of rows of a table and the types of its columns, before its texts are encoded.

A Parquet file and a saved `Dataset` contain both. Cells of csv, tsv and txt are text. For lines of
JSON the whole file is read once to know the types of columns, so that a line that is no JSON is
reported before hours of work, not after them.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, final

from packhorse.data.delimited import CsvFormat, count_rows
from packhorse.data.output import import_pyarrow
from packhorse.data.tables import (
    ALL_COLUMNS,
    Kept,
    TableRow,
    is_dataset,
    kept_names,
    open_source,
    read_rows,
)
from packhorse.errors import InputError

ROWS_PER_SCHEMA = 4096


def row_count(source: str, form: CsvFormat) -> int:
    """How many rows the file has, by a fast count; 0 if that cannot be known."""
    if source == "-":
        return _lines_of_standard_input(form)
    path = Path(source)
    if path.is_dir():
        return getattr(open_source(path), "num_rows", 0)
    if path.suffix.lower() == ".parquet":
        return _parquet_file(path).metadata.num_rows
    with path.open("rb") as stream:
        return count_rows(stream, form, is_csv=path.suffix.lower() in (".csv", ".tsv"))


def _lines_of_standard_input(form: CsvFormat) -> int:
    """The lines of a file that is standard input; of a pipe, nothing can be known."""
    try:
        descriptor = sys.stdin.fileno()
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (AttributeError, OSError, ValueError):  # no standard input, or not a real one
        return 0
    if not is_file or not hasattr(os, "pread"):
        return 0
    with io.BufferedReader(_SharedFile(descriptor)) as stream:
        return count_rows(stream, form, is_csv=False)


@final
class _SharedFile(io.RawIOBase):
    """Reads a file from its beginning without moving the position that other readers share."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._descriptor, len(buffer), self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def column_types(source: str, keep: Kept, form: CsvFormat) -> dict[str, Any]:
    """The Arrow type of each column that is kept, under its new name, without the id."""
    pa = import_pyarrow()
    path = Path(source)
    if source == "-" or path.suffix.lower() == ".txt":
        types: Mapping[str, Any] = {"text": pa.string()}
    elif path.is_dir():
        types = _types_of_dataset(path)
    elif path.suffix.lower() == ".parquet":
        schema = _parquet_file(path).schema_arrow
        types = {field.name: _plain_type(field.type) for field in schema}
    elif path.suffix.lower() == ".jsonl":
        types = _types_of_lines(source, keep, form)
    else:
        first = next(read_rows(path, form=form), None)
        types = dict.fromkeys(first.cells if first else (), pa.string())
    if not types:  # a file without rows, and of csv without a header
        return {}
    return {new: types[old] for old, new in kept_names(list(types), keep, source).items()}


def _types_of_dataset(path: Path) -> dict[str, Any]:
    dataset = open_source(path)
    if not is_dataset(dataset):
        return {}
    schema = getattr(dataset, "features").arrow_schema  # noqa: B009 - of a library without types
    return {field.name: _plain_type(field.type) for field in schema}


def _types_of_lines(source: str, keep: Kept, form: CsvFormat) -> dict[str, Any]:
    """The types of columns over all lines of JSON; a whole number may also be a fraction."""
    pa = import_pyarrow()
    schema = pa.schema([])
    rows = read_rows(source, form=form)
    number = 0
    for cells in _batches(rows):
        if keep == ALL_COLUMNS:  # the id is written as text if it is no number that fits
            cells = [{name: row[name] for name in row if name != "id"} for row in cells]
        else:
            cells = [{name: row.get(name) for name in keep} for row in cells]
        try:
            names = dict.fromkeys(name for row in cells for name in row)
            batch_schema = pa.schema(
                [(name, pa.array([row.get(name) for row in cells]).type) for name in names]
            )
            schema = pa.unify_schemas([schema, batch_schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(
                f"{source}, rows {number} to {number + len(cells) - 1}: a column has cells of "
                f"different kinds ({str(error).splitlines()[0]}); write .jsonl, or name the "
                "columns to keep with --keep"
            ) from error
        except (OverflowError, UnicodeEncodeError) as error:
            raise InputError(
                f"{source}, rows {number} to {number + len(cells) - 1}: a cell has no type of a "
                f"table ({error}); write .jsonl, or name the columns to keep with --keep"
            ) from error
        number += len(cells)
    return {field.name: _plain_type(field.type) for field in schema}


def _batches(rows: Iterator[TableRow]) -> Iterator[list[Mapping[str, Any]]]:
    while batch := [row.cells for row in islice(rows, ROWS_PER_SCHEMA)]:
        yield batch


def _plain_type(kind: Any) -> Any:
    """The type of the values: rows are written one by one, so without Arrow's dictionaries."""
    types = import_pyarrow().types
    if types.is_dictionary(kind):
        return kind.value_type
    if types.is_null(kind):  # no cell has a value
        return import_pyarrow().string()
    return getattr(kind, "storage_type", kind)


def _parquet_file(path: Path) -> Any:
    pa = import_pyarrow()
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: not a parquet file: {error}") from error
