"""The arithmetic of rows that lie end to end, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.data.packed.packs import cumulative, index_ranges


def test_cumulative_has_the_begin_and_the_end() -> None:
    assert cumulative([3, 0, 2]).tolist() == [0, 3, 3, 5]
    assert cumulative([]).tolist() == [0]


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_runs_are_the_ranges_one_behind_the_other(dtype: type) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 5, 40).astype(dtype)
    starts = rng.integers(0, 1 << 17, 40)
    ranges = [range(s, s + n) for s, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
    assert index_ranges(starts, sizes).tolist() == [place for item in ranges for place in item]
