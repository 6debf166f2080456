"""Texts from a table, one after the other: any file or `Dataset` that `reading` reads.

A text keeps its id: the value of an `id` column, or else its number in the file counted from 0, as
rows of an array are. A row without text is an error unless it may be skipped: skipping silently
would shift every row behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse.data.tables.reading import (
    Source,
    Text,
    is_blank,
    name_of,
    open_source,
    read_rows,
    text_of,
)
from packhorse.data.tables.saved import is_dataset, rows_in, text_columns
from packhorse.errors import InputError


@dataclass(frozen=True, slots=True)
class Record:
    """One text, or a pair from two columns, and what the file calls it."""

    id: int | str
    text: Text


def read_texts(
    source: Source,
    column: str | Sequence[str] | None = None,
    *,
    pair: bool = False,
    skip_empty: bool = False,
) -> Iterator[Record]:
    """Each text of the file or `Dataset`, lazily; `-` is standard input, a text a line.

    column: where the text is; two make pairs. Without any, `text` or the only column there is (of a
    `Dataset`: the only one that holds text).
    pair: each text is two, with a tab between them. skip_empty: pass over rows without text, whose
    numbers are then missing from the ids.
    """
    columns = [column] if isinstance(column, str) else list(column or ())
    if len(columns) > 2 or (columns and pair):
        raise InputError("a text is one column, or two for a pair, or one with tabs in it (--pair)")
    if columns and _is_plain(source):
        where = "standard input" if source == "-" else source
        raise InputError(f"{where}: lines of text have no columns; leave out --column")

    name, source = name_of(source), open_source(source)
    if not columns and is_dataset(source):
        columns = _meant(text_columns(source))

    def needed(have: Sequence[str], where: str) -> list[str]:
        wanted = _choose(have, columns, where)
        return [*wanted, *(["id"] if "id" in have and "id" not in wanted else [])]

    for number, row in enumerate(read_rows(source, needed, name=name)):
        text = text_of(row, _choose(list(row.cells), columns, row.where)) if row.cells else ""
        if is_blank(text):
            if skip_empty:
                continue
            raise InputError(f"{row.where}: the text is empty; remove it or pass --skip-empty")
        identity = row.cells.get("id")
        yield Record(
            id=number if identity is None else _identity(identity, row.where),
            text=split_pair(text, row.where) if pair else text,
        )


def as_texts(given: Any) -> Any:
    """A `Dataset`'s only column of texts, a column, an iterator: as a list. All else as it is."""
    if hasattr(given, "column_name"):  # by itself it gives a row at a time, a hundred times slower
        return given[:] if hasattr(given, "__len__") else list(given)
    if not is_dataset(given):
        if isinstance(given, Mapping) or hasattr(given, "columns"):  # would give its columns' names
            raise InputError('a table is no list of texts; pass one column of it: table["…"]')
        if not isinstance(given, Iterable):
            raise InputError(f"texts are a list of texts, not {given!r:.80}")
        return list(given) if isinstance(given, Iterator) else given
    dataset = open_source(given)
    columns = text_columns(dataset)
    if len(columns) != 1:
        there = ", ".join(map(repr, columns)) or "none"
        raise InputError(f'a Dataset needs one column of texts; pass dataset["…"] of: {there}')
    return [row[columns[0]] for row in rows_in(dataset, columns)]


def split_pair(text: Text, where: str) -> tuple[str, str]:
    """The two texts on either side of the first tab."""
    first, tab, second = text.partition("\t") if isinstance(text, str) else (text[0], "\t", text[1])
    if not (tab and first.strip() and second.strip()):
        raise InputError(f"{where}: not a pair; two texts with a tab between them are")
    return first, second


def _is_plain(source: Source) -> bool:
    if not isinstance(source, str | Path):
        return False
    return str(source) == "-" or Path(source).suffix.lower() == ".txt"


def _meant(columns: Sequence[str]) -> list[str]:
    """Of a `Dataset` that tells which columns are text, the one to take; none if that is open."""
    return ["text"] if "text" in columns else list(columns if len(columns) == 1 else ())


def _choose(have: Sequence[str], columns: Sequence[str], where: str) -> Sequence[str]:
    """The columns asked for; without any, `text` or the only one besides the id."""
    if not columns:
        others = [name for name in have if name != "id"]
        columns = ["text"] if "text" in have or len(others) != 1 else others
    for name in columns:
        if name not in have:
            there = ", ".join(map(repr, have)) or "none"
            raise InputError(f"{where}: no column {name!r}; name one with --column: {there}")
    return columns


def _identity(value: Any, where: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(f"{where}: the id {value!r:.40} is neither a whole number nor a text")
    return value
