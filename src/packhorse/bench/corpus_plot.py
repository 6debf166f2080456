"""The plot of a dataset of packed rows: how long its sequences are, and how full its rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packhorse.bench import plots

if TYPE_CHECKING:
    from packhorse.data.packed.statistics import Statistics


def draw(path: Path, statistics: Statistics) -> None:
    """Lengths before packing, and tokens a row after it: logarithmic, for most are the longest."""
    figure = plots.new_figure(11, 3.6)
    left, right = figure.subplots(1, 2)
    manifest = statistics.manifest
    plots.draw_lengths(left, statistics.lengths)
    tokens = np.arange(1, len(statistics.row_tokens) + 1)
    bins = min(64, len(tokens))
    right.hist(tokens, bins=bins, weights=statistics.row_tokens, color=plots.OURS, rwidth=0.92)
    for axes in (left, right):
        axes.set_yscale("log")
    right.set_xlabel("tokens")
    right.set_ylabel("rows")
    full = f"{manifest.efficiency:.2%} full"
    plots.plain_axes(right, f"{manifest.rows:,} rows of {manifest.layout.capacity}, {full}")
    plots.save_figure(figure, path)
