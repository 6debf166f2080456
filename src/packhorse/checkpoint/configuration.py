"""A model's configuration and vocabulary: given, found beside its weights, or read off its shapes.

Everything but the number of attention heads shows in the shapes of a BERT's tensors. Heads do not:
twelve heads of 64 and six of 128 have the same weights and different results, so they are asked
for, never guessed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint import files
from packhorse.checkpoint.names.inference import infer
from packhorse.errors import CheckpointError, InputError

CONFIGS = ("bert_config.json", "config.json")
VOCABULARIES = ("tokenizer.json", "vocab.txt")
Given = str | Path | Mapping[str, Any] | None


def find(
    folder: Path, given: Given, heads: int | None, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The configuration of tensors that have their canonical names, as a foreign mapping."""
    if heads is not None and heads < 1:
        raise InputError(f"{heads} attention heads; there must be at least 1")
    said = {} if heads is None else {"num_attention_heads": heads}
    if isinstance(given, Mapping):
        return {**given, **said}
    place = _given(given, CONFIGS) if given else _beside(folder, CONFIGS)
    if place:
        return {**files.read_object(place.parent, place.name), **said}
    return {**_infer(folder, heads, tensors), **said}


def vocabulary(folder: Path, given: str | Path | None) -> Path | None:
    """The folder or file to read the tokenizer from; None where there is none."""
    if given:
        return _given(given, VOCABULARIES)
    found = _beside(folder, VOCABULARIES)
    return found.parent if found else None


def _given(given: str | Path, names: tuple[str, ...]) -> Path:
    path = Path(given).expanduser()
    if path.is_file():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    what = f"a folder without {' or '.join(names)}" if path.is_dir() else "no such file"
    raise InputError(f"{given}: {what}")


def _beside(folder: Path, names: tuple[str, ...]) -> Path | None:
    """One of `names` in the folder, else in the one above."""
    for place in (folder, Path(os.path.abspath(folder)).parent):
        for name in names:
            if files.exists(place, name):
                return place / name
    return None


def _infer(folder: Path, heads: int | None, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    shown = infer(tensors)
    if shown and heads:
        return shown
    looked = f"there is no {' or '.join(CONFIGS)} in {folder} or above it"
    if not shown:
        raise CheckpointError(f"{looked}; pass --config FILE (config=)")
    sizes = ", ".join(f"{key} {value}" for key, value in shown.items() if isinstance(value, int))
    raise CheckpointError(
        f"{looked}; the shapes show {sizes}, but not the number of attention heads: "
        f"pass --config FILE (config=) or --heads N (heads=)"
    )
