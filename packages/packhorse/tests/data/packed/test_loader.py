"""Batches: every row once an epoch whoever loads it, the same after a stop, masks included."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.data.packed import shards
from packhorse.data.packed.loader import Loader, PretrainingBatch
from packhorse.data.packed.masking import Recipe, Specials
from packhorse.data.packed.packs import RowLayout, Rows, cumulative
from packhorse.data.packed.shards import Dataset, Writer
from packhorse.errors import InputError
from packhorse.packing.batch import Packed

pytest.importorskip("pyarrow")

SPECIALS = Specials(1, 2, 3, 0, vocab_size=1000)
RECIPE = Recipe(max_length=40)
plain = partial(Loader, masking=False)
FIRST = 500  # the token that names row 0; other tokens are below


def rows_with_names(count: int) -> Rows:
    """One to three sequences a row, [CLS] to [SEP]; the first has the row's own token behind it."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 4, count)
    offsets = cumulative(counts)
    lengths = rng.integers(5, 14, offsets[-1])
    ids = rng.integers(10, FIRST, lengths.sum())
    ends = np.cumsum(lengths)
    ids[ends - lengths], ids[ends - 1] = SPECIALS.cls, SPECIALS.sep
    ids[(ends - lengths + 1)[offsets[:-1]]] = FIRST + np.arange(count)
    return Rows(ids, lengths, rng.integers(2, lengths), rng.integers(0, 2, len(lengths)), offsets)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Dataset]:
    """A dataset of so many rows, in several shards."""

    @cache
    def made(count: int) -> Dataset:
        folder = tmp_path_factory.mktemp("rows") / "set"
        writer = Writer(folder, RowLayout(40, 1000, 3), SPECIALS, {}, shard_bytes=700)
        writer.add(rows_with_names(count))
        writer.finish()
        return shards.open_dataset(folder)

    return made


def names(batch: PretrainingBatch) -> list[int]:
    """The numbers of the batch's rows, in order, from the tokens that name them."""
    marks = batch.packed.ids[batch.packed.pick(batch.packed.starts).long() + 1]
    return (marks[marks >= FIRST] - FIRST).tolist()


def flat(batch: PretrainingBatch) -> list[Any]:
    """All that a batch says, to be compared."""
    packed = [getattr(batch.packed, field.name) for field in fields(Packed)]
    return [
        x.tolist() if isinstance(x, torch.Tensor) else x
        for x in (
            *packed,
            *(getattr(batch, f.name) for f in fields(PretrainingBatch) if f.name != "packed"),
        )
    ]


@dataclass
class Encoding:
    ids: list[int]
    types: list[int]


def reference(rows: Rows, capacity: int) -> Packed:
    """The slow way: one sequence after the other."""
    starts, sequences = cumulative(rows.lengths), []
    for number, (length, first) in enumerate(zip(rows.lengths, rows.first, strict=True)):
        ids = rows.ids[starts[number] : starts[number] + length].tolist()
        sequences.append(Encoding(ids, [0] * int(first) + [1] * int(length - first)))
    packs = [range(*pair) for pair in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]
    return Packed.rows(sequences, packs, capacity) if capacity else Packed.build(sequences)


@pytest.mark.parametrize("in_rows", [False, True])
def test_a_batch_is_what_packed_makes_of_its_sequences(dataset: Any, in_rows: bool) -> None:
    data = dataset(60)
    for batch in plain(data, rows=7, epochs=1, in_rows=in_rows):
        rows = data.take(names(batch))
        expected = reference(rows, 40 * in_rows)
        for field in fields(Packed):
            actual, expected_value = (
                getattr(batch.packed, field.name),
                getattr(expected, field.name),
            )
            if isinstance(actual, torch.Tensor):
                actual, expected_value = (
                    (actual.dtype, actual.tolist()),
                    (expected_value.dtype, expected_value.tolist()),
                )
            assert actual == expected_value, field.name
        assert batch.next_labels.tolist() == rows.random_next.tolist()
        assert (batch.sequences, batch.tokens) == (len(rows.lengths), len(rows.ids))
        assert not len(batch.masked_at) and not len(batch.masked_ids)


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("whole_words", [False, True])
def test_masked_tokens_stand_where_they_are_said_to(
    dataset: Any, in_rows: bool, whole_words: bool
) -> None:
    data = dataset(60)
    if whole_words:
        data = shards.open_dataset(data.folder)
        continues = np.arange(1000) % 3 == 0
        data.manifest = replace(data.manifest, specials=replace(SPECIALS, continues=continues))
    recipe = replace(RECIPE, whole_words=whole_words, mask_probability=0.3)
    without = plain(data, rows=7, epochs=1, in_rows=in_rows)
    for batch, bare in zip(replace(without, masking=recipe), without, strict=True):
        assert len(batch.masked_at) > 10
        assert (batch.masked_at.diff() > 0).all()
        original = batch.packed.ids.clone()
        assert (original[batch.masked_at] == SPECIALS.mask).sum() > 5
        original[batch.masked_at] = batch.masked_ids
        assert torch.equal(original, bare.packed.ids)
        assert not torch.isin(batch.masked_ids, torch.tensor([0, 1, 2])).any()


def test_static_masks_come_as_stored(dataset: Any, tmp_path: Path) -> None:
    """The masks of one epoch, drawn when loading, are stored: loading them gives the same."""
    drawn = Loader(dataset(30), rows=4, epochs=1, shuffle=False, masking=RECIPE)
    layout = replace(dataset(30).manifest.layout, static_masks=True)
    writer = Writer(tmp_path / "set", layout, SPECIALS, {})
    for batch in drawn:
        rows = dataset(30).take(names_in_order(batch))
        bounds = torch.searchsorted(batch.masked_at, batch.packed.cu_seqlens)
        begins = np.repeat(rows.bounds()["ids"][:-1], np.diff(rows.offsets))
        positions = batch.masked_at.numpy() - np.repeat(begins, bounds.diff())
        stored = {"masked_positions": positions, "masked_ids": batch.masked_ids.numpy()}
        stored |= {"masked_counts": bounds.diff().numpy(), "ids": batch.packed.ids.numpy()}
        writer.add(replace(rows, **stored))
    writer.finish()
    static = shards.open_dataset(tmp_path / "set", verify=True)
    for actual, expected_value in zip(
        Loader(static, rows=4, epochs=1, shuffle=False), drawn, strict=True
    ):
        assert flat(actual)[:-1] == flat(expected_value)[:-1]
    with pytest.raises(InputError, match="has stored masks"):
        Loader(static, rows=4, masking=RECIPE)


def test_masks_are_drawn_as_the_dataset_says(dataset: Any) -> None:
    """Unless the loader is told otherwise, or to draw none."""
    data = shards.open_dataset(dataset(60).folder)
    recipe = Recipe(mask_probability=0.5, max_predictions=2, whole_words=True)
    continues = np.arange(1000) % 3 == 0
    data.manifest = replace(
        data.manifest, masking=recipe, specials=replace(SPECIALS, continues=continues)
    )
    actual = [flat(batch) for batch in Loader(data, 7, epochs=1)]
    assert actual == [flat(batch) for batch in Loader(data, 7, epochs=1, masking=recipe)]
    assert actual != [flat(batch) for batch in Loader(data, 7, epochs=1, masking=Recipe())]
    assert not any(len(batch.masked_at) for batch in plain(data, 7, epochs=1))


def test_without_second_segments_there_are_no_labels(dataset: Any, tmp_path: Path) -> None:
    rows, layout = rows_with_names(20), RowLayout(40, 1000, 3, next_sentence=False)
    writer = Writer(tmp_path / "set", layout, SPECIALS, {})
    writer.add(replace(rows, first=rows.lengths, random_next=rows.random_next * 0))
    writer.finish()
    for batch in Loader(shards.open_dataset(tmp_path / "set"), 7, epochs=1):
        assert not len(batch.next_labels) and not batch.packed.types.any()
    assert all(
        len(batch.next_labels) == batch.sequences for batch in plain(dataset(20), 7, epochs=1)
    )


def test_a_flipped_bit_is_not_trained_on(dataset: Any, tmp_path: Path) -> None:
    """In a word, which another word of the vocabulary takes the place of: nothing else shows it."""
    shutil.copytree(dataset(60).folder, tmp_path / "set")
    assert len(list(Loader(shards.open_dataset(tmp_path / "set"), 7, epochs=1))) == 9
    path = tmp_path / "set" / shards.shard_name(2)
    number = sum(shard.rows for shard in dataset(60).manifest.shards[:2])
    whole, ids = path.read_bytes(), dataset(60).row(number).ids.tobytes()
    at = whole.index(ids) + 4
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(InputError, match=f"{path.name} is damaged"):
        list(Loader(shards.open_dataset(tmp_path / "set"), 7, epochs=1))


def names_in_order(batch: PretrainingBatch) -> np.ndarray:
    """As `names`, for masked batches in the stored order: the cursor says which they are."""
    end = batch.cursor["row"] or 30
    return np.arange(end - 4 if end % 4 == 0 else end - end % 4, end)


sizes, ranks = st.integers(1, 40), st.integers(1, 4)


@settings(max_examples=40)
@given(sizes, st.integers(1, 60), ranks, ranks, ranks, st.booleans(), st.integers(0, 5))
def test_every_row_exactly_once_an_epoch(
    dataset: Any,
    size: int,
    rows: int,
    world: int,
    workers: int,
    parts: int,
    balanced: bool,
    seed: int,
) -> None:
    rows = max(rows, world)
    whole = plain(dataset(size), rows, seed, epochs=2, balanced=balanced, prefetch=0)
    expected = [row for batch in whole for row in names(batch)]
    seen: Counter[int] = Counter()
    batches: dict[int, list[int]] = {}
    for rank in range(world):
        for worker in range(workers):
            facts = {"rank": rank, "world": world, "worker": worker, "workers": workers}
            for batch in replace(whole, **facts, parts=parts):
                number = batch.cursor["batch"]
                batches.setdefault(number, []).extend(names(batch))
    seen = Counter(row for item in batches.values() for row in item)
    assert seen == Counter({row: 2 for row in range(size)}) == Counter(expected)


@settings(max_examples=40)
@given(sizes, st.integers(4, 60), st.integers(2, 4), st.booleans(), st.booleans())
def test_a_global_batch_is_the_same_for_any_world(
    dataset: Any, size: int, rows: int, world: int, balanced: bool, drop_last: bool
) -> None:
    if drop_last and size < rows:
        return
    alone = Loader(dataset(size), rows, masking=RECIPE, drop_last=drop_last, prefetch=0)
    alone = replace(alone, balanced=balanced)
    together = [iter(replace(alone, rank=rank, world=world)) for rank in range(world)]
    for single, *shares in islice(zip(alone, *together, strict=True), 5):
        assert Counter(sequences_of([single])) == Counter(sequences_of(shares))
        assert {json.dumps(share.cursor) for share in shares} == {json.dumps(single.cursor)}
        if not balanced:
            assert sequences_of([single]) == sequences_of(shares)


def sequences_of(batches: list[PretrainingBatch]) -> list[tuple[Any, ...]]:
    """Each sequence with its masks and label, without where it lies."""
    result = []
    for batch in batches:
        packed, at = batch.packed, batch.masked_at
        places = zip(packed.split(at - 0 * at, at), packed.split(batch.masked_ids, at), strict=True)
        tokens = packed.split(torch.stack([packed.ids, packed.types, packed.positions], 1))
        starts = packed.pick(packed.starts)
        for token, (location, ids), start, label in zip(
            tokens, places, starts, batch.next_labels, strict=True
        ):
            masks = (location - start).tolist(), ids.tolist()
            result.append((str(token.tolist()), str(masks), int(label)))
    return result


def test_masks_change_with_epoch_and_seed_alone(dataset: Any) -> None:
    def masks(seed: int, epoch: int, **options: Any) -> set[Any]:
        recipe = replace(RECIPE, mask_probability=0.5)
        loader = Loader(dataset(20), 5, seed, epochs=2, masking=recipe)
        batches = list(replace(loader, **options))
        return set(sequences_of(batches[4 * epoch : 4 * epoch + 4]))

    assert masks(1, 0) == masks(1, 0, shuffle=False) == masks(1, 0, in_rows=True)
    assert len(masks(1, 0) & masks(1, 1)) <= 3
    assert len(masks(1, 0) & masks(2, 0)) <= 3


def test_epochs_have_different_orders(dataset: Any) -> None:
    orders = [tuple(names(batch)) for batch in plain(dataset(40), 40, epochs=3)]
    assert len(set(orders)) == 3 and tuple(range(40)) not in orders
    again = [tuple(names(batch)) for batch in plain(dataset(40), 40, epochs=3)]
    second = [tuple(names(batch)) for batch in plain(dataset(40), 40, 1, epochs=3)]
    stored = [tuple(names(batch)) for batch in plain(dataset(40), 40, epochs=3, shuffle=False)]
    assert again == orders and not set(orders) & set(second)
    assert stored == [tuple(range(40))] * 3


def test_the_last_batch(dataset: Any) -> None:
    """It is filled from the next epoch; is short at the very end; or left out, if so wished."""
    data = dataset(11)

    def counts(**options: Any) -> list[int]:
        return [len(names(batch)) for batch in islice(plain(data, 4, **options), 8)]

    endless = list(islice(plain(data, 4), 11))
    assert counts() == [4] * 8
    assert Counter(row for b in endless for row in names(b)) == Counter({r: 4 for r in range(11)})
    assert counts(epochs=1) == [4, 4, 3]
    assert counts(epochs=2, drop_last=True) == [4, 4, 4, 4]
    assert counts(epochs=1, rank=3, world=4) == [1, 1]  # of the last batch this rank has none
    dropped = [row for batch in plain(data, 4, drop_last=True, epochs=1) for row in names(batch)]
    assert len(set(dropped)) == 8
    with pytest.raises(InputError, match="11 rows, not one batch of 12"):
        plain(data, 12, drop_last=True)


@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"drop_last": True}, {"balanced": True}])
@pytest.mark.parametrize("world", [1, 2])
def test_resuming_anywhere_goes_on_bit_for_bit(
    dataset: Any, options: dict[str, Any], world: int
) -> None:
    whole = Loader(dataset(23), 6, 5, masking=RECIPE, rank=world - 1, world=world, **options)
    batches = list(islice(whole, 12))
    assert len(batches) >= 7
    for stop in range(len(batches)):
        cursor = json.loads(json.dumps(batches[stop].cursor))
        rest = islice(replace(whole, cursor=cursor), len(batches) - stop - 1)
        assert [flat(batch) for batch in rest] == [flat(batch) for batch in batches[stop + 1 :]]
    forgotten = replace(whole, cursor=batches[3].cursor | {"epoch": 7})
    assert [flat(b)[:-1] for b in islice(forgotten, 2)] != [flat(b)[:-1] for b in batches[4:6]]


@settings(max_examples=40)
@given(st.integers(0, 9), st.integers(4, 30), st.integers(1, 4), st.booleans())
def test_a_cursor_outlives_another_world_and_batch_size(
    dataset: Any, taken: int, rows: int, world: int, drop_last: bool
) -> None:
    data = dataset(31)
    before = plain(data, 7, drop_last=drop_last, prefetch=0)
    used = list(islice(before, taken))
    cursor = used[-1].cursor if used else None
    stream = [row for batch in used for row in names(batch)]
    after = replace(before, rows=rows, cursor=cursor, world=world)
    shares = [iter(replace(after, rank=rank)) for rank in range(world)]
    while len(stream) < 31 * 4:
        stream += [row for share in shares for row in names(next(share))]
    if not drop_last:
        whole = islice(plain(data, 31, prefetch=0), 8)
        expected = [row for batch in whole for row in names(batch)]
        assert stream == expected[: len(stream)]
    else:
        place = cursor["row"] if cursor else 0
        begun = stream[taken * 7 - place : taken * 7 + max(0, (31 // rows * rows - place))]
        assert len(set(begun)) == len(begun)


def test_a_cursor_points_behind_whole_steps(dataset: Any) -> None:
    """Inside an accumulated step it still points before it; behind the last part, behind it."""
    loader = plain(dataset(23), 8, parts=3, world=2)
    first, *rest = islice(loader, 5)
    assert [batch.cursor["batch"] for batch in (first, *rest)] == [0, 0, 1, 1, 1]
    assert flat(next(iter(replace(loader, cursor=first.cursor)))) == flat(first)
    assert flat(next(iter(replace(loader, cursor=rest[1].cursor)))) == flat(rest[2])


def test_workers_resume_from_one_cursor(dataset: Any) -> None:
    loader = Loader(dataset(23), 4, masking=RECIPE)
    batches = [flat(batch) for batch in islice(loader, 12)]
    cursor = batches[4][-1]
    shares = [iter(replace(loader, worker=w, workers=3, cursor=cursor)) for w in range(3)]
    assert [flat(next(shares[number % 3])) for number in range(5, 12)] == batches[5:]


def test_a_cursor_of_something_else_is_refused(dataset: Any) -> None:
    cursor = next(iter(plain(dataset(20), 5, 3))).cursor
    for loader in (
        plain(dataset(20), 5, 3, cursor=cursor),
        plain(dataset(20), 5, 3, cursor=cursor | {"more": 1}),
    ):
        assert next(iter(loader)).cursor["batch"] == 2
    for changed, complaint in (
        ({"dataset": "0" * 16}, "another dataset"),
        ({"seed": 4}, "another seed"),
        ({"shuffle": False}, "another shuffle"),
        ({"epoch": -1}, "not a cursor"),
        ({"row": 1.5}, "not a cursor"),
        ({"batch": True}, "not a cursor"),
    ):
        with pytest.raises(InputError, match=complaint):
            plain(dataset(20), 5, 3, cursor=cursor | changed)
    with pytest.raises(InputError, match="another dataset"):
        plain(dataset(21), 5, 3, cursor=cursor)
    with pytest.raises(InputError, match="not a cursor"):
        plain(dataset(20), 5, 3, cursor={})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"seed": -1},
        {"world": 0},
        {"rank": 2, "world": 2},
        {"worker": -1},
        {"rows": 2, "world": 3},
        {"prefetch": -1},
    ],
)
def test_what_cannot_be_loaded_is_reported_at_once(dataset: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        plain(dataset(20), **{"rows": 6} | wrong)


def loading_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("packhorse-loader")]


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_batches_made_ahead_are_the_same(dataset: Any, prefetch: int) -> None:
    loader = Loader(dataset(23), 6, epochs=2, masking=RECIPE, prefetch=prefetch)
    batches = iter(loader)
    first = next(batches)
    assert len(loading_threads()) == 1
    ahead = [flat(first), *map(flat, batches)]
    assert not loading_threads()
    assert ahead == [flat(batch) for batch in replace(loader, prefetch=0)]


def test_an_abandoned_iteration_ends_its_thread(dataset: Any) -> None:
    for number, _ in enumerate(plain(dataset(23), 6)):
        if number == 2:
            break
    assert not loading_threads()
    batches = iter(plain(dataset(23), 6))
    next(batches)
    del batches
    assert not loading_threads()


def test_an_error_reaches_who_iterates(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the batches before it, once, and with the thread gone."""
    loader = plain(dataset(23), 6, prefetch=3)
    data, calls = loader.dataset, iter(range(100))

    def damaged(numbers: np.ndarray) -> Iterator[Rows]:
        if next(calls) == 2:
            raise InputError("rows are damaged")
        return Dataset.take(data, numbers)

    monkeypatch.setattr(data, "take", damaged)
    batches = iter(loader)
    assert len(names(next(batches))) == len(names(next(batches))) == 6
    with pytest.raises(InputError, match="damaged"):
        next(batches)
    assert not loading_threads() and next(batches, None) is None
