"""Heads over packed sequences, against plain loops over each sequence by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packhorse.model.config import BertConfig
from packhorse.model.heads import POOLINGS, Dense, Embed, PooledLabels, Pooler
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import Made

LENGTHS = (3, 1, 8, 5)
LOOPS = {
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "max": lambda states: states.amax(0),
    "mean_sqrt_len": lambda states: states.sum(0) / len(states) ** 0.5,
}


def make_packed(spare: int = 0) -> Packed:
    packed = Packed.build([Made(np.zeros(n, int), np.zeros(n, int)) for n in LENGTHS])
    return packed.pad(len(packed.ids) + spare, 16) if spare else packed


@pytest.mark.parametrize("spare", [0, 30])
@pytest.mark.parametrize("how", POOLINGS)
def test_poolings_are_their_loops(how: str, spare: int) -> None:
    """Also with dummies and empty slots behind the caller's own sequences."""
    packed = make_packed(spare)
    hidden = torch.randn(len(packed.ids), 6)
    found = packed.pick(Embed((how,), normalise=False)(hidden, packed))
    expected = torch.stack([LOOPS[how](piece) for piece in packed.split(hidden)])
    assert found.shape == (4, 6)
    torch.testing.assert_close(found, expected)


def test_several_poolings_stand_side_by_side_and_are_projected() -> None:
    packed = make_packed()
    hidden = torch.randn(len(packed.ids), 6)
    dense = Dense(12, 5, activation="tanh")
    head = Embed(("mean", "max"), dense=[dense])
    assert head.width(6) == 5 and Embed(("mean", "max")).width(6) == 12
    both = torch.cat([Embed((how,), normalise=False)(hidden, packed) for how in head.pooling], 1)
    expected = torch.nn.functional.normalize(torch.tanh(dense.linear(both)), dim=-1)
    torch.testing.assert_close(head(hidden, packed), expected)


def test_half_precision_is_averaged_in_float() -> None:
    packed = make_packed()
    hidden = torch.randn(len(packed.ids), 6, dtype=torch.bfloat16)
    assert Embed(("mean",))(hidden, packed).dtype == torch.float32


def test_a_pooled_head_reads_first_tokens_only() -> None:
    config = BertConfig(10, 6, 1, 1, 8)
    head = PooledLabels(config, Pooler(config), 3).eval()
    packed = make_packed()
    hidden = torch.randn(len(packed.ids), 6)
    before = head(hidden, packed)
    others = torch.ones(len(hidden), dtype=torch.bool)
    others[packed.starts.long()] = False
    hidden[others] += 1
    assert torch.equal(before, head(hidden, packed))
    hidden[packed.starts.long()] += 1
    assert not torch.equal(before, head(hidden, packed))


@pytest.mark.parametrize("how", ["mean", "max", "cls"])
def test_gradients_stay_with_their_sequence(how: str) -> None:
    packed = make_packed(spare=12)
    hidden = torch.randn(len(packed.ids), 6, requires_grad=True)
    Embed((how,), normalise=False)(hidden, packed)[2].sum().backward()
    grad = hidden.grad
    assert grad is not None and grad[4:12].abs().sum() > 0
    assert grad[:4].abs().sum() == 0 and grad[12:].abs().sum() == 0
