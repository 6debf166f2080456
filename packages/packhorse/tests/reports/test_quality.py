"""Sides are judged alike: what is counted, compared and shown."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from packhorse import __version__
from packhorse.reports.quality import SAME, EngineScore, difference, measure, ratio, table


def side(seconds: float, **metrics: float) -> EngineScore:
    return EngineScore("transformers", "5", metrics, 100, seconds)


def test_the_clock_runs_while_texts_are_read() -> None:
    calls: list[int] = []

    def read(texts: Sequence[Any], role: Any = None, progress: Any = None) -> np.ndarray:
        calls.append(len(texts))
        warnings.warn(f"{len(texts)} texts", stacklevel=1)
        time.sleep(0.02)
        return np.zeros((len(texts), 2), np.float32)

    reading = 0.0

    def task(read: Any, progress: Any) -> dict[str, float]:
        nonlocal reading
        begun = time.perf_counter()
        score = float(read(["a", "b"])[0, 0] + read(["c"], "query")[0, 0])
        reading = time.perf_counter() - begun
        time.sleep(0.1)  # judging is not reading
        return {"accuracy": score}

    with pytest.warns(UserWarning) as caught:
        score = measure("packhorse", read, task, ["x"] * 50)
    assert [str(warning.message) for warning in caught] == ["2 texts", "1 texts"]
    assert calls == [32, 2, 1] and score.texts == 3  # the first is to warm up
    assert 0.04 <= score.seconds <= reading and score.texts_per_second == 3 / score.seconds
    assert score.version == __version__ and score.metrics == {"accuracy": 0}


def test_how_far_apart_and_how_much_faster() -> None:
    sides = [side(2, a=0.5, b=0.7), side(5, a=0.5, b=0.70004)]
    assert difference(sides) == pytest.approx(4e-5) and (difference(sides) or 1) < SAME
    assert ratio(sides) == 2.5
    assert difference(sides[:1]) is None and ratio(sides[:1]) is None
    assert (difference([side(1, a=0.1), side(1, a=0.1001)]) or 0) > SAME


def test_the_table() -> None:
    shown = table([side(2, cosine_spearman=0.86718), side(5, cosine_spearman=0.8672)])
    assert [name.strip() for name in shown.columns] == ["measure", *["transformers 5"] * 2]
    rows = {name: [cell.strip() for cell in cells] for name, *cells in shown.rows}
    assert rows["cosine spearman"] == ["0.8672", "0.8672"]
    assert rows["texts/s"] == ["50.0", "20.0"] and rows["times ours"] == ["1.00", "2.50"]
