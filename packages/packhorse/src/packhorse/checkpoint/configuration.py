"""A model's configuration and vocabulary: given, found beside its weights, or read off its shapes.

Everything but the number of attention heads shows in the shapes of a BERT's tensors. Heads do not:
twelve heads of 64 and six of 128 have the same weights and different results, so they are asked
for, never guessed; where a configuration says them, it cannot be talked over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint import files
from packhorse.checkpoint.names.families import BERT, family_of
from packhorse.checkpoint.names.inference import infer
from packhorse.errors import CheckpointError, InputError

CONFIGS = ("bert_config.json", "config.json")
HF_CONFIGS = CONFIGS[::-1]  # beside weights of transformers, its own first
VOCABULARIES = ("tokenizer.json", "vocab.txt")
Given = str | Path | Mapping[str, Any] | None


def find(
    folder: Path,
    given: Given,
    heads: int | None,
    tensors: Mapping[str, Tensor],
    names: tuple[str, ...] = CONFIGS,
) -> dict[str, Any]:
    """The configuration of tensors that have their canonical names, as a foreign mapping."""
    if heads is not None and heads < 1:
        raise InputError(f"{heads} attention heads; there must be at least 1")
    place = locate(folder, given, names)
    if isinstance(given, Mapping) and given:
        raw = dict(given)
    elif place:
        raw = files.read_object(place.parent, place.name)
    else:
        raw = _infer(folder, heads, tensors)
    return raw if heads is None else _with_heads(raw, heads, tensors, place)


def locate(folder: Path, given: Given, names: tuple[str, ...] = CONFIGS) -> Path | None:
    """The file that the configuration is read from; None where it is none."""
    if not given:
        return _beside(folder, names)
    return None if isinstance(given, Mapping) else _given(given, CONFIGS)


def explain(error: CheckpointError, given: Given, place: Path | None) -> str:
    """The error; if it is about the configuration, with the file at fault and what to do."""
    text = str(error)
    if place is None or not re.search(r"\bconfig", text):
        return text
    said = [] if str(place) in text else [f"the configuration is {place}"]
    if not given:
        said.append("pass --config FILE (config=) for another")
    if not given and "is missing" in text:
        said[-1] += ", or --heads N (heads=) to take the rest from the shapes"
    return f"{text} ({'; '.join(said)})" if said else text


def _with_heads(
    raw: dict[str, Any], heads: int, tensors: Mapping[str, Tensor], place: Path | None
) -> dict[str, Any]:
    """The number under the family's own key; what else is not said shows in the shapes."""
    family = family_of(raw)
    key = family.config["heads"]
    said = raw.get(key)
    if said not in (None, heads):
        raise InputError(
            f"--heads (heads=) is {heads}, but {place or 'the configuration'} says {key} {said!r}; "
            f"leave --heads out, or pass another --config (config=)"
        )
    return {**(infer(tensors) if family is BERT else {}), **raw, key: heads}


def vocabulary(folder: Path, given: str | Path | None) -> Path | None:
    """The folder or file to read the tokenizer from; None where there is none."""
    if given:
        file = _given(given, VOCABULARIES)
        return file if Path(given).expanduser().is_file() else file.parent
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
