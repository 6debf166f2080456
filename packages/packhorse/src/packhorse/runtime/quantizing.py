"""Decide which layers of a model can be int8 or float8, by what it does to vectors of real texts.

Nearly always all can. If vectors move too far from fp32 (`quality`), every layer is tried alone in
the format, and those that move vectors most are kept as floats one after another until the rest is
good enough. That takes as many runs over the texts as there are layers, and is done only then. With
a `Gate` good enough is what keeps the score of a user's own task.

float8 is measured where it would run, or by the same rounded numbers in fp32 (`float8_inference`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from packhorse.checkpoint import Checkpoint, quantized
from packhorse.device import FLOAT8
from packhorse.errors import InputError
from packhorse.runtime import quality
from packhorse.runtime.calibration import calibrate
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import open_checkpoint
from packhorse.runtime.quality import QualityReport

Load = Callable[..., Checkpoint]
Score = Callable[[Encoder], float]  # of a task; more is better
Progress = Callable[[int, int], None]  # runs over the texts: done, and how many in all
CPU = torch.device("cpu")
MOST_KEPT = 0.5  # of the layers; a model that needs more gains little


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """A checkpoint in fp32 with the layers to keep so, and how near it stays in int8 or float8."""

    checkpoint: Checkpoint
    quality: QualityReport
    layers: int  # linear layers that are rounded
    good: bool
    score: float | None = None  # of the gate's task
    exact_score: float | None = None  # in fp32


@dataclass(frozen=True, slots=True)
class Gate:
    """A task of the user's own, and the share of fp32's score that has to be kept."""

    score: Score
    keep: float


class _Trial(NamedTuple):
    quality: QualityReport
    score: float | None
    good: bool


def choose_layers(
    load: Load,
    texts: Sequence[str],
    progress: Progress | None = None,
    *,
    dtype: torch.dtype = torch.int8,
    device: torch.device = CPU,
    gate: Gate | None = None,
) -> QuantizedModel:
    """Return the model with as few layers kept as floats as its quality on the texts needs.

    `load` opens the checkpoint, as often as it is called. If half of the layers are not enough, the
    result says so. float8 is calibrated by the texts.
    """
    progress = progress or (lambda done, total: None)
    progress(0, 2)
    encoder = open_checkpoint(load, device, torch.float32)
    exact = _vectors(encoder, texts)
    exact_score = gate.score(encoder) if gate else None
    if exact_score is not None and not exact_score > 0:
        raise InputError(
            f"{encoder.name} scores {exact_score:.4f} on the task in fp32, of which no share "
            "can be kept; check the task and its data"
        )
    checkpoint = load(device=CPU, dtype=torch.float32)
    linear = _linear_layers(checkpoint)
    never: tuple[str, ...] = ()
    if dtype == FLOAT8:
        model = load(device=device, dtype=torch.float32)
        scales = calibrate(model, encoder.tokenizer, texts, device)
        checkpoint = replace(checkpoint, scales=scales)
        never = tuple(name for name in linear if name not in scales)
        linear = [name for name in linear if name in scales]
        if not linear:
            raise InputError(f"{checkpoint.name} has no linear layer that fits float8's products")
    del encoder

    def measure(kept: tuple[str, ...]) -> _Trial:
        def load_kept(**options: object) -> Checkpoint:
            return replace(load(**options), kept=kept, scales=checkpoint.scales)

        encoder = open_checkpoint(load_kept, device, dtype)
        near = quality.compare(_vectors(encoder, texts), exact)
        if gate is None or exact_score is None:
            return _Trial(near, None, near.good)
        score = gate.score(encoder)
        return _Trial(near, score, score >= gate.keep * exact_score)

    progress(1, 2)
    kept = never
    best = measure(kept)
    progress(2, 2)
    if not best.good:
        groups = _by_number(linear)
        most = int(len(groups) * MOST_KEPT)
        total = 2 + len(groups) + most
        alone: dict[str, float] = {}
        for number, names in groups.items():
            others = tuple(set(linear) - set(names))
            alone[number] = measure((*never, *others)).quality.cosine_mean
            progress(2 + len(alone), total)
        worst_first = sorted(alone, key=alone.__getitem__)
        for done, number in enumerate(worst_first[:most], 1):
            kept += tuple(groups[number])
            best = measure(kept)
            progress(total if best.good else 2 + len(groups) + done, total)
            if best.good:
                break
    return QuantizedModel(
        checkpoint=replace(checkpoint, kept=kept),
        quality=best.quality,
        layers=len(linear) + len(never) - len(kept),
        good=best.good,
        score=best.score,
        exact_score=exact_score,
    )


def _vectors(encoder: Encoder, texts: Sequence[str]) -> np.ndarray:
    """A vector per text; the mean of the hidden states if the model makes none."""
    encodings = encoder.tokenizer.encode(texts, encoder.max_length)
    head = "embed" if "embed" in encoder.heads else "hidden"
    rows = [row for (row,) in encoder.run(encodings, head)]
    return np.stack([row.reshape(-1, row.shape[-1]).mean(0) for row in rows])


def _linear_layers(checkpoint: Checkpoint) -> list[str]:
    """The names below `bert.layers` of all linear layers that can be rounded."""
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
