"""From files to documents: alike for every cut, in any process, with all that is bad counted."""

from __future__ import annotations

import bz2
import hashlib
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from xml.sax.saxutils import escape

import pyarrow as pa
import pytest
from pyarrow import parquet

from packhorse.data.sources import documents, files
from packhorse.data.sources.chunking import chunks
from packhorse.data.sources.documents import Document, ReadTally, read
from packhorse.data.sources.files import find
from packhorse.errors import InputError

NAMES = b'<mediawiki><siteinfo><namespace key="6" case="x">Datei</namespace></siteinfo>\n'
END = b"</mediawiki>\n"
TEXTS = [f"Article {i} is short. It has [[two|2]] sentences.{{{{t}}}}" for i in range(40)]
SENTENCES = [[f"Article {i} is short.", "It has 2 sentences."] for i in range(40)]
PLAIN = [" ".join(sentences) for sentences in SENTENCES]


def page(text: str, title: str = "T", ns: int = 0) -> bytes:
    body = f"<revision><text>{escape(text)}</text></revision>"
    return f"  <page><title>{title}</title><ns>{ns}</ns>{body}</page>\n".encode()


def dump(pages: list[bytes]) -> bytes:
    return NAMES + b"".join(pages) + END


def multistream(pages: list[bytes], per_stream: int = 4) -> list[bytes]:
    groups = [b"".join(pages[i : i + per_stream]) for i in range(0, len(pages), per_stream)]
    return [bz2.compress(text) for text in [NAMES, *groups, END]]


def doc(text: str, title: str = "T") -> bytes:
    return f'<doc id="1" url="u" title="{title}">\n{title}\n\n{text}\n\n</doc>\n'.encode()


def read_all(path: Path, size: int = 1 << 22, **options: str) -> tuple[list[Document], ReadTally]:
    result, total = [], ReadTally()
    for chunk in chunks(find([path], **options), size):
        sample, tally = read(chunk)
        result += sample
        total += tally
    assert total.documents == len(result)
    return result, total


PAGES = [page(text) for text in TEXTS]
WRITERS: dict[str, Callable[[Path], object]] = {
    "a.xml": lambda path: path.write_bytes(dump(PAGES)),
    "one.xml.bz2": lambda path: path.write_bytes(bz2.compress(dump(PAGES))),
    "many.xml.bz2": lambda path: path.write_bytes(b"".join(multistream(PAGES))),
    "wiki_00": lambda path: path.write_bytes(b"".join(map(doc, PLAIN))),
    "wiki_00.bz2": lambda path: path.write_bytes(bz2.compress(b"".join(map(doc, PLAIN)))),
    "part-0": lambda path: path.write_text("".join("\n".join(s) + "\n\n" for s in SENTENCES)),
    "a.txt": lambda path: path.write_text("".join(f" = T = \n\n{text}\n\n" for text in PLAIN)),
    "a.jsonl": lambda path: path.write_text("".join(json.dumps(t) + "\n" for t in PLAIN)),
    "a.parquet": lambda path: parquet.write_table(
        pa.table({"text": PLAIN}), path, row_group_size=7
    ),
}


@pytest.mark.parametrize("size", [1, 200, 1500, 1 << 22])
@pytest.mark.parametrize("name", WRITERS)
def test_every_cut_gives_the_same_documents(tmp_path: Path, name: str, size: int) -> None:
    WRITERS[name](tmp_path / name)
    result, tally = read_all(tmp_path / name, size)
    assert [single.sentences for single in result] == SENTENCES
    assert [single.text_md5 for single in result] == [
        hashlib.md5("\n".join(sentences).encode()).hexdigest() for sentences in SENTENCES
    ]
    assert tally == ReadTally(40, sum(len(sentence) for single in SENTENCES for sentence in single))


def test_another_process_reads_a_chunk_alike(tmp_path: Path) -> None:
    for name in ("many.xml.bz2", "one.xml.bz2", "a.parquet"):
        WRITERS[name](tmp_path / name)
    parts = list(chunks(find([tmp_path]), 1000))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        assert list(pool.map(read, parts)) == [read(part) for part in parts]


def test_what_a_dump_holds_beside_articles_is_counted(tmp_path: Path) -> None:
    redirect = page("Text.").replace(b"<ns>", b'<redirect title="B" /><ns>')
    pages = [
        page("One."),
        redirect,
        page("#REDIRECT [[B]]"),
        page("Talk.", ns=1),
        page("{{template}}"),
        page("[[Datei:a.jpg|mini|Bild]] Two.", "Zwei"),
    ]
    (tmp_path / "a.xml").write_bytes(dump(pages))
    result, tally = read_all(tmp_path / "a.xml")
    assert [(single.name, single.sentences) for single in result] == [
        ("T", ["One."]),
        ("Zwei", ["Two."]),
    ]
    assert tally == ReadTally(2, 8, redirects=2, not_articles=1, empty=1)


DAMAGE = {
    "not UTF-8": dump([*PAGES[:5], PAGES[5].replace(b"short", b"sh\xffrt"), *PAGES[6:]]),
    "not XML": dump([*PAGES[:5], PAGES[5].replace(b"short", b"sh<rt"), *PAGES[6:]]),
    "has no end": dump([*PAGES[:5], PAGES[5].replace(b"</page>", b""), *PAGES[6:]]),
    "bytes that are in no page": dump([*PAGES[:5], b"stray text", *PAGES[6:]]),
}


@pytest.mark.parametrize("packing", ["plain", "one stream", "many streams"])
@pytest.mark.parametrize("size", [1, 1500, 1 << 22])
@pytest.mark.parametrize("cause", DAMAGE)
def test_a_bad_page_is_reported_and_costs_no_other(
    tmp_path: Path, cause: str, size: int, packing: str
) -> None:
    data, path = DAMAGE[cause], tmp_path / "a.xml"
    if packing == "one stream":
        data = bz2.compress(data)
    elif packing == "many streams":
        pages = data.removeprefix(NAMES).removesuffix(END).splitlines(keepends=True)
        data = b"".join(multistream(pages))
    path.write_bytes(data)
    result, tally = read_all(path, size)
    assert [single.sentences for single in result] == SENTENCES[:5] + SENTENCES[6:]
    assert len(tally.bad) == 1
    assert cause in tally.bad[0].reason
    assert str(path) in tally.bad[0].place and "byte" in tally.bad[0].place


@pytest.mark.parametrize("size", [1, 1500, 1 << 22])
@pytest.mark.parametrize("at", ["in a page", "between pages"])
def test_a_dump_that_is_cut_is_reported(tmp_path: Path, at: str, size: int) -> None:
    whole = dump(PAGES[:20])
    data = whole[:-40] if at == "in a page" else whole.removesuffix(END)
    for name, written in (("a.xml", data), ("a.xml.bz2", bz2.compress(data))):
        (tmp_path / name).write_bytes(written)
        result, tally = read_all(tmp_path / name, size)
        assert [single.sentences for single in result] == SENTENCES[: len(result)]
        assert len(result) == (19 if at == "in a page" else 20)
        assert [bad.reason.endswith(("cut here", "it is cut")) for bad in tally.bad] == [True]


@pytest.mark.parametrize("size", [1, 600, 1 << 22])
def test_a_damaged_stream_loses_its_pages_and_no_others(tmp_path: Path, size: int) -> None:
    streams = multistream(PAGES)
    broken = bytearray(streams[3])
    broken[len(broken) // 2] ^= 16
    (tmp_path / "a.xml.bz2").write_bytes(b"".join([*streams[:3], bytes(broken), *streams[4:]]))
    result, tally = read_all(tmp_path / "a.xml.bz2", size)
    assert [single.sentences for single in result] == SENTENCES[:8] + SENTENCES[12:]
    place = sum(map(len, streams[:4]))
    assert [f"to byte {place}" in bad.reason for bad in tally.bad] == [True]


def test_a_packed_file_that_is_cut_is_reported(tmp_path: Path) -> None:
    packed = bz2.compress(b"One.\nTwo.\n\n") + bz2.compress(b"Three.\n" * 9)[:-20]
    (tmp_path / "part-0.bz2").write_bytes(packed)
    result, tally = read_all(tmp_path / "part-0.bz2")
    assert [single.sentences for single in result] == [["One.", "Two."]]
    assert [f"is cut at byte {len(packed)}" in bad.reason for bad in tally.bad] == [True]


def test_streams_that_cut_pages_after_good_beginnings_are_reported(tmp_path: Path) -> None:
    streams = multistream(PAGES[:12])
    pages = b"".join(PAGES[12:])
    odd = [bz2.compress(pages[:1000]), bz2.compress(pages[1000:]), streams[-1]]
    (tmp_path / "a.xml.bz2").write_bytes(b"".join([*streams[:-1], *odd]))
    result, tally = read_all(tmp_path / "a.xml.bz2", 1)
    assert len(result) == 39
    cut, rest = tally.bad
    assert "has no end" in cut.reason and "in no page" in rest.reason


def test_wikiextractor_drops_the_title_and_what_was_overlooked(tmp_path: Path) -> None:
    text = 'First.\n\nSecond <ref name="x">gone</ref>one.<br>\nA &#772; b <nowiki>c</nowiki>.'
    (tmp_path / "wiki_00").write_bytes(doc(text, "Ants &amp; bees") + doc("", "Empty"))
    result, tally = read_all(tmp_path / "wiki_00")
    assert result[0].name == "Ants & bees"
    assert result[0].sentences == ["First.", "Second one.", "A \u0304 b c."]
    assert (tally.documents, tally.empty, tally.bad) == (1, 1, ())


def test_wikiextractor_damage(tmp_path: Path) -> None:
    bad = doc("\xff").replace("\xff".encode(), b"\xff")
    cut = doc("Cut.").removesuffix(b"\n\n</doc>\n")
    (tmp_path / "wiki_00").write_bytes(doc("One.") + b"stray\n" + bad + doc("Two.") + cut)
    result, tally = read_all(tmp_path / "wiki_00")
    assert [single.sentences for single in result] == [["One."], ["Two."]]
    assert [single.reason for single in tally.bad] == [
        "7 bytes that are in no <doc>",
        "not UTF-8 (byte 34)",
        "a <doc> without </doc>: the file is cut here",
    ]


def mlperf_hashes(text: str) -> list[str]:
    """What MLPerf's script writes for the articles of a file in its form."""
    articles = [article for article in text.split("\n\n") if article.strip()]
    return [hashlib.md5(article.rstrip().encode()).hexdigest() for article in articles]


@pytest.mark.parametrize("size", [1, 20, 1 << 22])
def test_hashes_are_those_of_mlperf_for_any_run_of_line_ends(tmp_path: Path, size: int) -> None:
    text = "\nOne.\nTwo.\n\n\nThree.\n\n\n\nFour. \n\n\n\n\nFive.\nSix.\n\nSeven.\n"
    (tmp_path / "part-0").write_text(text)
    result, _ = read_all(tmp_path / "part-0", size)
    assert [single.text_md5 for single in result] == mlperf_hashes(text)
    assert result[0].sentences == ["One.", "Two."]


def test_sentences_in_a_file_from_windows(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r\n\r\nThree.\r\n")
    result, _ = read_all(tmp_path / "part-0", 1)
    assert [single.sentences for single in result] == [["One.", "Two."], ["Three."]]


def test_text_is_one_document_without_titles(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A line\nthat goes on. Next.\n\nA paragraph.\n")
    (result,), _ = read_all(tmp_path / "a.txt")
    assert result.sentences == ["A line that goes on.", "Next.", "A paragraph."]
    assert result.name == f"{tmp_path / 'a.txt'}, byte 0"
    (tmp_path / "b.txt").write_text(" \n = Ants = \n \n Big . \n \n = = Life = = \n \n Short . \n")
    (result,), _ = read_all(tmp_path / "b.txt")
    assert (result.name, result.sentences) == ("Ants", ["Big .", "Short ."])


def test_bad_lines_of_json(tmp_path: Path) -> None:
    lines = [
        b'{"text": "One."}',
        b"",
        b"not json",
        b'{"other": "x"}',
        b'{"text": 5}',
        b'{"text": "\xff"}',
        rb'{"text": "half a pair \ud800."}',
        b"[" * 100_000,
        b'{"text": null}',
        b'{"text": " "}',
        b'"Two.\\nThree without an end"',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    result, tally = read_all(tmp_path / "a.jsonl")
    assert [single.sentences for single in result] == [["One."], ["Two.", "Three without an end"]]
    assert tally.empty == 2
    reasons = [
        "not JSON",
        "no column 'text'",
        "not text but int",
        "not UTF-8",
        "surrogates",
        "not JSON",
    ]
    assert [reason in bad.reason for reason, bad in zip(reasons, tally.bad, strict=True)] == [
        True
    ] * 6
    assert tally.bad[0].place.endswith(f"byte {len(lines[0]) + 2}")


def test_bad_cells_of_parquet(tmp_path: Path) -> None:
    cells = pa.array([b"One.", None, b"\xff", b"Two. Three."], pa.binary())
    text = pa.StringArray.from_buffers(4, *cells.buffers()[1:], cells.buffers()[0], 1)
    parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    result, tally = read_all(tmp_path / "a.parquet")
    assert [single.sentences for single in result] == [["One."], ["Two.", "Three."]]
    assert tally.empty == 1
    assert [(bad.place[-5:], bad.reason) for bad in tally.bad] == [("row 2", "not UTF-8 (byte 0)")]


def test_a_damaged_page_of_parquet_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [f"Row number {i} is here." for i in range(3000)]
    parquet.write_table(pa.table({"text": rows}), path, row_group_size=1000, use_dictionary=False)
    location = parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[location + 40 : location + 200] = bytes(160)
    path.write_bytes(data)
    result, tally = read_all(path)
    assert len(result) == 2000
    assert [(bad.place, bad.reason[:27]) for bad in tally.bad] == [
        (str(path), "rows 1000 to 1999 are lost:")
    ]


@pytest.mark.parametrize("size", [1, 1 << 22])
def test_a_flipped_letter_of_parquet_is_reported(tmp_path: Path, size: int) -> None:
    """By the page's checksum; the rows of the pages before and of the next group are kept."""
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pa.table({"text": [f"Row number {i} is here." for i in range(2000)]}),
        path,
        row_group_size=1000,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
        data_page_size=4000,
        write_batch_size=100,
    )
    path.write_bytes(path.read_bytes().replace(b"number 900 is", b"number 9Q0 is"))
    result, tally = read_all(path, size)
    (bad,) = tally.bad
    first = int(bad.reason.split()[1])
    assert 0 < first <= 900
    assert f"rows {first} to 999 are lost: " in bad.reason
    assert [single.sentences for single in result] == [
        [f"Row number {i} is here."] for i in [*range(first), *range(1000, 2000)]
    ]


def test_a_large_row_group_is_decoded_once_and_comes_along(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": PLAIN}), path)
    parts = list(chunks(find([path]), 200))
    path.unlink()
    assert len(parts) > 5
    assert [single.sentences for part in parts for single in read(part)[0]] == SENTENCES


def test_a_bomb_among_streams_of_pages_is_left_out(tmp_path: Path) -> None:
    streams = multistream([page("One."), page("Two.")], per_stream=1)
    bomb = bz2.compress(b"<page>" + bytes(23 << 20))
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(b"".join([*streams[:-1], bomb, bomb, bomb]))
    result, tally = read_all(path)
    assert [single.sentences for single in result] == [["One."], ["Two."]]
    assert any("more than 100 times its size" in bad.reason for bad in tally.bad)


def test_pages_of_one_chunk_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_DOCUMENT", 2000)
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(b"".join(multistream([page("One. " * 50) for _ in range(40)])))
    _, tally = read_all(path)
    assert any("pack it in more streams" in bad.reason for bad in tally.bad)


def test_rows_that_repeat_one_text_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary holds the text once, and every row has it."""
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["A sentence. " * 1000] * 3000}), path)
    assert path.stat().st_size < 10_000
    monkeypatch.setattr(documents, "LONGEST_DOCUMENT", 1 << 20)
    result, tally = read_all(path)
    assert sum(len(single.sentences) for single in result) * len("A sentence.") < 1 << 20
    (bad,) = tally.bad
    assert "rows 87 to 2999 are lost" in bad.reason and "smaller ones" in bad.reason


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    WRITERS["a.jsonl"](tmp_path / "a.jsonl")
    parts = list(chunks(find([tmp_path / "a.jsonl"]), 500))
    (tmp_path / "a.jsonl").write_bytes(b'"x"\n')
    with pytest.raises(InputError, match="shorter than"):
        read(parts[-1])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read(parts[0])


def test_a_table_that_changed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    WRITERS["a.parquet"](path)
    parts = list(chunks(find([path])))
    parquet.write_table(pa.table({"text": PLAIN}), path, row_group_size=8)
    with pytest.raises(InputError, match="not what it was"):
        read(parts[0])
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read(parts[0])


def test_the_real_dump(shared_data: Path) -> None:
    path = next((shared_data / "wiki").glob("enwiki*.bz2"))
    result, tally = read_all(path)
    assert (tally.documents, tally.redirects, tally.empty, tally.bad) == (105, 100, 1, ())
    anarchism = result[0]
    assert anarchism.name == "Anarchism"
    assert anarchism.sentences[0] == (
        "Anarchism is a political philosophy that advocates self-governed societies based on"
        " voluntary institutions."
    )
    lengths = [len(sentence.split()) for single in result for sentence in single.sentences]
    assert 17_000 < len(lengths) < 19_000
    assert 20 < sum(lengths) / len(lengths) < 25
    assert sum(length > 120 for length in lengths) < 20


def test_mlperfs_files_and_list(shared_data: Path) -> None:
    listed = (shared_data / "packing" / "mlperf_bert_eval.md5").read_text().split()
    nothing = hashlib.md5(b"").hexdigest()
    assert listed.count(nothing) == 60, "MLPerf picked empty articles too; none is ever a document"
    result, total = [], ReadTally()
    for path in sorted((shared_data / "wiki").glob("mlperf_wiki_*")):
        sample, tally = read_all(path, 1 << 18)
        result, total = result + sample, total + tally
    assert (total.documents, total.empty, total.bad) == (152, 1, ())
    text = "\n".join(sentence for single in result for sentence in single.sentences)
    assert not any(
        remaining in text for remaining in ("<ref", "</", "<br", "[[", "{{", "&nbsp;", "<doc")
    )
    assert not any(remaining in text for remaining in ("()", " ,", " )", "]]", "&#"))
    assert nothing not in {single.text_md5 for single in result}


def test_wikitext(shared_data: Path) -> None:
    result, tally = read_all(shared_data / "text" / "wikitext-2-valid.txt", 100_000)
    assert (tally.documents, tally.bad) == (60, ())
    assert result[0].name == "Homarus gammarus"
    assert not any(sentence.startswith("= ") for single in result for sentence in single.sentences)


def test_the_kinds_are_all_read() -> None:
    assert set(documents._READERS) == set(files.KINDS) - {"parquet", "arrow"}
