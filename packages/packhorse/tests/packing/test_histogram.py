"""Plans and assignments: what a user asks for, gets, and is told when it cannot be."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import InputError
from packhorse.packing import assign, histogram_of, plan
from packhorse.packing.histogram import ALGORITHMS, verify

lengths_lists = st.lists(st.integers(1, 24), min_size=1, max_size=60)


def test_a_plan_and_its_figures():
    packing = plan([0, 0, 1, 0, 2, 0, 1, 1], capacity=10, max_per_pack=2)
    assert dict(packing.packs) == {(5, 5): 1, (7, 3): 1, (8,): 1}
    assert (packing.sequences, packing.tokens, packing.pack_count, packing.max_depth) == (
        5,
        28,
        3,
        2,
    )
    assert packing.efficiency == pytest.approx(28 / 30)
    assert packing.factor == pytest.approx(5 / 3)
    assert packing.lower_bound == 3
    assert packing.histogram == (0, 0, 1, 0, 2, 0, 1, 1, 0, 0)
    assert "histogram" not in repr(packing) and packing.seconds > 0


@given(lengths=lengths_lists, depth=st.none() | st.integers(1, 30))
@settings(max_examples=40)
def test_every_algorithm_packs_and_none_beats_the_optimum(lengths, depth):
    counts = histogram_of(lengths, 24)
    plans = {name: plan(counts, 24, depth, name) for name in ALGORITHMS if name != "nnlshp"}
    plans["nnlshp"] = plan(counts, 24, min(depth or 4, 4), "nnlshp")
    for name, packing in plans.items():
        verify(list(packing.packs), counts, 24, packing.max_per_pack or 24)
        assert packing.lower_bound <= packing.pack_count
        assert packing.sequences == len(lengths) and packing.tokens == sum(lengths)
        if packing.max_per_pack == depth:
            assert plans["optimum"].pack_count <= packing.pack_count, name
            assert packing.lower_bound <= plans["optimum"].lower_bound, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_question_gets_the_same_plan(rng, algorithm):
    counts = histogram_of(rng.integers(1, 33, 500), 32)
    assert plan(counts, 32, 3, algorithm) == plan(counts.tolist(), 32, 3, algorithm)


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ([((5, 5), 1), ((3,), 1)], "placed 3 of 4"),
        ([((5, 5), 1), ((3,), 3)], "placed 5 of 4"),
        ([((5, 3, 3), 1), ((5,), 1)], r"\(5, 3, 3\)"),
        ([((5, 5), 1), ((3, 3), 1), ((), 1)], r"\(\)"),
        ([((5, 5), 2), ((3, 3), 1), ((5, 5), -1)], "-1 packs"),
        ([((5, 5, 3), 1), ((3,), 1)], r"\(5, 5, 3\)"),
    ],
)
def test_verify_sees_a_broken_plan(broken, word):
    counts = np.array([0, 0, 2, 0, 2, 0, 0, 0, 0, 0])
    verify([((5, 5), 1), ((3, 3), 1)], counts, 10, 2)
    with pytest.raises(RuntimeError, match=word):
        verify(broken, counts, 10, 2)


@given(lengths=lengths_lists, depth=st.none() | st.integers(1, 4), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_assign_gives_every_sequence_one_place_in_the_plan(lengths, depth, seed):
    packing = plan(histogram_of(lengths, 24), 24, depth)
    packs = assign(packing, lengths, seed)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    result = Counter(tuple(lengths[index] for index in pack) for pack in packs)
    planned = Counter()
    for held, count in packing.packs:
        planned[held] += count
    assert result == planned
    assert len(packs) == packing.pack_count
    assert [pack.tolist() for pack in packs] == [packs[i].tolist() for i in range(len(packs))]


def test_assign_is_seeded(rng):
    lengths = rng.integers(1, 65, 2000)
    packing = plan(histogram_of(lengths, 64), 64)
    first, again, another = (
        assign(packing, lengths, 1),
        assign(packing, lengths, 1),
        assign(packing, lengths, 2),
    )
    assert (first.indices == again.indices).all() and (first.offsets == again.offsets).all()
    assert (first.indices != another.indices).mean() > 0.5
    order = [sum(lengths[pack]) for pack in first]
    assert order != sorted(order) and order != sorted(order, reverse=True)
    assert first[-1].tolist() == first[len(first) - 1].tolist()
    with pytest.raises(IndexError):
        first[len(first)]


def test_assign_takes_a_million(rng):
    lengths = np.clip(rng.normal(128, 128, 1_000_000).astype(int), 1, 256)
    packs = assign(plan(histogram_of(lengths), 256, algorithm="lpfhp"), lengths)
    assert (np.bincount(packs.indices, minlength=len(lengths)) == 1).all()
    assert np.add.reduceat(lengths[packs.indices], packs.offsets[:-1]).max() <= 256


@pytest.mark.parametrize("lengths", [[3, 3], [3, 3, 5, 5, 5], [3, 3, 4, 5]])
def test_assign_refuses_other_lengths(lengths):
    packing = plan(histogram_of([3, 3, 5, 5]), 10)
    with pytest.raises(InputError, match="plan again with plan"):
        assign(packing, lengths)


def test_histogram_of_counts():
    assert histogram_of([2, 2, 4]).tolist() == [0, 2, 0, 1]
    assert histogram_of(np.array([2, 2, 4], dtype=np.uint8), 6).tolist() == [0, 2, 0, 1, 0, 0]


@given(lengths=lengths_lists, depth=st.none() | st.integers(1, 4))
@settings(max_examples=25)
def test_lengths_get_packs_of_indices(lengths, depth):
    packs = plan(lengths=lengths, capacity=24, max_per_pack=depth)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[index] for index in pack) <= 24 and len(pack) <= (depth or 24)
    assert packs.plan == plan(histogram_of(lengths, 24), 24, depth)
    assert len(packs) == packs.plan.pack_count


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lengths_take_every_algorithm_and_kind_of_list(rng, algorithm):
    lengths = rng.integers(1, 33, 200)
    packs = plan(lengths=lengths, capacity=32, max_per_pack=3, algorithm=algorithm)
    assert packs.plan == plan(histogram_of(lengths, 32), 32, 3, algorithm)
    for same in (lengths.tolist(), tuple(lengths.tolist()), lengths.astype(np.uint8)):
        again = plan(lengths=same, capacity=32, max_per_pack=3, algorithm=algorithm)
        assert again.indices.tolist() == packs.indices.tolist()


def test_histogram_may_be_named():
    assert plan(histogram=[0, 2, 1], capacity=4) == plan([0, 2, 1], 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan(capacity=8), "needs lengths= .* or histogram="),
        (lambda: plan([1], 8, lengths=[1]), "not both"),
        (lambda: plan(lengths=[1]), "needs capacity="),
        (lambda: plan(lengths=[], capacity=8), "no lengths"),
        (lambda: plan(lengths=[3, -2, 4], capacity=8), r"lengths\[1\] is -2"),
        (lambda: plan(lengths=[3, 0], capacity=8), r"lengths\[1\] is 0"),
        (lambda: plan(lengths=[3, 10**15], capacity=8), "1 of 2 sequences are longer .* 8 tokens"),
        (lambda: plan(lengths=[[3, 4]], capacity=8), "flat list"),
        (lambda: plan(lengths=[[3], [4, 5]], capacity=8), "flat list"),
        (lambda: plan(lengths=[3.5], capacity=8), "whole numbers"),
        (lambda: plan(lengths=[3], capacity=0), "capacity must be at least 1"),
        (lambda: plan([0, 0], 8), "counts no sequence"),
        (lambda: plan([], 8), "counts no sequence"),
        (lambda: plan([1, -1], 8), "negative"),
        (lambda: plan([1, 0.5], 8), "whole numbers"),
        (lambda: plan([[1, 2]], 8), "flat list"),
        (lambda: plan([1, 0, 0, 2, 3], 4), "3 of 6 sequences are longer .* longest has 5"),
        (lambda: plan([1], 0), "capacity must be at least 1"),
        (lambda: plan([1], 2.5), "capacity must be a whole number"),
        (lambda: plan([1], 8, 0), "max_per_pack must be at least 1"),
        (lambda: plan([1], 8, "3"), "max_per_pack must be a whole number"),
        (lambda: plan([1], 8, algorithm="ffd"), "known: optimum, spfhp, lpfhp, nnlshp"),
        (lambda: histogram_of([]), "pass one or more"),
        (lambda: histogram_of([3, 0]), "below 1"),
        (lambda: histogram_of([3.0]), "whole numbers"),
        (lambda: histogram_of([3, 9], 8), "1 of 2 sequences are longer"),
    ],
)
def test_a_mistake_is_reported(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_importing_costs_nothing():
    script = (
        "import sys, packhorse.packing as packing\n"
        "assert 'numpy' not in sys.modules\n"
        "assert packing.plan([1, 2], 3).pack_count == 2\n"
        "packing.OnlinePacker\n"
        "assert not {'torch', 'scipy'} & set(sys.modules)\n"
        "try: packing.nothing\n"
        "except AttributeError: pass\n"
        "else: raise SystemExit('an unknown name was found')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_old_name_of_a_plan_still_works():
    from packhorse import packing

    with pytest.warns(DeprecationWarning, match="PackingPlan"):
        assert packing.Plan is packing.PackingPlan
    with pytest.raises(AttributeError, match="Plans"):
        _ = packing.Plans
