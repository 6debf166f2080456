"""What padding costs a collection of texts: tokens computed for every real one, way by way.

Four ways to bring sequences of uneven length into a batch: every sequence padded to the model's
length (what a fixed shape does), batches padded to their longest in the order of arrival or sorted
by length, and packs. Packhorse's own flat batch computes the real tokens and none besides; packs
are for whoever needs rows of one shape. Tokens stand for the arithmetic of the linear layers, which
at 256 tokens is nine tenths of MiniLM's and more of a wider model's. Attention, which padding makes
dearer still, is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packhorse.errors import InputError
from packhorse.packing.histogram import histogram_of, plan


@dataclass(frozen=True)
class WasteRow:
    """One way to lay the sequences into rows."""

    way: str
    computed: int  # tokens, padding included
    padding: float  # share of the computed tokens that is padding
    factor: float  # how many times less is computed than padded in order of arrival


def measure(lengths: np.ndarray, longest: int, batch_size: int) -> list[WasteRow]:
    """A row a way; `longest` is the model's length, which no sequence may exceed."""
    if batch_size < 1:
        raise InputError(f"a batch of {batch_size} texts is none; pass --batch-size 1 or more")
    packs = plan(histogram_of(lengths, longest), longest).pack_count
    real, arrival = int(lengths.sum()), padded_tokens(lengths, batch_size)
    ways = {
        f"padded to {longest}": len(lengths) * longest,
        f"batches of {batch_size}, as they come": arrival,
        f"batches of {batch_size}, sorted": padded_tokens(np.sort(lengths)[::-1], batch_size),
        f"packed into rows of {longest}": packs * longest,
        "packed flat": real,
    }
    return [
        WasteRow(way, computed, 1 - real / computed, arrival / computed)
        for way, computed in ways.items()
    ]


def padded_tokens(lengths: np.ndarray, batch_size: int) -> int:
    """Tokens computed when consecutive sequences share a batch as wide as the longest of them."""
    starts = np.arange(0, len(lengths), batch_size)
    widths = np.maximum.reduceat(lengths, starts)
    sizes = np.diff(np.append(starts, len(lengths)))
    return int(widths @ sizes)


def cost(computed: int, texts: int, tokens_per_second: float, price: float) -> float:
    """What a million such texts cost at `price` an hour, at this speed in computed tokens."""
    hours = computed / texts * 1e6 / tokens_per_second / 3600
    return hours * price
