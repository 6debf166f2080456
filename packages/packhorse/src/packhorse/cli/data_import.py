"""`packhorse data import`: prepared pretraining records to packed shards."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from packhorse.cli.console import Advance, JsonFlag, emit, note, progress, table
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.data.corpus.driver import CorpusResult
    from packhorse.data.corpus.importing import ImportOptions
    from packhorse.data.packed.manifest import Manifest

SOURCES, ROWS = Group("Sources", sort_key=1), Group("Rows", sort_key=2)
WIDTHS, WORK = Group("Graphcore's records", sort_key=3), Group("Work", sort_key=4)


def _flag(group: Group, help: str) -> Parameter:
    return Parameter(group=group, help=help, negative="")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags of `packhorse data import`."""

    tokenizer: Annotated[
        str | None,
        _flag(SOURCES, "vocab.txt, tokenizer.json, a model's folder or hub id; OUT gets a copy."),
    ] = None
    vocab_size: Annotated[
        int | None,
        _flag(SOURCES, "Without a tokenizer: words it had. Special tokens are then found."),
    ] = None
    eval: Annotated[
        list[Path] | None, _flag(SOURCES, "A source that becomes OUT/eval; may be given again.")
    ] = None
    format: Annotated[
        Literal["tfrecord", "graphcore"] | None,
        _flag(SOURCES, "What the sources are; default told by each."),
    ] = None

    repack: Annotated[bool, _flag(ROWS, "Plan anew what is packed; default rows stay.")] = False
    max_per_pack: Annotated[
        int, _flag(ROWS, "Sequences a row at most where rows are planned; 0: as many as fit.")
    ] = 3
    seed: Annotated[int, _flag(ROWS, "Of who shares a row with whom.")] = 12345

    max_length: Annotated[int, _flag(WIDTHS, "Tokens of a record.")] = 512
    max_predictions: Annotated[int, _flag(WIDTHS, "Masks of a sequence.")] = 76
    max_sequences_per_pack: Annotated[int, _flag(WIDTHS, "Sequences of a packed record.")] = 3

    workers: Annotated[int | None, _flag(WORK, "Processes; default one a core.")] = None
    shard_bytes: Annotated[int, _flag(WORK, "About the size of a file of rows.")] = 64 << 20
    overwrite: Annotated[bool, _flag(WORK, "Replace what OUT holds.")] = False


def data_import(
    *paths: Annotated[Path, Parameter(name="SOURCE... OUT", help="Files or folders; the result.")],
    options: Options = Options(),  # noqa: B008 (frozen)
    json: JsonFlag = False,
) -> None:
    """Make a dataset of packed rows of records that are prepared already.

    Sources are TFRecords for BERT's pretraining (gzip or not; one sequence a
    record, or packed as Graphcore and Habana pack them) and Graphcore's files
    without a header, whose widths must be said. Masks and labels are kept, and
    so are packed rows; sequences that have no row yet are packed. Every record is
    checked, and one that contradicts itself ends the import. After a kill or
    Ctrl-C the same command goes on.

    Try:
      packhorse data import part-* corpus --tokenizer vocab.txt --eval eval_10k
      packhorse data import packed.tfrecord corpus --vocab-size 30522 --repack
      packhorse data import strategy_* corpus --vocab-size 30522 --max-length 512
    """
    from packhorse.data.corpus.importing import import_records

    config = _config(paths, options)
    start = time.perf_counter()
    with _stages() as advance:
        made = import_records(config, advance)
    seconds = time.perf_counter() - start
    if made.already:
        note(f"{config.out} was imported already, by the same command; nothing to do")
    _show(config.out, made, seconds)
    emit(_document(config.out, made, seconds), json)


def _config(paths: tuple[Path, ...], options: Options) -> "ImportOptions":
    from packhorse.checkpoint.hub import resolve
    from packhorse.data.corpus.importing import ImportOptions
    from packhorse.data.records.graphcore import RecordSizes

    sources, out = sources_and_out(paths)
    same = ("vocab_size", "format", "repack", "seed", "shard_bytes", "overwrite", "workers")
    return ImportOptions(
        sources=sources,
        out=out,
        tokenizer=None if options.tokenizer is None else resolve(options.tokenizer),
        eval=tuple(options.eval or ()),
        sizes=RecordSizes(
            options.max_length, options.max_predictions, options.max_sequences_per_pack
        ),
        max_per_pack=options.max_per_pack or None,
        **{name: getattr(options, name) for name in same},
    )


def sources_and_out(paths: tuple[Path, ...]) -> tuple[tuple[Path, ...], Path]:
    """`SOURCE... OUT` of the command line, divided."""
    if len(paths) < 2:
        raise InputError("name one source or more and, last, the folder for the result")
    return paths[:-1], paths[-1]


@contextmanager
def _stages() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage, or lines, one after the other."""
    with ExitStack() as stack:
        bars: dict[str, Advance] = {}

        def watch(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                stack.close()
                bars[stage] = stack.enter_context(progress(stage))
            bars[stage](done, total)

        yield watch


def _show(out: Path, made: "CorpusResult", seconds: float) -> None:
    counts, rows = ("files", "records", "sequences", "tokens"), []
    for name, manifest in _manifests(made).items():
        found = manifest.config["found"]
        figures = (found[count] for count in counts)
        rows.append([name, *figures, manifest.rows, f"{manifest.efficiency:.2%}"])
        if found["empty"]:
            note(f"{name}: {found['empty']:,} records held no sequence and have no row")
    title = f"{out}: imported {'before' if made.already else f'in {seconds:.1f} s'}"
    table(title, ["", *counts, "rows", "full"], rows)


def _manifests(made: "CorpusResult") -> "dict[str, Manifest]":
    return {"train": made.train} | ({"eval": made.eval} if made.eval else {})


def _document(out: Path, made: "CorpusResult", seconds: float) -> dict[str, Any]:
    figures = {
        name: {
            **manifest.config["found"],
            "rows": manifest.rows,
            "efficiency": manifest.efficiency,
            "lower_bound": manifest.config.get("lower_bound"),
            "fingerprint": manifest.fingerprint,
        }
        for name, manifest in _manifests(made).items()
    }
    return {"out": str(out), "already": made.already, "seconds": seconds, **figures}
