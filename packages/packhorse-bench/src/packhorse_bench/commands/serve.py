"""`packhorse bench serve`: our server and others under the same load, in one run."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from packhorse.cli.console import emit, note, progress
from packhorse.errors import InputError
from packhorse_bench.commands import Keep, ModelFlags, file_texts, flag, show, split_names

if TYPE_CHECKING:
    from packhorse_bench.serving_figures import LoadSetup, ServingSetup


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
    seed: Annotated[int, flag("--seed", help="Of texts and arrivals.")] = 0


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Patience:
    """How long to look, under the names of `serving_search.Effort`."""

    rounds: Annotated[int, flag("--rounds", help="Of bisection.")] = 5
    short: Annotated[
        float, flag("--short", help="Seconds of a trial that searches, and of a loop.")
    ] = 5.0
    long: Annotated[float, flag("--long", help="Seconds of a trial that confirms.")] = 15.0
    repeats: Annotated[
        int, flag("--repeats", help="Trials at a rate, all must hold; rounds of loops.")
    ] = 3


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Loops:
    """The flags for loops of requests of known size (`serving_shapes`)."""

    shape: Annotated[
        str | None,
        flag("--shape", help="TOKENSxTEXTS of a request, with commas: 50x1,50x16,512x16."),
    ] = None
    loop: Annotated[
        Literal["closed", "open"] | None,
        flag("--loop", help="open: after the closed loop, random arrivals at 80 % of its rate."),
    ] = None
    rate: Annotated[
        float,
        flag("--rate", help="Requests per second of the open loop; default 80 % of the closed's."),
    ] = 0.0
    lone: Annotated[
        bool, flag("--lone", help="Also one query of 12 tokens: idle, and at 50 and 80 % load.")
    ] = False
    offline: Annotated[
        bool,
        flag("--offline", help="Also our library without a server, on the same token ids."),
    ] = False
    url: Annotated[
        tuple[str, ...],
        flag(
            "--url",
            help="[NAME=]http://localhost:8080/embed: measure a running server and start none; may "
            "be repeated. --model names what it serves.",
        ),
    ] = ()
    fronts: Annotated[
        int | None, flag("--fronts", help="Of our server, as in `packhorse serve`.")
    ] = None
    graphs: Annotated[bool, flag("--graphs", help="Of our server, as in `packhorse serve`.")] = (
        False
    )
    generators: Annotated[
        int, flag("--generators", help="Processes that send requests; 0: a quarter of the cores.")
    ] = 0
    warm: Annotated[float, flag("--warm", help="Seconds of a loop before those that count.")] = 2.0

    @property
    def any_set(self) -> bool:
        """Whether any of these flags asks for loops, in place of the search."""
        return bool(self.shape or self.loop or self.rate or self.lone or self.offline or self.url)


def serve(
    *,
    subject: ModelFlags = ModelFlags(),  # noqa: B008
    texts: Annotated[
        str | None,
        flag("--texts", help="txt, jsonl, csv …; default docstrings of the standard library."),
    ] = None,
    asking: Asking = Asking(),  # noqa: B008
    patience: Patience = Patience(),  # noqa: B008
    loops: Loops = Loops(),  # noqa: B008
    connections: Annotated[
        int | None,
        flag(
            "--connections",
            help="Of all generators; beyond them requests wait there. Default 256, in loops enough "
            "to keep the device busy.",
        ),
    ] = None,
    peers: Annotated[
        str | None,
        flag("--peers", help="With commas, or none; default sentence-transformers,infinity."),
    ] = None,
    csv: Annotated[Path | None, flag("--csv", help="All figures, a line a trial.")] = None,
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Measure `packhorse serve` and other servers under load over HTTP.

    Others: sentence-transformers behind FastAPI with dynamic batching, and
    infinity-emb. All serve the same model in the same number format with the
    same threads, one text of 6 to 250 tokens per request. The rate is the highest
    at which 99 of 100 requests are answered within the limit and none fails;
    "x" is how many times that of sentence-transformers. "At most" is a closed
    loop, "of PackRunner" its tokens per second against PackRunner.run without
    HTTP beside the same load.

    With --shape (or --loop, --rate, --lone, --offline, --url) there is no search: every
    server has a closed loop of requests of each shape from several processes. The table
    says what the GPU, the server's cores and the generators did meanwhile.

    Try:
      packhorse bench serve --plot serve.svg --note note.md
      packhorse bench serve --peers none --rounds 3 --short 3 --long 5
      packhorse bench serve --config base --device cuda --loop open --lone
      packhorse bench serve --shape 50x16 --url tei=http://127.0.0.1:8080/embed
    """
    from packhorse.reports import tables as report
    from packhorse_bench import serving, serving_report
    from packhorse_bench.serving_figures import ServingSetup
    from packhorse_bench.serving_search import Effort
    from packhorse_bench.serving_servers import PEERS

    keep.check()
    report.check_writable(csv)
    if connections is not None and connections < 1:
        raise InputError(f"--connections {connections} asks nothing; pass 1 or more")
    others = None if peers is None else tuple(n for n in split_names(peers) if n != "none")
    setup = ServingSetup(
        **asdict(subject),
        **asdict(asking),
        texts=() if texts is None else file_texts(texts),
        peers=PEERS if others is None else others,
        effort=Effort(**asdict(patience)),
        connections=256 if connections is None else connections,
        load=_load_setup(loops, patience.short, connections or 0),
    )
    if loops.any_set:
        return _measure_loops(setup, csv, keep)
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


def _load_setup(loops: Loops, seconds: float, connections: int) -> "LoadSetup":
    from packhorse_bench.serving_figures import LoadSetup
    from packhorse_bench.serving_servers import parse_url
    from packhorse_bench.serving_shapes import DEFAULT_SHAPES
    from packhorse_bench.serving_texts import Shape

    shapes = DEFAULT_SHAPES
    if loops.shape is not None:
        shapes = tuple(dict.fromkeys(Shape.parse(text) for text in split_names(loops.shape)))
    return LoadSetup(
        shapes=shapes,
        open_loop=loops.loop == "open" or bool(loops.rate),
        rate=loops.rate,
        lone=loops.lone,
        offline=loops.offline,
        urls=tuple(parse_url(url) for url in loops.url),
        generators=loops.generators,
        connections=connections,
        fronts=loops.fronts,
        graphs=loops.graphs,
        seconds=seconds,
        warm=loops.warm,
    )


def _measure_loops(setup: "ServingSetup", csv: Path | None, keep: Keep) -> None:
    """Measure loops of requests of known size, and show them."""
    from packhorse.reports import tables as report
    from packhorse_bench import serving_shapes, serving_shapes_report

    with progress("seconds of load") as advance:
        comparison = serving_shapes.measure(setup, advance, note)
    facts = serving_shapes_report.describe(setup, comparison) | report.machine(comparison.device)
    remarks = serving_shapes_report.remarks(comparison)
    show("Serving", facts, serving_shapes_report.table(comparison), remarks, keep)
    if csv and comparison.trials:
        report.write_csv(csv, comparison.trials)
        note(f"written: {csv}")
    if keep.plot:
        serving_shapes_report.draw(keep.plot, comparison, f"{facts['model']}, {facts['dtype']}")
    rows = [asdict(row) for row in comparison.rows]
    trials = [asdict(row) for row in comparison.trials]
    emit({**facts, "rows": rows, "trials": trials, "remarks": remarks}, keep.json)
