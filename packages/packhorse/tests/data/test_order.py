"""Orders and divisions: every row once, at random, and shared out evenly."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.data.order import GOLDEN, by_count, by_tokens, mixed, permuted

# The first numbers of SplitMix64's authors' own generator, seeded with 0.
FROM_ZERO = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]


@given(st.integers(1, 3000), st.integers(0, 1 << 70), st.integers(0, 1 << 40))
def test_every_row_once(size: int, seed: int, epoch: int) -> None:
    result = permuted(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(result), np.arange(size))


@given(st.integers(1, 1 << 60), st.integers(0, 9), st.lists(st.integers(0, 1 << 60), min_size=1))
def test_any_place_can_be_asked_for_alone(size: int, seed: int, places: list[int]) -> None:
    at = np.array(places) % size
    result = permuted(at, size, seed, 0)
    assert all(0 <= row < size for row in result)
    assert [permuted(at[i : i + 1], size, seed, 0)[0] for i in range(len(at))] == result.tolist()
    assert len(set(result.tolist())) == len(set(at.tolist()))


def chi_square(counts: np.ndarray, expected: float) -> float:
    """How many standard deviations above what chance alone gives."""
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_are_equally_likely(size: int) -> None:
    expected, orders = 60, list(permutations(range(size)))
    seeds = range(expected * len(orders))
    result = Counter(tuple(permuted(np.arange(size), size, seed, 0).tolist()) for seed in seeds)
    assert chi_square(np.array([result[item] for item in orders]), expected) < 4


@pytest.mark.parametrize("size", [16, 23])
def test_any_two_rows_are_equally_often_at_any_two_places(size: int) -> None:
    """Pairs are what a batch sees: that two rows share one, epoch after epoch, must be chance."""
    table, drawn = np.zeros((size, size)), 3000
    pairs = np.zeros((size, size))
    for epoch in range(drawn):
        order = permuted(np.arange(size), size, 3, epoch)
        table[np.arange(size), order] += 1
        pairs[order[:-1], order[1:]] += 1
    assert chi_square(table, drawn / size) < 4
    off_diagonal = pairs[~np.eye(size, dtype=bool)]
    assert chi_square(off_diagonal, drawn / size) < 4
    # Control: an order that only begins elsewhere each time has every row everywhere, too.
    rolled = np.zeros((size, size))
    for epoch in range(drawn):
        order = np.roll(np.arange(size), permuted(np.zeros(1), size, 3, epoch)[0])
        rolled[order[:-1], order[1:]] += 1
    assert chi_square(rolled[~np.eye(size, dtype=bool)], drawn / size) > 100


def test_a_large_order_looks_like_a_shuffle() -> None:
    size = 50_000
    order, second = (permuted(np.arange(size), size, 1, epoch) for epoch in (0, 1))
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() / (size / 3) - 1) < 0.02
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.02
    assert abs(np.corrcoef(order, second)[0, 1]) < 0.02
    assert (order == second).sum() < 10
    # As many runs as a shuffle has: a place is a local peak in one case of three.
    peaks = (order[1:-1] > order[:-2]) & (order[1:-1] > order[2:])
    assert abs(peaks.mean() - 1 / 3) < 0.01


rows = st.lists(st.integers(1, 512), min_size=0, max_size=60)


@given(rows, st.integers(1, 9))
def test_a_division_gives_each_row_to_one_part(tokens: list[int], parts: int) -> None:
    weights = np.array(tokens, np.int64)
    for divide in (by_count, by_tokens):
        shares = divide(weights, parts)
        assert len(shares) == parts
        assert sorted(np.concatenate(shares).tolist()) == list(range(len(tokens)))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert all((np.diff(share) > 0).all() for share in shares)


@given(rows, st.integers(1, 9))
def test_token_balance_is_within_the_longest_row(tokens: list[int], parts: int) -> None:
    weights = np.array(tokens, np.int64)
    held = [int(weights[share].sum()) for share in by_tokens(weights, parts)]
    assert max(held) - min(held) <= max(tokens, default=0)


def test_token_balance_is_better_than_none(rng: np.random.Generator) -> None:
    tokens = rng.integers(1, 513, 256)

    def spread(shares: list[np.ndarray]) -> int:
        held = [int(tokens[share].sum()) for share in shares]
        return max(held) - min(held)

    assert spread(by_tokens(tokens, 8)) < 64 < spread(by_count(tokens, 8))


def test_keys_a_golden_step_apart_are_the_generators_numbers() -> None:
    assert mixed(GOLDEN * np.arange(1, 5, dtype=np.uint64)).tolist() == FROM_ZERO


def test_no_two_numbers_become_one() -> None:
    assert len(np.unique(mixed(np.arange(100_000, dtype=np.uint64)))) == 100_000
