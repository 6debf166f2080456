"""Every sequence of the records is in the shards, once, whatever the format and the workers."""

from __future__ import annotations

import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from packhorse.data.corpus import driver, importing
from packhorse.data.corpus.importing import ImportOptions, import_records
from packhorse.data.packed import shards
from packhorse.data.packed.examples import Sequences
from packhorse.data.packed.manifest import NAME
from packhorse.data.packed.masking import Masks
from packhorse.data.records import prepared
from packhorse.data.records.graphcore import RecordSizes
from packhorse.errors import InputError

WIDTH, MASKS, MOST, VOCAB = 40, 7, 3, 100
SIZES = RecordSizes(WIDTH, MASKS, MOST)


@pytest.fixture
def sequences(record_files: ModuleType, rng: np.random.Generator) -> list:
    return [record_files.draw(rng, WIDTH if i % 2 else 15, VOCAB) for i in range(300)]


@pytest.fixture
def files(record_files: ModuleType, sequences: list, tmp_path: Path) -> dict[str, Path]:
    """The same sequences in every format."""
    rows = record_files.packs(sequences, WIDTH, MOST)
    content = {
        "unpacked": [record_files.unpacked(sequence, WIDTH, MASKS) for sequence in sequences],
        "packed": [record_files.ten_arrays(row, WIDTH, MASKS, MOST) for row in rows],
        "cls_last": [record_files.cls_last(row, WIDTH, MASKS, MOST) for row in rows],
    }
    result = {}
    for form, features in content.items():
        records = [record_files.example(item) for item in features]
        compression = "gzip" if form == "packed" else "none"
        path = tmp_path / f"{form}.tfrecord"
        result[form] = record_files.write(path, records, compression)
        if form != "cls_last":
            result[f"words_{form}"] = tmp_path / f"words_{form}"
            result[f"words_{form}"].write_bytes(b"".join(map(record_files.words, features)))
    return result


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., ImportOptions]:
    def make(*sources: Path, **settings) -> ImportOptions:
        fields = {"vocab_size": VOCAB, "sizes": SIZES, "workers": 1, **settings}
        return ImportOptions(sources, fields.pop("out", tmp_path / "out"), **fields)

    return make


def read(record_files: ModuleType, folder: Path) -> list[list]:
    """The sequences of each row."""
    dataset = shards.open_dataset(folder, verify=True)
    rows = [dataset.row(number) for number in range(len(dataset))]
    return [_as_drawn(record_files, row) for row in rows]


def _as_drawn(record_files: ModuleType, row) -> list:
    begins = np.cumsum(row.lengths, dtype=np.int64) - row.lengths
    positions = row.masked_positions - np.repeat(begins, row.masked_counts)
    masks = Masks(positions, row.masked_ids, row.masked_counts)
    return record_files.as_drawn(Sequences(row.ids, row.lengths, row.first, row.random_next, masks))


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("form", ["unpacked", "words_unpacked"])
def test_sequences_without_a_row_are_packed(
    record_files: ModuleType, sequences: list, files: dict, config, form: str
) -> None:
    finished = import_records(config(files[form]))
    rows = read(record_files, config().out / "train")
    assert Counter(sequence for row in rows for sequence in row) == Counter(sequences)
    assert max(map(len, rows)) <= 3
    manifest = finished.train
    assert (manifest.sequences, manifest.rows) == (len(sequences), len(rows))
    assert manifest.config["found"]["records"] == len(sequences)
    assert manifest.config["lower_bound"] <= manifest.rows <= manifest.config["lower_bound"] + 2
    assert manifest.layout.static_masks and manifest.layout.capacity == WIDTH
    specials = manifest.specials
    assert (specials.cls, specials.sep, specials.mask, specials.pad) == (2, 3, 4, 0)
    assert not list(config().out.glob(".*"))


@pytest.mark.parametrize("form", ["packed", "cls_last", "words_packed"])
def test_rows_that_are_packed_stay(
    record_files: ModuleType, sequences: list, files: dict, config, form: str
) -> None:
    finished = import_records(config(files[form]))
    rows = read(record_files, config().out / "train")
    assert rows == record_files.packs(sequences, WIDTH, MOST)
    assert "lower_bound" not in finished.train.config
    again = import_records(config(files[form], repack=True, overwrite=True))
    anew = read(record_files, config().out / "train")
    assert Counter(sequence for row in anew for sequence in row) == Counter(sequences)
    assert again.train.rows < finished.train.rows and anew != rows


def test_what_tensorflow_wrote(
    tf: ModuleType, record_files: ModuleType, sequences: list, config, tmp_path: Path
) -> None:
    path = tmp_path / "theirs"
    with tf.io.TFRecordWriter(str(path), "GZIP") as writer:
        for sequence in sequences:
            features = {
                name: tf.train.Feature(float_list=tf.train.FloatList(value=values))
                if name == "masked_lm_weights"
                else tf.train.Feature(int64_list=tf.train.Int64List(value=values))
                for name, values in record_files.unpacked(sequence, WIDTH, MASKS).items()
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    import_records(config(path))
    rows = read(record_files, config().out / "train")
    assert Counter(sequence for row in rows for sequence in row) == Counter(sequences)


def test_several_kinds_together(
    record_files: ModuleType, sequences: list, files: dict, config, tmp_path: Path
) -> None:
    """Those that have rows keep them, the others share rows among themselves."""
    longer = record_files.draw(np.random.default_rng(1), 60, VOCAB, shortest=50)
    wide = record_files.example(record_files.unpacked(longer, 64, 12))
    source = record_files.write(tmp_path / "wide", [wide])
    finished = import_records(config(files["packed"], files["unpacked"], source, max_per_pack=None))
    rows = read(record_files, config().out / "train")
    packs = record_files.packs(sequences, WIDTH, MOST)
    assert rows[: len(packs)] == packs
    assert Counter(sequence for row in rows for sequence in row) == Counter(
        [*sequences, *sequences, longer]
    )
    assert (finished.train.layout.capacity, finished.train.layout.max_per_pack) == (64, None)
    assert finished.train.config["found"]["files"] == 3


def test_the_held_out_and_the_tokenizer(
    record_files: ModuleType, sequences: list, files: dict, config, tmp_path: Path
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(95))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    few = [
        record_files.example(record_files.unpacked(sequence, WIDTH, MASKS))
        for sequence in sequences[:10]
    ]
    held = record_files.write(tmp_path / "eval_10k", few)
    tokenizer = tmp_path / "vocab.txt"
    settings = {"vocab_size": None, "tokenizer": tokenizer, "eval": (held,)}
    finished = import_records(config(files["unpacked"], **settings))
    assert finished.eval is not None and finished.eval.sequences == 10
    assert finished.train.specials.vocab_size == 100
    assert (config().out / "tokenizer" / "vocab.txt").read_bytes() == tokenizer.read_bytes()
    rows = read(record_files, config().out / "eval")
    assert Counter(sequence for row in rows for sequence in row) == Counter(sequences[:10])
    assert import_records(config(files["unpacked"], **settings)).already


def test_workers_and_runs_do_not_show(
    files: dict, config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = (files["unpacked"], files["packed"], files["words_unpacked"])
    outs = [tmp_path / "one", tmp_path / "two"]
    import_records(config(*sources, out=outs[0], shard_bytes=4096))
    import_records(config(*sources, out=outs[1], shard_bytes=4096, workers=2))
    assert tree(outs[0]) == tree(outs[1])
    assert len(list((outs[0] / "train").glob("*.arrow"))) > 3
    monkeypatch.setattr("packhorse.data.records.tfrecord.BLOCK_RECORDS", 7)
    monkeypatch.setattr("packhorse.data.records.graphcore.BLOCK_RECORDS", 11)
    monkeypatch.setattr(importing, "PART_TOKENS", 1000)
    parted = tmp_path / "parted"
    import_records(config(*sources, out=parted, shard_bytes=4096))
    kinds = [sorted(_kinds(folder / "train")) for folder in (outs[0], parted)]
    assert kinds[0] == kinds[1]


def _kinds(folder: Path) -> list[bytes]:
    dataset = shards.open_dataset(folder)
    rows = (dataset.row(number) for number in range(len(dataset)))
    return [row.lengths.tobytes() for row in rows]


def test_a_batch_is_loaded_with_its_masks(files: dict, config) -> None:
    """What was imported is what training reads."""
    from packhorse.data.packed.loader import Loader

    import_records(config(files["packed"]))
    dataset = shards.open_dataset(config().out / "train")
    batch = next(iter(Loader(dataset, rows=4, seed=0)))
    assert batch.tokens > 0 and len(batch.masked_at) == len(batch.masked_ids) > 0


KILLED = """
import os, signal, sys
from pathlib import Path
from packhorse.data.corpus import importing
from packhorse.data.records.graphcore import RecordSizes

*sources, out, files, vocab = sys.argv[1:]
real, taken = importing.import_file, []

def take(*item):
    if len(taken) == int(files):
        os.kill(os.getpid(), signal.SIGKILL)
    taken.append(item)
    return real(*item)

importing.import_file = take
told = {"vocab_size": int(vocab), "sizes": RecordSizes(40, 7, 3), "workers": 1}
importing.import_records(importing.ImportOptions(tuple(map(Path, sources)), Path(out), **told))
"""


@pytest.mark.parametrize("files_done", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_after_a_kill_it_goes_on(
    files: dict, config, tmp_path: Path, files_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = (files["packed"], files["cls_last"], files["unpacked"])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    import_records(config(*sources, out=whole))
    arguments = [*sources, killed, files_done, VOCAB]
    work = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], check=False)
    assert work.returncode == -signal.SIGKILL
    assert not (killed / "train").exists()
    read_again = []
    real = prepared.read
    monkeypatch.setattr(prepared, "read", lambda *a: read_again.append(a[0]) or real(*a))
    assert not import_records(config(*sources, out=killed)).already
    assert len(read_again) == 3 - files_done
    assert tree(killed) == tree(whole)


def test_what_is_finished_is_not_made_again(
    files: dict, config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at the very end, when both datasets are whole but not in their place."""
    settings = config(files["packed"], eval=(files["unpacked"],))

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(driver, "publish", stopped)
        with pytest.raises(KeyboardInterrupt):
            import_records(settings)
    monkeypatch.setattr(importing, "import_file", stopped)
    finished = import_records(settings)
    assert finished.eval is not None and finished.train.sequences == finished.eval.sequences == 300


def test_shards_that_are_written_are_not_written_again(
    files: dict, config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of writing, with rows that were packed and rows that were planned."""
    sources = (files["packed"], files["unpacked"])
    whole, stopped = (config(*sources, out=tmp_path / n, shard_bytes=4096) for n in ("a", "b"))
    shard_count = len(import_records(whole).train.shards)
    real = driver.write_shard
    written = []

    def write_two(*arguments):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(arguments)
        return real(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(driver, "write_shard", write_two)
        with pytest.raises(KeyboardInterrupt):
            import_records(stopped)
    again = []
    monkeypatch.setattr(driver, "write_shard", lambda *a: again.append(a) or real(*a))
    import_records(stopped)
    assert len(again) == shard_count - 2 > 1
    assert tree(stopped.out) == tree(whole.out)


def test_a_bad_record_leaves_nothing(record_files: ModuleType, files: dict, config) -> None:
    content = bytearray(files["words_unpacked"].read_bytes())
    content[SIZES.record_bytes("unpacked") * 250 : SIZES.record_bytes("unpacked") * 250 + 4] = (
        bytes(4)
    )
    files["words_unpacked"].write_bytes(content)
    for workers in (1, 2):
        with pytest.raises(InputError, match=r"words_unpacked, record 250 .*begin with \[CLS\]"):
            import_records(config(files["unpacked"], files["words_unpacked"], workers=workers))
        assert not config().out.exists()


def test_records_without_any_sequence(record_files: ModuleType, config, tmp_path: Path) -> None:
    nothing = record_files.words(record_files.ten_arrays([], WIDTH, MASKS, MOST))
    (tmp_path / "strategy_40_part_0").write_bytes(3 * nothing)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    for settings in ({}, {"vocab_size": None, "tokenizer": tmp_path / "vocab.txt"}):
        with pytest.raises(InputError, match="no sequence"):
            import_records(config(tmp_path / "strategy_40_part_0", **settings))
        assert not config().out.exists()


def test_a_full_disk_keeps_what_is_done(
    files: dict, config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise InputError("cannot be written: No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(driver, "write_shard", full)
        with pytest.raises(InputError, match="No space left"):
            import_records(config(files["packed"]))
    assert not (config().out / "train" / NAME).exists()
    assert import_records(config(files["packed"])).train.sequences == 300


def test_records_of_two_widths_in_one_file(
    record_files: ModuleType,
    sequences: list,
    config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("packhorse.data.records.tfrecord.BLOCK_RECORDS", 1)
    records = [
        record_files.example(record_files.unpacked(sequences[0], w, MASKS)) for w in (40, 41)
    ]
    source = record_files.write(tmp_path / "two", records)
    with pytest.raises(InputError, match=r"two, record 1 .*other widths than before"):
        import_records(config(source))


def test_what_is_refused(record_files: ModuleType, files: dict, config, tmp_path: Path) -> None:
    source, out = files["unpacked"], config().out
    second = record_files.write(tmp_path / "other", [record_files.example({"image": [1, 2]})])
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    refused = {
        "named twice": config(source, tmp_path / "folder" / ".." / source.name),
        "is empty; copy it again": config(tmp_path / "empty"),
        "is no file and no folder": config(tmp_path / "missing"),
        "no files in": config(tmp_path / "folder"),
        "not a record for BERT's pretraining.*image": config(second),
        "not a whole number of records": config(files["words_packed"], sizes=RecordSizes(41, 7, 3)),
        "not a TFRecord": config(files["words_packed"], format="tfrecord"),
        "not of the vocabulary": config(source, vocab_size=50),
        f"{source} lies in": config(source, out=tmp_path),
        "lies in the source folder": config(source.parent, out=source.parent / "out"),
        "for training and for evaluation": config(source, eval=(source,)),
        "there is no format 'csv'": config(source, format="csv"),
    }
    for message, wrong in refused.items():
        with pytest.raises(InputError, match=message):
            import_records(wrong)
        assert not out.exists()
    for wrong in ({"tokenizer": source}, {"vocab_size": None}, {"vocab_size": 1 << 31}):
        with pytest.raises(InputError, match="--vocab-size"):
            config(source, **wrong)
    for wrong in ({"max_per_pack": 0}, {"seed": -1}, {"shard_bytes": 0}):
        with pytest.raises(InputError, match="must be"):
            config(source, **wrong)


def test_a_folder_that_is_not_empty(files: dict, config) -> None:
    settings = config(files["packed"])
    settings.out.mkdir()
    (settings.out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"not empty: it holds notes.txt.*--overwrite"):
        import_records(settings)
    import_records(replace(settings, overwrite=True))
    assert (settings.out / "notes.txt").read_text() == "mine"
    (settings.out / "notes.txt").unlink()
    assert import_records(settings).already
    with pytest.raises(InputError, match=r"was made with another repack.*--overwrite"):
        import_records(replace(settings, repack=True))


def test_a_folder_of_files(
    record_files: ModuleType, sequences: list, config, tmp_path: Path
) -> None:
    """Their names give the order; an index beside a TFRecord is not one."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in (2, 0, 1):
        rows = record_files.packs(sequences[number * 9 : number * 9 + 9], WIDTH, MOST)
        features = (record_files.cls_last(row, WIDTH, MASKS, MOST) for row in rows)
        path = folder / f"part-{number}.tfrecord"
        record_files.write(path, map(record_files.example, features))
        path.with_suffix(".index").write_text("0 100\n")
    import_records(config(folder))
    rows = read(record_files, config().out / "train")
    assert [sequence for row in rows for sequence in row] == sequences[:27]


def test_memory_stays_flat(
    record_files: ModuleType,
    sequences: list,
    config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight times the records take no more memory: parts are put down on the way."""
    monkeypatch.setattr(importing, "PART_TOKENS", 1 << 11)
    monkeypatch.setattr("packhorse.data.records.tfrecord.BLOCK_RECORDS", 32)
    records = [
        record_files.example(record_files.unpacked(sequence, WIDTH, MASKS))
        for sequence in sequences
    ]
    peaks = []
    for times in (1, 8):
        path = record_files.write(tmp_path / f"{times}", records * times)
        (source,) = prepared.find([path], None)
        specials = prepared.guess(source, SIZES, VOCAB)
        tracemalloc.start()
        importing.import_file(source, SIZES, specials, False, tmp_path, f"t{times}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
