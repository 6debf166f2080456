"""The packing rule: adapt hyperparameters that were tuned without packing to packed rows.

A packed row holds several sequences, so a batch of the same number of rows is a larger batch. Krell
et al. 2021 (arXiv 2107.02027) give two ways to train as before. Either a step keeps its number of
sequences: fewer rows, nothing else changes, and loss curves over sequences match those without
packing. Or a step keeps its number of rows, and with it the device's efficiency; then LAMB keeps
its learning rate, but its running averages must decay faster, because the same number of sequences
is now fewer steps. One step with βᵖ decays as much as p steps with β.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packhorse.errors import InputError


@dataclass(frozen=True, slots=True)
class ScaledHyperparameters:
    """Hyperparameters for packed rows; `sequences` is the average number per step."""

    betas: tuple[float, float]
    lr: float
    rows: int
    sequences: float


def packing_rule(
    betas: tuple[float, float],
    lr: float,
    batch: int,
    factor: float,
    keep: Literal["batch", "betas"] = "betas",
) -> ScaledHyperparameters:
    """Adapt `betas`, `lr` and `batch` to rows that hold `factor` sequences on average.

    keep: "betas" divides the batch, to the nearest row; "batch" raises the betas to the factor.

    Take a batch of 1,536 sequences, and two sequences per row. Half the rows are the same batch:

    >>> packing_rule((0.9, 0.999), 2e-3, batch=1536, factor=2.0)
    ScaledHyperparameters(betas=(0.9, 0.999), lr=0.002, rows=768, sequences=1536.0)

    Or all the rows: twice the sequences per step, and averages over half as many steps:

    >>> packing_rule((0.5, 0.75), 2e-3, batch=1536, factor=2.0, keep="batch")
    ScaledHyperparameters(betas=(0.25, 0.5625), lr=0.002, rows=1536, sequences=3072.0)
    """
    if not factor >= 1 or batch < 1:
        raise InputError(f"batch {batch} and packing factor {factor} must both be at least 1")
    if not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"betas {betas} must lie from 0 to below 1")
    if keep == "betas":
        rows = max(1, round(batch / factor))
        return ScaledHyperparameters(betas, lr, rows, rows * factor)
    if keep == "batch":
        return ScaledHyperparameters(
            (betas[0] ** factor, betas[1] ** factor), lr, batch, batch * factor
        )
    raise InputError(f"keep={keep!r} is unknown; keep the 'batch' or the 'betas'")
