"""The published algorithms against the published numbers, and their parts against definitions."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from packhorse.errors import InputError
from packhorse.packing import published
from packhorse.packing.histogram import verify
from packhorse.packing.published import fill, lpfhp, nnlshp, spfhp, total

UNLIMITED = 10_000
COUNTS = {  # histogram, algorithm: depth → packs
    ("wikipedia-512", spfhp): {
        2: 10_101_683,
        3: 9_094_695,
        4: 8_658_996,
        6: 8_324_436,
        8: 8_224_673,
        12: 8_166_708,
        UNLIMITED: 8_166_708,
    },
    ("wikipedia-512", lpfhp): {
        3: 9_090_154,
        8: 8_207_569,
        12: 8_149_619,
        16: 8_140_006,
        UNLIMITED: 8_138_483,
    },
    ("wikipedia-512", nnlshp): {2: 13_128_311},
    ("squad-384", spfhp): {2: 45_335, 3: 40_711, UNLIMITED: 40_711},
    ("squad-384", lpfhp): {3: 40_631, UNLIMITED: 40_631},
}


def real(shared_data, name):
    text = (shared_data / "packing" / "histograms.json").read_text()
    return np.array(json.loads(text)["histograms"][name])


@pytest.mark.parametrize(
    ("name", "algorithm", "depth", "packs"),
    [(*key, *row) for key, table in COUNTS.items() for row in table.items()],
)
def test_reaches_the_published_counts(shared_data, name, algorithm, depth, packs):
    histogram = real(shared_data, name)
    plan = algorithm(histogram, len(histogram), depth)
    verify(plan, histogram, len(histogram), depth)
    assert total(plan) == packs


@pytest.mark.slow
def test_nnlshp_reaches_the_published_count_at_depth_3(shared_data):
    histogram = real(shared_data, "wikipedia-512")
    plan = nnlshp(histogram, 512, 3)
    verify(plan, histogram, 512, 3)
    assert total(plan) == 8_155_059


def test_equal_lengths_show_what_sets_the_two_apart():
    histogram = np.array([0, 0, 10, 0, 0, 0, 0, 0, 0])  # ten of length 3 for packs of 9
    assert spfhp(histogram, 9, 9) == [((3,), 10)]
    assert sorted(lpfhp(histogram, 9, 9)) == [((3,), 1), ((3, 3, 3), 3)]
    assert sorted(lpfhp(histogram, 9, 2)) == [((3, 3), 5)]


histograms = st.lists(st.integers(0, 30), min_size=12, max_size=12).filter(any).map(np.array)


@pytest.mark.parametrize("algorithm", [spfhp, lpfhp, nnlshp])
@given(histogram=histograms, depth=st.integers(1, 12))
def test_places_every_sequence_once(algorithm, histogram, depth):
    verify(algorithm(histogram, 12, depth), histogram, 12, depth)


@given(
    slots=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    histogram=st.lists(st.integers(0, 3), min_size=9, max_size=9).filter(any).map(np.array),
    width=st.integers(1, 4),
)
def test_fill_places_as_many_as_can_be(slots, histogram, width):
    strategies = [(tuple(slots[i : i + width]), 1) for i in range(0, len(slots), width)]
    packs, remaining = fill(strategies, histogram, shorter=True)
    waiting = sorted(np.repeat(np.arange(1, 10), histogram))
    most = 0
    for slot in sorted(slots):  # the shortest slots with the shortest sequences: plainly the most
        if most < len(waiting) and waiting[most] <= slot:
            most += 1
    assert histogram.sum() - remaining.sum() == most == sum(len(held) * n for held, n in packs)
    assert all(n > 0 and held for held, n in packs)


@given(
    slots=st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple),
    uses=st.integers(1, 20),
    histogram=st.lists(st.integers(0, 30), min_size=9, max_size=9).filter(any).map(np.array),
)
def test_fill_without_shorter_keeps_to_the_length(slots, uses, histogram):
    packs, remaining = fill([(slots, uses)], histogram, shorter=False)
    offered = uses * np.bincount(slots, minlength=10)[1:]
    assert (histogram - remaining == np.minimum(offered, histogram)).all()
    assert total(packs) <= uses


def test_least_squares_finds_the_same_minimum_as_all_columns_at_once(rng, monkeypatch):
    from scipy.sparse import csc_array

    monkeypatch.setattr(published, "COLUMNS_AT_ONCE", 5)
    matrix = rng.integers(0, 3, (20, 200)).astype(float)
    target = rng.random(20) * 100
    x = published.least_squares(csc_array(matrix), target)
    assert x.min() >= 0
    assert np.linalg.norm(matrix @ x - target) == pytest.approx(nnls(matrix, target)[1], abs=1e-6)


def test_partitions_are_all_and_once():
    ways = list(published.partitions(512, 3, 512))
    assert len(ways) == len(set(ways)) == 22_102
    assert all(sum(way) == 512 and list(way) == sorted(way, reverse=True) for way in ways)


def test_nnlshp_refuses_what_it_cannot_list():
    with pytest.raises(InputError, match="smaller max_per_pack, or algorithm 'optimum'"):
        nnlshp(np.ones(512, dtype=int), 512, 4)
