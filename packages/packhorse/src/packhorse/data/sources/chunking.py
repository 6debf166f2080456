"""Chunks of source files: the unit of parallel work, of resuming and of randomness.

A chunk is a range of about `size` bytes that begins where a document does. It is small to send,
and the worker reads the bytes itself; here only the surroundings of each cut are read. Where a file
cannot be read from the middle (packed files, but for a dump in many bz2 streams; JSON arrays;
standard input) the text is unpacked here, once and in order, and sent along in `data`; so are the
rows of a parquet file's large row groups, in `cells`. Chunks are made lazily, so only one of these
is in memory at a time. A document longer than `size` is a chunk of its own.

Cuts depend on the file and `size` alone. Where a whole file of plain text is a document, a long one
is cut at a blank line, and the text between two cuts is a document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from packhorse.data.sources import arrow, bz2streams, json_array
from packhorse.data.sources.files import SourceFile, member_source
from packhorse.data.sources.hub import HubFile, SourcePath
from packhorse.data.sources.text_buffer import TextBuffer
from packhorse.data.sources.unpacking import STANDARD_INPUT, TextStream, open_streams
from packhorse.data.tables import rows_per_read
from packhorse.errors import InputError

if TYPE_CHECKING:
    from pyarrow import parquet

CHUNK_BYTES = 1 << 22
LONGEST_DOCUMENT = 1 << 28  # bytes; what is longer is cut, and read as damage
BZ2_RATIO = 4  # bytes of text per packed byte of a dump, roughly
GROUP_CHUNKS = 4  # a parquet row group of at most this many times `size` bytes is one chunk
ROWS_PER_READ = 256  # of a parquet file, at most
EARLY_BYTES = 1 << 26  # of a dump: enough to hold the first of many streams

_FIRST_LOOK = 1 << 16
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_LINE_END = re.compile(rb"\n")
# A chunk may begin at the end of a match. Of several patterns the first that matches is used.
_BOUNDARIES = {
    "mediawiki": [re.compile(rb"(?=<page>)")],
    "wikiextractor": [re.compile(rb"\n(?=<doc )")],
    # Of many line ends in a row the first two are MLPerf's separator; the rest belong to the next.
    "sentences": [re.compile(rb"(?<=[^\r\n])\r?\n\r?\n")],
    "jsonl": [_LINE_END],
    "json": [_LINE_END],
}
# The same of plain text, by what divides it into documents.
_TEXT_BOUNDARIES = {
    "titles": [re.compile(rb"\n(?=[ \t]*= [^=\n]+ =[ \t\r]*\n)"), _BLANK_LINE, _LINE_END],
    "file": [_BLANK_LINE, _LINE_END],
    "blank-lines": [_BLANK_LINE],
    "lines": [_LINE_END],
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a source that any process can read by itself.

    `begin` and `end` count bytes of the file, rows of a table, or unpacked bytes if the chunk
    carries its text in `data`. `cells` are the texts of rows that the chunk carries.
    """

    source: SourceFile
    number: int  # over all sources
    begin: int
    end: int
    data: bytes | None = None
    last: bool = False  # of its source
    problems: tuple[str, ...] = ()  # found while `data` or `cells` were unpacked
    cells: tuple[bytes | None, ...] | None = None
    stored: int | None = None  # bytes of the file that it stands for, where that is known

    @property
    def counts_rows(self) -> bool:
        """Whether `begin` and `end` are rows of a table."""
        return self.source.kind in ("parquet", "arrow")


def chunks(sources: Sequence[SourceFile], size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut all sources into chunks of about `size` bytes of text, numbered from 0."""
    if size < 1:
        raise InputError(f"a chunk must have at least 1 byte, got {size}")
    number = 0
    for source in sources:
        try:
            for chunk in _source_chunks(source, size):
                yield replace(chunk, number=number)
                number += 1
        except OSError as error:
            raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from error


def _source_chunks(source: SourceFile, size: int) -> Iterator[Chunk]:
    """The chunks of one source, all with the number 0."""
    if source.kind == "parquet":
        return _parquet_chunks(source, size)
    if source.kind == "arrow":
        return _arrow_chunks(source, size)
    if not source.is_stream:
        return _byte_chunks(source, size)
    is_packed_dump = source.kind == "mediawiki" and source.packing == ("bz2",)
    if is_packed_dump and source.path != STANDARD_INPUT and _streams_hold_pages(source.path):
        return _bz2_stream_chunks(source, size)
    return _stream_chunks(source, size)


def _boundaries(source: SourceFile) -> list[re.Pattern[bytes]]:
    """Where the documents of a source begin: patterns, of which the first that matches is used."""
    if source.kind != "text":
        return _BOUNDARIES[source.kind]
    if source.separator:
        return [re.compile(re.escape(source.separator.encode()))]
    return _TEXT_BOUNDARIES[source.documents]


def _byte_chunks(source: SourceFile, size: int) -> Iterator[Chunk]:
    boundaries = _boundaries(source)
    with source.path.open("rb") as file:

        def peek(position: int, count: int) -> bytes:
            file.seek(position)
            return file.read(count)

        begin = 0
        while begin < source.size:
            end = min(_cut(peek, begin + size, boundaries, size), source.size)
            yield Chunk(source, 0, begin, end, last=end == source.size)
            begin = end


def _cut(
    peek: Callable[[int, int], bytes],
    position: int,
    boundaries: Sequence[re.Pattern[bytes]],
    size: int,
) -> int:
    """The first position from here on where a document begins, or the end of the text."""
    *preferred, boundary = boundaries
    for pattern in preferred:
        text = peek(position, max(size, _FIRST_LOOK))
        if match := pattern.search(text):
            return position + match.end()
        if len(text) < max(size, _FIRST_LOOK):
            return position + len(text)  # little remains: it stays with its document
    count = _FIRST_LOOK
    while True:
        text = peek(position, count)
        if match := boundary.search(text):
            return position + match.end()
        if len(text) < count or count >= LONGEST_DOCUMENT:
            return position + len(text)
        count *= 4


def _streams_hold_pages(path: SourcePath) -> bool:
    """Whether bz2 streams begin with a page, as in MediaWiki's dumps; the first two are checked.

    Other programs (pbzip2) cut streams anywhere. If a later one is cut nevertheless, the reader
    reports a page without an end.
    """
    early = islice(bz2streams.starts(path, 1, EARLY_BYTES), 2)
    begins = [next(bz2streams.unpacked(path, start), (b"", ""))[0].lstrip() for start in early]
    return bool(begins) and all(text.startswith((b"<page>", b"</mediawiki>")) for text in begins)


def _bz2_stream_chunks(source: SourceFile, size: int) -> Iterator[Chunk]:
    begin = 0
    for start in bz2streams.starts(source.path, 1):
        if (start - begin) * BZ2_RATIO >= size:
            yield Chunk(source, 0, begin, start)
            begin = start
    yield Chunk(source, 0, begin, source.size, last=True)


def _stream_chunks(source: SourceFile, size: int) -> Iterator[Chunk]:
    """The chunks of a file that is unpacked here, or of each file in an archive."""
    counted = 0  # bytes of the packed file
    for stream in open_streams(source.path, source.packing):
        buffer = TextBuffer(stream.pieces)
        try:
            text_source = member_source(source, stream.member, buffer)
        except InputError as error:
            problems = buffer.take(0)[1]
            yield Chunk(source, 0, 0, 0, b"", problems=problems or (str(error),), stored=0)
            continue
        if text_source.kind == "json":
            buffer = TextBuffer(json_array.as_lines(buffer.remaining()))
        for chunk in _unpacked_chunks(text_source, stream, buffer, size):
            if stream.packed_bytes is not None:
                position = stream.packed_bytes()
                chunk = replace(chunk, stored=position - counted)
                counted = position
            yield chunk


def _unpacked_chunks(
    source: SourceFile, stream: TextStream, buffer: TextBuffer, size: int
) -> Iterator[Chunk]:
    boundaries = _boundaries(source)
    begin = 0
    last = False
    while not last:
        data, problems = buffer.take(_cut(buffer.peek, size, boundaries, size))
        last = not buffer.peek(0, 1)
        if last:  # damage after the last text, which peek has come across, belongs to this chunk
            problems += buffer.take(0)[1]
        end = begin + len(data)
        yield Chunk(source, 0, begin, end, data, last, problems)
        begin = end


def open_parquet(path: SourcePath) -> parquet.ParquetFile:
    """A parquet file that is read page by page, never a whole column of a row group at once."""
    from pyarrow import parquet

    source = path.open() if isinstance(path, HubFile) else path
    return parquet.ParquetFile(
        source, buffer_size=1 << 16, pre_buffer=False, page_checksum_verification=True
    )


def texts_of_group(
    path: SourcePath,
    file: parquet.ParquetFile,
    group: int,
    column: str | None,
    rows: int = ROWS_PER_READ,
) -> Iterator[bytes | None]:
    """The texts of one row group, decoded from its start, `rows` at a time."""
    import pyarrow as pa

    rows = rows_per_read(path, file.metadata.row_group(group), [str(column)], rows)
    for batch in file.iter_batches(rows, row_groups=[group], columns=[column], use_threads=False):
        yield from batch.column(0).cast(pa.large_binary()).to_pylist()


def lost_rows(begin: int, end: int, error: Exception) -> str:
    """The message about rows `begin` to `end` of a damaged file."""
    return f"rows {begin} to {end - 1} are lost: {error}"


def _parquet_chunks(source: SourceFile, size: int) -> Iterator[Chunk]:
    """One chunk per row group, which the worker decodes; a large group is decoded here.

    The pages of a group can only be read from the first on, so workers cannot share a group.
    """
    begin = 0
    with open_parquet(source.path) as file:
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
            for chunk in _row_group_chunks(file, number, whole, size, stored) if large else [whole]:
                if chunk.begin < chunk.end:
                    yield replace(chunk, last=chunk.end == file.metadata.num_rows)
            begin = whole.end


def _arrow_chunks(source: SourceFile, size: int) -> Iterator[Chunk]:
    """Chunks of as many rows of an Arrow stream as hold `size` bytes; the worker reads them."""
    begin = end = text_bytes = 0
    for length in arrow.lengths(source.local_path, str(source.column)):
        if text_bytes >= size:
            yield Chunk(source, 0, begin, end)
            begin = end
            text_bytes = 0
        end += 1
        text_bytes += length
    yield Chunk(source, 0, begin, end, last=True)


def _row_group_chunks(
    file: parquet.ParquetFile, number: int, whole: Chunk, size: int, stored: int
) -> Iterator[Chunk]:
    """Chunks that carry the rows of a large group; after damage its remaining rows are lost."""
    import pyarrow as pa

    rows = whole.end - whole.begin
    rows_at_once = min(ROWS_PER_READ, max(1, size * rows // stored))
    begin = whole.begin
    cells: list[bytes | None] = []
    text_bytes = 0
    problems: tuple[str, ...] = ()
    try:
        column = whole.source.column
        for text in texts_of_group(whole.source.path, file, number, column, rows_at_once):
            cells.append(text)
            text_bytes += len(text or b"")
            if text_bytes >= size:
                end = begin + len(cells)
                yield replace(whole, begin=begin, end=end, cells=tuple(cells))
                begin = end
                cells = []
                text_bytes = 0
    except (pa.ArrowException, OSError) as error:
        problems = (lost_rows(begin + len(cells), whole.end, error),)
    yield replace(whole, begin=begin, cells=tuple(cells), problems=problems)
