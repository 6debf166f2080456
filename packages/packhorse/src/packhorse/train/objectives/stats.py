"""Figures of batches as sums and counts, which add up over batches and ranks; means do not.

Sums stay on the device, so that a training step waits for no figure; `means` fetches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.packing.batch import Packed

Gather = Callable[[list[Any]], list[Any]]  # a rank's results to those of all ranks


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Figures of one or more batches; `sums` can be reduced over ranks as it is."""

    names: tuple[str, ...]
    sums: Tensor  # [names, 2]: a sum, and the count to divide it by
    sequences: int  # without dummies
    tokens: int

    @classmethod
    def of(cls, packed: Packed, tokens: int, **pairs: tuple[Tensor, Tensor | float]) -> BatchStats:
        """The figures of a batch, each as its sum and its count."""
        like = next(iter(pairs.values()))[0].detach()
        sums = torch.stack([_scalar(x, like) for pair in pairs.values() for x in pair])
        return cls(tuple(pairs), sums.unflatten(0, (-1, 2)), len(packed.places), tokens)

    def __add__(self, more: BatchStats) -> BatchStats:
        return BatchStats(
            self.names,
            self.sums + more.sums,
            self.sequences + more.sequences,
            self.tokens + more.tokens,
        )

    def cpu(self) -> BatchStats:
        """The same on the host, in double precision."""
        return replace(self, sums=self.sums.cpu().double())

    def means(self) -> dict[str, float]:
        """The mean of each figure; 0 if nothing was counted."""
        pairs = self.sums.cpu().double().tolist()
        return {
            name: total / count if count else 0.0
            for name, (total, count) in zip(self.names, pairs, strict=True)
        }


def _scalar(x: Tensor | float, like: Tensor) -> Tensor:
    # A number is filled in on the device: copying it there would wait for the device's work.
    return x.detach().to(like) if isinstance(x, Tensor) else like.new_full((), x)


def share_of_loss(sums: Tensor, totals: Tensor) -> Tensor:
    """A batch's share of the loss: the sum of each part over that part's total, added up.

    Totals are counts. If one is 0, there is nothing to divide, and the part adds 0.
    """
    return (sums / totals.to(sums, non_blocking=True).clamp(min=1)).sum()


def at_least_fp32(x: Tensor) -> Tensor:
    """In fp32 or wider: a softmax over thousands of half-precision numbers loses digits."""
    return x if x.dtype == torch.float64 else x.float()


def single_process(results: list[Any]) -> list[Any]:
    """Gather without other ranks: the results are already those of all."""
    return results


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients; afterwards the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
