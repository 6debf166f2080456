"""Rows of a table wherever it lies: txt, jsonl, csv, tsv, parquet, `datasets`, mappings in memory.

Nothing is read ahead, so a file larger than memory costs no more than its longest row; the price is
that a bad row is only found when it is reached. In messages lines count from 1, as editors count
them, and rows of an array from 0. A folder that `datasets` saved is opened by that library, late,
because it is slow to import; a `Dataset` is known by what it offers, not by its class.

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

from packhorse.errors import InputError, MissingExtra

LONGEST_CELL = 1 << 27  # characters; csv refuses cells over 131,072 unless told
ROWS_A_READ = 1024  # of a parquet file or a Dataset

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


def read_rows(source: Source, choose: Choose, form: Form | None = None) -> Iterator[Row]:
    """Each row, lazily; `-` is standard input, a text a line.

    `choose` is asked where columns cost something to read; elsewhere rows have all there are.
    """
    source = open_source(source)
    if not isinstance(source, str | Path):
        return _given_rows(source, choose)
    if str(source) == "-":
        return _txt_rows(sys.stdin.buffer, "standard input", form or Form())
    suffix = Path(source).suffix.lower()
    if suffix not in READERS:
        known = ", ".join(READERS)
        raise InputError(f"{source}: cannot read texts from {suffix or 'this'}; use one of {known}")
    return READERS[suffix](Path(source), choose, form or Form())


def open_source(source: Source) -> Source:
    """A folder that `datasets` saved as the Dataset in it; all else as it is."""
    if isinstance(source, str | Path):
        folder = Path(source)
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
            raise InputError(f"{folder} holds splits; name one of its folders: {', '.join(splits)}")
        return _load_dataset(folder) if (folder / "state.json").is_file() else source
    if isinstance(source, Mapping):
        raise InputError(f"these are splits, not rows; pass one of them: {', '.join(source)}")
    return source


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
            number = 0
            for batch in file.iter_batches(ROWS_A_READ, columns=needed):
                for cells in batch.to_pylist():
                    yield Row(f"{path}, row {number}", cells)
                    number += 1
        except pa.ArrowInvalid as error:
            raise InputError(f"{path}: not a parquet file: {error}") from error


def _load_dataset(folder: Path) -> Iterable[Any]:
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingExtra("datasets", "hf") from error

    with _readable(folder):
        try:
            return Dataset.load_from_disk(str(folder))
        except (ValueError, TypeError, LookupError) as error:  # Arrow's are the first
            raise InputError(f"{folder}: not a dataset that can be read: {error}") from error


def _given_rows(source: Any, choose: Choose) -> Iterator[Row]:
    cells = _dataset_cells(source, choose) if hasattr(source, "select_columns") else source
    for number, each in enumerate(cells):
        if not isinstance(each, Mapping):
            raise InputError(f"row {number} has no columns: it is a {type(each).__name__}")
        yield Row(f"row {number}", each)


def _dataset_cells(source: Any, choose: Choose) -> Iterator[Mapping[str, Any]]:
    """In batches, ten times as fast as row by row; as plain values, whatever format was set."""
    if source.column_names is None:  # of a stream, before its first row
        yield from source
        return
    needed = list(choose(source.column_names, "the dataset"))
    for batch in source.select_columns(needed).with_format(None).iter(ROWS_A_READ):
        for values in zip(*(batch[name] for name in needed), strict=True):
            yield dict(zip(needed, values, strict=True))


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
