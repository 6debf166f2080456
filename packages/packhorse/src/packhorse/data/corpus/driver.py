"""The one driver of `data build` and `data import`: claim OUT, read, plan, write shards, publish.

    result = run_job(CorpusJob(out, made_by, ...), make)   # `make` fills the work folder

Both commands differ only in how sources become *parts* (files of sequences, see `arrays`). The rest
is here: `read_parts` reads in parallel and skips what an earlier run finished, `plan_rows` decides
which sequences share a row, `write_dataset` writes shards and the manifest. Each step is a plain
function that makes one file, whole or not at all, from files on disk. So a run can be killed
anywhere and started again with any number of workers, and the result is the same byte for byte.
The price is disk space: parts and shards exist side by side until the end.

A group is a run of consecutive parts that together hold about `GROUP` sequences. Its lengths are
planned by `packing.optimum`, and the seed decides which sequence takes which place. Groups keep
memory flat for a corpus of any size and let planning run in parallel; at a million sequences they
cost less than 0.01 % of the efficiency of one plan for everything. A shard is filled from its parts
one after the other, each mapped and read from front to back, so a worker holds one shard and one
part, never a group.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packhorse.atomic import new_file
from packhorse.data.corpus import arrays
from packhorse.data.corpus.workers import RESUME_HINT, Engine, RunTasks
from packhorse.data.corpus.workfolder import claim, publish
from packhorse.data.packed.examples import Masks, Sequences
from packhorse.data.packed.manifest import Manifest, ShardInfo, read_manifest, write_manifest
from packhorse.data.packed.masking import Recipe, Specials
from packhorse.data.packed.packs import RowLayout, Rows, cumulative, index_ranges
from packhorse.data.packed.shards import shard_name, write_shard
from packhorse.errors import InputError
from packhorse.packing.histogram import PackingPlan, assign, histogram_of, verify
from packhorse.packing.optimum import optimum
from packhorse.tokens import files as tokenizer_files

GROUP = 1 << 20  # sequences
TOKENIZER = "tokenizer"  # folder with a copy of the tokenizer's files

SEQUENCE_ARRAYS = ("lengths", "first", "random_next")  # one value per sequence
MASK_ARRAYS = ("masked_positions", "masked_ids")  # one value per masked token

ReportProgress = Callable[[str, int, int], None]  # the stage, how much of it is done, out of what


# The run as a whole ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CorpusJob:
    """What one run makes and where; the two commands fill it in from their options."""

    out: Path
    made_by: dict[str, Any]  # everything that decides the bytes of the result
    begun_by: dict[str, Any]  # the part of `made_by` that decides whether work can be continued
    stamps: Sequence[str]  # of the sources, see `workfolder.file_stamps`
    overwrite: bool
    tokenizer: Path | None
    has_eval: bool
    engine: Callable[[Path], Engine]  # from the work folder, which remote workers must share


@dataclass(frozen=True, slots=True)
class CorpusResult:
    """The finished datasets in OUT."""

    train: Manifest
    eval: Manifest | None
    already: bool = False  # an earlier run with the same options made them


def run_job(job: CorpusJob, make: Callable[[Path, RunTasks], Path | None]) -> CorpusResult:
    """Make the datasets, or what is missing of them, and move them to OUT.

    `make(folder, run)` fills the work folder with `train` and, if asked for, `eval`; it returns the
    folder that holds `eval` where that is not the work folder itself.
    """
    claimed = claim(job.out, job.made_by, job.overwrite, job.begun_by, job.stamps)
    with _remove_if_empty(job.out), claimed as folder:
        if folder is not None:
            folder = folder.absolute()  # workers may have another working directory
            with _mention_resuming(), job.engine(folder) as run:
                if job.tokenizer is not None:
                    for name, path in tokenizer_files.all_files(job.tokenizer).items():
                        copy_file(path, folder / TOKENIZER / name)
                eval_home = make(folder, run)
                publish(folder, job.out, eval_home)
        eval = read_manifest(job.out / "eval") if job.has_eval else None
        return CorpusResult(read_manifest(job.out / "train"), eval, already=folder is None)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, whole or not at all, into a folder that is made if need be."""
    target.parent.mkdir(exist_ok=True)
    with source.open("rb") as original, new_file(target) as copy:
        shutil.copyfileobj(original, copy)


@contextmanager
def _mention_resuming() -> Iterator[None]:
    """Tell the user, after an error of the disk, that the run can be continued."""
    try:
        yield
    except InputError as error:
        if not isinstance(error.__cause__, OSError) or RESUME_HINT in str(error):
            raise
        raise InputError(f"{error}; {RESUME_HINT}") from error


@contextmanager
def _remove_if_empty(out: Path) -> Iterator[None]:
    """After an error, remove an empty OUT that did not exist before."""
    existed = out.exists()
    try:
        yield
    except InputError:
        if not existed:
            with suppress(OSError):  # it holds work that can be continued
                out.rmdir()
        raise


# Reading -----------------------------------------------------------------------------------------


class PartTask(NamedTuple):
    """A unit of reading: arguments for a worker, or the result of an earlier run."""

    size: int  # bytes of the sources
    arguments: tuple[Any, ...]
    finished: Any = None


def read_parts(
    run: RunTasks,
    function: Callable[..., Any],
    tasks: Iterable[PartTask],
    on_result: Callable[[int, PartTask, Any], None],
) -> list[Any]:
    """Results of `function` for all tasks, in their order; finished tasks are not run again.

    `on_result(number, task, result)` is called as results arrive. Those of finished tasks arrive as
    soon as the tasks are enumerated, so a resumed run reports at once how far it is.
    """
    results: dict[int, Any] = {}
    pending: deque[tuple[int, PartTask]] = deque()

    def unfinished() -> Iterator[tuple[Any, ...]]:
        for number, task in enumerate(tasks):
            if task.finished is None:
                pending.append((number, task))
                yield task.arguments
            else:
                results[number] = task.finished
                on_result(number, task, task.finished)

    for result in run(function, unfinished()):
        number, task = pending.popleft()
        results[number] = result
        on_result(number, task, result)
    return [results[number] for number in range(len(results))]


# Planning ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Consecutive parts that are packed together, and the number of sequences in each.

    plan: the file that says which sequences make a row. None: the only part holds finished rows,
    which begin at its `offsets`.
    """

    parts: tuple[Path, ...]
    counts: tuple[int, ...]
    plan: Path | None
    seed: int = 0


GroupPlans = list[tuple[PartGroup, dict[str, Any]]]  # groups, and what `plan_group` reports


def plan_rows(
    run: RunTasks,
    groups: Sequence[PartGroup],
    capacity: int,
    max_per_pack: int | None,
    report: Callable[[int, int], None],
) -> GroupPlans:
    """Plan all groups in parallel; `report` gets the number of groups done and of all."""
    plans: GroupPlans = []
    items = ((group, capacity, max_per_pack) for group in groups)
    for group, facts in zip(groups, run(plan_group, items), strict=True):
        plans.append((group, facts))
        report(len(plans), len(groups))
    return plans


def make_groups(
    parts: Sequence[Path],
    counts: Sequence[int],
    plan_path: Callable[[int], Path],
    seed: int,
    largest: int,
) -> list[PartGroup]:
    """Divide parts into groups of about equal size, none of them much over `largest` sequences."""
    before = np.cumsum(counts) - counts
    total = int(sum(counts))
    number_of_groups = -(-total // largest)
    group_of_part = before * number_of_groups // max(total, 1)
    groups: list[PartGroup] = []
    for number in range(number_of_groups):
        members = [i for i in np.flatnonzero(group_of_part == number).tolist() if counts[i]]
        if members:
            groups.append(
                PartGroup(
                    parts=tuple(parts[i] for i in members),
                    counts=tuple(int(counts[i]) for i in members),
                    plan=plan_path(len(groups)),
                    seed=_derive_seed(seed, len(groups)),
                )
            )
    return groups


def plan_group(group: PartGroup, capacity: int, max_per_pack: int | None) -> dict[str, Any]:
    """Decide which sequences share a row; return the numbers of rows, sequences and tokens."""
    if group.plan is None:
        raise ValueError("a group of finished rows needs no plan")
    if group.plan.exists():
        return arrays.read(group.plan)[1]
    lengths = np.concatenate([arrays.read(part)[0]["lengths"] for part in group.parts])
    packing = _pack_lengths(histogram_of(lengths, capacity), capacity, max_per_pack)
    assignment = assign(packing, lengths, group.seed)
    facts = {
        "rows": packing.pack_count,
        "lower_bound": packing.lower_bound,
        "sequences": packing.sequences,
        "tokens": packing.tokens,
    }
    indices = {"indices": assignment.indices, "offsets": assignment.offsets}
    arrays.write(group.plan, {name: a.astype(np.int32) for name, a in indices.items()}, facts)
    return facts


def _pack_lengths(counts: np.ndarray, capacity: int, max_per_pack: int | None) -> PackingPlan:
    shortest = int(np.flatnonzero(counts)[0]) + 1
    depth = min(max_per_pack or capacity, capacity // shortest)
    packs, bound, complete = optimum(counts, capacity, depth)
    verify(packs, counts, capacity, depth)
    histogram = tuple(counts.tolist())
    return PackingPlan(
        capacity, max_per_pack, "optimum", bound, 0.0, histogram, tuple(packs), complete
    )


def _derive_seed(*numbers: int) -> int:
    """One seed from several numbers; different numbers give different seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


# Writing -----------------------------------------------------------------------------------------


class RowRange(NamedTuple):
    """Some rows of a group, for one shard."""

    group: PartGroup
    rows: range


class WrittenShard(NamedTuple):
    """A shard on disk, and how many of its sequences have each length (entry i: length i+1)."""

    info: ShardInfo
    histogram: list[int]


def cut_shards(groups: Iterable[tuple[PartGroup, int]], rows_in_shard: int) -> list[list[RowRange]]:
    """Divide the rows of groups, given with their number, into shards; one may span groups."""
    shards: list[list[RowRange]] = []
    room = 0
    for group, rows in groups:
        begin = 0
        while begin < rows:
            if not room:
                shards.append([])
                room = rows_in_shard
            end = min(begin + room, rows)
            shards[-1].append(RowRange(group, range(begin, end)))
            room -= end - begin
            begin = end
    return shards


@dataclass(frozen=True, slots=True)
class DatasetSplit:
    """One of the two datasets, as `write_dataset` needs it."""

    name: str  # "train" or "eval"
    home: Path  # the folder in which it is made
    layout: RowLayout
    specials: Specials
    shards: list[list[RowRange]]
    config: Mapping[str, Any]  # for the manifest: how it was made, what the sources held
    masking: Recipe


def write_dataset(run: RunTasks, split: DatasetSplit, report: Callable[[int, int], None]) -> None:
    """Write all shards in parallel, then the manifest that makes the folder a dataset."""
    target = split.home / split.name
    target.mkdir(exist_ok=True)
    items = (
        (
            row_ranges,
            split.layout,
            target / shard_name(number),
            split.home / f"{split.name}-{number:05d}-shard.json",
        )
        for number, row_ranges in enumerate(split.shards)
    )
    infos: list[ShardInfo] = []
    histogram = np.zeros(split.layout.capacity, np.int64)
    for written in run(write_rows, items):
        infos.append(written.info)
        histogram += written.histogram
        report(len(infos), len(split.shards))
    manifest = Manifest(
        split.layout,
        split.specials,
        tuple(histogram.tolist()),
        tuple(infos),
        dict(split.config),
        split.masking,
    )
    write_manifest(target, manifest)


def write_rows(
    row_ranges: Sequence[RowRange], layout: RowLayout, shard: Path, receipt: Path
) -> WrittenShard:
    """Write rows as one shard, unless an earlier run did; the receipt proves that it did."""
    if shard.exists() and receipt.exists():
        facts = json.loads(receipt.read_text("utf-8"))
        return WrittenShard(ShardInfo(**facts["info"]), facts["histogram"])
    ranges = [read_row_range(*row_range) for row_range in row_ranges]
    rows = ranges[0] if len(ranges) == 1 else Rows.join(ranges)
    info = write_shard(shard, layout, rows)
    histogram = np.bincount(rows.lengths, minlength=layout.capacity + 1)[1:].tolist()
    with new_file(receipt) as file:
        file.write(json.dumps({"info": asdict(info), "histogram": histogram}).encode())
    return WrittenShard(info, histogram)


def read_row_range(group: PartGroup, rows: range) -> Rows:
    """Collect the sequences of these rows from the group's parts."""
    if group.plan is None:
        part = arrays.read(group.parts[0])[0]
        offsets = part["offsets"][rows.start : rows.stop + 1]
        sequences = _slice_part(part, int(offsets[0]), int(offsets[-1]))
    else:
        plan = arrays.read(group.plan)[0]
        offsets = plan["offsets"][rows.start : rows.stop + 1]
        indices = plan["indices"][offsets[0] : offsets[-1]]
        sequences = gather(group.parts, group.counts, indices)
    return Rows.of(sequences, offsets - offsets[0])


# Parts -------------------------------------------------------------------------------------------


def sequence_arrays(sequences: Sequences) -> dict[str, np.ndarray]:
    """Sequences as named arrays, for the file of a part."""
    named = {
        "ids": sequences.ids,
        "lengths": sequences.lengths,
        "first": sequences.first,
        "random_next": sequences.random_next.astype(np.uint8),
    }
    masks = sequences.masked
    if masks is not None:
        named["masked_positions"] = masks.positions
        named["masked_ids"] = masks.ids
        named["masked_counts"] = masks.counts
    return named


def _slice_part(part: Mapping[str, np.ndarray], begin: int, end: int) -> Sequences:
    """Consecutive sequences of a part, as views of its file."""
    tokens = cumulative(part["lengths"])
    masks = None
    if "masked_counts" in part:
        masked = cumulative(part["masked_counts"])
        masks = Masks(
            part["masked_positions"][masked[begin] : masked[end]],
            part["masked_ids"][masked[begin] : masked[end]],
            part["masked_counts"][begin:end],
        )
    return Sequences(
        part["ids"][tokens[begin] : tokens[end]],
        part["lengths"][begin:end],
        part["first"][begin:end],
        part["random_next"][begin:end].astype(bool),
        masks,
    )


def gather(parts: Sequence[Path], counts: Sequence[int], indices: np.ndarray) -> Sequences:
    """Sequences by their index, counted through all parts, in the order of `indices`.

    Goes over the parts twice, first for the sizes and then for the tokens, so that the result is
    allocated once and only one part is mapped at a time.
    """
    visits = list(_visits(parts, counts, indices))
    sample = arrays.read(parts[0])[0]
    has_masks = "masked_counts" in sample
    names = [*SEQUENCE_ARRAYS, "masked_counts"] if has_masks else list(SEQUENCE_ARRAYS)
    # One value per sequence.
    fixed = {name: np.empty(len(indices), sample[name].dtype) for name in names}
    for path, source, target in visits:
        part = arrays.read(path)[0]
        for name in names:
            fixed[name][target] = part[name][source]
    # Several values per sequence: as many as the array of sizes says.
    ragged_names: dict[str, tuple[str, ...]] = {"lengths": ("ids",)}
    if has_masks:
        ragged_names["masked_counts"] = MASK_ARRAYS
    ragged = {
        name: np.empty(int(fixed[sizes].sum(dtype=np.int64)), sample[name].dtype)
        for sizes, names in ragged_names.items()
        for name in names
    }
    for path, source, target in visits:
        part = arrays.read(path)[0]
        for sizes, names in ragged_names.items():
            taken = fixed[sizes][target]
            source_values = index_ranges(cumulative(part[sizes])[source], taken)
            target_values = index_ranges(cumulative(fixed[sizes])[target], taken)
            for name in names:
                ragged[name][target_values] = part[name][source_values]
    masks = None
    if has_masks:
        masks = Masks(ragged["masked_positions"], ragged["masked_ids"], fixed["masked_counts"])
    random_next = fixed["random_next"].astype(bool)
    return Sequences(ragged["ids"], fixed["lengths"], fixed["first"], random_next, masks)


def _visits(
    parts: Sequence[Path], counts: Sequence[int], indices: np.ndarray
) -> Iterator[tuple[Path, np.ndarray, np.ndarray]]:
    """For each part in use: which of its sequences are taken, and where in the result they go."""
    order = np.argsort(indices, kind="stable")
    starts = np.cumsum(counts) - counts
    bounds = np.searchsorted(indices[order], [*starts, sum(counts)])
    for path, start, begin, end in zip(parts, starts, bounds, bounds[1:], strict=False):
        if begin < end:
            target = order[begin:end]
            yield path, indices[target] - start, target
