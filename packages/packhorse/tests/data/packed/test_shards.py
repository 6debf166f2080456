"""Packed rows on disk: what is written is what is read, and nothing damaged is."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.data.packed import shards
from packhorse.data.packed.manifest import NAME, Manifest, read_manifest, write_manifest
from packhorse.data.packed.masking import Masks, Recipe, Specials
from packhorse.data.packed.packs import RowLayout, Rows, columns_of, cumulative, dtypes_of
from packhorse.data.packed.shards import Writer, rows_per_shard, shard_name, write_shard
from packhorse.errors import InputError
from packhorse.wire import crc32c as packhorse_crc32c

pa = pytest.importorskip("pyarrow")

SPECIALS = Specials(1, 2, 3, 0, vocab_size=300, continues=np.arange(300) % 7 == 3)
LAYOUT = RowLayout(capacity=40, vocab_size=300, max_per_pack=3)
STATIC = replace(LAYOUT, static_masks=True)
SMALL = 2000  # bytes: some twenty rows a shard


def some_rows(count: int, layout: RowLayout = LAYOUT, seed: int = 0) -> Rows:
    """Rows of one to three sequences, some full; every row differs."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, count)
    offsets = cumulative(counts)
    lengths = rng.integers(2, layout.capacity // 3 + 1, offsets[-1])
    ids = rng.integers(4, layout.vocab_size, lengths.sum())
    first = rng.integers(1, lengths + 1)
    rows = Rows(ids, lengths, first, rng.integers(0, 2, len(lengths)), offsets)
    if not layout.static_masks:
        return rows
    masked = rng.integers(0, lengths)
    of_each = zip(lengths, masked, strict=True)
    positions = np.concatenate([np.sort(rng.permutation(n)[:k]) for n, k in of_each])
    return rows.masked(ids, Masks(positions, rng.integers(4, 300, len(positions)), masked))


def write(folder: Path, rows: Rows, layout: RowLayout = LAYOUT, **config: Any) -> Manifest:
    writer = Writer(folder, layout, SPECIALS, config, shard_bytes=SMALL)
    writer.add(rows)
    return writer.finish()


def same(actual: Rows, reference: Rows, static: bool = False) -> bool:
    names = ("offsets", *columns_of(static))
    return all(np.array_equal(getattr(actual, name), getattr(reference, name)) for name in names)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "set", some_rows(100))
    return tmp_path / "set"


@pytest.mark.parametrize("layout", [LAYOUT, STATIC], ids=["dynamic", "static"])
def test_what_is_written_is_read(tmp_path: Path, layout: RowLayout) -> None:
    rows = some_rows(100, layout)
    manifest = write(tmp_path / "set", rows, layout, language="xx")
    dataset = shards.open_dataset(tmp_path / "set", verify=True)
    assert len(manifest.shards) > 3 and len(dataset) == 100
    assert dataset.manifest == manifest == read_manifest(tmp_path / "set")
    assert np.array_equal(dataset.manifest.specials.continues, SPECIALS.continues)
    assert dataset.manifest.config == {"language": "xx"}
    assert same(dataset.take(np.arange(100)), rows, layout.static_masks)
    for number in (0, 17, 99):
        assert same(dataset.row(number), rows.cut(number, number + 1), layout.static_masks)
    chosen = [99, 3, 50, 3]
    parts = [rows.cut(number, number + 1) for number in chosen]
    assert same(dataset.take(chosen), Rows.join(parts), layout.static_masks)
    assert dataset.tokens(chosen).tolist() == [len(part.ids) for part in parts]
    assert manifest.tokens == len(rows.ids) and manifest.sequences == len(rows.lengths)
    assert manifest.efficiency == len(rows.ids) / (100 * 40)
    assert list(manifest.histogram) == np.bincount(rows.lengths, minlength=41)[1:].tolist()


def test_a_dataset_travels_as_its_folder(folder: Path) -> None:
    dataset = shards.open_dataset(folder)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 4000 < sum(shard.bytes for shard in dataset.manifest.shards)
    assert same(pickle.loads(pickled).take([7, 80]), dataset.take([7, 80]))


def test_rows_are_views_of_the_file(folder: Path) -> None:
    before = pa.total_allocated_bytes()
    dataset = shards.open_dataset(folder)
    row = dataset.row(42)
    assert pa.total_allocated_bytes() == before
    for column in columns_of(False):
        view = getattr(row, column)
        assert not view.flags.owndata and not view.flags.writeable
    # The map outlives the dataset as long as a view does.
    expected = row.ids.copy()
    del dataset
    assert np.array_equal(row.ids, expected)


@pytest.mark.parametrize(
    ("layout", "ids", "place"),
    [
        (RowLayout(40, 256), np.uint8, np.uint8),
        (RowLayout(255, 30522), np.uint16, np.uint8),
        (RowLayout(256, 1 << 16), np.uint16, np.uint16),
        (RowLayout(70000, (1 << 16) + 1), np.uint32, np.uint32),
    ],
)
def test_types_are_the_narrowest(layout: RowLayout, ids: type, place: type, tmp_path: Path) -> None:
    layout = replace(layout, static_masks=True)
    kinds = dtypes_of(layout)
    assert kinds["ids"] == kinds["masked_ids"] == ids
    assert kinds["lengths"] == kinds["masked_positions"] == place
    most, length = layout.vocab_size - 1, np.array([layout.capacity])
    flat = np.full(layout.capacity, most)
    rows = Rows(flat, length, length, np.ones(1), np.array([0, 1]))
    rows = rows.masked(flat, Masks(length - 1, np.array([most]), np.array([1])))
    info = write_shard(tmp_path / shard_name(0), layout, rows)
    file = pa.ipc.open_file(str(tmp_path / info.name))
    stored = file.get_batch(0).to_pydict()
    assert stored["ids"] == [flat.tolist()] and stored["lengths"] == [[layout.capacity]]
    assert stored["masked_positions"] == [[layout.capacity - 1]]


def test_masks_lie_where_they_say_in_the_row(tmp_path: Path) -> None:
    """Two sequences in a row: the second one's masks are counted from the row's begin."""
    ids, lengths = np.array([1, 3, 2, 1, 9, 3, 2]), np.array([3, 4])
    masks = Masks(np.array([1, 2]), np.array([77, 88]), np.array([1, 1]))
    rows = Rows(ids, lengths, lengths, np.zeros(2), np.array([0, 2])).masked(ids, masks)
    write(tmp_path / "set", rows, STATIC)
    row = shards.open_dataset(tmp_path / "set").row(0)
    assert row.masked_positions is not None and row.masked_ids is not None
    assert row.ids[row.masked_positions].tolist() == [3, 3]
    assert row.masked_positions.tolist() == [1, 5] and row.masked_ids.tolist() == [77, 88]


@pytest.mark.parametrize("layout", [LAYOUT, STATIC], ids=["dynamic", "static"])
def test_bytes_depend_on_rows_alone(tmp_path: Path, layout: RowLayout) -> None:
    """Not on threads, types in memory, or how rows came in; on every value they do."""
    rows, threads = some_rows(100, layout), pa.cpu_count()
    write(tmp_path / "a", rows, layout)
    writer = Writer(tmp_path / "b", layout, SPECIALS, {}, shard_bytes=SMALL)
    try:
        pa.set_cpu_count(1 if threads > 1 else 2)
        for begin, end in ((0, 1), (1, 60), (60, 61), (61, 100)):
            part = rows.cut(begin, end)
            wide = {name: getattr(part, name).astype(np.uint64) for name in columns_of(False)[1:]}
            writer.add(replace(part, **wide))
        writer.finish()
    finally:
        pa.set_cpu_count(threads)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    changed = replace(rows, random_next=1 - rows.random_next)
    second = write(tmp_path / "c", changed, layout)
    assert second.fingerprint != shards.open_dataset(tmp_path / "a").fingerprint


def test_how_to_mask_is_kept(tmp_path: Path) -> None:
    recipe = Recipe(mask_probability=0.3, max_predictions=None, whole_words=True)
    writer = Writer(tmp_path / "set", LAYOUT, SPECIALS, {}, masking=recipe)
    writer.add(some_rows(9))
    manifest = writer.finish()
    assert read_manifest(tmp_path / "set") == manifest and manifest.masking == recipe
    assert replace(manifest, masking=Recipe()).fingerprint != manifest.fingerprint
    static = replace(manifest, layout=STATIC)  # what is stored decides there, and alone
    assert replace(static, masking=Recipe()).fingerprint == static.fingerprint


def test_sequences_of_one_segment(tmp_path: Path) -> None:
    alone, rows = replace(LAYOUT, next_sentence=False), some_rows(9)
    with pytest.raises(InputError, match="there are to be none"):
        write(tmp_path / "a", rows, alone)
    manifest = write(tmp_path / "b", replace(rows, random_next=rows.random_next * 0), alone)
    assert not read_manifest(tmp_path / "b").layout.next_sentence
    assert replace(manifest, layout=LAYOUT).fingerprint != manifest.fingerprint


def test_a_config_is_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    actual = write(tmp_path / "a", some_rows(9), made="here")
    assert actual.fingerprint == write(tmp_path / "b", some_rows(9), made="there").fingerprint
    second = replace(actual, specials=replace(SPECIALS, mask=5))
    assert actual.fingerprint != second.fingerprint


@given(st.integers(1, 60), st.integers(1, 60), st.integers(200, 5000), st.booleans())
def test_shards_have_as_many_rows_as_fit(count: int, step: int, size: int, static: bool) -> None:
    layout = STATIC if static else LAYOUT
    rows = some_rows(count, layout)
    parts = [rows.cut(i, min(i + step, count)) for i in range(0, count, step)]
    assert same(Rows.join(parts), rows, static)
    assert 1 <= rows_per_shard(layout, size) <= max(1, size // 40)


def test_a_default_shard_is_about_64_mib(tmp_path: Path) -> None:
    layout = RowLayout(512, 30522)
    count = rows_per_shard(layout) // 64
    lengths = np.full(count * 2, 256)
    ids = np.zeros(count * 512, np.uint16)
    rows = Rows(ids, lengths, lengths, lengths * 0, np.arange(0, count * 2 + 1, 2))
    info = write_shard(tmp_path / shard_name(0), layout, rows)
    assert (1 << 20) * 0.95 < info.bytes <= 1 << 20


BROKEN = {
    "no row": lambda r: r.cut(0, 0),
    "an empty row": lambda r: replace(r, offsets=np.insert(r.offsets, 1, 0)),
    "tokens too many": lambda r: replace(r, ids=r.ids[1:]),
    "a sequence without tokens": lambda r: replace(r, lengths=r.lengths * 0),
    "a row too long": lambda r: replace(r, offsets=np.array([0, len(r.lengths)])),
    "a first segment too long": lambda r: replace(r, first=r.lengths + 1),
    "no first segment": lambda r: replace(r, first=r.lengths * 0),
    "labels missing": lambda r: replace(r, random_next=r.random_next[1:]),
    "a strange label": lambda r: replace(r, random_next=r.random_next + 2),
    "an unknown token": lambda r: replace(r, ids=r.ids + 300),
    "a negative token": lambda r: replace(r, ids=r.ids - 300),
    "masks missing": lambda r: replace(r, masked_counts=None),
    "masks of others": lambda r: replace(r, masked_counts=r.masked_counts + 1),
    "a mask too far": lambda r: replace(r, masked_positions=r.masked_positions + 3),
    "a mask before": lambda r: replace(r, masked_positions=r.masked_positions - 3),
    "an unknown masked token": lambda r: replace(r, masked_ids=r.masked_ids + 300),
}


@pytest.mark.parametrize("case", BROKEN)
def test_rows_that_break_the_layout_are_not_written(case: str, tmp_path: Path) -> None:
    path, rows = tmp_path / shard_name(0), some_rows(20, STATIC)
    with pytest.raises(InputError, match="cannot be written"):
        write_shard(path, STATIC, BROKEN[case](rows))
    assert not list(tmp_path.iterdir())
    write_shard(path, STATIC, rows)
    with pytest.raises(InputError, match="drawn when loading"):
        write_shard(path, LAYOUT, rows)
    with pytest.raises(InputError, match="sequences, 2 are allowed"):
        write_shard(path, replace(STATIC, max_per_pack=2), rows)


def test_a_folder_without_manifest_is_unfinished(folder: Path, tmp_path: Path) -> None:
    (folder / NAME).rename(folder / "elsewhere")
    with pytest.raises(InputError, match="unfinished"):
        shards.open_dataset(folder)
    with pytest.raises(InputError, match="not a folder of packed rows"):
        shards.open_dataset(tmp_path / "nowhere")
    shutil.copytree(folder, tmp_path / "out" / "train")
    (tmp_path / "out" / "train" / "elsewhere").rename(tmp_path / "out" / "train" / NAME)
    with pytest.raises(InputError, match="holds some: train; name one"):
        shards.open_dataset(tmp_path / "out")


def test_an_unfinished_folder_is_written_over_a_finished_one_is_not(tmp_path: Path) -> None:
    rows = some_rows(100)
    begun = Writer(tmp_path / "a", LAYOUT, SPECIALS, {}, shard_bytes=SMALL // 2)
    begun.add(rows)
    (tmp_path / "a" / ".shard-00001.arrow.0a1b2c3d.partial").write_bytes(b"torn")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    remaining = len(list((tmp_path / "a").iterdir()))
    manifest = write(tmp_path / "a", rows)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {NAME, "notes.txt", *(shard.name for shard in manifest.shards)}
    assert len(names) < remaining
    with pytest.raises(InputError, match="finished dataset"):
        Writer(tmp_path / "a", LAYOUT, SPECIALS, {})
    with pytest.raises(InputError, match="no rows"):
        Writer(tmp_path / "b", LAYOUT, SPECIALS, {}).finish()


def change(folder: Path, **fields: Any) -> None:
    manifest = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(manifest | fields))


def test_a_newer_format_names_the_packhorse_it_needs(folder: Path) -> None:
    change(folder, format=3, written_by="9.8.7", capacity="unheard of")
    with pytest.raises(InputError, match=r"format 3.*install packhorse>=9\.8\.7"):
        shards.open_dataset(folder)
    change(folder, format=1)
    with pytest.raises(InputError, match=r"format 1, which lacks information.*build or import"):
        shards.open_dataset(folder)


SHARD = {"name": "shard-00000.arrow", "rows": 1, "sequences": 1, "tokens": 1, "bytes": 1}
SHARD["crc32c"] = "00000000"
MASKING = {"mask_probability": 0.2, "max_predictions": None, "whole_words": True}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"format": None}, "no format number"),
        ({"format": 0}, "no format number"),
        ({"rows": 99}, "rows is 99, but its shards make 100"),
        ({"tokens": 7}, "contradicts itself"),
        ({"efficiency": 1.0}, "efficiency"),
        ({"histogram": [1, 2]}, "histogram"),
        ({"histogram": [-1] * 40}, "damaged"),
        ({"histogram": [True]}, "damaged"),
        ({"capacity": 39}, "contradicts itself|longer than a row"),
        ({"capacity": 0}, "damaged"),
        ({"capacity": 1 << 70}, "damaged"),
        ({"vocab_size": 2}, "outside the vocabulary"),
        ({"vocab_size": 299}, "columns|vocabulary"),
        ({"static_masks": True}, "columns"),
        ({"next_sentence": False}, "to be none"),
        ({"masking": None}, "damaged"),
        ({"masking": MASKING | {"mask_probability": 2.0}}, "mask_probability is 2"),
        ({"masking": MASKING | {"max_predictions": 0}}, "damaged"),
        ({"masking": MASKING | {"whole_words": 1}}, "damaged"),
        ({"specials": {"cls": 1}}, "damaged"),
        ({"specials": {"cls": 1, "sep": 2, "mask": 3, "pad": 0, "continues": "??"}}, "damaged"),
        ({"shards": []}, "no rows"),
        ({"shards": [SHARD | {"name": "../shard-00000.arrow"}]}, "not a plain name"),
        ({"shards": [SHARD | {"name": "/etc/x.arrow"}]}, "not a plain name"),
        ({"shards": [SHARD | {"name": ".hidden.arrow"}]}, "not a plain name"),
        ({"shards": [SHARD | {"name": "a\n.arrow"}]}, "not a plain name"),
        ({"shards": [SHARD | {"rows": -1}]}, "damaged"),
        ({"shards": [SHARD | {"crc32c": "wrong"}]}, "damaged"),
        ({"shards": [SHARD, SHARD]}, "contradicts itself"),
        ({"shards": [3]}, "damaged"),
        ({"config": None}, "damaged"),
    ],
)
def test_an_edited_manifest_is_refused(
    folder: Path, fields: dict[str, Any], complaint: str
) -> None:
    change(folder, **fields)
    with pytest.raises(InputError, match=complaint) as caught:
        shards.open_dataset(folder, verify=True)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "nul\0", '{"format": 1}', "[" * 100_000])
def test_a_torn_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / NAME).write_text(text)
    with pytest.raises(InputError, match=NAME):
        shards.open_dataset(folder)


def test_every_field_of_the_manifest_is_needed(folder: Path) -> None:
    fields = json.loads((folder / NAME).read_text())
    for key in fields.keys() - {"written_by"}:
        (folder / NAME).write_text(json.dumps({k: v for k, v in fields.items() if k != key}))
        with pytest.raises(InputError, match=NAME):
            shards.open_dataset(folder)


def test_a_missing_or_cut_shard_is_named_at_once(folder: Path) -> None:
    path = folder / shard_name(1)
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=rf"{path.name} has {size} bytes.*again"):
            shards.open_dataset(folder)
    path.unlink()
    with pytest.raises(InputError, match=rf"{path.name} is missing.*again"):
        shards.open_dataset(folder)
    path.mkdir()
    with pytest.raises(InputError, match=path.name):
        shards.open_dataset(folder)


def test_a_flipped_bit_anywhere_is_found(folder: Path, rng: np.random.Generator) -> None:
    """Whichever byte it is in, Arrow's frame or a word, and whoever touches the shard first."""
    path = folder / shard_name(1)
    whole = np.fromfile(path, np.uint8)
    row = shards.open_dataset(folder).manifest.shards[0].rows
    touch = (
        lambda dataset: dataset.verify(),
        lambda dataset: dataset.row(row),
        lambda dataset: dataset.take([0, row]),
        lambda dataset: dataset.tokens([row]),
        lambda dataset: dataset.shard(1),
    )
    for at in range(0, len(whole), 3):
        broken = whole.copy()
        broken[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(broken.tobytes())
        dataset = shards.open_dataset(folder)
        dataset.row(0)  # the control: another shard is as good as before
        with pytest.raises(InputError, match=rf"{path.name} is damaged: its checksum.*again"):
            touch[at % len(touch)](dataset)
    path.write_bytes(whole.tobytes())
    for item in touch:
        item(shards.open_dataset(folder))


def test_a_shard_is_summed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed = []
    monkeypatch.setattr(
        shards, "crc32c", lambda data: summed.append(len(data)) or packhorse_crc32c(data)
    )
    dataset = shards.open_dataset(folder)
    assert not summed
    for _ in range(3):
        dataset.take(np.arange(100))
    assert summed == [shard.bytes for shard in dataset.manifest.shards]
    dataset.verify()
    assert len(summed) == 2 * len(dataset.manifest.shards)


def test_damage_done_while_loading_is_reported(folder: Path) -> None:
    """Behind the checksum: what would shift sequences, or is no word, ends in our own error."""
    path = folder / shard_name(0)
    dataset = shards.open_dataset(folder)
    ids, whole = dataset.row(0).ids.tobytes(), path.read_bytes()
    with path.open("r+b") as file:
        file.seek(whole.index(ids))
        file.write(b"\xff" * len(ids))
    with pytest.raises(InputError, match="verify"):
        dataset.take([0])


def rewritten(folder: Path, table: Any) -> None:
    """A shard with other content, to which size and checksum in the manifest agree."""
    path = folder / shard_name(0)
    with pa.ipc.new_file(str(path), table.schema) as file:
        for batch in table.to_batches(max_chunksize=len(table)):
            file.write_batch(batch)
    fields = json.loads((folder / NAME).read_text())["shards"]
    data = path.read_bytes()
    fields[0] |= {"bytes": len(data), "crc32c": f"{packhorse_crc32c(data):08x}"}
    change(folder, shards=fields)


def stored(folder: Path) -> Any:
    return pa.ipc.open_file(str(folder / shard_name(0))).read_all()


def test_a_shard_of_other_making_is_refused(folder: Path) -> None:
    table = stored(folder)
    lists = table.column("lengths")
    cases = {
        "color": table.append_column("color", lists),
        "columns": table.drop_columns(["first"]),
        "int64": table.set_column(0, "ids", table.column("ids").cast(pa.list_(pa.int64()))),
        "rows, sequences and tokens": table.slice(1),
        "2 record batches": pa.concat_tables([table.slice(0, 5), table.slice(5)]),
    }
    for complaint, second in cases.items():
        rewritten(folder, second)
        with pytest.raises(InputError, match=f"{shard_name(0)}.*{complaint}.*again"):
            shards.open_dataset(folder).row(0)
    rewritten(folder, table)
    shards.open_dataset(folder, verify=True)


def test_columns_that_disagree_are_found(folder: Path) -> None:
    """Labels moved from one row to its neighbor: all sums are right, the rows are not."""
    table = stored(folder)
    labels = table.column("random_next").to_pylist()
    first = next(i for i, row in enumerate(labels) if len(row) > 1)
    labels[first + 1].insert(0, labels[first].pop())
    kind = table.schema.field("random_next").type
    rewritten(folder, table.set_column(3, "random_next", pa.array(labels, kind)))
    with pytest.raises(InputError, match="column random_next do not match"):
        shards.open_dataset(folder, verify=True)


def test_rows_that_are_not_there(folder: Path) -> None:
    dataset = shards.open_dataset(folder)
    for number in (-1, 100):
        with pytest.raises(InputError, match="of 100"):
            dataset.row(number)


def test_a_full_disk_leaves_no_manifest(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: what was written before stays whole."""
    rows, folder = some_rows(100), tmp_path / "set"
    writer = Writer(folder, LAYOUT, SPECIALS, {}, shard_bytes=SMALL)
    writer.add(rows.cut(0, 30))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(InputError, match="cannot be written: File too large"):
            writer.add(rows.cut(30, 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert before and before == {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match="unfinished"):
        shards.open_dataset(folder)


def test_what_no_folder_can_hold(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        Writer(tmp_path / "file", LAYOUT, SPECIALS, {})
    with pytest.raises(InputError, match="contradicts itself"):
        write_manifest(tmp_path, Manifest(LAYOUT, SPECIALS, (1,), (), {}))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
