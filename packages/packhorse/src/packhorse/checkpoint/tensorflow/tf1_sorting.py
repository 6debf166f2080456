"""What the entries of a TensorFlow checkpoint are for: weights, optimizer slots, training state.

A BERT has no weight without dimensions, yet a scalar is skipped only if it is known: training code
leaves its step, its loss scale and the counters of that scale. Everything else counts as a weight,
and a model that does not know it refuses the checkpoint.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from packhorse.checkpoint.tensorflow.tf1_index import Entry
from packhorse.errors import CheckpointError

SLOTS = {  # what an optimizer's variable adds to the name of its weight, and what it is
    "adam_m": "m",
    "adam_v": "v",
    "LAMB": "m",
    "LAMB_1": "v",
    "Adam": "m",
    "Adam_1": "v",
    "Momentum": "m",
}
POWERS = ("beta1_power", "beta2_power")  # of Adam; they follow from the step
STEP = "global_step"
OBJECT_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"  # ends the names of a TF2 object graph
OBJECT_SLOT = "/.OPTIMIZER_SLOT/"
BOOKKEEPING = re.compile(
    r"_CHECKPOINTABLE_OBJECT_GRAPH|save_counter/\.ATTRIBUTES/VARIABLE_VALUE"
    r"|.*/\.ATTRIBUTES/OBJECT_CONFIG_JSON"
)
# Scalars by the last part of their names: of loss scaling (TensorFlow's DynamicLossScale and Keras'
# LossScaleOptimizer; tf.contrib's ExponentialUpdateLossScaleManager), and of optimizers.
TRAINING_STATE = re.compile(
    r"((current_|dynamic_)?loss_scale|(num_)?(good|bad)_steps|(global|local)_step"
    r"|iter|iterations|learning_rate|decay|momentum)(_\d+)?"
)


@dataclass(frozen=True, slots=True)
class Sorted:
    """The entries of an index by what they are for."""

    weights: dict[str, Entry] = field(default_factory=dict)  # by the names users know
    slots: dict[str, dict[str, Entry]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # slots that are not read


def is_step(entry: Entry | None) -> bool:
    """Is this, under the name of the training step, a count?"""
    return entry is not None and entry.shape == () and entry.dtype in (torch.int64, torch.int32)


def sort_out(entries: Iterable[Entry], slots: bool) -> Sorted:
    """Weights, optimizer slots (only if wanted), and notes on what is left out."""
    found = Sorted()
    left_out = found.left_out
    state: list[str] = []
    named = _by_name(entries, found.notes)
    for name, entry in named.items():
        weight, _, kind = name.rpartition("/")
        if OBJECT_SLOT in name:
            left_out[name.partition(OBJECT_SLOT)[2]] += 1
        elif kind in SLOTS and weight in named and named[weight].shape == entry.shape:
            if not slots:
                left_out[kind] += 1
            elif found.slots.setdefault(SLOTS[kind], {}).setdefault(weight, entry) is not entry:
                raise CheckpointError(f"{weight!r} has slots of two optimizers; read it without")
        elif kind in POWERS and entry.shape == ():
            left_out[kind] += 1
        elif name == STEP and is_step(entry):
            found.weights[name] = entry
        elif TRAINING_STATE.fullmatch(kind) and entry.shape == ():
            state.append(name)
        else:
            found.weights[name] = entry
    if left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
        found.notes.append(f"optimizer state left out: {counts}")
    if state:
        found.notes.append(f"training state skipped: {', '.join(sorted(state))}")
    return found


def _by_name(entries: Iterable[Entry], notes: list[str]) -> dict[str, Entry]:
    """The entries that are tensors, those of an object graph without what ends their names."""
    named: dict[str, Entry] = {}
    no_tensors: list[str] = []
    for entry in entries:
        name = entry.name.removesuffix(OBJECT_VALUE)
        if BOOKKEEPING.fullmatch(entry.name):
            continue
        if entry.dtype is None:
            no_tensors.append(entry.name)
        elif named.setdefault(name, entry) is not entry:
            raise CheckpointError(f"{name!r} is there twice, with and without {OBJECT_VALUE}")
    if any(name != entry.name for name, entry in named.items()):
        notes.append(f"a TF2 object graph; names are given without {OBJECT_VALUE}")
    if no_tensors:
        listed = ", ".join(no_tensors[:3]) + (" …" if len(no_tensors) > 3 else "")
        notes.append(f"{len(no_tensors)} entries that are no numbers left out: {listed}")
    return named
