"""Vectors in the form that a client asks for: fewer bytes per number, base64, a prompt by purpose.

Shared by the dialects whose bodies name a number type (`output_dtype`, `embedding_types`) or what
the texts are for (`input_type`, `task`).

int8 and uint8 use the ranges of `--calibration`. Without it the ranges are fixed, so that a vector
does not depend on the other inputs of its request: see `runtime.precision.quantize_singly`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from packhorse.errors import InputError
from packhorse.runtime.precision import Precision, load_ranges, quantize_singly
from packhorse.serve.hosting import ServedModel, ServedModels

NumberType = Literal["float", "int8", "uint8", "binary", "ubinary"]
FloatType = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]
MAX_INLINE_BYTES = 1 << 18  # of vectors that are written as base64 on the event loop
BASE64_PART = 3 << 18  # bytes
Ranges = Mapping[str, np.ndarray]  # [2, dimensions] by the name of the model

# What a client may call a purpose, and the names of prompts that serve it, best first.
QUERY_PROMPTS = ("query", "search_query", "retrieval.query")
DOCUMENT_PROMPTS = ("document", "passage", "search_document", "retrieval.passage", "corpus")


def choose_prompt(model: ServedModel, purpose: str | None) -> str | None:
    """Return the name of the model's prompt for this purpose; None for its default prompt.

    A query or document for which the model has no prompt gets none at all ("", not the default),
    as in sentence-transformers. Any other purpose without a prompt changes nothing.
    """
    if purpose is None:
        return None
    names = (purpose,)
    for group in (QUERY_PROMPTS, DOCUMENT_PROMPTS):
        if purpose in group:
            names = (purpose, *group)
    prompts = model.encoder.prompts
    without = "" if len(names) > 1 else None
    return next((name for name in names if name in prompts), without)


def load_calibration(entries: Sequence[str], models: ServedModels) -> Ranges:
    """Read the files of `--calibration`: FILE for all models, NAME=FILE for one of them.

    Those of FILE are for models that are added later, too; they are under the name "".
    """
    ranges: dict[str, np.ndarray] = {}
    for entry in entries:
        name, _, file = entry.rpartition("=")
        array = load_ranges(Path(file))
        for model in models if not name else [models.named(name)]:
            ranges[model.name] = array
        if not name:
            ranges[""] = array
    return ranges


def quantize_vectors(
    model: ServedModel, vectors: Sequence[np.ndarray], numbers: NumberType, calibration: Ranges
) -> Sequence[np.ndarray]:
    """Return the vectors with numbers of this type."""
    if numbers == "float":
        return vectors
    precision: Precision = numbers
    ranges = calibration.get(model.name, calibration.get(""))
    width = len(vectors[0])
    if numbers in ("int8", "uint8") and ranges is not None and ranges.shape[1] != width:
        raise InputError(
            f"the ranges of --calibration are for {ranges.shape[1]} dimensions, these vectors have "
            f"{width}; ask for {ranges.shape[1]}, or calibrate the server with vectors of {width}"
        )
    return list(quantize_singly(np.stack(vectors), precision, ranges))


async def base64_texts(
    vectors: Sequence[np.ndarray], floats: FloatType = "float32", endianness: Endianness = "little"
) -> list[str]:
    """Return the bytes of each array as text; many are written in a thread, off the event loop."""
    if sum(vector.nbytes for vector in vectors) <= MAX_INLINE_BYTES:
        return [to_base64(vector, floats, endianness) for vector in vectors]
    return await asyncio.to_thread(lambda: [to_base64(v, floats, endianness) for v in vectors])


def to_base64(
    vector: np.ndarray, floats: FloatType = "float32", endianness: Endianness = "little"
) -> str:
    """Return the bytes of an array as text; those of floats in this type and byte order."""
    if vector.dtype.kind == "f":
        if floats == "bfloat16":
            vector = _bfloat16_bits(vector.astype(np.float32))
        else:
            vector = vector.astype(floats, copy=False)
        if endianness == "big":  # all processors that we run on are little-endian
            vector = vector.byteswap()
    content = memoryview(vector.tobytes())
    # In parts, because encoding holds Python's global lock; whole groups of three bytes each.
    parts = [
        base64.b64encode(content[begin : begin + BASE64_PART])
        for begin in range(0, len(content), BASE64_PART)
    ]
    return b"".join(parts).decode()


def _bfloat16_bits(vector: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, the nearest and of two the even one; as uint16."""
    bits = vector.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)
