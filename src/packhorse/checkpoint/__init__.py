"""Checkpoints: from a model's files to a model that runs, and back.

A reader returns what it found, `(configuration, {foreign name: tensor})`; `names` alone knows what
foreign names mean; here the model is built without weights, on the `meta` device, and every tensor
is checked, cast and put in place one by one, so that nothing is ever random and little is ever held
twice. Strict throughout: a tensor that is missing, has another shape, is unknown or is not finite
is an error that names it.

A checkpoint has the heads whose weights it holds. Vectors need no weights: the sentence-transformers
layout says how they are made; without one, an encoder that was not fine-tuned for another task gets
the mean of its hidden states, not normalised, which is what sentence-transformers itself does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from packhorse import attention
from packhorse.attention import Kernel
from packhorse.checkpoint import files, hf, hub, names, sentence
from packhorse.device import dtype_name
from packhorse.errors import CheckpointError
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.model.heads import Embed, Mlm, PooledLabels, Pooler, TokenLabels
from packhorse.model.model import Model

if TYPE_CHECKING:
    from packhorse.tokens import Tokenizer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """How the tensors of a file meet those of the model; all by their names in the file."""

    missing: dict[str, Shape] = field(default_factory=dict)
    misshaped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)  # expected, found
    unknown: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()  # without use and without harm
    nonfinite: dict[str, int] = field(default_factory=dict)  # how many values
    overflowed: dict[str, int] = field(default_factory=dict)  # finite only in the file

    def misfits(self) -> list[str]:
        """What keeps the tensors from being the model's, a line each."""
        wrong = [
            f"{n}: {list(found)} for {list(want)}" for n, (want, found) in self.misshaped.items()
        ]
        return [
            *_listed("missing", [f"{n} {list(shape)}" for n, shape in self.missing.items()]),
            *_listed("of another shape", wrong),
            *_listed("unknown", self.unknown),
        ]

    def blemishes(self, dtype: torch.dtype) -> list[str]:
        """Values no model can work with."""
        bad = [f"{name}: {count} values" for name, count in self.nonfinite.items()]
        over = [f"{name}: {count} values" for name, count in self.overflowed.items()]
        return [
            *_listed("with NaN or infinity", bad),
            *_listed(f"beyond the range of {dtype_name(dtype)}", over),
        ]


def _listed(what: str, items: Iterable[str]) -> list[str]:
    items = list(items)
    shown = ", ".join(items[:8]) + (", …" if len(items) > 8 else "")
    return [f"{len(items)} {what} ({shown})"] if items else []


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

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that lies beside the weights."""
        from packhorse.tokens import Tokenizer

        return Tokenizer.load(
            self.folder, max_length=self.max_length, vocab_size=self.config.vocab_size
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
        checkpoint = _assemble(found, layout, home, kernel or attention.kernel("reference"))
        report = _place(checkpoint, found, torch.device(device), dtype, allow_nonfinite)
    except CheckpointError as error:
        raise CheckpointError(f"{home}: {error}") from error.__cause__
    checkpoint.model.eval()
    name = folder.resolve().name if Path(model).expanduser().exists() else str(model)
    return replace(checkpoint, name=name, report=report)


def _assemble(
    found: names.Found, layout: sentence.Layout | None, folder: Path, kernel: Kernel
) -> Checkpoint:
    """All but the weights: the model is on the `meta` device, where tensors are only shapes."""
    config, heads = names.config(found), names.heads(found)
    labels = names.labels(found, heads)
    prompts, default_prompt = sentence.prompts(layout.settings if layout else {})
    with torch.device("meta"):
        bert = Bert(config, kernel)
        built = _heads(bert, heads, len(labels), names.tied(found))
        built |= _embed(layout, heads, config)
    return Checkpoint(
        config=config,
        model=Model(bert, built),
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


def _heads(bert: Bert, heads: Iterable[str], labels: int, tied: bool) -> dict[str, nn.Module]:
    """One pooler serves all heads that need it."""
    config, pooler = bert.config, Pooler(bert.config)
    makers = {
        "pooled": lambda: pooler,
        "mlm": lambda: Mlm(config, bert.embed.words, tied),
        "nsp": lambda: PooledLabels(config, pooler, 2),
        "span": lambda: TokenLabels(config, 2),
        "classify": lambda: PooledLabels(config, pooler, labels),
        "tokens": lambda: TokenLabels(config, labels, config.dropout),
    }
    return {head: makers[head]() for head in heads}


def _embed(
    layout: sentence.Layout | None, heads: Iterable[str], config: BertConfig
) -> dict[str, nn.Module]:
    if layout:
        return {"embed": sentence.embed(layout, config)} if layout.pooling else {}
    if {"span", "classify", "tokens"} & set(heads):
        return {}
    return {"embed": Embed(("mean",), normalise=False)}


def _max_length(config: BertConfig, layout: sentence.Layout | None, folder: Path) -> int:
    """The shortest that the layout, the tokenizer and the table of positions allow."""
    tokenizer = files.read_object(folder, "tokenizer_config.json", optional=True)
    said = [layout.max_length if layout else None, tokenizer.get("model_max_length")]
    limits = [limit for limit in said if limit is not None]
    for limit in limits:
        if type(limit) not in (int, float) or not limit >= 1:
            raise CheckpointError(f"the maximal length {limit!r} is not a count of tokens")
    return int(min([config.max_positions, *limits]))


def _place(
    checkpoint: Checkpoint,
    found: names.Found,
    device: torch.device,
    dtype: torch.dtype,
    allow_nonfinite: bool,
) -> Report:
    """Empty `found.tensors` into the model, once it is sure that every one has its place."""
    state = checkpoint.model.state_dict()
    mlm = checkpoint.model.heads["mlm"] if "mlm" in checkpoint.model.heads else None
    tied = mlm is not None and mlm.decoder.weight is checkpoint.model.bert.embed.words.weight
    ...
