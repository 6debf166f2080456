"""`packhorse pack`: plan a packing from the lengths of sequences, and show how good it is."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, table
from packhorse.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from packhorse.reports.packing import PackingRow

FIGURES = (
    "packs",
    "efficiency",
    "factor",
    "lower_bound",
    "complete",
    "seconds",
    "algorithm",
)


def pack(
    *,
    histogram: Annotated[
        str | None, Parameter(help="FILE or FILE:NAME; JSON counts or CSV `length,count`.")
    ] = None,
    lengths: Annotated[Path | None, Parameter(help="A file with one length per line.")] = None,
    capacity: Annotated[
        int | None, Parameter(help="Tokens per pack; default the longest length.")
    ] = None,
    max_per_pack: Annotated[
        int | None, Parameter(help="Maximum sequences per pack; default unlimited.")
    ] = None,
    algorithm: Annotated[
        Literal["optimum", "spfhp", "lpfhp", "nnlshp", "all"],
        Parameter(help="The optimum, one of the published algorithms, or all side by side."),
    ] = "optimum",
    effort: Annotated[
        int | None,
        Parameter(help="Linear programs that the optimum may solve before it stops; default 100."),
    ] = None,
    plot: Annotated[Path | None, Parameter(help="Plot lengths and plans: png, svg or pdf.")] = None,
    json: JsonFlag = False,
) -> None:
    """Plan how sequences share rows: few packs, no sequence cut, from lengths alone.

    A histogram is a JSON list whose entry i counts the sequences of i+1 tokens,
    an object of such lists by name, or a CSV. No plan can have fewer packs than
    the lower bound. The same lengths and effort give the same plan on every
    machine, however busy it is; a search that stopped before its end is named.

    Try:
      packhorse pack --lengths lengths.txt --capacity 512
      packhorse pack --histogram lengths.json:squad --max-per-pack 3
      packhorse pack --histogram lengths.csv --algorithm all --plot packs.png
    """
    from packhorse.packing.optimum import EFFORT
    from packhorse.reports import packing, plots
    from packhorse.reports import tables as report

    plots.check(plot)
    counts = read_counts(histogram, lengths)
    row_capacity = len(counts) if capacity is None else capacity
    effort = EFFORT if effort is None else effort
    algorithms = packing.ALGORITHMS if algorithm == "all" else (algorithm,)
    with progress("planning") as advance:
        rows = packing.compare(counts, row_capacity, algorithms, (max_per_pack,), advance, effort)
    if algorithm != "all" and rows[0].problem:
        raise InputError(rows[0].problem)
    facts = _facts(counts, row_capacity, max_per_pack)
    title = (
        f"{facts['sequences']:,} sequences, {facts['tokens']:,} tokens, rows of {row_capacity}; "
        f"one sequence per row: {facts['unpacked_efficiency']:.2%} full"
    )
    shown = report.packing_table(rows)
    table(title, shown.columns, shown.rows)
    for line in (*report.problems(rows), *packing.unfinished(rows, effort)):
        note(line)
    if plot:
        plots.draw_plans(plot, counts, row_capacity, rows)
        note(f"plotted: {plot}")
    results = [_result(row) for row in rows]
    emit({**facts, **({"results": results} if algorithm == "all" else results[0])}, json)


def read_counts(histogram: str | None, lengths: Path | None) -> "np.ndarray":
    """Read the histogram from whichever of the two flags was passed."""
    from packhorse.reports.lengths import read_histogram, read_lengths

    if histogram is not None and lengths is None:
        return read_histogram(histogram)
    if lengths is not None and histogram is None:
        return read_lengths(lengths)
    raise InputError("pass --histogram FILE[:NAME] or --lengths FILE, one of them")


def _facts(counts: "np.ndarray", capacity: int, max_per_pack: int | None) -> dict[str, Any]:
    sequences = int(counts.sum())
    tokens = sum(length * count for length, count in enumerate(counts.tolist(), 1))
    return {
        "sequences": sequences,
        "tokens": tokens,
        "capacity": capacity,
        "max_per_pack": max_per_pack,
        "unpacked_efficiency": tokens / (sequences * capacity),
    }


def _result(row: "PackingRow") -> dict[str, Any]:
    if row.problem is not None:
        return {"algorithm": row.algorithm, "problem": row.problem}
    values = asdict(row)
    return {name: values[name] for name in FIGURES}
