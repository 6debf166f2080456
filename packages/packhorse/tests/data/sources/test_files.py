"""Files are known by what is in them; what cannot be read is refused before any work."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from packhorse.data.sources.files import find
from packhorse.errors import InputError

DUMP = b'<mediawiki version="0.11"><siteinfo/>\n<page>x</page>\n</mediawiki>'
DOC = b'<doc id="1" url="u" title="A">\nA\n\nText.\n</doc>\n'
JSON = b'{"id": 1, "text": "One. Two."}\n'

KNOWN = {
    "dump.xml": (DUMP, "mediawiki"),
    "dump": (b'<?xml version="1.0"?>\n' + DUMP, "mediawiki"),
    "with-a-mark.xml": (b"\xef\xbb\xbf" + DUMP, "mediawiki"),
    "dump.xml.bz2": (bz2.compress(DUMP), "mediawiki"),
    "packed-without-a-suffix": (bz2.compress(DUMP), "mediawiki"),
    "wiki_00": (DOC, "wikiextractor"),
    "wiki_00.bz2": (bz2.compress(DOC), "wikiextractor"),
    "docs.txt": (DOC, "wikiextractor"),
    "part-00000-of-00500": (b"One.\nTwo.\n\nThree.\n", "sentences"),
    "part-00001.txt": (b"One.\n", "sentences"),
    "book.txt": (b"One. Two.\n", "text"),
    "book.TXT": (b"One. Two.\n", "text"),
    "book.txt.bz2": (bz2.compress(b"One. Two.\n"), "text"),
    "lines.jsonl": (JSON, "jsonl"),
    "lines": (JSON, "jsonl"),
    "strings.jsonl": (b'"a string"\n', "jsonl"),
    "array.json": (b"[\n]", "json"),
    "array": (b'[ {"text": "One."} ]', "json"),
    "list.md": (b"[ ] A thing to do.\n", "text"),
}


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def table(path: Path, **columns: list) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_is_known_by_its_content_or_name(tmp_path: Path, name: str) -> None:
    data, kind = KNOWN[name]
    (source,) = find([write(tmp_path / name, data)])
    assert (source.kind, source.size) == (kind, len(data))
    assert source.packing == (("bz2",) if data.startswith(b"BZh") else ())
    assert source.column == ("text" if kind in ("jsonl", "json") else None)


def test_a_format_that_is_said_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "eval", b"One.\n")
    assert find([path], "sentences")[0].kind == "sentences"
    with pytest.raises(InputError, match="unknown format 'sentence'; known: mediawiki"):
        find([path], "sentence")


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b/wiki_01", "b/wiki_00", "a/wiki_10", "wiki_05", ".hidden", "b/_SUCCESS"):
        write(tmp_path / name, DOC)
    result = [source.path.relative_to(tmp_path).as_posix() for source in find([tmp_path])]
    assert result == ["a/wiki_10", "b/wiki_00", "b/wiki_01", "wiki_05"]


def test_the_order_of_paths_is_kept_and_none_counts_twice(tmp_path: Path) -> None:
    later, earlier = write(tmp_path / "x" / "b", DOC), write(tmp_path / "y" / "a", DOC)
    assert [source.path for source in find([later, earlier])] == [later, earlier]
    with pytest.raises(InputError, match="twice"):
        find([tmp_path / "x", later])


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("empty.txt", b"", "is empty"),
        ("noise.bin", bytes(range(256)), "--format"),
        ("noise.txt", b"\0\1\2", "--format"),
        ("README", b"Some words.", "--format"),
        ("page.xml", b"<html></html>", "--format"),
        ("windows.txt", "Text.".encode("utf-16"), "UTF-16; convert it"),
        ("rows.parquet.gz", gzip.compress(b"PAR1 rows", mtime=0), "unpack it to a file"),
        ("enwiki-multistream-index.txt", b"600:10:Anarchism\n", "index of a dump"),
        ("enwiki-multistream-index1.txt.bz2", bz2.compress(b"600:10:A\n"), "index of a dump"),
        ("bomb.xml", b'<!DOCTYPE x [<!ENTITY a "aa">]>' + DUMP, "document type"),
        ("nothing.xml", b"<mediawiki></mediawiki>", "no <page>"),
        ("cut.xml.bz2", bz2.compress(DUMP)[:40], "is cut at byte 40; fetch"),
        ("bad.xml.bz2", b"BZh9rubbish and more of it", "damaged bz2 data"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        find([write(tmp_path / name, data)])
    assert name in str(caught.value)


def test_a_dump_whose_beginning_is_damaged_says_so(tmp_path: Path) -> None:
    header, page, foot = DUMP.partition(b"<page>x</page>\n")
    streams = [bytearray(bz2.compress(text)) for text in (header, page, page, foot)]
    streams[1][-8] ^= 4
    path = write(tmp_path / "a.xml.bz2", b"".join(streams))
    assert find([path])[0].kind == "mediawiki", "the third stream has a page"
    streams[2][-8] ^= 4
    write(path, b"".join(streams))
    with pytest.raises(InputError, match=r"damaged bz2 data, lost from .* fetch the file again"):
        find([path])


def test_no_source_is_refused(tmp_path: Path) -> None:
    for paths, says in (
        ([], "no source"),
        ([tmp_path / "no"], "not exist"),
        ([tmp_path], "without"),
    ):
        with pytest.raises(InputError, match=says):
            find(paths)


def test_a_column_must_be_there(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", b"\n" + json.dumps({"head": "T", "body": "Text."}).encode())
    rows = table(tmp_path / "a.parquet", head=["T"], body=["Text."])
    for path in (lines, rows):
        assert find([path], column="body")[0].column == "body"
        with pytest.raises(
            InputError, match="no column 'text'; name one with --column: 'head', 'body'"
        ):
            find([path])
    with pytest.raises(InputError, match="--column needs a jsonl"):
        find([write(tmp_path / "a.txt", b"Text.")], column="body")


def test_the_only_column_of_text_needs_no_name(tmp_path: Path) -> None:
    assert find([table(tmp_path / "a", id=["x"], n=[1], body=["Text."])])[0].column == "body"


def test_parquet_is_looked_at_first(tmp_path: Path) -> None:
    assert find([table(tmp_path / "rows", text=["Text."])])[0].kind == "parquet"
    with pytest.raises(InputError, match="'text' is not text but int64"):
        find([table(tmp_path / "n.parquet", text=[1])])
    with pytest.raises(InputError, match="no rows"):
        find([table(tmp_path / "e.parquet", text=pa.array([], pa.string()))])
    with pytest.raises(InputError, match="not a parquet file"):
        find([write(tmp_path / "bad.parquet", b"PAR1 and nothing")])


def test_the_real_files(shared_data: Path) -> None:
    assert [source.kind for source in find([shared_data / "wiki"])] == ["mediawiki"] + 4 * [
        "wikiextractor"
    ]
