"""The model that a run trains: from a checkpoint of any kind, or from sizes alone.

It has the heads that its objective needs. A head that the checkpoint has keeps its weights; one
that it lacks, or has for other labels, begins with random ones: always the same for a seed, drawn
as BERT's were (truncated normal, deviation 0.02; Devlin et al. 2018). So does everything where no
checkpoint is given. Of the checkpoint's other heads only the pooler stays, untrained, where vectors
are learned: a bare encoder has one in transformers' eyes.

Weights are read and drawn in fp32. In bf16 the optimizer keeps them so and moves those; the model
computes with a rounded copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from packhorse.attention import Kernel
from packhorse.checkpoint import Checkpoint
from packhorse.checkpoint.building import build
from packhorse.checkpoint.names.families import family_of
from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.optim import LAMB, parameter_groups
from packhorse.train.optimizer_state import dismantle
from packhorse.train.settings import Settings

DEVIATION = 0.02
SIZES = ("layers", "hidden_size", "heads", "intermediate_size", "vocab_size", "max_positions")
OF_LABELS = ("id2label", "label2id", "num_labels", "problem_type")


@dataclass(frozen=True, slots=True)
class Labels:
    """What a classifier tells apart; none of other tasks."""

    names: tuple[str, ...] = ()
    problem: str = "single_label"


def sized(settings: Settings, vocab_size: int, longest: int) -> BertConfig:
    """A model of the sizes that are set; words and positions follow the data unless set."""
    for name in ("layers", "hidden_size", "heads"):
        if not getattr(settings, name):
            raise InputError(f"{name} is not set; set the sizes of a new model, or name a model")
    if 0 < settings.vocab_size < vocab_size:
        raise InputError(f"vocab_size is {settings.vocab_size}; the data has {vocab_size} words")
    if 0 < settings.max_positions < longest:
        raise InputError(f"max_positions is {settings.max_positions}; sequences have {longest}")
    return BertConfig(
        vocab_size=settings.vocab_size or vocab_size,
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        heads=settings.heads,
        intermediate_size=settings.intermediate_size or 4 * settings.hidden_size,
        max_positions=settings.max_positions or longest,
        norm_eps=settings.norm_eps,
    )


def prepare(
    settings: Settings,
    begun: Checkpoint | BertConfig,
    heads: Iterable[str],
    kernel: Kernel,
    labels: Labels | None = None,
    vocabulary: Path | None = None,
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint to train, in fp32 on the CPU, and the names of parameters that are new."""
    found = begun if isinstance(begun, Checkpoint) else None
    config = begun if isinstance(begun, BertConfig) else begun.config
    rates = {"dropout": settings.dropout, "attention_dropout": settings.attention_dropout}
    config = replace(config, **rates)
    if found is not None:
        _agree(settings, config, found.name)
    labels = labels or Labels()
    wanted = [head for head in heads if head != "embed"]
    raw = dict(found.raw) if found else {}
    if foreign := [head for head in wanted if head not in family_of(raw).heads]:
        raise InputError(f"{raw.get('model_type')} models have no {foreign[0]!r} head to train")
    layout = found.layout if found and "embed" in heads else None
    untrained = ["pooled"] if found and "embed" in heads and "pooled" in found.model.heads else []
    tied = found is None or _tied(found.model)
    model = build(config, kernel, [*wanted, *untrained], len(labels.names), tied, layout)
    new = _fill(model, found.model if found else None, settings.seed)
    for head in untrained:
        model.heads[head].requires_grad_(False)
    if not labels.names:
        raw = {key: value for key, value in raw.items() if key not in OF_LABELS}
    made = found or Checkpoint(config, model, vocabulary, "new model", config.max_positions)
    described: dict[str, Any] = {"labels": labels.names, "problem": labels.problem, "raw": raw}
    described |= {"layout": layout, "max_length": made.max_length}
    if layout is None:
        described["max_length"] = config.max_positions
    place = vocabulary or made.vocabulary
    return replace(made, config=config, model=model, vocabulary=place, **described), new


def _agree(settings: Settings, config: BertConfig, name: str) -> None:
    """Sizes that are set beside a model are what it must have."""
    for size in SIZES:
        asked, has = getattr(settings, size), getattr(config, size)
        if asked and asked != has:
            raise InputError(f"{size} is set to {asked}, but {name} has {has}; leave it out")


def _tied(model: Model) -> bool:
    named = dict(model.named_parameters(remove_duplicate=False))
    decoder = named.get("heads.mlm.decoder.weight")
    return decoder is None or decoder is named["bert.embed.words.weight"]


def _fill(model: Model, source: Model | None, seed: int) -> list[str]:
    """Give each parameter of a model without weights its own; shared ones stay shared."""
    have = dict(source.named_parameters(remove_duplicate=False)) if source else {}
    norms, shared = _norm_gains(model), not model.bert.config.classify_activation
    generator = torch.Generator().manual_seed(seed)
    made: dict[nn.Parameter, nn.Parameter] = {}
    new, state = [], {}
    for name, empty in model.named_parameters(remove_duplicate=False):
        if empty not in made:
            taken = _taken(name, empty.shape, have, shared)
            if taken is None:
                new.append(name)
                taken = _drawn(empty.shape, name in norms, generator)
            made[empty] = nn.Parameter(taken)
        state[name] = made[empty]
    model.load_state_dict(state, assign=True)
    return new


def _taken(name: str, shape: torch.Size, have: Mapping[str, Tensor], shared: bool) -> Tensor | None:
    """The checkpoint's tensor of this name; a pooler all heads share may stand under any."""
    names = [name]
    if shared and (".pooler.dense." in name or name.startswith("heads.pooled.")):
        kind = name.rpartition(".")[2]
        heads = ("pooled.dense", "nsp.pooler.dense", "classify.pooler.dense")
        names += [f"heads.{head}.{kind}" for head in heads]
    found = (have[each] for each in names if each in have and have[each].shape == shape)
    tensor = next(found, None)
    return None if tensor is None else tensor.detach().float().clone()


def _drawn(shape: torch.Size, gain: bool, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if gain else torch.zeros(shape)
    return truncated_normal(shape, DEVIATION, generator)


def truncated_normal(shape: torch.Size, deviation: float, generator: torch.Generator) -> Tensor:
    """Normal numbers, those beyond two deviations drawn again until none is.

    The distribution of `nn.init.trunc_normal_`, which inverts it with erfinv at eight times the
    price: half a minute for BERT-Large.
    """
    drawn, bound = torch.empty(shape).normal_(0.0, deviation, generator=generator), 2 * deviation
    flat = drawn.view(-1)
    beyond = (flat.abs() > bound).nonzero().squeeze(1)
    while len(beyond):
        again = torch.empty(len(beyond)).normal_(0.0, deviation, generator=generator)
        flat[beyond] = again
        beyond = beyond[again.abs() > bound]
    return drawn


def _norm_gains(model: nn.Module) -> set[str]:
    """Of one-dimensional parameters those that begin at one; all others are biases."""
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.ndim == 1 and name.endswith(".weight")
    }


def optimizer_for(settings: Settings, model: nn.Module, half: bool) -> LAMB:
    """LAMB; AdamW is the same without the trust ratio. With `half`, the model becomes bf16.

    Then weights are kept in fp32 by the optimizer, and gradients are added up in fp32.
    """
    lamb = settings.optimizer == "lamb"
    unstack = lamb and settings.split_qkv
    groups = parameter_groups(model, settings.weight_decay, unstack=unstack)
    for group in groups:
        group["adapt"] = group["adapt"] and lamb
    masters = [p.detach().clone() for group in groups for p in group["params"]] if half else []
    if half:
        model.to(torch.bfloat16)  # in place: the parameters stay who they are
    clamp: Any = settings.clamp or None
    optimizer = LAMB(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        bias_correction=settings.bias_correction,
        clamp=clamp,
        max_weight_norm=settings.max_weight_norm or None,
        master_weights=half,
    )
    every = [p for group in groups for p in group["params"]]
    for parameter, master in zip(every, masters, strict=False):
        parameter.grad_dtype = torch.float32
        optimizer.state[parameter]["master"] = master
    return optimizer


def in_full(checkpoint: Checkpoint, optimizer: Optimizer) -> Checkpoint:
    """The same checkpoint in fp32 on the CPU: what the optimizer kept, not its rounded copy."""
    named = dict(checkpoint.model.named_parameters(remove_duplicate=False))
    kept, _ = dismantle(optimizer, checkpoint.model)
    full = {
        parameter: nn.Parameter(kept.get(f"{name}.master", parameter).detach().float().cpu())
        for name, parameter in checkpoint.model.named_parameters()
    }
    config, heads = checkpoint.config, list(checkpoint.model.heads)
    model = build(
        config,
        checkpoint.model.bert.kernel,
        [head for head in heads if head != "embed"],
        len(checkpoint.labels),
        _tied(checkpoint.model),
        checkpoint.layout,
    )
    model.load_state_dict({name: full[parameter] for name, parameter in named.items()}, assign=True)
    return replace(checkpoint, model=model)
