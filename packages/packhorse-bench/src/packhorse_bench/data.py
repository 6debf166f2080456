"""`packhorse bench data`: the speed of making pretraining examples, ours and the reference's way.

Every method gets the same sentences (clean-up is timed apart) and makes packed rows of masked
examples of them: tokenize, make pairs, mask, lay the packs. `reference` does it in lists of strings
with a WordPiece in Python alone, `lists` does the same on the `tokenizers` library, each in as many
processes as ours (`packhorse`). A process counts its processor time, without starting and loading
its tokenizer, so that what else the machine does is not in the figures; a method takes as long as
its slowest process, in its median round. Ours begins each round without a word in its memory.

Planning the packs is the same for all and needs the same time for ten sequences as for a million,
so it is timed apart too: in a trial of a few megabytes it would hide what is compared.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from packhorse.data.corpus import workers
from packhorse.data.packed.examples import Sequences, make, tokenize
from packhorse.data.packed.masking import Masks, Recipe, specials_of
from packhorse.data.packed.packs import RowLayout, Rows, cumulative, index_ranges
from packhorse.errors import InputError, PackhorseError
from packhorse.packing.histogram import Assignment, PackingPlan, assign, histogram_of, plan
from packhorse.reports import docstrings
from packhorse.reports.tables import Table
from packhorse.tokens import Tokenizer
from packhorse.tokens.bulk import BulkTokenizer
from packhorse_bench import list_examples

if TYPE_CHECKING:
    from packhorse.data.sources.chunking import Chunk

Progress = Callable[[int, int], None]
Document = list[str]  # sentences
OURS = "packhorse"
LISTS = "lists"
REFERENCE = "reference"
METHODS = (OURS, LISTS, REFERENCE)
SENTENCE = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")
LOADER_SECONDS = 2.0
LOADER_ROWS = 64


@dataclass(frozen=True)
class DataSetup:
    """What to measure."""

    tokenizer: str
    sources: tuple[str, ...] = ()  # none: the docstrings of Python's standard library
    kind: str | None = None
    column: str | None = None
    megabytes: float = 4.0  # of text, about; whole documents
    max_length: int = 512
    max_per_pack: int = 3
    duplicates: int = 10  # what the reference is run with
    workers: int = 2
    repeats: int = 3
    seed: int = 12345
    methods: tuple[str, ...] = METHODS


@dataclass(frozen=True)
class DataRow:
    """The figures of one method; `problem` says why there are none."""

    method: str
    seconds: float = 0.0  # of the median round, planning not counted
    best_seconds: float = 0.0
    tokenize_seconds: float = 0.0  # of the median round's slowest process, as all that follow
    examples_seconds: float = 0.0  # with masks
    packing_seconds: float = 0.0
    planning_seconds: float = 0.0
    megabytes_per_second: float = 0.0  # of text
    tokens_per_second: float = 0.0  # of examples
    sequences: int = 0
    tokens: int = 0
    rows: int = 0
    over_reference: float | None = None  # times as fast
    over_lists: float | None = None
    problem: str | None = None

    @property
    def subject(self) -> str:
        """What the row is about, in words."""
        return self.method


@dataclass(frozen=True)
class DataComparison:
    """The corpus, the figures of each method, and the speed of clean-up and loading."""

    documents: int
    sentences: int
    bytes: int
    rows: tuple[DataRow, ...]
    cleaning: float | None  # megabytes of sources, unpacked, a second; None: no sources
    loading: float  # tokens per second and core, masks drawn on the way


@dataclass(frozen=True, slots=True)
class _Trial:
    """The counts of one process, and the processor time after each of its steps."""

    times: tuple[float, ...]  # begin, tokenized, examples made, planned, packed
    sequences: int
    tokens: int
    rows: int

    def step(self, number: int) -> float:
        return self.times[number + 1] - self.times[number]

    @property
    def seconds(self) -> float:
        """Processor time without planning, which is the same for all methods."""
        return self.times[-1] - self.times[0] - self.step(2)


def measure(setup: DataSetup, progress: Progress | None = None) -> DataComparison:
    """Time every method on the same documents, round after round, ours first."""
    if setup.repeats < 1 or not set(setup.methods) <= set(METHODS):
        raise InputError(f"{setup.repeats} rounds of {', '.join(setup.methods)} cannot be measured")
    documents, cleaning = _documents(setup)
    size = sum(len(sentence.encode()) + 1 for document in documents for sentence in document)
    shares = [documents[i :: setup.workers] for i in range(setup.workers)]
    rounds, problems = _rounds(setup, shares, progress)
    rows = [
        DataRow(method, problem=problems[method])
        if method in problems
        else _row(method, rounds[method], size)
        for method in setup.methods
    ]
    return DataComparison(
        documents=len(documents),
        sentences=sum(map(len, documents)),
        bytes=size,
        rows=tuple(_compared(rows)),
        cleaning=cleaning,
        loading=_loading(shares[0], setup),
    )


def _rounds(
    setup: DataSetup, shares: Sequence[list[Document]], progress: Progress | None
) -> tuple[dict[str, list[list[_Trial]]], dict[str, str]]:
    """All trials of each method; of the reference's, why there are none."""
    rounds: dict[str, list[list[_Trial]]] = {method: [] for method in setup.methods}
    problems: dict[str, str] = {}
    with workers.local(setup.workers) as run:
        for done, (_, method) in enumerate(product(range(setup.repeats), setup.methods), 1):
            if method not in problems:
                items = [(method, share, setup) for share in shares if share]
                try:
                    rounds[method].append(list(run(_work, items)))
                except PackhorseError as error:
                    if method == OURS:
                        raise
                    problems[method] = str(error)
            if progress is not None:
                progress(done, setup.repeats * len(setup.methods))
    return rounds, problems


def describe(setup: DataSetup, measured: DataComparison) -> dict[str, str]:
    """What was measured, in words."""
    text = (
        f"{measured.documents:,} documents, {measured.sentences:,} sentences, "
        f"{measured.bytes:,} bytes"
    )
    names = ", ".join(Path(source).name for source in setup.sources)
    plans = max((row.planning_seconds for row in measured.rows), default=0.0)
    facts = {
        "workload": f"{names or 'docstrings'}: {text}",
        "examples": f"{setup.max_length} tokens, {setup.max_per_pack} a row at most, "
        f"{setup.duplicates} passes, static masks, {setup.workers} processes",
        "rounds": str(setup.repeats),
        "planning, once for a million sequences": f"{plans:.2f} s",
        "loading with dynamic masks": f"{measured.loading / 1e6:.1f} million tokens/s a core",
    }
    if measured.cleaning is not None:
        facts["clean-up"] = f"{measured.cleaning:.1f} MB/s of sources, unpacked, in one process"
    return facts


def table(rows: Sequence[DataRow]) -> Table:
    """Measured methods; those with a problem are for `report.problems`."""
    columns = (
        "method",
        "seconds",
        "best",
        "tokenize",
        "examples",
        "packing",
        "MB/s",
        "tokens/s",
        "sequences",
        "rows",
        "x lists",
        "x reference",
    )
    return Table.of(
        columns,
        [
            (
                row.method,
                f"{row.seconds:.3f}",
                f"{row.best_seconds:.3f}",
                f"{row.tokenize_seconds:.3f}",
                f"{row.examples_seconds:.3f}",
                f"{row.packing_seconds:.3f}",
                f"{row.megabytes_per_second:.2f}",
                f"{row.tokens_per_second:,.0f}",
                f"{row.sequences:,}",
                f"{row.rows:,}",
                *("-" if x is None else f"{x:.1f}" for x in (row.over_lists, row.over_reference)),
            )
            for row in rows
            if row.problem is None
        ],
    )


def _documents(setup: DataSetup) -> tuple[list[Document], float | None]:
    """Clean sentences, and how fast they were had from the sources."""
    if not setup.sources:
        sentences = [SENTENCE.split(text.text) for text in docstrings.read()]
        return _limited(sentences, setup.megabytes), None
    from packhorse.data.sources import chunking, documents, files

    documents_read: list[Document] = []
    size = 0
    seconds = 0.0
    characters = 0
    paths = [Path(source) for source in setup.sources]
    for chunk in chunking.chunks(files.find(paths, setup.kind, setup.column)):
        begin = time.process_time()
        read, tally = documents.read(chunk)
        seconds += time.process_time() - begin
        documents_read += [document.sentences for document in read]
        characters += tally.characters
        size += _unpacked_bytes(chunk) or tally.characters
        if characters > setup.megabytes * 1e6:
            break
    return _limited(documents_read, setup.megabytes), size / max(seconds, 1e-9) / 1e6


def _unpacked_bytes(chunk: Chunk) -> int:
    """Bytes of the text that a chunk was before clean-up; 0 where it is rows of a table."""
    from packhorse.data.sources import bz2streams

    if chunk.counts_rows:
        return 0
    if chunk.data is None and chunk.source.packing:
        pieces = bz2streams.unpacked(chunk.source.path, chunk.begin, chunk.end)
        return sum(len(text) for text, _ in pieces)
    return chunk.end - chunk.begin


def _limited(documents: Sequence[Document], megabytes: float) -> list[Document]:
    sizes = np.cumsum([sum(map(len, document)) for document in documents])
    chosen = list(documents[: int(np.searchsorted(sizes, megabytes * 1e6)) + 1])
    if len(chosen) < 2:
        raise InputError(f"{len(chosen)} documents are too few; examples are pairs of two")
    return chosen


def _recipe(setup: DataSetup, static_masks: bool = True) -> Recipe:
    return Recipe(
        max_length=setup.max_length,
        duplicates=setup.duplicates,
        static_masks=static_masks,
        seed=setup.seed,
    )


def _work(method: str, documents: list[Document], setup: DataSetup) -> _Trial:
    return _ours(documents, setup) if method == OURS else _by_lists(method, documents, setup)


def _ours(documents: list[Document], setup: DataSetup) -> _Trial:
    tokenizer = Tokenizer.load(Path(setup.tokenizer))
    bulk = BulkTokenizer(tokenizer)
    specials = specials_of(tokenizer)
    times = [time.process_time()]
    tokenized = tokenize(bulk, documents)
    times.append(time.process_time())
    examples = make(tokenized, _recipe(setup), specials, (0,))
    times.append(time.process_time())
    planned = _planned(examples.lengths, setup)
    times.append(time.process_time())
    rows = _packed(examples, planned, setup)
    times.append(time.process_time())
    return _Trial(tuple(times), len(examples.lengths), len(examples.ids), len(rows))


def _by_lists(method: str, documents: list[Document], setup: DataSetup) -> _Trial:
    library = Tokenizer.load(Path(setup.tokenizer))._library
    vocabulary = library.get_vocab()
    if not {list_examples.CLS, list_examples.SEP, list_examples.MASK} <= vocabulary.keys():
        raise InputError("this method knows BERT's special tokens only")

    def by_library(document: Document) -> list[list[str]]:
        tokenized = library.encode_batch(document, add_special_tokens=False)
        return [encoding.tokens for encoding in tokenized]

    lower = getattr(library.normalizer, "lowercase", True)
    alone = list_examples.word_pieces(vocabulary, lower)
    times = [time.process_time()]
    tokenized = list_examples.tokenized(documents, by_library if method == LISTS else alone)
    times.append(time.process_time())
    examples = list_examples.make(tokenized, vocabulary, _recipe(setup), setup.seed)
    times.append(time.process_time())
    lengths = np.array([len(example.tokens) for example in examples])
    planned = _planned(lengths, setup)
    times.append(time.process_time())
    packs = ([*pack.tolist()] for pack in assign(planned, lengths, setup.seed))
    rows = list_examples.lay(examples, packs, vocabulary, setup.max_length)
    times.append(time.process_time())
    return _Trial(tuple(times), len(examples), int(lengths.sum()), len(rows))


def _planned(lengths: np.ndarray, setup: DataSetup) -> PackingPlan:
    return plan(histogram_of(lengths, setup.max_length), setup.max_length, setup.max_per_pack)


def _packed(examples: Sequences, planned: PackingPlan, setup: DataSetup) -> Rows:
    placed: Assignment = assign(planned, examples.lengths, setup.seed)
    return Rows.of(_taken(examples, placed.indices), placed.offsets)


def _taken(examples: Sequences, order: np.ndarray) -> Sequences:
    """The same sequences in another order."""
    masked = examples.masked
    if masked is not None:
        at = index_ranges(cumulative(masked.counts)[order], masked.counts[order])
        masked = Masks(masked.positions[at], masked.ids[at], masked.counts[order])
    columns = (examples.lengths[order], examples.first[order], examples.random_next[order])
    return Sequences(
        examples.ids[index_ranges(cumulative(examples.lengths)[order], columns[0])],
        *columns,
        masked,
    )


def _loading(documents: list[Document], setup: DataSetup) -> float:
    """Tokens a second of the loader, on one core."""
    from packhorse.data.packed import shards
    from packhorse.data.packed.loader import Loader

    tokenizer = Tokenizer.load(Path(setup.tokenizer))
    specials = specials_of(tokenizer)
    recipe = _recipe(setup, static_masks=False)
    examples = make(tokenize(BulkTokenizer(tokenizer), documents), recipe, specials, (0,))
    rows = _packed(examples, _planned(examples.lengths, setup), setup)
    layout = RowLayout(setup.max_length, tokenizer.vocab_size, setup.max_per_pack)
    with TemporaryDirectory() as folder:
        writer = shards.Writer(Path(folder) / "train", layout, specials, {})
        writer.add(rows)
        writer.finish()
        dataset = shards.open_dataset(Path(folder) / "train")
        count = min(LOADER_ROWS, len(dataset))
        loader = iter(Loader(dataset, count, masking=recipe, prefetch=0))
        next(loader)
        tokens = 0
        begin = time.process_time()
        while time.process_time() - begin < LOADER_SECONDS:
            tokens += next(loader).tokens
        return tokens / (time.process_time() - begin)


def _row(method: str, rounds: list[list[_Trial]], size: int) -> DataRow:
    # A round ends with its slowest process. The median round is taken whole, so that the times of
    # its steps add up.
    slowest = [max(trials, key=lambda trial: trial.seconds) for trials in rounds]
    by_seconds = sorted(slowest, key=lambda trial: trial.seconds)
    middle = by_seconds[len(by_seconds) // 2]  # of an even number the slower of the two
    last = rounds[-1]
    sequences, tokens, rows = (
        sum(getattr(trial, name) for trial in last) for name in ("sequences", "tokens", "rows")
    )
    return DataRow(
        method=method,
        seconds=middle.seconds,
        best_seconds=by_seconds[0].seconds,
        tokenize_seconds=middle.step(0),
        examples_seconds=middle.step(1),
        planning_seconds=middle.step(2),
        packing_seconds=middle.step(3),
        megabytes_per_second=size / middle.seconds / 1e6,
        tokens_per_second=tokens / middle.seconds,
        sequences=sequences,
        tokens=tokens,
        rows=rows,
    )


def _compared(rows: Sequence[DataRow]) -> list[DataRow]:
    """How many times as fast as the two ways of the reference, where these were measured."""
    speeds = {row.method: row.megabytes_per_second for row in rows if row.problem is None}

    def over(row: DataRow, method: str) -> float | None:
        slow = speeds.get(method)
        return row.megabytes_per_second / slow if slow and row.problem is None else None

    return [
        replace(row, over_reference=over(row, REFERENCE), over_lists=over(row, LISTS))
        for row in rows
    ]
