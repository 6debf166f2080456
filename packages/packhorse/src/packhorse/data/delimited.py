"""Lines and cells of text files: which encoding, which delimiter, and how many rows there are.

Files that are called csv differ: the cells of many are separated by semicolons or tabs, and what
old programs wrote is UTF-16 or cp1252. The delimiter is guessed where the header alone decides it.
A byte order mark names UTF-8 and UTF-16. Nothing in a file names other encodings, and a wrong guess
would change texts silently, so these must be named.

Follows RFC 4180: a cell may be in quotes, and in it may be delimiters, line breaks and, doubled,
quotes. `escape` is for what databases write in place of doubling them.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from packhorse.errors import InputError

DELIMITERS = (",", ";", "\t", "|")  # those that are guessed; of equal ones the first
SAMPLE_BYTES = 1 << 16  # in which the delimiter is guessed
SAMPLE_ROWS = 50
LONGEST_CELL = 1 << 27  # characters; the csv module refuses cells over 131,072 by default
BLOCK_SIZE = 1 << 20  # bytes, or characters, read at a time where lines are counted
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """What a text file does not say about itself; all but the encoding is for csv and tsv."""

    delimiter: str = ""  # "": the usual one, guessed for csv
    quote: str = '"'  # "": quotes are text like any other character
    escape: str = ""  # a character before quotes that are text; "": quotes are doubled
    encoding: str = ""  # "": UTF-8, or UTF-16 with a byte order mark
    # From the cells of the first row: names for the columns, or none if that row is the header.
    names: Callable[[Sequence[str]], Sequence[str]] = lambda cells: ()

    def __post_init__(self) -> None:
        for name in ("delimiter", "quote", "escape"):
            if len(getattr(self, name)) > 1:
                raise InputError(f"{name} is {getattr(self, name)!r}; it is a single character")
        try:
            "".encode(self.encoding or "utf-8")  # refuses codecs that are not of text, such as hex
        except (LookupError, UnicodeError) as error:
            raise InputError(
                f"unknown encoding {self.encoding!r}; name one that Python knows, such as cp1252"
            ) from error


def text_lines(stream: BinaryIO, name: str, form: CsvFormat) -> Iterator[tuple[str, str]]:
    """The place and the text of each line, with its line end; a byte order mark is skipped."""
    encoding = form.encoding or _marked_encoding(stream)
    if encoding:
        yield from _decoded_lines(stream, name, encoding)
        return
    for number, raw in enumerate(stream, 1):
        place = f"{name}, line {number}"
        try:
            yield place, raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{place}: not UTF-8 (byte {error.start}); name its encoding, such as "
                "--encoding cp1252, or convert it"
            ) from error


def _marked_encoding(stream: BinaryIO) -> str:
    """UTF-16 if the file begins with its byte order mark, else ""."""
    peek = getattr(stream, "peek", None)
    start = peek(2)[:2] if peek is not None else b""
    return "utf-16" if start in UTF_16 else ""


def _decoded_lines(stream: BinaryIO, name: str, encoding: str) -> Iterator[tuple[str, str]]:
    """Lines of another encoding, in which a line feed need not be the byte 10."""
    number = 0
    try:
        with _decoded(stream, encoding) as lines:
            for number, line in enumerate(lines, 1):
                yield f"{name}, line {number}", line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeError as error:  # decoded in blocks, so the line is known roughly
        raise InputError(f"{name}, after line {number}: not {encoding}: {error}") from error


@contextmanager
def _decoded(stream: BinaryIO, encoding: str) -> Iterator[io.TextIOWrapper]:
    """The text of a stream, which stays open: it may be standard input."""
    text = io.TextIOWrapper(stream, encoding, newline="\n")
    try:
        yield text
    finally:
        if not stream.closed:
            text.detach()


def csv_cells(stream: BinaryIO, name: str, form: CsvFormat) -> Iterator[tuple[str, list[str]]]:
    """The place and the cells of each row, the header among them."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    if not form.delimiter:
        form = replace(form, delimiter=guess_delimiter(stream, form))
    lines = (line for _, line in text_lines(stream, name, form))
    rows = _reader(lines, form)
    try:
        for cells in rows:
            yield f"{name}, line {rows.line_num}", cells
    except csv.Error as error:
        raise InputError(f"{name}, line {rows.line_num}: not csv: {error}") from error


def _reader(lines: Iterable[str], form: CsvFormat) -> Any:  # the csv module hides its type
    return csv.reader(
        lines,
        delimiter=form.delimiter or ",",
        quotechar=form.quote or None,
        quoting=csv.QUOTE_MINIMAL if form.quote else csv.QUOTE_NONE,
        escapechar=form.escape or None,
        strict=True,
    )


def guess_delimiter(stream: BinaryIO, form: CsvFormat) -> str:
    """The delimiter of a csv file: that which divides the first rows into most columns.

    It must divide the header, and every row into as many cells; else it is the comma.
    """
    if not stream.seekable():
        return ","
    start = stream.tell()
    data = stream.read(SAMPLE_BYTES)
    is_whole = len(data) < SAMPLE_BYTES
    stream.seek(start)
    encoding = form.encoding or ("utf-16" if data[:2] in UTF_16 else "utf-8-sig")
    text = data.decode(encoding, "replace")
    best = ","
    most = 1
    for delimiter in DELIMITERS:
        rows = _sample_rows(text, replace(form, delimiter=delimiter), is_whole)
        widths = {len(row) for row in rows if row}
        if len(widths) == 1 and min(widths) > most:
            (most,) = widths
            best = delimiter
    return best


def _sample_rows(text: str, form: CsvFormat, is_whole: bool) -> list[list[str]]:
    """The first rows of a text, without the last one if the text ends within it; none if bad."""
    rows: list[list[str]] = []
    reader = _reader(io.StringIO(text, newline="\n"), form)
    try:
        for cells in reader:
            rows.append(cells)
            if len(rows) == SAMPLE_ROWS:
                return rows
    except csv.Error:  # perhaps because the sample ends in a cell
        return [] if is_whole else rows
    return rows if is_whole else rows[:-1]


def count_rows(stream: BinaryIO, form: CsvFormat, *, is_csv: bool) -> int:
    """How many lines there are or, of csv, rows without the header; for a progress display.

    Line breaks within quotes are not counted. It is a count of bytes, hundreds of megabytes a
    second, and wrong where a quote is text without being doubled.
    """
    encoding = form.encoding or _marked_encoding(stream)
    quote = ord(form.quote) if is_csv and form.quote.isascii() and form.quote else -1
    if len("a".encode(encoding or "ascii")) == 1:
        return _count_lines(iter(partial(stream.read, BLOCK_SIZE), b""), quote) - is_csv
    with _decoded(stream, encoding) as text:
        blocks = (block.encode() for block in iter(partial(text.read, BLOCK_SIZE), ""))
        return _count_lines(blocks, quote) - is_csv


def _count_lines(blocks: Iterable[bytes], quote: int) -> int:
    """Count line ends that are not between two of these bytes, and a last line without one."""
    import numpy as np  # here: the command line reads this module for its help

    count = 0
    is_quoted = 0
    last = b"\n"
    for block in blocks:
        codes = np.frombuffer(block, np.uint8)
        line_ends = codes == ord("\n")
        if quote >= 0:
            quoted = (np.cumsum(codes == quote) + is_quoted) & 1
            is_quoted = int(quoted[-1])
            line_ends &= quoted == 0
        count += int(line_ends.sum())
        last = block[-1:]
    return count + (last != b"\n")
