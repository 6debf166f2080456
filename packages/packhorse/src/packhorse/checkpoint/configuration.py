"""A model's configuration and vocabulary: passed, beside its weights, or inferred from shapes.

The shapes of a BERT's tensors show everything but the number of attention heads: twelve heads of 64
and six of 128 have the same weights and different results. So the user is asked for that number; it
is never guessed, and it cannot contradict a configuration that has one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint import files
from packhorse.checkpoint.names.configs import infer
from packhorse.checkpoint.names.families import BERT, family_of
from packhorse.errors import CheckpointError, InputError

CONFIGS = ("bert_config.json", "config.json")
HF_CONFIGS = CONFIGS[::-1]  # beside weights of transformers, its own name first
VOCABULARIES = ("tokenizer.json", "vocab.txt")
ConfigInput = str | Path | Mapping[str, Any] | None  # file or folder, mapping; None: look for one


def find(
    folder: Path,
    config: ConfigInput,
    heads: int | None,
    tensors: Mapping[str, Tensor],
    names: tuple[str, ...] = CONFIGS,
) -> dict[str, Any]:
    """The configuration as a foreign mapping; `tensors` have their canonical names."""
    if heads is not None and heads < 1:
        raise InputError(f"{heads} attention heads; there must be at least 1")
    path = locate(folder, config, names)
    if isinstance(config, Mapping) and config:
        raw = dict(config)
    elif path:
        raw = files.read_object(path.parent, path.name)
    else:
        raw = _infer(folder, heads, tensors)
    return raw if heads is None else _with_heads(raw, heads, tensors, path)


def locate(folder: Path, config: ConfigInput, names: tuple[str, ...] = CONFIGS) -> Path | None:
    """The file that the configuration is read from; None if there is none."""
    if not config:
        return _nearest(folder, names)
    return None if isinstance(config, Mapping) else _passed(config, CONFIGS)


def explain(error: CheckpointError, config: ConfigInput, path: Path | None) -> str:
    """The error's text; if it is about the configuration, with the file and what to do."""
    text = str(error)
    if path is None or not re.search(r"\bconfig", text):
        return text
    hints = [] if str(path) in text else [f"the configuration is {path}"]
    if not config:
        hint = "pass --config FILE (config=) for another"
        if "is missing" in text:
            hint += ", or --heads N (heads=) to take the rest from the shapes"
        hints.append(hint)
    return f"{text} ({'; '.join(hints)})" if hints else text


def _with_heads(
    raw: dict[str, Any], heads: int, tensors: Mapping[str, Tensor], path: Path | None
) -> dict[str, Any]:
    """The configuration with this number of heads; keys it lacks are inferred from the shapes."""
    family = family_of(raw)
    key = family.config["heads"]
    configured = raw.get(key)
    if configured not in (None, heads):
        raise InputError(
            f"--heads (heads=) is {heads}, but {path or 'the configuration'} says "
            f"{key} {configured!r}; leave --heads out, or pass another --config (config=)"
        )
    return {**(infer(tensors) if family is BERT else {}), **raw, key: heads}


def vocabulary(folder: Path, vocab: str | Path | None) -> Path | None:
    """The folder or file to read the tokenizer from; None if there is none."""
    if vocab:
        file = _passed(vocab, VOCABULARIES)
        return file if Path(vocab).expanduser().is_file() else file.parent
    path = _nearest(folder, VOCABULARIES)
    return path.parent if path else None


def _passed(path: str | Path, names: tuple[str, ...]) -> Path:
    """The file that a user passed, or the first of `names` in the folder that a user passed."""
    expanded = Path(path).expanduser()
    if expanded.is_file():
        return expanded
    for name in names:
        if (expanded / name).is_file():
            return expanded / name
    is_folder = expanded.is_dir()
    raise InputError(
        f"{path}: a folder without {' or '.join(names)}" if is_folder else f"{path}: no such file"
    )


def _nearest(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The first of `names` in the folder, else in its parent."""
    for place in (folder, Path(os.path.abspath(folder)).parent):
        for name in names:
            if files.exists(place, name):
                return place / name
    return None


def _infer(folder: Path, heads: int | None, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    inferred = infer(tensors)
    if inferred and heads:
        return inferred
    absent = f"there is no {' or '.join(CONFIGS)} in {folder} or above it"
    if not inferred:
        raise CheckpointError(f"{absent}; pass --config FILE (config=)")
    sizes = ", ".join(f"{key} {value}" for key, value in inferred.items() if isinstance(value, int))
    raise CheckpointError(
        f"{absent}; the shapes show {sizes}, but not the number of attention heads: "
        f"pass --config FILE (config=) or --heads N (heads=)"
    )
