"""Documents from files of any kind, in sentences: what the corpus builder's workers begin with.

    for chunk in chunks(find([Path("enwiki.xml.bz2")])):     # cheap and lazy, in the driver
        documents, tally = read(chunk)                       # the work, in any process

`read` is a function of the chunk alone, so it runs in a process pool or a Ray task as it is. A bad
document is never raised and never dropped in silence: it is counted, with its place and the reason,
and so is damage of the file itself; what else can be read is kept. The driver decides how much is
too much.

`text_md5` is what MLPerf BERT's list of evaluation articles holds: the md5 of an article's
sentences, one a line, without white space behind the last. Files in MLPerf's own form (`part-*`,
`eval.txt`) match it to the byte; there an odd line end before an article is part of it, as MLPerf's
split leaves it. Articles from a dump or from WikiExtractor match only where their clean-up and
sentences are those of MLPerf's NLTK, so for them the list finds few or none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import fields as fields_of
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from packhorse.data.sources import arrow, bz2streams, markup, sentences, wiki
from packhorse.data.sources.chunking import (
    CHUNK_BYTES,
    LONGEST_DOCUMENT,
    Chunk,
    chunks,
    lost_rows,
    opened_table,
    texts_of_group,
)
from packhorse.data.sources.files import KINDS, Source, find
from packhorse.errors import InputError

__all__ = [
    "CHUNK_BYTES",
    "KINDS",
    "Bad",
    "Chunk",
    "Document",
    "Source",
    "Tally",
    "chunks",
    "find",
    "read",
]

REDIRECT, NOT_AN_ARTICLE, EMPTY = wiki.REDIRECT, wiki.NOT_AN_ARTICLE, "empty"

_HEADING = re.compile(r"^[ \t]*= .* =[ \t\r]*$", re.MULTILINE)
_TITLE_LINE = re.compile(rb"^[ \t]*= [^=\n]+ =[ \t\r]*$", re.MULTILINE)
_LINE_ENDS = re.compile(rb"[\r\n]*")
_BETWEEN_ARTICLES = re.compile(rb"\r?\n[ \t]*\r?\n")
_XML_TITLE = re.compile(rb"<title>([^<]*)")


@dataclass(frozen=True, slots=True)
class Document:
    """One text in sentences; `name` is its title, or its place, for messages."""

    name: str
    sentences: list[str]
    text_md5: str


@dataclass(frozen=True, slots=True)
class Bad:
    """What could not be read, and why."""

    where: str
    why: str


@dataclass(frozen=True, slots=True)
class Tally:
    """What was found and what became of it; tallies of chunks add up to the build's."""

    documents: int = 0
    characters: int = 0  # of their sentences
    redirects: int = 0
    not_articles: int = 0  # pages of other namespaces
    empty: int = 0
    bad: tuple[Bad, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        names = [field.name for field in fields_of(self)]
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in names})


Found = Document | Bad | str  # a string says why a document was passed over


def read(chunk: Chunk) -> tuple[list[Document], Tally]:
    """The chunk's documents, unpacked, cleaned and split; and the count of everything in it."""
    if chunk.counts_rows:
        found: list[Found] = [*_table(chunk)]
    else:
        data, problems = _load(chunk)
        damage = [Bad(str(chunk.source.path), problem) for problem in problems]
        found = [*damage, *_READERS[chunk.source.kind](data, chunk)]
    documents = [one for one in found if isinstance(one, Document)]
    return documents, Tally(
        documents=len(documents),
        characters=sum(len(sentence) for one in documents for sentence in one.sentences),
        redirects=found.count(REDIRECT),
        not_articles=found.count(NOT_AN_ARTICLE),
        empty=found.count(EMPTY),
        bad=tuple(one for one in found if isinstance(one, Bad)),
    )


def _load(chunk: Chunk) -> tuple[bytes, list[str]]:
    """The chunk's text, and what is wrong with the file it comes from."""
    if chunk.data is not None:
        return chunk.data, list(chunk.problems)
    path = chunk.source.path
    try:
        if chunk.source.compressed:
            return _unpacked(path, chunk.begin, chunk.end)
        with path.open("rb") as file:
            file.seek(chunk.begin)
            data = file.read(chunk.end - chunk.begin)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) < chunk.end - chunk.begin:
        raise InputError(f"{path} is shorter than when the build began; leave sources as they are")
    return data, []


def _unpacked(path: Path, begin: int, end: int) -> tuple[bytes, list[str]]:
    """The text of packed bytes, no more of it than one document may have, and what is wrong."""
    text, problems = bytearray(), list[str]()
    for piece, problem in bz2streams.unpacked(path, begin, end):
        if len(text) + len(piece) > LONGEST_DOCUMENT:
            problems.append(
                f"bytes {begin} to {end} unpack to more than {LONGEST_DOCUMENT >> 20} MiB and the"
                " rest is left out; pack it in more streams, or unpack it with bunzip2"
            )
            break
        text += piece
        problems += [problem] if problem else []
    return bytes(text), problems


def _place(chunk: Chunk, at: int) -> str:
    """How messages name byte `at` of the chunk's text."""
    if chunk.data is not None:
        return f"{chunk.source.path}, byte {chunk.begin + at} of its text"
    if chunk.source.compressed:
        return f"{chunk.source.path}, byte {at} of the text packed from byte {chunk.begin}"
    return f"{chunk.source.path}, byte {chunk.begin + at}"


def _tried(where: str, make: Callable[..., Document | str], *arguments: Any) -> Found:
    """What `make` makes of a document, or why it cannot."""
    try:
        return make(*arguments)
    except ValueError as error:
        return Bad(where, str(error))


def _document(name: str, paragraphs: Iterable[str]) -> Document | str:
    found = [sentence for paragraph in paragraphs for sentence in sentences.split(paragraph)]
    return Document(name, found, _md5("\n".join(found))) if found else EMPTY


def _md5(article: str) -> str:
    return hashlib.md5(article.rstrip().encode("utf-8"), usedforsecurity=False).hexdigest()


def _mediawiki(data: bytes, chunk: Chunk) -> Iterator[Found]:
    ended = not chunk.last
    for element in wiki.elements(data, wiki.PAGE):
        body, where = data[element.begin : element.end], _place(chunk, element.begin)
        header = chunk.begin == 0 and element.begin == 0
        if element.state == wiki.WHOLE:
            yield _tried(where, _article, body, chunk.source.hidden)
        elif element.state == wiki.UNCLOSED:
            yield Bad(where, f"the page {_title_of(body)!r} has no end: the dump is cut here")
            ended = ended or element.end == len(data)
        elif chunk.last and body.strip() == b"</mediawiki>":
            ended = True
        elif not header:
            yield Bad(where, f"{len(body)} bytes that are in no page")
    if not ended:
        yield Bad(_place(chunk, len(data)), "the dump ends without </mediawiki>: it is cut")


def _title_of(page: bytes) -> str:
    title = _XML_TITLE.search(page)
    return title[1].decode("utf-8", "replace") if title else ""


def _article(element: bytes, hidden: frozenset[str]) -> Document | str:
    page = wiki.page(element)
    return page.skipped or _document(page.title, markup.paragraphs(page.wikitext, hidden))


def _wikiextractor(data: bytes, chunk: Chunk) -> Iterator[Found]:
    for element in wiki.elements(data, wiki.DOC):
        body, where = data[element.begin : element.end], _place(chunk, element.begin)
        if element.state == wiki.WHOLE:
            yield _tried(where, _extracted, body)
        elif element.state == wiki.UNCLOSED:
            yield Bad(where, "a <doc> without </doc>: the file is cut here")
        else:
            yield Bad(where, f"{len(body)} bytes that are in no <doc>")


def _extracted(element: bytes) -> Document | str:
    title, text = wiki.extracted(element)
    return _document(title, markup.extracted_paragraphs(text))


def _sentence_lines(data: bytes, chunk: Chunk) -> Iterator[Found]:
    """Articles as MLPerf's scripts tell them apart: by two line ends, counted from the left."""
    at = 0
    while at < len(data):
        leading = _LINE_ENDS.match(data, at)
        begin = leading.end() if leading else at
        odd = data.count(b"\n", at, begin) % 2
        separator = _BETWEEN_ARTICLES.search(data, begin)
        body = data[begin : separator.start() if separator else len(data)]
        if body.strip():
            where = _place(chunk, begin)
            yield _tried(where, _of_lines, where, body, odd)
        at = separator.end() if separator else len(data)


def _of_lines(where: str, body: bytes, odd: int) -> Document:
    text = _decoded(body)
    lines = [line.strip() for line in text.split("\n")]
    return Document(where, [line for line in lines if line], _md5("\n" * odd + text))


def _text(data: bytes, chunk: Chunk) -> Iterator[Found]:
    begins = [0, *(found.start() for found in _TITLE_LINE.finditer(data)), len(data)]
    for begin, end in pairwise(begins):
        if data[begin:end].strip():
            where = _place(chunk, begin)
            yield _tried(where, _plain, where, data[begin:end])


def _plain(where: str, body: bytes) -> Document | str:
    text = _decoded(body)
    first = text.lstrip().partition("\n")[0]
    name = first.strip(" =\r") if _TITLE_LINE.match(body) else where
    return _document(name, [_HEADING.sub("\n\n", text)])


def _jsonl(data: bytes, chunk: Chunk) -> Iterator[Found]:
    at = 0
    for line in data.split(b"\n"):
        if line.strip():
            where = _place(chunk, at)
            yield _tried(where, _of_json, where, line, chunk.source.column)
        at += len(line) + 1


def _of_json(where: str, line: bytes, column: str) -> Document | str:
    try:
        value = json.loads(_decoded(line))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if isinstance(value, dict):
        if column not in value:
            raise ValueError(f"no column {column!r}")
        value = value[column]
    if not isinstance(value, str | None):
        raise ValueError(f"not text but {type(value).__name__}: {value!r:.40}")
    return _document(where, (value or "").split("\n"))


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error


def _table(chunk: Chunk) -> Iterator[Found]:
    """The chunk's rows, brought along or read from the file; damage costs the chunk's rest."""
    import pyarrow as pa

    path, row = chunk.source.path, chunk.begin
    try:
        for text in _rows(chunk) if chunk.cells is None else chunk.cells:
            where = f"{path}, row {row}"
            yield _tried(where, _of_cell, where, text)
            row += 1
    except (pa.ArrowException, OSError) as error:
        yield Bad(str(path), lost_rows(row, chunk.end, error))
    yield from (Bad(str(path), problem) for problem in chunk.problems)


def _of_cell(where: str, text: bytes | None) -> Document | str:
    return _document(where, _decoded(text or b"").split("\n"))


def _rows(chunk: Chunk) -> Iterator[bytes | None]:
    if chunk.source.kind == "parquet":
        return _row_group(chunk)
    column = str(chunk.source.column)
    return arrow.texts_between(chunk.source.path, column, chunk.begin, chunk.end)


def _row_group(chunk: Chunk) -> Iterator[bytes | None]:
    import pyarrow as pa

    path = chunk.source.path
    try:
        file = opened_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    with file:
        counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = [*accumulate(counts)]
        if chunk.end not in ends or counts[ends.index(chunk.end)] != chunk.end - chunk.begin:
            raise InputError(f"{path} is not what it was when the build began; leave sources alone")
        size = 0
        for text in texts_of_group(path, file, ends.index(chunk.end), chunk.source.column):
            size += len(text or b"")
            if size > LONGEST_DOCUMENT:
                raise pa.ArrowCapacityError(
                    f"a row group of more than {LONGEST_DOCUMENT >> 20} MiB of text; write the"
                    " file again with smaller ones"
                )
            yield text


_READERS: dict[str, Callable[[bytes, Chunk], Iterator[Found]]] = {
    "mediawiki": _mediawiki,
    "wikiextractor": _wikiextractor,
    "sentences": _sentence_lines,
    "text": _text,
    "jsonl": _jsonl,
}
