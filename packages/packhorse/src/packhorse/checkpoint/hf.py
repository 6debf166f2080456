"""Hugging Face folders: config.json, and weights in one file or in several with an index.

Weights are safetensors, or torch's `.bin`; where a folder has both, safetensors, which is the same
in a format that cannot hold more. An index and its files must agree exactly. A file on its own is
known by its bytes, not by its name.
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

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
)
SHARD_LIMIT = 1_000

Weights = tuple[dict[str, Tensor], tuple[str, ...]]  # tensors, and notes


@dataclass(frozen=True, slots=True)
class _Kind:
    """A way to keep weights in a folder."""

    weights: str
    index: str
    suffix: str
    read: Callable[[Path, str], Weights]  # one file

    def is_in(self, folder: Path) -> bool:
        return files.exists(folder, self.weights) or files.exists(folder, self.index)


KINDS = {
    "safetensors": _Kind(
        WEIGHTS, INDEX, ".safetensors", lambda folder, name: (read_tensors(folder, name), ())
    ),
    "torch": _Kind("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin", torchbin.read),
}


def format_of(folder: Path) -> str | None:
    """The kind of weights in a folder, if there are any; of two the better."""
    return next((name for name, kind in KINDS.items() if kind.is_in(folder)), None)


def sniff(path: Path) -> str | None:
    """The kind of weights in a folder or in a file, told from the file's first bytes."""
    if path.is_dir():
        return format_of(path)
    with files.open_file(path.parent, path.name) as file:
        start = file.read(512)
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and length <= HEADER_LIMIT:
        return "safetensors"
    return "torch" if torchbin.looks_like(start) else None


def read(folder: Path) -> Contents:
    """What a folder holds, as it is."""
    format = format_of(folder)
    if format is None:
        looked = ", ".join(name for kind in KINDS.values() for name in (kind.weights, kind.index))
        raise CheckpointError(f"{folder}: there are no weights; looked for {looked}")
    kind = KINDS[format]
    config, unread = _read_config(folder)
    if files.exists(folder, kind.weights):
        names, (tensors, notes) = [kind.weights], kind.read(folder, kind.weights)
    else:
        names, tensors, notes = _read_shards(folder, kind)
    for other in KINDS.values():
        if other is not kind and other.is_in(folder):
            notes += (f"both {kind.suffix} and {other.suffix} are there; took {kind.suffix}",)
    paths = tuple(folder / name for name in names)
    return Contents(format, folder, paths, tensors, config, notes=notes + unread)


def read_file(path: Path) -> Contents:
    """What a file of weights holds, with the configuration beside it."""
    format = sniff(path)
    if format is None:
        raise CheckpointError(f"{path} is neither a safetensors file nor one of torch")
    config, unread = _read_config(path.parent)
    tensors, notes = KINDS[format].read(path.parent, path.name)
    return Contents(format, path.parent, (path,), tensors, config, notes=notes + unread)


def _read_config(folder: Path) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The configuration, or a note of why not: a user who passes another needs none here."""
    if not files.exists(folder, CONFIG):
        return None, ()
    try:
        return files.read_object(folder, CONFIG), ()
    except CheckpointError as error:
        return None, (f"left out: {error}",)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder alone, of whichever kind."""
    return read(folder).tensors


def _read_shards(folder: Path, kind: _Kind) -> tuple[list[str], dict[str, Tensor], tuple[str, ...]]:
    """Every tensor from the shard that the index names; shards and index must agree exactly.

    `total_size` is not looked at: real indexes get it wrong, and nothing is allocated by it.
    """
    home, shards = _read_index(folder, kind)
    tensors: dict[str, Tensor] = {}
    notes: tuple[str, ...] = ()
    for shard in shards:
        found, more = kind.read(folder, shard)
        for name in found:
            if home.get(name) != shard:
                says = f"is in {home[name]}" if name in home else "does not exist"
                raise CheckpointError(
                    f"{folder / shard}: {name!r} is here, but the index says it {says}"
                )
        tensors.update(found)
        notes += more
    if absent := home.keys() - tensors.keys():
        name = min(absent)
        raise CheckpointError(f"{folder / home[name]}: {name!r} is not here, as the index says")
    return shards, tensors, notes


def _read_index(folder: Path, kind: _Kind) -> tuple[dict[str, str], list[str]]:
    """The file of every tensor, and the files."""
    home = files.read_object(folder, kind.index).get("weight_map")
    where = folder / kind.index
    if not isinstance(home, dict) or not all(isinstance(shard, str) for shard in home.values()):
        raise CheckpointError(f"{where}: weight_map does not map tensors to files")
    shards = sorted(set(home.values()))
    if len(home) > TENSOR_LIMIT or len(shards) > SHARD_LIMIT:
        raise CheckpointError(f"{where}: {len(home)} tensors in {len(shards)} files are too many")
    for shard in shards:
        if not shard.endswith(kind.suffix):
            raise CheckpointError(f"{where}: {shard!r} is not a {kind.suffix} file")
    return home, shards


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
