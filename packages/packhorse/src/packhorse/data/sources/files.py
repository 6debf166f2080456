"""Source files: the files and folders the user named, as a list, and the format of each file.

A folder stands for all files in it, at any depth, in sorted order. The format is detected from the
first bytes of a file; only where these are ambiguous does its name decide (`.txt`, MLPerf's
`part-00000…`). Nothing is guessed: an unknown format is an error, and so is an empty file, before
any work begins.

| kind | documents |
|---|---|
| mediawiki | the articles of a dump, `.xml` or `.xml.bz2`, of one stream or many |
| wikiextractor | `<doc …>` to `</doc>` |
| sentences | one sentence per line, blank lines between documents (MLPerf's `part-*`) |
| text | paragraphs with blank lines between; one per file, or per ` = Title = ` (WikiText) |
| jsonl | one per line: an object with the text in `column`, or a string |
| parquet | one per row: the text in `column` |
| arrow | the same, of an Arrow stream; `datasets` saves folders of such files |
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.data.sources import arrow, bz2streams, wiki
from packhorse.data.tables import arrow_files, folder_of_rows
from packhorse.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = ("mediawiki", "wikiextractor", "sentences", "text", "jsonl", "parquet", "arrow")
HEADER_BYTES = 1 << 20

_PACKERS = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"(\xb5/\xfd": "zstd", b"\xfd7zXZ": "xz"}
_DUMP_INDEX = re.compile(r"-multistream-index\d*\.txt")
_PART = re.compile(r"part-\d+(-of-\d+)?(\.txt)?(\.bz2)?")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, with everything a worker needs to read any part of it."""

    path: Path
    kind: str
    size: int  # bytes on disk
    column: str | None = None  # of jsonl, parquet and arrow
    compressed: bool = False  # bz2
    hidden: frozenset[str] = frozenset()  # namespaces of a dump whose links show no text


def find(
    paths: Sequence[Path], kind: str | None = None, column: str | None = None
) -> list[SourceFile]:
    """All files that `paths` stand for. kind: the format of all of them; None: detect it."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"unknown format {kind!r}; known: {', '.join(KINDS)}")
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise InputError("no source is named; name files or folders of text")
    seen: set[Path] = set()
    for file in files:
        resolved = file.resolve()
        if resolved in seen:
            raise InputError(f"{file} is named twice; its documents would be doubled")
        seen.add(resolved)
    sources = [_source(file, kind, column) for file in files]
    if column and not any(source.column for source in sources):
        raise InputError("--column needs a jsonl, parquet or Arrow source; there is none")
    return sources


def _files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder; names that begin with . or _ are not data."""
    if path.is_file():
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


def _source(path: Path, kind: str | None, column: str | None) -> SourceFile:
    try:
        size = path.stat().st_size
        if not size:
            raise InputError(f"{path} is empty; remove it or name another file")
        with path.open("rb") as file:
            compressed = file.read(len(bz2streams.MAGIC)) == bz2streams.MAGIC
        kind = kind or _kind(path, _head(path, compressed, 1 << 12)[0])
        if kind in TABLES:
            return SourceFile(path, kind, size, _table_column(path, column, *TABLES[kind](path)))
        if kind not in ("mediawiki", "jsonl"):
            return SourceFile(path, kind, size, None, compressed)
        head, problem = _head(path, compressed, HEADER_BYTES)
        if kind == "mediawiki":
            return SourceFile(path, kind, size, None, compressed, _hidden(path, head, problem))
        return SourceFile(path, kind, size, _json_column(path, head, column), compressed)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _head(path: Path, compressed: bool, count: int) -> tuple[bytes, str]:
    """The first bytes of the file's text, at most `count`, and the first problem among them."""
    if not compressed:
        with path.open("rb") as file:
            return file.read(count), ""
    head = b""
    problem = ""
    for text, new_problem in bz2streams.unpacked(path):
        head += text
        problem = problem or new_problem
        if problem and not head:
            raise InputError(f"{path}: {problem}; fetch the file again")
        if len(head) >= count:
            break
    return head[:count], problem


def _kind(path: Path, head: bytes) -> str:
    for magic, packer in _PACKERS.items():
        if head.startswith(magic):
            raise InputError(f"{path} is packed with {packer}; unpack it first")
    if _DUMP_INDEX.search(path.name):
        raise InputError(f"{path} is the index of a dump and holds no text; name the dump itself")
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(arrow.MAGIC):
        return "arrow"
    if start.startswith(b"<doc "):
        return "wikiextractor"
    if start.startswith(b"<mediawiki") or (start.startswith(b"<") and b"<mediawiki" in start):
        return "mediawiki"
    suffix = path.suffix.lower() if path.suffix.lower() != ".bz2" else Path(path.stem).suffix
    if suffix in (".jsonl", ".ndjson") or re.match(rb'\{\s*"', start):
        return "jsonl"
    if b"\0" not in head and (_PART.fullmatch(path.name) or suffix == ".txt"):
        return "sentences" if _PART.fullmatch(path.name) else "text"
    raise InputError(
        f"{path}: cannot tell its format; known are MediaWiki dumps, WikiExtractor output, one"
        " sentence per line (part-*), plain text (.txt), jsonl, parquet and Arrow; name it with"
        f" --format: {', '.join(KINDS)}"
    )


def _hidden(path: Path, head: bytes, problem: str) -> frozenset[str]:
    """The namespaces whose links show no text, from the dump's header."""
    header, page, _ = head.partition(b"<page>")
    if b"<!DOCTYPE" in header or b"<!ENTITY" in header:
        raise InputError(f"{path} has a document type (DTD); dumps have none, so it is refused")
    if not page and problem:
        raise InputError(f"{path}: {problem}, and no <page> is left; fetch the file again")
    if not page:
        raise InputError(f"{path} has no <page> in its first {len(head)} bytes; is it a dump?")
    return wiki.hidden_namespaces(header)


def _json_column(path: Path, head: bytes, column: str | None) -> str:
    """The column the user named, or `text`; the first line must have it."""
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        return column or "text"  # bad or very long; reported when it is read
    names = list(first) if isinstance(first, dict) else []
    return _chosen(path, column, names) if names else column or "text"


def _parquet_schema_and_rows(path: Path) -> tuple[pa.Schema, int]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error

    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a parquet file: {error}") from error
    with file:
        return file.schema_arrow, file.metadata.num_rows


TABLES = {"parquet": _parquet_schema_and_rows, "arrow": arrow.schema_and_rows}


def _table_column(path: Path, column: str | None, schema: pa.Schema, rows: int) -> str:
    """The column the user named, or `text`, or the only one that holds text."""
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
    others = [name for name in texts if name != "id"]
    if column is None and "text" not in schema.names and len(others) == 1:
        column = others[0]
    column = _chosen(path, column, schema.names)
    if column not in texts:
        kind = schema.field(column).type
        raise InputError(f"{path}: column {column!r} is not text but {kind}; name another")
    if not rows:
        raise InputError(f"{path} has no rows; remove it or name another file")
    return column


def _chosen(path: Path, column: str | None, names: list[str]) -> str:
    chosen = column or "text"
    if chosen not in names:
        listed = ", ".join(map(repr, names)) or "none"
        raise InputError(f"{path}: no column {chosen!r}; name one with --column: {listed}")
    return chosen
