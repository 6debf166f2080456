"""What a comparison of servers by shape says: its table and its remarks."""

from __future__ import annotations

from pathlib import Path

from packhorse.reports import plots, subject
from packhorse.reports import tables as report
from packhorse.reports.tables import Table, rate
from packhorse_bench.serving_figures import LoopComparison, LoopRow, ServingSetup
from packhorse_bench.serving_servers import OURS

BUSY_SHARE = 0.9  # of its core: a generator that takes more may be what limits the server
COLUMNS = (
    "server",
    "tokens x texts",
    "loop",
    "req/s",
    "texts/s",
    "tokens/s",
    "p50 ms",
    "p99 ms",
    "errors",
    "fill",
    "tokens per batch",
    "GPU busy",
    "server cores",
    "generator",
    "min cosine",
)


def describe(setup: ServingSetup, comparison: LoopComparison) -> dict[str, str]:
    """What was measured, in words."""
    loops = setup.load
    source = "texts of a file" if setup.texts else "docstrings of the standard library"
    vocabulary = "" if setup.config is None else ", its vocabulary learned from the texts"
    cores = "on cores of their own" if comparison.pinned else "on the servers' cores"
    if loops.urls:
        servers = "running already: " + ", ".join(name for name, _ in loops.urls)
    else:
        fronts = "its default" if loops.fronts is None else str(loops.fronts)
        fronts += ", with graphs" if loops.graphs else ""
        servers = (
            f"{comparison.server_cores} cores for each in turn, fronts of ours {fronts}, "
            f"peers' batches of {setup.batch_size}"
        )
    return {
        "model": subject.name(setup) + ("" if setup.vocab else vocabulary),
        "dtype": "as the servers were started" if loops.urls else comparison.dtype,
        "workload": f"requests of {', '.join(map(str, loops.shapes))} (tokens x texts), {source} "
        f"cut to so many tokens, seed {setup.seed}",
        "servers": servers,
        "generators": f"{comparison.generators}, each a process, {cores}",
        "loops": f"{loops.seconds:g} s after {loops.warm:g} s that do not count; medians of "
        f"{setup.effort.repeats}, servers in turns",
        "took": f"{comparison.seconds:.0f} s",
    }


def table(comparison: LoopComparison) -> Table:
    """A line per server, shape and loop; servers that are missing have one without figures."""
    rows = sorted(comparison.rows, key=lambda row: row.problem is not None)
    return Table.of(COLUMNS, [_cells(row) for row in rows])


def _cells(row: LoopRow) -> tuple[str, ...]:
    if row.problem is not None:
        return (row.server, "missing", *["-"] * (len(COLUMNS) - 2))
    return (
        row.server,
        row.shape,
        loop_name(row),
        rate(row.requests_per_second),
        rate(row.texts_per_second),
        rate(row.tokens_per_second),
        f"{row.p50_ms:.1f}" if row.loop != "offline" else "-",
        f"{row.p99_ms:.1f}" if row.loop != "offline" else "-",
        row.errors or "0",
        _percent(row.fill),
        "-" if row.tokens_per_batch is None else f"{row.tokens_per_batch:,.0f}",
        _percent(row.gpu_busy),
        "-" if row.server_cores is None else f"{row.server_cores:.1f}",
        f"{row.generator_share:.0%}" + (" (limit)" if row.generator_share > BUSY_SHARE else ""),
        "-" if row.cosine_min is None else f"{row.cosine_min:.5f}",
    )


def loop_name(row: LoopRow) -> str:
    """The loop of a row, in words."""
    if row.loop == "closed":
        return f"closed, {row.connections} connections"
    if row.loop == "open":
        return f"open, at {row.load:.0%}" if row.load else "open, at --rate"
    if row.loop == "offline":
        return "token ids, no server"
    return f"lone, at {row.load:.0%}" if row.load else "lone, idle"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def remarks(comparison: LoopComparison) -> list[str]:
    """Servers without figures, whether a generator was the limit, what the columns mean."""
    lines = [*report.problems(comparison.rows), *comparison.remarks]
    rows = [row for row in comparison.rows if row.problem is None]
    if not rows:
        return lines
    loaded = [row for row in rows if row.loop in ("closed", "open")]
    busy = max((row.generator_share for row in loaded), default=0.0)
    late = max((row.generator_late_ms for row in loaded if row.loop == "open"), default=0.0)
    line = f"the busiest generator took {busy:.0%} of its core"
    if any(row.loop == "open" for row in loaded):
        line += (
            f", and requests of open loops were sent at most {late:.1f} ms late (99th percentile)"
        )
    lines.append(line)
    limited = [row for row in loaded if row.generator_share > BUSY_SHARE]
    if limited:
        lines.append(
            f"warning: in {len(limited)} rows a generator took more than {BUSY_SHARE:.0%} of its "
            "core, so the figures may be its own; pass more --generators"
        )
    if any(row.loop == "lone" for row in rows):
        lines.append(
            "lone: one client with one text at a time, while others ask at a share of the rate of "
            "the closed loop with the first shape"
        )
    return lines


def draw(path: Path, comparison: LoopComparison, title: str) -> None:
    """A bar per server and shape: tokens per second of its closed loop."""
    rows = [row for row in comparison.rows if row.problem is None and row.loop == "closed"]
    if not rows:
        return
    names = [f"{row.server}, {row.shape}" for row in rows]
    ours = next((place for place, row in enumerate(rows) if row.server == OURS), 0)
    speeds = [row.tokens_per_second for row in rows]
    plots.draw_speeds(path, names, speeds, title, "tokens per second", ours)
