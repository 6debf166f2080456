"""Packed: every shape of it holds the same sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import InputError
from packhorse.packing import plan
from packhorse.packing.batch import Packed


class FakeSequence(NamedTuple):
    ids: np.ndarray
    types: np.ndarray


def make(lengths: list[int]) -> list[FakeSequence]:
    counter = iter(range(1, 10**6))
    return [
        FakeSequence(np.array([next(counter) for _ in range(n)]), np.full(n, i % 2))
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


@given(LENGTHS)
@settings(max_examples=20)
def test_plain_ids_of_any_kind_are_the_same_batch(lengths: list[int]) -> None:
    sequences = make(lengths)
    expected = Packed.build(sequences)
    arrays = [sequence.ids for sequence in sequences]
    kinds = {
        "lists": [array.tolist() for array in arrays],
        "tuples": [tuple(array.tolist()) for array in arrays],
        "arrays": [array.astype(np.int16) for array in arrays],
        "tensors": [torch.from_numpy(array) for array in arrays],
        "ranges": [range(array[0], array[0] + len(array)) for array in arrays],
    }
    for kind, plain in kinds.items():
        packed = Packed.build(plain)
        assert torch.equal(packed.ids, expected.ids) and packed.ids.dtype == torch.int64, kind
        assert torch.equal(packed.cu_seqlens, expected.cu_seqlens), kind
        assert torch.equal(packed.positions, expected.positions), kind
        assert not packed.types.any() and packed.types.shape == packed.ids.shape, kind


def test_a_plan_of_plain_ids_is_laid_in_rows() -> None:
    sequences = [list(range(n)) for n in (7, 3, 5, 5, 8)]
    packs = plan(lengths=[len(ids) for ids in sequences], capacity=10)
    packed = Packed.rows(sequences, packs, capacity=10)
    assert packed.ids.shape == (30,) and packed.capacity == 10
    assert [piece.tolist() for piece in packed.split(packed.ids)] == sequences


def shapes_of(sequences: list[FakeSequence]) -> dict[str, Packed]:
    """The same sequences ragged, in a bucket, and in rows whose order is not the caller's."""
    packed = Packed.build(sequences)
    backwards = [[index] for index in reversed(range(len(sequences)))]
    return {
        "ragged": packed,
        "bucket": packed.pad(len(packed.ids) + 7, len(packed) + 9),
        "rows": Packed.rows(sequences, backwards, 41),
    }


@given(LENGTHS)
@settings(max_examples=20)
def test_join_is_the_inverse_of_split(lengths: list[int]) -> None:
    for shape, packed in shapes_of(make(lengths)).items():
        labels = [torch.randint(0, 9, (n,)).tolist() for n in lengths]
        joined = packed.join(labels, fill=-100)
        assert joined.shape == packed.ids.shape, shape
        assert [piece.tolist() for piece in packed.split(joined)] == labels, shape
        assert int((joined == -100).sum()) == len(packed.ids) - sum(lengths), shape
        features = [torch.randn(n, 3, requires_grad=True) for n in lengths]
        packed.join(features).sum().backward()
        assert all(torch.equal(x.grad, torch.ones_like(x)) for x in features), shape


@given(LENGTHS)
@settings(max_examples=20)
def test_one_value_per_sequence(lengths: list[int]) -> None:
    pieces = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    for shape, packed in shapes_of(make(lengths)).items():
        # Dummies hold NaN: nothing of them may be read.
        per_token = packed.join(pieces, fill=float("nan")).requires_grad_()
        expected = {
            "first": torch.stack([piece[0] for piece in pieces]),
            "last": torch.stack([piece[-1] for piece in pieces]),
            "mean": torch.stack([piece.mean(0) for piece in pieces]),
        }
        for name, values in expected.items():
            result = getattr(packed, name)(per_token)
            torch.testing.assert_close(result, values, msg=f"{name} of {shape}")
            (gradient,) = torch.autograd.grad(result.sum(), per_token)
            per_sequence = torch.stack([piece.sum(0) for piece in packed.split(gradient)])
            torch.testing.assert_close(per_sequence, torch.ones_like(values), msg=name)
            outside = packed.join([piece * 0 for piece in pieces], fill=1) > 0
            assert not gradient[outside].any(), f"{name} of {shape}"
    flat = Packed.build(make(lengths))
    assert flat.mean(flat.join([piece[:, 0] for piece in pieces])).shape == (len(lengths),)


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
        (lambda: Packed.build([[1, 2], []]), "sequence 1 has no tokens"),
        (lambda: Packed.build([1, 2, 3]), r"sequence 0 is 1; pass a list of sequences"),
        (lambda: Packed.build([[1], [2, 0.5]]), "sequence 1 holds float64"),
        (lambda: Packed.build([[True, False]]), "sequence 0 holds bool"),
        (lambda: Packed.build([[[1, 2], [3, 4]]]), r"sequence 0 has shape \[2, 2\]"),
        (lambda: Packed.build([[[1, 2], [3]]]), "sequence 0 is nested"),
        (lambda: Packed.build(["MKV"]), "sequence 0 is a str; pass its token ids"),
        (lambda: Packed.build([{"ids": [1]}]), "sequence 0 is a dict"),
        (lambda: Packed.build(torch.ones(2, 3).long()), r"shape \[2, 3\] may hold padding"),
        (lambda: Packed.build(np.ones((2, 3), int)), "may hold padding"),
        (lambda: Packed.build([SimpleNamespace(ids=[1])]), "has ids but no types"),
        (
            lambda: Packed.build([FakeSequence(np.ones(3, int), np.ones(2, int))]),
            "3 ids but 2 types",
        ),
        (lambda: Packed.build([[1, 2]]).join([[1, 2], [3]]), "2 pieces for 1 sequences"),
        (lambda: Packed.build([[1, 2], [3]]).join([[1, 2], [3, 4]]), "piece 1 has 2 values"),
        (lambda: Packed.build([[1]]).join([3]), "piece 0 has 0 values"),
    ],
)
def test_what_cannot_be_laid_is_refused(make_it, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_it()


def test_moving_to_where_it_is_costs_nothing() -> None:
    packed = Packed.build(make([2]))
    assert packed.to("cpu") is packed
    assert packed.to("meta").ids.is_meta
