"""The plot of a training bench: how many sequences a second each way learns from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.bench import plots

if TYPE_CHECKING:
    from packhorse.bench.training import TrainRow


def draw(path: Path, rows: Sequence[TrainRow], about: str) -> None:
    """A bar per way, of the median round, with a mark at the best; the rest in words."""
    found = [row for row in rows if row.problem is None]
    figure = plots.new_figure(11, 1.6 + 0.42 * len(found))
    axes = figure.subplots()
    speeds = [row.sequences_per_second for row in found]
    bars = axes.barh(range(len(found)), speeds, color=[_colour(row) for row in found])
    axes.bar_label(bars, [_label(row) for row in found], padding=4, fontsize=9)
    fastest = [row.best_sequences_per_second for row in found]
    axes.plot(fastest, range(len(found)), "|", color="black", markersize=12)
    axes.set_yticks(range(len(found)), [row.way for row in found])
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.margins(x=0.45)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(plots.thousands)
    axes.set_xlabel("sequences per second; median round, and the best (mark)")
    plots.plain_axes(axes, "")
    figure.suptitle(about, x=0.01, ha="left", fontsize=11)
    plots.save_figure(figure, path)


def _colour(row: TrainRow) -> str:
    if row.way.startswith("packhorse"):
        return plots.OURS
    return plots.PADDING if "padded" in row.way else plots.GREY


def _label(row: TrainRow) -> str:
    more = [f"{row.tokens_per_second:,.0f} real tokens/s"]
    if row.over_padded is not None:
        more.insert(0, f"{row.over_padded:.2f}x")
    if row.mfu is not None:
        more.append(f"MFU {row.mfu:.0%}")
    return f"{row.sequences_per_second:,.0f}  ({', '.join(more)})"
