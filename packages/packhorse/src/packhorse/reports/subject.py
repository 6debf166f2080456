"""The model of a measurement: the user's own, or random weights of a known size.

Other libraries read only Hugging Face folders, so a model in another format, or one whose
configuration or vocabulary is in another place, is written as such a folder first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from packhorse import checkpoint
from packhorse.checkpoint import sources
from packhorse.errors import InputError
from packhorse.reports import random_model


class MeasuredModel(Protocol):
    """What a measurement states about its model."""

    @property
    def model(self) -> str: ...
    @property
    def config(self) -> str | None: ...  # a key of `random_model.CONFIGS`, or a file
    @property
    def vocab(self) -> str | None: ...
    @property
    def heads(self) -> int | None: ...
    @property
    def seed(self) -> int: ...


def folder(model: MeasuredModel, scratch: Path) -> Path:
    """Return a folder that every library reads, written below `scratch` if there is none yet."""
    if model.config in random_model.CONFIGS:
        return random_model.write(model.config, scratch / "model", model.seed, model.vocab)
    if model.config and not Path(model.config).exists():
        known = ", ".join(random_model.CONFIGS)
        raise InputError(f"unknown configuration {model.config!r}; there are {known}, or a file")
    source = sources.find(model.model)
    has_own_files = not (model.config or model.vocab or model.heads)
    if source.format == "safetensors" and source.root.is_dir() and has_own_files:
        return source.root
    loaded = checkpoint.load(
        model.model, config=model.config, vocab=model.vocab, heads=model.heads, dtype=None
    )
    return checkpoint.write(scratch / "model", loaded)


def name(model: MeasuredModel) -> str:
    """Return the name of the model in a table."""
    if model.config in random_model.CONFIGS:
        return f"random weights, {model.config}"
    return model.model
