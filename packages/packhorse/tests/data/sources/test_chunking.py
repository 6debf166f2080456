"""Chunks tile a source, begin where documents do, come lazily and fit into a message."""

from __future__ import annotations

import bz2
import json
import pickle
import random
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from packhorse.data.sources import chunking
from packhorse.data.sources.chunking import Chunk, chunks
from packhorse.data.sources.files import find
from packhorse.errors import InputError

PAGES = [f"<page><title>{i}</title>{'word ' * (i % 7 * 20)}</page>\n".encode() for i in range(60)]
HEAD, FOOT = b"<mediawiki><siteinfo/>\n", b"</mediawiki>\n"
DUMP = HEAD + b"".join(PAGES) + FOOT
DOCS = b"".join(b'<doc id="%d">\nT\n\nSome text.\n</doc>\n' % i for i in range(80))
ARTICLES = b"".join(b"One sentence %d.\nAnother.\n\n" % i for i in range(80))
TITLED = b"".join(b" = Title %d = \n \n A sentence . \n \n" % i for i in range(80))
FILES = {
    "dump.xml": (DUMP, b"<page>"),
    "wiki_00": (DOCS, b"<doc "),
    "part-00000": (ARTICLES, b"One"),
    "valid.txt": (TITLED, b" = "),
    "lines.jsonl": (b"".join(b'{"text": "Line %d."}\n' % i for i in range(80)), b"{"),
}


def cut(path: Path, data: bytes, size: int) -> list[Chunk]:
    path.write_bytes(data)
    return list(chunks(find([path]), size))


def multistream(pages: Sequence[bytes] = PAGES, item: int = 5) -> bytes:
    groups = [b"".join(pages[i : i + item]) for i in range(0, len(pages), item)]
    return b"".join(map(bz2.compress, [HEAD, *groups, FOOT]))


@pytest.mark.parametrize("size", [1, 100, 1000, 1 << 22])
@pytest.mark.parametrize("name", FILES)
def test_byte_ranges_tile_the_file_and_begin_with_documents(
    tmp_path: Path, name: str, size: int
) -> None:
    data, beginning = FILES[name]
    parts = cut(tmp_path / name, data, size)
    assert [part.number for part in parts] == list(range(len(parts)))
    assert (parts[0].begin, parts[-1].end) == (0, len(data))
    assert all(single.end == second.begin for single, second in pairwise(parts))
    assert all(data[part.begin :].startswith(beginning) for part in parts[1:])
    assert all(part.data is None for part in parts)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (len(parts) > 1) == (size < 1 << 22)


@pytest.mark.parametrize("name", FILES)
def test_a_bz2_of_one_stream_comes_along_unpacked_and_cut_alike(tmp_path: Path, name: str) -> None:
    data, _ = FILES[name]
    plain = cut(tmp_path / name, data, 300)
    packed = cut(tmp_path / f"{name}.bz2", bz2.compress(data), 300)
    assert [part.data for part in packed] == [data[part.begin : part.end] for part in plain]
    assert [(single.begin, single.end, single.last) for single in packed] == [
        (single.begin, single.end, single.last) for single in plain
    ]


def test_streams_of_pages_are_given_by_their_bytes(tmp_path: Path) -> None:
    packed = multistream()
    parts = cut(tmp_path / "dump.xml.bz2", packed, 800)
    assert len(parts) > 3
    assert all(part.data is None for part in parts)
    texts = [bz2.decompress(packed[part.begin : part.end]) for part in parts]
    assert b"".join(texts) == DUMP
    assert all(text.startswith((b"<page>", FOOT)) for text in texts[1:])


def test_streams_that_cut_pages_are_unpacked_in_order(tmp_path: Path) -> None:
    """As pbzip2 does it: a stream ends after so many bytes, wherever that is."""
    streams = b"".join(bz2.compress(DUMP[i : i + 1000]) for i in range(0, len(DUMP), 1000))
    parts = cut(tmp_path / "dump.xml.bz2", streams, 800)
    assert b"".join(part.data or b"" for part in parts) == DUMP
    assert all((part.data or b"").startswith(b"<page>") for part in parts[1:])


def test_a_document_longer_than_a_chunk_is_one(tmp_path: Path) -> None:
    long = b'{"text": "' + b"x" * 500_000 + b'"}\n'
    short = b'{"text": "y"}\n'
    parts = cut(tmp_path / "a.jsonl", short + long + short, 10)
    assert [part.end - part.begin for part in parts] == [len(short), len(long), len(short)]


def test_text_without_titles_is_cut_at_blank_lines_or_else_at_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "_FIRST_LOOK", 100)
    data = b"A paragraph\nof lines.\n\n" * 100
    parts = cut(tmp_path / "a.txt", data, 50)
    assert len(parts) > 20
    assert all(data[part.begin :].startswith(b"A") for part in parts)
    parts = cut(tmp_path / "b.txt", b"No blank line here.\n" * 100, 50)
    assert len(parts) > 20
    assert all(part.begin % 20 == 0 for part in parts)


def test_what_never_ends_is_cut_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "LONGEST_DOCUMENT", 1 << 16)
    parts = cut(tmp_path / "a.jsonl", b'"' + b"x" * 400_000, 10)
    assert max(part.end - part.begin for part in parts) <= (1 << 16) + 10


def test_rows_of_a_parquet_file(tmp_path: Path) -> None:
    table = pa.table({"id": range(1000), "meta": [{"a": 1}] * 1000, "text": ["word " * 20] * 1000})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300, compression="none")
    parts = list(chunks(find([tmp_path / "a.parquet"]), 5000))
    assert (parts[0].begin, parts[-1].end, parts[-1].last) == (0, 1000, True)
    assert all(single.end == second.begin for single, second in pairwise(parts))
    assert all(single.begin // 300 == (single.end - 1) // 300 for single in parts)
    assert len(parts) >= 4


def test_a_row_group_is_one_chunk_until_it_is_large(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"text": ["word " * 20] * 900}),
        path,
        row_group_size=300,
        compression="none",
        use_dictionary=False,
    )
    parts = list(chunks(find([path]), 10_000))
    assert [(part.begin, part.end, part.cells) for part in parts] == [
        (begin, begin + 300, None) for begin in (0, 300, 600)
    ]
    parts = list(chunks(find([path]), 1000))
    assert [len(part.cells or ()) for part in parts] == [10] * 90
    assert [part.last for part in parts] == [False] * 89 + [True]


# A thread of Arrow's own may give memory back after the last Python object that held it is gone,
# and gives it to the pool it is from: a pool that was freed by then is a segmentation fault, later
# and elsewhere.
KEPT: list[pa.MemoryPool] = []


def test_memory_does_not_grow_with_a_row_group(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.parquet", random.Random(0)
    table = pa.table({"text": [rng.randbytes(2000).hex() for _ in range(8000)]})
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    sources, usual = find([path]), pa.default_memory_pool()
    streamed, at_once = pa.proxy_memory_pool(usual), pa.proxy_memory_pool(usual)
    KEPT.extend((streamed, at_once))
    try:
        pa.set_memory_pool(streamed)
        rows = sum(part.end - part.begin for part in chunks(sources, 200_000))
        pa.set_memory_pool(at_once)
        parquet.ParquetFile(path).read_row_group(0)
    finally:
        pa.set_memory_pool(usual)
    assert rows == 8000
    assert (streamed.max_memory() or 0) < 5_000_000
    assert (at_once.max_memory() or 0) > table.nbytes > 30_000_000


def test_numbers_go_on_over_sources(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(b'"a"\n' * 10)
    parts = list(chunks(find([tmp_path]), 10))
    assert [part.number for part in parts] == list(range(len(parts)))
    assert [part.last for part in parts].count(True) == 2


def test_damage_found_while_unpacking_goes_with_a_chunk(tmp_path: Path) -> None:
    packed = bz2.compress(ARTICLES) + bz2.compress(ARTICLES)[:-20]
    parts = cut(tmp_path / "part-00000.bz2", packed, 500)
    assert [problem for part in parts for problem in part.problems] == [
        f"the bz2 stream from byte {len(bz2.compress(ARTICLES))} is cut at byte {len(packed)}"
    ]
    assert parts[-1].last


def test_chunks_pickle_and_are_small(tmp_path: Path) -> None:
    for part in cut(tmp_path / "dump.xml", DUMP, 500):
        message = pickle.dumps(part)
        assert len(message) < 2000
        assert pickle.loads(message) == part


def test_no_more_than_a_few_chunks_are_held(tmp_path: Path) -> None:
    size, rng = 100_000, random.Random(0)
    words = [rng.randbytes(4).hex() for _ in range(5000)]
    data = "".join(
        json.dumps(" ".join(rng.choices(words, k=1000))) + "\n" for _ in range(1200)
    ).encode()
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(data, 1))
    sources = find([tmp_path / "a.jsonl.bz2"])
    tracemalloc.start()
    try:
        total = sum(part.end - part.begin for part in chunks(sources, size))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == len(data) > 100 * size
    assert peak < 10 * size + 1_500_000, "the decoder and the first look cost as much again"


def test_a_size_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    with pytest.raises(InputError, match="at least 1"):
        next(chunks(find([tmp_path / "a.txt"]), 0))
