"""Rows and texts of tables: txt, jsonl, csv, tsv, parquet, Hugging Face `datasets`, mappings.

    for record in read_texts("reviews.csv", column="body"): record.id, record.text

Nothing is read ahead, so a file larger than memory costs no more than its longest row; the price is
that a bad row is only found when it is reached. Messages count lines from 1, as editors do, and
rows of an array from 0.

A text keeps its id: the value of an `id` column, or else its number in the file, counted from 0. A
row without text is an error unless it may be skipped, because skipping it silently would shift
every row after it.

A csv file need not say what separates its cells: `delimited` guesses it from the first rows. Text
is UTF-8, with or without a byte order mark, or UTF-16 with one, or what `CsvFormat` says.

A folder saved by `datasets` is recognized by its `state.json`. A folder with splits (a
`DatasetDict`) has one folder per split, so a split is named by its path, FOLDER/train; the only
split of a folder needs no name. The library is an extra and slow to import, so it is imported only
when such a folder is opened. A `Dataset` in memory is recognized by its methods, not by its class.
Arrow's own checks detect a file that was cut, but not a changed character.

Follows RFC 4180 for csv (the header names the columns), JSON Lines, where a line is an object with
columns or a bare string, IANA's tab-separated values, which have no quoting, if asked to, and the
layout of `Dataset.save_to_disk`: Arrow streams, listed in order by `state.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from packhorse.data.delimited import CsvFormat, csv_cells, text_lines
from packhorse.errors import InputError, MissingExtra

ROWS_PER_READ = 1024
BATCH_BYTES = 1 << 28  # memory that rows of a parquet file may take at once
RATIO = 100  # largest accepted ratio of unpacked to packed bytes; text has 2 to 10

STATE = "state.json"
SPLITS = "dataset_dict.json"
TEXT_KINDS = ("string", "large_string")
BAD_FOLDER = (ValueError, TypeError, LookupError)  # raised by Arrow and `datasets`

TableSource = str | Path | Iterable[Any]  # a path, a `datasets.Dataset`, an iterable of mappings
# From all columns and the place to name in a message: the columns to read.
ChooseColumns = Callable[[Sequence[str], str], Sequence[str]]
Text = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row with all its cells; `place` names it in messages."""

    place: str
    cells: Mapping[str, Any]  # empty if the line is blank


# Rows --------------------------------------------------------------------------------------------


def all_columns(columns: Sequence[str], place: str) -> Sequence[str]:
    """Choose every column."""
    return columns


def read_rows(
    source: TableSource,
    choose: ChooseColumns = all_columns,
    form: CsvFormat | None = None,
    name: str = "",
) -> Iterator[TableRow]:
    """Read rows lazily; `-` is standard input, one text per line.

    `choose` selects columns where reading one costs something; elsewhere rows have them all.
    name: for messages about a source that is already open.
    """
    name = name or name_of(source)
    source = open_source(source)
    if not isinstance(source, str | Path):
        return _memory_rows(source, choose, name)
    if str(source) == "-":
        return _txt_rows(sys.stdin.buffer, "standard input", form or CsvFormat())
    suffix = Path(source).suffix.lower()
    if suffix not in READERS:
        known = ", ".join(READERS)
        kind = "a folder that datasets did not save" if Path(source).is_dir() else "this"
        raise InputError(f"{source}: cannot read texts from {suffix or kind}; use one of {known}")
    return READERS[suffix](Path(source), choose, form or CsvFormat())


def open_source(source: TableSource) -> TableSource:
    """Open a folder that `datasets` saved, as its Dataset; return anything else unchanged."""
    if isinstance(source, Mapping):
        return only_split(source)
    if not isinstance(source, str | Path) or not Path(source).is_dir():
        return source
    folder = folder_of_rows(Path(source))
    return source if folder is None else open_saved(folder)


def name_of(source: TableSource) -> str:
    """The path of the source, or "" if it has none."""
    return str(source) if isinstance(source, str | Path) else ""


def text_of(row: TableRow, columns: Sequence[str]) -> Text:
    """The text in one column, or the pair in two; "" where a cell is empty."""
    texts: list[str] = []
    for name in columns:
        cell = row.cells[name] if row.cells else ""
        if not isinstance(cell, str | None):
            kind = type(cell).__name__
            raise InputError(f"{row.place}: column {name!r} is not text but {kind}: {cell!r:.40}")
        texts.append(cell or "")
    return (texts[0], texts[1]) if len(texts) > 1 else texts[0]


def is_blank(text: Text) -> bool:
    """Whether the text, or one of the pair, has nothing but white space."""
    parts = (text,) if isinstance(text, str) else text
    return not all(part.strip() for part in parts)


def _file_reader(
    read_stream: Callable[[BinaryIO, str, CsvFormat], Iterator[TableRow]],
) -> Callable[[Path, ChooseColumns, CsvFormat], Iterator[TableRow]]:
    """Make a reader of files from a reader of open streams."""

    def read(path: Path, choose: ChooseColumns, form: CsvFormat) -> Iterator[TableRow]:
        with _readable(path), path.open("rb") as stream:
            yield from read_stream(stream, str(path), form)

    return read


def _txt_rows(stream: BinaryIO, name: str, form: CsvFormat) -> Iterator[TableRow]:
    for place, line in text_lines(stream, name, form):
        yield TableRow(place, {"text": line.rstrip("\r\n")})


def _jsonl_rows(stream: BinaryIO, name: str, form: CsvFormat) -> Iterator[TableRow]:
    for place, line in text_lines(stream, name, form):
        if not line.strip():
            yield TableRow(place, {})
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: not JSON: {error}") from error
        if not isinstance(value, dict | str):
            raise InputError(f"{place}: neither an object with columns nor a string")
        yield TableRow(place, value if isinstance(value, dict) else {"text": value})


def _csv_rows(stream: BinaryIO, name: str, form: CsvFormat) -> Iterator[TableRow]:
    header: Sequence[str] = ()
    for place, cells in csv_cells(stream, name, form):
        if not header:
            header = form.names(cells)
            if not header:
                header = _distinct(cells, place)
                continue
        if cells and len(cells) != len(header):
            raise InputError(
                f"{place}: {len(cells)} cells, but {len(header)} columns"
                + ("" if form.quote else " (quotes count as text here)")
            )
        # An empty line is a blank text where there is one column; elsewhere it is no row.
        if cells or len(header) == 1:
            yield TableRow(place, dict(zip(header, cells or [""], strict=True)))


def _distinct(header: Sequence[str], place: str) -> Sequence[str]:
    if len(set(header)) < len(header):
        raise InputError(f"{place}: two columns have one name")
    return header


def _tsv_rows(stream: BinaryIO, name: str, form: CsvFormat) -> Iterator[TableRow]:
    return _csv_rows(stream, name, replace(form, delimiter=form.delimiter or "\t"))


def _parquet_rows(path: Path, choose: ChooseColumns, form: CsvFormat) -> Iterator[TableRow]:
    """Read only the columns that are needed."""
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
            rows = min((rows_per_read(path, g, needed, ROWS_PER_READ) for g in groups), default=1)
            number = 0
            for batch in file.iter_batches(rows, columns=needed):
                for cells in batch.to_pylist():
                    yield TableRow(f"{path}, row {number}", cells)
                    number += 1
        except pa.ArrowInvalid as error:
            raise InputError(f"{path}: not a parquet file: {error}") from error


def rows_per_read(path: object, group: Any, columns: Sequence[str], limit: int) -> int:
    """How many rows of a parquet row group may be read at once without filling the memory.

    A dictionary page stores a value once that every row may repeat, so a batch takes at most the
    column's size times its rows. A column that unpacks to far more than text does is refused.
    """
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema.partition(".")[0] not in columns:
            continue
        packed = column.total_compressed_size
        unpacked = column.total_uncompressed_size
        if unpacked > BATCH_BYTES and unpacked > RATIO * packed:
            raise InputError(
                f"{path}: column {column.path_in_schema!r} has {packed:,} bytes and unpacks to"
                f" {unpacked:,}, more than {RATIO} times as many; write the file again with"
                " smaller row groups"
            )
        if column.has_dictionary_page:
            limit = min(limit, max(1, BATCH_BYTES // max(1, unpacked)))
    return limit


def _memory_rows(source: Any, choose: ChooseColumns, name: str) -> Iterator[TableRow]:
    """Rows of a `Dataset` or of any iterable of mappings."""
    place = f"{name}, row" if name else "row"
    rows = source
    # A stream of a Dataset may not know its columns yet; then each row has all of them.
    if is_dataset(source) and source.column_names is not None:
        rows = iterate_dataset(source, choose(source.column_names, name or "the dataset"))
    for number, cells in enumerate(rows):
        if not isinstance(cells, Mapping):
            raise InputError(f"{place} {number} has no columns: it is a {type(cells).__name__}")
        yield TableRow(f"{place} {number}", cells)


READERS: dict[str, Callable[[Path, ChooseColumns, CsvFormat], Iterator[TableRow]]] = {
    ".txt": _file_reader(_txt_rows),
    ".jsonl": _file_reader(_jsonl_rows),
    ".csv": _file_reader(_csv_rows),
    ".tsv": _file_reader(_tsv_rows),
    ".parquet": _parquet_rows,
}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


# Hugging Face `datasets` -------------------------------------------------------------------------


def folder_of_rows(path: Path) -> Path | None:
    """The folder with the rows: this one, or its only split; None if `datasets` did not save it."""
    if (path / STATE).is_file():
        return path
    if not (path / SPLITS).is_file():
        return None
    splits = sorted(state.parent for state in path.glob(f"*/{STATE}"))
    if len(splits) == 1:
        return splits[0]
    if not splits:
        raise InputError(f"{path}: {SPLITS} lists splits, but there are none; save it again")
    raise InputError(f"{path} holds splits; name one of them: {', '.join(map(str, splits))}")


def open_saved(folder: Path) -> Iterable[Any]:
    """Open the `Dataset` in a folder; its files are mapped, not loaded."""
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingExtra("datasets", "hf") from error

    try:
        return Dataset.load_from_disk(str(folder))
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {_one_line(error)}") from error
    except BAD_FOLDER as error:
        raise InputError(f"{folder}: not a dataset that can be read: {_one_line(error)}") from error


def arrow_files(folder: Path) -> list[Path]:
    """The Arrow streams of a saved folder in the order of their rows; needs no `datasets`."""
    state = folder / STATE
    try:
        names = [file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
        inside = all(Path(name).name == name for name in names)
    except OSError as error:
        raise InputError(f"{state} cannot be read: {_one_line(error)}") from error
    except BAD_FOLDER as error:
        raise InputError(f"{state}: not as `datasets` writes it: {_one_line(error)}") from error
    if missing := [name for name in names if not inside or not (folder / name).is_file()]:
        raise InputError(f"{folder}: {missing[0]} does not exist, but {STATE} names it")
    return [folder / name for name in names]


def only_split(splits: Mapping[str, Any]) -> Any:
    """The only table of a `DatasetDict`."""
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise InputError(f"these are splits, not rows; pass one of them: {', '.join(map(str, splits))}")


def is_dataset(value: object) -> bool:
    """Whether columns can be selected: true of a `Dataset`, streaming or not, and of no list."""
    return hasattr(value, "select_columns")


def text_columns(dataset: Any) -> list[str]:
    """The columns that hold text, without the id; a stream without types is judged by a row."""
    features = dataset.features
    if features is None:
        first = next(iter(dataset), {})
        columns = [name for name, cell in first.items() if isinstance(cell, str)]
    else:
        columns = [name for name in features if _dtype_of(features[name]) in TEXT_KINDS]
    return [name for name in columns if name != "id"]


def _dtype_of(feature: Any) -> str:
    return getattr(feature, "dtype", "")


def iterate_dataset(dataset: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows as plain values, whatever format was set; batches are ten times as fast as rows."""
    for batch in dataset.select_columns(list(columns)).with_format(None).iter(ROWS_PER_READ):
        for values in zip(*(batch[name] for name in columns), strict=True):
            yield dict(zip(columns, values, strict=True))


def _one_line(error: Exception) -> str:
    """The first line of an error; `datasets` adds advice that does not apply here."""
    message = getattr(error, "strerror", None) or str(error)
    return message.strip().partition("\n")[0] or type(error).__name__


# Texts -------------------------------------------------------------------------------------------


ALL_COLUMNS = "all columns"
# Columns of the input that a record keeps beside its text: new names by the column's own.
Kept = Mapping[str, str] | str


@dataclass(frozen=True, slots=True)
class Record:
    """One text, or a pair from two columns, and its id."""

    id: int | str
    text: Text
    number: int = field(default=0, compare=False)  # of the row, counted from 0, empty ones too
    cells: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)  # that are kept


def read_texts(
    source: TableSource,
    column: str | Sequence[str] | None = None,
    *,
    pair: bool = False,
    skip_empty: bool = False,
    keep_empty: bool = False,
    keep: Kept | None = None,
    form: CsvFormat | None = None,
) -> Iterator[Record]:
    """Read the texts of a file or `Dataset` lazily; `-` is standard input, one text per line.

    column: the column with the text; two columns make pairs. Default: `text`, or the only column
    there is (of a `Dataset`: the only one that holds text).
    pair: each text is two, separated by a tab. skip_empty: skip rows without text; their numbers
    are then missing from the ids. keep_empty: such a row is a text like any other.
    keep: columns that the records have as `cells`, `ALL_COLUMNS` or their new names by the old.
    """
    columns = [column] if isinstance(column, str) else list(column or ())
    if len(columns) > 2 or (columns and pair):
        raise InputError("a text is one column, or two for a pair, or one with tabs in it (--pair)")
    if columns and _is_plain(source):
        place = "standard input" if source == "-" else source
        raise InputError(f"{place}: lines of text have no columns; leave out --column")

    name = name_of(source)
    source = open_source(source)
    if not columns and is_dataset(source):
        columns = _default_column(text_columns(source))

    def choose(available: Sequence[str], place: str) -> list[str]:
        if keep == ALL_COLUMNS:
            _choose_columns(available, columns, place)  # refuses what is not there
            return list(available)
        chosen = [*_choose_columns(available, columns, place), *kept_names(available, keep, place)]
        return [name for name in available if name == "id" or name in chosen]

    kept: Mapping[str, str] | None = None
    for number, row in enumerate(read_rows(source, choose, form, name=name)):
        text: Text = ""
        if row.cells:
            text = text_of(row, _choose_columns(list(row.cells), columns, row.place))
        if is_blank(text) and not keep_empty:
            if skip_empty:
                continue
            raise InputError(
                f"{row.place}: the text is empty; remove it or pass --skip-empty or --keep-empty"
            )
        if keep == ALL_COLUMNS:  # a line of JSON may have columns that others have not
            cells = {name: cell for name, cell in row.cells.items() if name != "id"}
        else:
            if kept is None and row.cells:
                kept = kept_names(list(row.cells), keep, row.place)
            renamed = keep if isinstance(keep, Mapping) else {}  # a blank line has no names
            names = (kept or renamed).items()
            cells = {new: row.cells.get(old) for old, new in names if old != "id"}
        identity = row.cells.get("id")
        yield Record(
            number if identity is None else _identity(identity, row.place),
            split_pair(text, row.place) if pair else text,
            number,
            cells,
        )


def kept_names(available: Sequence[str], keep: Kept | None, place: str) -> dict[str, str]:
    """The new names of the columns that are kept, by their own; one that is not there is refused.

    The id is not among them: records have it anyway.
    """
    if keep is None:
        return {}
    names = {name: name for name in available} if isinstance(keep, str) else keep
    for name in names:
        if name not in available:
            known = ", ".join(map(repr, available)) or "none"
            raise InputError(f"{place}: there is no column {name!r} to keep; there are: {known}")
    return {name: new for name, new in names.items() if name != "id"}


def as_texts(texts: Any) -> Any:
    """Turn a `Dataset` with one text column, a column of one, or an iterator into a list.

    Anything else is returned unchanged; what cannot be a list of texts is refused.
    """
    if hasattr(texts, "column_name"):  # a Column: iterating it is a hundred times slower
        return texts[:] if hasattr(texts, "__len__") else list(texts)
    if not is_dataset(texts):
        if isinstance(texts, Mapping) or hasattr(texts, "columns"):  # iterating gives column names
            raise InputError('a table is no list of texts; pass one column of it: table["…"]')
        if not isinstance(texts, Iterable):
            raise InputError(f"texts are a list of texts, not {texts!r:.80}")
        return list(texts) if isinstance(texts, Iterator) else texts
    dataset = open_source(texts)
    columns = text_columns(dataset)
    if len(columns) != 1:
        names = ", ".join(map(repr, columns)) or "none"
        raise InputError(f'a Dataset needs one column of texts; pass dataset["…"] of: {names}')
    return [row[columns[0]] for row in iterate_dataset(dataset, columns)]


def split_pair(text: Text, place: str) -> tuple[str, str]:
    """The two texts before and after the first tab."""
    first, tab, second = text.partition("\t") if isinstance(text, str) else (text[0], "\t", text[1])
    if not (tab and first.strip() and second.strip()):
        raise InputError(f"{place}: not a pair; a pair is two texts separated by a tab")
    return first, second


def _is_plain(source: TableSource) -> bool:
    if not isinstance(source, str | Path):
        return False
    return str(source) == "-" or Path(source).suffix.lower() == ".txt"


def _default_column(columns: Sequence[str]) -> list[str]:
    """The text column to read if none is named; none if the choice is not clear."""
    if "text" in columns:
        return ["text"]
    return list(columns) if len(columns) == 1 else []


def _choose_columns(available: Sequence[str], columns: Sequence[str], place: str) -> Sequence[str]:
    """The columns the user named; by default `text`, or the only one besides the id."""
    if not columns:
        others = [name for name in available if name != "id"]
        columns = ["text"] if "text" in available or len(others) != 1 else others
    for name in columns:
        if name not in available:
            names = ", ".join(map(repr, available)) or "none"
            raise InputError(f"{place}: no column {name!r}; name one with --column: {names}")
    return columns


def _identity(value: Any, place: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(f"{place}: the id {value!r:.40} is neither a whole number nor a text")
    return value
