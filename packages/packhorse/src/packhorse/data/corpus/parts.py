"""The work on one piece of a corpus: documents in, one part file of sequences out.

A piece is a chunk, or several where files are small: their documents take random next sentences
from each other. A part depends on the bytes and the number of its piece, the recipe and the
tokenizer, never on who makes it or when; a part that is there is whole and is not made again.

Documents that are held out are kept apart as tokens. Their sequences are made later, of all of them
together: the few in one piece would have each other for every random next sentence. They have
static masks and no duplicates whatever the recipe says, so that every evaluation is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from packhorse.data.corpus import arrays
from packhorse.data.corpus.planning import columns, gather
from packhorse.data.packed.examples import Sequences, Tokenised, make, tokenise
from packhorse.data.packed.masking import Recipe, Specials, specials_of
from packhorse.data.sources.chunking import BZ2_RATIO
from packhorse.data.sources.documents import Chunk, Document, Tally, read
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.tokens.bulk import BulkTokenizer

TOKENIZER, HASHES, EVAL_PART = "tokenizer", "eval.md5", "part.arrow"  # in the work folder
TRAIN, EVAL = 0, 1  # in the seeds
SHOWN = 5  # bad places that a part remembers
BLOCK = 1 << 22  # tokens of held-out documents that are made into sequences together


@dataclass(frozen=True, slots=True)
class Piece:
    """What becomes one part."""

    number: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What was read, and what came of it."""

    documents: int = 0
    held_out: int = 0  # of the documents
    redirects: int = 0
    not_articles: int = 0
    empty: int = 0
    bad: int = 0
    sentences: int = 0
    characters: int = 0
    sequences: int = 0
    tokens: int = 0
    places: tuple[tuple[str, str], ...] = ()  # the first that are bad: where, why

    def __add__(self, other: Found) -> Found:
        theirs = counts(other)
        sums = {name: number + theirs[name] for name, number in counts(self).items()}
        return Found(**sums, places=(*self.places, *other.places)[:SHOWN])


def pieces(chunks: Iterable[Chunk], size: int) -> Iterator[Piece]:
    """Chunks one after the other, as many as have about `size` bytes of text together."""
    waiting: list[Chunk] = []
    weight = number = 0
    for chunk in chunks:
        waiting.append(chunk)
        weight += _weight(chunk, size)
        if weight >= size:
            yield Piece(number, tuple(waiting))
            waiting, weight, number = [], 0, number + 1
    if waiting:
        yield Piece(number, tuple(waiting))


def _weight(chunk: Chunk, size: int) -> int:
    if chunk.counts_rows:
        return size
    packed = chunk.source.compressed and chunk.data is None
    return (chunk.end - chunk.begin) * (BZ2_RATIO if packed else 1)


def part_path(folder: Path, number: int) -> Path:
    """Where the part of the piece of this number is, or will be."""
    return folder / f"part-{number:05d}.arrow"


def work(piece: Piece, recipe: Recipe, folder: Path) -> Found:
    """Make the part of a piece, unless it is there; what is in it."""
    path = part_path(folder, piece.number)
    if not path.exists():
        _make(piece, recipe, folder, path)
    return found_in(path)


def found_in(path: Path) -> Found:
    """What a part says of itself."""
    told = arrays.read(path)[1]
    return Found(places=tuple((where, why) for where, why in told.pop("places")), **told)


def _make(piece: Piece, recipe: Recipe, folder: Path, path: Path) -> None:
    bulk, specials = _tools(folder)
    read_now = [read(chunk) for chunk in piece.chunks]
    documents = [document for some, _ in read_now for document in some]
    tally = sum((each for _, each in read_now), Tally())
    hashes = _hashes(folder / HASHES)
    held = [document for document in documents if document.text_md5 in hashes]
    kept = [document for document in documents if document.text_md5 not in hashes]
    train, eval = (_tokenised(bulk, some) for some in (kept, held))
    sequences = make(train, recipe, specials, (TRAIN, piece.number))
    found = Found(
        documents=tally.documents,
        held_out=len(held),
        redirects=tally.redirects,
        not_articles=tally.not_articles,
        empty=tally.empty,
        bad=len(tally.bad),
        sentences=sum(len(document.sentences) for document in documents),
        characters=tally.characters,
        sequences=len(sequences.lengths),
        tokens=len(sequences.ids),
        places=tuple((bad.where, bad.why) for bad in tally.bad[:SHOWN]),
    )
    apart = {f"eval_{name}": array for name, array in asdict(eval).items()}
    arrays.write(path, columns(sequences) | apart, asdict(found))


def _tokenised(bulk: BulkTokenizer, documents: Sequence[Document]) -> Tokenised:
    return tokenise(bulk, [document.sentences for document in documents])


def eval_folder(folder: Path, count: int) -> Path:
    """Where all is made that depends on how many held-out sequences are wanted."""
    return folder / f"eval-of-{count}"


def make_eval(parts: Sequence[Path], count: int, recipe: Recipe, folder: Path) -> Found:
    """One part of exactly `count` held-out sequences, spread evenly over all that there are."""
    home = eval_folder(folder, count)
    path = home / EVAL_PART
    if not path.exists():
        _, specials = _tools(folder)
        recipe = replace(recipe, static_masks=True, duplicates=1)
        drafts = []
        for number, block in enumerate(_blocks(parts)):
            draft = home / f"eval-block-{number:05d}.arrow"
            made = make(block, recipe, specials, (EVAL, number))
            arrays.write(draft, columns(made), {})
            drafts.append((draft, len(made.lengths)))
        arrays.write(path, columns(_picked(drafts, count)), asdict(Found(sequences=count)))
    return found_in(path)


def _picked(drafts: Sequence[tuple[Path, int]], count: int) -> Sequences:
    sizes = [size for _, size in drafts]
    if sum(sizes) < count:
        raise InputError(
            f"the documents of --eval-hashes make {sum(sizes):,} sequences, but --eval-count is"
            f" {count:,}; pass --eval-count {sum(sizes)} or less, which goes on with what is done,"
            " or name the hashes of more documents of these sources"
        )
    chosen = np.arange(count, dtype=np.int64) * sum(sizes) // count
    return gather([path for path, _ in drafts], sizes, chosen)


def _blocks(parts: Iterable[Path]) -> Iterator[Tokenised]:
    """The held-out documents of all parts, some `BLOCK` tokens at a time."""
    waiting: list[Tokenised] = []
    for part in parts:
        held = arrays.read(part)[0]
        names = (field.name for field in fields(Tokenised))
        documents = Tokenised(**{name: held[f"eval_{name}"].copy() for name in names})
        if len(documents.ids):
            waiting.append(documents)
        if sum(len(each.ids) for each in waiting) >= BLOCK:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(some: Sequence[Tokenised]) -> Tokenised:
    return Tokenised(
        np.concatenate([each.ids for each in some]),
        _end_to_end([each.sentences for each in some]),
        _end_to_end([each.documents for each in some]),
    )


def _end_to_end(bounds: Sequence[np.ndarray]) -> np.ndarray:
    """Where things begin, and the end, once they are laid behind each other."""
    return np.concatenate([[0], np.cumsum(np.concatenate([np.diff(each) for each in bounds]))])


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


@lru_cache(maxsize=1)
def _hashes(path: Path) -> frozenset[str]:
    return read_hashes(path) if path.exists() else frozenset()


@lru_cache(maxsize=1)  # a worker has one folder at a time
def _tools(folder: Path) -> tuple[BulkTokenizer, Specials]:
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    return BulkTokenizer(tokenizer), specials_of(tokenizer)


def special_tokens(folder: Path) -> Specials:
    """Of the work folder's tokenizer."""
    return _tools(folder)[1]


def counts(found: Found) -> dict[str, int]:
    """The numbers alone."""
    return {name: value for name, value in asdict(found).items() if name != "places"}
