"""What a runner says of itself: speed over the last seconds."""

from __future__ import annotations

import pytest

from packhorse.runtime.statistics import RECENT, BatchRecord, throughput


def ran(number: int, ended: float, used: int, tokens: int) -> BatchRecord:
    return BatchRecord(number, ended, ((used,),), tokens, 0.001, sequences=1, used=used)


def test_throughput_counts_what_was_somebodys_and_recent() -> None:
    batches = [ran(1, 90.0, 1000, 1000), ran(2, 96.0, 30, 64), ran(3, 99.0, 20, 64)]
    assert throughput(batches, 100.0, 5.0) == pytest.approx((30 + 20) / 5)
    assert throughput(batches, 200.0, 5.0) == 0.0
    assert throughput([], 100.0, 5.0) == 0.0


def test_throughput_of_many_small_batches_is_over_what_is_remembered() -> None:
    """100 batches a second of 10 tokens: the memory reaches back less than the five seconds."""
    batches = [ran(number, number / 100, 10, 10) for number in range(1000 - RECENT, 1000)]
    assert throughput(batches, 9.99, 5.0) == pytest.approx(1000)
