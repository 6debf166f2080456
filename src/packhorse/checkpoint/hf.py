"""Hugging Face folders: config.json, and safetensors in one file or in several with an index.

The safetensors format (8 bytes of length, a JSON header, the bytes) is read here rather than by its
library, which is used to write it and, in the tests, as the reference: a header must be bounded and
free of duplicates before it is believed, the file that was checked must be the one that is read,
and weights belong in memory of their own, where truncating the file cannot end the process. The
reader accepts a part of what the library accepts, and then the same tensors.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from packhorse.checkpoint import files
from packhorse.errors import CheckpointError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
)

HEADER_LIMIT = 16 << 20  # bytes
TENSOR_LIMIT = 10_000  # BERT-Large has 400
SHARD_LIMIT = 1_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a folder, as they are."""
    raw = files.read_object(folder, CONFIG)
    if files.exists(folder, WEIGHTS):
        return raw, read_tensors(folder, WEIGHTS)
    if files.exists(folder, INDEX):
        return raw, _read_shards(folder)
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    also = f"; {pickles[0]} is not read: save the model as safetensors" if pickles else ""
    raise CheckpointError(f"{folder}: there are no weights ({WEIGHTS}, or {INDEX}){also}")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """Every tensor from the shard that the index names; shards and index must agree exactly.

    `total_size` is not looked at: real indexes get it wrong, and nothing is allocated by it.
    """
    home = files.read_object(folder, INDEX).get("weight_map")
    where = folder / INDEX
    if not isinstance(home, dict) or not all(isinstance(shard, str) for shard in home.values()):
        raise CheckpointError(f"{where}: weight_map does not map tensors to files")
    shards = sorted(set(home.values()))
    if len(home) > TENSOR_LIMIT or len(shards) > SHARD_LIMIT:
        raise CheckpointError(f"{where}: {len(home)} tensors in {len(shards)} files are too many")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{where}: {shard!r} is not a safetensors file")
        found = read_tensors(folder, shard)
        for name in found:
            if home.get(name) != shard:
                says = f"is in {home[name]}" if name in home else "does not exist"
                raise CheckpointError(
                    f"{folder / shard}: {name!r} is here, but the index says it {says}"
                )
        tensors.update(found)
    if absent := home.keys() - tensors.keys():
        name = min(absent)
        raise CheckpointError(f"{folder / home[name]}: {name!r} is not here, as the index says")
    return tensors


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of one safetensors file."""
    with files.open_file(folder, name) as file:
        try:
            start, entries = _read_header(file)
            return {entry.name: _read_tensor(file, start, entry) for entry in entries}
        except CheckpointError as error:
            raise CheckpointError(f"{folder / name}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error


def _read_header(file: BinaryIO) -> tuple[int, list[_Entry]]:
    """Where the bytes begin, and the tensors in the order of their bytes."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"the file of {size} bytes is truncated or no safetensors file")
    if length > HEADER_LIMIT:
        raise CheckpointError(f"the header has {length} bytes, more than {HEADER_LIMIT}")
    entries = _parse_header(file.read(length))
    place = 0
    for entry in entries:
        if entry.begin != place:
            raise CheckpointError(f"{entry.name!r} begins at byte {entry.begin}, not {place}")
        place = entry.end
    if place != size - 8 - length:
        raise CheckpointError(f"the tensors have {place} bytes, the file {size - 8 - length}")
    return 8 + length, entries


def _parse_header(text: bytes) -> list[_Entry]:
    # Counted before parsing: a million entries would cost gigabytes to find out about.
    if text.count(b"{") > TENSOR_LIMIT + 2 or text.count(b"[") > 2 * TENSOR_LIMIT:
        raise CheckpointError(f"the header lists more than {TENSOR_LIMIT} tensors")
    if not text.startswith(b"{"):
        raise CheckpointError("the header is no JSON object")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is not valid JSON: {error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("the header's __metadata__ does not map names to texts")
    entries = [_parse_entry(name, fields) for name, fields in header.items()]
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise CheckpointError(f"{name!r} is there {times} times")
    return result


def _parse_entry(name: str, fields: Any) -> _Entry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{name!r} has the dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not (_counts(shape) and _counts(offsets) and len(shape) <= 8 and len(offsets) == 2):
        raise CheckpointError(
            f"{name!r} has the shape {shape!r} at {offsets!r}, which are no counts"
        )
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(f"{name!r} has {end - begin} bytes, its shape and dtype {expected}")
    return _Entry(name, DTYPES[dtype], tuple(shape), begin, end)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _read_tensor(file: BinaryIO, start: int, entry: _Entry) -> Tensor:
    buffer = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    file.seek(start + entry.begin)
    if len(buffer) and file.readinto(buffer.numpy()) != len(buffer):  # pyright: ignore
        raise CheckpointError(f"{entry.name!r} ends before its last byte")
    return buffer.view(entry.dtype).reshape(entry.shape)


def write(
    folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], max_shard_bytes: int
) -> None:
    """Write a configuration and tensors into a folder, in as many files as the limit asks for."""
    files.write_json(folder, CONFIG, dict(raw))
    shards = _divide(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, tensors)
        return
    home: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / shard, {name: tensors[name] for name in names})
        home.update(dict.fromkeys(names, shard))
    total = sum(tensor.nbytes for tensor in tensors.values())
    files.write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": home})


def _divide(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file, marked as transformers wants it."""
    from safetensors.torch import save_file

    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    shutil.copymode(path.with_name(CONFIG), path)  # the library lets no one but the owner read it


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of the tokenizer that are there."""
    for name in TOKENIZER:
        if files.exists(source, name):
            with files.open_file(source, name) as old, (target / name).open("wb") as new:
                shutil.copyfileobj(old, new)
