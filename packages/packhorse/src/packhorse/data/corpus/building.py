"""The corpus builder: sources of text to packed shards for pretraining.

    build(BuildOptions((Path("enwiki.xml.bz2"),), Path("corpus"), Path("vocab.txt")))

Sources are cut into chunks, chunks into pieces, and each piece becomes one part: a file of training
sequences, made by a worker (`make_part`). The rest is the corpus `driver`'s work. A part depends on
the bytes and the number of its piece, the recipe and the tokenizer, never on who makes it or when.
Small files share a piece, because a document takes its random next sentences from the others in it.

Held-out documents are stored in the parts as tokens. Their sequences are made at the end, from all
of them together: the few in one piece would get each other for every random next sentence. They
have static masks and no duplicates whatever the recipe says, so that every evaluation is the same.

Input that cannot be used is counted, and more than `max_bad` of it ends the build: nothing is
dropped silently.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.data.corpus import arrays, workfolder
from packhorse.data.corpus.cluster import ray_cluster
from packhorse.data.corpus.driver import (
    GROUP,
    TOKENIZER,
    CorpusJob,
    CorpusResult,
    DatasetSplit,
    PartTask,
    copy_file,
    cut_shards,
    gather,
    make_groups,
    plan_rows,
    read_parts,
    run_job,
    sequence_arrays,
    write_dataset,
)
from packhorse.data.corpus.workers import Engine, RunTasks, local
from packhorse.data.packed.examples import Sequences, TokenizedDocuments, make, tokenize
from packhorse.data.packed.masking import Recipe, Specials, specials_of
from packhorse.data.packed.packs import RowLayout
from packhorse.data.packed.shards import SHARD_BYTES, rows_per_shard
from packhorse.data.sources.chunking import BZ2_RATIO, CHUNK_BYTES, Chunk, chunks
from packhorse.data.sources.documents import Document, ReadTally, read
from packhorse.data.sources.files import SourceFile, describe_guess, find
from packhorse.data.sources.unpacking import STANDARD_INPUT
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.tokens import files as tokenizer_files
from packhorse.tokens.bulk import BulkTokenizer
from packhorse.wire import crc32c

ENGINES = ("local", "ray")
EVAL_COUNT = 10_000  # as in MLPerf
HASHES = "eval.md5"  # in the work folder
EVAL_PART = "part.arrow"
TRAIN = 0  # first number of the seeds
EVAL = 1
BAD_PLACES_SHOWN = 5
BLOCK_TOKENS = 1 << 22  # tokens of held-out documents made into sequences together


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build, from what, and how."""

    sources: tuple[Path, ...]
    out: Path
    tokenizer: Path  # vocab.txt, tokenizer.json, or a folder with one of them
    recipe: Recipe = Recipe()  # noqa: RUF009 (frozen)
    max_per_pack: int | None = 3  # sequences per row; None: as many as fit
    kind: str | None = None  # of all sources; None: detected for each file
    column: str | None = None
    documents: str | None = None  # what divides plain text, see `files`; None: guessed
    separator: str | None = None  # text between two documents of plain text
    repair: bool = False  # replace bytes that are no UTF-8, or count their document as bad
    eval_hashes: Path | None = None
    eval_count: int = EVAL_COUNT
    max_bad: int = 0
    chunk_bytes: int = CHUNK_BYTES
    shard_bytes: int = SHARD_BYTES
    group: int = GROUP  # sequences planned together, about
    overwrite: bool = False
    engine: str = "local"  # or "ray"
    workers: int | None = None  # None: one per core
    ray_address: str | None = None  # of a running cluster; None: start Ray on this machine


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """How much was read, and how many sequences it gave."""

    documents: int = 0
    held_out: int = 0  # of the documents
    redirects: int = 0
    not_articles: int = 0
    empty: int = 0
    repaired: int = 0  # of the documents
    bad: int = 0
    sentences: int = 0
    characters: int = 0
    sequences: int = 0
    tokens: int = 0
    without_other: int = 0  # sequences of a pair whose part had no second document to draw from
    places: tuple[tuple[str, str], ...] = ()  # the first bad ones: place and reason

    def __add__(self, addend: CorpusCounts) -> CorpusCounts:
        numbers = addend.numbers()
        sums = {name: value + numbers[name] for name, value in self.numbers().items()}
        places = (*self.places, *addend.places)[:BAD_PLACES_SHOWN]
        return CorpusCounts(**sums, places=places)

    def numbers(self) -> dict[str, int]:
        """The counts by name, without the places."""
        return {name: value for name, value in asdict(self).items() if name != "places"}


@dataclass(frozen=True, slots=True)
class CorpusProgress:
    """How far a build is; `done` and `total` count bytes read, then plans, then shards."""

    stage: str  # "reading", "planning train", "writing train" …
    done: int
    total: int
    counts: CorpusCounts
    megabytes_per_second: float = 0.0


Watch = Callable[[CorpusProgress], None]
Tell = Callable[[str], None]


def build(
    options: BuildOptions,
    watch: Watch = lambda progress: None,
    tell: Tell = lambda message: None,
) -> CorpusResult:
    """Build the datasets, or finish an interrupted build.

    watch: receives the progress. tell: receives what was guessed about the sources, in sentences.
    """
    sources = _find_sources(options)
    stamps = workfolder.file_stamps(sources)
    made_by = _made_by(options, workfolder.fingerprint_sources(sources, stamps))
    held_out = made_by["eval"]
    job = CorpusJob(
        out=options.out,
        made_by=made_by,
        # The number of held-out sequences does not change the parts, so a build can be continued
        # with another number.
        begun_by=made_by | {"eval": held_out and {**held_out, "count": None}},
        stamps=stamps,
        overwrite=options.overwrite,
        tokenizer=options.tokenizer,
        has_eval=options.eval_hashes is not None,
        engine=lambda folder: _engine(options, folder, sources),
    )

    def make(folder: Path, run: RunTasks) -> Path:
        return _make(_BuildStep(options, made_by, folder, run, watch, tell), sources)

    return run_job(job, make)


def _find_sources(options: BuildOptions) -> list[SourceFile]:
    """Find the files to read; refuse options that make no sense before anything is written."""
    if options.engine not in ENGINES:
        raise InputError(f"there is no engine {options.engine!r}; use {' or '.join(ENGINES)}")
    if options.ray_address and options.engine != "ray":
        raise InputError("--ray-address needs --engine ray")
    least = {"eval_count": 1, "chunk_bytes": 1, "shard_bytes": 1, "group": 1, "max_bad": 0}
    for name, bound in least.items():
        if getattr(options, name) < bound:
            raise InputError(f"{name} is {getattr(options, name)}; it must be {bound} or more")
    workfolder.check_depth(options.max_per_pack)
    workfolder.check_outside_sources(options.out, options.sources)
    has_input = STANDARD_INPUT in options.sources
    if has_input and not options.overwrite and workfolder.is_finished(options.out):
        raise InputError(
            f"{options.out} is built already, and standard input cannot be compared with what it"
            " was built from; pass --overwrite, or choose another folder"
        )
    sources = find(
        options.sources,
        options.kind,
        options.column,
        options.documents,
        options.separator,
        options.repair,
    )
    workfolder.check_sources_outside(options.out, [source.path for source in sources])
    return [
        source if source.path == STANDARD_INPUT else replace(source, path=source.path.absolute())
        for source in sources
    ]


def _engine(options: BuildOptions, folder: Path, sources: Sequence[SourceFile]) -> Engine:
    if options.engine == "local":
        return local(options.workers)
    reads = {source.path: source.size for source in sources}
    return ray_cluster(folder, reads, options.ray_address, options.workers)


def _made_by(options: BuildOptions, sources: dict[str, object]) -> dict[str, Any]:
    """Everything that decides the bytes of the result."""
    specials = specials_of(Tokenizer.load(options.tokenizer))
    if options.recipe.whole_words and specials.continues is None:
        raise InputError(
            f"{options.tokenizer} has no ## pieces, which whole_words needs; leave whole_words out"
        )
    held_out = None
    if options.eval_hashes:
        held_out = {
            "hashes": len(read_hashes(options.eval_hashes)),
            "count": options.eval_count,
            "sha256": workfolder.hash_files([options.eval_hashes]),
        }
    tokenizer = tokenizer_files.all_files(options.tokenizer)
    names = ("documents", "separator", "repair")
    reading = {name: value for name in names if (value := getattr(options, name))}
    return {
        "sources": sources,
        **({"reading": reading} if reading else {}),
        "tokenizer": workfolder.hash_files(tokenizer.values()),
        "recipe": asdict(options.recipe),
        "max_per_pack": options.max_per_pack,
        "eval": held_out,
        "chunk_bytes": options.chunk_bytes,
        "shard_bytes": options.shard_bytes,
        "group": options.group,
        "versions": workfolder.library_versions(),
    }


@dataclass(frozen=True, slots=True)
class _BuildStep:
    """What the steps of one build share."""

    options: BuildOptions
    made_by: dict[str, Any]
    folder: Path
    run: RunTasks
    watch: Watch
    tell: Tell


def _make(step: _BuildStep, sources: Sequence[SourceFile]) -> Path:
    """Make both datasets in the work folder; return the folder that holds `eval`."""
    options = step.options
    folder = step.folder
    if options.eval_hashes:
        copy_file(options.eval_hashes, folder / HASHES)
    counts = _read_sources(step, sources)
    total = sum(counts, CorpusCounts())
    if not total.sequences:
        raise InputError(
            f"nothing to learn from in the sources: {total.documents:,} documents, of which"
            f" {total.held_out:,} are held out; {total.redirects:,} redirects,"
            f" {total.not_articles:,} pages that are no articles, {total.empty:,} without text"
        )
    parts = [part_path(folder, number) for number in range(len(counts))]
    eval_home = eval_folder(folder, options.eval_count)
    if options.eval_hashes:
        _check_held_out(options.eval_hashes, total)
        eval_home.mkdir(exist_ok=True)
        recipe = replace(options.recipe, static_masks=True)
        held_out = [*step.run(make_eval, [(parts, options.eval_count, recipe, folder)])]
        facts = {"documents": total.held_out}
        _make_split(step, "eval", eval_home, [eval_home / EVAL_PART], held_out, recipe, facts)
    _make_split(step, "train", folder, parts, counts, options.recipe, total.numbers())
    return eval_home


def _check_held_out(hashes: Path, total: CorpusCounts) -> None:
    if not total.held_out:
        raise InputError(
            f"none of the {len(read_hashes(hashes)):,} hashes in {hashes} matches any of the"
            f" {total.documents:,} documents; a hash matches only the exact text it was made from"
            " (MLPerf's list matches only MLPerf's own text); leave --eval-hashes out, or name"
            " hashes of these documents"
        )


def _read_sources(step: _BuildStep, sources: Sequence[SourceFile]) -> list[CorpusCounts]:
    """Make all parts that are missing; return the counts of every part, in order."""
    total_bytes = sum(source.size for source in sources)
    by_number: dict[int, CorpusCounts] = {}
    total = CorpusCounts()
    start = time.perf_counter()
    done = done_now = 0

    def on_result(number: int, task: PartTask, counts: CorpusCounts) -> None:
        nonlocal total, done, done_now
        by_number[number] = counts
        total += counts
        done += task.size
        if task.finished is None:
            done_now += task.size
        speed = done_now / 1e6 / (time.perf_counter() - start)
        step.watch(CorpusProgress("reading", done, total_bytes, total, speed))
        if total.bad > step.options.max_bad:
            in_order = [by_number[number] for number in sorted(by_number)]
            _refuse_bad(sum(in_order, CorpusCounts()), finished=done >= total_bytes)

    return read_parts(step.run, make_part, _part_tasks(step, sources), on_result)


def _part_tasks(step: _BuildStep, sources: Sequence[SourceFile]) -> Iterator[PartTask]:
    size = step.options.chunk_bytes
    remaining: dict[Path, int] = {}
    told: set[str] = set()
    for piece in pieces(chunks(sources, size), size):
        for chunk in piece.chunks:
            if (guess := describe_guess(chunk.source)) and guess not in told:
                told.add(guess)
                step.tell(f"{chunk.source.name}: {guess}")
        path = part_path(step.folder, piece.number)
        finished = None
        if path.exists():
            _check_same_input(piece, path)
            finished = counts_in(path)
        yield PartTask(
            sum(_source_bytes(chunk, remaining, size) for chunk in piece.chunks),
            (piece, step.options.recipe, step.folder),
            finished,
        )


def _check_same_input(piece: CorpusPiece, path: Path) -> None:
    """Refuse to continue with a standard input that differs; files were compared before."""
    if arrays.read(path)[1]["input_crc"] != _input_crc(piece):
        raise InputError(
            "standard input is not what it was when this build was begun; pipe the same text to"
            f" continue, or remove {path.parent.parent} to begin again"
        )


def _input_crc(piece: CorpusPiece) -> int | None:
    """A checksum of what a piece has from standard input; None if it has nothing."""
    inputs = [chunk.data for chunk in piece.chunks if chunk.source.path == STANDARD_INPUT]
    return crc32c(b"".join(data or b"" for data in inputs)) if inputs else None


def _source_bytes(chunk: Chunk, remaining: dict[Path, int], size: int) -> int:
    """Bytes of the source that a chunk stands for, so that all chunks sum to the file's size.

    Chunks that count rows or unpacked bytes get an estimate; the last one gets what remains.
    """
    if chunk.stored is not None and chunk.source.path != STANDARD_INPUT:
        return chunk.stored
    available = remaining.setdefault(chunk.source.path, chunk.source.size)
    estimate = chunk.end - chunk.begin
    if chunk.counts_rows:
        estimate = size
    elif chunk.data is not None:
        estimate //= BZ2_RATIO
    taken = available if chunk.last else min(estimate, available)
    remaining[chunk.source.path] -= taken
    return taken


def _refuse_bad(counts: CorpusCounts, finished: bool) -> None:
    """End the build: more documents are bad than the user allowed."""
    places = "; ".join(f"{place}: {reason}" for place, reason in counts.places)
    if counts.bad > len(counts.places):
        places += f"; and {counts.bad - len(counts.places):,} more"
    so_far = "" if finished else " so far"
    raise InputError(
        f"{counts.bad:,} documents or places{so_far} cannot be used: {places};"
        f" repair them, or pass --max-bad {counts.bad} (or more) to skip them"
    )


def _make_split(
    step: _BuildStep,
    name: str,
    home: Path,
    parts: Sequence[Path],
    counts: Sequence[CorpusCounts],
    recipe: Recipe,
    facts: dict[str, int],
) -> None:
    """Pack parts into the dataset of that name."""
    options = step.options
    total = sum(counts, CorpusCounts())

    def report(stage: str) -> Callable[[int, int], None]:
        return lambda done, all: step.watch(CorpusProgress(f"{stage} {name}", done, all, total))

    groups = make_groups(
        parts,
        [part.sequences for part in counts],
        lambda number: home / f"{name}-plan-{number:05d}.arrow",
        recipe.seed,
        options.group,
    )
    plans = plan_rows(step.run, groups, recipe.max_length, options.max_per_pack, report("planning"))
    specials = special_tokens(step.folder)
    layout = RowLayout(
        recipe.max_length,
        specials.vocab_size,
        options.max_per_pack,
        recipe.static_masks,
        recipe.next_sentence,
    )
    rows_in_shard = rows_per_shard(layout, options.shard_bytes)
    split = DatasetSplit(
        name=name,
        home=home,
        layout=layout,
        specials=specials,
        # Each group by itself: no shard spans two groups, so a worker needs the parts of one.
        shards=[
            shard
            for group, plan in plans
            for shard in cut_shards([(group, plan["rows"])], rows_in_shard)
        ],
        config={
            "made_by": step.made_by,
            "found": facts,
            "lower_bound": sum(plan["lower_bound"] for _, plan in plans),
        },
        masking=recipe,
    )
    write_dataset(step.run, split, report("writing"))


# Pieces and parts --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CorpusPiece:
    """The chunks that become one part."""

    number: int
    chunks: tuple[Chunk, ...]


def pieces(chunks: Iterable[Chunk], size: int) -> Iterator[CorpusPiece]:
    """Group consecutive chunks, about `size` bytes of text in each piece."""
    waiting: list[Chunk] = []
    waiting_bytes = 0
    number = 0
    for chunk in chunks:
        waiting.append(chunk)
        waiting_bytes += _text_bytes(chunk, size)
        if waiting_bytes >= size:
            yield CorpusPiece(number, tuple(waiting))
            waiting = []
            waiting_bytes = 0
            number += 1
    if waiting:
        yield CorpusPiece(number, tuple(waiting))


def _text_bytes(chunk: Chunk, size: int) -> int:
    """About how much text a chunk holds."""
    if chunk.counts_rows:
        return size
    packed = bool(chunk.source.packing) and chunk.data is None
    return (chunk.end - chunk.begin) * (BZ2_RATIO if packed else 1)


def part_path(folder: Path, number: int) -> Path:
    """The file of the part with this number."""
    return folder / f"part-{number:05d}.arrow"


def make_part(piece: CorpusPiece, recipe: Recipe, folder: Path) -> CorpusCounts:
    """Make the part of a piece, unless it exists; return its counts."""
    path = part_path(folder, piece.number)
    if not path.exists():
        _write_part(piece, recipe, folder, path)
    return counts_in(path)


def counts_in(path: Path) -> CorpusCounts:
    """The counts that a part stores about itself."""
    facts = arrays.read(path)[1]
    facts.pop("input_crc", None)
    places = tuple((place, reason) for place, reason in facts.pop("places"))
    return CorpusCounts(places=places, **facts)


def _write_part(piece: CorpusPiece, recipe: Recipe, folder: Path, path: Path) -> None:
    bulk, specials = _tools(folder)
    documents: list[Document] = []
    tally = ReadTally()
    for chunk in piece.chunks:
        chunk_documents, chunk_tally = read(chunk)
        documents += chunk_documents
        tally += chunk_tally
    hashes = _hashes(folder / HASHES)
    train = [document for document in documents if document.text_md5 not in hashes]
    held_out = [document for document in documents if document.text_md5 in hashes]
    tokenized = tokenize(bulk, [document.sentences for document in train])
    sequences = make(tokenized, recipe, specials, (TRAIN, piece.number))
    counts = CorpusCounts(
        documents=tally.documents,
        held_out=len(held_out),
        redirects=tally.redirects,
        not_articles=tally.not_articles,
        empty=tally.empty,
        repaired=tally.repaired,
        bad=len(tally.bad),
        sentences=sum(len(document.sentences) for document in documents),
        characters=tally.characters,
        sequences=len(sequences.lengths),
        tokens=len(sequences.ids),
        without_other=_without_other(tokenized, sequences, recipe),
        places=tuple((bad.place, bad.reason) for bad in tally.bad[:BAD_PLACES_SHOWN]),
    )
    eval_tokens = tokenize(bulk, [document.sentences for document in held_out])
    eval_arrays = {f"eval_{name}": array for name, array in asdict(eval_tokens).items()}
    facts = asdict(counts) | {"input_crc": _input_crc(piece)}
    arrays.write(path, sequence_arrays(sequences) | eval_arrays, facts)


def _without_other(documents: TokenizedDocuments, sequences: Sequences, recipe: Recipe) -> int:
    """How many pairs had no other document to take their second sentence from."""
    is_alone = recipe.next_sentence and len(documents.documents) == 2  # bounds
    return len(sequences.lengths) if is_alone else 0


# Held-out documents ------------------------------------------------------------------------------


def eval_folder(folder: Path, count: int) -> Path:
    """The folder for everything that depends on the number of held-out sequences."""
    return folder / f"eval-of-{count}"


def make_eval(parts: Sequence[Path], count: int, recipe: Recipe, folder: Path) -> CorpusCounts:
    """Make one part of exactly `count` held-out sequences, spread evenly over all of them."""
    home = eval_folder(folder, count)
    path = home / EVAL_PART
    if not path.exists():
        _, specials = _tools(folder)
        recipe = replace(recipe, static_masks=True, duplicates=1)
        drafts: list[Path] = []
        sizes: list[int] = []
        for number, block in enumerate(_held_out_blocks(parts)):
            sequences = make(block, recipe, specials, (EVAL, number))
            draft = home / f"eval-block-{number:05d}.arrow"
            arrays.write(draft, sequence_arrays(sequences), {})
            drafts.append(draft)
            sizes.append(len(sequences.lengths))
        chosen = _choose_evenly(drafts, sizes, count)
        arrays.write(path, sequence_arrays(chosen), asdict(CorpusCounts(sequences=count)))
    return counts_in(path)


def _choose_evenly(drafts: Sequence[Path], sizes: Sequence[int], count: int) -> Sequences:
    total = sum(sizes)
    if total < count:
        raise InputError(
            f"the documents of --eval-hashes make {total:,} sequences, but --eval-count is"
            f" {count:,}; pass --eval-count {total} or less, which continues this build, or name"
            " the hashes of more documents of these sources"
        )
    return gather(drafts, sizes, np.arange(count, dtype=np.int64) * total // count)


def _held_out_blocks(parts: Iterable[Path]) -> Iterator[TokenizedDocuments]:
    """The held-out documents of all parts, about `BLOCK_TOKENS` at a time."""
    names = [field.name for field in fields(TokenizedDocuments)]
    waiting: list[TokenizedDocuments] = []
    for part in parts:
        stored = arrays.read(part)[0]
        documents = TokenizedDocuments(**{name: stored[f"eval_{name}"].copy() for name in names})
        if len(documents.ids):
            waiting.append(documents)
        if sum(len(block.ids) for block in waiting) >= BLOCK_TOKENS:
            yield _join_documents(waiting)
            waiting = []
    if waiting:
        yield _join_documents(waiting)


def _join_documents(blocks: Sequence[TokenizedDocuments]) -> TokenizedDocuments:
    return TokenizedDocuments(
        np.concatenate([block.ids for block in blocks]),
        _join_bounds([block.sentences for block in blocks]),
        _join_bounds([block.documents for block in blocks]),
    )


def _join_bounds(bounds: Sequence[np.ndarray]) -> np.ndarray:
    """The bounds of things that are laid end to end, from the bounds within each array."""
    sizes = np.concatenate([np.diff(block) for block in bounds])
    return np.concatenate([[0], np.cumsum(sizes)])


def read_hashes(path: Path) -> frozenset[str]:
    """The md5 of each held-out document: the first word of each line, as md5sum writes them."""
    try:
        words = [line.split()[0].lower() for line in path.read_text("ascii").splitlines() if line]
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"{path} is not a list of md5 hashes: {error}") from error
    for number, word in enumerate(words, 1):
        if len(word) != 2 * hashlib.md5().digest_size or not set(word) <= set("0123456789abcdef"):
            raise InputError(f"{path}: line {number} is {word!r:.40}, which is not an md5 hash")
    if not words:
        raise InputError(f"{path} holds no md5 hash")
    return frozenset(words)


# Cached per process: a worker makes many parts with the same files. One entry suffices, because a
# worker has one work folder at a time.


@lru_cache(maxsize=1)
def _hashes(path: Path) -> frozenset[str]:
    return read_hashes(path) if path.exists() else frozenset()


@lru_cache(maxsize=1)
def _tools(folder: Path) -> tuple[BulkTokenizer, Specials]:
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    return BulkTokenizer(tokenizer), specials_of(tokenizer)


def special_tokens(folder: Path) -> Specials:
    """The special tokens of the work folder's tokenizer."""
    return _tools(folder)[1]
