"""Open a checkpoint of any format as a model that runs, strictly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from packhorse import attention
from packhorse.attention import Kernel
from packhorse.checkpoint import (
    activation,
    configuration,
    files,
    hf,
    ignoring,
    names,
    sentence,
    sources,
)
from packhorse.checkpoint.activation import Gelu
from packhorse.checkpoint.building import build
from packhorse.checkpoint.configuration import Given
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.names import tf1
from packhorse.checkpoint.placing import Report, insist, place
from packhorse.checkpoint.sources import Source
from packhorse.errors import CheckpointError
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.tokens import Tokenizer


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model with its weights, and all that its files say about how to use it."""

    config: BertConfig
    model: Model = field(repr=False)
    vocabulary: Path | None  # the tokenizer's folder or file
    name: str
    max_length: int
    labels: tuple[str, ...] = ()
    problem: str = "single_label"  # or multi_label, regression
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    format: str = "safetensors"
    notes: tuple[str, ...] = ()  # what its reader had to do or to leave out
    report: Report = field(default_factory=Report, repr=False)
    gelu: Gelu = field(default_factory=Gelu)
    raw: dict[str, Any] = field(default_factory=dict, repr=False)  # the configuration as read
    layout: sentence.Layout | None = field(default=None, repr=False)


def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of the model; like its weights, its files are the folder's own."""
    where = checkpoint.vocabulary
    if where is None:
        raise CheckpointError(
            f"{checkpoint.name} has no tokenizer.json and no vocab.txt beside its weights; "
            f"copy the model's there, or pass --vocab FILE (vocab=)"
        )
    if where.is_dir():
        for name in hf.TOKENIZER:
            files.inside(where, name)
    return Tokenizer.load(where, checkpoint.max_length, vocab_size=checkpoint.config.vocab_size)


def read(path: str | Path, *, slots: bool = False) -> Contents:
    """All that a checkpoint holds, under the names it has there; `slots`: the optimizer's too."""
    return sources.find(path).read(slots=slots)


def load(
    model: str | Path | Source,
    *,
    contents: Contents | None = None,
    config: Given = None,
    vocab: str | Path | None = None,
    heads: int | None = None,
    vocab_size: int | None = None,
    max_positions: int | None = None,
    repeat_positions: bool = False,
    gelu: str | None = None,
    ignore: Sequence[str] = (),
    kernel: Kernel | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
    allow_nonfinite: bool = False,
) -> Checkpoint:
    """The model of a path or of a hub id `org/name[@revision]`, ready to run.

    config, vocab: files to use instead of those beside the weights. heads: attention heads, where
    no file says. vocab_size, max_positions: pad or crop these tables, with a warning; positions
    beyond those stored only as repetitions of them (repeat_positions). gelu: "erf" or "tanh", where
    neither a graph nor the configuration says which GELU it is. ignore: patterns (`fnmatch`) of
    tensors that are no part of the model. dtype: None keeps that of the file. contents: what was
    read of it already; its tensors are taken out.
    """
    source = model if isinstance(model, Source) else sources.find(model)
    contents = source.read() if contents is None else contents
    try:
        ignored = ignoring.take_out(contents.tensors, ignore)
        found, form = _name(source, contents, config, heads, gelu)
        ignoring.check(ignored, found)
        if vocab_size or max_positions:
            found = names.resize(
                found,
                vocab_size=vocab_size,
                max_positions=max_positions,
                repeat_positions=repeat_positions,
            )
        tied = names.tied(found)
        where = configuration.vocabulary(source.folder, vocab)
        checkpoint = _build(found, tied, source.layout, where, kernel)
        table = names.table(found.family, tied) | (source.layout.table if source.layout else {})
        report = place(checkpoint.model, found, table, torch.device(device), dtype, ignored)
        insist("the weights hold", [] if allow_nonfinite else report.blemishes(dtype))
    except CheckpointError as error:
        origin = configuration.locate(source.folder, config, _configs(source))
        said = configuration.explain(error, config, origin)
        raise CheckpointError(f"{source.path}: {said}") from error.__cause__
    notes = contents.notes + ignoring.notes(ignored) + _unused(report)
    return replace(
        checkpoint,
        name=source.name,
        format=source.format,
        notes=notes,
        report=report,
        gelu=form,
    )


def _configs(source: Source) -> tuple[str, ...]:
    hub = source.format in hf.KINDS
    return configuration.HF_CONFIGS if hub else configuration.CONFIGS


def _unused(report: Report) -> tuple[str, ...]:
    """A note of tensors without use; a table of the numbers from 0 is no news."""
    left = [name for name in report.unexpected if not name.endswith("position_ids")]
    shown = ", ".join(left[:8]) + (", …" if len(left) > 8 else "")
    return (f"not used: {len(left)} tensors ({shown})",) if left else ()


def _name(
    source: Source, contents: Contents, config: Given, heads: int | None, gelu: str | None
) -> tuple[names.Found, Gelu]:
    """The tensors by canonical name, and the GELU; `contents.tensors` is emptied."""
    tensors, called, foreign = contents.tensors, {}, str
    if contents.format in ("tf1", "frozen"):
        scope = tf1.scope(tensors)
        tensors, called = tf1.from_tensorflow(tensors, scope)
        foreign = partial(_spell, scope)
    raw = configuration.find(source.folder, config, heads, tensors, _configs(source))
    raw, form = activation.choose(raw, contents, gelu)
    if source.layout:
        tensors |= sentence.read_tensors(source.layout)
    return names.canonical(raw, tensors, called, foreign), form


def _spell(scope: str, name: str) -> str:
    return scope + tf1.spell_theirs(name)[0]


def _build(
    found: names.Found,
    tied: bool,
    layout: sentence.Layout | None,
    vocabulary: Path | None,
    kernel: Kernel | None,
) -> Checkpoint:
    """All but the weights: the model is on the `meta` device, where tensors are only shapes."""
    config, heads = names.config(found), names.heads(found)
    labels = names.labels(found, heads)
    prompts, default_prompt = sentence.prompts(layout.settings if layout else {})
    chosen = kernel or attention.kernel("reference")
    return Checkpoint(
        config=config,
        model=build(config, chosen, heads, len(labels), tied, layout),
        vocabulary=vocabulary,
        name="",
        max_length=_max_length(config, layout, vocabulary),
        labels=labels,
        problem=names.problem(found.raw, labels),
        prompts=prompts,
        default_prompt=default_prompt,
        raw=found.raw,
        layout=layout,
    )


def _max_length(config: BertConfig, layout: sentence.Layout | None, vocabulary: Path | None) -> int:
    """The shortest that the layout, the tokenizer and the table of positions allow."""
    folder = vocabulary if vocabulary is None or vocabulary.is_dir() else vocabulary.parent
    settings = "tokenizer_config.json"
    tokenizer = files.read_object(folder, settings, optional=True) if folder else {}
    said = [layout.max_length if layout else None, tokenizer.get("model_max_length")]
    limits = [limit for limit in said if limit is not None]
    for limit in limits:
        if type(limit) not in (int, float) or not limit >= 1:
            raise CheckpointError(f"the maximal length {limit!r} is not a count of tokens")
    return int(min([config.max_positions, *limits]))
