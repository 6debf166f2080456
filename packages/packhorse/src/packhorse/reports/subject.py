"""The model that is measured: the user's own, or random weights of a known geometry.

Peers read folders of Hugging Face only, so a model in another format, or one whose configuration or
vocabulary is given apart, is written as such a folder first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from packhorse import checkpoint
from packhorse.checkpoint import sources
from packhorse.errors import InputError
from packhorse.reports import random_model


class Subject(Protocol):
    """What a measurement says of its model."""

    @property
    def model(self) -> str: ...
    @property
    def config(self) -> str | None: ...  # a geometry, or the file of the model's configuration
    @property
    def vocab(self) -> str | None: ...
    @property
    def heads(self) -> int | None: ...
    @property
    def seed(self) -> int: ...


def folder(of: Subject, scratch: Path) -> Path:
    """A folder that every engine can read."""
    if of.config in random_model.CONFIGS:
        return random_model.write(of.config, scratch / "model", of.seed)
    if of.config and not Path(of.config).exists():
        known = ", ".join(random_model.CONFIGS)
        raise InputError(f"unknown configuration {of.config!r}; there are {known}, or a file")
    source = sources.find(of.model)
    given = of.config or of.vocab or of.heads
    if source.format == "safetensors" and source.root.is_dir() and not given:
        return source.root
    files = {"config": of.config, "vocab": of.vocab, "heads": of.heads}
    return checkpoint.write(scratch / "model", checkpoint.load(of.model, **files, dtype=None))


def name(of: Subject) -> str:
    """What it is called in a table."""
    return f"random weights, {of.config}" if of.config in random_model.CONFIGS else of.model
