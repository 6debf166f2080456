"""What packing must keep apart: the same training packed, unpacked, and packed wrongly on purpose.

Krell et al. 2021 (Efficient Sequence Packing without Cross-contamination) name two things that a
packed model needs: a mask, so that sequences of a pack do not see each other, and positions that
begin again with each sequence. Here the mini model (3 layers, 128 wide) learns masked letters of
real text four ways from the same weights, in steps of the same sequences with the same masks:
unpacked, one sequence a row, with as many seeds as tell what chance does; packed; and packed
without the one or the other. Whatever a model learned from, it is judged as it would be used: by
held-out sequences, each alone in its row.

The setting is one in which 200 steps show it. Text is spelled in letters, and sequences are short:
so the letters beside a masked one tell most about it, and a small model learns within minutes to
look at them. With a vocabulary of words it spends these steps on learning which are frequent,
before it looks at any context that a mistake could spoil. The price is that the figures say how
much worse the mistakes are here, not how much worse they would make a BERT of words.

The mistakes are made here and nowhere else: to the encoder goes another `Packed` than to the head.

Shapes: T tokens, S sequences, R rows.
"""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from packhorse import attention
from packhorse.data.packed.loader import PretrainingBatch, batch_of
from packhorse.data.packed.masking import (
    CONTINUES,
    Recipe,
    Specials,
    draw_by_keys,
    keys_of,
    specials_of,
)
from packhorse.data.packed.packs import Rows
from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.model.model import Model
from packhorse.packing.batch import Packed
from packhorse.packing.histogram import PackingPlan, assign, histogram_of, plan
from packhorse.reports import docstrings
from packhorse.reports.tables import Table
from packhorse.tokens import Tokenizer
from packhorse.train.job import StepSchedule
from packhorse.train.objectives import Pretrain
from packhorse.train.preparing import optimizer_for, prepare
from packhorse.train.settings import TrainSettings
from packhorse_bench.data import SENTENCE

Progress = Callable[[int, int], None]
Change = Callable[[Packed], Packed]

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = string.ascii_lowercase + string.digits + string.punctuation
HELD_OUT = 500  # sequences
CORPUS_SEED = 12345
SHORTEST = 8  # tokens of a sequence
WARMUP = 0.1  # of the steps
OBJECTIVE = Pretrain(next_sentence=False)

UNPACKED = "unpacked"
PACKED = "packed"
NO_MASK = "packed, no mask"
NO_RESET = "packed, no position reset"


@dataclass(frozen=True, slots=True)
class AblationSetup:
    """What is learned, and how long."""

    steps: int = 200
    rows: int = 8  # a step, of a packed batch; unpacked it has the same sequences
    capacity: int = 128
    max_length: int = 16  # tokens of a sequence; from SHORTEST up
    seeds: int = 3  # of unpacked training: weights, order and masks
    learning_rate: float = 2e-3
    mask_probability: float = 0.25
    evaluate_every: int = 20


@dataclass(frozen=True, slots=True)
class AblationRun:
    """How one way of training went; a curve is (step, value)."""

    way: str
    seed: int
    training: tuple[tuple[int, float], ...]  # loss, of the way's own making
    held_out: tuple[tuple[int, float], ...]  # loss
    accuracy: float  # held out, at the end


@dataclass(frozen=True, slots=True)
class AblationResult:
    """All runs, and what they were made of."""

    runs: tuple[AblationRun, ...]
    sequences: int
    length: float  # tokens of a sequence, on average
    per_pack: float
    seconds: float

    def run(self, way: str, seed: int = 0) -> AblationRun:
        """That of the way, with this seed."""
        return next(run for run in self.runs if (run.way, run.seed) == (way, seed))


@dataclass(frozen=True)
class LetterCorpus:
    """Sequences to learn from, and to judge by."""

    train: list[np.ndarray]  # token ids
    plan: PackingPlan  # of their packs
    held_out: list[PretrainingBatch]
    specials: Specials
    recipe: Recipe


def joined(packed: Packed) -> Packed:
    """The mistake of no mask: the sequences of a row are one; its unused tail stays apart."""
    real = torch.zeros(len(packed), dtype=torch.bool)
    real[list(packed.places)] = True
    keep = (packed.starts % packed.capacity == 0) | ~real
    bounds = torch.cat([packed.starts[keep], packed.cu_seqlens[-1:]])
    places = tuple(range(len(bounds) - 1))
    return replace(packed, cu_seqlens=bounds, max_seqlen=packed.capacity, places=places)


def running_on(packed: Packed) -> Packed:
    """The mistake of no reset: positions count on through the row."""
    return replace(packed, positions=torch.arange(len(packed.ids)) % packed.capacity)


MISTAKES: Mapping[str, Change] = {NO_MASK: joined, NO_RESET: running_on}


@final
class Mistaken(nn.Module):
    """A model whose encoder is shown a batch that was changed; its heads know the right one."""

    def __init__(self, model: Model, change: Change) -> None:
        super().__init__()
        self.model = model
        self.change = change

    def forward(self, packed: Packed, *heads: str, at: Tensor | None = None) -> list[Tensor]:
        """As `Model` is called."""
        hidden = self.model.bert(self.change(packed))
        return self.model.apply_heads(hidden, packed, heads, at)


def measure(setup: AblationSetup, progress: Progress | None = None) -> AblationResult:
    """Train every way: unpacked with each seed, the others with the first."""
    if min(setup.steps, setup.rows, setup.seeds, setup.evaluate_every) < 1:
        raise InputError("steps, rows, seeds and the steps between evaluations are at least 1")
    if not SHORTEST <= setup.max_length <= setup.capacity:
        allowed = f"from {SHORTEST} to the {setup.capacity} tokens of a row"
        raise InputError(f"a sequence is {setup.max_length} tokens at most; it must be {allowed}")
    begun = time.perf_counter()
    corpus = read(setup)
    ways = [(UNPACKED, seed) for seed in range(setup.seeds)]
    ways += [(way, 0) for way in (PACKED, *MISTAKES)]
    runs = []
    for number, (way, seed) in enumerate(ways):
        advance = partial(_advance, progress, number * setup.steps, len(ways) * setup.steps)
        runs.append(learn(way, seed, corpus, setup, advance))
    return AblationResult(
        runs=tuple(runs),
        sequences=len(corpus.train),
        length=fmean(map(len, corpus.train)),
        per_pack=corpus.plan.factor,
        seconds=time.perf_counter() - begun,
    )


def _advance(progress: Progress | None, before: int, total: int, step: int) -> None:
    if progress is not None:
        progress(before + step, total)


def read(setup: AblationSetup) -> LetterCorpus:
    """How sentences of docstrings of Python's library begin, each spelled and cut somewhere."""
    tokenizer = _speller()
    longest = setup.max_length
    sentences = (s for docstring in docstrings.read() for s in SENTENCE.split(docstring.text))
    texts = [" ".join(sentence.split())[: 4 * longest] for sentence in sentences]
    encodings = tokenizer.encode([text for text in texts if text], longest)
    spelled = (tuple(encoding.ids) for encoding in encodings)
    full_length = [ids for ids in spelled if len(ids) == longest]
    rng = np.random.default_rng(CORPUS_SEED)
    cuts = rng.integers(SHORTEST, longest + 1, len(full_length))
    # What is the same counts once: nothing that is held out was learned from.
    cut = dict.fromkeys((*ids[: n - 1], ids[-1]) for ids, n in zip(full_length, cuts, strict=True))
    sequences = [np.array(ids) for ids in cut]
    order = rng.permutation(len(sequences))
    held, learned = np.split(order, [min(HELD_OUT, len(sequences) // 10)])
    specials = specials_of(tokenizer)
    recipe = Recipe(
        max_length=longest, mask_probability=setup.mask_probability, max_predictions=None
    )
    alone = _masked(_rows(sequences, held), held, (CORPUS_SEED, 0), specials, recipe)
    train = [sequences[i] for i in learned]
    counts = histogram_of([len(sequence) for sequence in train], setup.capacity)
    batches = [batch_of(alone, longest, {})]
    return LetterCorpus(train, plan(counts, setup.capacity), batches, specials, recipe)


def _speller() -> Tokenizer:
    """A tokenizer that knows letters, not words."""
    pieces = [letter for char in LETTERS for letter in (char, CONTINUES + char)]
    with TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join([*SPECIAL, *pieces]) + "\n", "utf-8")
        return Tokenizer.load(Path(folder))


def _rows(
    sequences: list[np.ndarray], order: np.ndarray, offsets: np.ndarray | None = None
) -> Rows:
    """The sequences in this order, as rows; without offsets, one a row."""
    taken = [sequences[number] for number in order]
    lengths = np.array([len(sequence) for sequence in taken])
    none = np.zeros(len(taken), np.int64)
    bounds = np.arange(len(order) + 1) if offsets is None else offsets
    return Rows(np.concatenate(taken), lengths, lengths, none, bounds)


def _masked(
    rows: Rows, numbers: np.ndarray, seed: tuple[int, int], specials: Specials, recipe: Recipe
) -> Rows:
    """Masks that depend on the sequence and the seed alone, however it is laid."""
    keys = keys_of(*seed, numbers)
    return rows.masked(*draw_by_keys(rows.ids, rows.lengths, specials, recipe, keys))


def _laid(corpus: LetterCorpus, seed: int) -> tuple[np.ndarray, Rows]:
    """The sequences' numbers in the order in which they are learned, and their packs."""
    placed = assign(corpus.plan, [len(sequence) for sequence in corpus.train], seed)
    return placed.indices, _rows(corpus.train, placed.indices, placed.offsets)


def steps(
    way: str, seed: int, corpus: LetterCorpus, setup: AblationSetup
) -> Iterator[PretrainingBatch]:
    """The batches of a run: of all ways the same sequences and masks, step by step."""
    numbers, rows = _laid(corpus, seed)
    for step in range(setup.steps):
        epoch, place = divmod(step, max(1, len(rows) // setup.rows))
        begin = place * setup.rows
        end = min(len(rows), (place + 1) * setup.rows)
        part = rows.cut(begin, end)
        inside = slice(rows.offsets[begin], rows.offsets[end])
        if way == UNPACKED:
            part = replace(part, offsets=np.arange(len(part.lengths) + 1))
        mask_arguments = numbers[inside], (seed, epoch), corpus.specials, corpus.recipe
        yield batch_of(
            _masked(part, *mask_arguments),
            setup.max_length if way == UNPACKED else setup.capacity,
            {},
        )


def learn(
    way: str, seed: int, corpus: LetterCorpus, setup: AblationSetup, advance: Callable[[int], None]
) -> AblationRun:
    """Train the mini model one way; judge it every so many steps."""
    settings = _settings(setup, seed)
    pace = StepSchedule(settings, 1.0, 1.0)
    config = BertConfig(corpus.specials.vocab_size, 128, 3, 4, 512, max_positions=setup.capacity)
    model = prepare(settings, config, OBJECTIVE.heads, attention.kernel("mask"))[0].model.train()
    optimizer = optimizer_for(settings, model, half=False)
    seen = Mistaken(model, MISTAKES[way]) if way in MISTAKES else model
    training = []
    held_out = []
    judged = {}
    for step, batch in enumerate(steps(way, seed, corpus, setup)):
        for group in optimizer.param_groups:
            group["lr"] = pace.rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss, _ = OBJECTIVE.loss(seen, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        training.append((step + 1, float(loss.detach())))
        if (step + 1) % setup.evaluate_every == 0 or step + 1 == setup.steps:
            judged = OBJECTIVE.evaluate(model, corpus.held_out)
            held_out.append((step + 1, judged["loss"]))
        advance(step + 1)
    return AblationRun(way, seed, tuple(training), tuple(held_out), judged["mlm_accuracy"])


def _settings(setup: AblationSetup, seed: int) -> TrainSettings:
    return TrainSettings(
        steps=setup.steps,
        seed=seed,
        dropout=0.0,
        optimizer="adamw",
        learning_rate=setup.learning_rate,
        beta2=0.98,
        warmup=WARMUP,
    )


def spread(result: AblationResult) -> list[float]:
    """At each evaluation, how far the seeds of unpacked training lie apart at most."""
    curves = [run.held_out for run in result.runs if run.way == UNPACKED]
    losses = [[loss for _, loss in at] for at in zip(*curves, strict=True)]
    return [max(seed_losses) - min(seed_losses) for seed_losses in losses]


def apart(result: AblationResult, run: AblationRun) -> list[float]:
    """At each evaluation, how much more a run loses than unpacked training with its seed."""
    reference = result.run(UNPACKED, run.seed).held_out
    return [
        loss - reference_loss
        for (_, loss), (_, reference_loss) in zip(run.held_out, reference, strict=True)
    ]


def table(result: AblationResult) -> Table:
    """A line a run; what is apart is so from unpacked training with the same seed."""
    columns = ("way", "seed", "training loss", "held-out loss", "accuracy", "apart", "at most")
    rows = []
    for run in result.runs:
        last = run.training[-max(1, len(run.training) // 10) :]
        gaps = apart(result, run)
        same = run is result.run(UNPACKED, run.seed)
        rows.append(
            (
                run.way,
                str(run.seed),
                f"{fmean(loss for _, loss in last):.3f}",
                f"{run.held_out[-1][1]:.3f}",
                f"{run.accuracy:.1%}",
                "-" if same else f"{gaps[-1]:.2g}",
                "-" if same else f"{max(gaps, key=abs):.2g}",
            )
        )
    return Table.of(columns, rows)


def describe(setup: AblationSetup, result: AblationResult) -> dict[str, str]:
    """What was trained on what, and what chance does."""
    between = spread(result)
    return {
        "workload": f"docstrings of Python's library in letters: {result.sequences:,} sequences of "
        f"{result.length:.1f} tokens, {setup.max_length} at most",
        "model": f"mini (3 layers, 128 wide), {len(SPECIAL) + 2 * len(LETTERS)} words, "
        f"{setup.mask_probability:.0%} masked, no next sentence, no dropout, fp32",
        "batches": f"{result.per_pack * setup.rows:.0f} sequences a step, unpacked or in "
        f"{setup.rows} rows of {setup.capacity}, {result.per_pack:.1f} a row",
        "learning": f"{setup.steps} steps of AdamW, learning rate {setup.learning_rate:g}, "
        f"{WARMUP:.0%} of them warm-up, then linear",
        "noise": f"{setup.seeds} unpacked seeds are {between[-1]:.4f} apart at the end, "
        f"{max(between):.4f} at most on the way, {fmean(between):.4f} on average",
        "seconds": f"{result.seconds:.0f}",
    }


def curves(
    result: AblationResult, of: str = "held_out"
) -> dict[str, tuple[tuple[int, float], ...]]:
    """Of the first seed, a curve a way."""
    return {way: getattr(result.run(way), of) for way in (UNPACKED, PACKED, *MISTAKES)}
