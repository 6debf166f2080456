"""Which parameters decay: all but biases and the gains of normalisations.

A bias is known by its name, a normalisation by its class, because its gain is called `weight` like
any other weight. The class is judged by its name and those of its bases, so that a normalisation
written by hand (`AddNorm`, some library's `RMSNorm`) counts without being imported here.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from packhorse.errors import InputError

NORM = re.compile(r"Norm(\dd)?$")  # LayerNorm, AddNorm, BatchNorm2d; not LayerNormLinear


def parameter_groups(
    model: nn.Module, weight_decay: float, *, adapt_excluded: bool = False
) -> list[dict[str, Any]]:
    """Two groups for an optimizer: what decays, and what does not.

    As in MLPerf's reference, what does not decay is not scaled by LAMB's trust ratio either, unless
    `adapt_excluded`. Frozen parameters are left out, and a tied one comes once. There are always
    two groups in this order, even if one is empty: saved optimizer state counts on it.
    """
    decays: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                decays.setdefault(parameter, "bias" not in name and not is_norm(module))
    if not decays:
        raise InputError("the model has nothing to train; set requires_grad on some parameters")
    decayed, excluded = ([p for p in decays if decays[p] is side] for side in (True, False))
    return [
        {"params": decayed, "weight_decay": weight_decay, "adapt": True},
        {"params": excluded, "weight_decay": 0.0, "adapt": adapt_excluded},
    ]


def is_norm(module: nn.Module) -> bool:
    """Is it, or does it extend, a class named like a normalisation?"""
    return any(NORM.search(kind.__name__) for kind in type(module).__mro__)
