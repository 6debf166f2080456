"""Hugging Face folders: config.json, and weights in one file or in shards with an index.

Weights are safetensors or torch's `.bin`; a folder that has both is read from safetensors, which
cannot hold anything but tensors. An index and its shards must agree exactly. The format of a single
file is recognized by its bytes, not by its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint import files, torchbin
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.safetensors import HEADER_LIMIT, TENSOR_LIMIT, read_tensors
from packhorse.errors import CheckpointError
from packhorse.json_types import is_object

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
)
SHARD_LIMIT = 1_000  # files that an index may name; models of 100 GB have some 30

TensorsAndNotes = tuple[dict[str, Tensor], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _WeightFormat:
    """A format of weights in a folder: the names of its files, and its reader."""

    weights: str
    index: str
    suffix: str
    read: Callable[[Path, str], TensorsAndNotes]  # of one file

    def is_in(self, folder: Path) -> bool:
        return files.exists(folder, self.weights) or files.exists(folder, self.index)


KINDS = {  # the preferred format first
    "safetensors": _WeightFormat(
        WEIGHTS, INDEX, ".safetensors", lambda folder, name: (read_tensors(folder, name), ())
    ),
    "torch": _WeightFormat(
        "pytorch_model.bin", "pytorch_model.bin.index.json", ".bin", torchbin.read
    ),
}


def format_of(folder: Path) -> str | None:
    """The format of the weights in a folder, the preferred one of two; None if there are none."""
    return next((name for name, kind in KINDS.items() if kind.is_in(folder)), None)


def sniff(path: Path) -> str | None:
    """The format of the weights in a folder or file; a file's is recognized by its first bytes."""
    if path.is_dir():
        return format_of(path)
    with files.open_file(path.parent, path.name) as file:
        start = file.read(512)
    # safetensors: 8 bytes, the length of the JSON header, then the header itself.
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and length <= HEADER_LIMIT:
        return "safetensors"
    return "torch" if torchbin.looks_like(start) else None


def read(folder: Path) -> Contents:
    """The tensors and the configuration of a folder."""
    format = format_of(folder)
    if format is None:
        names = ", ".join(name for kind in KINDS.values() for name in (kind.weights, kind.index))
        raise CheckpointError(f"{folder}: there are no weights; looked for {names}")
    kind = KINDS[format]
    config, config_notes = _read_config(folder)
    if files.exists(folder, kind.weights):
        names = [kind.weights]
        tensors, notes = kind.read(folder, kind.weights)
    else:
        names, tensors, notes = _read_shards(folder, kind)
    for unused in KINDS.values():
        if unused is not kind and unused.is_in(folder):
            notes += (f"both {kind.suffix} and {unused.suffix} are there; took {kind.suffix}",)
    paths = tuple(folder / name for name in names)
    return Contents(format, folder, paths, tensors, config, notes=notes + config_notes)


def read_file(path: Path) -> Contents:
    """The tensors of one file of weights, and the configuration beside it."""
    format = sniff(path)
    if format is None:
        raise CheckpointError(f"{path} is neither a safetensors file nor one of torch")
    config, config_notes = _read_config(path.parent)
    tensors, notes = KINDS[format].read(path.parent, path.name)
    return Contents(format, path.parent, (path,), tensors, config, notes=notes + config_notes)


def _read_config(folder: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The configuration, or a note why it is not read: a user may pass another."""
    if not files.exists(folder, CONFIG):
        return None, ()
    try:
        return files.read_object(folder, CONFIG), ()
    except CheckpointError as error:
        return None, (f"left out: {error}",)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Only the tensors of a folder."""
    return read(folder).tensors


def _read_shards(
    folder: Path, kind: _WeightFormat
) -> tuple[list[str], dict[str, Tensor], tuple[str, ...]]:
    """Every tensor from the shard that the index names; shards and index must agree exactly.

    `total_size` is ignored: real indexes get it wrong, and nothing is allocated by it.
    """
    shard_of, shards = _read_index(folder, kind)
    tensors: dict[str, Tensor] = {}
    notes: tuple[str, ...] = ()
    for shard in shards:
        shard_tensors, shard_notes = kind.read(folder, shard)
        for name in shard_tensors:
            if shard_of.get(name) != shard:
                index = f"is in {shard_of[name]}" if name in shard_of else "does not exist"
                raise CheckpointError(
                    f"{folder / shard}: {name!r} is here, but the index says it {index}"
                )
        tensors.update(shard_tensors)
        notes += shard_notes
    if absent := shard_of.keys() - tensors.keys():
        name = min(absent)
        raise CheckpointError(f"{folder / shard_of[name]}: {name!r} is not here, as the index says")
    return shards, tensors, notes


def _read_index(folder: Path, kind: _WeightFormat) -> tuple[dict[str, str], list[str]]:
    """The shard of every tensor (`weight_map`), and the shards."""
    shard_of = files.read_object(folder, kind.index).get("weight_map")
    path = folder / kind.index
    if not is_object(shard_of) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise CheckpointError(f"{path}: weight_map does not map tensors to files")
    shards = sorted(set(shard_of.values()))
    if len(shard_of) > TENSOR_LIMIT or len(shards) > SHARD_LIMIT:
        raise CheckpointError(
            f"{path}: {len(shard_of)} tensors in {len(shards)} files are too many"
        )
    for shard in shards:
        if not shard.endswith(kind.suffix):
            raise CheckpointError(f"{path}: {shard!r} is not a {kind.suffix} file")
    return shard_of, shards


def write(
    folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], max_shard_bytes: int
) -> None:
    """Write a configuration and tensors into a folder, in shards if they exceed the limit."""
    files.write_json(folder, CONFIG, dict(raw))
    shards = _divide(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, tensors)
        return
    shard_of: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / shard, {name: tensors[name] for name in names})
        shard_of.update(dict.fromkeys(names, shard))
    total = sum(tensor.nbytes for tensor in tensors.values())
    files.write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": shard_of})


def _divide(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """The names of each shard: as many as fit the limit, at least one."""
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
    """Write one safetensors file with the metadata that transformers expects."""
    from safetensors.torch import (
        save_file,  # pyright: ignore[reportUnknownVariableType]  (PathLike without its parameter)
    )

    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    # The library makes it readable by its owner only; the configuration beside it is as it should.
    shutil.copymode(next(path.parent.glob("*.json")), path)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files that are present."""
    for name in TOKENIZER:
        if files.exists(source, name):
            with files.open_file(source, name) as old, (target / name).open("wb") as new:
                shutil.copyfileobj(old, new)
