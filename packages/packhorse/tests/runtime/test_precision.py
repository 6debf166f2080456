"""Vectors in fewer bytes: sentence-transformers' `quantize_embeddings` is the measure."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse.runtime.precision import (
    PRECISIONS,
    CalibrationWarning,
    calibrate,
    load_ranges,
    quantize,
    unit_ranges,
)


@pytest.fixture(scope="module")
def theirs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sentence_transformers")
        from sentence_transformers.util.quantization import quantize_embeddings
    return quantize_embeddings


def some_vectors(rng: np.random.Generator, count: int, width: int = 96) -> np.ndarray:
    """Vectors with a dimension that is the same in all, zeros, and one outlier."""
    vectors = rng.normal(size=(count, width)).astype(np.float32)
    vectors[:, 3] = 0.25
    vectors[1:3, 5:9] = 0
    vectors[0, 7] = 40
    return vectors


@pytest.mark.parametrize("width", [96, 13])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_are_theirs(
    theirs: Any, rng: np.random.Generator, precision: Any, width: int
) -> None:
    sample = some_vectors(rng, 300, width)
    vectors = 1.3 * some_vectors(rng, 120, width)  # some lie beyond the ranges of the sample
    for options in ({}, {"ranges": calibrate(sample)}):
        expected = theirs(vectors, precision, **options)
        actual = quantize(vectors, precision, **options)
        assert actual.dtype == expected.dtype
        assert (actual == expected).all()
    expected = theirs(vectors, precision, calibration_embeddings=sample)
    assert (quantize(vectors, precision, calibrate(sample)) == expected).all()
    empty = quantize(vectors[:0], precision)
    assert (empty.dtype, empty.shape) == (expected.dtype, (0, expected.shape[1]))


def test_few_vectors_warn(rng: np.random.Generator) -> None:
    vectors = some_vectors(rng, 20)
    with pytest.warns(CalibrationWarning, match="20 vectors calibrate badly"):
        ranges = calibrate(vectors)
    with pytest.warns(CalibrationWarning, match="20 vectors calibrate badly"):
        itself = quantize(vectors, "int8")
    assert (quantize(vectors, "int8", ranges) == itself).all()


def test_ranges_are_saved_and_read(rng: np.random.Generator, tmp_path: Path) -> None:
    ranges = calibrate(some_vectors(rng, 100))
    np.save(tmp_path / "ranges.npy", ranges)
    assert (load_ranges(tmp_path / "ranges.npy") == ranges).all()
    (tmp_path / "text").write_text("no array")
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    for name in ("text", "objects.npy", "missing"):
        with pytest.raises(InputError, match=r"not an array that numpy\.save wrote"):
            load_ranges(tmp_path / name)


def test_refusals(rng: np.random.Generator) -> None:
    vectors = some_vectors(rng, 100)
    ranges = calibrate(vectors)
    wrong: list[tuple[Any, str, Any, str]] = [
        (vectors, "int4", None, "precision is 'int4'; use one of float32, int8"),
        (vectors[:1], "int8", None, "one vector has no range"),
        (vectors[0], "uint8", ranges, "vectors must be floats of shape"),
        (quantize(vectors, "int8"), "int8", None, r"not int8 \[100, 96\]"),
        (vectors * np.nan, "binary", None, "not finite"),
        (vectors, "int8", ranges[:, :5], "5 dimensions and the vectors 96"),
        (vectors, "int8", ranges[::-1], "nowhere above"),
        (vectors, "int8", ranges * np.inf, "finite"),
        (vectors, "int8", ranges[0], r"shape \[2, dimensions\]"),
    ]
    for given_vectors, precision, given_ranges, message in wrong:
        with pytest.raises(InputError, match=message):
            quantize(given_vectors, precision, given_ranges)


@pytest.mark.parametrize("width", [8, 384, 1024])
def test_unit_ranges_keep_dot_products(rng: np.random.Generator, width: int) -> None:
    vectors = rng.normal(size=(200, width)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    step = min(1, 8 / width**0.5) / 127
    signed = quantize(vectors, "int8", unit_ranges(width)).astype(np.float64)
    assert abs(signed * step - vectors).max() <= step * 0.501
    assert abs((signed @ signed.T) * step**2 - vectors @ vectors.T).max() < 0.02
    unsigned = quantize(vectors, "uint8", unit_ranges(width)).astype(np.float64)
    assert (unsigned - 128 == signed).all()
    ends = np.zeros((2, width), np.float32)
    ends[1, :2] = [1, -1]
    assert quantize(ends, "int8", unit_ranges(width))[:, :3].tolist() == [
        [0, 0, 0],
        [127, -127 if width == 8 else -128, 0],
    ]
