"""Texts from a file, one after the other: txt, jsonl, csv, tsv, parquet, or standard input.

Nothing is read ahead, so a file larger than memory costs no more than its longest row; the price is
that a bad row is only found when it is reached. A text keeps its id: the value of an `id` column,
or else its number in the file counted from 0, as rows of an array are. In messages lines count from
1, as editors count them. A row without text is an error unless it may be skipped: skipping silently
would shift every row behind it.

Follows RFC 4180 for csv (the header names the columns) and JSON Lines, where a line is an object
with columns or a bare string.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from packhorse.errors import InputError, MissingExtra

LONGEST_CELL = 1 << 27  # characters; csv refuses cells over 131,072 unless told
ROWS_A_READ = 1024  # of a parquet file


@dataclass(frozen=True, slots=True)
class Record:
    """One text, or a pair from two columns, and what the file calls it."""

    id: int | str
    text: str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row before its columns are chosen; `where` is how a message names it."""

    where: str
    cells: dict[str, Any]


def read_texts(
    path: str | Path,
    column: str | Sequence[str] | None = None,
    *,
    pair: bool = False,
    skip_empty: bool = False,
) -> Iterator[Record]:
    """Each text of the file, lazily; `-` is standard input, a text a line.

    column: where the text is; two make pairs. Without any, `text` or the only column there is.
    pair: each text is two, with a tab between them. skip_empty: pass over rows without text, whose
    numbers are then missing from the ids.
    """
    columns = [column] if isinstance(column, str) else list(column or ())
    if len(columns) > 2 or (columns and pair):
        raise InputError("a text is one column, or two for a pair, or one with tabs in it (--pair)")
    for number, row in enumerate(_rows(path, columns)):
        text = _text(row, _chosen(row, columns))
        if _blank(text):
            if skip_empty:
                continue
            raise InputError(f"{row.where}: the text is empty; remove it or pass --skip-empty")
        identity = row.cells.get("id")
        yield Record(
            id=number if identity is None else _identity(identity, row.where),
            text=split_pair(text, row.where) if pair else text,
        )


def split_pair(text: str | tuple[str, str], where: str) -> tuple[str, str]:
    """The two texts on either side of the first tab."""
    first, tab, second = text.partition("\t") if isinstance(text, str) else (text[0], "\t", text[1])
    if not (tab and first.strip() and second.strip()):
        raise InputError(f"{where}: not a pair; two texts with a tab between them are")
    return first, second


def _rows(path: str | Path, columns: Sequence[str]) -> Iterator[_Row]:
    if str(path) == "-":
        return _txt_rows(sys.stdin.buffer, "standard input", columns)
    suffix = Path(path).suffix.lower()
    if suffix not in READERS:
        known = ", ".join(READERS)
        raise InputError(f"{path}: cannot read texts from {suffix or 'this'}; use one of {known}")
    return READERS[suffix](Path(path), columns)


def _of_lines(
    reader: Callable[[BinaryIO, str, Sequence[str]], Iterator[_Row]],
) -> Callable[[Path, Sequence[str]], Iterator[_Row]]:
    """A reader of a file, from one of an open stream."""

    def read(path: Path, columns: Sequence[str]) -> Iterator[_Row]:
        with _readable(path), path.open("rb") as stream:
            yield from reader(stream, str(path), columns)

    return read


def _txt_rows(stream: BinaryIO, name: str, columns: Sequence[str]) -> Iterator[_Row]:
    if columns:
        raise InputError(f"{name}: lines of text have no columns; leave out --column")
    for where, line in _lines(stream, name):
        yield _Row(where, {"text": line.rstrip("\r\n")})


def _jsonl_rows(stream: BinaryIO, name: str, columns: Sequence[str]) -> Iterator[_Row]:
    for where, line in _lines(stream, name):
        if not line.strip():
            yield _Row(where, dict.fromkeys(columns or ["text"], ""))
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON: {error}") from error
        if not isinstance(value, dict | str):
            raise InputError(f"{where}: neither an object with columns nor a string")
        yield _Row(where, value if isinstance(value, dict) else {"text": value})


def _csv_rows(
    stream: BinaryIO, name: str, columns: Sequence[str], delimiter: str = ","
) -> Iterator[_Row]:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    lines = (line for _, line in _lines(stream, name))
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        for cells in rows:
            where = f"{name}, line {rows.line_num}"
            if not header:
                header = cells
                if len(set(header)) < len(header):
                    raise InputError(f"{where}: two columns have one name")
            elif cells and len(cells) != len(header):
                raise InputError(f"{where}: {len(cells)} cells, but {len(header)} columns")
            elif cells or len(header) == 1:
                yield _Row(where, dict(zip(header, cells or [""], strict=True)))
    except csv.Error as error:
        raise InputError(f"{name}, line {rows.line_num}: not csv: {error}") from error


def _tsv_rows(stream: BinaryIO, name: str, columns: Sequence[str]) -> Iterator[_Row]:
    return _csv_rows(stream, name, columns, delimiter="\t")


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[_Row]:
    """Only the columns that are needed leave the disk."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error

    with _readable(path):
        try:
            file = parquet.ParquetFile(path)
            have = file.schema_arrow.names
            wanted = _choose(have, columns, str(path))
            needed = [*wanted, *(["id"] if "id" in have and "id" not in wanted else [])]
            number = 0
            for batch in file.iter_batches(ROWS_A_READ, columns=needed):
                for cells in batch.to_pylist():
                    yield _Row(f"{path}, row {number}", cells)
                    number += 1
        except pa.ArrowInvalid as error:
            raise InputError(f"{path}: not a parquet file: {error}") from error


READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[_Row]]] = {
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


def _chosen(row: _Row, columns: Sequence[str]) -> Sequence[str]:
    return _choose(row.cells, columns, row.where)


def _choose(have: Iterable[str], columns: Sequence[str], where: str) -> Sequence[str]:
    """The columns asked for; without any, `text` or the only one besides the id."""
    names = list(have)
    if not columns:
        others = [name for name in names if name != "id"]
        columns = ["text"] if "text" in names or len(others) != 1 else others
    for name in columns:
        if name not in names:
            there = ", ".join(map(repr, names)) or "none"
            raise InputError(f"{where}: no column {name!r}; name one with --column: {there}")
    return columns


def _text(row: _Row, columns: Sequence[str]) -> str | tuple[str, str]:
    cells = [row.cells[name] for name in columns]
    for name, cell in zip(columns, cells, strict=True):
        if not isinstance(cell, str | None):
            kind = type(cell).__name__
            raise InputError(f"{row.where}: column {name!r} is not text but {kind}: {cell!r:.40}")
    first, *rest = [cell or "" for cell in cells]
    return (first, rest[0]) if rest else first


def _blank(text: str | tuple[str, str]) -> bool:
    parts = (text,) if isinstance(text, str) else text
    return not all(part.strip() for part in parts)


def _identity(value: Any, where: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(f"{where}: the id {value!r:.40} is neither a whole number nor a text")
    return value


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
