"""What padding costs for a collection of texts: the computed tokens of each way to batch them.

Sequences of uneven length can be padded to the model's length (as fixed shapes need), padded to the
longest of their batch, in order of arrival or sorted by length, or packed into rows. Packhorse's
flat batch computes the real tokens and nothing else; packed rows are for those who need one shape.
Tokens stand for the arithmetic of the linear layers, which at 256 tokens is nine tenths of MiniLM's
and more of a wider model's. Attention, which padding makes more expensive still, is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packhorse.errors import InputError
from packhorse.packing.histogram import histogram_of, plan


@dataclass(frozen=True)
class WasteRow:
    """The tokens that one way to batch the sequences computes."""

    way: str
    computed: int  # tokens, padding included
    padding: float  # share of the computed tokens that is padding
    factor: float  # how many times less is computed than padded in order of arrival


def measure(lengths: np.ndarray, longest: int, batch_size: int) -> list[WasteRow]:
    """Return a row per way; `longest` is the model's length, which no sequence may exceed."""
    if batch_size < 1:
        raise InputError(f"--batch-size is {batch_size}; a batch must have 1 text or more")
    packs = plan(histogram_of(lengths, longest), longest).pack_count
    real = int(lengths.sum())
    arrival = padded_tokens(lengths, batch_size)
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
    """Count the tokens of batches of consecutive sequences, each padded to its longest."""
    starts = np.arange(0, len(lengths), batch_size)
    widths = np.maximum.reduceat(lengths, starts)
    sizes = np.diff(np.append(starts, len(lengths)))
    return int(widths @ sizes)


def cost(computed: int, texts: int, tokens_per_second: float, price: float) -> float:
    """Return what a million such texts cost at `price` per hour and this speed."""
    hours = computed / texts * 1e6 / tokens_per_second / 3600
    return hours * price
