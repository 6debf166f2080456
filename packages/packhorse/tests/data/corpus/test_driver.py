"""Groups of parts and the rows that are collected from them, against plain loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packhorse.data.corpus import arrays
from packhorse.data.corpus.driver import (
    PartGroup,
    RowRange,
    cut_shards,
    gather,
    make_groups,
    plan_group,
    read_row_range,
    sequence_arrays,
    write_rows,
)
from packhorse.data.packed.examples import Sequences
from packhorse.data.packed.masking import Masks
from packhorse.data.packed.packs import RowLayout, Rows, columns_of
from packhorse.errors import InputError

pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'packhorse[data]'")

LONGEST = 40


def part(rng: np.random.Generator, number: int, static: bool) -> Sequences:
    """So many sequences of random tokens; those that are masked are random as well."""
    lengths = rng.integers(3, LONGEST + 1, number).astype(np.uint16)
    ids = rng.integers(0, 1000, lengths.sum()).astype(np.uint16)
    first = rng.integers(1, lengths + 1).astype(np.uint16)
    masks = None
    if static:
        counts = rng.integers(0, 3, number).astype(np.uint16)
        positions = rng.integers(0, np.repeat(lengths, counts)).astype(np.uint16)
        masks = Masks(positions, rng.integers(0, 1000, counts.sum()).astype(np.uint16), counts)
    return Sequences(ids, lengths, first, rng.random(number) < 0.5, masks)


def as_lists(sequences: Sequences) -> list[tuple]:
    """One sequence after the other, by a loop."""
    result, at, mask_at = [], 0, 0
    for i, length in enumerate(sequences.lengths.tolist()):
        masks: list[tuple[int, int]] = []
        if sequences.masked is not None:
            for _ in range(int(sequences.masked.counts[i])):
                place = int(sequences.masked.positions[mask_at])
                masks.append((place, int(sequences.masked.ids[mask_at])))
                mask_at += 1
        ids = sequences.ids[at : at + length].tolist()
        result.append((ids, int(sequences.first[i]), bool(sequences.random_next[i]), masks))
        at += length
    return result


@pytest.fixture(params=[False, True], ids=["dynamic", "static"])
def parts(request, rng, tmp_path: Path) -> list[tuple[Path, Sequences]]:
    built = []
    for number, size in enumerate([7, 0, 31, 1, 20]):
        sequences = part(rng, size, request.param)
        path = tmp_path / f"part-{number}.arrow"
        arrays.write(path, sequence_arrays(sequences), {})
        built.append((path, sequences))
    return built


def test_gather_is_picking_one_by_one(parts, rng) -> None:
    everything = [item for _, sequences in parts for item in as_lists(sequences)]
    paths = [path for path, _ in parts]
    counts = [len(sequences.lengths) for _, sequences in parts]
    for chosen in (np.arange(59), rng.permutation(59), rng.permutation(59)[:11], np.array([7])):
        result = gather(paths, counts, chosen)
        assert as_lists(result) == [everything[i] for i in chosen]
        assert result.ids.dtype == result.lengths.dtype == np.uint16
        assert result.random_next.dtype == bool


def test_packed_rows_hold_each_sequence_once(parts, tmp_path: Path) -> None:
    paths = [path for path, _ in parts]
    counts = [len(sequences.lengths) for _, sequences in parts]
    static = parts[0][1].masked is not None
    (group,) = make_groups(paths, counts, lambda n: tmp_path / f"plan-{n}.arrow", 5, 1000)
    facts = plan_group(group, 64, 3)
    assert plan_group(group, 64, 3) == facts  # read, not made
    layout = RowLayout(64, 1000, 3, static)
    half = facts["rows"] // 2
    seen = []
    for number, rows in enumerate((range(half), range(half, facts["rows"]))):
        names = tmp_path / f"shard-{number}.arrow", tmp_path / f"receipt-{number}.json"
        written = write_rows([RowRange(group, rows)], layout, *names)
        info = written.info
        assert info.rows == len(rows)
        assert write_rows([RowRange(group, rows)], layout, *names) == written
        seen.append(info)
    assert sum(info.sequences for info in seen) == facts["sequences"] == 59
    assert sum(info.tokens for info in seen) == facts["tokens"]
    assert facts["lower_bound"] <= facts["rows"] < 59


def test_a_shard_may_span_groups(tmp_path: Path) -> None:
    first = PartGroup((tmp_path / "a",), (9,), plan=None)
    last = PartGroup((tmp_path / "b",), (9,), plan=None)
    assert cut_shards([(first, 5), (last, 3)], 4) == [
        [RowRange(first, range(4))],
        [RowRange(first, range(4, 5)), RowRange(last, range(3))],
    ]
    assert cut_shards([(first, 0), (last, 4)], 4) == [[RowRange(last, range(4))]]
    assert cut_shards([], 4) == []


@pytest.mark.parametrize("static", [False, True])
def test_finished_rows_are_read_as_they_are(static: bool, rng, tmp_path: Path) -> None:
    """A group without a plan: any range of its rows, against the sequences one by one."""
    sequences = part(rng, 20, static)
    offsets = np.array([0, 3, 4, 9, 15, 20])
    path = tmp_path / "part.arrow"
    arrays.write(path, sequence_arrays(sequences) | {"offsets": offsets}, {})
    group = PartGroup((path,), (20,), plan=None)
    expected = Rows.of(sequences, offsets)
    for begin, end in ((0, 5), (1, 4), (4, 5)):
        rows = read_row_range(group, range(begin, end))
        cut = expected.cut(begin, end)
        assert np.array_equal(rows.offsets, cut.offsets)
        for name in columns_of(static):
            assert np.array_equal(getattr(rows, name), getattr(cut, name)), name


@pytest.mark.parametrize("most", [1, 5, 20, 1000])
def test_groups_are_runs_of_about_equal_size(most: int, tmp_path: Path, rng) -> None:
    counts = [*rng.integers(0, 6, 50).tolist(), 0]
    paths = [tmp_path / str(number) for number in range(51)]
    result = make_groups(paths, counts, lambda n: tmp_path / f"plan-{n}", 1, most)
    inside = [path for group in result for path in group.parts]
    assert inside == [path for path, count in zip(paths, counts, strict=True) if count]
    assert [sum(g.counts) for g in result] and max(sum(g.counts) for g in result) <= most + 6
    assert len({group.plan for group in result}) == len({g.seed for g in result}) == len(result)
    assert min(sum(g.counts) for g in result) > 0


def test_the_seed_of_a_group_decides_its_rows(parts, tmp_path: Path) -> None:
    paths = [path for path, _ in parts]
    counts = [len(sequences.lengths) for _, sequences in parts]
    built = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (group,) = make_groups(
            paths, counts, lambda n, name=name: tmp_path / f"{name}-{n}", seed, 99
        )
        plan_group(group, 64, None)
        built.append(group.plan.read_bytes())
    assert built[0] == built[1] != built[2]


def test_arrays_come_back(tmp_path: Path) -> None:
    held = {"a": np.arange(5, dtype=np.uint16), "none": np.zeros(0, np.int64)}
    path = tmp_path / "a.arrow"
    arrays.write(path, held, {"b": 1, "a": ["é"]})
    result, facts = arrays.read(path)
    assert facts == {"b": 1, "a": ["é"]}
    assert {name: (a.dtype, a.tolist()) for name, a in result.items()} == {
        name: (a.dtype, a.tolist()) for name, a in held.items()
    }
    again = tmp_path / "b.arrow"
    arrays.write(again, held, {"a": ["é"], "b": 1})
    assert again.read_bytes() == path.read_bytes()
    path.write_bytes(again.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"a\.arrow is damaged"):
        arrays.read(path)
