"""What is shown of a run, on a terminal and elsewhere."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from packhorse.train import display
from packhorse.train.display import RunStatus, duration, evaluation_line, progress_line, watching

SHOWN = RunStatus(
    *(20, 100, 6.54321),
    accuracy=0.1234,
    sequences=640,
    sequences_per_second=1234.5,
    tokens_per_second=213_000.0,
    fill=0.9975,
    mfu=0.417,
    seconds_left=3723.0,
)


def test_the_line_tells_all() -> None:
    line = progress_line(SHOWN)
    for part in ("6.5432", "0.1234", "1,234.5 seq/s", "213,000 tok/s", "99.8% full", "MFU 41.7%"):
        assert part in line
    assert line.endswith("1:02:03 left")
    assert "MFU" not in progress_line(replace(SHOWN, mfu=None))
    assert "accuracy" not in progress_line(replace(SHOWN, accuracy=None))


def test_times() -> None:
    assert [duration(x) for x in (0, 59.6, 3599, 7325)] == ["0:00", "1:00", "59:59", "2:02:05"]


def test_elsewhere_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = SimpleNamespace(monotonic=iter(range(100)).__next__)  # threads need the real one
    monkeypatch.setattr(display, "time", clock)
    with watching(said.append, live=False) as watch:
        for step in range(1, 9):
            watch(replace(SHOWN, step=step))
        watch(replace(SHOWN, step=8, evaluation={"accuracy": 0.5}))
        watch(replace(SHOWN, step=100))
    assert len(said) == 4, said
    assert said[0].startswith("step 1 of 100: loss") and said[-1].startswith("step 100 of 100")
    assert said[-2] == "step 8, 640 sequences: accuracy 0.5"


def test_on_a_terminal_it_lives(capfd: pytest.CaptureFixture[str]) -> None:
    with watching(lambda line: pytest.fail("plain"), live=True) as watch:
        watch(SHOWN)
        watch(replace(SHOWN, evaluation={"f1[x]": 0.25}))
    found = " ".join(capfd.readouterr().err.split())
    assert "20/100" in found and "6.5432" in found
    assert evaluation_line(replace(SHOWN, evaluation={"f1[x]": 0.25})) in found  # no markup
