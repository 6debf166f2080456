"""How an encoder cuts its sequences into batches: by tokens, longest together.

A batch is filled up to a budget of tokens, so one long text never makes a batch of many short ones
expensive and memory is the same whatever comes. Sequences are taken by length: packing does not
need that, but kernels that work on groups of like length run faster on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packhorse.packing.batch import Packed, TokenSequence
from packhorse.packing.online import OnlinePacker


def by_tokens(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of each batch; a sequence longer than the budget gets a batch of its own."""
    batch: list[int] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and used + lengths[index] > budget:
            yield batch
            batch, used = [], 0
        batch.append(index)
        used += lengths[index]
    if batch:
        yield batch


def lay(sequences: Sequence[TokenSequence], capacity: int) -> Packed:
    """One flat batch; or, where a kernel needs rows, rows of `capacity` tokens filled first-fit."""
    if not capacity:
        return Packed.build(sequences)
    packer = OnlinePacker(capacity, rows=None, policy="first_fit")
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i].ids))
    for index in order:
        packer.add(len(sequences[index].ids))
    packs = [[order[arrival] for arrival in row] for row in packer.flush()]
    return Packed.rows(sequences, packs, capacity)
