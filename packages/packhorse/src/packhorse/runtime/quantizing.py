"""Decide which layers of a model can be int8, by what it does to vectors of real texts.

Nearly always all can. If vectors move too far from fp32 (`quality`), every layer is tried alone in
int8, and those that move vectors most are kept in fp32 one after another until the rest is good
enough. That takes as many runs over the texts as there are layers, and is done only then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from packhorse.checkpoint import Checkpoint, quantized
from packhorse.errors import InputError
from packhorse.runtime import quality
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import open_checkpoint
from packhorse.runtime.quality import QualityReport

Load = Callable[..., Checkpoint]
Progress = Callable[[int, int], None]  # runs over the texts: done, and how many in all
CPU = torch.device("cpu")
MOST_KEPT = 0.5  # of the layers; a model that needs more gains little


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """A checkpoint in fp32 with the layers to keep so, and how near its vectors are in int8."""

    checkpoint: Checkpoint
    quality: QualityReport
    layers: int  # linear layers that are int8


def choose_layers(
    load: Load, texts: Sequence[str], progress: Progress | None = None
) -> QuantizedModel:
    """Return the model with as few layers kept in fp32 as its quality on the texts needs.

    `load` opens the checkpoint, as often as it is called. If half of the layers are not enough, the
    result says so.
    """
    progress = progress or (lambda done, total: None)
    progress(0, 2)
    exact = _vectors(open_checkpoint(load, CPU, torch.float32), texts)
    measure = partial(_measure, load, texts, exact)
    progress(1, 2)
    kept: tuple[str, ...] = ()
    best = measure(kept)
    checkpoint = load(device=CPU, dtype=torch.float32)
    linear = _linear_layers(checkpoint)
    progress(2, 2)
    if not best.good:
        groups = _by_number(linear)
        most = int(len(groups) * MOST_KEPT)
        total = 2 + len(groups) + most
        alone: dict[str, float] = {}
        for number, names in groups.items():
            alone[number] = measure(tuple(set(linear) - set(names))).cosine_mean
            progress(2 + len(alone), total)
        worst_first = sorted(alone, key=alone.__getitem__)
        for done, number in enumerate(worst_first[:most], 1):
            kept += tuple(groups[number])
            best = measure(kept)
            progress(total if best.good else 2 + len(groups) + done, total)
            if best.good:
                break
    return QuantizedModel(replace(checkpoint, kept=kept), best, len(linear) - len(kept))


def _measure(
    load: Load, texts: Sequence[str], exact: np.ndarray, kept: tuple[str, ...]
) -> QualityReport:
    def load_kept(**options: object) -> Checkpoint:
        return replace(load(**options), kept=kept)

    encoder = open_checkpoint(load_kept, CPU, torch.int8)
    return quality.compare(_vectors(encoder, texts), exact)


def _vectors(encoder: Encoder, texts: Sequence[str]) -> np.ndarray:
    """A vector per text; the mean of the hidden states if the model makes none."""
    encodings = encoder.tokenizer.encode(texts, encoder.max_length)
    head = "embed" if "embed" in encoder.heads else "hidden"
    rows = [row for (row,) in encoder.run(encodings, head)]
    return np.stack([row.reshape(-1, row.shape[-1]).mean(0) for row in rows])


def _linear_layers(checkpoint: Checkpoint) -> list[str]:
    """The names below `bert.layers` of all linear layers that can be int8."""
    names = quantized.quantizable(checkpoint.model.state_dict())
    if not names:
        raise InputError(f"{checkpoint.name} has no linear layers in its encoder")
    return [name.removeprefix(quantized.LAYERS).removesuffix(".weight") for name in names]


def _by_number(linear: Sequence[str]) -> dict[str, list[str]]:
    """The linear layers by the number of the encoder's layer they belong to."""
    groups: dict[str, list[str]] = {}
    for name in linear:
        number = re.match(r"\d+", name)
        groups.setdefault(number.group() if number else name, []).append(name)
    return groups
