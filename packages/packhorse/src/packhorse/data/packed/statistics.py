"""What a dataset of packed rows holds: counts, lengths before and after packing, and samples.

The manifest knows the sums; how rows are made up is counted from the shards' columns of lengths,
one shard at a time, once it is known to be whole. Samples are drawn by seed; where masks are drawn
when loading, a sample shows one drawing of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.data.packed import shards
from packhorse.data.packed.manifest import NAME, Manifest, read_manifest
from packhorse.data.packed.masking import Masks, draw
from packhorse.data.packed.packs import Rows, cumulative
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer

DATASETS = ("train", "eval")
Strategy = tuple[tuple[int, ...], int]  # lengths, longest first, and how many rows are made so


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one dataset."""

    name: str
    manifest: Manifest
    bytes: int
    random_next: int | None  # of the sequences; None: they have no second segment
    row_tokens: np.ndarray  # entry i counts the rows of i+1 tokens
    strategies: tuple[Strategy, ...]  # the most frequent, and only those
    strategy_count: int

    @property
    def lengths(self) -> np.ndarray:
        """Entry i counts the sequences of i+1 tokens."""
        counts = np.array(self.manifest.histogram)
        return np.pad(counts, (0, self.manifest.layout.capacity - len(counts)))

    @property
    def lower_bound(self) -> int | None:
        """Rows that no plan can do without, as far as the maker knew."""
        bound = self.manifest.config.get("lower_bound")
        return bound if isinstance(bound, int) else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence as text, with what is to be guessed in brackets."""

    row: int
    tokens: int
    next_label: str | None  # "follows", "random"; None: there is no second segment
    text: str


def datasets(folder: Path) -> dict[str, Path]:
    """The datasets of a build by name; or the folder itself, if it is one."""
    if (folder / NAME).exists():
        return {folder.name: folder}
    found = {name: folder / name for name in DATASETS if (folder / name / NAME).exists()}
    if not found:
        read_manifest(folder)  # says what is wrong
        raise InputError(f"{folder} holds no dataset")
    return found


def count(name: str, folder: Path, top: int) -> Statistics:
    """Go through the shards of a dataset."""
    dataset = shards.open(folder)
    manifest = dataset.manifest
    tokens = np.zeros(manifest.layout.capacity + 1, np.int64)
    strategies: Counter[tuple[int, ...]] = Counter()
    random_next = 0
    for number in range(len(manifest.shards)):
        rows = dataset.shard(number)
        lengths, bounds = rows.lengths, rows.offsets
        random_next += int(rows.random_next.sum(dtype=np.int64))
        tokens += np.bincount(
            np.add.reduceat(lengths.astype(np.int64), bounds[:-1]), minlength=len(tokens)
        )
        strategies.update(dict(_strategies(lengths, bounds)))
    ranked = sorted(strategies.items(), key=lambda pair: (-pair[1], pair[0]))
    size = sum(shard.bytes for shard in manifest.shards)
    best, labelled = tuple(ranked[:top]), random_next if manifest.layout.next_sentence else None
    return Statistics(name, manifest, size, labelled, tokens[1:], best, len(ranked))


def samples(folder: Path, tokenizer: Tokenizer, number: int, seed: int) -> list[Sample]:
    """The first sequences of some rows, spread over the dataset."""
    dataset, rng = shards.open(folder), np.random.default_rng(seed)
    chosen = np.sort(rng.choice(len(dataset), min(number, len(dataset)), replace=False))
    found, labelled = [], dataset.manifest.layout.next_sentence
    for number in chosen.tolist():
        row = dataset.row(number)
        length = int(row.lengths[0])
        shown, masks = _masked(row, dataset.manifest, rng)
        label = ("random" if row.random_next[0] else "follows") if labelled else None
        text = _text(shown[:length], masks.positions[: masks.counts[0]], masks.ids, tokenizer)
        found.append(Sample(number, length, label, text))
    return found


def _strategies(lengths: np.ndarray, bounds: np.ndarray) -> Iterator[Strategy]:
    """The make-up of rows, those of one number of sequences at a time."""
    depths = np.diff(bounds)
    for depth in np.unique(depths).tolist():
        starts = bounds[:-1][depths == depth]
        held = np.sort(lengths[starts[:, None] + np.arange(depth)], axis=1)[:, ::-1]
        kinds, counts = np.unique(held, axis=0, return_counts=True)
        yield from zip(map(tuple, kinds.tolist()), counts.tolist(), strict=True)


def _masked(row: Rows, manifest: Manifest, rng: np.random.Generator) -> tuple[np.ndarray, Masks]:
    """The row's tokens with masks, stored or drawn; in its first sequence they count from 0."""
    if row.masked_ids is not None and row.masked_positions is not None:
        return row.ids, Masks(row.masked_positions, row.masked_ids, np.asarray(row.masked_counts))
    return draw(row.ids, row.lengths, manifest.specials, manifest.masking, rng)


def _text(
    ids: np.ndarray, at: np.ndarray, originals: Sequence[int] | np.ndarray, tokenizer: Tokenizer
) -> str:
    """Text with [what is seen=what stood there] for each token to be guessed."""
    pieces, begin = [], 0
    for place, original in zip(at.tolist(), np.asarray(originals).tolist(), strict=False):
        pieces.append(tokenizer.decode(ids[begin:place], skip_special=False))
        seen = tokenizer.token(int(ids[place])).strip("[]")
        pieces.append(f"[{seen}={tokenizer.token(int(original))}]")
        begin = place + 1
    pieces.append(tokenizer.decode(ids[begin:], skip_special=False))
    return " ".join(piece for piece in pieces if piece)


def bins(counts: np.ndarray, number: int) -> list[tuple[int, int, int]]:
    """(shortest, longest, how many) for about so many runs of lengths."""
    width = max(1, -(-len(counts) // number))
    ends = [min(begin + width, len(counts)) for begin in range(0, len(counts), width)]
    begins, sums = [0, *ends[:-1]], cumulative(counts)
    return [(b + 1, e, int(sums[e] - sums[b])) for b, e in zip(begins, ends, strict=True)]
