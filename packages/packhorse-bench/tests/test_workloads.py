"""Mixes have the shape they claim, are the same for a seed, and become sequences exactly."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse.packing.histogram import histogram_of
from packhorse_bench import workloads


@pytest.mark.parametrize(
    ("mix", "longest", "mean", "full"),
    [("wikipedia", 512, 256, 0.234), ("squad", 384, 170, 0.01), ("normal", 256, 130, 0.16)],
)
def test_mix_has_the_stated_shape(mix: str, longest: int, mean: float, full: float) -> None:
    lengths = workloads.draw(mix, 50_000)
    assert lengths.max() == longest and lengths.min() >= 5
    assert lengths.mean() == pytest.approx(mean, rel=0.03)
    assert (lengths == longest).mean() == pytest.approx(full, abs=0.01)


@pytest.mark.parametrize(("mix", "name"), [("wikipedia", "wikipedia-512"), ("squad", "squad-384")])
def test_mix_is_shaped_like_the_real_one(mix: str, name: str, shared_data) -> None:
    from packhorse.reports.lengths import read_histogram

    real = read_histogram(f"{shared_data}/packing/histograms.json:{name}")
    drawn = histogram_of(workloads.draw(mix, 200_000), len(real))
    apart = np.abs(np.cumsum(real) / real.sum() - np.cumsum(drawn) / drawn.sum()).max()
    assert apart < 0.1


def test_a_seed_decides_everything() -> None:
    first, again = workloads.draw("squad", 100, seed=3), workloads.draw("squad", 100, seed=3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, workloads.draw("squad", 100, seed=4))
    a, b = (workloads.sequences(first[:5], 500, seed=seed) for seed in (1, 2))
    assert not np.array_equal(a[0].ids, b[0].ids)


def test_longest_stretches_the_mix() -> None:
    assert workloads.draw("normal", 1000, longest=64).max() == 64
    counts = histogram_of([10, 10, 90])
    drawn = workloads.sample(counts, 1000, longest=50)
    assert set(drawn.tolist()) == {10, 50}
    assert (drawn == 10).mean() == pytest.approx(2 / 3, abs=0.05)


def test_sequences_have_exactly_these_lengths() -> None:
    encodings = workloads.sequences(np.array([1, 2, 9]), 2000, ends=(7, 8))
    assert [len(sequence) for sequence in encodings] == [1, 2, 9]
    assert [s.ids[0] for s in encodings] == [7, 7, 7]
    assert [s.ids[-1] for s in encodings] == [7, 8, 8]
    assert all(1000 <= token < 2000 for token in encodings[2].ids[1:-1])


@pytest.mark.parametrize(
    ("mix", "count", "longest"), [("books", 5, None), ("squad", 0, None), ("squad", 5, 3)]
)
def test_nonsense_is_refused(mix: str, count: int, longest: int | None) -> None:
    with pytest.raises(InputError):
        workloads.draw(mix, count, longest=longest)
    with pytest.raises(InputError):
        workloads.sample(np.ones(3, int), 0)
