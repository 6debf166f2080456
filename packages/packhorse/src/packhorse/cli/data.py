"""`packhorse data`: from texts to packed shards, and what is in them.

An interruption ends with 130 and keeps what is done; every mistake and every full disk with 2, and
where there is something to go on with, the message says so.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Group, Parameter

from packhorse.cli.console import JsonFlag, emit, note, progress, short, table
from packhorse.cli.data_import import data_import, sources_and_out
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.data.corpus.building import BuildOptions
    from packhorse.data.corpus.driver import CorpusResult
    from packhorse.data.packed.manifest import Manifest
    from packhorse.data.packed.statistics import Sample, Statistics

app = App(
    name="data",
    help="Build datasets of packed rows, and look into them.",
    help_format="plaintext",
)
app.command(data_import, name="import")

SOURCES, EXAMPLES = Group("Sources", sort_key=1), Group("Examples", sort_key=2)
EVAL, WORK = Group("Held out", sort_key=3), Group("Work", sort_key=4)
BARS = 16  # of a histogram on the terminal
WIDTH = 24  # of the longest of them
SAMPLE = 480  # characters of a text to show
READ = {
    "files": "files",
    "records": "records",
    "documents": "documents",
    "held_out": "of them held out",
    "sentences": "sentences",
    "redirects": "redirects",
    "not_articles": "pages that are no articles",
    "empty": "without text",
    "bad": "that cannot be used",
}


def _flag(group: Group, help: str) -> Parameter:
    return Parameter(group=group, help=help, negative="")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags of `packhorse data build`."""

    tokenizer: Annotated[
        str, _flag(EXAMPLES, "vocab.txt, tokenizer.json, a model's folder or its hub id.")
    ]
    format: Annotated[
        Literal["mediawiki", "wikiextractor", "sentences", "text", "jsonl", "parquet", "arrow"]
        | None,
        _flag(SOURCES, "What the sources are; default told by each."),
    ] = None
    column: Annotated[str | None, _flag(SOURCES, "The text's column in a table.")] = None
    max_bad: Annotated[
        int, _flag(SOURCES, "So many documents or places that cannot be used are left out.")
    ] = 0

    max_length: Annotated[int, _flag(EXAMPLES, "Tokens a sequence and a row at most.")] = 512
    max_per_pack: Annotated[int, _flag(EXAMPLES, "Sequences a row at most; 0: as many as fit.")] = 3
    short_probability: Annotated[
        float, _flag(EXAMPLES, "That a document is cut into shorter sequences.")
    ] = 0.1
    mask_probability: Annotated[float, _flag(EXAMPLES, "Of the tokens, to be guessed.")] = 0.15
    max_predictions: Annotated[
        int, _flag(EXAMPLES, "Masked tokens a sequence at most; 0: no bound.")
    ] = 76
    whole_words: Annotated[bool, _flag(EXAMPLES, "Mask whole words.")] = False
    static_masks: Annotated[
        bool, _flag(EXAMPLES, "Store masks; default drawn anew whenever a row is loaded.")
    ] = False
    single: Annotated[
        bool, _flag(EXAMPLES, "One segment a sequence; default pairs with a next-sentence label.")
    ] = False
    duplicates: Annotated[int, _flag(EXAMPLES, "Passes over each document, drawn anew.")] = 1
    seed: Annotated[int, _flag(EXAMPLES, "Of everything that is drawn.")] = 12345

    eval_hashes: Annotated[
        Path | None, _flag(EVAL, "md5 of the documents that are not for training, one a line.")
    ] = None
    eval_count: Annotated[
        int | None, _flag(EVAL, "Sequences of them in OUT/eval, exactly; default 10,000.")
    ] = None

    engine: Annotated[
        Literal["local", "ray"], _flag(WORK, "This machine, or a Ray cluster that shares OUT.")
    ] = "local"
    ray_address: Annotated[
        str | None, _flag(WORK, "HOST:PORT of the cluster; default Ray is started here.")
    ] = None
    workers: Annotated[int | None, _flag(WORK, "Processes; default one a core.")] = None
    shard_bytes: Annotated[int, _flag(WORK, "About the size of a file of rows.")] = 64 << 20
    chunk_bytes: Annotated[
        int | None, _flag(WORK, "Of the sources, in a piece of work; what a kill may cost.")
    ] = None
    overwrite: Annotated[
        bool, _flag(WORK, "Replace what OUT holds, and what is left of another build.")
    ] = False


@app.command
def build(
    *paths: Annotated[Path, Parameter(name="SOURCE... OUT", help="Files or folders; the result.")],
    options: Options,
    json: JsonFlag = False,
) -> None:
    """Make a dataset of packed rows of files and folders of text.

    Sources are MediaWiki dumps (xml, xml.bz2), WikiExtractor's output, text with
    a sentence a line, plain text, jsonl, parquet or folders that datasets saved
    (a split is FOLDER/train). OUT gets train, with --eval-hashes eval, and the
    tokenizer. After a kill, a full disk or Ctrl-C (exit code 130) the same
    command goes on; the result is the same, byte for byte, for any number of
    workers.

    Try:
      packhorse data build enwiki.xml.bz2 corpus --tokenizer vocab.txt
      packhorse data build texts/ corpus --tokenizer ./bert --max-length 128
    """
    from packhorse.cli.data_progress import watching
    from packhorse.data.corpus.building import build

    config = _config(paths, options)
    start = time.perf_counter()
    try:
        with watching() as watch:
            built = build(config, watch)
    except KeyboardInterrupt:
        note(f"{config.out}: what is done is kept; run the same command to go on")
        raise
    seconds = time.perf_counter() - start
    found = built.train.config["found"]
    if config.recipe.next_sentence and found.get("documents") == 1:
        note(
            "warning: of a single document every sentence pair follows, so there is nothing to "
            "tell apart; give it more documents (a file is one), or --single"
        )
    if built.already:
        note(f"{config.out} was built already, by the same command; nothing to do")
    _show_built(config.out, built, seconds)
    emit(_built(config.out, built, seconds), json)


def _config(paths: tuple[Path, ...], options: Options) -> "BuildOptions":
    from packhorse.data.corpus.building import EVAL_COUNT, BuildOptions
    from packhorse.data.packed.masking import Recipe
    from packhorse.data.sources.chunking import CHUNK_BYTES

    sources, out = sources_and_out(paths)
    if options.eval_count is not None and options.eval_hashes is None:
        raise InputError("--eval-count is for --eval-hashes, which says what is held out")
    recipe = Recipe(
        max_length=options.max_length,
        short_probability=options.short_probability,
        mask_probability=options.mask_probability,
        max_predictions=options.max_predictions or None,
        whole_words=options.whole_words,
        duplicates=options.duplicates,
        static_masks=options.static_masks,
        seed=options.seed,
        next_sentence=not options.single,
    )
    same = ("column", "eval_hashes", "max_bad", "shard_bytes", "overwrite")
    same += ("engine", "ray_address", "workers")
    return BuildOptions(
        sources=sources,
        out=out,
        tokenizer=_tokenizer(options.tokenizer),
        recipe=recipe,
        max_per_pack=options.max_per_pack or None,
        eval_count=EVAL_COUNT if options.eval_count is None else options.eval_count,
        kind=options.format,
        chunk_bytes=CHUNK_BYTES if options.chunk_bytes is None else options.chunk_bytes,
        **{name: getattr(options, name) for name in same},
    )


def _tokenizer(named: str) -> Path:
    """A path as it is; asking the hub would first import torch."""
    if Path(named).exists():
        return Path(named)
    from packhorse.checkpoint.hub import resolve

    return resolve(named)


def _show_built(out: Path, built: "CorpusResult", seconds: float) -> None:
    rows = [
        [name, m.rows, m.sequences, m.tokens, f"{m.efficiency:.2%}", f"{_best(m):.2%}"]
        for name, m in _manifests(built).items()
    ]
    title = f"{out}: built {'before' if built.already else f'in {seconds:.1f} s'}"
    table(title, ["", "rows", "sequences", "tokens", "full", "no plan is fuller"], rows)
    found = built.train.config["found"]
    print(f"read: {_read(found)}")
    if found["bad"]:
        note(f"warning: {found['bad']:,} documents or places could not be used and were left out")


def _read(found: dict[str, int]) -> str:
    """What the sources held, as far as it was counted."""
    counted = [
        f"{found[name]:,} {words}" for name, words in READ.items() if found.get(name) is not None
    ]
    return ", ".join(counted)


def _best(manifest: "Manifest") -> float:
    """How full rows can be at most."""
    bound = manifest.config.get("lower_bound") or manifest.rows
    return manifest.tokens / (bound * manifest.layout.capacity)


def _manifests(built: "CorpusResult") -> "dict[str, Manifest]":
    return {"train": built.train} | ({"eval": built.eval} if built.eval else {})


def _built(out: Path, built: "CorpusResult", seconds: float) -> dict[str, Any]:
    return {
        "out": str(out),
        "already": built.already,
        "seconds": seconds,
        "found": built.train.config["found"],
        **{name: _figures(manifest) for name, manifest in _manifests(built).items()},
    }


def _figures(manifest: "Manifest") -> dict[str, Any]:
    sums = {name: getattr(manifest, name) for name in ("rows", "sequences", "tokens", "efficiency")}
    bound = manifest.config.get("lower_bound")
    return {**sums, "lower_bound": bound, "fingerprint": manifest.fingerprint}


@app.command
def stats(
    out: Annotated[Path, Parameter(help="What was built: the folder, or one dataset in it.")],
    /,
    *,
    samples: Annotated[int, Parameter(help="Sequences to show.")] = 3,
    top: Annotated[int, Parameter(help="Ways to fill a row to show.")] = 8,
    seed: Annotated[int, Parameter(help="Of the samples.")] = 0,
    verify: Annotated[
        bool, Parameter(negative="", help="Read every byte and check it.", show_default=False)
    ] = False,
    plot: Annotated[
        Path | None, Parameter(help="Draw the lengths before and after: png, svg, pdf.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show what a dataset of packed rows holds, how full it is, and some of it as text.

    In a sample, [MASK=horse] is a token to be guessed, [mule=horse] one that was
    exchanged for another, [horse=horse] one that was left.

    Try:
      packhorse data stats corpus
      packhorse data stats corpus/train --samples 10 --plot lengths.png
      packhorse data stats corpus --verify --json
    """
    from packhorse.data.packed import statistics
    from packhorse.reports import plots

    plots.check(plot)
    if seed < 0:
        raise InputError(f"--seed is {seed}; it must be 0 or more")
    folders = statistics.datasets(out)
    documents = {}
    for name, folder in folders.items():
        if verify:
            _verify(name, folder)
        found = statistics.count(name, folder, top)
        shown = _samples(out, folder, samples, seed)
        _show(found, shown)
        documents[name] = {**_document(found), "samples": [*map(asdict, shown)]}
        if plot and name == next(iter(folders)):
            plots.draw_corpus(plot, found)
            note(f"drawn: {plot}, of {name}")
    emit({"out": str(out), "verified": verify, **documents}, json)


def _verify(name: str, folder: Path) -> None:
    from packhorse.data.packed import shards

    with progress(f"verifying {name}") as advance:
        advance(0, 1)
        shards.open(folder, verify=True)
        advance(1, 1)
    note(f"{folder}: every byte is as it was written")


def _samples(out: Path, folder: Path, number: int, seed: int) -> "list[Sample]":
    """Some sequences as text, if there is a tokenizer to read them with."""
    from packhorse.data.packed import statistics
    from packhorse.tokens import Tokenizer

    homes = [home / "tokenizer" for home in (out, folder.parent)]
    home = next((home for home in homes if home.is_dir()), None)
    if number < 1 or home is None:
        if number > 0:
            note(f"{out}: no tokenizer beside it, so no samples are shown")
        return []
    return statistics.samples(folder, Tokenizer.load(home), number, seed)


def _show(found: "Statistics", shown: "list[Sample]") -> None:
    manifest = found.manifest
    about = f"{found.name}: {manifest.sequences:,} sequences in {manifest.rows:,} rows"
    table(about, ["", ""], [[name, value] for name, value in _lines(found)])
    _show_lengths(found)
    rows = [
        [" + ".join(map(str, lengths)), sum(lengths), count, f"{count / manifest.rows:.2%}"]
        for lengths, count in found.strategies
    ]
    title = f"{found.strategy_count:,} ways to fill a row, the most frequent:"
    table(title, ["lengths", "tokens", "rows", "of all"], rows)
    for sample in shown:
        label = f", next sentence: {sample.next_label}" if sample.next_label else ""
        print(f"row {sample.row:,}, {sample.tokens} tokens{label}")
        print(f"  {short(sample.text, SAMPLE)}")


def _lines(found: "Statistics") -> list[tuple[str, str]]:
    manifest, layout = found.manifest, found.manifest.layout
    one_a_row = manifest.tokens / (manifest.sequences * layout.capacity)
    bound, random = found.lower_bound, found.random_next
    follows = []
    if random is not None:
        follows = [("random next sentences", f"{random / manifest.sequences:.1%}")]
    best = [("no plan is fuller than", f"{_best(manifest):.2%} ({bound:,} rows)")] if bound else []
    return [
        *([("read", _read(told))] if (told := manifest.config.get("found")) else []),
        ("tokens", f"{manifest.tokens:,}"),
        ("tokens a sequence", f"{manifest.tokens / manifest.sequences:.1f}"),
        ("sequences a row", f"{manifest.sequences / manifest.rows:.3f}"),
        ("full, one sequence a row", f"{one_a_row:.2%}"),
        ("full, packed", f"{manifest.efficiency:.2%}"),
        *best,
        *follows,
        ("masks", "stored" if layout.static_masks else "drawn when loading"),
        ("on disk", f"{found.bytes / 1e6:,.1f} MB in {len(manifest.shards):,} shards"),
    ]


def _show_lengths(found: "Statistics") -> None:
    """Both histograms side by side; each has its own scale."""
    from packhorse.data.packed.statistics import bins

    before, after = bins(found.lengths, BARS), bins(found.row_tokens, BARS)
    most = [max(count for *_, count in each) or 1 for each in (before, after)]
    rows = [
        [f"{low}-{high}", count, _bar(count / most[0]), count_after, _bar(count_after / most[1])]
        for (low, high, count), (*_, count_after) in zip(before, after, strict=True)
    ]
    table("By length, before and after packing:", ["tokens", "sequences", "", "rows", ""], rows)


def _bar(share: float) -> str:
    return "█" * round(share * WIDTH) or ("▏" if share else "")


def _document(found: "Statistics") -> dict[str, Any]:
    made_by = found.manifest.config
    return {
        **_figures(found.manifest),
        "capacity": found.manifest.layout.capacity,
        "max_per_pack": found.manifest.layout.max_per_pack,
        "static_masks": found.manifest.layout.static_masks,
        "random_next": found.random_next,
        "bytes": found.bytes,
        "shards": len(found.manifest.shards),
        "found": made_by.get("found"),
        "lengths": found.lengths.tolist(),
        "row_tokens": found.row_tokens.tolist(),
        "strategies": [{"lengths": [*lengths], "rows": n} for lengths, n in found.strategies],
        "strategy_count": found.strategy_count,
    }
