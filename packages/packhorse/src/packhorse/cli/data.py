"""`packhorse data`: build or import datasets of packed rows, and look into them.

An interruption ends with exit code 130 and keeps the finished work; every mistake and every full
disk ends with 2. If the work can be resumed, the message says so.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Group, Parameter

from packhorse import status
from packhorse.cli.console import JsonFlag, emit, note, progress, short, stage_progress, table
from packhorse.cli.flags import flag
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.data.corpus.building import BuildOptions, CorpusProgress
    from packhorse.data.corpus.driver import CorpusResult
    from packhorse.data.corpus.importing import ImportOptions
    from packhorse.data.packed.manifest import Manifest
    from packhorse.data.packed.statistics import Sample, Statistics

app = App(
    name="data",
    help="Build datasets of packed rows, and look into them.",
    help_format="plaintext",
)

SOURCES = Group("Sources", sort_key=1)
EXAMPLES = Group("Examples", sort_key=2)
ROWS = Group("Rows", sort_key=2)
HELD_OUT = Group("Held out", sort_key=3)
CLEANING = Group("Cleaning", sort_key=3)
GRAPHCORE = Group("Graphcore's records", sort_key=3)
WORK = Group("Work", sort_key=4)

HISTOGRAM_BARS = 16
BAR_WIDTH = 24  # characters of the longest bar
SAMPLE_WIDTH = 480  # characters of a text to show
SOURCE_COUNTS = {
    "files": "files",
    "records": "records",
    "documents": "documents",
    "held_out": "of them held out",
    "sentences": "sentences",
    "redirects": "redirects",
    "not_articles": "pages that are no articles",
    "empty": "without text",
    "repaired": "repaired",
    "too_short": "too short",
    "too_long": "too long",
    "other_languages": "in other languages",
    "duplicates": "duplicates",
    "near_duplicates": "near duplicates",
    "bad": "unreadable",
}
# Counts that are shown only where there is something to count.
RARE_COUNTS = (
    "repaired", "too_short", "too_long", "other_languages", "duplicates", "near_duplicates"
)  # fmt: skip
SourcesAndOut = Annotated[
    Path,
    Parameter(
        name="SOURCE... OUT",
        help="Source files or folders, then the output folder.",
        allow_leading_hyphen=True,  # for `-`; `_split_paths` refuses other words that begin so
    ),
]


def _split_paths(paths: tuple[Path, ...]) -> tuple[tuple[Path, ...], Path]:
    """Split the arguments `SOURCE... OUT`."""
    for path in map(str, paths):
        if path.startswith("-") and path != "-":
            raise InputError(f"unknown option: {path}; if it is a file, write ./{path}")
    if len(paths) < 2:
        raise InputError("name one source or more and, last, the folder for the result")
    return paths[:-1], paths[-1]


# packhorse data build --------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFlags:
    """The flags of `packhorse data build`."""

    tokenizer: Annotated[
        str, flag(group=EXAMPLES, help="vocab.txt, tokenizer.json, a model's folder or hub id.")
    ]
    format: Annotated[
        Literal[
            "mediawiki", "wikiextractor", "sentences", "text", "jsonl", "json", "parquet", "arrow"
        ]
        | None,
        flag(group=SOURCES, help="Format of the sources; default detected for each."),
    ] = None
    column: Annotated[
        str | None, flag(group=SOURCES, help="Column of the text, if a source is a table.")
    ] = None
    documents: Annotated[
        Literal["file", "titles", "blank-lines", "lines"] | None,
        flag(
            group=SOURCES,
            help="What a document of plain text is: a file, or what stands between titles (= A =), "
            "blank lines or line ends; default guessed and printed.",
        ),
    ] = None
    separator: Annotated[
        str | None,
        flag(group=SOURCES, help="Text between two documents of plain text: <|endoftext|>."),
    ] = None
    bad_bytes: Annotated[
        Literal["skip", "repair"],
        flag(
            group=SOURCES,
            help="Documents with bytes that are not UTF-8: skip them, or replace the bytes.",
            show_default=True,
        ),
    ] = "skip"
    max_bad: Annotated[
        int, flag(group=SOURCES, help="Skip up to N unreadable documents.", show_default=True)
    ] = 0

    max_length: Annotated[
        int,
        flag(group=EXAMPLES, help="Maximum tokens per sequence and per row.", show_default=True),
    ] = 512
    max_per_pack: Annotated[
        int,
        flag(
            group=EXAMPLES,
            help="Maximum sequences per row; 0 for as many as fit.",
            show_default=True,
        ),
    ] = 3
    short_probability: Annotated[
        float,
        flag(
            group=EXAMPLES,
            help="Probability that a document is cut into shorter sequences.",
            show_default=True,
        ),
    ] = 0.1
    mask_probability: Annotated[
        float, flag(group=EXAMPLES, help="Fraction of the tokens to mask.", show_default=True)
    ] = 0.15
    max_predictions: Annotated[
        int,
        flag(
            group=EXAMPLES,
            help="Maximum masked tokens per sequence; 0 for no limit.",
            show_default=True,
        ),
    ] = 76
    whole_words: Annotated[bool, flag(group=EXAMPLES, help="Mask whole words.")] = False
    static_masks: Annotated[
        bool,
        flag(
            group=EXAMPLES, help="Store the masks; by default they are drawn when a row is loaded."
        ),
    ] = False
    single: Annotated[
        bool,
        flag(
            group=EXAMPLES,
            help="One segment per sequence; by default pairs with a next-sentence label.",
        ),
    ] = False
    duplicates: Annotated[
        int,
        flag(
            group=EXAMPLES,
            help="Passes over each document, each with new random choices.",
            show_default=True,
        ),
    ] = 1
    seed: Annotated[
        int, flag(group=EXAMPLES, help="Seed of all random choices.", show_default=True)
    ] = 12345

    eval_hashes: Annotated[
        Path | None,
        flag(group=HELD_OUT, help="File with the md5 of each document to hold out, one per line."),
    ] = None
    eval_count: Annotated[
        int | None,
        flag(
            group=HELD_OUT,
            help="Exact number of sequences in OUT/eval; default 10,000, or with --eval-fraction "
            "at most that.",
        ),
    ] = None

    eval_fraction: Annotated[
        float | None,
        flag(
            group=HELD_OUT,
            help="Fraction of documents to hold out as OUT/eval, chosen by a hash of their text.",
        ),
    ] = None

    dedup: Annotated[
        Literal["exact", "near"] | None,
        flag(
            group=CLEANING,
            help="Leave out documents that repeat an earlier one: with the same text, or (near) "
            "with 80 % of their runs of five tokens in common.",
        ),
    ] = None
    languages: Annotated[
        str | None, flag(group=CLEANING, help="Keep documents in these languages: en,de.")
    ] = None
    report_languages: Annotated[
        bool, flag(group=CLEANING, help="Count the documents of each language.")
    ] = False
    min_characters: Annotated[
        int, flag(group=CLEANING, help="Leave out shorter documents.", show_default=True)
    ] = 0
    max_characters: Annotated[
        int | None, flag(group=CLEANING, help="Leave out longer documents.")
    ] = None

    engine: Annotated[
        Literal["local", "ray"],
        flag(
            group=WORK,
            help="Run on this machine, or on a Ray cluster that can write to OUT.",
            show_default=True,
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        flag(group=WORK, help="HOST:PORT of the Ray cluster; default start Ray here."),
    ] = None
    workers: Annotated[
        int | None, flag(group=WORK, help="Number of processes; default one per core.")
    ] = None
    shard_bytes: Annotated[
        int, flag(group=WORK, help="Approximate size of an output file.", show_default=True)
    ] = 64 << 20
    chunk_bytes: Annotated[
        int | None,
        flag(
            group=WORK,
            help="Bytes of the sources per work item, the most that an interruption loses.",
        ),
    ] = None
    overwrite: Annotated[
        bool, flag(group=WORK, help="Replace OUT, or an unfinished build of something else.")
    ] = False


@app.command
def build(*paths: SourcesAndOut, flags: BuildFlags, json: JsonFlag = False) -> None:
    """Build a dataset of packed rows from files and folders of text.

    Sources are plain text, jsonl, JSON arrays, parquet, MediaWiki dumps (xml),
    WikiExtractor's output, text with one sentence per line, or folders saved by
    the datasets library (FOLDER/train for one split). All but parquet may be
    packed (gz, bz2, xz, zst, tar, zip); - is standard input, hf://org/name a
    dataset of the hub. OUT gets the folders train, with --eval-fraction or
    --eval-hashes also eval, and the tokenizer. After a kill, a full disk or Ctrl-C
    (exit code 130) the same command resumes. The result is the same, byte for
    byte, for any number of workers.

    Try:
      packhorse data build enwiki.xml.bz2 corpus --tokenizer vocab.txt
      packhorse data build texts/ corpus --tokenizer ./bert --max-length 128
      packhorse data build a.jsonl.zst corpus --tokenizer ./bert --dedup near
      zstdcat texts.zst | packhorse data build - corpus --tokenizer ./bert
    """
    from packhorse.data.corpus.building import build

    config = _build_config(paths, flags)
    start = time.perf_counter()
    try:
        with build_progress() as watch:
            built = build(config, watch, note)
    except KeyboardInterrupt:
        note(f"{config.out}: finished work is kept; run the same command to resume")
        raise
    seconds = time.perf_counter() - start
    counts = built.train.config["found"]
    if alone := counts.get("without_other"):
        share = "every" if alone == counts["sequences"] else f"{alone:,} of {counts['sequences']:,}"
        note(
            f"warning: {share} sentence pair is consecutive, because a document stood alone in its "
            "part of the corpus, and next-sentence prediction has nothing to learn from these; "
            "say with --documents what a document is, add documents, or pass --single"
        )
    if built.already:
        note(f"{config.out} was built already, by the same command; nothing to do")
    _show_built(config.out, built, seconds)
    document = {
        "out": str(config.out),
        "already": built.already,
        "seconds": seconds,
        "found": counts,
        **{name: _figures(manifest) for name, manifest in _manifests(built).items()},
    }
    emit(document, json)


def _build_config(paths: tuple[Path, ...], flags: BuildFlags) -> "BuildOptions":
    from packhorse.data.corpus.building import BuildOptions
    from packhorse.data.corpus.cleaning import Cleaning
    from packhorse.data.packed.masking import Recipe
    from packhorse.data.sources.chunking import CHUNK_BYTES

    sources, out = _split_paths(paths)
    selects_none = flags.eval_hashes is None and not flags.eval_fraction
    if flags.eval_count is not None and selects_none:
        raise InputError(
            "--eval-count needs --eval-fraction or --eval-hashes, which select held-out documents"
        )
    cleaning = Cleaning(
        min_characters=flags.min_characters,
        max_characters=flags.max_characters,
        languages=tuple(flags.languages.replace(" ", "").split(",")) if flags.languages else (),
        report_languages=flags.report_languages,
        duplicates=flags.dedup,
    )
    recipe = Recipe(
        max_length=flags.max_length,
        short_probability=flags.short_probability,
        mask_probability=flags.mask_probability,
        max_predictions=flags.max_predictions or None,
        whole_words=flags.whole_words,
        duplicates=flags.duplicates,
        static_masks=flags.static_masks,
        seed=flags.seed,
        next_sentence=not flags.single,
    )
    return BuildOptions(
        sources=sources,
        out=out,
        tokenizer=_find_tokenizer(flags.tokenizer),
        recipe=recipe,
        max_per_pack=flags.max_per_pack or None,
        kind=flags.format,
        column=flags.column,
        documents=flags.documents,
        separator=flags.separator,
        repair=flags.bad_bytes == "repair",
        cleaning=cleaning,
        eval_hashes=flags.eval_hashes,
        eval_fraction=flags.eval_fraction or 0.0,
        eval_count=flags.eval_count,
        max_bad=flags.max_bad,
        chunk_bytes=CHUNK_BYTES if flags.chunk_bytes is None else flags.chunk_bytes,
        shard_bytes=flags.shard_bytes,
        overwrite=flags.overwrite,
        engine=flags.engine,
        workers=flags.workers,
        ray_address=flags.ray_address,
    )


def _find_tokenizer(name: str) -> Path:
    """Return a path as it is; only a hub id needs the hub, whose module imports torch."""
    if Path(name).exists():
        return Path(name)
    from packhorse.checkpoint.hub import resolve

    return resolve(name)


@contextmanager
def build_progress() -> "Iterator[Callable[[CorpusProgress], None]]":
    """Show the stages of a build; yields a function that takes each step."""
    with stage_progress("build", facts={"device": "cpu"}) as report:

        def watch(step: "CorpusProgress") -> None:
            counts = step.counts
            detail = f"{counts.sequences:,} sequences"
            speeds = {}
            # Later stages read no documents, and they count each of the two datasets on its own.
            if step.stage == "reading":
                detail = (
                    f"{counts.documents:,} documents, {counts.sentences:,} sentences, {detail}, "
                    f"{step.megabytes_per_second:.1f} MB/s"
                )
                speeds = {name: getattr(counts, name) for name in status.SPEEDS}
            report(step.stage, step.done, step.total, detail=detail, figures=speeds)

        yield watch


def _show_built(out: Path, built: "CorpusResult", seconds: float) -> None:
    rows = [
        [
            name,
            manifest.rows,
            manifest.sequences,
            manifest.tokens,
            f"{manifest.efficiency:.2%}",
            f"{_best_efficiency(manifest):.2%}",
        ]
        for name, manifest in _manifests(built).items()
    ]
    title = f"{out}: built {'before' if built.already else f'in {seconds:.1f} s'}"
    table(title, ["", "rows", "sequences", "tokens", "full", "no plan is fuller"], rows)
    counts = built.train.config["found"]
    print(f"read: {_source_counts(counts)}")
    if counts["bad"]:
        note(f"warning: {counts['bad']:,} unreadable documents were skipped")


def _source_counts(counts: dict[str, Any]) -> str:
    """Say what the sources held, as far as it was counted."""
    parts = [
        f"{counts[name]:,} {label}"
        for name, label in SOURCE_COUNTS.items()
        if counts.get(name) is not None and (counts[name] or name not in RARE_COUNTS)
    ]
    return ", ".join(parts)


def _best_efficiency(manifest: "Manifest") -> float:
    """Return how full the rows of the best possible plan could be."""
    bound = manifest.config.get("lower_bound") or manifest.rows
    return manifest.tokens / (bound * manifest.layout.capacity)


def _manifests(built: "CorpusResult") -> "dict[str, Manifest]":
    manifests = {"train": built.train}
    if built.eval:
        manifests["eval"] = built.eval
    return manifests


def _figures(manifest: "Manifest") -> dict[str, Any]:
    return {
        "rows": manifest.rows,
        "sequences": manifest.sequences,
        "tokens": manifest.tokens,
        "efficiency": manifest.efficiency,
        "lower_bound": manifest.config.get("lower_bound"),
        "fingerprint": manifest.fingerprint,
    }


# packhorse data import -------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFlags:
    """The flags of `packhorse data import`."""

    tokenizer: Annotated[
        str | None,
        flag(
            group=SOURCES,
            help="vocab.txt, tokenizer.json, a model's folder or hub id; copied into OUT.",
        ),
    ] = None
    vocab_size: Annotated[
        int | None,
        flag(
            group=SOURCES,
            help="Size of the vocabulary, if there is no tokenizer; special tokens are then "
            "detected.",
        ),
    ] = None
    eval: Annotated[
        list[Path] | None,
        flag(group=SOURCES, help="A source for OUT/eval; repeatable."),
    ] = None
    format: Annotated[
        Literal["tfrecord", "graphcore"] | None,
        flag(group=SOURCES, help="Format of the sources; default detected for each."),
    ] = None

    repack: Annotated[
        bool, flag(group=ROWS, help="Pack again; by default packed rows are kept.")
    ] = False
    max_per_pack: Annotated[
        int,
        flag(
            group=ROWS,
            help="Maximum sequences per row, if rows are packed; 0 for as many as fit.",
            show_default=True,
        ),
    ] = 3
    seed: Annotated[
        int, flag(group=ROWS, help="Seed of the choice of rows.", show_default=True)
    ] = 12345

    max_length: Annotated[
        int, flag(group=GRAPHCORE, help="Tokens per record.", show_default=True)
    ] = 512
    max_predictions: Annotated[
        int, flag(group=GRAPHCORE, help="Masked tokens per sequence.", show_default=True)
    ] = 76
    max_sequences_per_pack: Annotated[
        int, flag(group=GRAPHCORE, help="Sequences per packed record.", show_default=True)
    ] = 3

    workers: Annotated[
        int | None, flag(group=WORK, help="Number of processes; default one per core.")
    ] = None
    shard_bytes: Annotated[
        int, flag(group=WORK, help="Approximate size of an output file.", show_default=True)
    ] = 64 << 20
    overwrite: Annotated[bool, flag(group=WORK, help="Replace OUT.")] = False


@app.command(name="import")
def data_import(
    *paths: SourcesAndOut,
    flags: ImportFlags = ImportFlags(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Import prepared pretraining records as a dataset of packed rows.

    Sources are TFRecords for BERT's pretraining (gzip or not; one sequence per
    record, or packed as Graphcore and Habana pack them) and Graphcore's files
    without a header, whose widths you must pass. Masks, labels and packed rows
    are kept; sequences that have no row yet are packed. Every record is checked;
    an inconsistent one ends the import. After a kill or Ctrl-C the same command
    resumes.

    Try:
      packhorse data import part-* corpus --tokenizer vocab.txt --eval eval_10k
      packhorse data import packed.tfrecord corpus --vocab-size 30522 --repack
      packhorse data import strategy_* corpus --vocab-size 30522 --max-length 512
    """
    from packhorse.data.corpus.importing import import_records

    config = _import_config(paths, flags)
    start = time.perf_counter()
    with stage_progress() as report:
        imported = import_records(config, report)
    seconds = time.perf_counter() - start
    if imported.already:
        note(f"{config.out} was imported already, by the same command; nothing to do")
    _show_imported(config.out, imported, seconds)
    document = {
        "out": str(config.out),
        "already": imported.already,
        "seconds": seconds,
        **{
            name: {
                **manifest.config["found"],
                "rows": manifest.rows,
                "efficiency": manifest.efficiency,
                "lower_bound": manifest.config.get("lower_bound"),
                "fingerprint": manifest.fingerprint,
            }
            for name, manifest in _manifests(imported).items()
        },
    }
    emit(document, json)


def _import_config(paths: tuple[Path, ...], flags: ImportFlags) -> "ImportOptions":
    from packhorse.checkpoint.hub import resolve
    from packhorse.data.corpus.importing import ImportOptions
    from packhorse.data.records.graphcore import RecordSizes

    sources, out = _split_paths(paths)
    return ImportOptions(
        sources=sources,
        out=out,
        tokenizer=None if flags.tokenizer is None else resolve(flags.tokenizer),
        vocab_size=flags.vocab_size,
        eval=tuple(flags.eval or ()),
        format=flags.format,
        sizes=RecordSizes(flags.max_length, flags.max_predictions, flags.max_sequences_per_pack),
        repack=flags.repack,
        max_per_pack=flags.max_per_pack or None,
        seed=flags.seed,
        shard_bytes=flags.shard_bytes,
        overwrite=flags.overwrite,
        workers=flags.workers,
    )


def _show_imported(out: Path, imported: "CorpusResult", seconds: float) -> None:
    columns = ("files", "records", "sequences", "tokens")
    rows = []
    for name, manifest in _manifests(imported).items():
        counts = manifest.config["found"]
        figures = [counts[column] for column in columns]
        rows.append([name, *figures, manifest.rows, f"{manifest.efficiency:.2%}"])
        if counts["empty"]:
            note(f"{name}: {counts['empty']:,} records held no sequence and were skipped")
    title = f"{out}: imported {'before' if imported.already else f'in {seconds:.1f} s'}"
    table(title, ["", *columns, "rows", "full"], rows)


# packhorse data stats --------------------------------------------------------------------------


@app.command
def stats(
    out: Annotated[Path, Parameter(help="The folder that was built, or one dataset in it.")],
    /,
    *,
    samples: Annotated[int, Parameter(help="Number of sequences to show.")] = 3,
    top: Annotated[int, Parameter(help="Number of ways to fill a row to show.")] = 8,
    seed: Annotated[int, Parameter(help="Seed of the choice of samples.")] = 0,
    verify: Annotated[bool, flag(help="Read every byte and verify its checksum.")] = False,
    plot: Annotated[
        Path | None,
        Parameter(help="Plot the lengths before and after packing: png, svg or pdf."),
    ] = None,
    html: Annotated[
        Path | None,
        Parameter(
            help="Write a page to look at: lengths, languages, duplicates (what `data build` "
            "counted) and samples."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show the contents of a dataset of packed rows: counts, how full rows are, samples.

    In a sample, [MASK=horse] is a masked token, [mule=horse] one that was replaced
    by another, [horse=horse] one that is predicted but unchanged.

    Try:
      packhorse data stats corpus
      packhorse data stats corpus/train --samples 10 --plot lengths.png
      packhorse data stats corpus --html corpus.html --samples 50
      packhorse data stats corpus --verify --json
    """
    from packhorse.atomic import new_file
    from packhorse.data.packed import statistics
    from packhorse.reports import plots
    from packhorse.reports.corpus_page import corpus_page

    plots.check(plot)
    if html is not None and not html.expanduser().resolve().parent.is_dir():
        raise InputError(f"cannot write {html}: there is no folder {html.parent}")
    if seed < 0:
        raise InputError(f"--seed is {seed}; it must be 0 or more")
    folders = statistics.datasets(out)
    documents = {}
    shown: list[tuple[Statistics, list[Sample]]] = []
    for name, folder in folders.items():
        if verify:
            _verify(name, folder)
        counted = statistics.count(name, folder, top)
        chosen = _samples(out, folder, samples, seed)
        shown.append((counted, chosen))
        _show_statistics(counted, chosen)
        documents[name] = {
            **_statistics_document(counted),
            "samples": [asdict(sample) for sample in chosen],
        }
        if plot and name == next(iter(folders)):
            plots.draw_corpus(plot, counted)
            note(f"plotted {name}: {plot}")
    if html is not None:
        with new_file(html.expanduser()) as file:
            file.write(corpus_page(str(out), shown, SOURCE_COUNTS).encode())
        note(f"wrote {html}")
    emit({"out": str(out), "verified": verify, **documents}, json)


def _verify(name: str, folder: Path) -> None:
    from packhorse.data.packed import shards

    with progress(f"verifying {name}") as advance:
        advance(0, 1)
        shards.open_dataset(folder, verify=True)
        advance(1, 1)
    note(f"{folder}: every byte is as it was written")


def _samples(out: Path, folder: Path, number: int, seed: int) -> "list[Sample]":
    """Return some sequences as text, if there is a tokenizer to decode them with."""
    from packhorse.data.packed import statistics
    from packhorse.tokens import Tokenizer

    if number < 1:
        return []
    for parent in (out, folder.parent):
        tokenizer = parent / "tokenizer"
        if tokenizer.is_dir():
            return statistics.samples(folder, Tokenizer.load(tokenizer), number, seed)
    note(f"{out}: no tokenizer next to it, so no samples are shown")
    return []


def _show_statistics(statistics: "Statistics", samples: "list[Sample]") -> None:
    manifest = statistics.manifest
    title = f"{statistics.name}: {manifest.sequences:,} sequences in {manifest.rows:,} rows"
    table(title, ["", ""], _statistics_rows(statistics))
    _show_lengths(statistics)
    rows = [
        [" + ".join(map(str, lengths)), sum(lengths), count, f"{count / manifest.rows:.2%}"]
        for lengths, count in statistics.strategies
    ]
    title = f"{statistics.strategy_count:,} ways to fill a row, the most frequent:"
    table(title, ["lengths", "tokens", "rows", "share"], rows)
    for sample in samples:
        label = f", next sentence: {sample.next_label}" if sample.next_label else ""
        print(f"row {sample.row:,}, {sample.tokens} tokens{label}")
        print(f"  {short(sample.text, SAMPLE_WIDTH)}")


def _statistics_rows(statistics: "Statistics") -> list[tuple[str, str]]:
    manifest = statistics.manifest
    layout = manifest.layout
    unpacked = manifest.tokens / (manifest.sequences * layout.capacity)
    rows = []
    if counts := manifest.config.get("found"):
        rows.append(("read", _source_counts(counts)))
    rows += [
        ("tokens", f"{manifest.tokens:,}"),
        ("tokens per sequence", f"{manifest.tokens / manifest.sequences:.1f}"),
        ("sequences per row", f"{manifest.sequences / manifest.rows:.3f}"),
        ("full, one sequence per row", f"{unpacked:.2%}"),
        ("full, packed", f"{manifest.efficiency:.2%}"),
    ]
    if bound := statistics.lower_bound:
        rows.append(
            ("no plan is fuller than", f"{_best_efficiency(manifest):.2%} ({bound:,} rows)")
        )
    if statistics.random_next is not None:
        share = statistics.random_next / manifest.sequences
        rows.append(("random next sentences", f"{share:.1%}"))
    rows += [
        ("masks", "stored" if layout.static_masks else "drawn when loading"),
        ("on disk", f"{statistics.bytes / 1e6:,.1f} MB in {len(manifest.shards):,} shards"),
    ]
    return rows


def _show_lengths(statistics: "Statistics") -> None:
    """Show both histograms side by side, each with its own scale."""
    from packhorse.data.packed.statistics import bins

    before = bins(statistics.lengths, HISTOGRAM_BARS)
    after = bins(statistics.row_tokens, HISTOGRAM_BARS)
    most_before = max(count for *_, count in before) or 1
    most_after = max(count for *_, count in after) or 1
    rows = [
        [
            f"{low}-{high}",
            sequences,
            _bar(sequences / most_before),
            packed_rows,
            _bar(packed_rows / most_after),
        ]
        for (low, high, sequences), (*_, packed_rows) in zip(before, after, strict=True)
    ]
    table("By length, before and after packing:", ["tokens", "sequences", "", "rows", ""], rows)


def _bar(share: float) -> str:
    return "█" * round(share * BAR_WIDTH) or ("▏" if share else "")


def _statistics_document(statistics: "Statistics") -> dict[str, Any]:
    manifest = statistics.manifest
    return {
        **_figures(manifest),
        "capacity": manifest.layout.capacity,
        "max_per_pack": manifest.layout.max_per_pack,
        "static_masks": manifest.layout.static_masks,
        "random_next": statistics.random_next,
        "bytes": statistics.bytes,
        "shards": len(manifest.shards),
        "found": manifest.config.get("found"),
        "lengths": statistics.lengths.tolist(),
        "row_tokens": statistics.row_tokens.tolist(),
        "strategies": [
            {"lengths": list(lengths), "rows": count} for lengths, count in statistics.strategies
        ],
        "strategy_count": statistics.strategy_count,
    }


@app.command
def mine(
    pairs: Annotated[
        Path, Parameter(help="Table of anchors and positives: jsonl, csv, tsv, parquet, a Dataset.")
    ],
    out: Annotated[Path, Parameter(help="The jsonl file to write.")],
    /,
    *,
    model: Annotated[str, Parameter(help="The model that searches: a folder or a hub id.")],
    corpus: Annotated[
        Path | None, Parameter(help="More texts that may become negatives, beside all positives.")
    ] = None,
    column: Annotated[
        list[str] | None,
        Parameter(help="Columns of anchor and positive; default by their names, or the first two."),
    ] = None,
    negatives: Annotated[int, Parameter(help="Negatives for each anchor, at most.")] = 5,
    depth: Annotated[int, Parameter(help="Nearest candidates to look at.")] = 100,
    skip: Annotated[int, Parameter(help="Leave out so many of the nearest.")] = 0,
    margin: Annotated[
        float | None,
        Parameter(help="A negative scores at least this much below the anchor's positives."),
    ] = None,
    relative_margin: Annotated[
        float | None, Parameter(help="The same, as a share of the positive's score: 0.05.")
    ] = None,
    max_score: Annotated[float | None, Parameter(help="The highest score of a negative.")] = None,
    min_score: Annotated[float | None, Parameter(help="The lowest score of a negative.")] = None,
    sampling: Annotated[
        Literal["top", "random"], Parameter(help="The best that remain, or any of them.")
    ] = "top",
    seed: Annotated[int, Parameter(help="Seed of random sampling.")] = 42,
    reranker: Annotated[
        str | None,
        Parameter(help="A reranker whose scores decide and are written, for `task = distill`."),
    ] = None,
    layout: Annotated[
        Literal["lists", "columns"],
        Parameter(
            help="lists: query, pos and neg with their scores (FlagEmbedding's); columns: anchor, "
            "positive, negative_1 … (sentence-transformers')."
        ),
    ] = "lists",
    device: Annotated[str | None, Parameter(help="cpu, cuda …; default the accelerator.")] = None,
    overwrite: Annotated[bool, flag(help="Replace an existing file.")] = False,
    json: JsonFlag = False,
) -> None:
    """Find hard negatives for pairs of texts, to train an embedding model on.

    For each anchor the nearest texts that are not its positives, searched exactly
    among all positives and a corpus. What is too near may be an answer that nobody
    marked: --margin, --relative-margin, --max-score and --skip leave it out. An
    anchor without negatives is left out and counted; with --layout columns one
    with too few is, too.

    Try:
      packhorse data mine pairs.jsonl mined.jsonl --model minilm --relative-margin 0.05
      packhorse data mine pairs.csv mined.jsonl --model ./model --corpus texts.txt
      packhorse data mine pairs.csv mined.jsonl --model ./model --reranker ./reranker
    """
    from json import dumps

    from packhorse.atomic import new_file
    from packhorse.data.tables import read_texts
    from packhorse.data.tasks.pairs import read_groups
    from packhorse.runtime.loading import load
    from packhorse.runtime.mining import MiningOptions, mine
    from packhorse.runtime.teaching import open_teacher
    from packhorse.train.preparing import ALIASES

    options = MiningOptions(
        negatives, depth, skip, margin, relative_margin, max_score, min_score, sampling, seed
    )
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists; pass --overwrite to replace it")
    if column is not None and len(column) != 2:
        raise InputError(f"--column is {' '.join(column)}; name the anchor's and the positive's")
    positives: dict[str, list[str]] = {}
    for group in read_groups(pairs, column or ()):
        anchor, positive, *_ = group.texts
        if positive not in positives.setdefault(anchor, []):
            positives[anchor].append(positive)
    texts = [str(record.text) for record in read_texts(corpus)] if corpus else []
    encoder = load(ALIASES.get(model, model), device=device)
    teacher = open_teacher(ALIASES.get(reranker, reranker), device) if reranker else None
    written = left_out = mined = 0
    with stage_progress("mine") as report, new_file(out) as file:
        groups = mine(encoder, positives, texts, options, teacher, report)
        for group in groups:
            size = len(group.negatives)
            if not size or (layout == "columns" and size < negatives):
                left_out += 1
                continue
            rows = [group.row()]
            if layout == "columns":
                named = {f"negative_{i}": text for i, text in enumerate(group.negatives, 1)}
                rows = [{"anchor": group.anchor, "positive": p, **named} for p in group.positives]
            for row in rows:
                file.write(dumps(row, ensure_ascii=False).encode() + b"\n")
            written += len(rows)
            mined += size
        if not written:
            raise InputError(
                f"no anchor of {pairs} has enough negatives; lower the margins, or add texts with "
                "--corpus"
            )
    counts = {"anchors": len(positives), "rows": written, "left_out": left_out, "negatives": mined}
    table(f"{out}: mined with {encoder.name}", ["", "count"], [list(x) for x in counts.items()])
    emit({"out": str(out), **counts}, json)
