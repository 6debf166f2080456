"""The data of `packhorse bench train`: random sequences with realistic lengths, in steps.

Nothing is read from disk or tokenized: the speed of a step depends on lengths alone. Our lane takes
the packed steps as they are. The peers take the same sequences out of them, with masks and labels
(`examples`), so that all train on the same.

Pretraining lays sequences into rows and gives every step as many rows, as `packhorse train` does; a
step then has as many sequences as fit, about as many each. SST-2's training set is mostly phrases:
its lengths are drawn from a gamma distribution with the set's own mean and spread (13 and 9 tokens,
[CLS] and [SEP] among them).

Shapes: T tokens, S sequences, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from packhorse.data.packed.loader import PretrainingBatch, batch_of
from packhorse.data.packed.masking import Recipe, Specials, draw
from packhorse.data.packed.packs import Rows
from packhorse.data.tasks import targets
from packhorse.errors import InputError
from packhorse.packing.histogram import assign, histogram_of, plan
from packhorse.reports import lengths as files
from packhorse.train import cost, feed
from packhorse.train.feed import BatchShape, TrainingFeed
from packhorse.train.settings import TrainSettings
from packhorse_bench import workloads

IGNORED = -100  # no word to be guessed here; transformers' number
CLS, SEP, MASK = 101, 102, 103  # BERT's; any other would cost the same
LONGEST = {"pretrain": 512, "classify": 128}
SST2 = (1.4, 8.06, 66)  # shape and scale of the words, most tokens


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One sequence and its targets."""

    ids: np.ndarray
    types: np.ndarray
    label: int
    words: np.ndarray | None = None  # masked words to predict, `IGNORED` elsewhere


def draw_lengths(
    task: str, count: int, longest: int, seed: int, histogram: str | None = None
) -> np.ndarray:
    """Draw lengths like Wikipedia's or SST-2's, or from a histogram in a file."""
    if histogram is not None:
        counts = files.read_histogram(histogram)
        return np.maximum(5, workloads.sample(counts, count, seed=seed, longest=longest))
    if task == "pretrain":
        return workloads.draw("wikipedia", count, seed=seed, longest=longest)
    shape, scale, most = SST2
    words = np.random.default_rng(seed).gamma(shape, scale, count)
    return np.clip(np.rint(words + 2), 3, min(longest, most)).astype(np.int64)


def pretraining(
    lengths: np.ndarray, vocab_size: int, capacity: int, steps: int, micro_tokens: int, seed: int
) -> TrainingFeed:
    """Packed rows of `capacity` tokens, the same number in each step."""
    rows = _rows(lengths, vocab_size, capacity, seed)
    share = len(rows) // steps
    if not share:
        raise InputError(
            f"{len(lengths)} sequences fill {len(rows)} rows, too few for {steps} steps; pass a "
            "larger --batch, or fewer --steps"
        )
    parts = min(share, math.ceil(share * capacity / micro_tokens))
    batches = [batch for number in range(steps) for batch in _parts(rows, number, share, parts)]
    return TrainingFeed(
        stream=lambda cursor: iter(batches),
        evaluate_on=None,
        describe=lambda step: lambda: "random sequences",
        batch=sum(batch.sequences for batch in batches) / steps,
        epoch=steps,
        tokens=float(lengths.mean()),
        squares=float((lengths.astype(np.float64) ** 2).mean()),
        parts=parts,
        shape=BatchShape(math.ceil(share / parts) * capacity, longest=capacity),
    )


def _rows(lengths: np.ndarray, vocab_size: int, capacity: int, seed: int) -> Rows:
    placed = assign(plan(histogram_of(lengths, capacity), capacity), lengths, seed)
    ordered = lengths[placed.indices]
    sequences = workloads.sequences(ordered, vocab_size, ends=(CLS, SEP), seed=seed)
    first = np.maximum(1, ordered // 2)
    for sequence, until in zip(sequences, first, strict=True):
        sequence.ids[until - 1] = SEP if until > 1 else CLS
    rng = np.random.default_rng(seed)
    ids = np.concatenate([sequence.ids for sequence in sequences])
    rows = Rows(ids, ordered, first, rng.integers(0, 2, len(ordered)), placed.offsets)
    specials = Specials(CLS, SEP, MASK, 0, vocab_size)
    return rows.masked(*draw(ids, ordered, specials, Recipe(max_length=capacity), rng))


def _parts(rows: Rows, number: int, share: int, parts: int) -> Iterator[PretrainingBatch]:
    """The batches of a step; the cursor of the last is behind it."""
    for part in np.array_split(np.arange(number * share, (number + 1) * share), parts):
        last = part[-1] == (number + 1) * share - 1
        yield batch_of(rows.cut(part[0], part[-1] + 1), 0, {"batch": number + bool(last)})


def classification(
    lengths: np.ndarray, vocab_size: int, settings: TrainSettings, micro_tokens: int
) -> TrainingFeed:
    """Sequences with one of two labels, `settings.batch` a step."""
    seed = settings.seed
    sequences = workloads.sequences(lengths, vocab_size, ends=(CLS, SEP), seed=seed)
    drawn = np.random.default_rng(seed).integers(0, 2, len(sequences)).tolist()
    both = zip(sequences, drawn, strict=True)
    all_examples = [targets.TaskExample((sequence,), label) for sequence, label in both]
    task = targets.TrainingTask(all_examples, "single_label", ("0", "1"))
    return feed.examples(task, None, settings, micro_tokens)


def examples(batch: Any) -> Iterator[TrainingExample]:
    """The sequences of a batch, one by one."""
    packed = batch.packed
    words = None
    if isinstance(batch, PretrainingBatch):
        words = np.full(len(packed.ids), IGNORED)
        words[batch.masked_at.numpy()] = batch.masked_ids.numpy()
    labels = batch.next_labels if isinstance(batch, PretrainingBatch) else batch.targets
    ids, types, bounds = (x.numpy() for x in (packed.ids, packed.types, packed.cu_seqlens))
    for place, label in zip(packed.places, labels.tolist(), strict=True):
        at = slice(bounds[place], bounds[place + 1])
        yield TrainingExample(ids[at], types[at], label, None if words is None else words[at])


def work(examples_in: Iterable[TrainingExample], places: int) -> cost.StepWork:
    """The work in these sequences, if `places` tokens are computed for them."""
    listed = list(examples_in)
    lengths = np.array([len(example.ids) for example in listed], np.float64)
    guessed = sum(int((e.words != IGNORED).sum()) for e in listed if e.words is not None)
    return cost.StepWork(float(lengths.sum()), float((lengths**2).sum()), guessed, places)
