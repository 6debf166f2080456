"""The plot of several runs in one figure: a curve a run, over steps.

    draw({"bf16": read(Path("runs/a")), "float8": read(Path("runs/b"))}, path, "title", "loss")

A loss that is noted at every step is a cloud. Long curves are therefore drawn twice: as they are,
pale, and averaged over their neighbors, bold; the average is what two runs are compared by. The
first curve is the one that others are held against: it is drawn widest, below the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packhorse.errors import InputError
from packhorse.reports import plots

Curve = Sequence[tuple[float, float]]
COLORS = (plots.OURS, plots.PADDING, "#7a5c99", "#a33b3b", plots.OURS_LIGHT, plots.GRAY)
LONG = 60  # points; from here on a curve is averaged
WINDOW = 1 / 20  # of a curve, that an average is made of


def read(run: Path, figure: str = "loss") -> list[tuple[float, float]]:
    """Step and figure of each step that a run (its folder, or its log.jsonl) has noted."""
    path = run / "log.jsonl" if run.is_dir() else run
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path} is not the log of a run: {error}") from error
    steps = [line for line in lines if isinstance(line, dict) and "evaluation" not in line]
    points = [(line["step"], line[figure]) for line in steps if "step" in line and figure in line]
    if not points:
        have = sorted(set().union(*steps) - {"step"}) if steps else ["nothing"]
        raise InputError(f"{path} has no {figure!r}; it has {', '.join(have)}")
    return points


def draw(curves: Mapping[str, Curve], path: Path, title: str, ylabel: str) -> None:
    """A line a curve, named in the legend; points are (step, value)."""
    figure = plots.new_figure(8, 4.2)
    axes = figure.subplots()
    for place, (name, curve) in enumerate(curves.items()):
        color = COLORS[place % len(COLORS)]
        width = 1.5 if place else 3.0
        if len(curve) >= LONG:
            axes.plot(*zip(*curve, strict=True), color=color, alpha=0.25, linewidth=0.8)
        x, y = zip(*smoothed(curve), strict=True) if curve else ((), ())
        axes.plot(x, y, label=name, color=color, linewidth=width, zorder=3 + place)
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_formatter(plots.thousands)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    plots.plain_axes(axes, title)
    plots.save_figure(figure, path)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a curve ended, and how far it lies from another over the steps that both have."""

    run: str
    steps: int
    last: float  # averaged, as all that follows
    apart: float | None  # from the other, on average, with its sign; None: no step in common
    apart_most: float | None


def endings(curves: Mapping[str, Curve]) -> list[Ending]:
    """Each curve held against the first."""
    smooth = {name: dict(smoothed(curve)) for name, curve in curves.items()}
    first = next(iter(smooth.values()))
    results = []
    for name, values in smooth.items():
        gaps = [value - first[step] for step, value in values.items() if step in first]
        mean, most = (sum(gaps) / len(gaps), max(gaps, key=abs)) if gaps else (None, None)
        results.append(Ending(name, len(values), values[max(values)], mean, most))
    return results


def smoothed(curve: Curve) -> Curve:
    """As it is drawn bold."""
    return averaged(curve, max(1, round(WINDOW * len(curve)))) if len(curve) >= LONG else curve


def averaged(curve: Curve, window: int) -> list[tuple[float, float]]:
    """Each point's mean with those around it, `window` of them, fewer at the ends."""
    before = window // 2
    after = window - window // 2
    means = []
    for place, (x, _) in enumerate(curve):
        near = [y for _, y in curve[max(0, place - before) : place + after]]
        means.append((x, sum(near) / len(near)))
    return means
