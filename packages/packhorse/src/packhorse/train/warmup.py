"""Compile what a run will need before it begins, on made-up tokens.

Compiled code belongs to shapes, so the made-up batches have those of the real ones: a full part of
a step, and an evaluation's usual batch. No row of the data is read, and nothing is learned: the
optimizer makes no step, gradients go, and the loop seeds the random numbers that dropout took when
it begins. A shape that is met only once, such as the last batch of an evaluation, is compiled when
it comes.

Shapes: T tokens, S sequences.
"""

from __future__ import annotations

from typing import Any

import torch

from packhorse.data.packed.loader import PretrainingBatch
from packhorse.packing.batch import Packed
from packhorse.train import feed
from packhorse.train.job import Job

MASKED = 7  # every so many tokens


def warm(job: Job) -> None:
    """Have a step and an evaluation compiled; nothing to do for a model that is not."""
    if not job.compiled:
        return
    device = job.place.device
    longest = feed.open_dataset(job.settings.train, "train").manifest.layout.capacity
    step = feed.placed(made_up(job.feed.shape.tokens, longest), device, job.feed.shape)
    loss, _ = job.objective.loss(job.model, step)
    loss.backward()
    job.optimizer.zero_grad(set_to_none=True)
    if job.feed.evaluate_on is not None:
        tokens = _at_once(job.feed.evaluate_on())
        usual = feed.placed(made_up(tokens, longest), device, job.feed.eval_shape)
        job.objective.evaluate(job.model, [usual])


def made_up(tokens: int, longest: int) -> PretrainingBatch:
    """So many tokens, in sequences as long as can be."""
    bounds = torch.tensor([*range(0, tokens, longest), tokens], dtype=torch.int32)
    zeros, sequences = torch.zeros(tokens, dtype=torch.int64), len(bounds) - 1
    places = tuple(range(sequences))
    positions = torch.arange(tokens) % longest
    packed = Packed(zeros, zeros, positions, bounds, min(tokens, longest), places)
    masked = torch.arange(0, tokens, MASKED)
    labels = torch.zeros(sequences, dtype=torch.int64)
    return PretrainingBatch(packed, masked, torch.zeros_like(masked), labels, sequences, tokens, {})


def _at_once(loader: Any) -> int:
    """Tokens of a usual batch of an evaluation, told by the data's table of contents."""
    manifest = loader.dataset.manifest
    rows = min(-(-loader.rows // loader.world), manifest.rows)
    return round(rows * manifest.tokens / manifest.rows)
