"""Arrow streams as sources of a corpus: folders that `datasets` saved, and damage to them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from packhorse.data.sources import arrow
from packhorse.data.sources.chunking import chunks
from packhorse.data.sources.documents import read
from packhorse.data.sources.files import find
from packhorse.errors import InputError

TEXTS = [f"Row {n} has its words. And {n} more." * (1 + n % 7) for n in range(50)]


def write(path: Path, columns: dict[str, pa.Array], batch: int = 8) -> Path:
    """A stream as `datasets` writes it: batches of so many rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch)
    return path


def save(folder: Path, texts: list[str], files: int = 2, column: str = "text") -> Path:
    """A folder in the layout of `save_to_disk`; tests/data/test_tables_saved.py has real ones."""
    share = -(-len(texts) // files)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        subset = texts[number * share : (number + 1) * share]
        write(folder / name, {column: pa.array(subset), "n": pa.array(range(len(subset)))})
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("size", [1, 300, 1 << 20])
def test_chunks_hold_every_row_once(tmp_path: Path, kind: pa.DataType, size: int) -> None:
    path = write(tmp_path / "a.arrow", {"text": pa.array([*TEXTS, None], kind)})
    parts = list(chunks(find([path]), size))
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) == {1: 51, 1 << 20: 1}.get(size, len(parts))
    result = [
        text for part in parts for text in arrow.texts_between(path, "text", part.begin, part.end)
    ]
    assert result == [text.encode() for text in TEXTS] + [None]


def test_a_saved_folder_is_its_files(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", TEXTS, files=3, column="body")
    sources = find([folder])
    assert [source.path.name[:10] for source in sources] == [f"data-0000{n}" for n in range(3)]
    assert {(source.kind, source.column) for source in sources} == {("arrow", "body")}
    tallies = [read(chunk)[1] for chunk in chunks(sources, 500)]
    assert sum(tally.documents for tally in tallies) == len(TEXTS)
    assert not any(tally.bad for tally in tallies)


def test_splits_are_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / split, TEXTS)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"holds splits; name one of them: .*test, .*train"):
        find([tmp_path])
    assert len(find([tmp_path / "train"])) == 2


def test_real_ones_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")
    built = datasets.Dataset.from_dict({"text": TEXTS}).select(range(40, 10, -1))
    built.save_to_disk(tmp_path / "saved", num_shards=2)
    result = [
        document.sentences[0]
        for chunk in chunks(find([tmp_path / "saved"]))
        for document in read(chunk)[0]
    ]
    assert result == [f"Row {n} has its words." for n in range(40, 10, -1)]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"title": ["x"], "body": ["y"]}, "no column 'text'; name one.*'title', 'body'"),
        ({"text": [1]}, "column 'text' is not text but int64"),
        ({"text": pa.array([], pa.string())}, "has no rows"),
    ],
)
def test_columns_that_will_not_do(tmp_path: Path, columns: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        find([write(tmp_path / "a.arrow", columns)])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_file_that_was_cut_is_reported_at_once(tmp_path: Path, share: float) -> None:
    folder = save(tmp_path, TEXTS)
    last = folder / "data-00001-of-00002.arrow"
    last.write_bytes(last.read_bytes()[: int(last.stat().st_size * share)])
    with pytest.raises(InputError, match=r"data-00001.* not a whole Arrow stream") as caught:
        find([folder])
    assert "\n" not in str(caught.value)


def test_offsets_that_point_anywhere_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", {"text": pa.array(["abcdefgh" * 64] * 8)})
    wild = (512 * 7).to_bytes(4, "little"), (1 << 30).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(*wild, 1))
    (source,) = find([path])
    with pytest.raises(InputError, match="a damaged Arrow stream"):
        list(chunks([source]))
    chunk = next(chunks(find([write(tmp_path / "b.arrow", {"text": pa.array(TEXTS)})])))
    (tmp_path / "b.arrow").write_bytes(path.read_bytes())
    assert "rows 0 to 49 are lost" in read(chunk)[1].bad[0].reason


def test_a_file_that_lost_rows_meanwhile(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", {"text": pa.array(TEXTS)})
    (chunk,) = chunks(find([path]))
    write(path, {"text": pa.array(TEXTS[:9])})
    with pytest.raises(InputError, match="not what it was"):
        read(chunk)


def test_text_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    good = pa.array([b"One is good.", b"b\xe9d", b"So is this."]).view(pa.string())
    path = write(tmp_path / "a.arrow", {"text": good})
    (chunk,) = chunks(find([path]))
    documents, tally = read(chunk)
    assert [document.sentences[0] for document in documents] == ["One is good.", "So is this."]
    assert tally.bad[0].place.endswith("row 1") and "not UTF-8" in tally.bad[0].reason


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_stream_is_refused_before_it_is_unpacked(
    tmp_path: Path, compression: str
) -> None:
    path, table = tmp_path / "a.arrow", pa.table({"text": ["word " * 1_000_000]})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table)
    with pytest.raises(InputError, match="compressed Arrow stream; save it uncompressed"):
        find([path])


def test_a_compressed_dictionary_is_refused(tmp_path: Path) -> None:
    kinds = pa.array(["a" * 10_000]).dictionary_encode()
    table = pa.table({"text": ["word"], "kind": kinds})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    path = tmp_path / "a.arrow"
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table)
    messages = pa.ipc.MessageReader.open_stream(path.read_bytes())
    packed = {message.type for message in messages if arrow._is_compressed(message)}
    assert packed == {"dictionary", "record batch"}
