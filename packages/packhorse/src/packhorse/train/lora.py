"""Low-rank adapters (LoRA, Hu et al. 2021) that are trained in place of the model's weights.

    adapt(model, family, LoraOptions(rank=16), base)      # freezes all else
    write(folder, checkpoint)                             # PEFT's layout

The product of two narrow matrices is added to what a linear layer computes; B begins at zero, so an
adapted model begins as its base. Where one layer of ours is several of transformers' (queries, keys
and values are one product), each has matrices of its own, under the name that PEFT gives it: a
folder that is written here opens in PEFT, in sentence-transformers and in `checkpoint.adapters`,
which merges it. Checkpoints of a run are such folders too; the base is read again from where it is.

Shapes: T tokens, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.checkpoint import Checkpoint, adapters, names
from packhorse.checkpoint.names.families import Family
from packhorse.checkpoint.safetensors import read_tensors
from packhorse.checkpoint.writing import write_adapter
from packhorse.errors import CheckpointError, InputError
from packhorse.model.model import Model

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The size of an adapter, and the layers that get one."""

    rank: int
    alpha: float  # what B·A is multiplied by, before it is divided by the rank
    modules: tuple[str, ...]  # ends of names in transformers, as PEFT's target_modules; empty: all
    base: str  # the path or hub id of the model, for the adapter's files


@final
class AdaptedLinear(nn.Linear):
    """A linear layer whose weight is frozen, with a pair of matrices for each part of it."""

    def __init__(
        self, linear: nn.Linear, parts: Sequence[str], adapted: Sequence[bool], options: LoraOptions
    ) -> None:
        """Take over the weights of `linear`; `parts` are its modules in transformers, in order."""
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.adapted = tuple(adapted)
        self.parts = tuple(
            part for part, is_adapted in zip(parts, adapted, strict=True) if is_adapted
        )
        self.rows = linear.out_features // len(parts)
        self.options = options
        self.scale = options.alpha / options.rank
        a = (torch.empty(options.rank, linear.in_features) for _ in self.parts)
        b = (torch.zeros(self.rows, options.rank) for _ in self.parts)
        self.lora_a = nn.ParameterList(a)
        self.lora_b = nn.ParameterList(b)

    def forward(self, input: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        pairs = iter(zip(self.lora_a, self.lora_b, strict=True))
        added: list[Tensor] = []
        for is_adapted in self.adapted:
            if is_adapted:
                a, b = next(pairs)
                added.append(F.linear(F.linear(input, a), b))
            else:
                added.append(input.new_zeros(len(input), self.rows))
        joined = added[0] if len(added) == 1 else torch.cat(added, -1)
        return super().forward(input) + joined * self.scale


def adapt(model: Model, family: Family, options: LoraOptions, seed: int) -> int:
    """Freeze the model and add an adapter to its encoder; returns how many modules have one."""
    model.requires_grad_(False)
    table = names.table(family)
    generator = torch.Generator().manual_seed(seed)
    known: list[str] = []
    count = 0
    linears = [(n, m) for n, m in model.bert.named_modules() if type(m) is nn.Linear]
    for name, linear in linears:
        foreign = names.sources(f"bert.{name}.weight", table)
        parts = [part.removesuffix(".weight").removeprefix(family.prefix) for part in foreign]
        chosen = [_matches(part, options.modules) for part in parts]
        known += parts
        if not any(chosen):
            continue
        adapted = AdaptedLinear(linear, parts, chosen, options)
        for a in adapted.lora_a:
            # As PEFT: uniform, by the number of inputs (He et al. 2015, with a = sqrt(5)).
            bound = 1 / math.sqrt(linear.in_features)
            a.data.uniform_(-bound, bound, generator=generator)
        parent, _, own = name.rpartition(".")
        setattr(model.bert.get_submodule(parent), own, adapted)
        count += len(adapted.parts)
    if not count:
        ends = sorted({name.rpartition(".")[2] for name in known})
        raise InputError(
            f"lora_modules {', '.join(options.modules)} are none of this model; its linear layers "
            f"end in {', '.join(ends)}"
        )
    return count


def _matches(name: str, ends: Sequence[str]) -> bool:
    """As PEFT's target_modules: the whole name, or its end after a dot."""
    return not ends or any(name == end or name.endswith(f".{end}") for end in ends)


def is_adapted(model: nn.Module) -> bool:
    """Is it an adapter that is trained?"""
    return any(isinstance(module, AdaptedLinear) for module in model.modules())


def tensors(model: nn.Module, masters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter under PEFT's names; `masters` are the optimizer's fp32 weights by ours."""
    masters = masters or {}
    weights: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, AdaptedLinear):
            continue
        for number, part in enumerate(module.parts):
            for matrix, name_in_peft in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
                own: Tensor = getattr(module, matrix)[number]
                value = masters.get(f"{name}.{matrix}.{number}.master", own)
                weights[f"{adapters.PREFIX}{part}.{name_in_peft}.weight"] = value.detach().cpu()
    return weights


def write(
    folder: Path,
    checkpoint: Checkpoint,
    masters: Mapping[str, Tensor] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the adapter of a model that is trained, as PEFT and sentence-transformers have it."""
    modules = [m for m in checkpoint.model.modules() if isinstance(m, AdaptedLinear)]
    options = modules[0].options
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": options.base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(part for module in modules for part in module.parts),
        "inference_mode": True,
    }
    return write_adapter(
        folder, checkpoint, config, tensors(checkpoint.model, masters), overwrite=overwrite
    )


def read(folder: Path, model: Model) -> dict[str, Tensor]:
    """The state of a model with the adapter that `write` wrote; the base is the model's own."""
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(
            f"{folder} holds a whole model and no adapter; resume without lora_rank, or begin "
            "another run"
        )
    stored = read_tensors(folder, WEIGHTS)
    expected = tensors(model)
    if stored.keys() != expected.keys():
        raise CheckpointError(
            f"{folder} holds an adapter of {len(stored)} matrices, not of {len(expected)}; resume "
            "with the same lora_rank and lora_modules"
        )
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            for number, part in enumerate(module.parts):
                for matrix, name_in_peft in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
                    tensor = stored[f"{adapters.PREFIX}{part}.{name_in_peft}.weight"]
                    key = f"{name}.{matrix}.{number}"
                    if tensor.shape != state[key].shape:
                        raise CheckpointError(
                            f"{folder}: {part} has rank {min(tensor.shape)}, not "
                            f"{module.options.rank}"
                        )
                    state[key] = tensor
    return state
