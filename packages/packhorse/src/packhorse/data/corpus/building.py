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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import compress, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.data.corpus import arrays, workfolder
from packhorse.data.corpus.cleaning import (
    LANGUAGE_CHARACTERS,
    Cleaning,
    find_duplicates,
    language_of,
    signatures,
)
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
from packhorse.data.packed.examples import (
    Sequences,
    TokenizedDocuments,
    make,
    select,
    tokenize_each,
)
from packhorse.data.packed.masking import Recipe, Specials, specials_of
from packhorse.data.packed.packs import RowLayout
from packhorse.data.packed.shards import SHARD_BYTES, rows_per_shard
from packhorse.data.sources.chunking import BZ2_RATIO, CHUNK_BYTES, Chunk, chunks
from packhorse.data.sources.documents import Document, ReadTally, read
from packhorse.data.sources.files import SourceFile, describe_guess, find
from packhorse.data.sources.hub import HubFile, SourcePath
from packhorse.data.sources.unpacking import STANDARD_INPUT
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.tokens import files as tokenizer_files
from packhorse.tokens.bulk import BulkTokenizer
from packhorse.wire import crc32c

ENGINES = ("local", "ray")
EVAL_COUNT = 10_000  # as in MLPerf
HASHES = "eval.md5"  # in the work folder
KEPT = "kept.arrow"
DUPLICATES_SHOWN = 20
TOKENS_SHOWN = 60
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
    cleaning: Cleaning = Cleaning()  # noqa: RUF009 (frozen)
    eval_hashes: Path | None = None
    eval_fraction: float = 0.0  # of the documents to hold out, chosen by their text
    eval_count: int | None = None  # None: EVAL_COUNT, or with a fraction at most that
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
    too_short: int = 0
    too_long: int = 0
    other_languages: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    repaired: int = 0  # of the documents
    bad: int = 0
    sentences: int = 0
    characters: int = 0
    sequences: int = 0
    tokens: int = 0
    without_other: int = 0  # sequences of a pair whose part had no second document to draw from
    places: tuple[tuple[str, str], ...] = ()  # the first bad ones: place and reason
    languages: tuple[tuple[str, int], ...] = ()  # of all documents that were long enough
    lengths: tuple[int, ...] = ()  # documents of 2^i to 2^(i+1) - 1 characters, left out or not

    def __add__(self, addend: CorpusCounts) -> CorpusCounts:
        numbers = addend.numbers()
        sums = {name: value + numbers[name] for name, value in self.numbers().items()}
        languages = Counter(dict(self.languages)) + Counter(dict(addend.languages))
        return CorpusCounts(
            **sums,
            places=(*self.places, *addend.places)[:BAD_PLACES_SHOWN],
            languages=tuple(sorted(languages.items())),
            lengths=tuple(map(sum, zip_longest(self.lengths, addend.lengths, fillvalue=0))),
        )

    def numbers(self) -> dict[str, int]:
        """The counts that are single numbers, by name."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, int)}


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
        has_eval=_holds_out(options),
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
    if not 0 <= options.eval_fraction < 1:
        raise InputError(f"eval_fraction is {options.eval_fraction}; it must be 0 or more, below 1")
    for name, bound in least.items():
        if (value := getattr(options, name)) is not None and value < bound:
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


def _holds_out(options: BuildOptions) -> bool:
    return options.eval_hashes is not None or options.eval_fraction > 0


def _engine(options: BuildOptions, folder: Path, sources: Sequence[SourceFile]) -> Engine:
    if options.engine == "local":
        return local(options.workers)
    reads = {
        source.path: source.size
        for source in sources
        if not isinstance(source.path, HubFile) and source.path != STANDARD_INPUT
    }
    return ray_cluster(folder, reads, options.ray_address, options.workers)


def _made_by(options: BuildOptions, sources: dict[str, object]) -> dict[str, Any]:
    """Everything that decides the bytes of the result."""
    specials = specials_of(Tokenizer.load(options.tokenizer))
    if options.recipe.whole_words and specials.continues is None:
        raise InputError(
            f"{options.tokenizer} has no ## pieces, which whole_words needs; leave whole_words out"
        )
    held_out: dict[str, Any] | None = None
    if _holds_out(options):
        held_out = {"count": options.eval_count or EVAL_COUNT}
    if held_out and options.eval_hashes:
        held_out["hashes"] = len(read_hashes(options.eval_hashes))
        held_out["sha256"] = workfolder.hash_files([options.eval_hashes])
    if held_out and options.eval_fraction:
        held_out["fraction"] = options.eval_fraction
    tokenizer = tokenizer_files.all_files(options.tokenizer)
    names = ("documents", "separator", "repair")
    reading = {name: value for name in names if (value := getattr(options, name))}
    return {
        "sources": sources,
        **({"reading": reading} if reading else {}),
        **({"cleaning": asdict(options.cleaning)} if options.cleaning != Cleaning() else {}),
        "tokenizer": workfolder.hash_files(tokenizer.values()),
        "recipe": asdict(options.recipe),
        "max_per_pack": options.max_per_pack,
        "eval": held_out,
        "chunk_bytes": options.chunk_bytes,
        "shard_bytes": options.shard_bytes,
        "group": options.group,
        "versions": workfolder.library_versions(options.cleaning != Cleaning()),
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
    if options.cleaning.duplicates and counts:
        counts = _leave_out_duplicates(step, len(counts))
    total = sum(counts, CorpusCounts())
    if not total.sequences:
        raise InputError(
            f"nothing to learn from in the sources: {total.documents:,} documents, of which"
            f" {total.held_out:,} are held out; {total.redirects:,} redirects,"
            f" {total.not_articles:,} pages that are no articles, {total.empty:,} without text;"
            f" {total.too_short + total.too_long + total.other_languages:,} left out by a filter"
        )
    parts = [part_path(folder, number) for number in range(len(counts))]
    eval_count = options.eval_count or EVAL_COUNT
    eval_home = eval_folder(folder, eval_count)
    if _holds_out(options):
        _check_held_out(options, total)
        eval_home.mkdir(exist_ok=True)
        recipe = replace(options.recipe, static_masks=True)
        at_most = bool(options.eval_fraction) and options.eval_count is None
        held_out = [*step.run(make_eval, [(parts, eval_count, recipe, folder, at_most)])]
        eval_facts = {"documents": total.held_out}
        _make_split(step, "eval", eval_home, [eval_home / EVAL_PART], held_out, recipe, eval_facts)
    facts: dict[str, Any] = total.numbers()
    facts["document_lengths"] = list(total.lengths)
    if options.cleaning.needs_languages:
        facts["languages"] = dict(total.languages)
    if options.cleaning.duplicates:
        facts["duplicate_samples"] = _duplicate_samples(folder)
    _make_split(step, "train", folder, parts, counts, options.recipe, facts)
    return eval_home


def _leave_out_duplicates(step: _BuildStep, number: int) -> list[CorpusCounts]:
    """Make the parts of all drafts, without documents that repeat earlier ones."""
    folder = step.folder
    drafts = [draft_path(folder, draft) for draft in range(number)]
    near = step.options.cleaning.duplicates == "near"
    step.watch(CorpusProgress("finding duplicates", 0, 1, CorpusCounts()))
    for _ in step.run(write_kept, [(drafts, near, folder)]):
        step.watch(CorpusProgress("finding duplicates", 1, 1, CorpusCounts()))
    counts: list[CorpusCounts] = []
    items = ((draft, step.options.recipe, folder) for draft in range(number))
    for part in step.run(make_part_of_draft, items):
        counts.append(part)
        step.watch(CorpusProgress("making sequences", len(counts), number, part))
    return counts


def _check_held_out(options: BuildOptions, total: CorpusCounts) -> None:
    if total.held_out:
        return
    hashes = options.eval_hashes
    if hashes is None:
        raise InputError(
            f"none of the {total.documents:,} documents is held out at a fraction of"
            f" {options.eval_fraction}; pass a larger --eval-fraction, or say with --documents what"
            " a document is"
        )
    else:
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

    make = make_draft if step.options.cleaning.duplicates else make_part
    return read_parts(step.run, make, _part_tasks(step, sources), on_result)


def _part_tasks(step: _BuildStep, sources: Sequence[SourceFile]) -> Iterator[PartTask]:
    size = step.options.chunk_bytes
    remaining: dict[SourcePath, int] = {}
    reported: set[str] = set()
    filters = Filters(step.options.cleaning, step.options.eval_fraction)
    for piece in pieces(chunks(sources, size), size):
        for chunk in piece.chunks:
            if (guess := describe_guess(chunk.source)) and guess not in reported:
                reported.add(guess)
                step.tell(f"{chunk.source.name}: {guess}")
        is_draft = step.options.cleaning.duplicates
        path = (draft_path if is_draft else part_path)(step.folder, piece.number)
        finished = None
        if path.exists():
            _check_same_input(piece, path)
            finished = counts_in(path)
        yield PartTask(
            sum(_source_bytes(chunk, remaining, size) for chunk in piece.chunks),
            (piece, filters, step.options.recipe, step.folder),
            finished,
        )


def _check_same_input(piece: CorpusPiece, path: Path) -> None:
    """Refuse to continue with a standard input that differs; files were compared before."""
    if arrays.read(path)[1].get("input_crc") != _input_crc(piece):
        raise InputError(
            "standard input is not what it was when this build was begun; pipe the same text to"
            f" continue, or remove {path.parent.parent} to begin again"
        )


def _input_crc(piece: CorpusPiece) -> int | None:
    """A checksum of what a piece has from standard input; None if it has nothing."""
    inputs = [chunk.data for chunk in piece.chunks if chunk.source.path == STANDARD_INPUT]
    return crc32c(b"".join(data or b"" for data in inputs)) if inputs else None


def _source_bytes(chunk: Chunk, remaining: dict[SourcePath, int], size: int) -> int:
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
    facts: dict[str, Any],
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


def draft_path(folder: Path, number: int) -> Path:
    """The file of the draft of the part with this number."""
    return folder / f"draft-{number:05d}.arrow"


@dataclass(frozen=True, slots=True)
class Filters:
    """Which documents of a piece are left out, and which are held out."""

    cleaning: Cleaning
    eval_fraction: float


def make_part(piece: CorpusPiece, filters: Filters, recipe: Recipe, folder: Path) -> CorpusCounts:
    """Make the part of a piece, unless it exists; return its counts."""
    path = part_path(folder, piece.number)
    if not path.exists():
        draft, facts = _draft(piece, filters, folder)
        everything = np.ones(len(draft.held_out), bool)
        _write_part(path, piece.number, draft, everything, facts, recipe, folder)
    return counts_in(path)


def make_draft(piece: CorpusPiece, filters: Filters, recipe: Recipe, folder: Path) -> CorpusCounts:
    """Make the draft of a part, unless it exists; return its counts."""
    path = draft_path(folder, piece.number)
    if not path.exists():
        draft, facts = _draft(piece, filters, folder)
        near = filters.cleaning.duplicates == "near"
        named = {
            "ids": draft.documents.ids,
            "sentences": draft.documents.sentences,
            "documents": draft.documents.documents,
            "held_out": draft.held_out.astype(np.uint8),
            "md5": draft.md5.ravel(),
            "signatures": signatures(draft.documents).ravel() if near else np.zeros(0, np.uint32),
        }
        arrays.write(path, named, facts)
    return counts_in(path)


def counts_in(path: Path) -> CorpusCounts:
    """The counts that a part stores about itself."""
    facts = arrays.read(path)[1]
    facts.pop("input_crc", None)
    pairs = {name: tuple(map(tuple, facts.pop(name, ()))) for name in ("places", "languages")}
    return CorpusCounts(**pairs, lengths=tuple(facts.pop("lengths", ())), **facts)


@dataclass(frozen=True, slots=True)
class _Draft:
    """The tokenized documents of a piece; three arrays have a row for each."""

    documents: TokenizedDocuments
    held_out: np.ndarray  # [n] bool
    md5: np.ndarray  # [n, 2] of the text, as two numbers


def _draft(piece: CorpusPiece, filters: Filters, folder: Path) -> tuple[_Draft, dict[str, Any]]:
    """Read, filter and tokenize the documents of a piece; also all that is known of them."""
    documents: list[Document] = []
    tally = ReadTally()
    for chunk in piece.chunks:
        chunk_documents, chunk_tally = read(chunk)
        documents += chunk_documents
        tally += chunk_tally
    kept, counts = _filtered(documents, filters.cleaning)
    sentences = [document.sentences for document in kept]
    tokenized, has_tokens = tokenize_each(_tools(folder)[0], sentences)
    kept = list(compress(kept, has_tokens))
    md5 = np.array([_two_numbers(document.text_md5) for document in kept], np.uint64).reshape(-1, 2)
    hashes = _hashes(folder / HASHES)
    in_list = np.array([document.text_md5 in hashes for document in kept], bool)
    # By the text, so that neither the order nor the rest of the corpus matters.
    by_chance = md5[:, 0] < np.uint64(int(filters.eval_fraction * 2**63) * 2)
    counts = replace(
        counts,
        documents=tally.documents,
        redirects=tally.redirects,
        not_articles=tally.not_articles,
        empty=tally.empty,
        repaired=tally.repaired,
        bad=len(tally.bad),
        sentences=sum(len(document.sentences) for document in documents),
        characters=tally.characters,
        places=tuple((bad.place, bad.reason) for bad in tally.bad[:BAD_PLACES_SHOWN]),
    )
    return _Draft(tokenized, in_list | by_chance, md5), asdict(counts) | {
        "input_crc": _input_crc(piece)
    }


def _filtered(
    documents: Sequence[Document], cleaning: Cleaning
) -> tuple[list[Document], CorpusCounts]:
    """The documents that are neither too short nor too long nor in another language."""
    kept: list[Document] = []
    lengths = np.zeros(64, np.int64)
    languages: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for document in documents:
        length = sum(map(len, document.sentences))
        lengths[length.bit_length() - 1] += 1
        if length < cleaning.min_characters:
            left_out["too_short"] += 1
        elif cleaning.max_characters is not None and length > cleaning.max_characters:
            left_out["too_long"] += 1
        elif cleaning.needs_languages and not _is_in_language(document, cleaning, languages):
            left_out["other_languages"] += 1
        else:
            kept.append(document)
    return kept, CorpusCounts(
        too_short=left_out["too_short"],
        too_long=left_out["too_long"],
        other_languages=left_out["other_languages"],
        lengths=tuple(np.trim_zeros(lengths, "b").tolist()),
        languages=tuple(sorted(languages.items())),
    )


def _is_in_language(document: Document, cleaning: Cleaning, languages: Counter[str]) -> bool:
    """Whether its language is one of those to keep; it is counted either way."""
    text = ""
    for sentence in document.sentences:
        text += sentence + " "
        if len(text) >= LANGUAGE_CHARACTERS:
            break
    language = language_of(text)
    languages[language] += 1
    return not cleaning.languages or language in cleaning.languages


def _two_numbers(md5: str) -> tuple[int, int]:
    return int(md5[:16], 16), int(md5[16:], 16)


def write_kept(drafts: Sequence[Path], near: bool, folder: Path) -> None:
    """Write which documents of the drafts repeat no earlier one, unless that is known."""
    path = folder / KEPT
    if path.exists():
        return
    first = find_duplicates(drafts, near)
    itself = np.arange(len(first.exact))
    is_exact = first.exact != itself
    is_near = (first.near != itself) & ~is_exact
    samples = np.flatnonzero(is_near if near else is_exact)
    samples = samples[:: max(1, len(samples) // DUPLICATES_SHOWN)][:DUPLICATES_SHOWN]
    pairs = [
        [_beginning(drafts, int(number), folder) for number in (first.near[sample], sample)]
        for sample in samples
    ]
    named = {"exact": is_exact.astype(np.uint8), "near": is_near.astype(np.uint8)}
    sizes = [len(arrays.read(draft)[0]["held_out"]) for draft in drafts]
    bounds = np.cumsum([0, *sizes]).tolist()
    arrays.write(path, named, {"samples": pairs, "bounds": bounds})


def _beginning(drafts: Sequence[Path], number: int, folder: Path) -> str:
    """The first tokens of a document, as text."""
    for draft in drafts:
        stored = arrays.read(draft)[0]
        if number < len(stored["held_out"]):
            first, last = stored["sentences"][stored["documents"][number : number + 2]]
            ids = stored["ids"][first : min(last, first + TOKENS_SHOWN)]
            return _tokenizer(folder).decode(ids.tolist())
        number -= len(stored["held_out"])
    raise ValueError("no draft has this document")


def _duplicate_samples(folder: Path) -> list[list[str]]:
    return arrays.read(folder / KEPT)[1]["samples"]


def make_part_of_draft(number: int, recipe: Recipe, folder: Path) -> CorpusCounts:
    """Make a part of its draft, without duplicates, unless it exists; return its counts."""
    path = part_path(folder, number)
    if not path.exists():
        stored, facts = arrays.read(draft_path(folder, number))
        documents = TokenizedDocuments(
            stored["ids"].copy(), stored["sentences"].copy(), stored["documents"].copy()
        )
        draft = _Draft(documents, stored["held_out"].astype(bool), stored["md5"].reshape(-1, 2))
        kept, of_all = arrays.read(folder / KEPT)
        begin, end = of_all["bounds"][number : number + 2]
        exact = kept["exact"][begin:end].astype(bool)
        near = kept["near"][begin:end].astype(bool)
        facts |= {"duplicates": int(exact.sum()), "near_duplicates": int(near.sum())}
        _write_part(path, number, draft, ~(exact | near), facts, recipe, folder)
    return counts_in(path)


def _write_part(
    path: Path,
    number: int,
    draft: _Draft,
    kept: np.ndarray,
    facts: dict[str, Any],
    recipe: Recipe,
    folder: Path,
) -> None:
    """Write the sequences of the documents that are kept; those held out stay documents."""
    train = select(draft.documents, kept & ~draft.held_out)
    sequences = make(train, recipe, special_tokens(folder), (TRAIN, number))
    held_out = select(draft.documents, kept & draft.held_out)
    eval_arrays = {f"eval_{name}": array for name, array in asdict(held_out).items()}
    facts = facts | {
        "held_out": int((kept & draft.held_out).sum()),
        "sequences": len(sequences.lengths),
        "tokens": len(sequences.ids),
        "without_other": _without_other(train, sequences, recipe),
    }
    arrays.write(path, sequence_arrays(sequences) | eval_arrays, facts)


def _without_other(documents: TokenizedDocuments, sequences: Sequences, recipe: Recipe) -> int:
    """How many pairs had no other document to take their second sentence from."""
    is_alone = recipe.next_sentence and len(documents.documents) == 2  # bounds
    return len(sequences.lengths) if is_alone else 0


# Held-out documents ------------------------------------------------------------------------------


def eval_folder(folder: Path, count: int) -> Path:
    """The folder for everything that depends on the number of held-out sequences."""
    return folder / f"eval-of-{count}"


def make_eval(
    parts: Sequence[Path], count: int, recipe: Recipe, folder: Path, at_most: bool
) -> CorpusCounts:
    """Make one part of exactly `count` held-out sequences, spread evenly over all of them.

    at_most: if there are fewer, take all.
    """
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
        count = min(count, sum(sizes)) if at_most else count
        chosen = _choose_evenly(drafts, sizes, count)
        arrays.write(path, sequence_arrays(chosen), asdict(CorpusCounts(sequences=count)))
    return counts_in(path)


def _choose_evenly(drafts: Sequence[Path], sizes: Sequence[int], count: int) -> Sequences:
    total = sum(sizes)
    if total < count:
        raise InputError(
            f"the held-out documents make {total:,} sequences, but --eval-count is"
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
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder / TOKENIZER)


@lru_cache(maxsize=1)
def _tools(folder: Path) -> tuple[BulkTokenizer, Specials]:
    tokenizer = _tokenizer(folder)
    return BulkTokenizer(tokenizer), specials_of(tokenizer)


def special_tokens(folder: Path) -> Specials:
    """The special tokens of the work folder's tokenizer."""
    return _tools(folder)[1]
