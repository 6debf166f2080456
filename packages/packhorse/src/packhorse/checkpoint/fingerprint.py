"""The fingerprint of a model: short, stable, and equal for models that give the same vectors.

Vectors are stored for years, and nothing in them says which model computed them. A fingerprint
covers what decides them: weights, configuration, tokenizer, length limit, pooling, prompt, dtype
and version. It is made of these parts, so that of two fingerprints that differ one can see why.

Weights are digested while they are loaded, tensor by tensor, as float32 values under our own names:
later they are cast, joined and laid out for one processor. Hence the format of the file, its names
and its dtype do not matter. The checksum of a tensor is a crc32c, which takes a tenth of the time
of SHA-256 (10 GB/s): it shows every change of one weight and misses another tensor once in four
billion times, but it does not protect against forgery; `packhorse inspect` prints the SHA-256 of
files. What changes vectors only by rounding (device, kernel, batch) is no part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from packhorse import __version__, wire
from packhorse.checkpoint import retrieval, sentence
from packhorse.checkpoint.loading import Checkpoint
from packhorse.checkpoint.sentence import SentenceLayout
from packhorse.device import dtype_name
from packhorse.model.config import BertConfig
from packhorse.model.heads import Embed
from packhorse.model.vectors import Dense, UnitLength, VectorNorm
from packhorse.tokens import Tokenizer

DIGITS = 16  # hexadecimal, of a digest
CHUNK = 1 << 20  # bytes of a file per checksum
# Settings of training, which no result of a loaded model depends on.
TRAINING_SETTINGS = ("dropout", "attention_dropout")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What decides the vectors of a model, part by part; `str` gives the fingerprint itself."""

    weights: str
    config: str  # of encoder and heads: activation, number of heads, labels, sparse outputs …
    tokenizer: str
    max_length: int  # tokens; longer texts are cut
    pooling: str  # and the modules after it, in words
    prompt: str  # the text that goes before each text
    dtype: str
    version: str  # of Packhorse, without the patch: a release that moves vectors is a minor one

    def __str__(self) -> str:
        return digest(asdict(self))

    @property
    def parts(self) -> dict[str, Any]:
        """The parts by name, as JSON can hold them."""
        return asdict(self)

    def differences(self, other: Fingerprint) -> list[str]:
        """The names of the parts that differ."""
        return [name for name, value in self.parts.items() if value != other.parts[name]]


def make(
    *,
    weights: str,
    config: str,
    tokenizer: Tokenizer,
    max_length: int,
    embedder: Embed | None,
    truncate_dim: int | None,
    prompt: str,
    dtype: torch.dtype,
) -> Fingerprint:
    """The fingerprint of a model with this version of Packhorse."""
    return Fingerprint(
        weights=weights,
        config=config,
        tokenizer=tokenizer.digest[:DIGITS],
        max_length=max_length,
        pooling=_describe_pooling(embedder, truncate_dim),
        prompt=prompt,
        dtype=dtype_name(dtype),
        version=".".join(__version__.split(".")[:2]),
    )


def of_checkpoint(checkpoint: Checkpoint, tokenizer: Tokenizer, dtype: torch.dtype) -> Fingerprint:
    """The fingerprint that a checkpoint has when it runs in `dtype`, with its default prompt."""
    head = dict(checkpoint.model.heads).get("embed")
    return make(
        **digests(checkpoint),
        tokenizer=tokenizer,
        max_length=checkpoint.max_length,
        embedder=head if isinstance(head, Embed) else None,
        truncate_dim=sentence.comparing(checkpoint.layout).get("truncate_dim"),
        prompt=checkpoint.prompts.get(checkpoint.default_prompt or "", ""),
        dtype=dtype,
    )


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """The parts that are known only while a checkpoint is loaded: weights and configuration."""
    return {
        "weights": digest(
            [checkpoint.report.checksums, checkpoint.scales]
            if checkpoint.scales
            else checkpoint.report.checksums
        ),
        "config": digest(
            [
                _settings(checkpoint.config),
                checkpoint.problem,
                checkpoint.labels,
                *_retrieval(checkpoint.layout),
            ]
        ),
    }


def of_files(paths: Iterable[Path]) -> str:
    """The weights of a model that another runtime loads: a digest of its files."""
    checksums: list[list[int]] = []
    for path in paths:
        with path.open("rb") as file:
            chunks = iter(partial(file.read, CHUNK), b"")
            checksums.append([wire.crc32c(chunk) for chunk in chunks])
    return digest(checksums)


def digest(value: Any) -> str:
    """A short digest of a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _settings(config: BertConfig) -> dict[str, Any]:
    """The settings other than the defaults, so that a new setting changes no old fingerprint."""
    defaults = {field.name: field.default for field in fields(config)}
    return {
        name: value
        for name, value in asdict(config).items()
        if name not in TRAINING_SETTINGS and value != defaults[name]
    }


def _retrieval(layout: SentenceLayout | None) -> list[dict[str, Any]]:
    """The settings of sparse and multi-vector outputs; empty for models without them.

    The prompts of queries and documents are among them, for these outputs take them by themselves.
    """
    if layout is None or not (layout.splade or layout.multi or layout.m3):
        return []
    settings: dict[str, Any] = {"files": list(layout.m3)}
    if layout.splade:
        query = layout.splade.query
        settings["sparse"] = {
            **asdict(layout.splade),
            "query": query and of_files(retrieval.query_files(query)),
        }
    if layout.multi:
        settings["multi"] = asdict(layout.multi)
    prompts, _ = sentence.prompts(layout.settings)
    settings["prompts"] = {side: prompts.get(side, "") for side in ("query", "document")}
    return [settings]


def _describe_pooling(head: Embed | None, truncate_dim: int | None) -> str:
    """The head that makes vectors, in words; empty if a graph makes them, or there are none."""
    if head is None:
        return ""
    words = ["+".join(head.pooling)]
    if not head.include_prompt:
        words.append("without the prompt")
    words += [text for stage in head.stages if (text := _describe_stage(stage))]
    if head.normalize:
        words.append("normalize")
    if truncate_dim is not None:
        words.append(f"the first {truncate_dim}")
    return ", ".join(words)


def _describe_stage(stage: nn.Module) -> str:
    """One module after the pooling, in words; empty for dropout, which only training applies."""
    if isinstance(stage, Dense):
        residual = " with its input added" if stage.adds_input else ""
        return f"dense {stage.inputs} to {stage.outputs} {stage.activation_name}{residual}"
    if isinstance(stage, VectorNorm):
        return "layer norm"
    return "normalize" if isinstance(stage, UnitLength) else ""
