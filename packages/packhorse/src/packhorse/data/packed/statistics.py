"""Statistics of a dataset of packed rows: counts, lengths before and after packing, and samples.

The manifest has the sums; the composition of rows is counted from the lengths in the shards, one
verified shard at a time. Samples are drawn by seed; if masks are drawn when loading, a sample shows
one drawing of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
Strategy = tuple[tuple[int, ...], int]  # lengths, longest first, and the number of such rows


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one dataset."""

    name: str
    manifest: Manifest
    bytes: int
    random_next: int | None  # sequences with a random second segment; None: they have only one
    row_tokens: np.ndarray  # entry i counts the rows of i+1 tokens
    strategies: tuple[Strategy, ...]  # only the most frequent
    strategy_count: int

    @property
    def lengths(self) -> np.ndarray:
        """Entry i counts the sequences of i+1 tokens."""
        counts = np.array(self.manifest.histogram)
        return np.pad(counts, (0, self.manifest.layout.capacity - len(counts)))

    @property
    def lower_bound(self) -> int | None:
        """The number of rows that any plan needs, if the maker recorded it."""
        bound = self.manifest.config.get("lower_bound")
        return bound if isinstance(bound, int) else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence as text, with masked tokens in brackets."""

    row: int
    tokens: int
    next_label: str | None  # "follows", "random"; None: there is no second segment
    text: str


def datasets(folder: Path) -> dict[str, Path]:
    """The datasets in a folder by name; or the folder itself, if it is one."""
    if (folder / NAME).exists():
        return {folder.name: folder}
    folders = {name: folder / name for name in DATASETS if (folder / name / NAME).exists()}
    if not folders:
        read_manifest(folder)  # raises an error that explains what is wrong
        raise InputError(f"{folder} holds no dataset")
    return folders


def count(name: str, folder: Path, top: int) -> Statistics:
    """Compute the statistics of a dataset, with its `top` most frequent strategies."""
    dataset = shards.open_dataset(folder)
    manifest = dataset.manifest
    tokens = np.zeros(manifest.layout.capacity + 1, np.int64)
    strategies: Counter[tuple[int, ...]] = Counter()
    random_next = 0
    for number in range(len(manifest.shards)):
        rows = dataset.shard(number)
        lengths = rows.lengths
        bounds = rows.offsets
        random_next += int(rows.random_next.sum(dtype=np.int64))
        tokens += np.bincount(
            np.add.reduceat(lengths.astype(np.int64), bounds[:-1]), minlength=len(tokens)
        )
        strategies.update(dict(_strategies(lengths, bounds)))
    ranked = sorted(strategies.items(), key=lambda pair: (-pair[1], pair[0]))
    return Statistics(
        name=name,
        manifest=manifest,
        bytes=sum(shard.bytes for shard in manifest.shards),
        random_next=random_next if manifest.layout.next_sentence else None,
        row_tokens=tokens[1:],
        strategies=tuple(ranked[:top]),
        strategy_count=len(ranked),
    )


def samples(folder: Path, tokenizer: Tokenizer, count: int, seed: int) -> list[Sample]:
    """The first sequence of each of `count` random rows."""
    dataset = shards.open_dataset(folder)
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(len(dataset), min(count, len(dataset)), replace=False))
    sampled: list[Sample] = []
    for number in chosen.tolist():
        row = dataset.row(number)
        length = int(row.lengths[0])
        ids, masks = _masked(row, dataset.manifest, rng)
        label = None
        if dataset.manifest.layout.next_sentence:
            label = "random" if row.random_next[0] else "follows"
        positions = masks.positions[: masks.counts[0]]
        text = _sample_text(ids[:length], positions, masks.ids, tokenizer)
        sampled.append(Sample(number, length, label, text))
    return sampled


def _strategies(lengths: np.ndarray, bounds: np.ndarray) -> Iterator[Strategy]:
    """The lengths that share a row, and how often; rows of one depth at a time."""
    depths = np.diff(bounds)
    for depth in np.unique(depths).tolist():
        starts = bounds[:-1][depths == depth]
        in_row = np.sort(lengths[starts[:, None] + np.arange(depth)], axis=1)[:, ::-1]
        strategies, counts = np.unique(in_row, axis=0, return_counts=True)
        for strategy, count in zip(strategies.tolist(), counts.tolist(), strict=True):
            yield tuple(strategy), count


def _masked(row: Rows, manifest: Manifest, rng: np.random.Generator) -> tuple[np.ndarray, Masks]:
    """The row's tokens with masks, stored or drawn; positions of the first sequence begin at 0."""
    if row.masked_ids is not None and row.masked_positions is not None:
        return row.ids, Masks(row.masked_positions, row.masked_ids, np.asarray(row.masked_counts))
    return draw(row.ids, row.lengths, manifest.specials, manifest.masking, rng)


def _sample_text(
    ids: np.ndarray, positions: np.ndarray, originals: np.ndarray, tokenizer: Tokenizer
) -> str:
    """The text, with [visible token=original token] for each masked one."""
    pieces: list[str] = []
    begin = 0
    for position, original in zip(positions.tolist(), originals.tolist(), strict=False):
        pieces.append(tokenizer.decode(ids[begin:position], skip_special=False))
        visible = tokenizer.token(int(ids[position])).strip("[]")
        pieces.append(f"[{visible}={tokenizer.token(int(original))}]")
        begin = position + 1
    pieces.append(tokenizer.decode(ids[begin:], skip_special=False))
    return " ".join(piece for piece in pieces if piece)


def bins(counts: np.ndarray, number: int) -> list[tuple[int, int, int]]:
    """(shortest, longest, count) for about `number` ranges of lengths."""
    width = max(1, -(-len(counts) // number))
    ends = [min(begin + width, len(counts)) for begin in range(0, len(counts), width)]
    begins = [0, *ends[:-1]]
    sums = cumulative(counts)
    return [(b + 1, e, int(sums[e] - sums[b])) for b, e in zip(begins, ends, strict=True)]
