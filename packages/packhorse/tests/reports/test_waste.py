"""Padding counted against padding made."""

from __future__ import annotations

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse.reports import waste
from packhorse_bench import workloads


def brute(lengths: np.ndarray, batch_size: int) -> int:
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    return sum(len(batch) * max(batch.tolist()) for batch in batches)


@pytest.mark.parametrize("batch_size", [1, 3, 16, 1000])
def test_padded_tokens(batch_size: int) -> None:
    lengths = workloads.draw("normal", 100)
    assert waste.padded_tokens(lengths, batch_size) == brute(lengths, batch_size)


def test_every_way() -> None:
    lengths = workloads.draw("squad", 1000, longest=128)
    fixed, arrival, ordered, rows, flat = waste.measure(lengths, 128, 16)
    assert fixed.computed == 1000 * 128
    assert arrival.computed == brute(lengths, 16)
    assert flat.computed == lengths.sum() and flat.padding == 0
    assert fixed.computed >= arrival.computed >= ordered.computed >= flat.computed
    assert rows.computed % 128 == 0 and rows.computed >= flat.computed
    for row in (fixed, arrival, ordered, rows, flat):
        assert row.computed * (1 - row.padding) == pytest.approx(int(lengths.sum()))
        assert row.factor == pytest.approx(arrival.computed / row.computed)


def test_cost_follows_tokens() -> None:
    # 1000 tokens for 10 texts: a million texts are 1e8 tokens, at 1e4 a second 10,000 seconds.
    assert waste.cost(1000, 10, 1e4, 3.6) == pytest.approx(10.0)


def test_refusals() -> None:
    with pytest.raises(InputError, match="batch"):
        waste.measure(np.array([3, 4]), 8, 0)
    with pytest.raises(InputError, match="longer"):
        waste.measure(np.array([3, 9]), 8, 2)
