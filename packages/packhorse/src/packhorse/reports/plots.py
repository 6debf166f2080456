"""Plots of packings, padding, datasets and runs, as PNG, SVG or PDF.

Figures are made without pyplot, so no window system and no global state are involved. Ours has one
colour throughout, padding another, all else is grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.errors import InputError, MissingExtra
from packhorse.reports.tables import depth_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from packhorse.data.packed.statistics import Statistics
    from packhorse.reports.packing import PackingRow
    from packhorse.reports.waste import WasteRow
    from packhorse.train.submission import Result

FORMATS = (".png", ".svg", ".pdf")
OURS, OURS_LIGHT, GREY, LIGHT, PADDING = "#14607a", "#6aaec4", "#8a8f94", "#c3c7cb", "#e0a96d"
LINES = {"optimum": OURS, "spfhp": "#8a8f94", "lpfhp": "#c0803f", "nnlshp": "#7a5c99"}


def check(path: Path | None) -> None:
    """Can a plot be written there? Asked before the long part."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"cannot draw {path}: a plot ends in {', '.join(FORMATS)}")
    if not path.expanduser().resolve().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write it in the form that the name ends in."""
    try:
        figure.savefig(path.expanduser(), dpi=150)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def plain_axes(axes: Axes, title: str) -> None:
    """A title on the left, and no frame above and to the right."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def draw_plans(path: Path, counts: np.ndarray, capacity: int, rows: Sequence[PackingRow]) -> None:
    """The lengths, and how full a row is without packing and with each plan."""
    figure = new_figure(10, 3.6)
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    draw_lengths(left, counts)
    found = [row for row in rows if row.problem is None]
    tokens = int(counts @ np.arange(1, len(counts) + 1))
    bars = [("one a row", tokens / (int(counts.sum()) * capacity), LIGHT)]
    bars += [(r.algorithm, r.efficiency, OURS if r.algorithm == "optimum" else GREY) for r in found]
    _draw_shares(right, bars)
    depth = depth_name(found[0].max_per_pack) if found else ""
    plain_axes(right, f"How full a row of {capacity} is ({depth} per pack)")
    save_figure(figure, path)


def draw_packing(path: Path, rows: Sequence[PackingRow]) -> None:
    """Efficiency over depth, a line an algorithm."""
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    depths = list(dict.fromkeys(depth_name(row.max_per_pack) for row in rows))
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        mine = [r for r in rows if r.algorithm == algorithm and r.problem is None]
        x = [depths.index(depth_name(row.max_per_pack)) for row in mine]
        y = [100 * row.efficiency for row in mine]
        ours = algorithm == "optimum"
        style: dict[str, Any] = {"linewidth": 2.5 if ours else 1.5, "zorder": 3 if ours else 2}
        axes.plot(x, y, "o-", label=algorithm, color=LINES.get(algorithm, GREY), **style)
    axes.set_xticks(range(len(depths)), depths)
    axes.set_xlabel("sequences a pack at most")
    axes.set_ylabel("places that hold a token, %")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    plain_axes(axes, "Packing efficiency by depth")
    save_figure(figure, path)


def draw_waste(path: Path, counts: np.ndarray, rows: Sequence[WasteRow]) -> None:
    """The lengths, and real tokens and padding for every way."""
    figure = new_figure(11, 3.6)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
    draw_lengths(left, counts)
    real = [row.computed * (1 - row.padding) for row in rows]
    padding = [row.computed * row.padding for row in rows]
    places = range(len(rows))
    right.barh(places, real, color=OURS, label="tokens")
    bars = right.barh(places, padding, left=real, color=PADDING, label="padding")
    right.bar_label(bars, [f"{row.padding:.1%} padding" for row in rows], padding=3, fontsize=9)
    right.set_yticks(places, [row.way for row in rows])
    right.invert_yaxis()
    right.tick_params(left=False)
    right.margins(x=0.28)
    right.locator_params(axis="x", nbins=5)
    right.xaxis.set_major_formatter(thousands)
    right.set_xlabel("tokens computed")
    plain_axes(right, "What is computed")
    save_figure(figure, path)


def draw_speeds(
    path: Path,
    names: Sequence[str],
    speeds: Sequence[float],
    title: str,
    unit: str = "texts a second",
    ours: int = 0,
) -> None:
    """A bar for each way to do the same work."""
    figure = new_figure(8, 1.2 + 0.4 * len(names))
    axes = figure.subplots()
    colours = [OURS if place == ours else GREY for place in range(len(names))]
    bars = axes.barh(range(len(names)), speeds, color=colours)
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
    """How many sequences there are of each length, and their mean."""
    lengths = np.arange(1, len(counts) + 1)
    bins = min(64, len(counts))
    axes.hist(lengths, bins=bins, weights=counts, color=OURS, rwidth=0.92)
    mean = float(counts @ lengths / counts.sum())
    axes.axvline(mean, color=PADDING, linewidth=1.5)
    before = mean > len(counts) / 2  # on the side that has room
    axes.annotate(
        f"mean {mean:.0f}",
        (mean, 0.96),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if before else 4, 0),
        textcoords="offset points",
        ha="right" if before else "left",
        va="top",
        fontsize=9,
    )
    axes.set_xlabel("tokens")
    axes.set_ylabel("sequences")
    axes.yaxis.set_major_formatter(thousands)
    plain_axes(axes, f"{int(counts.sum()):,} sequences by length")


def thousands(value: float, _: object) -> str:
    return f"{value:,.0f}"


def _draw_shares(axes: Axes, bars: Sequence[tuple[str, float, str]]) -> None:
    names, shares, colours = zip(*bars, strict=True)
    drawn = axes.barh(range(len(names)), [100 * share for share in shares], color=colours)
    axes.bar_label(drawn, [f"{share:.2%}" for share in shares], padding=3, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 20))
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.set_xlabel("places that hold a token, %")


def draw_corpus(path: Path, statistics: Statistics) -> None:
    """Lengths before packing, and tokens a row after it: logarithmic, for most are the longest."""
    figure = new_figure(11, 3.6)
    left, right = figure.subplots(1, 2)
    manifest = statistics.manifest
    draw_lengths(left, statistics.lengths)
    tokens = np.arange(1, len(statistics.row_tokens) + 1)
    bins = min(64, len(tokens))
    right.hist(tokens, bins=bins, weights=statistics.row_tokens, color=OURS, rwidth=0.92)
    for axes in (left, right):
        axes.set_yscale("log")
    right.set_xlabel("tokens")
    right.set_ylabel("rows")
    full = f"{manifest.efficiency:.2%} full"
    plain_axes(right, f"{manifest.rows:,} rows of {manifest.layout.capacity}, {full}")
    save_figure(figure, path)


def draw_accuracies(path: Path, results: Sequence[Result], target: float) -> None:
    """A line a run, those that missed the target in grey."""
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    for result in results:
        sequences, accuracies = (
            zip(*result.accuracies, strict=True) if result.accuracies else ((), ())
        )
        colour = OURS if result.reached else GREY
        axes.plot(sequences, accuracies, "o-", markersize=3, linewidth=1.2, color=colour)
    axes.axhline(target, color=PADDING, linestyle="--")
    place = {"xytext": (4, 3), "textcoords": "offset points"}
    axes.annotate(f"target {target:g}", (0, target), xycoords=("axes fraction", "data"), **place)
    axes.set_xlabel("sequences learned from")
    axes.set_ylabel("masked words guessed right")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    reached = sum(result.reached for result in results)
    plain_axes(axes, f"{reached} of {len(results)} runs reached the target")
    save_figure(figure, path)
