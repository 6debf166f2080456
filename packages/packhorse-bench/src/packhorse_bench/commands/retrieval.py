"""`packhorse bench sparse` and `packhorse bench multi`: outputs for retrieval, beside peers."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from packhorse.cli.console import emit, progress
from packhorse.cli.flags import DEFAULT_MODEL
from packhorse.errors import InputError
from packhorse_bench.commands import Keep, flag, read_some, show, split_names

Model = Annotated[
    str | None,
    flag("--model", "-m", help="A folder that both libraries read; without it random weights."),
]
Config = Annotated[
    str, flag("--config", help="Size of random weights: tiny, minilm, base, large; default base.")
]
Vocab = Annotated[
    str, flag("--vocab", help="Vocabulary of random weights; default that of all-MiniLM-L6-v2.")
]
Texts = Annotated[
    Path | None,
    flag("--texts", help="txt, jsonl, csv …; default docstrings of the standard library."),
]
AsQuery = Annotated[bool, flag("--as-query", help="The texts are queries, not documents.")]
Dtype = Annotated[str, flag("--dtype", help="fp32, bf16 or fp16.")]
Device = Annotated[str | None, flag("--device", help="cpu, cuda …")]
Count = Annotated[int, flag("--count", help="Texts.")]
Repeats = Annotated[int, flag("--repeats", help="Timed rounds, all engines in each.")]
BatchSize = Annotated[int, flag("--batch-size", "-bs", help="Of the peers.")]
Peers = Annotated[
    str | None, flag("--peers", help="Names with commas, or none; default the installed.")
]
Seed = Annotated[int, flag("--seed", help="Of the choice of texts and of random weights.")]


def sparse(
    *,
    model: Model = None,
    config: Config = "base",
    vocab: Vocab = DEFAULT_MODEL,
    texts: Texts = None,
    as_query: AsQuery = False,
    dtype: Dtype = "fp32",
    device: Device = None,
    count: Count = 128,
    repeats: Repeats = 5,
    batch_size: BatchSize = 32,
    peers: Peers = None,
    seed: Seed = 0,
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Sparse vectors of the same texts by Packhorse and by sentence-transformers.

    Each gets the whole list in one call of its own. Speeds are medians of the
    rounds, in which all take turns; "times ours" is how much longer it takes.

    Try:
      packhorse bench sparse --note note.md
      packhorse bench sparse -m ./splade --texts mine.jsonl
    """
    options = dict(locals())
    _measure("sparse", options.pop("keep"), **options)


def multi(
    *,
    model: Model = None,
    config: Config = "base",
    vocab: Vocab = DEFAULT_MODEL,
    texts: Texts = None,
    as_query: AsQuery = False,
    dtype: Dtype = "fp32",
    device: Device = None,
    count: Count = 128,
    repeats: Repeats = 5,
    batch_size: BatchSize = 32,
    peers: Peers = None,
    seed: Seed = 0,
    keep: Keep = Keep(),  # noqa: B008
) -> None:
    """Vectors of tokens of the same texts by Packhorse, sentence-transformers and PyLate.

    Each gets the whole list in one call of its own. Speeds are medians of the
    rounds, in which all take turns; "times ours" is how much longer it takes.

    Try:
      packhorse bench multi --note note.md
      packhorse bench multi --as-query --peers pylate
    """
    options = dict(locals())
    _measure("multi", options.pop("keep"), **options)


def _measure(
    output: Literal["sparse", "multi"],
    keep: Keep,
    *,
    model: str | None,
    config: str,
    vocab: str,
    texts: Path | None,
    as_query: bool,
    dtype: str,
    device: str | None,
    count: int,
    repeats: int,
    batch_size: int,
    peers: str | None,
    seed: int,
) -> None:
    from packhorse.checkpoint import hub
    from packhorse.device import choose_device
    from packhorse.reports import tables as report
    from packhorse_bench import retrieval as bench

    keep.check()
    if keep.plot:
        raise InputError("there is no plot of these figures; leave out --plot")
    request = bench.RetrievalRequest(
        output=output,
        model=None if model is None else str(hub.resolve(model)),
        texts=read_some(texts, count, seed),
        config=config,
        vocab=str(hub.resolve(vocab)) if model is None else None,
        as_query=as_query,
        dtype=dtype,
        device=device,
        peers=None if peers is None else tuple(n for n in split_names(peers) if n != "none"),
        batch_size=batch_size,
        repeats=repeats,
        seed=seed,
    )
    with progress("timing the engines") as advance:
        measured = bench.measure(request, advance)
    lengths = measured.lengths
    source = "docstrings of the standard library" if texts is None else texts.name
    kind = "queries" if as_query else "documents"
    unit = "words with a weight" if output == "sparse" else "vectors"
    facts = {
        "model": model or f"random weights, {config}",
        "workload": f"{source}: {len(lengths)} {kind} of {lengths.mean():.1f} tokens "
        f"({lengths.min()} to {lengths.max()}), seed {seed}",
        "output": f"{measured.per_text:,.1f} {unit} per text",
        "batches": f"ours by tokens, the peers' {batch_size} texts; medians of {repeats} rounds",
        **report.machine(choose_device(device)),
    }
    rows = measured.rows
    shown = report.Table.of(list(bench.COLUMNS), bench.table_rows(rows))
    show(f"Retrieval outputs, {output}", facts, shown, report.problems(rows), keep)
    emit({**facts, "rows": [asdict(row) for row in rows]}, keep.json)
