"""What a run is fed: the data of a task as steps, and as batches to evaluate on.

A step is a global batch: the next so many rows of packed shards, or the next so many examples of a
task, of which each rank gets its share, in as many parts as memory asks for. Both kinds of loader
are streams with a cursor; what differs between them is told here once, so that the loop knows one
kind of data. Shuffled epochs follow each other without a seam: every step is a full batch.

Shapes: T tokens, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packhorse import executable
from packhorse.data.order import permuted
from packhorse.data.packed import loader, shards
from packhorse.data.packed.masking import Recipe
from packhorse.data.tasks import targets
from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.train.settings import Settings

EVAL_SEED = 12345  # of the masks that are guessed in every evaluation, whatever the run's seed
USUAL_LENGTH = 128  # a slot for so many tokens, at least: empty ones cost attention time

Cursor = Mapping[str, Any]
Batch = Any  # of `data.packed.loader` or `data.tasks.targets`


@dataclass(frozen=True, slots=True)
class Step:
    """This rank's batches of a global batch, on the host, and its place in the stream."""

    batches: list[Batch]
    before: Cursor | None  # None: the very beginning
    behind: Cursor

    @property
    def sequences(self) -> int:
        """That are learned from; a pair counts once."""
        return sum(_examples(batch) for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Real ones."""
        return sum(batch.tokens for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Shape:
    """What batches are filled up to, at least, where a compiled model is to meet few shapes."""

    tokens: int = 0  # 0: the next bucket
    slots: int = 0  # for sequences
    longest: int = 1  # what the longest sequence counts as


@dataclass(frozen=True, slots=True)
class Feed:
    """Made by `pretraining` or `examples`."""

    stream: Callable[[Cursor | None], Iterator[Batch]]
    evaluate_on: Callable[[], Iterable[Batch]] | None
    naming: Callable[[Step], Callable[[], str]]  # which rows or examples it has, for a message
    batch: float  # sequences a step, on average
    epoch: float  # steps of one pass over the data
    tokens: float  # of a sequence, on average
    squares: float  # of its length, on average
    parts: int  # batches a rank's share of a step is divided into
    shape: Shape = Shape()
    eval_shape: Shape = Shape()
    data: tuple[str, ...] = ()  # the fingerprints that its cursors may have

    def steps(self, cursor: Cursor | None) -> Iterator[Step]:
        """From the cursor on, without end."""
        batches: list[Batch] = []
        before, number = cursor, cursor["batch"] if cursor else 0
        for batch in self.stream(cursor):
            batches.append(batch)
            # The last part of a step is the one whose cursor is behind it.
            if batch.cursor["batch"] > number:
                yield Step(batches, before, batch.cursor)
                batches, before, number = [], batch.cursor, batch.cursor["batch"]


def pretraining(
    settings: Settings, rows: int, micro_tokens: int, rank: int = 0, world: int = 1
) -> Feed:
    """Packed rows, `rows` a step, with masks drawn anew unless they are stored."""
    dataset = open_dataset(settings.train, "train")
    manifest = dataset.manifest
    share, longest = math.ceil(rows / world), manifest.layout.capacity
    at_once = max(1, micro_tokens // longest)
    parts = math.ceil(share / at_once)
    made = {"masking": masking(settings, dataset), "rank": rank, "world": world}
    how = {**made, "rows": rows, "seed": settings.seed, "parts": parts, "balanced": world > 1}
    held_out = evaluation_dataset(settings)
    once = {**made, "rows": at_once * world, "seed": EVAL_SEED, "shuffle": False, "epochs": 1}
    if held_out is not None:
        once["masking"] = masking(settings, held_out)

    loader.Loader(dataset, **how)  # refuses at once what would be refused at the first step
    return Feed(
        stream=lambda cursor: iter(loader.Loader(dataset, **how, cursor=cursor)),
        evaluate_on=(lambda: loader.Loader(held_out, **once)) if held_out is not None else None,
        naming=lambda step: partial(_rows, step.before, step.behind, dataset, settings.seed),
        batch=rows * manifest.sequences / manifest.rows,
        epoch=manifest.rows / rows,
        tokens=manifest.tokens / manifest.sequences,
        squares=_mean_square(manifest.histogram),
        parts=parts,
        shape=Shape(math.ceil(share / parts) * manifest.layout.capacity, longest=longest),
        eval_shape=Shape(longest=longest),
        data=(dataset.fingerprint,),
    )


def examples(
    task: targets.TrainingTask,
    held_out: targets.TrainingTask | None,
    settings: Settings,
    micro_tokens: int,
    rank: int = 0,
    world: int = 1,
) -> Feed:
    """Labelled examples, `settings.batch` a step."""
    lengths = [len(s.ids) for example in task.examples for s in example.sequences]
    mean = sum(lengths) / max(1, len(task.examples))
    most_long = max(_longest(each) for each in (task, held_out) if each)
    row = (settings.max_length or most_long) if settings.layout == "padded" else 0
    computed = row * len(lengths) / max(1, len(task.examples)) if row else mean
    most = max(1, settings.batch // world)
    parts = min(most, math.ceil(settings.batch * computed / world / micro_tokens))
    if task.problem == "contrastive" and not settings.micro_tokens:
        parts = 1  # what a pair is told from is its batch: no other may be made by itself
    shared: dict[str, Any] = {"rank": rank, "world": world, "row": row}
    how: dict[str, Any] = {
        **shared,
        "examples": settings.batch,
        "seed": settings.seed,
        "parts": parts,
    }
    at_once = max(1, int(micro_tokens / computed)) * world
    if task.problem == "contrastive":
        at_once = settings.batch
    once: dict[str, Any] = {**shared, "examples": at_once, "shuffle": False, "epochs": 1}
    targets.TaskLoader(task, **how)  # refuses at once what would be refused at the first step
    return Feed(
        stream=lambda cursor: iter(targets.TaskLoader(task, **how, cursor=cursor)),
        evaluate_on=(lambda: targets.TaskLoader(held_out, **once)) if held_out else None,
        naming=lambda step: partial(_numbers, [n for b in step.batches for n in b.numbers]),
        batch=settings.batch,
        epoch=len(task.examples) / settings.batch,
        tokens=mean,
        squares=sum(length**2 for length in lengths) / len(task.examples),
        parts=parts,
        shape=Shape(slots=_slots(task, settings.batch / world / parts), longest=most_long),
        eval_shape=Shape(slots=_slots(task, at_once / world), longest=most_long),
        data=task.fingerprints,
    )


def _longest(task: targets.TrainingTask) -> int:
    return max((len(s.ids) for example in task.examples for s in example.sequences), default=1)


def _slots(task: targets.TrainingTask, examples: float) -> int:
    """For so many examples and for filler: a bucket's is a quarter of its tokens at most."""
    each = max((len(example.sequences) for example in task.examples), default=1)
    sequences = math.ceil(examples) * each
    return sequences + sequences // 4 + 1


def _mean_square(histogram: Sequence[int]) -> float:
    """Of the lengths that it counts, from 1 on."""
    counts = np.array(histogram, np.float64)
    return float((counts * np.arange(1, len(counts) + 1) ** 2).sum() / counts.sum())


def open_dataset(folder: str, part: str) -> shards.Dataset:
    """A dataset by its folder, or by the folder that `packhorse data build` made."""
    if not folder:
        raise InputError(f"{part} names no data; make some with `packhorse data build`")
    path = Path(folder)
    if not path.exists():
        target = path.parent if path.name == part else path
        how = f"`packhorse data build SOURCES {target} --tokenizer VOCAB`"
        held = ", with --eval-hashes what is held out too" if part == "eval" else ""
        raise InputError(f"{part} is {path}, which does not exist; {how} makes it{held}")
    inner = path / part
    return shards.open(inner if (inner / "manifest.json").is_file() else path)


def evaluation_dataset(settings: Settings) -> shards.Dataset | None:
    """What is held out: as named, or what lies beside the training rows."""
    if settings.eval:
        return open_dataset(settings.eval, "eval")
    path = Path(settings.train)
    for beside in (path / "eval", path.parent / "eval"):
        if beside != path and (beside / "manifest.json").is_file():
            return shards.open(beside)
    return None


def masking(settings: Settings, dataset: shards.Dataset) -> Recipe | None:
    """As the data was built to be masked, but for what is set; None: its masks are stored."""
    manifest = dataset.manifest
    if manifest.layout.static_masks:
        return None
    told: dict[str, Any] = {
        name: value
        for name in ("mask_probability", "max_predictions")
        if (value := getattr(settings, name))
    }
    if settings.whole_words is not None:
        told["whole_words"] = settings.whole_words
    return replace(manifest.masking, **told)


def next_sentence(settings: Settings) -> bool:
    """Is it learned whether the second segment follows? As set, or if the data has any."""
    train, held_out = open_dataset(settings.train, "train"), evaluation_dataset(settings)
    wanted = settings.next_sentence
    if wanted is None:
        wanted = train.manifest.layout.next_sentence
    for each in (train, held_out):
        if wanted and each is not None and not each.manifest.layout.next_sentence:
            raise InputError(
                f"{each.folder} has no second segments, so whether they follow cannot be learned;"
                " set next_sentence to false, or build the data without --single"
            )
    return wanted


def placed(batch: Batch, device: torch.device, shape: Shape | None = None) -> Batch:
    """The batch on the device; with `shape`, filled up to it for a compiled model."""
    packed = batch.packed if shape is None else one_shape(batch.packed, shape)
    others = {
        name: sent(value, device)
        for name in ("masked_at", "masked_ids", "next_labels", "targets")
        if (value := getattr(batch, name, None)) is not None
    }
    return replace(batch, packed=packed.to(device), **others)


def one_shape(packed: Packed, shape: Shape) -> Packed:
    """Filled up to a shape, or beyond it to powers of two; most batches then have the same."""
    have = len(packed.ids)
    tokens = max(have, shape.tokens) if shape.tokens else executable.round_up(have)
    dummies = -(-(tokens - have) // packed.max_seqlen)
    slots = _power(max(len(packed) + dummies, shape.slots, tokens // USUAL_LENGTH))
    return replace(
        packed.pad(tokens, slots), max_seqlen=_power(max(packed.max_seqlen, shape.longest))
    )


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; from pinned memory, so that its work is not waited for."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _rows(before: Cursor | None, behind: Cursor, dataset: shards.Dataset, seed: int) -> str:
    """The rows of a global batch, by the numbers they have in their dataset."""
    size = len(dataset)
    stream = np.arange(_place(before, size), _place(behind, size))
    epochs, places = np.divmod(stream, size)
    rows = [
        int(row)
        for epoch in np.unique(epochs).tolist()
        for row in permuted(places[epochs == epoch], size, seed, epoch)
    ]
    return f"rows {_listed(rows)} of {dataset.folder}"


def _place(cursor: Cursor | None, size: int) -> int:
    return cursor["epoch"] * size + cursor["row"] if cursor else 0


def _numbers(numbers: list[int]) -> str:
    return f"examples {_listed(numbers)}"


def _examples(batch: Batch) -> int:
    return batch.sequences if isinstance(batch, loader.PretrainingBatch) else len(batch.numbers)


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:32]))
    return f"{shown} … ({len(numbers)} in all)" if len(numbers) > 32 else shown
