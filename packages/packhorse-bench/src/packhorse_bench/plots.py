"""Plots of `packhorse bench encode`, `modes` and `train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.reports import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from packhorse_bench.encode import EncodeRow
    from packhorse_bench.modes import ModeRow
    from packhorse_bench.training import TrainRow


def draw_encode(path: Path, rows: Sequence[EncodeRow], title: str) -> None:
    """Sequences a second, a panel a number format, the fastest on top."""
    measured = [row for row in rows if row.problem is None]
    dtypes = list(dict.fromkeys(row.dtype for row in measured))
    sizes = [sum(row.dtype == dtype for row in measured) for dtype in dtypes]
    figure = plots.new_figure(8.5, 1.3 + 0.3 * sum(sizes) + 0.3 * len(sizes))
    panels = figure.subplots(len(dtypes), 1, sharex=True, squeeze=False, height_ratios=sizes)
    for axes, dtype in zip(panels[:, 0], dtypes, strict=True):
        panel_rows = sorted(
            (row for row in measured if row.dtype == dtype),
            key=lambda row: row.sequences_per_second,
        )
        speeds = [row.sequences_per_second for row in panel_rows]
        bars = axes.barh(
            range(len(panel_rows)), speeds, color=[_encode_color(row) for row in panel_rows]
        )
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3, fontsize=9)
        axes.set_yticks(
            range(len(panel_rows)), [f"{row.engine}, {row.order}" for row in panel_rows]
        )
        axes.tick_params(left=False)
        plots.plain_axes(axes, dtype)
    panels[-1, 0].set_xlabel("sequences per second")
    panels[-1, 0].margins(x=0.12)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    plots.save_figure(figure, path)


def _encode_color(row: EncodeRow) -> str:
    is_ours = row.engine.startswith("packhorse")
    online = row.order == "arrival"
    return (
        (plots.OURS_LIGHT if online else plots.OURS)
        if is_ours
        else (plots.LIGHT if online else plots.GRAY)
    )


def draw_modes(path: Path, rows: Sequence[ModeRow], title: str) -> None:
    """Requests a second with their ratio to padding; and how long half and all but 1 % wait."""
    measured = [row for row in rows if row.problem is None]
    figure = plots.new_figure(12, 1.6 + 0.36 * len(measured))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.2, 1])
    bars = left.barh(
        range(len(measured)),
        [row.throughput for row in measured],
        color=[_mode_color(row) for row in measured],
    )
    labels = [f"{row.throughput:,.0f}  ({row.ratio_to_padded:.2f}x)" for row in measured]
    left.bar_label(bars, labels, padding=3, fontsize=9)
    left.set_yticks(range(len(measured)), [row.name for row in measured])
    left.invert_yaxis()
    left.tick_params(left=False)
    left.margins(x=0.2)
    left.set_xlabel("requests per second")
    plots.plain_axes(left, "Throughput, and times Original")
    _draw_waits(right, measured)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    plots.save_figure(figure, path)


def _mode_color(row: ModeRow) -> str:
    if row.name.startswith("Original"):
        return plots.PADDING if row.kernel else plots.LIGHT
    return plots.OURS if "Ragged" in row.name else plots.OURS_LIGHT


def _draw_waits(axes: Axes, rows: Sequence[ModeRow]) -> None:
    """A line from the median to the 99th percentile, a little apart for each loop."""
    for name, color, aside, spans in (
        ("closed loop", plots.OURS, -0.15, [(row.p50_ms, row.p99_ms) for row in rows]),
        ("open loop", plots.PADDING, 0.15, [(row.open_p50_ms, row.open_p99_ms) for row in rows]),
    ):
        known = [(y + aside, a, b) for y, (a, b) in enumerate(spans) if a is not None]
        if known:
            y, low, high = zip(*known, strict=True)
            axes.hlines(y, low, high, color=color, linewidth=2.5, label=name)
            axes.plot(low, y, "o", color=color)
    axes.set_xlim(left=0)
    axes.tick_params(left=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("milliseconds, median (dot) to 99th percentile")
    if axes.get_legend_handles_labels()[0]:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1)}  # above: below are the lines
        axes.legend(frameon=False, fontsize=9, ncols=2, **place)
    plots.plain_axes(axes, "Time to an answer")


def draw_training(path: Path, rows: Sequence[TrainRow], title: str) -> None:
    """A bar per way, of the median round, with a mark at the best; the rest in words."""
    measured = [row for row in rows if row.problem is None]
    figure = plots.new_figure(11, 1.6 + 0.42 * len(measured))
    axes = figure.subplots()
    speeds = [row.sequences_per_second for row in measured]
    bars = axes.barh(range(len(measured)), speeds, color=[_training_color(row) for row in measured])
    axes.bar_label(bars, [_training_label(row) for row in measured], padding=4, fontsize=9)
    fastest = [row.best_sequences_per_second for row in measured]
    axes.plot(fastest, range(len(measured)), "|", color="black", markersize=12)
    axes.set_yticks(range(len(measured)), [row.way for row in measured])
    axes.invert_yaxis()
    axes.tick_params(left=False)
    axes.margins(x=0.45)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(plots.thousands)
    axes.set_xlabel("sequences per second; median round, and the best (mark)")
    plots.plain_axes(axes, "")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    plots.save_figure(figure, path)


def _training_color(row: TrainRow) -> str:
    if row.way.startswith("packhorse"):
        return plots.OURS
    return plots.PADDING if "padded" in row.way else plots.GRAY


def _training_label(row: TrainRow) -> str:
    more = [f"{row.tokens_per_second:,.0f} real tokens/s"]
    if row.over_padded is not None:
        more.insert(0, f"{row.over_padded:.2f}x")
    if row.mfu is not None:
        more.append(f"MFU {row.mfu:.0%}")
    return f"{row.sequences_per_second:,.0f}  ({', '.join(more)})"
