"""The online rules against their definitions, and on the load they were published with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import InputError
from packhorse.packing.online import POLICIES, OnlinePacker

CAPACITY = 20


def by_definition(policy, free, length):
    """The row a rule means, looking at every row."""
    fitting = [row for row, room in enumerate(free) if room >= length]
    if policy == "next_fit":
        fitting = [row for row in fitting if row == len(free) - 1]
    if policy == "best_fit":
        fitting.sort(key=lambda row: free[row])
    return fitting[0] if fitting else None


@pytest.mark.parametrize("policy", POLICIES)
@given(
    lengths=st.lists(st.integers(1, CAPACITY), max_size=80),
    rows=st.none() | st.integers(1, 9),
    max_sequences=st.none() | st.integers(1, 40),
    max_per_row=st.none() | st.integers(1, 4),
)
def test_does_what_its_rule_says(policy, lengths, rows, max_sequences, max_per_row):
    packer = OnlinePacker(CAPACITY, rows, max_sequences, max_per_row, policy)
    free, packs, arrivals = [], [], 0
    for length in lengths:
        room = [0 if len(pack) == max_per_row else free[row] for row, pack in enumerate(packs)]
        row = by_definition(policy, room, length)
        if row is None and len(free) != rows:
            row = len(free)
        if arrivals == max_sequences:
            row = None
        assert packer.add(length) == row
        if row is None:
            continue
        if row == len(free):
            free.append(CAPACITY)
            packs.append([])
        free[row] -= length
        packs[row].append(arrivals)
        arrivals += 1
        assert len(packer) == arrivals
    assert packer.flush() == packs
    assert len(packer) == 0 and packer.flush() == []


def test_the_definitions_differ():
    """The control: each rule goes its own way, so none can pass for another above."""
    ways = {}
    for policy in POLICIES:
        packer = OnlinePacker(10, rows=None, policy=policy)
        ways[policy] = [packer.add(length) for length in (5, 8, 2, 4)]
    assert ways == {
        "first_fit": [0, 1, 0, 2],
        "best_fit": [0, 1, 1, 0],
        "next_fit": [0, 1, 1, 2],
    }


@pytest.mark.parametrize(
    ("policy", "batches"), [("next_fit", 65), ("first_fit", 56), ("best_fit", 56)]
)
@pytest.mark.parametrize("max_sequences", [None, 40])
def test_batches_of_the_published_load(policy, batches, max_sequences):
    lengths = np.random.RandomState(2023).normal(128, 128, 1600).astype(int).clip(1, 256)
    packer = OnlinePacker(256, 16, max_sequences, policy=policy)
    packs = []
    for length in lengths.tolist():
        if packer.add(length) is None:
            packs.append(packer.flush())
            assert packer.add(length) == 0
    packs.append(packer.flush())
    assert len(packs) == batches
    assert sum(len(row) for batch in packs for row in batch) == 1600


def test_a_full_batch_may_still_take_a_shorter_sequence():
    packer = OnlinePacker(10, rows=1)
    assert [packer.add(length) for length in (6, 5, 4, 1)] == [0, None, 0, None]
    assert packer.flush() == [[0, 1]]
    assert packer.add(5) == 0


def test_many_rows_stay_findable():
    """The tree doubles many times: the last row with room must still be the one found."""
    packer = OnlinePacker(10, rows=None)
    for row in range(1000):
        assert packer.add(10 if row != 637 else 7) == row
    assert packer.add(4) == 1000
    assert packer.add(3) == 637
    assert packer.add(3) == 1000


@pytest.mark.parametrize("length", [0, -3, 11])
def test_refuses_an_impossible_length(length):
    packer = OnlinePacker(10, rows=2)
    with pytest.raises(InputError, match=f"{length} tokens cannot go into rows of 10"):
        packer.add(length)
    assert packer.flush() == []


@pytest.mark.parametrize("name", ["capacity", "rows", "max_sequences", "max_per_row"])
def test_refuses_a_limit_below_one(name):
    with pytest.raises(InputError, match=f"{name} must be at least 1, got 0"):
        OnlinePacker(**({"capacity": 8, "rows": 2} | {name: 0}))


def test_refuses_an_unknown_policy():
    with pytest.raises(InputError, match="known: first_fit, best_fit, next_fit"):
        OnlinePacker(8, 2, policy="worst_fit")
