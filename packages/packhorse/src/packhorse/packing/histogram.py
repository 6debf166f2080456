"""Pack a whole dataset from its lengths: which sequences share a pack.

    packs = plan(lengths=lengths, capacity=512, max_per_pack=3)
    for indices in packs: ...                            # sequences of one pack, by index
    packs = assign(packs.plan, lengths, seed=epoch)      # other neighbors for the next epoch

Only the histogram of the lengths matters for the plan: a `PackingPlan` knows lengths and counts,
never sequences. So planning for millions of sequences costs no more than for hundreds, and one plan
serves every epoch: `assign` draws anew, by seed, which sequence of a length takes which place.
`plan(histogram=…)` plans without the sequences, from counts. Both need all lengths in advance;
`packhorse.packing.online` does not, but fills packs less well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index as as_integer
from typing import Any, overload

import numpy as np

from packhorse.errors import InputError
from packhorse.exports import renamed
from packhorse.packing.optimum import EFFORT, optimum, simple_bound
from packhorse.packing.published import Pack, lpfhp, nnlshp, spfhp

PUBLISHED = {"spfhp": spfhp, "lpfhp": lpfhp, "nnlshp": nnlshp}
ALGORITHMS = ("optimum", *PUBLISHED)


@dataclass(frozen=True)
class PackingPlan:
    """How to pack a histogram: which packs, how many of each, and how good the plan is."""

    capacity: int
    max_per_pack: int | None  # None: as many sequences as fit
    algorithm: str
    lower_bound: int  # proven: no plan at all has fewer packs
    seconds: float = field(compare=False)
    histogram: tuple[int, ...] = field(repr=False)  # entry i: number of sequences of length i+1
    packs: tuple[Pack, ...] = field(repr=False)  # (lengths, longest first; number of such packs)
    complete: bool = True  # False: more effort may give fewer packs or a better bound

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return sum(self.histogram)

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(length * count for length, count in enumerate(self.histogram, start=1))

    @property
    def pack_count(self) -> int:
        """The number of packs; equal ones count each."""
        return sum(count for _, count in self.packs)

    @property
    def efficiency(self) -> float:
        """The fraction of all places that hold a real token."""
        return self.tokens / (self.pack_count * self.capacity)

    @property
    def factor(self) -> float:
        """Average sequences per pack: the speed-up over one sequence per row."""
        return self.sequences / self.pack_count

    @property
    def max_depth(self) -> int:
        """The largest number of sequences in one pack."""
        return max(len(lengths) for lengths, _ in self.packs)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which sequences share a pack; iterate or index to get the sequence indices of a pack.

    It can be the `batch_sampler` of a torch DataLoader: then every pack is a batch.
    """

    indices: np.ndarray  # [sequences] every sequence once, pack after pack
    offsets: np.ndarray  # [packs+1] pack i is indices[offsets[i]:offsets[i+1]]
    plan: PackingPlan  # the figures, as `plan.efficiency`; for `assign` with another seed

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        pack = range(len(self))[pack]  # checks the bounds, and takes negative indices
        return self.indices[self.offsets[pack] : self.offsets[pack + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.indices[start:end] for start, end in pairwise(self.offsets.tolist()))


def histogram_of(lengths: Sequence[int] | np.ndarray, capacity: int | None = None) -> np.ndarray:
    """Count lengths: entry i of the result is the number of sequences of i+1 tokens.

    With `capacity` the result has that many entries, and a longer sequence is an error.
    """
    array = integer_array(lengths, "lengths")
    if not len(array):
        raise InputError("there are no lengths; pass one or more")
    if array.min() < 1:
        index = int(array.argmin())
        raise InputError(
            f"lengths[{index}] is {array[index]}, and none may be below 1; remove sequences without"
            " tokens"
        )
    if capacity is None:
        return np.bincount(array)[1:]
    check_fit(int((array > capacity).sum()), len(array), int(array.max()), capacity)
    return np.bincount(array, minlength=capacity + 1)[1:]


@overload
def plan(
    histogram: Sequence[int] | np.ndarray,
    capacity: int,
    max_per_pack: int | None = None,
    algorithm: str = "optimum",
    effort: int = EFFORT,
) -> PackingPlan: ...


@overload
def plan(
    *,
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    max_per_pack: int | None = None,
    algorithm: str = "optimum",
    effort: int = EFFORT,
) -> Assignment: ...


def plan(
    histogram: Sequence[int] | np.ndarray | None = None,
    capacity: int | None = None,
    max_per_pack: int | None = None,
    algorithm: str = "optimum",
    effort: int = EFFORT,
    *,
    lengths: Sequence[int] | np.ndarray | None = None,
) -> PackingPlan | Assignment:
    """Pack sequences, known by their lengths or by the histogram of these, into few packs.

    `plan(lengths=…)` takes the length of every sequence and returns an `Assignment`: the indices of
    the sequences in each pack, with the plan as its `plan`. `plan(histogram=…)` takes counts (entry
    i: sequences of length i+1) and returns the `PackingPlan` alone.

    A pack holds `capacity` tokens and at most `max_per_pack` sequences. `algorithm` is "optimum"
    or, for comparison, one of the published "spfhp", "lpfhp" and "nnlshp". `effort` limits the
    linear programs that "optimum" may solve, and `PackingPlan.complete` tells whether that was
    enough; the same histogram and effort give the same plan on every machine.
    """
    if capacity is None:
        raise InputError("plan needs capacity=, the number of tokens that a pack may hold")
    if algorithm not in ALGORITHMS:
        raise InputError(f"unknown packing algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
    capacity = at_least_one(capacity, "capacity")
    if max_per_pack is not None:
        max_per_pack = at_least_one(max_per_pack, "max_per_pack")
    effort = at_least_one(effort, "effort")
    start = time.perf_counter()
    if lengths is not None and histogram is not None:
        raise InputError("plan takes lengths= or histogram=, not both; leave one out")
    if lengths is not None:
        counts = histogram_of(lengths, capacity)
    elif histogram is not None:
        counts = fit_to_capacity(checked_counts(histogram), capacity)
    else:
        raise InputError(
            "plan needs lengths= (the length of every sequence) or histogram= (the number of"
            " sequences of each length)"
        )
    shortest = int(np.flatnonzero(counts)[0]) + 1
    # No pack can hold more sequences than this, whatever the limit; a smaller depth is faster.
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
    packing = PackingPlan(capacity, max_per_pack, algorithm, bound, seconds, table, packs, complete)
    return packing if lengths is None else assign(packing, lengths)


def assign(plan: PackingPlan, lengths: Sequence[int] | np.ndarray, seed: int = 0) -> Assignment:
    """Give every sequence a place, at random among equal lengths; the packs are shuffled too."""
    counts = histogram_of(lengths, plan.capacity)
    if counts.tolist() != list(plan.histogram):
        raise InputError(
            f"these {counts.sum()} lengths are not those of the plan ({plan.sequences} sequences);"
            " plan again with plan(lengths=lengths, capacity=capacity)"
        )
    rng = np.random.default_rng(seed)
    # `plan.packs` holds kinds of packs; repeat each kind as often as it is used and shuffle.
    sizes = np.array([len(pack) for pack, _ in plan.packs])  # [kinds] sequences per pack
    kind = rng.permutation(np.repeat(np.arange(len(sizes)), [count for _, count in plan.packs]))
    offsets = np.concatenate([[0], np.cumsum(sizes[kind])])
    # The length that each place asks for, pack after pack: [sequences].
    within_pack = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], sizes[kind])
    pack_lengths = np.concatenate([pack for pack, _ in plan.packs])
    first = np.cumsum(sizes) - sizes  # where each kind begins in `pack_lengths`
    places = pack_lengths[np.repeat(first[kind], sizes[kind]) + within_pack]
    # Sort places and shuffled sequences by length: the i-th of one takes the i-th of the other.
    shuffled = rng.permutation(len(places))
    indices = np.empty_like(shuffled)
    indices[by_length(places)] = shuffled[by_length(np.asarray(lengths)[shuffled])]
    return Assignment(indices, offsets, plan)


def by_length(lengths: np.ndarray) -> np.ndarray:
    """A stable argsort, in the narrowest type: numpy sorts 16 bits by radix, in linear time."""
    return np.argsort(lengths.astype(np.min_scalar_type(int(lengths.max()))), kind="stable")


def verify(packs: list[Pack], histogram: np.ndarray, capacity: int, depth: int) -> None:
    """Check that every sequence is placed exactly once and no pack is too long or too deep.

    A failure is a bug in a packer, not a mistake of the user: hence RuntimeError.
    """
    placed = np.zeros_like(histogram)
    for lengths, count in packs:
        if count < 1 or not 0 < len(lengths) <= depth or sum(lengths) > capacity:
            raise RuntimeError(f"a packer made {count} packs of {lengths}, which is not allowed")
        np.add.at(placed, np.array(lengths) - 1, count)
    if (placed != histogram).any():
        raise RuntimeError(f"a packer placed {placed.sum()} of {histogram.sum()} sequences")


def checked_counts(histogram: Sequence[int] | np.ndarray) -> np.ndarray:
    """The histogram as an array of counts, none of them negative and not all zero."""
    counts = integer_array(histogram, "counts")
    if (counts < 0).any():
        raise InputError("a histogram's counts cannot be negative")
    if not counts.any():
        raise InputError("nothing to pack: the histogram counts no sequence")
    return counts


def fit_to_capacity(counts: np.ndarray, capacity: int) -> np.ndarray:
    """The histogram as exactly `capacity` entries; raises if a sequence is longer than that."""
    longest = int(np.flatnonzero(counts)[-1]) + 1
    check_fit(int(counts[capacity:].sum()), int(counts.sum()), longest, capacity)
    return np.pad(counts[:capacity], (0, max(0, capacity - len(counts))))


def check_fit(too_long: int, sequences: int, longest: int, capacity: int) -> None:
    """Raise if any sequence is longer than `capacity`."""
    if too_long:
        raise InputError(
            f"{too_long} of {sequences} sequences are longer than the capacity, {capacity} tokens"
            f" (the longest has {longest}); truncate or split them, or raise the capacity"
        )


def integer_array(values: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """`values` as a flat int64 array; `name` is for the error message."""
    try:
        array = np.asarray(values)
    except ValueError:  # nested lists of different lengths
        raise InputError(f"{name} must be a flat list of whole numbers, got nested lists") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            f"{name} must be a flat list of whole numbers, got {array.dtype} {array.shape}"
        )
    return array.astype(np.int64)


def at_least_one(value: int, name: str) -> int:
    """`value` as an int of at least 1; `name` is for the error message."""
    try:
        number = as_integer(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, got {value!r}") from None
    if number < 1:
        raise InputError(f"{name} must be at least 1, got {number}")
    return number


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
