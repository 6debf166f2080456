"""Read a GGUF file of llama.cpp: an encoder's weights, its configuration and its pooling.

Numbers in F32, F16, BF16 and Q8_0 are read here; the other quantized types by the package `gguf`,
which llama.cpp's own converter uses. `names.gguf` knows what its keys and tensors are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from packhorse.checkpoint import files
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.names import gguf as names
from packhorse.errors import CheckpointError, MissingExtra
from packhorse.gguf import MAGIC, GgufFile, StoredGguf, read_header

FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
Q8_0 = 8
Q8_NUMBERS = 32  # in a block
Q8_BYTES = 34


def sniff(path: Path) -> bool:
    """Does a file begin as GGUF does?"""
    try:
        with files.open_file(path.parent, path.name) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (CheckpointError, OSError):
        return False


def read(path: Path) -> Contents:
    """All tensors under llama.cpp's names; quantized ones as float32."""
    with files.open_file(path.parent, path.name) as file:
        try:
            header = read_header(file)
            _check(header)
            config = names.config(header.metadata, header.tensors)
            tensors = {name: _load(file, stored) for name, stored in header.tensors.items()}
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    notes = tuple(_notes(header))
    return Contents("gguf", path.parent, (path,), tensors, config=config, notes=notes)


def pooling(path: Path) -> str | None:
    """How the model's vectors are pooled; None if the file does not say."""
    with files.open_file(path.parent, path.name) as file:
        try:
            return names.pooling(read_header(file).metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__


def has_tokenizer(path: Path) -> bool:
    """Does the file hold a vocabulary?"""
    with files.open_file(path.parent, path.name) as file:
        return "tokenizer.ggml.tokens" in read_header(file).metadata


def _check(header: GgufFile) -> None:
    """Raise unless each tensor is in the file, and none overlaps another."""
    end = 0
    for stored in sorted(header.tensors.values(), key=lambda stored: stored.begin):
        if stored.begin < end:
            raise CheckpointError(f"{stored.name!r} overlaps the tensor before it")
        end = stored.begin + _bytes(stored)
        if end > header.size:
            raise CheckpointError(
                f"{stored.name!r}: byte {stored.begin}: {end - header.size} bytes are missing: "
                f"the file is truncated"
            )


def _bytes(stored: StoredGguf) -> int:
    """The bytes that a tensor takes; raises for a kind of number that is not known."""
    if stored.kind in FLOATS:
        return stored.count * FLOATS[stored.kind].itemsize
    block, size = (Q8_NUMBERS, Q8_BYTES) if stored.kind == Q8_0 else _block(stored)
    if stored.shape[-1] % block:
        raise CheckpointError(
            f"{stored.name!r}: rows of {list(stored.shape)} are no blocks of {block} numbers"
        )
    return stored.count // block * size


def _block(stored: StoredGguf) -> tuple[int, int]:
    """The numbers in a block of a quantized tensor, and the bytes of one."""
    library = _library()
    try:
        return library.GGML_QUANT_SIZES[library.GGMLQuantizationType(stored.kind)]
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{stored.name!r} has numbers of the unknown type {stored.kind}"
        ) from error


def _library() -> Any:
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra("gguf", "gguf") from error
    return gguf  # pyright: ignore[reportUnknownVariableType]


def _load(file: BinaryIO, stored: StoredGguf) -> Tensor:
    buffer = torch.empty(_bytes(stored), dtype=torch.uint8)
    file.seek(stored.begin)
    if file.readinto(buffer.numpy()) != len(buffer):  # pyright: ignore
        raise CheckpointError(f"{stored.name!r}: the file ends before its last byte")
    if stored.kind in FLOATS:
        return buffer.view(FLOATS[stored.kind]).reshape(stored.shape)
    if stored.kind == Q8_0:  # blocks of a float16, the scale, and 32 whole numbers
        blocks = buffer.view(-1, Q8_BYTES)
        scales = blocks[:, :2].contiguous().view(torch.float16).float()
        return (blocks[:, 2:].view(torch.int8).float() * scales).reshape(stored.shape)
    library = _library()
    kind = library.GGMLQuantizationType(stored.kind)
    try:
        values = library.dequantize(buffer.reshape(*stored.shape[:-1], -1).numpy(), kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{stored.name!r} is {kind.name}, which the package gguf cannot dequantize; pass a "
            f"file of F16 or Q8_0"
        ) from error
    return torch.tensor(values, dtype=torch.float32).reshape(stored.shape)


def _notes(header: GgufFile) -> Iterator[str]:
    quantized = [stored.kind for stored in header.tensors.values() if stored.kind not in FLOATS]
    for kind, count in sorted(Counter(quantized).items()):
        name = "Q8_0" if kind == Q8_0 else _library().GGMLQuantizationType(kind).name
        yield f"{count} tensors were dequantized from {name} to float32"
    yield "GGUF does not say which GELU a model has: it is read as the exact one"
