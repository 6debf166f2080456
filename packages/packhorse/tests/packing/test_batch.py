"""Packed: every shape of it holds the same sequences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import InputError
from packhorse.packing.batch import Packed


class Made(NamedTuple):
    ids: np.ndarray
    types: np.ndarray


def make(lengths: list[int]) -> list[Made]:
    counter = iter(range(1, 10**6))
    return [
        Made(np.array([next(counter) for _ in range(n)]), np.full(n, i % 2))
        for i, n in enumerate(lengths)
    ]


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(LENGTHS)
def test_ragged_lays_sequences_end_to_end(lengths: list[int]) -> None:
    sequences = make(lengths)
    packed = Packed.build(sequences)
    assert len(packed.ids) == sum(lengths)
    assert packed.lengths.tolist() == lengths
    assert packed.max_seqlen == max(lengths)
    for piece, location, sequence in zip(
        packed.split(packed.ids), packed.split(packed.positions), sequences, strict=True
    ):
        assert piece.tolist() == sequence.ids.tolist()
        assert location.tolist() == list(range(len(sequence.ids)))


@given(LENGTHS, st.integers(0, 90), st.integers(0, 5))
def test_a_bucket_only_adds_dummies(lengths: list[int], spare: int, slots: int) -> None:
    packed = Packed.build(make(lengths))
    dummies = -(-spare // packed.max_seqlen)
    bucket = packed.pad(len(packed.ids) + spare, len(packed) + dummies + slots)
    assert len(bucket.ids) == sum(lengths) + spare
    assert len(bucket) == len(lengths) + dummies + slots
    assert bucket.lengths.max() <= packed.max_seqlen
    assert int(bucket.cu_seqlens[-1]) == len(bucket.ids)
    assert bucket.positions.max() < packed.max_seqlen
    for a, b in zip(packed.split(packed.ids), bucket.split(bucket.ids), strict=True):
        assert torch.equal(a, b)
    numbers = torch.arange(len(bucket))
    assert bucket.pick(numbers).tolist() == list(range(len(lengths)))


@given(LENGTHS, st.randoms())
def test_rows_hold_every_sequence_in_its_row(lengths: list[int], random) -> None:
    sequences = make(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    packs = [order[i : i + 2] for i in range(0, len(order), 2)]
    packed = Packed.rows(sequences, packs, capacity=80)
    assert len(packed.ids) == 80 * len(packs)
    for piece, sequence in zip(packed.split(packed.ids), sequences, strict=True):
        assert piece.tolist() == sequence.ids.tolist()
    assert packed.positions.max() < max(lengths), "a row's tail took positions of its own"
    # No sequence crosses a row: rows begin and end at boundaries.
    assert set(range(0, len(packed.ids) + 1, 80)) <= set(packed.cu_seqlens.tolist())


def test_split_at_some_tokens() -> None:
    packed = Packed.build(make([3, 1, 4]))
    at = torch.tensor([0, 2, 5, 7])
    pieces = packed.split(packed.ids[at], at)
    assert [piece.tolist() for piece in pieces] == [[1, 3], [], [6, 8]]


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: Packed.build([]), "no sequence"),
        (lambda: Packed.build(make([2, 0])), "sequence 1 has no tokens"),
        (lambda: Packed.build(make([5])).pad(4, 9), "do not fit"),
        (lambda: Packed.build(make([5])).pad(12, 2), "do not fit"),
        (lambda: Packed.rows(make([5, 6]), [[0, 1]], 10), "11 tokens, but a row holds 10"),
        (lambda: Packed.rows(make([5, 6]), [[0]], 10), "exactly once"),
        (lambda: Packed.rows(make([5, 6]), [[0, 1], [0]], 20), "exactly once"),
        (lambda: Packed.rows(make([5, 6]), [[0, 5]], 20), "exactly once"),
    ],
)
def test_what_cannot_be_laid_is_refused(make_it, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_it()


def test_moving_to_where_it_is_costs_nothing() -> None:
    packed = Packed.build(make([2]))
    assert packed.to("cpu") is packed
    assert packed.to("meta").ids.is_meta
