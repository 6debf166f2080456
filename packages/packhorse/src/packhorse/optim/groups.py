"""Which parameters decay: all but biases and the gains of normalisations.

A bias is known by its name, a normalisation by its class, because its gain is called `weight` like
any other weight. The class is judged by its name and those of its bases, so that a normalisation
written by hand (`AddNorm`, some library's `RMSNorm`) counts without being imported here.

A module whose child keeps several tensors in one parameter, end to end along the first dimension,
says so in `stacked_tensors`, a mapping from the child's name to their number; LAMB then gives each
its own trust ratio.
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
    """Groups for an optimizer: what decays, what does not, then what holds stacked tensors.

    As in MLPerf's reference, what does not decay is not scaled by LAMB's trust ratio either, unless
    `adapt_excluded`. Stacked tensors are told apart where that ratio is taken, unless `unstack` is
    False: then all that one parameter holds has one ratio. Frozen parameters are left out, and a
    tied one comes once. The first two groups are always there, even if empty.
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
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if decays else 0.0,
            "adapt": decays or adapt_excluded,
            **({"stacked": count} if count > 1 else {}),  # an option that torch's own lack
        }
        for (count, decays), parameters in groups.items()
    ]


def stacked_parameters(model: nn.Module) -> dict[nn.Parameter, int]:
    """The parameters that hold several tensors, and how many."""
    return {
        parameter: count
        for module in model.modules()
        for child, count in getattr(module, "stacked_tensors", {}).items()
        for parameter in module.get_submodule(child).parameters()
    }


def is_norm(module: nn.Module) -> bool:
    """Is it, or does it extend, a class named like a normalisation?"""
    return any(NORM.search(kind.__name__) for kind in type(module).__mro__)
