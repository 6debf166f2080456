"""`packhorse bench data`: making pretraining examples, ours and the reference's way."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from packhorse.cli.console import emit, note, progress
from packhorse.cli.flags import DEFAULT_MODEL
from packhorse_bench.commands import Keep, flag, show, split_names


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class CorpusFlags:
    """The flags that `data.DataSetup` knows by the same names."""

    kind: Annotated[str | None, flag("--format", help="Of the sources; default detected.")] = None
    column: Annotated[str | None, flag("--column", help="Of the text in jsonl and parquet.")] = None
    megabytes: Annotated[float, flag("--megabytes", help="Of text, about.")] = 4.0
    max_length: Annotated[int, flag("--max-length", help="Tokens a sequence and a row.")] = 512
    max_per_pack: Annotated[int, flag("--max-per-pack", help="Sequences a row at most.")] = 3
    duplicates: Annotated[
        int, flag("--duplicates", help="Passes over each document; MLPerf makes ten.")
    ] = 10
    workers: Annotated[int, flag("--workers", help="Processes of each method.")] = 2
    repeats: Annotated[
        int, flag("--repeats", help="Rounds; figures are the median's, the best beside it.")
    ] = 3
    seed: Annotated[int, flag("--seed", help="Of everything that is drawn.")] = 12345


def data(
    *sources: Annotated[
        Path, Parameter(help="Files or folders; default the docstrings of Python's library.")
    ],
    tokenizer: Annotated[
        str, flag("--tokenizer", help="vocab.txt, tokenizer.json, a model's folder or hub id.")
    ] = DEFAULT_MODEL,
    corpus: CorpusFlags = CorpusFlags(),  # noqa: B008
    methods: Annotated[
        str, flag("--methods", help="With commas: packhorse, lists, reference.")
    ] = "packhorse,lists,reference",
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Make packed pretraining examples: here, and the way of the reference.

    Every method gets the same clean sentences. "reference" is lists of strings
    and a WordPiece in Python alone, "lists" the same on the tokenizers library.
    Clean-up of the sources and the loader with dynamic masks have rows of their own.

    Try:
      packhorse bench data
      packhorse bench data wiki.xml.bz2 --tokenizer vocab.txt --duplicates 1
    """
    from packhorse.checkpoint.hub import resolve
    from packhorse.reports import plots
    from packhorse.reports import tables as report
    from packhorse_bench import data as bench

    keep.check()
    setup = bench.DataSetup(
        tokenizer=tokenizer if Path(tokenizer).exists() else str(resolve(tokenizer)),
        sources=tuple(map(str, sources)),
        methods=split_names(methods),
        **asdict(corpus),
    )
    with progress("making examples") as advance:
        measured = bench.measure(setup, advance)
    facts = bench.describe(setup, measured) | report.machine()
    show(
        "Pretraining examples",
        facts,
        bench.table(measured.rows),
        report.problems(measured.rows),
        keep,
    )
    if keep.plot:
        rows = [row for row in measured.rows if row.problem is None]
        speeds = [row.megabytes_per_second for row in rows]
        names = [row.method for row in rows]
        plots.draw_speeds(keep.plot, names, speeds, facts["workload"], "megabytes per second", 1)
    for name in ("clean-up", "loading with dynamic masks"):
        if name in facts:
            note(f"{name}: {facts[name]}")
    figures = {
        "cleaning_mb_per_second": measured.cleaning,
        "loading_tokens_per_second": measured.loading,
    }
    emit({**facts, **figures, "rows": [asdict(row) for row in measured.rows]}, keep.json)
