"""Documents in sentences, from files of any kind: the first step of the corpus builder's workers.

    for chunk in chunks(find([Path("enwiki.xml.bz2")])):     # cheap and lazy, in the driver
        documents, tally = read(chunk)                       # the work, in any process

`read` is a function of the chunk alone, so it runs in a process pool or a Ray task as it is. A bad
document neither raises nor disappears: it is counted, with its place and the reason, and so is
damage of the file itself; everything else that can be read is kept. The driver decides how much bad
input is too much.

`text_md5` is what MLPerf BERT's list of evaluation articles holds: the md5 of an article's
sentences, one per line, without white space after the last. Files in MLPerf's own form (`part-*`,
`eval.txt`) match it to the byte; there an odd line end before an article is part of it, because
MLPerf's script splits at pairs of line ends. Articles from a dump or from WikiExtractor match only
where cleaning and sentence splitting agree with MLPerf's NLTK, so for them the list matches few or
none.

Sentences are split by nupunkt: the Punkt algorithm (Kiss and Strunk 2006) with a model of English
that comes with the package, in pure Python. It was chosen over blingfire and syntok after measuring
all three (docs/decisions.md). Only the positions it reports are used, never its strings, so that no
character but white space can be lost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import cache
from itertools import accumulate, groupby, pairwise
from typing import Any

from packhorse.data.sources import arrow, bz2streams, wiki
from packhorse.data.sources.chunking import (
    LONGEST_DOCUMENT,
    Chunk,
    lost_rows,
    open_parquet,
    texts_of_group,
)
from packhorse.data.sources.files import ARCHIVE, SourceFile
from packhorse.data.sources.hub import SourcePath
from packhorse.errors import InputError, MissingExtra

# Why a document was passed over.
REDIRECT = wiki.REDIRECT
NOT_AN_ARTICLE = wiki.NOT_AN_ARTICLE
EMPTY = "empty"

LONGEST_WORD = 1000  # characters; nupunkt's time grows with the square of a word's length

_BLANK_LINE = re.compile(r"\n\s*\n")
# All places where nupunkt looks for the end of a sentence, and a few more. Most paragraphs of
# documentation (headings, items of lists) have none, and nupunkt takes longer to say so.
_MAY_END_INSIDE = re.compile(r"""[.?!\u2026][)";}\]*:@({\[\s?!\u201d\u00bb'\u2019]""")
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
    repaired: bool = False  # bytes that are no UTF-8 were replaced


@dataclass(frozen=True, slots=True)
class BadDocument:
    """A place that could not be read, and the reason."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadTally:
    """How many documents were read or passed over; tallies of chunks can be added."""

    documents: int = 0
    characters: int = 0  # of their sentences
    redirects: int = 0
    not_articles: int = 0  # pages of other namespaces
    empty: int = 0
    repaired: int = 0  # of the documents
    bad: tuple[BadDocument, ...] = ()

    def __add__(self, addend: ReadTally) -> ReadTally:
        names = [field.name for field in fields_of(self)]
        return ReadTally(**{name: getattr(self, name) + getattr(addend, name) for name in names})


ReadOutcome = Document | BadDocument | str  # a string is the reason to pass a document over


def read(chunk: Chunk) -> tuple[list[Document], ReadTally]:
    """Unpack, clean and split the chunk's documents; count everything in it."""
    if chunk.counts_rows:
        outcomes: list[ReadOutcome] = [*_table(chunk)]
    else:
        data, problems = _load(chunk)
        damage = [BadDocument(chunk.source.name, problem) for problem in problems]
        outcomes = [*damage]
        if chunk.source.kind != ARCHIVE:  # such a chunk only reports what is wrong
            outcomes += _READERS[chunk.source.kind](data, chunk)
    documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
    return documents, ReadTally(
        documents=len(documents),
        characters=sum(len(sentence) for doc in documents for sentence in doc.sentences),
        redirects=outcomes.count(REDIRECT),
        not_articles=outcomes.count(NOT_AN_ARTICLE),
        empty=outcomes.count(EMPTY),
        repaired=sum(document.repaired for document in documents),
        bad=tuple(outcome for outcome in outcomes if isinstance(outcome, BadDocument)),
    )


def _load(chunk: Chunk) -> tuple[bytes, list[str]]:
    """The chunk's text, and what is wrong with the file it comes from."""
    if chunk.data is not None:
        return chunk.data, list(chunk.problems)
    path = chunk.source.path
    try:
        if chunk.source.packing:
            return _unpack(path, chunk.begin, chunk.end)
        with path.open("rb") as file:
            file.seek(chunk.begin)
            data = file.read(chunk.end - chunk.begin)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) < chunk.end - chunk.begin:
        raise InputError(
            f"{path} is shorter than when the build began; do not change sources during a build"
        )
    return data, []


def _unpack(path: SourcePath, begin: int, end: int) -> tuple[bytes, list[str]]:
    """The text of packed bytes, at most as long as one document may be, and what is wrong."""
    text = bytearray()
    problems: list[str] = []
    for piece, problem in bz2streams.unpacked(path, begin, end):
        if len(text) + len(piece) > LONGEST_DOCUMENT:
            problems.append(
                f"bytes {begin} to {end} unpack to more than {LONGEST_DOCUMENT >> 20} MiB and the"
                " rest is left out; pack it in more streams, or unpack it with bunzip2"
            )
            break
        text += piece
        if problem:
            problems.append(problem)
    return bytes(text), problems


def _place(chunk: Chunk, offset: int) -> str:
    """How messages name a byte of the chunk's text."""
    if chunk.source.kind == "json" and not chunk.source.packing:
        return f"{chunk.source.name}, byte {chunk.begin + offset}"
    if chunk.data is not None:
        return f"{chunk.source.name}, byte {chunk.begin + offset} of its text"
    if chunk.source.packing:
        return f"{chunk.source.path}, byte {offset} of the text packed from byte {chunk.begin}"
    return f"{chunk.source.path}, byte {chunk.begin + offset}"


def _try_document(
    chunk: Chunk, place: str, make: Callable[..., Document | str], body: bytes, *arguments: Any
) -> ReadOutcome:
    """The document that `make` returns of `body`, or the reason why it cannot."""
    repaired = False
    if chunk.source.repair:
        try:
            body.decode("utf-8")
        except UnicodeDecodeError:
            body = body.decode("utf-8", "replace").encode()
            repaired = True
    try:
        outcome = make(body, *arguments)
    except ValueError as error:
        return BadDocument(place, str(error))
    if repaired and isinstance(outcome, Document):
        return replace(outcome, repaired=True)
    return outcome


def _document(name: str, paragraphs: Iterable[str]) -> Document | str:
    sentences = [sentence for text in paragraphs for sentence in split_sentences(text)]
    return Document(name, sentences, _md5("\n".join(sentences))) if sentences else EMPTY


def _md5(article: str) -> str:
    return hashlib.md5(article.rstrip().encode("utf-8"), usedforsecurity=False).hexdigest()


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error


# Formats of text ---------------------------------------------------------------------------------


def _mediawiki(data: bytes, chunk: Chunk) -> Iterator[ReadOutcome]:
    end_seen = not chunk.last
    for element in wiki.elements(data, wiki.PAGE):
        body = data[element.begin : element.end]
        place = _place(chunk, element.begin)
        is_header = chunk.begin == 0 and element.begin == 0
        if element.state == wiki.WHOLE:
            yield _try_document(chunk, place, _article, body, chunk.source.hidden)
        elif element.state == wiki.UNCLOSED:
            title = _title_of(body)
            yield BadDocument(place, f"the page {title!r} has no end: the dump is cut here")
            end_seen = end_seen or element.end == len(data)
        elif chunk.last and body.strip() == b"</mediawiki>":
            end_seen = True
        elif not is_header:
            yield BadDocument(place, f"{len(body)} bytes that are in no page")
    if not end_seen:
        place = _place(chunk, len(data))
        yield BadDocument(place, "the dump ends without </mediawiki>: it is cut")


def _title_of(page: bytes) -> str:
    title = _XML_TITLE.search(page)
    return title[1].decode("utf-8", "replace") if title else ""


def _article(element: bytes, hidden: frozenset[str]) -> Document | str:
    page = wiki.page(element)
    return page.skipped or _document(page.title, wiki.paragraphs(page.wikitext, hidden))


def _wikiextractor(data: bytes, chunk: Chunk) -> Iterator[ReadOutcome]:
    for element in wiki.elements(data, wiki.DOC):
        body = data[element.begin : element.end]
        place = _place(chunk, element.begin)
        if element.state == wiki.WHOLE:
            yield _try_document(chunk, place, _extracted, body)
        elif element.state == wiki.UNCLOSED:
            yield BadDocument(place, "a <doc> without </doc>: the file is cut here")
        else:
            yield BadDocument(place, f"{len(body)} bytes that are in no <doc>")


def _extracted(element: bytes) -> Document | str:
    title, text = wiki.extracted(element)
    return _document(title, wiki.extracted_paragraphs(text))


def _sentence_lines(data: bytes, chunk: Chunk) -> Iterator[ReadOutcome]:
    """Articles as MLPerf's scripts separate them: by two line ends, counted from the left."""
    position = 0
    while position < len(data):
        leading = _LINE_ENDS.match(data, position)
        begin = leading.end() if leading else position
        odd_line_end = data.count(b"\n", position, begin) % 2 == 1
        separator = _BETWEEN_ARTICLES.search(data, begin)
        body = data[begin : separator.start() if separator else len(data)]
        if body.strip():
            place = _place(chunk, begin)
            yield _try_document(chunk, place, _article_of_lines, body, place, odd_line_end)
        position = separator.end() if separator else len(data)


def _article_of_lines(body: bytes, place: str, odd_line_end: bool) -> Document:
    text = _decode(body)
    lines = [line.strip() for line in text.split("\n")]
    hashed = f"\n{text}" if odd_line_end else text
    return Document(place, [line for line in lines if line], _md5(hashed))


def _text(data: bytes, chunk: Chunk) -> Iterator[ReadOutcome]:
    for begin, end in _text_bounds(data, chunk.source):
        if data[begin:end].strip():
            place = _place(chunk, begin)
            yield _try_document(chunk, place, _plain, data[begin:end], place, chunk.source)


def _text_bounds(data: bytes, source: SourceFile) -> Iterator[tuple[int, int]]:
    """Where the documents of plain text begin and end, separators left out."""
    if source.documents == "file":
        yield 0, len(data)
        return
    if source.documents == "titles":
        titles = [title.start() for title in _TITLE_LINE.finditer(data)]
        yield from pairwise([0, *titles, len(data)])
        return
    begin = 0
    for match in _divider(source.documents, source.separator).finditer(data):
        yield begin, match.start()
        begin = match.end()
    yield begin, len(data)


@cache
def _divider(documents: str, separator: str) -> re.Pattern[bytes]:
    if separator:
        return re.compile(re.escape(separator.encode()))
    return re.compile(rb"\n" if documents == "lines" else rb"\n(?:[ \t\r]*\n)+")


def _plain(body: bytes, place: str, source: SourceFile) -> Document | str:
    text = _decode(body)
    if source.documents != "titles":
        return _document(place, [text])
    first_line = text.lstrip().partition("\n")[0]
    name = first_line.strip(" =\r") if _TITLE_LINE.match(body) else place
    return _document(name, [_HEADING.sub("\n\n", text)])


def _jsonl(data: bytes, chunk: Chunk) -> Iterator[ReadOutcome]:
    offset = 0
    for line in data.split(b"\n"):
        if line.strip():
            place = _place(chunk, offset)
            yield _try_document(chunk, place, _json_document, line, place, chunk.source.column)
        offset += len(line) + 1


def _json_document(line: bytes, place: str, column: str) -> Document | str:
    try:
        value = json.loads(_decode(line))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if isinstance(value, dict):
        if column not in value:
            raise ValueError(f"no column {column!r}")
        value = value[column]
    if not isinstance(value, str | None):
        raise ValueError(f"not text but {type(value).__name__}: {value!r:.40}")
    return _document(place, (value or "").split("\n"))


_READERS: dict[str, Callable[[bytes, Chunk], Iterator[ReadOutcome]]] = {
    "mediawiki": _mediawiki,
    "wikiextractor": _wikiextractor,
    "sentences": _sentence_lines,
    "text": _text,
    "jsonl": _jsonl,
    "json": _jsonl,
}


# Tables ------------------------------------------------------------------------------------------


def _table(chunk: Chunk) -> Iterator[ReadOutcome]:
    """The chunk's rows, which it carries or names; after damage its remaining rows are lost."""
    import pyarrow as pa

    path = chunk.source.path
    row = chunk.begin
    try:
        for text in _rows(chunk) if chunk.cells is None else chunk.cells:
            place = f"{path}, row {row}"
            yield _try_document(chunk, place, _cell_document, text or b"", place)
            row += 1
    except (pa.ArrowException, OSError) as error:
        yield BadDocument(str(path), lost_rows(row, chunk.end, error))
    yield from (BadDocument(str(path), problem) for problem in chunk.problems)


def _cell_document(text: bytes, place: str) -> Document | str:
    return _document(place, _decode(text).split("\n"))


def _rows(chunk: Chunk) -> Iterator[bytes | None]:
    if chunk.source.kind == "parquet":
        return _row_group(chunk)
    column = str(chunk.source.column)
    return arrow.texts_between(chunk.source.local_path, column, chunk.begin, chunk.end)


def _row_group(chunk: Chunk) -> Iterator[bytes | None]:
    import pyarrow as pa

    path = chunk.source.path
    try:
        file = open_parquet(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    with file:
        counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = [*accumulate(counts)]
        if chunk.end not in ends or counts[ends.index(chunk.end)] != chunk.end - chunk.begin:
            raise InputError(
                f"{path} is not what it was when the build began; do not change sources during a"
                " build"
            )
        size = 0
        for text in texts_of_group(path, file, ends.index(chunk.end), chunk.source.column):
            size += len(text or b"")
            if size > LONGEST_DOCUMENT:
                raise pa.ArrowCapacityError(
                    f"a row group of more than {LONGEST_DOCUMENT >> 20} MiB of text; write the"
                    " file again with smaller ones"
                )
            yield text


# Sentences ---------------------------------------------------------------------------------------


def split_sentences(text: str) -> list[str]:
    """Sentences, each on one line with single spaces; a blank line always ends one."""
    sentences: list[str] = []
    for paragraph in _BLANK_LINE.split(text):
        words = paragraph.split()
        if len(paragraph) <= LONGEST_WORD or max(map(len, words), default=0) <= LONGEST_WORD:
            sentences += _punkt_sentences(" ".join(words))
            continue
        # A run of characters this long is no sentence; it stands alone, unseen by the splitter.
        for too_long, run in groupby(words, key=lambda word: len(word) > LONGEST_WORD):
            group = list(run)
            sentences += group if too_long else _punkt_sentences(" ".join(group))
    return sentences


def _punkt_sentences(text: str) -> list[str]:
    if not _MAY_END_INSIDE.search(text):
        return [text] if text else []
    try:
        import nupunkt
    except ImportError as error:
        raise MissingExtra("nupunkt", "data") from error

    starts = [start for start, _ in nupunkt.sent_spans(text)][1:]
    ends = zip([0, *starts], [*starts, len(text)], strict=True)
    return [sentence for start, end in ends if (sentence := text[start:end].strip())]
