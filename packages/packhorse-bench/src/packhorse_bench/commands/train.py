"""`packhorse bench train`: packed steps against transformers, the same weights, in one run."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from packhorse.cli.console import emit, note, progress
from packhorse_bench.commands import Keep, ModelFlags, flag, show, split_names


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class TrainingFlags:
    """The flags of `train`, under the names of `training_stage.TrainingSetup`."""

    task: Annotated[
        Literal["pretrain", "classify"],
        flag("--task", help="Masked words and next sentences with LAMB; or labels with AdamW."),
    ] = "pretrain"
    histogram: Annotated[
        str | None,
        flag("--histogram", help="FILE[:NAME] of lengths; default like Wikipedia, like SST-2."),
    ] = None
    max_length: Annotated[
        int | None, flag("--max-length", help="Tokens a row, or padded; default 512, or 128.")
    ] = None
    batch: Annotated[
        int | None, flag("--batch", help="Sequences a step; default 256, on a CPU 16 or 32.")
    ] = None
    steps: Annotated[
        int | None, flag("--steps", help="Steps per round; default 4 or 50, on a CPU 2 or 4.")
    ] = None
    micro_tokens: Annotated[
        int, flag("--micro-tokens", help="Tokens at once; default by the device's memory.")
    ] = 0
    dropout: Annotated[float, flag("--dropout", help="Of hidden states.")] = 0.1
    dtype: Annotated[
        Literal["fp32", "bf16", "float8"] | None,
        flag("--dtype", help="All keep weights in fp32; float8 is ours, peers then bf16."),
    ] = None
    device: Annotated[str | None, flag("--device", help="cpu, cuda …")] = None
    repeats: Annotated[int, flag("--repeats", help="Timed rounds, all ways in each.")] = 3
    seed: Annotated[int, flag("--seed", help="Of lengths, token ids, masks and weights.")] = 0


def train(
    *,
    subject: ModelFlags = ModelFlags(),  # noqa: B008
    learning: TrainingFlags = TrainingFlags(),  # noqa: B008
    peers: Annotated[
        str | None,
        flag(
            "--peers",
            help="With commas, or none: padded, padded-compiled, grouped, grouped-compiled, "
            "grouped-graphs, "
            "padding-free; default by the device.",
        ),
    ] = None,
    csv: Annotated[Path | None, flag("--csv", help="All figures, a line a way.")] = None,
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Train packed and with transformers: the same weights, sequences, optimizer.

    transformers is padded in full (on a GPU compiled), grouped by length, and
    padding-free where flash_attn is installed. Speeds are medians of
    the rounds; "x padded" is how many times transformers padded in full. "update"
    is the optimizer alone, "loss" that of the first batch before any step,
    without dropout: the same for all.

    Try:
      packhorse bench train --config large --plot train.svg --note note.md
      packhorse bench train --task classify --batch 1024
      packhorse bench train --config tiny --device cpu
    """
    from packhorse.reports import tables as report
    from packhorse_bench import plots as bench_plots
    from packhorse_bench import training

    keep.check()
    report.check_writable(csv)
    others = None if peers is None else tuple(n for n in split_names(peers) if n != "none")
    setup = training.TrainingSetup(**asdict(subject), **asdict(learning), peers=others)
    with progress("timing the ways") as advance:
        comparison = training.measure(setup, advance)
    facts = training.describe(setup, comparison) | report.machine(comparison.device)
    show("Training", facts, training.table(comparison.rows), report.problems(comparison.rows), keep)
    if csv:
        report.write_csv(csv, comparison.rows)
        note(f"written: {csv}")
    if keep.plot:
        bench_plots.draw_training(
            keep.plot, comparison.rows, f"{facts['model']}, {facts['workload']}"
        )
    emit({**facts, "rows": [asdict(row) for row in comparison.rows]}, keep.json)
