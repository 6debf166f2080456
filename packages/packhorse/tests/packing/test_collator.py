"""Batches out of torch's DataLoader, with workers, are those that one would build by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from packhorse.errors import InputError
from packhorse.packing import Packed, SequenceCollator, assign, plan

LENGTHS = [5, 40, 12, 3, 33, 8, 20, 1, 17]
EXAMPLES = [
    {
        "ids": list(range(100 * index, 100 * index + length)),
        "labels": [index] * length,
        "weights": np.full(length, 0.5, np.float32),
        "score": index / 2,
        "name": f"number {index}",
        "vector": np.arange(3) + index,
    }
    for index, length in enumerate(LENGTHS)
]


@pytest.mark.parametrize("workers", [0, 2])
def test_packs_are_batches(workers: int) -> None:
    packs = plan(lengths=LENGTHS, capacity=48)
    loader = DataLoader(
        EXAMPLES,
        batch_sampler=packs,
        collate_fn=SequenceCollator(per_token=["labels", "weights"]),
        num_workers=workers,
    )
    batches = list(loader)
    assert len(batches) == len(loader) == len(packs)
    for indices, (packed, fields) in zip(packs, batches, strict=True):
        expected = [EXAMPLES[index] for index in indices]
        assert isinstance(packed, Packed) and len(packed.ids) <= 48
        pieces = packed.split(packed.ids)
        assert [piece.tolist() for piece in pieces] == [example["ids"] for example in expected]
        labels = packed.split(fields["labels"])
        assert [x.tolist() for x in labels] == [example["labels"] for example in expected]
        assert fields["weights"].dtype == torch.float32 and bool((fields["weights"] == 0.5).all())
        assert fields["score"].dtype == torch.get_default_dtype()
        assert fields["score"].tolist() == [index / 2 for index in indices]
        assert fields["name"] == [f"number {index}" for index in indices]
        assert fields["vector"].tolist() == [[i, i + 1, i + 2] for i in indices]


def test_ids_alone_need_no_collator() -> None:
    sequences = [example["ids"] for example in EXAMPLES]
    packs = plan(lengths=LENGTHS, capacity=48)
    reassigned = assign(packs.plan, LENGTHS, seed=1)
    for epoch in (packs, reassigned):
        loader = DataLoader(
            sequences,
            batch_sampler=epoch,
            collate_fn=Packed.build,
            num_workers=1,
        )
        pieces = [piece.tolist() for packed in loader for piece in packed.split(packed.ids)]
        assert sorted(pieces) == sorted(sequences)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "no example"),
        ([[1, 2]], "example 0 is a list, not a dictionary; .* collate_fn=Packed.build"),
        ([{"tokens": [1], "labels": [1]}], "example 0 has no field 'ids'; it has 'tokens'"),
        ([{"ids": [1]}], "example 0 has no field 'labels'"),
        ([{"ids": [1], "labels": [1], "x": 1}, {"ids": [1], "labels": [1]}], "1 has no field 'x'"),
        ([{"ids": [1, 2], "labels": [1]}], "'labels' cannot be collated: piece 0 has 1 values"),
        (
            [{"ids": [1], "labels": [1], "x": np.ones(n)} for n in (1, 2)],
            "'x' cannot be collated: .*; is it one of per_token",
        ),
    ],
)
def test_examples_that_cannot_be_packed(examples: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SequenceCollator(per_token=["labels"])(examples)


def test_per_token_is_a_list() -> None:
    with pytest.raises(InputError, match=r"pass \['labels'\]"):
        SequenceCollator(per_token="labels")
