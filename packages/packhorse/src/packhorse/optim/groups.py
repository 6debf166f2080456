"""Parameter groups: weight decay for all parameters but biases and the gains of normalizations.

A bias is recognized by its name, a normalization by its class, because its gain is called `weight`
like any other weight. The class counts by its name and those of its bases, so that a hand-written
normalization (`AddNorm`, a library's `RMSNorm`) is recognized without being imported here.

A module whose child stores several tensors in one parameter, concatenated along the first
dimension, declares them in `stacked_tensors`: a mapping from the child's name to their number. LAMB
then computes the trust ratio of each separately.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from packhorse.errors import InputError

NORM = re.compile(r"Norm(\dd)?$")  # LayerNorm, AddNorm, BatchNorm2d; not LayerNormLinear


def parameter_groups(
    model: nn.Module, weight_decay: float, *, adapt_excluded: bool = False, unstack: bool = True
) -> list[dict[str, Any]]:
    """Groups for an optimizer: with weight decay, without, then those of stacked tensors.

    As in MLPerf's reference, parameters without decay are not scaled by LAMB's trust ratio either,
    unless `adapt_excluded`. Each of several stacked tensors has its own ratio, unless `unstack` is
    False. Frozen parameters are left out, and a tied one appears once. The first two groups always
    exist, even if empty.
    """
    counts = stacked_parameters(model) if unstack else {}
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {(1, True): [], (1, False): []}
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            decays = "bias" not in name and not is_norm(module)
            count = counts.get(parameter, 1) if decays or adapt_excluded else 1
            groups.setdefault((count, decays), []).append(parameter)
    if not seen:
        raise InputError("the model has nothing to train; set requires_grad on some parameters")
    result: list[dict[str, Any]] = []
    for (count, decays), parameters in groups.items():
        group: dict[str, Any] = {
            "params": parameters,
            "weight_decay": weight_decay if decays else 0.0,
            "adapt": decays or adapt_excluded,
        }
        if count > 1:  # only then: torch's own optimizers do not have this option
            group["stacked"] = count
        result.append(group)
    return result


def stacked_parameters(model: nn.Module) -> dict[nn.Parameter, int]:
    """The parameters that hold several tensors, and their number."""
    return {
        parameter: count
        for module in model.modules()
        for child, count in getattr(module, "stacked_tensors", {}).items()
        for parameter in module.get_submodule(child).parameters()
    }


def is_norm(module: nn.Module) -> bool:
    """Is its class, or one of the bases, named like a normalization?"""
    return any(NORM.search(base.__name__) for base in type(module).__mro__)
