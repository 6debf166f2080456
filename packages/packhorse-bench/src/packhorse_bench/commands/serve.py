"""`packhorse bench serve`: our server and others under the same load, in one run."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from packhorse.cli.console import emit, note, progress
from packhorse_bench.commands import Keep, ModelFlags, file_texts, flag, show, split_names


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Asking:
    """The flags of `serve`, under the names of `serving_figures.ServingSetup`."""

    count: Annotated[int, flag("--count", help="Texts that are asked, again and again.")] = 2048
    device: Annotated[str | None, flag("--device", help="cpu, cuda …")] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        flag("--dtype", help="Of all servers; default fp32 on a CPU, else bf16."),
    ] = None
    threads: Annotated[int, flag("--threads", help="Of each server; 0: its cores.")] = 0
    infinity: Annotated[
        Path | None, flag("--infinity", help="infinity_emb; default as `make peers` makes it.")
    ] = None
    batch_size: Annotated[int, flag("--batch-size", "-bs", help="Of the peers.")] = 32
    limit_ms: Annotated[
        float, flag("--limit-ms", help="Within which 99 of 100 requests must be answered.")
    ] = 500.0
    connections: Annotated[
        int, flag("--connections", help="Of the generator; beyond them requests wait in it.")
    ] = 256
    seed: Annotated[int, flag("--seed", help="Of texts and arrivals.")] = 0


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Patience:
    """How long to look, under the names of `serving_search.Effort`."""

    rounds: Annotated[int, flag("--rounds", help="Of bisection.")] = 5
    short: Annotated[float, flag("--short", help="Seconds of a trial that searches.")] = 5.0
    long: Annotated[float, flag("--long", help="Seconds of a trial that confirms.")] = 15.0
    repeats: Annotated[int, flag("--repeats", help="Trials at a rate; all must hold.")] = 3


def serve(
    *,
    subject: ModelFlags = ModelFlags(),  # noqa: B008
    texts: Annotated[
        str | None,
        flag("--texts", help="txt, jsonl, csv …; default docstrings of the standard library."),
    ] = None,
    asking: Asking = Asking(),  # noqa: B008
    patience: Patience = Patience(),  # noqa: B008
    peers: Annotated[
        str | None,
        flag("--peers", help="With commas, or none; default sentence-transformers,infinity."),
    ] = None,
    csv: Annotated[Path | None, flag("--csv", help="All figures, a line a trial.")] = None,
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Measure `packhorse serve` and other servers under random arrivals over HTTP.

    Others: sentence-transformers behind FastAPI with dynamic batching, and
    infinity-emb. All serve the same model in the same number format with the
    same threads, one text of 6 to 250 tokens a request. The rate is the highest
    at which 99 of 100 requests are answered within the limit and none fails;
    "x" is how many times that of sentence-transformers. "At most" is a closed
    loop, "of PackRunner" its tokens a second against PackRunner.run without
    HTTP beside the same load.

    Try:
      packhorse bench serve --plot serve.svg --note note.md
      packhorse bench serve --peers none --rounds 3 --short 3 --long 5
    """
    from packhorse.reports import tables as report
    from packhorse_bench import serving, serving_report
    from packhorse_bench.serving_figures import ServingSetup
    from packhorse_bench.serving_search import Effort
    from packhorse_bench.serving_servers import PEERS

    keep.check()
    report.check_writable(csv)
    others = None if peers is None else tuple(n for n in split_names(peers) if n != "none")
    setup = ServingSetup(
        **asdict(subject),
        **asdict(asking),
        texts=() if texts is None else file_texts(texts),
        peers=PEERS if others is None else others,
        effort=Effort(**asdict(patience)),
    )
    with progress("seconds of load") as advance:
        comparison = serving.measure(setup, advance, note)
    facts = serving_report.describe(setup, comparison) | report.machine(comparison.device)
    remarks = serving_report.remarks(setup, comparison)
    show("Serving", facts, serving_report.table(setup, comparison), remarks, keep)
    if csv:
        report.write_csv(csv, comparison.points)
        note(f"written: {csv}")
    if keep.plot:
        title = f"{facts['model']}, {facts['dtype']}, {comparison.threads} threads"
        serving_report.draw(keep.plot, setup, comparison, title)
    rows, points = (
        [asdict(item) for item in items] for items in (comparison.rows, comparison.points)
    )
    runner = {"alone": comparison.runner_alone, "beside": comparison.runner_beside}
    emit({**facts, "runner": runner, "rows": rows, "points": points, "remarks": remarks}, keep.json)
