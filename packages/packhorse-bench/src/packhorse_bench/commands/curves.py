"""`packhorse bench curves`: the logs of several runs in one figure, and how far they lie apart."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from packhorse.cli.console import emit, note, table
from packhorse.errors import InputError
from packhorse_bench.commands import flag


def curves(
    *runs: Annotated[Path, Parameter(help="Folders of `packhorse train`, or their log.jsonl.")],
    figure: Annotated[str, flag("--figure", help="What the logs have of each step.")] = "loss",
    plot: Annotated[Path | None, flag("--plot", help="Draw them: png, svg, pdf.")] = None,
    json: Annotated[bool, flag("--json", help="One line of JSON at the end.")] = False,
) -> None:
    """Compare the curves of runs with that of the first.

    Long curves are averaged over a twentieth of their steps. "apart" is how
    far a curve lies from the first one's, on average and at most.

    Try:
      packhorse bench curves runs/bf16 runs/float8 --plot loss.svg
      packhorse bench curves runs/a runs/b --figure mlm_accuracy --json
    """
    from packhorse.reports import plots
    from packhorse.reports import tables as report
    from packhorse_bench import curves_plot

    plots.check(plot)
    if not runs:
        raise InputError("no run is named; pass the folders that `packhorse train --out` wrote")
    read = {name: curves_plot.read(run, figure) for name, run in _named(runs).items()}
    endings = curves_plot.endings(read)
    rows = [
        [
            ending.run,
            f"{ending.steps:,}",
            _figure(ending.last),
            _figure(ending.apart),
            _figure(ending.apart_most),
        ]
        for ending in endings
    ]
    shown = report.Table.of(["run", "steps", "last", "apart", "at most"], rows)
    table(f"Curves, {figure}", shown.columns, shown.rows)
    if plot:
        curves_plot.draw(read, plot, f"{figure}, step by step", figure)
        note(f"written: {plot}")
    emit({"figure": figure, "runs": [asdict(ending) for ending in endings]}, json)


def _named(runs: tuple[Path, ...]) -> dict[str, Path]:
    """By the folder's name where that tells them apart, else by the whole path."""
    folders = [run.parent if run.suffix == ".jsonl" else run for run in runs]
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(run) for run in runs]
    return dict(zip(names, runs, strict=True))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
