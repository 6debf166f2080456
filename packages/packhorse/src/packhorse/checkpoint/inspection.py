"""Describe a checkpoint of any format: its tensors and files, and whether it would run here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from packhorse.checkpoint import fingerprint, sources
from packhorse.checkpoint.configuration import ConfigInput
from packhorse.checkpoint.contents import checksum
from packhorse.checkpoint.fingerprint import Fingerprint
from packhorse.checkpoint.loading import Checkpoint, load
from packhorse.checkpoint.loading import tokenizer as open_tokenizer
from packhorse.device import DTYPES
from packhorse.errors import CheckpointError, PackhorseError
from packhorse.model.config import BertConfig

Progress = Callable[[int, int], None]  # called with tensors read so far, and all


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor, under its name in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: int
    nonfinite: int
    crc32c: str


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file of weights."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Inspection:
    """Everything that `packhorse inspect` shows."""

    path: str
    format: str
    runs: bool
    why_not: str  # empty if it runs
    family: str
    config: dict[str, Any]  # sizes and constants; empty if they are not known
    gelu: str  # erf or tanh; empty if it does not run or has another activation
    gelu_reason: str
    heads: tuple[str, ...]
    labels: tuple[str, ...]
    max_length: int
    parameters: int
    nonfinite: int
    step: int | None
    slots: dict[str, int]  # optimizer state: number of tensors by kind
    files: tuple[FileFacts, ...]
    notes: tuple[str, ...]
    fingerprints: dict[str, str]  # by dtype; empty if it does not run or has no tokenizer
    fingerprint_parts: dict[str, Any]  # those that do not depend on the dtype
    tensors: tuple[TensorFacts, ...] = field(repr=False)


def inspect(
    model: str | Path,
    *,
    config: ConfigInput = None,
    vocab: str | Path | None = None,
    heads: int | None = None,
    gelu: str | None = None,
    ignore: Sequence[str] = (),
    adapter: str | Path | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Read a checkpoint, try to load it, and describe both."""
    source = sources.find(model)
    contents = source.read()
    tensors = _tensors(contents.tensors, progress or (lambda count, total: None))
    checkpoint: Checkpoint | None = None
    why_not = ""
    try:
        checkpoint = load(
            source,
            contents=contents,
            config=config,
            vocab=vocab,
            heads=heads,
            gelu=gelu,
            ignore=ignore,
            adapter=adapter,
            dtype=None,
            allow_nonfinite=True,
        )
    except PackhorseError as error:
        why_not = str(error)
    fingerprints = _fingerprints(checkpoint) if checkpoint else {}
    return Inspection(
        path=str(source.path),
        format=source.format,
        runs=checkpoint is not None,
        why_not=why_not,
        family=str(checkpoint.raw.get("model_type") or "bert") if checkpoint else "",
        config=_file_config(checkpoint.config) if checkpoint else {},
        gelu=checkpoint.gelu.form if checkpoint else "",
        gelu_reason=checkpoint.gelu.reason if checkpoint else "",
        heads=tuple(checkpoint.model.heads) if checkpoint else (),
        labels=checkpoint.labels if checkpoint else (),
        max_length=checkpoint.max_length if checkpoint else 0,
        parameters=sum(facts.values for facts in tensors),
        nonfinite=sum(facts.nonfinite for facts in tensors),
        step=contents.step,
        slots=contents.left_out,
        files=tuple(_file(path) for path in contents.files),
        notes=checkpoint.notes if checkpoint else contents.notes,
        fingerprints={dtype: str(fingerprint) for dtype, fingerprint in fingerprints.items()},
        fingerprint_parts=_common_parts(fingerprints.values()),
        tensors=tensors,
    )


def _fingerprints(checkpoint: Checkpoint) -> dict[str, Fingerprint]:
    """The fingerprint in each dtype; none without a tokenizer, and a damaged one is not opened."""
    try:
        tokenizer = open_tokenizer(checkpoint)
    except CheckpointError:
        return {}
    return {
        name: fingerprint.of_checkpoint(checkpoint, tokenizer, DTYPES[name])
        for name in ("fp32", "bf16", "fp16")
    }


def _common_parts(fingerprints: Iterable[Fingerprint]) -> dict[str, Any]:
    parts = next((fingerprint.parts for fingerprint in fingerprints), dict[str, Any]())
    return {name: value for name, value in parts.items() if name != "dtype"}


def _file_config(config: BertConfig) -> dict[str, Any]:
    """The fields that files have; attention dropout is a setting of training here."""
    return {name: value for name, value in asdict(config).items() if name != "attention_dropout"}


def _tensors(tensors: Mapping[str, Tensor], progress: Progress) -> tuple[TensorFacts, ...]:
    facts: list[TensorFacts] = []
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        finite = tensor.isfinite().sum() if tensor.is_floating_point() else tensor.numel()
        facts.append(
            TensorFacts(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                values=tensor.numel(),
                nonfinite=tensor.numel() - int(finite),
                crc32c=checksum(tensor),
            )
        )
        progress(number, len(tensors))
    return tuple(facts)


def _file(path: Path) -> FileFacts:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileFacts(path.name, path.stat().st_size, digest)
