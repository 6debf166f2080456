"""Which steps a recorded graph may serve; what needs no GPU to be told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from packhorse.data.tasks.targets import TaskBatch, TaskExample, TaskLoader, TrainingTask
from packhorse.optim import LAMB
from packhorse.train import feed, recording

ROW, BATCH = 8, 4


def padded(*lengths: int) -> TaskBatch:
    """A batch of layout "padded", filled up as a compiled model gets it."""
    sequences = [SimpleNamespace(ids=[5] * length, types=[0] * length) for length in lengths]
    examples: list[Any] = [TaskExample((sequence,), 1) for sequence in sequences]  # pyright: ignore[reportArgumentType]
    (batch,) = TaskLoader(
        TrainingTask(examples, "single_label", ("no", "yes")),
        examples=BATCH,
        epochs=1,
        shuffle=False,
        row=ROW,
    )
    shape = feed.BatchShape(slots=4 * BATCH, longest=ROW)
    return feed.to_device(batch, torch.device("cpu"), shape)


@pytest.fixture
def optimizer() -> LAMB:
    return LAMB([nn.Parameter(torch.ones(3))])


def test_a_graph_of_full_rows_does_not_serve_rows_with_gaps(optimizer: LAMB) -> None:
    """Every tensor has the same shape; which results are the caller's is another matter."""
    full, gaps, other_gaps = padded(8, 8, 8, 8), padded(8, 5, 8, 3), padded(3, 8, 8, 5)
    assert len({recording._key(batch, optimizer)[0] for batch in (full, gaps, other_gaps)}) == 1
    places = [batch.packed.places for batch in (full, gaps, other_gaps)]
    assert places == [(0, 1, 2, 3), (0, 1, 3, 4), (0, 2, 3, 4)]
    # What a graph of the first would take for the results of the second.
    slots = torch.arange(len(full.packed))
    assert not torch.equal(full.packed.pick(slots), gaps.packed.pick(slots))
    keys = {recording._key(batch, optimizer) for batch in (full, gaps, other_gaps)}
    assert len(keys) == 3
    assert recording._key(padded(8, 8, 8, 8), optimizer) in keys, "or nothing would be replayed"


def test_only_sequences_side_by_side_are_recorded() -> None:
    assert recording._has_filler_last(padded(8, 8, 8, 8))
    assert recording._has_filler_last(padded(8, 8, 8, 5))  # its filler comes last
    assert not recording._has_filler_last(padded(8, 5, 8, 8))
