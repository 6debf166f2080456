"""`packhorse bench ablation`: what becomes of packed training without its mask or its positions."""

from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from packhorse.cli.console import emit, note, progress
from packhorse_bench.commands import Keep, flag, show


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class AblationFlags:
    """The flags of `ablation`, under the names of `ablation.AblationSetup`."""

    steps: Annotated[int, flag("--steps", help="Of each run.")] = 200
    rows: Annotated[int, flag("--rows", help="Packed rows per step; unpacked the same texts.")] = 8
    capacity: Annotated[int, flag("--capacity", help="Tokens a row.")] = 128
    max_length: Annotated[int, flag("--max-length", help="Tokens a sequence at most.")] = 16
    seeds: Annotated[int, flag("--seeds", help="Unpacked runs, which tell what chance does.")] = 3
    learning_rate: Annotated[float, flag("--learning-rate", help="At its peak.")] = 2e-3
    mask_probability: Annotated[
        float, flag("--mask-probability", help="Of letters that are to be guessed.")
    ] = 0.25
    evaluate_every: Annotated[int, flag("--evaluate-every", help="Steps.")] = 20


def ablation(
    *,
    learning: AblationFlags = AblationFlags(),  # noqa: B008
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Train packed, unpacked, and packed wrongly: no mask, no position reset.

    The mini model learns masked letters of docstrings from the same weights,
    sequences and masks each way, and is judged by held-out sequences, each
    alone. "apart" is how much more it loses than unpacked training with the
    same seed, at the end and at most; the seeds tell how much of that is
    chance. --plot draws held-out losses, and training losses beside it.

    Try:
      packhorse bench ablation --plot ablation.svg --note note.md
      packhorse bench ablation --steps 20 --seeds 1
    """
    from packhorse.reports import tables as report
    from packhorse_bench import ablation as bench
    from packhorse_bench import curves_plot

    keep.check()
    setup = bench.AblationSetup(**asdict(learning))
    with progress("steps of all runs") as advance:
        result = bench.measure(setup, advance)
    facts = bench.describe(setup, result) | report.machine()
    show("Packing and its mistakes", facts, bench.table(result), [], keep)
    note(f"noise: {facts['noise']}")
    if keep.plot:
        training_plot = keep.plot.with_stem(f"{keep.plot.stem}-training")
        for path, of in ((keep.plot, "held_out"), (training_plot, "training")):
            title = f"{of.replace('_', '-')} loss of {setup.steps} steps"
            curves_plot.draw(bench.curves(result, of), path, title, "loss of masked letters")
        note(f"written: {training_plot}")
    emit(
        {**facts, "spread": bench.seed_spreads(result), "runs": [asdict(r) for r in result.runs]},
        keep.json,
    )
