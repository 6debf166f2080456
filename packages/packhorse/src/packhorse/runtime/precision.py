"""Vectors in fewer bytes: one byte per number (int8, uint8) or one bit (binary, ubinary).

    ranges = calibrate(model.embed(sample))  # once, of texts like those of the collection
    np.save("ranges.npy", ranges)
    vectors = quantize(model.embed(texts), "int8", ranges)

The bytes are those of sentence-transformers' `quantize_embeddings` with the same ranges: 256 equal
steps between the least and the greatest value of each dimension, values beyond them clipped; a bit
is whether a number is above 0, eight to a byte with the first in the highest place. "binary" is
"ubinary" less 128, as signed bytes.

The ranges decide what a byte means, so vectors that are compared must share them. Where there are
none, `quantize` takes them from the vectors themselves, as sentence-transformers does, and a vector
then depends on its neighbors. A server cannot, nor can a file that is written in chunks: for them
`quantize_singly` takes `unit_ranges`, which depend on the number of dimensions alone.

Shapes: N vectors, E dimensions.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Literal

import numpy as np

from packhorse.errors import InputError

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS: tuple[Precision, ...] = ("float32", "int8", "uint8", "binary", "ubinary")
FEW_VECTORS = 100  # fewer calibrate badly: their ranges miss values that others have
# Greatest number of `unit_ranges`, in root mean squares of a vector's numbers. A step is then a
# sixteenth of one, and only outliers beyond eight are clipped.
UNIT_RANGE = 8.0


class CalibrationWarning(UserWarning):
    """Ranges were taken from few vectors, so that others will often lie beyond them."""


def calibrate(vectors: np.ndarray) -> np.ndarray:
    """Return the least and the greatest value of each dimension, float32 [2, E].

    `vectors` [N, E] should be of a few thousand texts like those that will be quantized.
    """
    return _ranges_of(_checked_vectors(vectors), stacklevel=3)


def quantize(
    vectors: np.ndarray, precision: Precision | str, ranges: np.ndarray | None = None
) -> np.ndarray:
    """Return [N, E] vectors with fewer bytes: [N, E] of int8 or uint8, or [N, E / 8] of bits.

    `ranges` [2, E], of `calibrate`, is for int8 and uint8; without it the vectors calibrate
    themselves, which needs at least two.
    """
    check_precision(precision)
    vectors = _checked_vectors(vectors)
    if precision == "float32":
        return vectors.astype(np.float32)
    if precision in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits ^ 0x80).view(np.int8)
    if ranges is None and len(vectors) == 0:
        return np.empty(vectors.shape, precision)
    ranges = _ranges_of(vectors, stacklevel=3) if ranges is None else check_ranges(ranges)
    if ranges.shape[1] != vectors.shape[1]:
        raise InputError(
            f"the ranges have {ranges.shape[1]} dimensions and the vectors {vectors.shape[1]}; "
            "calibrate with vectors of the same model and dimensions"
        )
    lowest = ranges[0]
    steps = (ranges[1] - lowest) / 255
    steps = np.where(steps == 0, 1, steps)  # a dimension that is the same in all vectors
    places = np.clip(np.floor((vectors - lowest) / steps), 0, 255)
    return places.astype(np.uint8) if precision == "uint8" else (places - 128).astype(np.int8)


def quantize_singly(
    vectors: np.ndarray, precision: Precision | str, ranges: np.ndarray | None = None
) -> np.ndarray:
    """Quantize [N, E] vectors so that the bytes of one do not depend on the others.

    As `quantize`, but int8 and uint8 without `ranges` are of the vectors scaled to length one, by
    `unit_ranges`.
    """
    if ranges is None and precision in ("int8", "uint8"):
        vectors = _checked_vectors(vectors)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.where(norms == 0, 1, norms)
        ranges = unit_ranges(vectors.shape[1])
    return quantize(vectors, precision, ranges)


def unit_ranges(width: int) -> np.ndarray:
    """Return ranges [2, E] for vectors of length one, without calibration.

    They are the same for all dimensions, and round to the nearest step: 0 becomes int8 0, and the
    greatest number, `UNIT_RANGE` / √E but at most 1, becomes 127. So dot products of the bytes are
    those of the vectors, times a constant.
    """
    step = min(1.0, UNIT_RANGE / math.sqrt(width)) / 127
    # `quantize` rounds down; lower by half a step, that is rounding to the nearest.
    ends = np.array([[-128.5 * step], [126.5 * step]], np.float32)
    return np.repeat(ends, width, axis=1)


def load_ranges(path: Path) -> np.ndarray:
    """Read ranges that `numpy.save` wrote."""
    try:
        # Never unpickled: a file of ranges may come from others.
        ranges = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not an array that numpy.save wrote: {error}") from error
    return check_ranges(ranges)


def check_precision(precision: str) -> None:
    """Raise `InputError` unless vectors can have this precision."""
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}; use one of {', '.join(PRECISIONS)}")


def check_ranges(ranges: np.ndarray) -> np.ndarray:
    """Return ranges as float32; raise `InputError` unless they are [2, E], ascending and finite."""
    ranges = np.asarray(ranges)
    if ranges.ndim != 2 or len(ranges) != 2 or ranges.dtype.kind != "f":
        raise InputError(
            f"ranges must be floats of shape [2, dimensions], as packhorse.runtime.calibrate "
            f"returns them, not {ranges.dtype} {list(ranges.shape)}"
        )
    if not (np.isfinite(ranges).all() and (ranges[0] <= ranges[1]).all()):
        raise InputError("ranges must be finite, the first row nowhere above the second")
    return ranges.astype(np.float32)


def _checked_vectors(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise InputError(
            f"vectors must be floats of shape [n, dimensions], not {vectors.dtype} "
            f"{list(vectors.shape)}"
        )
    if not np.isfinite(vectors).all():
        raise InputError("the vectors have numbers that are not finite")
    return vectors


def _ranges_of(vectors: np.ndarray, stacklevel: int) -> np.ndarray:
    if len(vectors) < 2:
        raise InputError(
            "one vector has no range; pass ranges=packhorse.runtime.calibrate(…) of many vectors"
        )
    if len(vectors) < FEW_VECTORS:
        message = (
            f"{len(vectors)} vectors calibrate badly; pass ranges=packhorse.runtime.calibrate(…) "
            f"of at least {FEW_VECTORS}"
        )
        warnings.warn(message, CalibrationWarning, stacklevel=stacklevel)
    return np.stack([vectors.min(axis=0), vectors.max(axis=0)]).astype(np.float32)
