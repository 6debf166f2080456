"""Packing a whole dataset from the histogram of its lengths: the plan, and who goes where.

    counts = histogram_of(lengths, capacity=512)
    packing = plan(counts, capacity=512, max_per_pack=3)
    for indices in assign(packing, lengths, seed=0): ...

A plan knows lengths and counts, never sequences, so planning millions costs no more than planning
hundreds, and one plan serves every epoch: `assign` draws anew, by seed, which sequence of a length
takes which place. Packing offline this way needs all lengths beforehand; `packhorse.packing.online`
does not, and fills packs less well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index as whole_number

import numpy as np

from packhorse.errors import InputError
from packhorse.packing.optimum import EFFORT, optimum, simple_bound
from packhorse.packing.published import Pack, lpfhp, nnlshp, spfhp

PUBLISHED = {"spfhp": spfhp, "lpfhp": lpfhp, "nnlshp": nnlshp}
ALGORITHMS = ("optimum", *PUBLISHED)


@dataclass(frozen=True)
class Plan:
    """How to pack a histogram: which packs, how many of each, and how good that is."""

    capacity: int
    max_per_pack: int | None  # None: as many as fit
    algorithm: str
    lower_bound: int  # no plan whatsoever has fewer packs
    seconds: float = field(compare=False)
    histogram: tuple[int, ...] = field(repr=False)  # entry i counts the sequences of length i+1
    packs: tuple[Pack, ...] = field(repr=False)  # ((lengths, longest first), how many such packs)
    complete: bool = True  # False: more effort may find fewer packs or a better bound

    @property
    def sequences(self) -> int:
        return sum(self.histogram)

    @property
    def tokens(self) -> int:
        return sum(length * count for length, count in enumerate(self.histogram, start=1))

    @property
    def pack_count(self) -> int:
        return sum(count for _, count in self.packs)

    @property
    def efficiency(self) -> float:
        """The share of all places that hold a token."""
        return self.tokens / (self.pack_count * self.capacity)

    @property
    def factor(self) -> float:
        """Sequences a pack, on average: the speed-up over one sequence a row."""
        return self.sequences / self.pack_count

    @property
    def max_depth(self) -> int:
        """The most sequences that share a pack."""
        return max(len(lengths) for lengths, _ in self.packs)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which sequences share a pack: iterate, or index, to get the indices of one pack."""

    indices: np.ndarray  # every sequence once, pack after pack
    offsets: np.ndarray  # where each pack begins, and the end

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        pack = range(len(self))[pack]
        return self.indices[self.offsets[pack] : self.offsets[pack + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.indices[start:end] for start, end in pairwise(self.offsets.tolist()))


def histogram_of(lengths: Sequence[int] | np.ndarray, capacity: int | None = None) -> np.ndarray:
    """Count lengths: entry i of the answer is the number of sequences of i+1 tokens."""
    found = whole_numbers(lengths, "lengths")
    if not len(found) or found.min() < 1:
        raise InputError("lengths must be one or more numbers, none of them below 1")
    counts = np.bincount(found, minlength=(capacity or 0) + 1)[1:]
    return counts if capacity is None else cut(counts, capacity)


def plan(
    histogram: Sequence[int] | np.ndarray,
    capacity: int,
    max_per_pack: int | None = None,
    algorithm: str = "optimum",
    effort: int = EFFORT,
) -> Plan:
    """Pack the sequences counted in `histogram` (entry i: those of length i+1) into few packs.

    A pack holds `capacity` tokens and at most `max_per_pack` sequences. `algorithm` is "optimum",
    or for comparison one of the published "spfhp", "lpfhp" and "nnlshp". `effort` bounds the work
    of the optimum (linear programs solved), and `Plan.complete` says whether it was enough; the
    same histogram and effort give the same plan on every machine, at any load.
    """
    if algorithm not in ALGORITHMS:
        raise InputError(f"unknown packing algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
    capacity = at_least_one(capacity, "capacity")
    if max_per_pack is not None:
        max_per_pack = at_least_one(max_per_pack, "max_per_pack")
    effort = at_least_one(effort, "effort")
    start = time.perf_counter()
    counts = cut(checked(histogram), capacity)
    shortest = int(np.flatnonzero(counts)[0]) + 1
    depth = min(max_per_pack or capacity, capacity // shortest)
    if algorithm == "optimum":
        packs, bound, complete = optimum(counts, capacity, depth, effort)
    else:
        complete = True
        packs = PUBLISHED[algorithm](counts, capacity, depth)
        bound = simple_bound(counts, capacity, depth)
    verify(packs, counts, capacity, depth)
    seconds = time.perf_counter() - start
    table = tuple(counts.tolist())
    packs = tuple(sorted(packs, key=lambda pack: -pack[1]))
    return Plan(capacity, max_per_pack, algorithm, bound, seconds, table, packs, complete)


def assign(plan: Plan, lengths: Sequence[int] | np.ndarray, seed: int = 0) -> Assignment:
    """Give every sequence its place, at random among equal lengths, packs in random order."""
    found = histogram_of(lengths, plan.capacity)
    if found.tolist() != list(plan.histogram):
        raise InputError(
            f"these {found.sum()} lengths are not those of the plan ({plan.sequences} sequences);"
            " plan again with histogram_of(lengths, capacity)"
        )
    rng = np.random.default_rng(seed)
    sizes = np.array([len(held) for held, _ in plan.packs])
    kind = rng.permutation(np.repeat(np.arange(len(sizes)), [count for _, count in plan.packs]))
    offsets = np.concatenate([[0], np.cumsum(sizes[kind])])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes[kind])
    held = np.concatenate([held for held, _ in plan.packs])
    first = np.cumsum(sizes) - sizes  # where each kind's lengths begin in `held`
    places = held[np.repeat(first[kind], sizes[kind]) + within]
    shuffled = rng.permutation(len(places))
    indices = np.empty_like(shuffled)
    indices[by_length(places)] = shuffled[by_length(np.asarray(lengths)[shuffled])]
    return Assignment(indices, offsets)


def by_length(lengths: np.ndarray) -> np.ndarray:
    """A stable argsort; in the narrowest type, which numpy sorts by radix in linear time."""
    return np.argsort(lengths.astype(np.min_scalar_type(int(lengths.max()))), kind="stable")


def verify(packs: list[Pack], histogram: np.ndarray, capacity: int, depth: int) -> None:
    """Every sequence exactly once, no pack too long or too deep; anything else is our mistake."""
    placed = np.zeros_like(histogram)
    for lengths, count in packs:
        if count < 1 or not 0 < len(lengths) <= depth or sum(lengths) > capacity:
            raise RuntimeError(f"a packer made {count} packs of {lengths}, which cannot be")
        np.add.at(placed, np.array(lengths) - 1, count)
    if (placed != histogram).any():
        raise RuntimeError(f"a packer placed {placed.sum()} of {histogram.sum()} sequences")


def checked(histogram: Sequence[int] | np.ndarray) -> np.ndarray:
    counts = whole_numbers(histogram, "counts")
    if (counts < 0).any():
        raise InputError("a histogram's counts cannot be negative")
    if not counts.any():
        raise InputError("nothing to pack: the histogram counts no sequence")
    return counts


def cut(counts: np.ndarray, capacity: int) -> np.ndarray:
    """The histogram as exactly `capacity` entries; a sequence beyond that is the user's to cut."""
    if beyond := int(counts[capacity:].sum()):
        raise InputError(
            f"{beyond} of {counts.sum()} sequences are longer than the capacity, {capacity} tokens"
            f" (the longest has {np.flatnonzero(counts)[-1] + 1}); truncate or split them, or raise"
            " the capacity"
        )
    return np.pad(counts[:capacity], (0, max(0, capacity - len(counts))))


def whole_numbers(values: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            f"{what} must be a flat list of whole numbers, got {array.dtype} {array.shape}"
        )
    return array.astype(np.int64)


def at_least_one(value: int, name: str) -> int:
    try:
        number = whole_number(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, got {value!r}") from None
    if number < 1:
        raise InputError(f"{name} must be at least 1, got {number}")
    return number
