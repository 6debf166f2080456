"""Parts of a corpus to packed rows: groups of parts, a plan for each, rows filled shard by shard.

A group is a run of consecutive parts that together hold about `GROUP` sequences; its lengths are
planned by `packing.optimum` and its sequences given places by seed. Groups make memory flat for any
size of corpus and let planning run in parallel; at a million sequences they cost less than 0.01 %
of the efficiency that one plan for all would have. A shard is filled from its group's parts one
after the other, each mapped and read from front to back, so that a worker holds one shard and one
part, never a group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packhorse.atomic import new_file
from packhorse.data.corpus import arrays
from packhorse.data.packed.examples import Masks, Sequences
from packhorse.data.packed.manifest import ShardInfo
from packhorse.data.packed.packs import Layout, Rows, cumulative, runs
from packhorse.data.packed.shards import write_shard
from packhorse.packing.histogram import PackingPlan, assign, histogram_of, verify
from packhorse.packing.optimum import optimum

GROUP = 1 << 20  # sequences

A_SEQUENCE = ("lengths", "first", "random_next")
MASKED = ("masked_positions", "masked_ids")


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive parts that are packed together, how many sequences each has, and where to."""

    parts: tuple[Path, ...]
    counts: tuple[int, ...]
    plan: Path
    seed: int


def columns(sequences: Sequences) -> dict[str, np.ndarray]:
    """Sequences as arrays with names, for a file."""
    s = sequences
    named = {"ids": s.ids, "lengths": s.lengths, "first": s.first}
    named["random_next"] = s.random_next.astype(np.uint8)
    if s.masked is not None:
        masks = (s.masked.positions, s.masked.ids, s.masked.counts)
        named |= dict(zip((*MASKED, "masked_counts"), masks, strict=True))
    return named


def grouped(
    parts: Sequence[Path],
    counts: Sequence[int],
    plan: Callable[[int], Path],
    seed: int,
    most: int,
) -> list[Group]:
    """Runs of parts of about equal size, none of them much over `most` sequences."""
    before = np.cumsum(counts) - counts
    total = int(sum(counts))
    runs = -(-total // most)
    number = before * runs // max(total, 1)
    found = []
    for run in range(runs):
        inside = [i for i in np.flatnonzero(number == run).tolist() if counts[i]]
        if inside:
            chosen = tuple(parts[i] for i in inside), tuple(int(counts[i]) for i in inside)
            found.append(Group(*chosen, plan(len(found)), _seed(seed, len(found))))
    return found


def plan_group(group: Group, capacity: int, max_per_pack: int | None) -> dict[str, Any]:
    """Decide who shares a row with whom; what came of it: rows, lower bound, sequences, tokens."""
    if group.plan.exists():
        return arrays.read(group.plan)[1]
    lengths = np.concatenate([arrays.read(part)[0]["lengths"] for part in group.parts])
    packing = _plan(histogram_of(lengths, capacity), capacity, max_per_pack)
    placed = assign(packing, lengths, group.seed)
    facts = {
        "rows": packing.pack_count,
        "lower_bound": packing.lower_bound,
        "sequences": packing.sequences,
        "tokens": packing.tokens,
        "histogram": list(packing.histogram),
    }
    places = {"indices": placed.indices, "offsets": placed.offsets}
    arrays.write(group.plan, {name: a.astype(np.int32) for name, a in places.items()}, facts)
    return facts


def pack(group: Group, rows: range, layout: Layout, shard: Path, receipt: Path) -> ShardInfo:
    """Write these rows of a planned group as a shard; the receipt says that it is done."""
    if shard.exists() and receipt.exists():
        return ShardInfo(**json.loads(receipt.read_text("utf-8")))
    places = arrays.read(group.plan)[0]
    offsets = places["offsets"][rows.start : rows.stop + 1]
    chosen = places["indices"][offsets[0] : offsets[-1]]
    sequences = gather(group.parts, group.counts, chosen)
    info = write_shard(shard, layout, Rows.of(sequences, offsets - offsets[0]))
    with new_file(receipt) as file:
        file.write(json.dumps(asdict(info)).encode())
    return info


def gather(parts: Sequence[Path], counts: Sequence[int], chosen: np.ndarray) -> Sequences:
    """The chosen sequences, numbered through all the parts, in the order of the choice."""
    visits = [*_visits(parts, counts, chosen)]
    sample = arrays.read(parts[0])[0]
    held = [name for name in (*A_SEQUENCE, "masked_counts") if name in sample]
    one = {name: np.empty(len(chosen), sample[name].dtype) for name in held}
    for path, at, to in visits:
        there = arrays.read(path)[0]
        for name in held:
            one[name][to] = there[name][at]
    kinds = [("lengths", ("ids",)), ("masked_counts", MASKED)][: 1 + ("masked_counts" in sample)]
    many = {
        name: np.empty(int(one[sizes].sum(dtype=np.int64)), sample[name].dtype)
        for sizes, names in kinds
        for name in names
    }
    for path, at, to in visits:
        there = arrays.read(path)[0]
        for sizes, names in kinds:
            taken = one[sizes][to]
            source = runs(cumulative(there[sizes])[at], taken)
            target = runs(cumulative(one[sizes])[to], taken)
            for name in names:
                many[name][target] = there[name][source]
    masks = None
    if "masked_counts" in one:
        masks = Masks(many["masked_positions"], many["masked_ids"], one["masked_counts"])
    random_next = one["random_next"].astype(bool)
    return Sequences(many["ids"], one["lengths"], one["first"], random_next, masks)


def _visits(
    parts: Sequence[Path], counts: Sequence[int], chosen: np.ndarray
) -> Iterator[tuple[Path, np.ndarray, np.ndarray]]:
    """Each part that is needed: which of its sequences, and where in the answer they go."""
    order = np.argsort(chosen, kind="stable")
    starts = np.cumsum(counts) - counts
    bounds = np.searchsorted(chosen[order], [*starts, sum(counts)])
    for path, start, begin, end in zip(parts, starts, bounds, bounds[1:], strict=False):
        if begin < end:
            to = order[begin:end]
            yield path, chosen[to] - start, to


def _plan(counts: np.ndarray, capacity: int, max_per_pack: int | None) -> PackingPlan:
    shortest = int(np.flatnonzero(counts)[0]) + 1
    depth = min(max_per_pack or capacity, capacity // shortest)
    packs, bound, complete = optimum(counts, capacity, depth)
    verify(packs, counts, capacity, depth)
    histogram = tuple(counts.tolist())
    return PackingPlan(
        capacity, max_per_pack, "optimum", bound, 0.0, histogram, tuple(packs), complete
    )


def _seed(*numbers: int) -> int:
    """One number from several, unlike for unlike ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
