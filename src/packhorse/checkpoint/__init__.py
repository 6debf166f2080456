"""Checkpoints: from a model's files to a model that runs, and back.

A reader returns what it found, `(configuration, {foreign name: tensor})`; `names` alone knows what
foreign names mean; here the model is built without weights, on the `meta` device, and every tensor
is checked, cast and put in place one by one, so that nothing is ever random and little is ever held
twice. Strict throughout: a tensor that is missing, has another shape, is unknown or is not finite
is an error that names it.

A checkpoint has the heads whose weights it holds. Vectors need none: the layout of
sentence-transformers says how they are made; without one, an encoder that was not fine-tuned for
another task gets the mean of its hidden states, not normalised, as sentence-transformers itself
would give it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packhorse import attention
from packhorse.attention import Kernel
from packhorse.checkpoint import files, hf, hub, names, sentence
from packhorse.checkpoint.building import build
from packhorse.checkpoint.placing import Report, insist, place
from packhorse.errors import CheckpointError
from packhorse.model.config import BertConfig
from packhorse.model.heads import Embed
from packhorse.model.model import Model
from packhorse.tokens import Tokenizer


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model with its weights, and all that its files say about how to use it."""

    config: BertConfig
    model: Model = field(repr=False)
    folder: Path  # where the tokenizer lies
    name: str
    max_length: int
    labels: tuple[str, ...] = ()
    problem: str = "single_label"  # or multi_label, regression
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    report: Report = field(default_factory=Report, repr=False)
    raw: dict[str, Any] = field(default_factory=dict, repr=False)  # the configuration as read
    layout: sentence.Layout | None = field(default=None, repr=False)


def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that lies beside the weights; like theirs, its files are the folder's own."""
    for name in hf.TOKENIZER:
        files.inside(checkpoint.folder, name)
    return Tokenizer.load(
        checkpoint.folder, checkpoint.max_length, vocab_size=checkpoint.config.vocab_size
    )


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a checkpoint, under the names they have there."""
    return hf.read(Path(path))


def load(
    model: str | Path,
    *,
    kernel: Kernel | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    allow_nonfinite: bool = False,
) -> Checkpoint:
    """The model in a folder, or of a hub id `org/name[@revision]`, ready to run."""
    folder = hub.resolve(model)
    layout = sentence.read(folder)
    home = layout.transformer if layout else folder
    raw, tensors = read(home)
    if layout:
        tensors |= sentence.read_tensors(folder, layout)
    try:
        found = names.canonical(raw, tensors)
        tied = names.tied(found)
        checkpoint = _assemble(found, tied, layout, home, kernel or attention.kernel("reference"))
        table = names.table(found.family, tied) | (layout.table if layout else {})
        report = place(checkpoint.model, found, table, torch.device(device), dtype)
        insist("the weights hold", [] if allow_nonfinite else report.blemishes(dtype))
    except CheckpointError as error:
        raise CheckpointError(f"{home}: {error}") from error.__cause__
    given = folder == Path(model).expanduser()
    name = folder.resolve().name if given else str(model)
    return replace(checkpoint, name=name, report=report)


def _assemble(
    found: names.Found,
    tied: bool,
    layout: sentence.Layout | None,
    folder: Path,
    kernel: Kernel,
) -> Checkpoint:
    """All but the weights: the model is on the `meta` device, where tensors are only shapes."""
    config, heads = names.config(found), names.heads(found)
    labels = names.labels(found, heads)
    prompts, default_prompt = sentence.prompts(layout.settings if layout else {})
    return Checkpoint(
        config=config,
        model=build(config, kernel, heads, len(labels), tied, layout),
        folder=folder,
        name=folder.name,
        max_length=_max_length(config, layout, folder),
        labels=labels,
        problem=names.problem(found, labels),
        prompts=prompts,
        default_prompt=default_prompt,
        raw=found.raw,
        layout=layout,
    )


def _max_length(config: BertConfig, layout: sentence.Layout | None, folder: Path) -> int:
    """The shortest that the layout, the tokenizer and the table of positions allow."""
    tokenizer = files.read_object(folder, "tokenizer_config.json", optional=True)
    said = [layout.max_length if layout else None, tokenizer.get("model_max_length")]
    limits = [limit for limit in said if limit is not None]
    for limit in limits:
        if type(limit) not in (int, float) or not limit >= 1:
            raise CheckpointError(f"the maximal length {limit!r} is not a count of tokens")
    return int(min([config.max_positions, *limits]))


def write(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a folder that transformers and sentence-transformers load; whole, or not at all.

    The tokenizer is copied from the checkpoint's own folder. What its configuration said and is not
    understood here is kept.
    """
    model = checkpoint.model
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("heads.embed.")}
    raw, tensors = names.export(checkpoint.raw, checkpoint.config, state, model.heads.keys())
    if checkpoint.labels:
        raw |= names.export_labels(checkpoint.labels, checkpoint.problem)
    head = dict(model.heads).get("embed")
    embed = head if isinstance(head, Embed) else None
    with files.new_folder(Path(folder), overwrite=overwrite) as draft:
        hf.write(draft, raw, tensors, max_shard_bytes)
        hf.copy_tokenizer(checkpoint.folder, draft)
        if layout := _layout(checkpoint, embed):
            width, length = checkpoint.config.hidden_size, checkpoint.max_length
            sentence.write(draft, layout, embed, width, length)
    return Path(folder)


def _layout(checkpoint: Checkpoint, embed: Embed | None) -> sentence.Layout | None:
    """The layout to write: the one that was read, or a new one if the vectors cannot do without."""
    plain = embed is None or not (embed.dense or embed.normalise or embed.pooling != ("mean",))
    if checkpoint.layout is None and plain:
        return None
    layout = checkpoint.layout or sentence.Layout(checkpoint.folder)
    said = {"prompts": checkpoint.prompts, "default_prompt_name": checkpoint.default_prompt}
    return replace(layout, settings={**layout.settings, **said})
