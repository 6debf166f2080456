"""Rows of a table wherever it lies: txt, jsonl, csv, tsv, parquet, `datasets`, mappings in memory.

Nothing is read ahead, so a file larger than memory costs no more than its longest row; the price is
that a bad row is only found when it is reached. In messages lines count from 1, as editors count
them, and rows of an array from 0. A `Dataset`, or a folder with one, is the business of `saved`.

Follows RFC 4180 for csv (the header names the columns), JSON Lines, where a line is an object with
columns or a bare string, and IANA's tab-separated values, which have no quoting, where asked to.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from packhorse.data.tables import saved
from packhorse.errors import InputError, MissingExtra

LONGEST_CELL = 1 << 27  # characters; csv refuses cells over 131,072 unless told
ROWS_A_READ = 1024  # of a parquet file
BATCH_BYTES = 1 << 28  # that rows of a parquet file may take at once
RATIO = 100  # bytes that a packed one may become; text has 2 to 10

Source = str | Path | Iterable[Any]  # a path, a `datasets.Dataset`, any rows that are mappings
Choose = Callable[[Sequence[str], str], Sequence[str]]  # of these columns, there: those to be read
Text = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """A row before its columns are chosen; `where` is how a message names it."""

    where: str
    cells: Mapping[str, Any]  # none where the line is blank


@dataclass(frozen=True, slots=True)
class Form:
    """What a csv or tsv file does not say of itself."""

    quotes: bool = True  # may a cell stand in quotes, or are these text as all else is?
    # Of the first row's cells: names for the columns, or none if that row is the header.
    names: Callable[[Sequence[str]], Sequence[str]] = lambda cells: ()


def every(columns: Sequence[str], where: str) -> Sequence[str]:
    """All the columns."""
    return columns


def read_rows(
    source: Source, choose: Choose = every, form: Form | None = None, name: str = ""
) -> Iterator[Row]:
    """Each row, lazily; `-` is standard input, a text a line.

    `choose` is asked where columns cost something to read; elsewhere rows have all there are.
    name: what messages call a source that was opened already.
    """
    name = name or name_of(source)
    source = open_source(source)
    if not isinstance(source, str | Path):
        return _given_rows(source, choose, name)
    if str(source) == "-":
        return _txt_rows(sys.stdin.buffer, "standard input", form or Form())
    suffix = Path(source).suffix.lower()
    if suffix not in READERS:
        known = ", ".join(READERS)
        other = "a folder that datasets did not save" if Path(source).is_dir() else "this"
        raise InputError(f"{source}: cannot read texts from {suffix or other}; use one of {known}")
    return READERS[suffix](Path(source), choose, form or Form())


def open_source(source: Source) -> Source:
    """A folder that `datasets` saved as the Dataset in it; all else as it is."""
    if isinstance(source, Mapping):
        return saved.only_split(source)
    if not isinstance(source, str | Path) or not Path(source).is_dir():
        return source
    folder = saved.folder_of_rows(Path(source))
    return source if folder is None else saved.open_saved(folder)


def name_of(source: Source) -> str:
    """Its path, if it has one."""
    return str(source) if isinstance(source, str | Path) else ""


def text_of(row: Row, columns: Sequence[str]) -> Text:
    """The text in one column, or the pair in two; "" where there is none."""
    cells = [row.cells[name] for name in columns] if row.cells else [""] * len(columns)
    for name, cell in zip(columns, cells, strict=True):
        if not isinstance(cell, str | None):
            kind = type(cell).__name__
            raise InputError(f"{row.where}: column {name!r} is not text but {kind}: {cell!r:.40}")
    first, *rest = [cell or "" for cell in cells]
    return (first, rest[0]) if rest else first


def is_blank(text: Text) -> bool:
    """Is there nothing in it, or in one of the two?"""
    parts = (text,) if isinstance(text, str) else text
    return not all(part.strip() for part in parts)


def _of_lines(
    reader: Callable[[BinaryIO, str, Form], Iterator[Row]],
) -> Callable[[Path, Choose, Form], Iterator[Row]]:
    """A reader of a file, from one of an open stream."""

    def read(path: Path, choose: Choose, form: Form) -> Iterator[Row]:
        with _readable(path), path.open("rb") as stream:
            yield from reader(stream, str(path), form)

    return read


def _txt_rows(stream: BinaryIO, name: str, form: Form) -> Iterator[Row]:
    for where, line in _lines(stream, name):
        yield Row(where, {"text": line.rstrip("\r\n")})


def _jsonl_rows(stream: BinaryIO, name: str, form: Form) -> Iterator[Row]:
    for where, line in _lines(stream, name):
        if not line.strip():
            yield Row(where, {})
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {error}") from error
        if not isinstance(value, dict | str):
            raise InputError(f"{where}: neither an object with columns nor a string")
        yield Row(where, value if isinstance(value, dict) else {"text": value})


def _csv_rows(stream: BinaryIO, name: str, form: Form, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    lines = (line for _, line in _lines(stream, name))
    quoting = csv.QUOTE_MINIMAL if form.quotes else csv.QUOTE_NONE
    rows = csv.reader(lines, delimiter=delimiter, strict=True, quoting=quoting)
    header: Sequence[str] = ()
    try:
        for cells in rows:
            where = f"{name}, line {rows.line_num}"
            if not header:
                header = names = form.names(cells)
                if not names:
                    header = _distinct(cells, where)
                    continue
            if cells and len(cells) != len(header):
                raise InputError(
                    f"{where}: {len(cells)} cells, but {len(header)} columns"
                    + ("" if form.quotes else " (quotes count as text here)")
                )
            if cells or len(header) == 1:
                yield Row(where, dict(zip(header, cells or [""], strict=True)))
    except csv.Error as error:
        raise InputError(f"{name}, line {rows.line_num}: not csv: {error}") from error


def _distinct(header: Sequence[str], where: str) -> Sequence[str]:
    if len(set(header)) < len(header):
        raise InputError(f"{where}: two columns have one name")
    return header


def _tsv_rows(stream: BinaryIO, name: str, form: Form) -> Iterator[Row]:
    return _csv_rows(stream, name, form, delimiter="\t")


def _parquet_rows(path: Path, choose: Choose, form: Form) -> Iterator[Row]:
    """Only the columns that are needed leave the disk."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error

    with _readable(path):
        try:
            file = parquet.ParquetFile(path)
            needed = list(choose(file.schema_arrow.names, str(path)))
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            rows = min((rows_a_read(path, g, needed, ROWS_A_READ) for g in groups), default=1)
            number = 0
            for batch in file.iter_batches(rows, columns=needed):
                for cells in batch.to_pylist():
                    yield Row(f"{path}, row {number}", cells)
                    number += 1
        except pa.ArrowInvalid as error:
            raise InputError(f"{path}: not a parquet file: {error}") from error


def rows_a_read(path: Path, group: Any, columns: Sequence[str], most: int) -> int:
    """Rows of a parquet row group that may be read at once, whatever they unpack to.

    A dictionary holds a value once that every row may repeat, so that a batch has at most the
    column's size times its rows. A column that unpacks to what no table does is refused.
    """
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema.partition(".")[0] not in columns:
            continue
        packed, unpacked = column.total_compressed_size, column.total_uncompressed_size
        if unpacked > BATCH_BYTES and unpacked > RATIO * packed:
            raise InputError(
                f"{path}: column {column.path_in_schema!r} has {packed:,} bytes and unpacks to"
                f" {unpacked:,}, more than {RATIO} times as many; write the file again with"
                " smaller row groups"
            )
        if column.has_dictionary_page:
            most = min(most, max(1, BATCH_BYTES // max(1, unpacked)))
    return most


def _given_rows(source: Any, choose: Choose, name: str) -> Iterator[Row]:
    """Rows of a `Dataset`, or whatever mappings there are."""
    place = f"{name}, row" if name else "row"
    for number, each in enumerate(_cells(source, choose, name or "the dataset")):
        if not isinstance(each, Mapping):
            raise InputError(f"{place} {number} has no columns: it is a {type(each).__name__}")
        yield Row(f"{place} {number}", each)


def _cells(source: Any, choose: Choose, name: str) -> Iterable[Any]:
    if not saved.is_dataset(source) or source.column_names is None:  # of a stream, not known yet
        return source
    return saved.rows_in(source, choose(source.column_names, name))


READERS: dict[str, Callable[[Path, Choose, Form], Iterator[Row]]] = {
    ".txt": _of_lines(_txt_rows),
    ".jsonl": _of_lines(_jsonl_rows),
    ".csv": _of_lines(_csv_rows),
    ".tsv": _of_lines(_tsv_rows),
    ".parquet": _parquet_rows,
}


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    """Each line with its end, and its place; a byte order mark is not text."""
    for number, raw in enumerate(stream, 1):
        where = f"{name}, line {number}"
        try:
            yield where, raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: not UTF-8 (byte {error.start}); convert it") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
