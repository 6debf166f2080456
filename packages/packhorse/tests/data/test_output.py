"""Rows as bytes: nothing is lost on the way, and what a format cannot hold is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.data.output import FORMATS, format_of, to_plain
from packhorse.errors import InputError, MissingExtra


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_nine_digits_are_enough(values: list[float]) -> None:
    array = np.array(values, np.float32)
    back = np.array(json.loads(json.dumps(to_plain(array))), np.float32)
    assert (back == array).all()


def test_eight_digits_are_not() -> None:
    values = np.nextafter(np.float32(1024.0), np.float32(2048.0), dtype=np.float32)
    assert np.float32(f"{values:.7g}") != values, "the control: fewer digits would lose something"


def test_plain_values() -> None:
    row = {
        "a": np.array([[0.1, np.nan]], np.float32),
        "b": (np.float64(0.1), np.int64(3), float("inf")),
        "c": {"d": None, "e": True, 5: "x"},
        "f": np.array([1, 2]),
        "g": np.array([1 / 3]),
    }
    assert to_plain(row) == {
        "a": [[0.100000001, None]],
        "b": [0.1, 3, None],
        "c": {"d": None, "e": True, "5": "x"},
        "f": [1, 2],
        "g": [1 / 3],
    }


def test_formats_are_named_by_suffix(tmp_path: Path) -> None:
    vectors, words = {"vector": ["float32"]}, {"masks": [[{"word": str}]]}
    assert format_of(tmp_path / "a.NPY", vectors) is FORMATS[".npy"]
    with pytest.raises(InputError, match=r"as \.csv; use one of \.npy, \.npz, \.jsonl, \.parquet"):
        format_of(tmp_path / "a.csv", vectors)
    with pytest.raises(InputError, match="npy holds one vector per text"):
        format_of(tmp_path / "a.npy", words)


def test_pyarrow_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"packhorse\[data\]"):
        format_of(Path("a.parquet"), {})
