"""`packhorse pack`: plan a packing from lengths alone, and show how good it is."""

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
    lengths: Annotated[Path | None, Parameter(help="A file with one length a line.")] = None,
    capacity: Annotated[
        int | None, Parameter(help="Tokens a pack; default the longest length.")
    ] = None,
    max_per_pack: Annotated[
        int | None, Parameter(help="Sequences a pack at most; default unlimited.")
    ] = None,
    algorithm: Annotated[
        Literal["optimum", "spfhp", "lpfhp", "nnlshp", "all"],
        Parameter(help="The optimum, one of the published algorithms, or all side by side."),
    ] = "optimum",
    effort: Annotated[
        int | None,
        Parameter(help="Linear programs that the optimum may solve before it stops; default 100."),
    ] = None,
    plot: Annotated[Path | None, Parameter(help="Draw lengths and plans: png, svg, pdf.")] = None,
    json: JsonFlag = False,
) -> None:
    """Plan how sequences share rows: few packs, no sequence cut, from lengths alone.

    A histogram is a JSON list whose entry i counts the sequences of i+1 tokens,
    an object of such lists by name, or a CSV. No plan whatsoever has fewer packs
    than the lower bound. The same lengths and effort give the same plan on every
    machine, however busy; a search that stops before its end is named.

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
    room = len(counts) if capacity is None else capacity
    effort = EFFORT if effort is None else effort
    chosen = packing.ALGORITHMS if algorithm == "all" else (algorithm,)
    with progress("planning") as advance:
        rows = packing.compare(counts, room, chosen, (max_per_pack,), advance, effort)
    if algorithm != "all" and rows[0].problem:
        raise InputError(rows[0].problem)
    about = _about(counts, room, max_per_pack)
    shown = report.packing_table(rows)
    table(_title(about), shown.columns, shown.rows)
    for line in (*report.problems(rows), *packing.unfinished(rows, effort)):
        note(line)
    if plot:
        plots.draw_plans(plot, counts, room, rows)
        note(f"drawn: {plot}")
    emit({**about, **_results(rows, algorithm == "all")}, json)


def read_counts(histogram: str | None, lengths: Path | None) -> "np.ndarray":
    """The histogram from whichever of the two flags was given."""
    from packhorse.reports.lengths import read_histogram, read_lengths

    if (histogram is None) == (lengths is None):
        raise InputError("pass --histogram FILE[:NAME] or --lengths FILE, one of them")
    return read_histogram(histogram) if histogram is not None else read_lengths(Path(str(lengths)))


def _about(counts: "np.ndarray", capacity: int, max_per_pack: int | None) -> dict[str, Any]:
    sequences = int(counts.sum())
    tokens = sum(length * count for length, count in enumerate(counts.tolist(), 1))
    return {
        "sequences": sequences,
        "tokens": tokens,
        "capacity": capacity,
        "max_per_pack": max_per_pack,
        "unpacked_efficiency": tokens / (sequences * capacity),
    }


def _title(about: dict[str, Any]) -> str:
    return (
        f"{about['sequences']:,} sequences, {about['tokens']:,} tokens, rows of "
        f"{about['capacity']}; one sequence a row: {about['unpacked_efficiency']:.2%} full"
    )


def _results(rows: "list[PackingRow]", every: bool) -> dict[str, Any]:
    figures = [
        {name: asdict(row)[name] for name in FIGURES}
        if row.problem is None
        else {"algorithm": row.algorithm, "problem": row.problem}
        for row in rows
    ]
    return {"results": figures} if every else figures[0]
