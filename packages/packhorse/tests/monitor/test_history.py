"""Lines of blocks, and what is remembered for them."""

from __future__ import annotations

from packhorse.monitor.history import PLAIN, History, sparkline


def test_blocks_rise_with_the_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5, 1.0], most=1.0) == "▅█"
    assert sparkline([0, None, 70], blocks=PLAIN) == "_ #"
    assert sparkline([]) == "" and sparkline([None]) == " " and sparkline([0, 0]) == "▁▁"
    assert sparkline([5, -1], most=1.0) == "█▁", "what is beyond the ends is at them"


def test_the_last_values_of_those_that_are_still_seen() -> None:
    history = History(length=3)
    for value in range(5):
        history.add([("a", value), ("b", None)])
    assert history.of("a") == [2, 3, 4] and history.of("b") == [None, None, None]
    history.add([("b", 1.0)])
    assert history.of("a") == [] and history.of("b")[-1] == 1.0
