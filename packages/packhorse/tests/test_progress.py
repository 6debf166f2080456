"""The progress display: time left, lines off a terminal, bars on one."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from packhorse import progress
from packhorse.progress import StageClock, duration, progress_display


class Clock:
    """Stands for `time`; seconds pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_durations() -> None:
    seconds = (0, 59.6, 3599, 7325)
    assert [duration(value) for value in seconds] == ["0:00", "1:00", "59:59", "2:02:05"]


def test_time_left_counts_from_where_the_work_began(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stage = StageClock()
    assert stage.time_left(0, 0) == "", "an unknown total"
    clock.now = 100.0  # what came before the total was known does not count
    assert stage.time_left(5000, 6000) == "", "a resumed run has no speed yet"
    clock.now = 110.0
    assert stage.time_left(5100, 6000) == "1:30 left"
    assert stage.time_left(6000, 6000) == ""


def test_a_log_gets_a_line_per_tenth_and_one_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    lines: list[str] = []
    with progress_display(lines.append) as show:
        for second in range(61):
            clock.now = float(second)
            show("training", 10_000 + second, 20_000, "loss 2.5")
    assert lines == [
        "training: 10,005 of 20,000 (50%), 2:46:35 left, loss 2.5",
    ]
    clock.now += 10.0
    with progress_display(lines.append) as show:
        show("reading", 0, 50)
        clock.now += progress.PAUSE
        show("reading", 20, 50)
        show("reading", 30, 50)  # a tenth more, but no pause
        clock.now += progress.PAUSE
        show("writing", 1, 4)  # another stage starts anew
    assert lines[1:] == ["reading: 20 of 50 (40%), 0:08 left", "writing: 1 of 4 (25%)"]


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_display() as show:
        show("reading [b]", 10, 10, "three documents [/b]")
        show("writing", 1, 4)
        show("writing", 2, 4)
        sys.stderr.write("a note meanwhile\n")
    drawn = terminal.getvalue()
    assert "reading [b]" in drawn and "10/10" in drawn, "names are not markup"
    assert "2/4" in drawn and "0:00 left" in drawn
    assert drawn.count("a note meanwhile") == 1
    last = drawn[drawn.rindex("reading") :]
    assert "three documents" not in last, "the detail is that of the latest stage"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
