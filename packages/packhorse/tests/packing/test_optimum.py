"""The optimum against brute force where that is possible, and against its own bound where not."""

import json
import time
from functools import cache
from itertools import combinations_with_replacement, count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from packhorse.packing import optimum as module
from packhorse.packing.histogram import verify
from packhorse.packing.optimum import CuttingStock, classes, optimum, price, relax, simple_bound
from packhorse.packing.published import lpfhp, total

UNLIMITED = 10_000
ENOUGH = 1000  # linear programs, more than any of these needs


def histogram_of(lengths, capacity):
    return np.bincount(lengths, minlength=capacity + 1)[1:]


def fewest_packs(lengths, capacity, depth):
    """Exhaustive bin packing: the first sequence shares a pack with some of the others."""

    @cache
    def solve(rest):
        if not rest:
            return 0
        return 1 + min(
            solve(others) for others in after_one_pack(rest[1:], capacity - rest[0], depth - 1)
        )

    def after_one_pack(rest, room, more):
        yield rest
        for index, length in enumerate(rest):
            if more and length <= room:
                skipped, later = rest[:index], rest[index + 1 :]
                for remaining in after_one_pack(later, room - length, more - 1):
                    yield skipped + remaining

    return solve(tuple(sorted(lengths, reverse=True)))


def strategies_of(lengths, capacity, depth):
    for parts in range(1, depth + 1):
        for slots in combinations_with_replacement(range(len(lengths)), parts):
            if lengths[list(slots)].sum() <= capacity:
                yield slots


tiny = st.integers(4, 20).flatmap(
    lambda capacity: st.tuples(
        st.just(capacity),
        st.lists(st.integers(1, capacity), min_size=1, max_size=8),
        st.integers(1, 8),
    )
)


@given(tiny)
def test_between_its_bound_and_one_above_the_true_optimum(problem):
    capacity, lengths, depth = problem
    histogram = histogram_of(lengths, capacity)
    packs, bound, _ = optimum(histogram, capacity, depth)
    verify(packs, histogram, capacity, depth)
    truth = fewest_packs(lengths, capacity, depth)
    assert simple_bound(histogram, capacity, depth) <= bound <= truth <= total(packs) <= truth + 1


def test_a_bound_from_worths_too_high_would_be_seen():
    """The control of the test above: a strategy worth more than 1 breaks the bound."""
    lengths = [5, 5, 5, 4, 4, 4, 3, 3, 3]
    histogram = histogram_of(lengths, 12)
    stock = CuttingStock(classes(histogram), 12, 3)
    _, _, duals, _ = relax(stock, stock.demand(histogram), ENOUGH)
    assert stock.bound(histogram, duals) <= fewest_packs(lengths, 12, 3)
    assert stock.bound(histogram, 1.5 * duals) > fewest_packs(lengths, 12, 3)


@given(
    lengths=st.sets(st.integers(1, 15), min_size=1, max_size=6),
    depth=st.integers(1, 6),
    data=st.data(),
)
def test_price_finds_the_worthiest_strategy(lengths, depth, data):
    stock = CuttingStock(np.array(sorted(lengths, reverse=True)), 15, depth)
    duals = np.array([data.draw(st.integers(0, 20)) / 16 for _ in lengths])
    worthiest, result = price(stock, duals)
    strategies = list(strategies_of(stock.lengths, 15, depth))
    assert worthiest == pytest.approx(max(duals[list(slots)].sum() for slots in strategies))
    for index, row in enumerate(result):
        slots = sorted(int(part) for part in row if part < len(duals))
        assert tuple(slots) in strategies and index in slots
        with_it = [duals[list(another)].sum() for another in strategies if index in another]
        assert duals[slots].sum() == pytest.approx(max(with_it))


@given(
    histogram=st.lists(st.integers(0, 1000), min_size=16, max_size=16).filter(any).map(np.array),
    depth=st.integers(1, 5),
)
@settings(max_examples=30)
def test_the_relaxation_is_solved_as_if_all_strategies_were_listed(histogram, depth):
    stock = CuttingStock(classes(histogram), 16, depth)
    demand = stock.demand(histogram)
    slots, uses, duals, _ = relax(stock, demand, ENOUGH)
    strategies = list(strategies_of(stock.lengths, 16, depth))
    matrix = np.zeros((len(demand), len(strategies)))
    for column, strategy in enumerate(strategies):
        np.add.at(matrix[:, column], list(strategy), 1)
    answer = linprog(np.ones(len(strategies)), A_ub=-matrix, b_ub=-demand)
    # The loop may stop as soon as rounding up closes the gap.
    assert answer.fun - 1e-6 <= uses.sum() <= max(np.ceil(demand @ duals), answer.fun) + 1e-3
    assert demand @ duals <= answer.fun * (1 + 1e-9)
    supply = np.cumsum((slots @ uses) - demand)  # a slot may hold what is shorter
    assert supply.min() >= -1e-6 * demand.sum()


def real(shared_data, name):
    text = (shared_data / "packing" / "histograms.json").read_text()
    return np.array(json.loads(text)["histograms"][name])


def assert_close(histogram, depth):
    packs, bound, complete = optimum(histogram, len(histogram), depth)
    assert complete
    verify(packs, histogram, len(histogram), depth)
    gap = total(packs) - bound
    assert 0 <= gap <= (6e-5 * bound if histogram.sum() > 1e6 else max(2, 0.003 * bound))
    return bound


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8, 16, UNLIMITED])
def test_squad(shared_data, depth):
    assert_close(real(shared_data, "squad-384"), depth)


@pytest.mark.parametrize(("depth", "bound"), [(2, 10_099_081), (3, 8_143_829), (8, 8_135_727)])
def test_wikipedia(shared_data, depth, bound):
    assert assert_close(real(shared_data, "wikipedia-512"), depth) == bound


@pytest.mark.slow
@pytest.mark.parametrize("depth", [4, 16, UNLIMITED])
def test_wikipedia_at_more_depths(shared_data, depth):
    assert assert_close(real(shared_data, "wikipedia-512"), depth) == 8_135_727


@pytest.mark.parametrize(
    ("capacity", "lengths"),
    [
        (512, [1]),
        (512, [512] * 7),
        (100, [40] * 25),  # two a pack, though tokens alone would ask for fewer packs
        (512, [3] * 1000),
        (512, [500, 500, 300, 212, 7, 7, 5]),
        (5000, [7, 11, 600, 601]),
        (90, [30, 31, 32, 33] * 50),
        (1, [1] * 3),
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 3, UNLIMITED])
def test_odd_histograms(capacity, lengths, depth):
    assert_close(histogram_of(lengths, capacity), depth)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [30, 300, 3000, 300_000])
@pytest.mark.parametrize("depth", [2, 3, 4, 8, 16, UNLIMITED])
def test_random_histograms(rng, sequences, depth):
    for low, high in [(1, 512), (100, 200), (200, 512)]:
        assert_close(histogram_of(rng.integers(low, high + 1, sequences), 512), depth)


def test_thinned_lengths_cost_quality_but_not_truth(rng, monkeypatch):
    histogram = histogram_of(rng.integers(20, 120, 5000), 256)
    packs, bound, _ = optimum(histogram, 256, 4)
    monkeypatch.setattr(module, "CLASSES", 20)
    coarse_packs, coarse_bound, _ = optimum(histogram, 256, 4)
    verify(coarse_packs, histogram, 256, 4)
    assert len(classes(histogram)) <= 20
    assert (
        coarse_bound
        <= bound
        <= total(packs)
        <= total(coarse_packs)
        <= total(lpfhp(histogram, 256, 4))
    )
    assert total(coarse_packs) <= 1.05 * bound


@pytest.mark.parametrize("effort", [1, 2])
def test_out_of_effort_is_no_worse_than_lpfhp_and_says_so(rng, effort):
    histogram = histogram_of(rng.integers(50, 400, 20_000), 512)
    packs, bound, complete = optimum(histogram, 512, 3, effort)
    verify(packs, histogram, 512, 3)
    assert not complete
    assert simple_bound(histogram, 512, 3) <= bound <= total(packs)
    assert total(packs) <= total(lpfhp(histogram, 512, 3))
    assert optimum(histogram, 512, 3).complete


def test_no_clock_decides(rng, monkeypatch):
    """A machine a million times slower finds the same packs."""
    histogram = histogram_of(rng.integers(50, 400, 2_000), 512)
    expected = optimum(histogram, 512, 3)
    ticks = count(step=10**6)
    for clock in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: float(next(ticks)))
    assert optimum(histogram, 512, 3) == expected


def test_squad_at_its_bound(shared_data):
    """The figure that an independent solver of the linear program finds, 40,195, every time."""
    packs, bound, complete = optimum(real(shared_data, "squad-384"), 384, 3)
    assert (total(packs), bound, complete) == (40_195, 40_195, True)


@pytest.mark.slow
def test_a_long_capacity_is_packed_in_bounded_time(rng):
    lengths = np.clip(rng.lognormal(np.log(1024), 1, 200_000).astype(int), 1, 8192)
    histogram = histogram_of(lengths, 8192)
    packs, bound, _ = optimum(histogram, 8192, 8)
    verify(packs, histogram, 8192, 8)
    assert bound <= total(packs) <= total(lpfhp(histogram, 8192, 8))
