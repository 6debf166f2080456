"""Which elements a loader reads: whole batches joined into one, or one process's share of the data.

PopTorch divides the data set itself among processes; here the order of its indices is divided, so
that the data set stays the user's own object and torch's workers need to know nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.utils.data import Sampler

from packhorse.errors import InputError
from packhorse_port.options import Options


class Joined(Sampler[list[int]]):
    """The batches of a sampler, so many joined into one that a host call has all it consumes."""

    def __init__(self, batches: Iterable[Sequence[int]], count: int, drop_last: bool) -> None:
        self.batches, self.count, self.drop_last = batches, count, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        held: list[Sequence[int]] = []
        uneven = False
        for batch in self.batches:
            sizes = f"{len(held[0]) if held else 0} and {len(batch)}"
            held.append(batch)
            if uneven or (self.drop_last and len(batch) != len(held[0])):
                raise InputError(
                    f"a host call consumes {self.count} batches of one size, and the batch_sampler"
                    f" gave {sizes} elements; build it with drop_last=True"
                )
            uneven = len(batch) != len(held[0])  # which only the last batch of all may be
            if len(held) == self.count:
                yield [index for each in held for index in each]
                held = []
        if held and not self.drop_last:
            yield [index for each in held for index in each]

    def __len__(self) -> int:
        whole_ones, rest = divmod(len(self.batches), self.count)  # pyright: ignore[reportArgumentType]
        return whole_ones + (rest > 0 and not self.drop_last)


class Share(Sampler[int]):
    """The elements of one of several processes: a block of the data, or of its shuffled order.

    All processes draw the same order, from the options' seed and the number of the epoch. With
    `drop_last` each has the same number of combined batches, or those with more would wait forever.
    """

    def __init__(
        self, elements: int, options: Options, combined: int, shuffle: bool, drop_last: bool
    ) -> None:
        count, number = options.Distributed.numProcesses, options.Distributed.processId
        if shuffle and options.random_seed is None:
            raise InputError(
                f"{count} processes shuffle alike only from one seed; write opts.randomSeed(n)"
                " before the DataLoader"
            )
        self.elements, self.seed, self.shuffle, self.epoch = (
            elements,
            options.random_seed,
            shuffle,
            0,
        )
        if drop_last:
            size = elements // (combined * count) * combined
            self.begin, self.end = number * size, (number + 1) * size
        else:
            self.begin, self.end = elements * number // count, elements * (number + 1) // count

    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] = range(self.elements)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.elements, generator=generator).tolist()
        self.epoch += 1
        return iter(order[self.begin : self.end])

    def __len__(self) -> int:
        return self.end - self.begin
