"""The bench of porting: its ways train the same model to the same weights."""

from __future__ import annotations

import pytest

from packhorse.errors import InputError
from packhorse_bench import porting


def test_rows_tell_speed_and_that_the_numbers_agree():
    progress: list[tuple[int, int]] = []
    setup = porting.PortSetup(batch=2, iterations=2, steps=4, repeats=2, device="cpu")
    rows = porting.measure(setup, lambda count, total: progress.append((count, total)))
    assert [row.way for row in rows] == ["plain loop", "port", "port, traced"]
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]
    plain, *ports = rows
    assert plain.over_plain is None and plain.largest_difference is None
    for row in ports:
        assert row.largest_difference == 0  # to the bit
        assert row.over_plain == pytest.approx(plain.step_us / row.step_us)
        assert row.images_per_second == pytest.approx(2 / row.step_us * 1e6)
    table = porting.table(rows)
    assert len(table.rows) == 3 and table.rows[0][-1].strip() == "-"


def test_half_a_call_is_refused():
    with pytest.raises(InputError, match="no multiple of --iterations 50"):
        porting.measure(porting.PortSetup(steps=60))
    with pytest.raises(InputError, match="at least 1"):
        porting.measure(porting.PortSetup(repeats=0))
