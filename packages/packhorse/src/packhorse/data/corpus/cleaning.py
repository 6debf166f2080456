"""What a corpus leaves out: documents too short or long, of other languages, and duplicates.

Exact duplicates have the same sentences. Near duplicates share most of their shingles (runs of
`SHINGLE` tokens): rensa's MinHash gives each document a signature, and the fraction of equal
numbers in two signatures estimates that of equal shingles (Broder 1997). Signatures are cut into
bands. Documents that agree in a whole band are compared by their whole signatures, and are
duplicates if at least `SIMILAR` of these are equal. Of each connected group of duplicates the first
document of the corpus is kept.

The chance that a pair is compared is 1 - (1 - s^7)^16 at similarity s: 0.977 at 0.8, 0.9999 at 0.9.

py3langid tells the language of a document from its first `LANGUAGE_CHARACTERS` characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.data.corpus import arrays
from packhorse.data.packed.examples import TokenizedDocuments
from packhorse.errors import InputError, MissingExtra

SIMILAR = 0.8
SHINGLE = 5
BANDS = 16
BAND_ROWS = 7
SEED = 1
LANGUAGE_CHARACTERS = 1000
DUPLICATES = (None, "exact", "near")

_PAIRS_AT_ONCE = 1 << 16
_ODD = np.uint64(0x9E3779B97F4A7C15)  # of the golden ratio; as in splitmix64


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Which documents are left out; by default none."""

    min_characters: int = 0
    max_characters: int | None = None
    languages: tuple[str, ...] = ()  # kept; () for all
    report_languages: bool = False
    duplicates: str | None = None  # left out: "exact" or "near" (exact ones included)

    def __post_init__(self) -> None:
        if self.min_characters < 0:
            raise InputError(f"min_characters is {self.min_characters}; it must be 0 or more")
        if self.max_characters is not None and self.max_characters < max(1, self.min_characters):
            raise InputError(
                f"max_characters is {self.max_characters}; it must be 1 or more, and not less than"
                f" min_characters, {self.min_characters}"
            )
        if self.duplicates not in DUPLICATES:
            raise InputError(f"duplicates is {self.duplicates!r}; use 'exact' or 'near'")
        known = known_languages() if self.languages else frozenset()
        if unknown := set(self.languages) - known:
            raise InputError(
                f"no language is called {min(unknown)!r}; known: {' '.join(sorted(known))}"
            )

    @property
    def needs_languages(self) -> bool:
        """Whether the language of each document must be known."""
        return bool(self.languages) or self.report_languages


# Languages ---------------------------------------------------------------------------------------


def known_languages() -> frozenset[str]:
    """The codes of all languages that can be told apart: ISO 639-1."""
    return frozenset(code for code, _ in _identifier().rank("a"))


def language_of(text: str) -> str:
    """The language of a text, as a code of ISO 639-1."""
    return _identifier().classify(text[:LANGUAGE_CHARACTERS])[0]


@cache
def _identifier() -> Any:
    try:
        import py3langid
    except ImportError as error:
        raise MissingExtra("py3langid", "clean") from error

    return py3langid


# Signatures --------------------------------------------------------------------------------------


def signatures(documents: TokenizedDocuments) -> np.ndarray:
    """[n, BANDS * BAND_ROWS] the MinHash signature of each document."""
    try:
        from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise MissingExtra("rensa", "clean") from error

    bounds = documents.sentences[documents.documents].astype(np.int64)
    lengths = np.diff(bounds)
    # A document shorter than a shingle has one, of all its tokens.
    counts = np.maximum(lengths - SHINGLE + 1, np.minimum(lengths, 1))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    starts = np.repeat(bounds[:-1] - offsets[:-1], counts) + np.arange(offsets[-1])
    ends = np.repeat(bounds[1:], counts)
    ids = np.append(documents.ids.astype(np.uint64) + np.uint64(1), np.uint64(0))
    shingles = np.zeros(len(starts), np.uint64)
    for place in range(SHINGLE):
        token = ids[np.where(starts + place < ends, starts + place, len(ids) - 1)]
        shingles = _mixed(shingles + token)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        shingles, offsets.astype(np.uint64), BANDS * BAND_ROWS, SEED
    )
    return np.array(matrix.to_rows(), np.uint32).reshape(-1, BANDS * BAND_ROWS)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3, after a multiplication that makes running sums order-aware."""
    values = values * _ODD
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    return values


def _band_keys(rows: np.ndarray, band: int) -> np.ndarray:
    """A key for each document: equal for documents that agree in the whole band."""
    keys = np.full(len(rows), band, np.uint64)
    for column in range(band * BAND_ROWS, (band + 1) * BAND_ROWS):
        keys = _mixed(keys + rows[:, column].astype(np.uint64))
    return keys


# Duplicates --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundDuplicates:
    """For each document of the corpus, the first one that it repeats, or itself."""

    exact: np.ndarray
    near: np.ndarray


def find_duplicates(drafts: Sequence[Path], near: bool) -> FoundDuplicates:
    """Compare all documents of the drafts, in their order; one array of them is in memory."""
    hashes = np.concatenate([arrays.read(draft)[0]["md5"].reshape(-1, 2) for draft in drafts])
    order = np.lexsort((np.arange(len(hashes)), hashes[:, 1], hashes[:, 0]))
    exact = _first_of_equals(hashes[order, 0], order, hashes[order, 1])
    return FoundDuplicates(exact, _find_near(drafts, exact) if near else exact)


def _first_of_equals(
    keys: np.ndarray, order: np.ndarray, more: np.ndarray | None = None
) -> np.ndarray:
    """For each item, the first that has the same sorted key; `order` are the items so sorted."""
    is_new = np.ones(len(keys), bool)
    is_new[1:] = keys[1:] != keys[:-1]
    if more is not None:
        is_new[1:] |= more[1:] != more[:-1]
    first = np.empty(len(keys), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(is_new, np.arange(len(keys)), 0))]
    return first


def _find_near(drafts: Sequence[Path], exact: np.ndarray) -> np.ndarray:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(exact)
    sizes = [len(arrays.read(draft)[0]["md5"]) // 2 for draft in drafts]
    ends = np.cumsum(sizes)
    itself = np.arange(count)
    # Each document and the first that it may repeat, in any band, as one number.
    candidates = np.zeros(0, np.int64)
    for band in range(BANDS):
        keys = np.concatenate([_band_keys(_rows(draft), band) for draft in drafts])
        keys[exact != itself] = itself[exact != itself].astype(np.uint64)  # compared already
        order = np.argsort(keys, kind="stable")
        first = _first_of_equals(keys[order], order)
        repeats = np.flatnonzero((first != itself) & (exact == itself))
        candidates = np.union1d(candidates, repeats * count + first[repeats])
    later, earlier = np.divmod(candidates, max(count, 1))
    similar = np.zeros(len(later), bool)
    for begin in range(0, len(later), _PAIRS_AT_ONCE):
        pairs = slice(begin, begin + _PAIRS_AT_ONCE)
        similar[pairs] = _similarity(drafts, ends, later[pairs], earlier[pairs]) >= SIMILAR
    edges = np.concatenate([later[similar], itself]), np.concatenate([earlier[similar], exact])
    graph = coo_array((np.ones(len(edges[0]), np.int8), edges), shape=(count, count))
    labels = connected_components(graph, directed=False)[1]
    first_of_label = np.full(int(labels.max(initial=-1)) + 1, count, np.int64)
    np.minimum.at(first_of_label, labels, itself)
    return first_of_label[labels]


def _rows(draft: Path) -> np.ndarray:
    return arrays.read(draft)[0]["signatures"].reshape(-1, BANDS * BAND_ROWS)


def _similarity(
    drafts: Sequence[Path], ends: np.ndarray, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """The estimated similarity of pairs of documents, by their numbers in the corpus."""
    return (_gather(drafts, ends, first) == _gather(drafts, ends, second)).mean(axis=1)


def _gather(drafts: Sequence[Path], ends: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    rows = np.empty((len(numbers), BANDS * BAND_ROWS), np.uint32)
    draft_of = np.searchsorted(ends, numbers, side="right")
    for draft in np.unique(draft_of):
        chosen = draft_of == draft
        begin = ends[draft - 1] if draft else 0
        rows[chosen] = _rows(drafts[draft])[numbers[chosen] - begin]
    return rows
