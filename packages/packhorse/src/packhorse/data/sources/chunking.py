"""Sources cut into chunks: the unit of parallel work, of resuming and of randomness.

A chunk is a range of bytes that begins where a document does, about `size` bytes of text, so it is
small to send and a worker reads it itself. Only the surroundings of each cut are looked at. Where a
file cannot be entered in the middle, a bz2 of one stream or whose streams end inside documents, the
text is unpacked here, once and in order, and sent along in `data`; so are the rows of a parquet
file's large row groups, in `cells`. Chunks come lazily and never hold more than one of these; a
document longer than `size` is a chunk of its own.

Cuts depend on the file and `size` alone. In plain text, where nothing tells documents apart, a long
file is cut at a blank line, and what lies between two cuts is a document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.data.sources import arrow, bz2streams
from packhorse.data.sources.files import Source
from packhorse.data.tables.reading import rows_a_read
from packhorse.errors import InputError

if TYPE_CHECKING:
    from pyarrow import parquet

CHUNK_BYTES = 1 << 22
LONGEST_DOCUMENT = 1 << 28  # bytes; what is longer is cut, and read as damage
BZ2_RATIO = 4  # bytes of text for each of a packed dump, roughly
GROUP_CHUNKS = 4  # a parquet row group of up to so many chunks' bytes is one chunk
ROWS_A_READ = 256  # of a parquet file, at most
EARLY_BYTES = 1 << 26  # of a dump; in one of many streams they hold the first of them

_FIRST_LOOK = 1 << 16
# Where a chunk may begin: at the end of a match. Of several the first is tried first.
_BOUNDARIES = {
    "mediawiki": [re.compile(rb"(?=<page>)")],
    "wikiextractor": [re.compile(rb"\n(?=<doc )")],
    # Of many line ends in a row the first two are MLPerf's separator; the rest is the next text's.
    "sentences": [re.compile(rb"(?<=[^\r\n])\r?\n\r?\n")],
    "text": [
        re.compile(rb"\n(?=[ \t]*= [^=\n]+ =[ \t\r]*\n)"),
        re.compile(rb"\n[ \t\r]*\n"),
        re.compile(rb"\n"),
    ],
    "jsonl": [re.compile(rb"\n")],
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a source that can be read by itself, anywhere; pickles.

    `begin` and `end` count bytes of the file, rows of a table, and unpacked bytes where the text
    comes along in `data`. `cells` are the rows' texts where they come along.
    """

    source: Source
    number: int  # over all sources
    begin: int
    end: int
    data: bytes | None = None
    last: bool = False  # of its source
    problems: tuple[str, ...] = ()  # found while `data` or `cells` were unpacked
    cells: tuple[bytes | None, ...] | None = None

    @property
    def counts_rows(self) -> bool:
        """Is it of a table?"""
        return self.source.kind in ("parquet", "arrow")


def chunks(sources: Sequence[Source], size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """All the sources' chunks in order, numbered from 0, of about `size` bytes of text each."""
    if size < 1:
        raise InputError(f"a chunk must have at least 1 byte, got {size}")
    number = 0
    for source in sources:
        try:
            for chunk in _of_one(source, size):
                yield replace(chunk, number=number)
                number += 1
        except OSError as error:
            raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from error


def _of_one(source: Source, size: int) -> Iterator[Chunk]:
    """The chunks of one source, not numbered yet."""
    if source.kind == "parquet":
        return _of_rows(source, size)
    if source.kind == "arrow":
        return _of_stream(source, size)
    if not source.compressed:
        return _of_bytes(source, size)
    if source.kind == "mediawiki" and _streams_hold_pages(source.path):
        return _of_streams(source, size)
    return _unpacked_here(source, size)


def _of_bytes(source: Source, size: int) -> Iterator[Chunk]:
    with source.path.open("rb") as file:

        def look(at: int, count: int) -> bytes:
            file.seek(at)
            return file.read(count)

        begin = 0
        while begin < source.size:
            end = min(_cut(look, begin + size, source.kind, size), source.size)
            yield Chunk(source, 0, begin, end, last=end == source.size)
            begin = end


def _cut(look: Callable[[int, int], bytes], at: int, kind: str, size: int) -> int:
    """The first place from `at` on where a document begins, or where the text ends."""
    *wished, boundary = _BOUNDARIES[kind]
    for better in wished:
        text = look(at, max(size, _FIRST_LOOK))
        if found := better.search(text):
            return at + found.end()
        if len(text) < max(size, _FIRST_LOOK):
            return at + len(text)  # little is left: it stays with the document it belongs to
    count = _FIRST_LOOK
    while True:
        text = look(at, count)
        if found := boundary.search(text):
            return at + found.end()
        if len(text) < count or count >= LONGEST_DOCUMENT:
            return at + len(text)
        count *= 4


def _streams_hold_pages(path: Path) -> bool:
    """Whether bz2 streams begin with pages, as in MediaWiki's dumps: the first after the header do.

    Other programs (pbzip2) cut streams anywhere. If a later one is cut nevertheless, the reader
    finds a page without an end and says so.
    """
    early = islice(bz2streams.starts(path, 1, EARLY_BYTES), 2)
    begins = [next(bz2streams.unpacked(path, start), (b"", ""))[0].lstrip() for start in early]
    return bool(begins) and all(text.startswith((b"<page>", b"</mediawiki>")) for text in begins)


def _of_streams(source: Source, size: int) -> Iterator[Chunk]:
    begin = 0
    for start in bz2streams.starts(source.path, 1):
        if (start - begin) * BZ2_RATIO >= size:
            yield Chunk(source, 0, begin, start)
            begin = start
    yield Chunk(source, 0, begin, source.size, last=True)


class _Unpacking:
    """Text that is unpacked as far as someone looks, and given away from the front."""

    def __init__(self, path: Path) -> None:
        self.pieces = bz2streams.unpacked(path)
        self.text = bytearray()
        self.problems: list[str] = []

    def look(self, at: int, count: int) -> bytes:
        while len(self.text) < at + count and (piece := next(self.pieces, None)):
            self.text += piece[0]
            self.problems += [piece[1]] if piece[1] else []
        return bytes(self.text[at : at + count])

    def take(self, count: int) -> tuple[bytes, tuple[str, ...]]:
        taken, problems = bytes(self.text[:count]), tuple(self.problems)
        del self.text[:count], self.problems[:]
        return taken, problems


def _unpacked_here(source: Source, size: int) -> Iterator[Chunk]:
    unpacking, begin, last = _Unpacking(source.path), 0, False
    while not last:
        data, problems = unpacking.take(_cut(unpacking.look, size, source.kind, size))
        last = not unpacking.look(0, 1)
        # Damage behind the last text is found by the look and belongs to this chunk.
        problems += unpacking.take(0)[1] if last else ()
        end = begin + len(data)
        yield Chunk(source, 0, begin, end, data, last, problems)
        begin = end


def opened_table(path: Path) -> parquet.ParquetFile:
    """A parquet file that is read page by page, never a whole column of a row group at once."""
    from pyarrow import parquet

    return parquet.ParquetFile(
        path, buffer_size=1 << 16, pre_buffer=False, page_checksum_verification=True
    )


def texts_of_group(
    path: Path,
    file: parquet.ParquetFile,
    group: int,
    column: str | None,
    rows: int = ROWS_A_READ,
) -> Iterator[bytes | None]:
    """The column's texts in one row group, decoded once from its start, `rows` at a time."""
    import pyarrow as pa

    rows = rows_a_read(path, file.metadata.row_group(group), [str(column)], rows)
    for batch in file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
        yield from batch.column(0).cast(pa.large_binary()).to_pylist()


def lost_rows(begin: int, end: int, error: Exception) -> str:
    """The complaint about rows `begin` to `end` of a damaged parquet file."""
    return f"rows {begin} to {end - 1} are lost: {error}"


def _of_rows(source: Source, size: int) -> Iterator[Chunk]:
    """A row group each, for the worker to decode; a large one is decoded here.

    Pages of a group are read from its first on, so a worker could enter it nowhere else.
    """
    begin = 0
    with opened_table(source.path) as file:
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            whole = Chunk(source, 0, begin, begin + group.num_rows)
            columns = (group.column(index) for index in range(group.num_columns))
            stored = sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema == source.column
            )
            large = stored > GROUP_CHUNKS * size
            for chunk in _of_group(file, number, whole, size, stored) if large else [whole]:
                if chunk.begin < chunk.end:
                    yield replace(chunk, last=chunk.end == file.metadata.num_rows)
            begin = whole.end


def _of_stream(source: Source, size: int) -> Iterator[Chunk]:
    """As many rows of an Arrow stream as make up `size`, for the worker to read."""
    begin = end = weight = 0
    for length in arrow.lengths(source.path, str(source.column)):
        if weight >= size:
            yield Chunk(source, 0, begin, end)
            begin, weight = end, 0
        end, weight = end + 1, weight + length
    yield Chunk(source, 0, begin, end, last=True)


def _of_group(
    file: parquet.ParquetFile, number: int, whole: Chunk, size: int, stored: int
) -> Iterator[Chunk]:
    """A large row group in chunks that bring their rows along; damage costs the group's rest."""
    import pyarrow as pa

    rows = whole.end - whole.begin
    a_read = min(ROWS_A_READ, max(1, size * rows // stored))
    begin, cells, weight = whole.begin, list[bytes | None](), 0
    problems: tuple[str, ...] = ()
    try:
        for text in texts_of_group(whole.source.path, file, number, whole.source.column, a_read):
            cells.append(text)
            weight += len(text or b"")
            if weight >= size:
                end = begin + len(cells)
                yield replace(whole, begin=begin, end=end, cells=tuple(cells))
                begin, cells, weight = end, [], 0
    except (pa.ArrowException, OSError) as error:
        problems = (lost_rows(begin + len(cells), whole.end, error),)
    yield replace(whole, begin=begin, cells=tuple(cells), problems=problems)
