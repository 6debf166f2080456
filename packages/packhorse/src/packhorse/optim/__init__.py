"""Optimizers and what steers them: LAMB, parameter groups, schedules, the packing rule.

    groups = parameter_groups(model, weight_decay=0.01)
    optimizer = LAMB(groups, lr=2e-3, betas=(0.71, 0.998), bias_correction=False)
    schedule = LambdaLR(optimizer, partial(polynomial, total=1127, warmup=100))

Training's AdamW is LAMB whose groups do not `adapt`, so that it has master weights too; torch's own
takes the groups as well. Nothing here knows a BERT; any `nn.Module` will do.
"""

from packhorse.optim.groups import parameter_groups
from packhorse.optim.lamb import LAMB, load_slots
from packhorse.optim.scaling import Scaled, packing_rule
from packhorse.optim.schedules import SCHEDULES, constant, linear, polynomial

__all__ = [
    "LAMB",
    "SCHEDULES",
    "Scaled",
    "constant",
    "linear",
    "load_slots",
    "packing_rule",
    "parameter_groups",
    "polynomial",
]
