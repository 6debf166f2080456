"""Texts from files: every format gives the same records, and every bad row its own message."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from packhorse.data import tables
from packhorse.data.tables import Record, read_texts, rows_per_read
from packhorse.errors import InputError, MissingExtra

TEXTS = ["first", "zweiter, mit Komma", 'third "quoted"', "四"]
Columns = dict[str, list]


def write(path: Path, columns: Columns) -> Path:
    """The same table in the format that the suffix names."""
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    if path.suffix == ".txt":
        path.write_text("".join(f"{row['text']}\n" for row in rows), "utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    elif path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writerows([list(columns), *(list(row.values()) for row in rows)])
    return path


FORMATS = [".txt", ".jsonl", ".csv", ".tsv", ".parquet"]
TABLES = FORMATS[1:]


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"texts{suffix}", {"text": TEXTS})
    assert list(read_texts(path)) == [Record(i, text) for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("suffix", TABLES)
def test_ids_and_columns(suffix: str, tmp_path: Path) -> None:
    columns = {"id": ["a", "b"], "title": ["x", "y"], "text": ["one", "two"]}
    path = write(tmp_path / f"texts{suffix}", columns)
    assert list(read_texts(path)) == [Record("a", "one"), Record("b", "two")]
    assert [r.text for r in read_texts(path, "title")] == ["x", "y"]
    assert [r.text for r in read_texts(path, ["title", "text"])] == [("x", "one"), ("y", "two")]


@pytest.mark.parametrize("suffix", TABLES)
def test_a_missing_column_names_those_there_are(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"texts{suffix}", {"title": ["x"], "body": ["y"]})
    with pytest.raises(InputError, match=r"no column 'text'.*'title', 'body'"):
        list(read_texts(path))
    with pytest.raises(InputError, match=r"no column 'abstract'.*'title', 'body'"):
        list(read_texts(path, "abstract"))


@pytest.mark.parametrize("suffix", TABLES)
def test_the_only_column_needs_no_name(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"texts{suffix}", {"id": ["a"], "body": ["y"]})
    assert list(read_texts(path)) == [Record("a", "y")]


def test_whole_numbers_stay_numbers(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".parquet"):
        path = write(tmp_path / f"texts{suffix}", {"id": [7, 9], "text": ["x", "y"]})
        assert [r.id for r in read_texts(path)] == [7, 9]
    path = write(tmp_path / "half.jsonl", {"id": [0.5], "text": ["x"]})
    with pytest.raises(InputError, match=r"line 1: the id 0\.5"):
        list(read_texts(path))


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_empty_text_is_refused_or_skipped(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"texts{suffix}", {"text": ["one", " ", "three"]})
    with pytest.raises(InputError, match=r"(line \d|row 1): the text is empty.*--skip-empty"):
        list(read_texts(path))
    assert list(read_texts(path, skip_empty=True)) == [Record(0, "one"), Record(2, "three")]


def test_nothing_is_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('"one"\n"two"\n{"broken\n')
    texts = read_texts(path)
    assert [next(texts).text, next(texts).text] == ["one", "two"]
    with pytest.raises(InputError, match=r"texts\.jsonl, line 3: not JSON"):
        next(texts)


BAD = {
    "not UTF-8": ("a.txt", b"good\nb\xe9d\n", "a.txt, line 2: not UTF-8"),
    "not UTF-8 in csv": ("a.csv", b"text\ngood\nb\xe9d\n", "a.csv, line 3: not UTF-8"),
    "neither object nor string": ("a.jsonl", b"[1]\n", "line 1: neither"),
    "a number": ("a.jsonl", b'{"text": 5}\n', "line 1: column 'text' is not text but int: 5"),
    "deep": ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
    "ragged": ("a.csv", b"id,text\n1,one\n2\n", "line 3: 1 cells, but 2 columns"),
    "an open quote": ("a.csv", b'text\n"one\ntwo\n', "a.csv, line 3: not csv"),
    "a column twice": ("a.csv", b"text,text\none,two\n", "line 1: two columns have one name"),
    "no parquet": ("a.parquet", b"PAR1 it is not", "not a parquet file"),
    "an unknown suffix": ("a.docx", b"", "from .docx; use one of .txt, .jsonl"),
    "no suffix": ("a", b"", "from this; use one of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        list(read_texts(tmp_path / name))
    assert message in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for name in ("no.txt", "no.parquet"):
        with pytest.raises(InputError, match=rf"{name} cannot be read: .*[Nn]o such file"):
            list(read_texts(tmp_path / name))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        list(read_texts(tmp_path / "folder.txt"))


def test_empty_files_hold_no_texts(tmp_path: Path) -> None:
    for suffix in (".txt", ".jsonl", ".csv", ".tsv"):
        (tmp_path / f"empty{suffix}").touch()
        assert list(read_texts(tmp_path / f"empty{suffix}")) == []


def test_what_windows_writes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert [r.text for r in read_texts(tmp_path / "a.txt")] == ["one", "two"]
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,n\r\n"one\r\nmore",1\r\n')
    assert [r.text for r in read_texts(tmp_path / "a.csv")] == ["one\r\nmore"]


def test_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("who\tAnn\trode\nalone\n")
    pairs = read_texts(tmp_path / "a.txt", pair=True)
    assert next(pairs) == Record(0, ("who", "Ann\trode"))
    with pytest.raises(InputError, match="line 2: not a pair"):
        next(pairs)
    for columns, pair in ((["a", "b", "c"], False), (["a"], True)):
        with pytest.raises(InputError, match="two for a pair"):
            list(read_texts(tmp_path / "a.txt", columns, pair=pair))
    with pytest.raises(InputError, match="leave out --column"):
        list(read_texts(tmp_path / "a.txt", "text"))


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", {"text": ["x" * 300_000]})
    assert len(str(next(read_texts(path)).text)) == 300_000


def test_a_blank_first_line_has_the_columns_that_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "one", "n": 1}\n')
    records = read_texts(tmp_path / "a.jsonl", keep_empty=True, keep={"n": "m"})
    assert [(record.text, record.cells) for record in records] == [
        ("", {"m": None}),
        ("one", {"m": 1}),
    ]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntw\xc3\xb6\n")))
    assert [r.text for r in read_texts("-")] == ["one", "twö"]


def test_pyarrow_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"packhorse\[data\]"):
        list(read_texts(tmp_path / "a.parquet"))


CELLS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(st.tuples(CELLS, CELLS)))
def test_csv_gives_back_what_was_written(tmp_path_factory, rows: list[tuple[str, str]]) -> None:
    """Whatever the cells hold: commas, quotes, line breaks of every kind."""
    columns = {"a": [a for a, _ in rows], "b": [b for _, b in rows]}
    path = write(tmp_path_factory.mktemp("csv") / "a.csv", columns)
    assert [record.text for record in read_texts(path, ["a", "b"])] == rows


def test_a_parquet_column_is_not_unpacked_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCH_BYTES", 1 << 20)
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a" * 1_000_000] * 4, "id": ["b"] * 4})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    with pytest.raises(InputError, match="more than 100 times as many; write the file again"):
        list(read_texts(path, column="text"))
    assert len(list(read_texts(path, column="id"))) == 4
    # In a dictionary a text is there once, and every row of a batch would hold it.
    parquet.write_table(table, path, compression="none", use_dictionary=True)
    group = parquet.ParquetFile(path).metadata.row_group(0)
    assert rows_per_read(path, group, ["text"], 1024) == 1
    assert rows_per_read(path, group, ["id"], 1024) == 1024
