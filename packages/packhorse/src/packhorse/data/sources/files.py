"""Source files: the files and folders the user named, as a list, and the format of each file.

A folder stands for all files in it, at any depth, in sorted order, `hf://org/name` for those of a
dataset on the hub, and `-` for standard input. The
format is detected from the first bytes of a file, or of the text that it unpacks to; only where
these are ambiguous does its name decide (`.txt`, MLPerf's `part-00000…`). An unknown format is an
error, and so is an empty file, before any work begins. In an archive each file has a format of its
own, which shows when it is reached: there an unknown one is counted as bad.

What divides plain text into documents cannot be known. If no option says it, it is guessed from the
first MiB, and the guess is printed: at `<|endoftext|>`, at titles as in WikiText, or else a text of
up to a MiB is one document, and a longer one is divided at blank lines, or at lines if it has none.

| kind | documents |
|---|---|
| mediawiki | the articles of a dump, `.xml` or `.xml.bz2`, of one stream or many |
| wikiextractor | `<doc …>` to `</doc>` |
| sentences | one sentence per line, blank lines between documents (MLPerf's `part-*`) |
| text | plain text; what divides it is chosen or guessed |
| jsonl | one per line: an object with the text in `column`, or a string |
| json | an array of these |
| parquet | one per row: the text in `column` |
| arrow | the same, of an Arrow stream; `datasets` saves folders of such files |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from packhorse.data.sources import arrow, json_array, wiki
from packhorse.data.sources.hub import HubFile, SourcePath, hub_files, is_address
from packhorse.data.sources.text_buffer import TextBuffer
from packhorse.data.sources.unpacking import (
    ARCHIVES,
    STANDARD_INPUT,
    open_streams,
    packing_of_file,
    standard_input,
    unpack,
)
from packhorse.data.tables import arrow_files, folder_of_rows
from packhorse.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = ("mediawiki", "wikiextractor", "sentences", "text", "jsonl", "json", "parquet", "arrow")
ARCHIVE = "archive"  # stands for the kinds of the files in it
DIVISIONS = ("file", "titles", "blank-lines", "lines")  # of plain text into documents
END_OF_TEXT = "<|endoftext|>"  # GPT-2's, which many corpora are divided by
HEADER_BYTES = 1 << 20
KIND_BYTES = 1 << 12

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_TITLE = re.compile(rb"(?:^|\n)[ \t]*= [^=\n]+ =[ \t\r]*\n")
_EMPTY_LINE = re.compile(rb"\n[ \t\r]*\n(?=\s*\S)")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
_PACKED_SUFFIXES = (".bz2", ".gz", ".xz", ".zst", ".zstd")
_DUMP_INDEX = re.compile(r"-multistream-index\d*\.txt")
_PART = re.compile(r"part-\d+(-of-\d+)?(\.txt)?")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, with everything a worker needs to read any part of it."""

    path: SourcePath
    kind: str
    size: int  # in bytes; 0 for standard input
    column: str | None = None  # of jsonl, json, parquet and arrow
    packing: tuple[str, ...] = ()  # from the outside in: ("gzip", "tar")
    hidden: frozenset[str] = frozenset()  # namespaces of a dump whose links show no text
    documents: str = ""  # what divides plain text: one of DIVISIONS; "": the separator
    separator: str = ""
    guessed: bool = False  # `documents` or `separator`
    repair: bool = False  # replace bytes that are no UTF-8, or leave their document out
    member: str = ""  # name of a file in an archive

    @property
    def name(self) -> str:
        """How messages name it."""
        path = "standard input" if self.path == STANDARD_INPUT else str(self.path)
        return f"{path}, {self.member}" if self.member else path

    @property
    def local_path(self) -> Path:
        """The path, of a file that must be here."""
        if isinstance(self.path, HubFile):
            raise InputError(f"{self.path} must be a file here; fetch it first")
        return self.path

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read from front to back, by one process."""
        return bool(self.packing) or self.kind == "json" or self.path == STANDARD_INPUT


def find(
    paths: Sequence[Path],
    kind: str | None = None,
    column: str | None = None,
    documents: str | None = None,
    separator: str | None = None,
    repair: bool = False,
) -> list[SourceFile]:
    """All files that `paths` stand for.

    kind: the format of all of them; None: detect it. documents, separator: what divides plain text,
    one of DIVISIONS or a text; None: guess it. repair: replace bytes that are no UTF-8.
    """
    if kind is not None and kind not in KINDS:
        raise InputError(f"unknown format {kind!r}; known: {', '.join(KINDS)}")
    if documents is not None and documents not in DIVISIONS:
        raise InputError(f"documents is {documents!r}; use one of {', '.join(DIVISIONS)}")
    if separator == "":
        raise InputError("the separator is empty; name the text between two documents")
    if documents and separator:
        raise InputError("a separator and --documents both divide the text; pass one of them")
    files: list[SourcePath] = []
    for path in map(Path, paths):
        files += hub_files(path) if is_address(path) else _files(path)
    if not files:
        raise InputError("no source is named; name files or folders of text, or - for stdin")
    seen: set[SourcePath] = set()
    for file in files:
        resolved = file.resolve()
        if resolved in seen:
            raise InputError(f"{file} is named twice; its documents would be doubled")
        seen.add(resolved)
    common = SourceFile(
        Path(),
        kind or "",
        0,
        column,
        documents=documents or "",
        separator=separator or "",
        repair=repair,
    )
    sources = [_source(replace(common, path=file)) for file in files]
    may_hold_columns = any(source.column or source.kind == ARCHIVE for source in sources)
    if column and not may_hold_columns:
        raise InputError("--column needs a jsonl, json, parquet or Arrow source; there is none")
    may_hold_text = any(source.kind in ("text", ARCHIVE) for source in sources)
    if (documents or separator) and not may_hold_text:
        raise InputError(
            "--documents and --separator divide plain text, and there is none; if the sources are"
            " plain text, pass --format text"
        )
    return sources


def _files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder; names that begin with . or _ are not data."""
    if path.is_file() or path == STANDARD_INPUT:
        return [path]
    if not path.is_dir():
        raise InputError(f"{path} does not exist; name a file or a folder of text")
    if (saved := folder_of_rows(path)) is not None:
        return arrow_files(saved)
    inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    files = sorted(file for file in inside if not any(part[0] in "._" for part in file.parts))
    if not files:
        raise InputError(f"{path} is a folder without files; there is nothing to read")
    return [path / file for file in files]


def _source(source: SourceFile) -> SourceFile:
    """The source with its size and all that its first bytes tell."""
    path = source.path
    try:
        size = 0 if path == STANDARD_INPUT else path.stat().st_size
        if not size and path != STANDARD_INPUT:
            raise InputError(f"{path} is empty; remove it or name another file")
        packing = packing_of_file(path)
        source = replace(source, size=size, packing=packing)
        if packing and packing[-1] in ARCHIVES:
            return replace(source, kind=source.kind or ARCHIVE)
        if path == STANDARD_INPUT:
            return _described(source, partial(_peek_standard_input, packing))
        if not packing:
            with path.open("rb") as file:
                return _described(source, partial(_peek_file, file))
        streams = open_streams(path, packing)  # kept: it closes the file when it goes
        stream = next(streams)
        return _described(source, partial(_peek_stream, path, TextBuffer(stream.pieces)))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def describe_guess(source: SourceFile) -> str:
    """What was guessed to divide plain text, in words; "" if nothing was guessed."""
    if not source.guessed:
        return ""
    if source.separator:
        return f"documents of plain text end at {source.separator} (guessed: it is in the text)"
    reason, division = _DIVISION_WORDS[source.documents]
    return f"plain text, {division} (guessed: {reason}; --documents or --separator sets it)"


_DIVISION_WORDS = {  # why it is guessed, and what a document is
    "file": ("at most 1 MiB", "a document per file"),
    "titles": ("it has titles between = signs", "a document per title"),
    "blank-lines": ("over 1 MiB, with blank lines", "a document between two blank lines"),
    "lines": ("over 1 MiB, without blank lines", "a document per line"),
}


def member_source(source: SourceFile, member: str, buffer: TextBuffer) -> SourceFile:
    """The source of one text of a packed file; `member` is its name in an archive."""
    is_archive = bool(source.packing) and source.packing[-1] in ARCHIVES
    if not is_archive:
        return source
    kind = "" if source.kind == ARCHIVE else source.kind
    alone = replace(source, kind=kind, member=member)
    return _described(alone, lambda count: (buffer.peek(0, count), ""))


Peek = Callable[[int], tuple[bytes, str]]  # the first bytes of a text, and a problem among them


def _peek_file(file: BinaryIO, count: int) -> tuple[bytes, str]:
    file.seek(0)
    return file.read(count), ""


def _peek_standard_input(packing: tuple[str, ...], count: int) -> tuple[bytes, str]:
    # Text has several times the length of what it is packed to.
    head = standard_input().peek(count)
    if not head:
        raise InputError("standard input is empty; pipe text into it")
    if not packing:
        return head, ""
    buffer = TextBuffer(unpack(BytesIO(head), packing[0]))
    return buffer.peek(0, count), ""


def _peek_stream(name: object, buffer: TextBuffer, count: int) -> tuple[bytes, str]:
    head = buffer.peek(0, count)
    if buffer.problem and not head:
        raise InputError(f"{name}: {buffer.problem}; fetch the file again")
    return head, buffer.problem


def _described(source: SourceFile, peek: Peek) -> SourceFile:
    """The source with all that its first bytes tell: its kind, its column, what divides it."""
    start = peek(KIND_BYTES)[0]
    kind = source.kind or _kind(source, start)
    source = replace(source, kind=kind)
    if kind in TABLES:
        if source.is_stream:
            raise InputError(
                f"{source.name} is {kind}, which cannot be read from front to back; unpack it to"
                " a file"
            )
        column = _table_column(source.path, source.column, *TABLES[kind](source.path))
        return replace(source, column=column)
    if kind in ("jsonl", "json"):
        return replace(source, column=_json_column(source, peek(HEADER_BYTES)[0]))
    source = replace(source, column=None)
    if kind == "mediawiki":
        return replace(source, hidden=_hidden(source.name, *peek(HEADER_BYTES)))
    if kind == "text" and not source.documents and not source.separator:
        return _divided(source, peek(HEADER_BYTES + 1)[0])
    return source


def _divided(source: SourceFile, head: bytes) -> SourceFile:
    """The source with a guess at what divides its text into documents."""
    if END_OF_TEXT.encode() in head:
        return replace(source, separator=END_OF_TEXT, guessed=True)
    if _TITLE.search(head):
        documents = "titles"
    elif len(head) <= HEADER_BYTES:
        documents = "file"
    else:
        documents = "blank-lines" if _EMPTY_LINE.search(head) else "lines"
    return replace(source, documents=documents, guessed=True)


def _kind(source: SourceFile, head: bytes) -> str:
    name = source.member or source.path.name
    if head.startswith(_UTF16):
        raise InputError(f"{source.name} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    if _DUMP_INDEX.search(name):
        raise InputError(
            f"{source.name} is the index of a dump and holds no text; name the dump itself"
        )
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(arrow.MAGIC):
        return "arrow"
    if start.startswith(b"<doc "):
        return "wikiextractor"
    if start.startswith(b"<mediawiki") or (start.startswith(b"<") and b"<mediawiki" in start):
        return "mediawiki"
    unpacked_name = Path(name)
    while unpacked_name.suffix.lower() in _PACKED_SUFFIXES:
        unpacked_name = unpacked_name.with_suffix("")
    suffix = unpacked_name.suffix.lower()
    if suffix in (".jsonl", ".ndjson") or re.match(rb'\{\s*"', start):
        return "jsonl"
    if start.startswith(b"[") and (suffix == ".json" or re.match(rb'\[\s*\{?\s*"', start)):
        return "json"
    is_part = _PART.fullmatch(unpacked_name.name)
    is_packed_alone = bool(source.packing) and not source.member and not suffix  # texts.zst
    is_input = source.path == STANDARD_INPUT
    is_named = is_part or suffix in TEXT_SUFFIXES or is_packed_alone or is_input
    if b"\0" not in head and is_named:
        return "sentences" if is_part else "text"
    raise InputError(
        f"{source.name}: cannot tell its format; known are MediaWiki dumps, WikiExtractor output,"
        " one sentence per line (part-*), plain text (.txt), jsonl, JSON arrays, parquet and Arrow;"
        f" name it with --format: {', '.join(KINDS)}"
    )


def _hidden(name: str, head: bytes, problem: str) -> frozenset[str]:
    """The namespaces whose links show no text, from the dump's header."""
    header, page, _ = head.partition(b"<page>")
    if b"<!DOCTYPE" in header or b"<!ENTITY" in header:
        raise InputError(f"{name} has a document type (DTD); dumps have none, so it is refused")
    if not page and problem:
        raise InputError(f"{name}: {problem}, and no <page> is left; fetch the file again")
    if not page:
        raise InputError(f"{name} has no <page> in its first {len(head)} bytes; is it a dump?")
    return wiki.hidden_namespaces(header)


def _json_column(source: SourceFile, head: bytes) -> str:
    """The column the user named, or `text`; the first line or element must have it."""
    if source.kind == "json":
        head = b"".join(text for text, _ in json_array.as_lines(iter([(head, "")]))).lstrip()
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return source.column or "text"  # bad or very long; reported when it is read
    names = list(first) if isinstance(first, dict) else []
    return _chosen(source.name, source.column, names) if names else source.column or "text"


def _parquet_schema_and_rows(path: SourcePath) -> tuple[pa.Schema, int]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error

    try:
        file = parquet.ParquetFile(path.open() if isinstance(path, HubFile) else path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a parquet file: {error}") from error
    with file:
        return file.schema_arrow, file.metadata.num_rows


def _arrow_schema_and_rows(path: SourcePath) -> tuple[pa.Schema, int]:
    if isinstance(path, HubFile):
        raise InputError(f"{path} is an Arrow stream; fetch it first and name the file")
    return arrow.schema_and_rows(path)


TABLES = {"parquet": _parquet_schema_and_rows, "arrow": _arrow_schema_and_rows}


def _table_column(path: SourcePath, column: str | None, schema: pa.Schema, rows: int) -> str:
    """The column the user named, or `text`, or the only one that holds text."""
    texts = [field.name for field in schema if _is_text(field.type)]
    others = [name for name in texts if name != "id"]
    if column is None and "text" not in schema.names and len(others) == 1:
        column = others[0]
    column = _chosen(str(path), column, schema.names)
    if column not in texts:
        kind = schema.field(column).type
        raise InputError(f"{path}: column {column!r} is not text but {kind}; name another")
    if not rows:
        raise InputError(f"{path} has no rows; remove it or name another file")
    return column


def _is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text; a dictionary stores each different one once."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return str(kind) in ("string", "large_string", "string_view")


def _chosen(name: str, column: str | None, names: list[str]) -> str:
    chosen = column or "text"
    if chosen not in names:
        listed = ", ".join(map(repr, names)) or "none"
        raise InputError(f"{name}: no column {chosen!r}; name one with --column: {listed}")
    return chosen
