"""LAMB, parameter groups, learning-rate schedules, and the packing rule for hyperparameters.

    groups = parameter_groups(model, weight_decay=0.01)
    optimizer = LAMB(groups, lr=2e-3, betas=(0.71, 0.998), bias_correction=False)
    schedule = LambdaLR(optimizer, partial(polynomial, total=1127, warmup=100))

Training's AdamW is LAMB with groups that do not `adapt`, so that it has master weights too; torch's
own optimizers take the same groups. Nothing here is specific to BERT; any `nn.Module` will do.
"""

from typing import TYPE_CHECKING

from packhorse.exports import lazy_exports

if TYPE_CHECKING:
    from packhorse.optim.groups import parameter_groups
    from packhorse.optim.lamb import LAMB, load_slots
    from packhorse.optim.scaling import ScaledHyperparameters, packing_rule
    from packhorse.optim.schedules import SCHEDULES, constant, cosine, linear, polynomial, wsd
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "packhorse.optim.groups": ["parameter_groups"],
            "packhorse.optim.lamb": ["LAMB", "load_slots"],
            "packhorse.optim.scaling": ["ScaledHyperparameters", "packing_rule"],
            "packhorse.optim.schedules": [
                "SCHEDULES",
                "constant",
                "cosine",
                "linear",
                "polynomial",
                "wsd",
            ],
        },
    )

__all__ = [
    "LAMB",
    "SCHEDULES",
    "ScaledHyperparameters",
    "constant",
    "cosine",
    "linear",
    "load_slots",
    "packing_rule",
    "parameter_groups",
    "polynomial",
    "wsd",
]
