"""The plot of a submission: how accurate each run became, over the sequences it learned from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.reports import plots

if TYPE_CHECKING:
    from packhorse.train.submission import RunResult


def draw(path: Path, results: Sequence[RunResult], target: float) -> None:
    """A line a run, those that missed the target in gray."""
    figure = plots.new_figure(8, 4.2)
    axes = figure.subplots()
    for result in results:
        sequences, accuracies = (
            zip(*result.accuracies, strict=True) if result.accuracies else ((), ())
        )
        color = plots.OURS if result.reached else plots.GRAY
        axes.plot(sequences, accuracies, "o-", markersize=3, linewidth=1.2, color=color)
    axes.axhline(target, color=plots.PADDING, linestyle="--")
    place = {"xytext": (4, 3), "textcoords": "offset points"}
    axes.annotate(f"target {target:g}", (0, target), xycoords=("axes fraction", "data"), **place)
    axes.set_xlabel("sequences learned from")
    axes.set_ylabel("masked words guessed right")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    reached = sum(result.reached for result in results)
    plots.plain_axes(axes, f"{reached} of {len(results)} runs reached the target")
    plots.save_figure(figure, path)
