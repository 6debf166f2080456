"""Plots of packings, padding, datasets and runs, as PNG, SVG or PDF.

Figures are made without pyplot, so they need no window system and share no global state. Our
results have one color throughout, padding another, everything else is gray.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from packhorse.errors import InputError, MissingExtra
from packhorse.reports.tables import depth_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from packhorse.data.packed.statistics import Statistics
    from packhorse.reports.packing import PackingRow
    from packhorse.reports.waste import WasteRow
    from packhorse.train.submission import RunResult

FORMATS = (".png", ".svg", ".pdf")
OURS = "#14607a"
OURS_LIGHT = "#6aaec4"
GRAY = "#8a8f94"
LIGHT = "#c3c7cb"
PADDING = "#e0a96d"
LINES = {"optimum": OURS, "spfhp": "#8a8f94", "lpfhp": "#c0803f", "nnlshp": "#7a5c99"}


def check(path: Path | None) -> None:
    """Check before the long part of a command that a plot can be written there."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"cannot plot {path}: the name of a plot ends in {', '.join(FORMATS)}")
    if not path.expanduser().resolve().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    new_figure(1, 1)  # raises if matplotlib is not installed


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; sizes are inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the path's suffix."""
    try:
        figure.savefig(path.expanduser(), dpi=150)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def plain_axes(axes: Axes, title: str) -> None:
    """Put the title on the left, and remove the frame above and on the right."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def draw_plans(path: Path, counts: np.ndarray, capacity: int, rows: Sequence[PackingRow]) -> None:
    """Plot the lengths, and how full rows are without packing and with each plan."""
    figure = new_figure(10, 3.6)
    length_axes, share_axes = figure.subplots(1, 2, width_ratios=[1.1, 1])
    draw_lengths(length_axes, counts)
    plans = [row for row in rows if row.problem is None]
    tokens = int(counts @ np.arange(1, len(counts) + 1))
    bars = [("one per row", tokens / (int(counts.sum()) * capacity), LIGHT)]
    for plan in plans:
        color = OURS if plan.algorithm == "optimum" else GRAY
        bars.append((plan.algorithm, plan.efficiency, color))
    _draw_shares(share_axes, bars)
    depth = depth_name(plans[0].max_per_pack) if plans else ""
    plain_axes(share_axes, f"How full a row of {capacity} is ({depth} per pack)")
    save_figure(figure, path)


def draw_packing(path: Path, rows: Sequence[PackingRow]) -> None:
    """Plot efficiency over depth, one line per algorithm."""
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    depths = list(dict.fromkeys(depth_name(row.max_per_pack) for row in rows))
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        plans = [row for row in rows if row.algorithm == algorithm and row.problem is None]
        is_ours = algorithm == "optimum"
        axes.plot(
            [depths.index(depth_name(plan.max_per_pack)) for plan in plans],
            [100 * plan.efficiency for plan in plans],
            "o-",
            label=algorithm,
            color=LINES.get(algorithm, GRAY),
            linewidth=2.5 if is_ours else 1.5,
            zorder=3 if is_ours else 2,
        )
    axes.set_xticks(range(len(depths)), depths)
    axes.set_xlabel("maximum sequences per pack")
    axes.set_ylabel("slots that hold a token, %")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    plain_axes(axes, "Packing efficiency by depth")
    save_figure(figure, path)


def draw_waste(path: Path, counts: np.ndarray, rows: Sequence[WasteRow]) -> None:
    """Plot the lengths, and the real tokens and padding of each way."""
    figure = new_figure(11, 3.6)
    length_axes, token_axes = figure.subplots(1, 2, width_ratios=[1, 1.1])
    draw_lengths(length_axes, counts)
    real = [row.computed * (1 - row.padding) for row in rows]
    padding = [row.computed * row.padding for row in rows]
    positions = range(len(rows))
    token_axes.barh(positions, real, color=OURS, label="tokens")
    bars = token_axes.barh(positions, padding, left=real, color=PADDING, label="padding")
    token_axes.bar_label(
        bars, [f"{row.padding:.1%} padding" for row in rows], padding=3, fontsize=9
    )
    token_axes.set_yticks(positions, [row.way for row in rows])
    token_axes.invert_yaxis()
    token_axes.tick_params(left=False)
    token_axes.margins(x=0.28)
    token_axes.locator_params(axis="x", nbins=5)
    token_axes.xaxis.set_major_formatter(thousands)
    token_axes.set_xlabel("tokens computed")
    plain_axes(token_axes, "What is computed")
    save_figure(figure, path)


def draw_speeds(
    path: Path,
    names: Sequence[str],
    speeds: Sequence[float],
    title: str,
    unit: str = "texts per second",
    highlighted: int = 0,
) -> None:
    """Plot a bar for the speed of each way to do the same work."""
    figure = new_figure(8, 1.2 + 0.4 * len(names))
    axes = figure.subplots()
    colors = [OURS if i == highlighted else GRAY for i in range(len(names))]
    bars = axes.barh(range(len(names)), speeds, color=colors)
    digits = 0 if max(speeds) >= 100 else 2
    axes.bar_label(bars, [f"{speed:,.{digits}f}" for speed in speeds], padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.margins(x=0.1)
    axes.set_xlabel(unit)
    plain_axes(axes, title)
    save_figure(figure, path)


def draw_lengths(axes: Axes, counts: np.ndarray) -> None:
    """Plot the histogram of lengths, and their mean."""
    lengths = np.arange(1, len(counts) + 1)
    bins = min(64, len(counts))
    axes.hist(lengths, bins=bins, weights=counts, color=OURS, rwidth=0.92)
    mean = float(counts @ lengths / counts.sum())
    axes.axvline(mean, color=PADDING, linewidth=1.5)
    on_left = mean > len(counts) / 2  # the label goes to the side that has room
    axes.annotate(
        f"mean {mean:.0f}",
        (mean, 0.96),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if on_left else 4, 0),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="top",
        fontsize=9,
    )
    axes.set_xlabel("tokens")
    axes.set_ylabel("sequences")
    axes.yaxis.set_major_formatter(thousands)
    plain_axes(axes, f"{int(counts.sum()):,} sequences by length")


def thousands(value: float, _: object) -> str:
    """Format a tick with commas between thousands; the second argument is its position."""
    return f"{value:,.0f}"


def _draw_shares(axes: Axes, bars: Sequence[tuple[str, float, str]]) -> None:
    names, shares, colors = zip(*bars, strict=True)
    drawn = axes.barh(range(len(names)), [100 * share for share in shares], color=colors)
    axes.bar_label(drawn, [f"{share:.2%}" for share in shares], padding=3, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 20))
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.set_xlabel("slots that hold a token, %")


def draw_corpus(path: Path, statistics: Statistics) -> None:
    """Plot lengths before packing and tokens per row after it.

    The scale is logarithmic, because most sequences have the maximum length.
    """
    figure = new_figure(11, 3.6)
    length_axes, row_axes = figure.subplots(1, 2)
    manifest = statistics.manifest
    draw_lengths(length_axes, statistics.lengths)
    tokens = np.arange(1, len(statistics.row_tokens) + 1)
    bins = min(64, len(tokens))
    row_axes.hist(tokens, bins=bins, weights=statistics.row_tokens, color=OURS, rwidth=0.92)
    for axes in (length_axes, row_axes):
        axes.set_yscale("log")
    row_axes.set_xlabel("tokens")
    row_axes.set_ylabel("rows")
    full = f"{manifest.efficiency:.2%} full"
    plain_axes(row_axes, f"{manifest.rows:,} rows of {manifest.layout.capacity}, {full}")
    save_figure(figure, path)


def draw_accuracies(path: Path, results: Sequence[RunResult], target: float) -> None:
    """Plot the accuracy of each run over its sequences; runs that missed the target are gray."""
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    for result in results:
        sequences, accuracies = (
            zip(*result.accuracies, strict=True) if result.accuracies else ((), ())
        )
        color = OURS if result.reached else GRAY
        axes.plot(sequences, accuracies, "o-", markersize=3, linewidth=1.2, color=color)
    axes.axhline(target, color=PADDING, linestyle="--")
    axes.annotate(
        f"target {target:g}",
        (0, target),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
    )
    axes.set_xlabel("training sequences")
    axes.set_ylabel("accuracy of masked words")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    reached = sum(result.reached for result in results)
    plain_axes(axes, f"{reached} of {len(results)} runs reached the target")
    save_figure(figure, path)
