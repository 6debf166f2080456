"""Low-rank adapters stored in a model's own file, one per task, and chosen by name.

Jina's embeddings v3 has them: the file holds a weight W, and A and B of every task, under the names
of torch's parametrizations. The weight for a task is W + (alpha / rank) · B·A (LoRA, Hu et al.
2021; A·B for embedding tables, which are stored transposed). The chosen adapter is added to the
weights while they are read, in fp32, so the model that runs is an ordinary one. Without a choice
the weights are W.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint import files
from packhorse.errors import CheckpointError, InputError
from packhorse.json_types import is_list

PART = re.compile(r"(.*)\.parametrizations\.(\w+)\.(original|0\.lora_A|0\.lora_B)")
NAMES = "lora_adaptations"  # key of the configuration


def merge(
    tensors: dict[str, Tensor], raw: Mapping[str, Any], adapter: str | None
) -> tuple[str, ...]:
    """Replace adapted weights in `tensors` by those of `adapter`; a note about what was chosen."""
    parts = {name: match for name in tensors if (match := PART.fullmatch(name))}
    names = _names(raw) if parts else ()
    if adapter is not None and adapter not in names:
        listed = f"it has {', '.join(names)}" if names else "it has none"
        raise InputError(f"--adapter (adapter=) is {adapter!r}, no adapter of the model; {listed}")
    for name, match in parts.items():
        if match[3] != "original":
            continue
        stem = name.removesuffix("original")
        weight = tensors.pop(name)
        a, b = (tensors.pop(f"{stem}0.lora_{kind}", None) for kind in "AB")
        if a is None or b is None:
            raise CheckpointError(f"{name} has no {stem}0.lora_A and lora_B beside it")
        if adapter is not None:
            weight = _adapted(name, weight, a, b, names, adapter, raw)
        tensors[f"{match[1]}.{match[2]}"] = weight
    if not parts:
        return ()
    chosen = f"adapter {adapter!r}" if adapter else "no adapter"
    return (f"{chosen} of {', '.join(names)}; choose another with --adapter NAME (adapter=)",)


def has_any(folder: Path) -> bool:
    """Does the configuration of a model name adapters?"""
    return NAMES in files.read_object(folder, "config.json", optional=True)


def _names(raw: Mapping[str, Any]) -> tuple[str, ...]:
    names: Any = raw.get(NAMES)
    if not is_list(names) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config: {NAMES} {names!r} does not name the adapters of the file")
    return tuple(map(str, names))


def _adapted(
    name: str,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    names: tuple[str, ...],
    adapter: str,
    raw: Mapping[str, Any],
) -> Tensor:
    """W + (alpha / rank) · B·A, in fp32 or wider."""
    alpha: Any = raw.get("lora_alpha", 1)
    shapes = f"{list(a.shape)} and {list(b.shape)} for {list(weight.shape)}"
    if a.ndim != 3 or b.ndim != 3 or not len(a) == len(b) == len(names):
        raise CheckpointError(f"{name}: adapters of {shapes} are not those of {len(names)} tasks")
    if type(alpha) not in (int, float):
        raise CheckpointError(f"config: lora_alpha {alpha!r} is not a number")
    number = names.index(adapter)
    first, second = (a, b) if a.shape[1] == weight.shape[0] else (b, a)
    if (first.shape[1], second.shape[2]) != weight.shape or first.shape[2] != second.shape[1]:
        raise CheckpointError(f"{name}: adapters of {shapes} do not fit")
    wide = weight if weight.element_size() == 8 else weight.float()
    change = first[number].to(wide.dtype) @ second[number].to(wide.dtype)
    return wide + alpha / first.shape[2] * change
