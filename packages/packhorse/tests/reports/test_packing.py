"""Rows of all algorithms at all depths, against one bound a depth."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse.packing.histogram import histogram_of, plan
from packhorse.reports import packing
from packhorse_bench import workloads


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    return histogram_of(workloads.draw("squad", 5000, longest=64), 64)


def test_every_algorithm_at_every_depth(counts: np.ndarray) -> None:
    steps = []
    rows = packing.compare(counts, 64, depths=(2, None), progress=lambda *at: steps.append(at))
    cases = [(row.max_per_pack, row.algorithm) for row in rows]
    assert cases == [(depth, name) for depth in (2, None) for name in packing.ALGORITHMS]
    assert steps == [(i, 8) for i in range(1, 9)]
    for row in rows:
        if row.problem is None:
            assert row.packs >= row.lower_bound > 0
            assert row.gap == pytest.approx(row.packs / row.lower_bound - 1)
            assert row.factor == pytest.approx(counts.sum() / row.packs)


def test_rows_of_a_depth_share_the_best_bound(counts: np.ndarray) -> None:
    rows = packing.compare(counts, 64, ("optimum", "spfhp"), (3,))
    assert rows[0].lower_bound == rows[1].lower_bound == plan(counts, 64, 3).lower_bound
    assert rows[0].gap <= rows[1].gap
    alone = plan(counts, 64, 3, "spfhp").lower_bound
    assert rows[1].lower_bound >= alone  # the obvious bound, which the optimum's replaced


def test_what_cannot_be_planned_is_a_row() -> None:
    counts = histogram_of(workloads.draw("wikipedia", 100), 512)
    (row,) = packing.compare(counts, 512, ("nnlshp",), (None,))
    assert row.packs == 0 and "nnlshp" in str(row.problem)


@pytest.mark.parametrize(
    ("capacity", "algorithms", "depths"),
    [(20, ("optimum",), (3,)), (64, ("best",), (3,)), (64, ("optimum",), (0,))],
)
def test_a_wrong_question_is_an_error(
    counts: np.ndarray, capacity: int, algorithms: tuple[str, ...], depths: tuple[int, ...]
) -> None:
    with pytest.raises(InputError):
        packing.compare(counts, capacity, algorithms, depths)
