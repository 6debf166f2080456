"""What is in a checkpoint of any format, and whether it would run here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse import wire
from packhorse.checkpoint import sources
from packhorse.checkpoint.configuration import Given
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.loading import Checkpoint, load
from packhorse.errors import PackhorseError
from packhorse.model.config import BertConfig

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor, under its name in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: int
    nonfinite: int
    crc32c: str  # of its values, row by row, little-endian: the same in every format


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file of weights."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Inspection:
    """All that `packhorse inspect` shows."""

    path: str
    format: str
    runs: bool
    why_not: str  # empty where it runs
    family: str
    config: dict[str, Any]  # sizes and constants; empty where they are not known
    gelu: str  # erf or tanh; empty where it does not run or has another activation
    gelu_reason: str
    heads: tuple[str, ...]
    labels: tuple[str, ...]
    max_length: int
    parameters: int
    nonfinite: int
    step: int | None
    slots: dict[str, int]  # optimizer state: how many tensors of each kind
    files: tuple[FileFacts, ...]
    notes: tuple[str, ...]
    tensors: tuple[TensorFacts, ...] = field(repr=False)


def inspect(
    model: str | Path,
    *,
    config: Given = None,
    heads: int | None = None,
    gelu: str | None = None,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> Inspection:
    """Read a checkpoint and say what it holds."""
    source = sources.find(model)
    contents = source.read()
    advance = progress or (lambda done, total: None)
    tensors = _tensors(contents.tensors, advance)
    given = {"config": config, "heads": heads, "gelu": gelu, "ignore": ignore}
    made, why_not = _try(source, contents, given)
    return Inspection(
        path=str(source.path),
        format=source.format,
        runs=made is not None,
        why_not=why_not,
        family=str(made.raw.get("model_type") or "bert") if made else "",
        config=_told(made.config) if made else {},
        gelu=made.gelu.form if made else "",
        gelu_reason=made.gelu.why if made else "",
        heads=tuple(made.model.heads) if made else (),
        labels=made.labels if made else (),
        max_length=made.max_length if made else 0,
        parameters=sum(facts.values for facts in tensors),
        nonfinite=sum(facts.nonfinite for facts in tensors),
        step=contents.step,
        slots=contents.left_out,
        files=tuple(_file(path) for path in contents.files),
        notes=made.notes if made else contents.notes,
        tensors=tensors,
    )


def _told(config: BertConfig) -> dict[str, Any]:
    """As the files say it; attention dropout is a setting of training here."""
    return {name: value for name, value in asdict(config).items() if name != "attention_dropout"}


def _try(
    source: sources.Source, contents: Contents, given: dict[str, Any]
) -> tuple[Checkpoint | None, str]:
    try:
        made = load(source, contents=contents, **given, dtype=None, allow_nonfinite=True)
    except PackhorseError as error:
        return None, str(error)
    return made, ""


def _tensors(tensors: Mapping[str, Tensor], advance: Progress) -> tuple[TensorFacts, ...]:
    facts = []
    for done, (name, tensor) in enumerate(tensors.items(), 1):
        finite = tensor.isfinite().sum() if tensor.is_floating_point() else tensor.numel()
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        facts.append(
            TensorFacts(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                values=tensor.numel(),
                nonfinite=tensor.numel() - int(finite),
                crc32c=f"{wire.crc32c(data.data):08x}",
            )
        )
        advance(done, len(tensors))
    return tuple(facts)


def _file(path: Path) -> FileFacts:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(path.name, path.stat().st_size, digest)
