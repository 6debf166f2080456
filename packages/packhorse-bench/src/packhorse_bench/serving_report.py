"""What a comparison of servers says: its table, its remarks, its plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from packhorse.reports import plots, subject
from packhorse.reports import tables as report
from packhorse.reports.tables import Table
from packhorse_bench.serving import BUSY_LATE, BUSY_SHARE, REFERENCE
from packhorse_bench.serving_figures import Point, ServingComparison, ServingSetup
from packhorse_bench.serving_servers import OURS

COLORS = {OURS: plots.OURS, REFERENCE: plots.PADDING}


def describe(setup: ServingSetup, comparison: ServingComparison) -> dict[str, str]:
    """What was measured, in words."""
    tokens = comparison.tokens
    source = "texts of a file" if setup.texts else "docstrings of the standard library"
    effort = setup.effort
    return {
        "model": subject.name(setup),
        "dtype": comparison.dtype,
        "workload": f"one text a request, {len(tokens):,} {source} of "
        f"{sum(tokens) / len(tokens):.1f} tokens ({min(tokens)} to {max(tokens)}), "
        f"seed {setup.seed}",
        "servers": f"{comparison.threads} threads each, peers' batches of {setup.batch_size}; the "
        f"generator on the same machine, {setup.connections} connections",
        "holds": f"p99 within {setup.limit_ms:g} ms and no error in every one of {effort.repeats} "
        f"trials of {effort.long:g} s, and in the sweep; latencies from when a request was due",
        "PackRunner.run": f"{comparison.runner_alone:,.0f} tokens/s alone, "
        f"{comparison.runner_beside:,.0f} beside the generator's load",
        "took": f"{comparison.seconds:.0f} s",
    }


def table(setup: ServingSetup, comparison: ServingComparison) -> Table:
    """A line a server that was measured."""
    rates = sorted({point.rate for point in comparison.points if point.purpose == "sweep"})
    columns = (
        "server",
        f"req/s within {setup.limit_ms:g} ms",
        f"x {REFERENCE}",
        "p50/p99 ms",
        *(f"at {rate:g}/s" for rate in rates),
        "req/s at most",
        "tokens/s",
        "of PackRunner",
        "min cosine",
    )
    return Table.of(
        columns,
        [
            (
                row.server,
                f"{row.held_rate:.1f}",
                "-" if row.over_peer is None else f"{row.over_peer:.2f}",
                "-" if row.p50_ms is None else f"{row.p50_ms:.0f}/{row.p99_ms:.0f}",
                *(_at(comparison.points, row.server, rate) for rate in rates),
                f"{row.most_rate:.1f}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.of_runner:.0%}",
                f"{row.cosine_min:.5f}",
            )
            for row in comparison.rows
            if row.problem is None
        ],
    )


def _at(points: Sequence[Point], server: str, rate: float) -> str:
    for point in points:
        if (point.server, point.rate, point.purpose) == (server, rate, "sweep"):
            return f"{point.p50_ms:.0f}/{point.p99_ms:.0f}" if point.held else "fails"
    return "-"


def remarks(setup: ServingSetup, comparison: ServingComparison) -> list[str]:
    """Servers without figures, errors that were seen, and whether the generator was in the way."""
    lines = report.problems(comparison.rows)
    for row in comparison.rows:
        points = [point for point in comparison.points if point.server == row.server]
        seen = Counter(point.errors for point in points if point.errors)
        if seen:
            first = next(iter(seen))
            lines.append(
                f"{row.server}: errors in {seen.total()} of {len(points)} trials ({first} …)"
            )
    held = [point for point in comparison.points if point.held]
    share = max((point.generator_share for point in held), default=0.0)
    late = max((point.generator_late_ms for point in held), default=0.0)
    lines.append(
        f"the generator took at most {share:.0%} of a core and was at most {late:.1f} ms late "
        "(99th percentile) in trials that held"
    )
    if share > BUSY_SHARE or late > BUSY_LATE * setup.limit_ms:
        lines.append("warning: the generator was the bottleneck; these figures are its own")
    return lines


def draw(path: Path, setup: ServingSetup, comparison: ServingComparison, title: str) -> None:
    """The 99th percentile over the rate, a line a server; crosses did not hold."""
    figure = plots.new_figure(9, 4.8)
    axes = figure.subplots()
    top = 4 * setup.limit_ms
    for row in (row for row in comparison.rows if row.problem is None):
        color = COLORS.get(row.server, plots.GRAY)
        held, failed = _curve(comparison.points, row.server)
        label = f"{row.server}: {row.held_rate:.0f}/s"
        rates = [rate for rate, _ in held]
        slowest = [p99 for _, p99 in held]
        axes.plot(rates, slowest, "o-", color=color, markersize=4, label=label)
        axes.plot(failed, [top] * len(failed), "x", color=color)
        if row.held_rate:
            axes.axvline(row.held_rate, color=color, linewidth=1, linestyle=":")
    axes.axhline(setup.limit_ms, color="black", linewidth=1, linestyle="--")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plots.thousands)
    axes.yaxis.set_minor_formatter("")
    axes.set_xlim(left=0)
    axes.set_xlabel("requests due a second; crosses did not hold")
    axes.set_ylabel("99th percentile, ms")
    axes.legend(frameon=False, title=f"highest rate within {setup.limit_ms:g} ms")
    plots.plain_axes(axes, title)
    plots.save_figure(figure, path)


def _curve(points: Sequence[Point], server: str) -> tuple[list[tuple[float, float]], list[float]]:
    """Rates with their median p99 where most trials held, and rates where most did not."""
    trials: dict[float, list[Point]] = {}
    for point in points:
        if point.server == server and point.rate:
            trials.setdefault(point.rate, []).append(point)
    held = {rate: [p.p99_ms for p in at_rate if p.held] for rate, at_rate in sorted(trials.items())}
    good = [rate for rate in held if 2 * len(held[rate]) >= len(trials[rate])]
    return [(rate, median(held[rate])) for rate in good], [r for r in held if r not in good]
