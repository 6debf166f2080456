"""Poolings of packed sequences, against plain loops over each sequence by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from packhorse.errors import InputError
from packhorse.model.pooling import POOLINGS, pool
from packhorse.packing.batch import Packed

LENGTHS = (3, 1, 8, 5)
PROMPTS = (1, 0, 4, 5)  # the last sequence is nothing but its prompt


@dataclass(frozen=True)
class FakeSequence:
    """A made-up sequence, with a prompt that is not pooled."""

    ids: np.ndarray
    types: np.ndarray
    prompt_length: int


def weighted(states: Tensor, first: int) -> Tensor:
    """The mean with weights that count up from `first`."""
    weights = torch.arange(first, first + len(states), dtype=states.dtype)
    return (weights[:, None] * states).sum(0) / weights.sum()


def by_loop(mode: str, states: Tensor, prompt: int) -> Tensor:
    rest = states[prompt:]
    if not len(rest):
        return states[0] if mode == "cls" else torch.zeros(states.shape[1])
    return {
        "cls": lambda: rest[0],
        "max": lambda: rest.amax(0),
        "mean": lambda: rest.mean(0),
        "mean_sqrt_len_tokens": lambda: rest.sum(0) / len(rest) ** 0.5,
        "weightedmean": lambda: weighted(rest, prompt + 1),
        "lasttoken": lambda: rest[-1],
    }[mode]()


def make_packed(prompts: tuple[int, ...], spare: int = 0) -> Packed:
    zeros = [np.zeros(length, int) for length in LENGTHS]
    packed = Packed.build([FakeSequence(x, x, n) for x, n in zip(zeros, prompts, strict=True)])
    return packed.pad(len(packed.ids) + spare, 16) if spare else packed


@pytest.mark.parametrize("prompts", [(0, 0, 0, 0), PROMPTS], ids=["whole", "prompts"])
@pytest.mark.parametrize("spare", [0, 30])
@pytest.mark.parametrize("mode", POOLINGS)
def test_poolings_are_their_loops(mode: str, spare: int, prompts: tuple[int, ...]) -> None:
    """Also with dummies and empty slots behind the caller's own sequences."""
    packed = make_packed(prompts, spare)
    assert (packed.prompt_lengths is None) == (not any(prompts))
    hidden = torch.randn(len(packed.ids), 6)
    result = packed.pick(pool(mode, hidden, packed))
    pieces = zip(packed.split(hidden), prompts, strict=True)
    expected = torch.stack([by_loop(mode, piece, prompt) for piece, prompt in pieces])
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("prompts", [(0, 0, 0, 0), PROMPTS], ids=["whole", "prompts"])
@pytest.mark.parametrize("mode", POOLINGS)
def test_nothing_reaches_another_sequence(mode: str, prompts: tuple[int, ...]) -> None:
    packed = make_packed(prompts, spare=12)
    hidden = torch.randn(len(packed.ids), 6, requires_grad=True)
    result = pool(mode, hidden, packed)
    result[2].sum().backward()
    grad = hidden.grad
    assert grad is not None and grad[4 + prompts[2] : 12].abs().sum() > 0
    assert grad[: 4 + prompts[2]].abs().sum() == 0 and grad[12:].abs().sum() == 0
    with torch.no_grad():
        hidden[:4] = torch.nan
        hidden[12:] = torch.inf
        assert torch.equal(pool(mode, hidden, packed)[2], result[2])


def test_a_mode_without_code_is_refused() -> None:
    """It must not be taken for the mean."""
    packed = make_packed((0, 0, 0, 0))
    with pytest.raises(InputError, match="pooling 'median' is unknown; there are cls, max"):
        pool("median", torch.randn(len(packed.ids), 6), packed)


def test_a_prompt_is_no_longer_than_its_sequence() -> None:
    packed = make_packed((9, 9, 9, 9)).pad(32, 8)
    assert packed.prompt_lengths is not None
    assert packed.prompt_lengths.tolist() == [3, 1, 8, 5, 0, 0, 0, 0]
