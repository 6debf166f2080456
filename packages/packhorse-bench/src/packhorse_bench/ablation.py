"""The same training packed, unpacked, and packed wrongly on purpose, to show what packing needs.

Krell et al. 2021 (Efficient Sequence Packing without Cross-contamination) name two things that a
packed model needs: a mask, so that sequences of a pack do not see each other, and positions that
begin again with each sequence. Here the mini model (3 layers, 128 wide) learns masked letters of
real text four ways from the same weights, in steps of the same sequences with the same masks:
unpacked (one sequence per row), with several seeds to show how much is chance; packed; packed
without the mask; and packed without the positions. Every model is evaluated as it would be used:
on held-out sequences, each alone in its row.

The task is chosen so that 200 steps show the effect. Text is spelled in letters and sequences are
short, so a masked letter is best predicted from its neighbors, which a small model learns within
minutes. With a vocabulary of words it would spend these steps on learning word frequencies, before
it uses any context that a mistake could spoil. The price: the figures say how much worse the
mistakes are here, not how much worse they would make a BERT of words.

The mistakes exist only here: the encoder gets a changed `Packed`, the heads the right one.

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
BatchChange = Callable[[Packed], Packed]

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
    """The settings of an ablation: data, model input and length of training."""

    steps: int = 200
    rows: int = 8  # per step, if packed; an unpacked step has the same sequences
    capacity: int = 128
    max_length: int = 16  # tokens of a sequence; the shortest have SHORTEST
    seeds: int = 3  # unpacked runs, which differ in weights, order and masks
    learning_rate: float = 2e-3
    mask_probability: float = 0.25
    evaluate_every: int = 20


@dataclass(frozen=True, slots=True)
class AblationRun:
    """The losses of one training run; a curve is a list of (step, value)."""

    way: str
    seed: int
    training: tuple[tuple[int, float], ...]  # loss of its own batches, with its own mistake
    held_out: tuple[tuple[int, float], ...]  # loss
    accuracy: float  # held-out, after the last step


@dataclass(frozen=True, slots=True)
class AblationResult:
    """All runs, and figures of the corpus that they trained on."""

    runs: tuple[AblationRun, ...]
    sequences: int
    length: float  # tokens of a sequence, on average
    per_pack: float
    seconds: float

    def run(self, way: str, seed: int = 0) -> AblationRun:
        """The run of this way and seed."""
        return next(run for run in self.runs if (run.way, run.seed) == (way, seed))


@dataclass(frozen=True)
class LetterCorpus:
    """Sequences for training, with their packing plan, and batches for evaluation."""

    train: list[np.ndarray]  # token ids
    plan: PackingPlan  # of their packs
    held_out: list[PretrainingBatch]
    specials: Specials
    recipe: Recipe


def without_mask(packed: Packed) -> Packed:
    """The mistake of no mask: all sequences of a row become one; its unused tail stays separate."""
    # `places` are the caller's sequences; the others are dummy sequences, the tails of rows. A
    # sequence keeps its boundary if it begins a row or is a tail.
    real = torch.zeros(len(packed), dtype=torch.bool)
    real[list(packed.places)] = True
    keep = (packed.starts % packed.capacity == 0) | ~real
    bounds = torch.cat([packed.starts[keep], packed.cu_seqlens[-1:]])
    places = tuple(range(len(bounds) - 1))
    return replace(packed, cu_seqlens=bounds, max_seqlen=packed.capacity, places=places)


def without_position_reset(packed: Packed) -> Packed:
    """The mistake of no reset: positions continue to the end of the row."""
    return replace(packed, positions=torch.arange(len(packed.ids)) % packed.capacity)


MISTAKES: Mapping[str, BatchChange] = {NO_MASK: without_mask, NO_RESET: without_position_reset}


@final
class WronglyPackedModel(nn.Module):
    """A model whose encoder gets a changed batch and whose heads get the right one.

    So the loss is taken at the right tokens, and only what the encoder sees is wrong.
    """

    def __init__(self, model: Model, change: BatchChange) -> None:
        super().__init__()
        self.model = model
        self.change = change

    def forward(self, packed: Packed, *heads: str, at: Tensor | None = None) -> list[Tensor]:
        """Outputs of the heads; the signature is that of `Model`."""
        hidden = self.model.bert(self.change(packed))
        return self.model.apply_heads(hidden, packed, heads, at)


def measure(setup: AblationSetup, progress: Progress | None = None) -> AblationResult:
    """Train every way: unpacked with each seed, the others with the first seed."""
    if min(setup.steps, setup.rows, setup.seeds, setup.evaluate_every) < 1:
        raise InputError("steps, rows, seeds and the steps between evaluations are at least 1")
    if not SHORTEST <= setup.max_length <= setup.capacity:
        allowed = f"from {SHORTEST} to the {setup.capacity} tokens of a row"
        raise InputError(f"a sequence is {setup.max_length} tokens at most; it must be {allowed}")
    started = time.perf_counter()
    corpus = read_corpus(setup)
    ways = [(UNPACKED, seed) for seed in range(setup.seeds)]
    ways += [(way, 0) for way in (PACKED, *MISTAKES)]
    runs = []
    for number, (way, seed) in enumerate(ways):
        advance = partial(_advance, progress, number * setup.steps, len(ways) * setup.steps)
        runs.append(train_once(way, seed, corpus, setup, advance))
    return AblationResult(
        runs=tuple(runs),
        sequences=len(corpus.train),
        length=fmean(map(len, corpus.train)),
        per_pack=corpus.plan.factor,
        seconds=time.perf_counter() - started,
    )


def _advance(progress: Progress | None, before: int, total: int, step: int) -> None:
    if progress is not None:
        progress(before + step, total)


def read_corpus(setup: AblationSetup) -> LetterCorpus:
    """Beginnings of sentences from the standard library's docstrings, in letters, cut at random."""
    tokenizer = _letter_tokenizer()
    longest = setup.max_length
    sentences = (s for docstring in docstrings.read() for s in SENTENCE.split(docstring.text))
    texts = [" ".join(sentence.split())[: 4 * longest] for sentence in sentences]
    encodings = tokenizer.encode([text for text in texts if text], longest)
    spelled = (tuple(encoding.ids) for encoding in encodings)
    # Only sentences that fill the maximum are kept, then cut: so lengths are uniform from SHORTEST
    # up, and do not depend on the text.
    full_length = [ids for ids in spelled if len(ids) == longest]
    rng = np.random.default_rng(CORPUS_SEED)
    cuts = rng.integers(SHORTEST, longest + 1, len(full_length))
    # Duplicates are dropped, so that no held-out sequence is also in the training set. The last
    # token is [SEP], which every cut keeps.
    cut = dict.fromkeys((*ids[: n - 1], ids[-1]) for ids, n in zip(full_length, cuts, strict=True))
    sequences = [np.array(ids) for ids in cut]
    order = rng.permutation(len(sequences))
    held, learned = np.split(order, [min(HELD_OUT, len(sequences) // 10)])
    specials = specials_of(tokenizer)
    recipe = Recipe(
        max_length=longest, mask_probability=setup.mask_probability, max_predictions=None
    )
    held_rows = _make_rows(sequences, held)
    one_per_row = _apply_masks(held_rows, held, (CORPUS_SEED, 0), specials, recipe)
    train = [sequences[i] for i in learned]
    counts = histogram_of([len(sequence) for sequence in train], setup.capacity)
    batches = [batch_of(one_per_row, longest, {})]
    return LetterCorpus(train, plan(counts, setup.capacity), batches, specials, recipe)


def _letter_tokenizer() -> Tokenizer:
    """A tokenizer whose vocabulary is letters instead of words."""
    pieces = [letter for char in LETTERS for letter in (char, CONTINUES + char)]
    with TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join([*SPECIAL, *pieces]) + "\n", "utf-8")
        return Tokenizer.load(Path(folder))


def _make_rows(
    sequences: list[np.ndarray], order: np.ndarray, offsets: np.ndarray | None = None
) -> Rows:
    """The sequences in this order as rows, one per row without `offsets`."""
    ordered = [sequences[number] for number in order]
    lengths = np.array([len(sequence) for sequence in ordered])
    random_next = np.zeros(len(ordered), np.int64)  # there is no next-sentence task
    row_offsets = np.arange(len(order) + 1) if offsets is None else offsets
    # The first segment is the whole sequence, hence `lengths` twice.
    return Rows(np.concatenate(ordered), lengths, lengths, random_next, row_offsets)


def _apply_masks(
    rows: Rows, numbers: np.ndarray, seed: tuple[int, int], specials: Specials, recipe: Recipe
) -> Rows:
    """Draw masks by sequence number and seed, so that packing does not change them."""
    keys = keys_of(*seed, numbers)
    return rows.masked(*draw_by_keys(rows.ids, rows.lengths, specials, recipe, keys))


def _pack_corpus(corpus: LetterCorpus, seed: int) -> tuple[np.ndarray, Rows]:
    """The order of the sequences in training (their numbers), and their packed rows."""
    placed = assign(corpus.plan, [len(sequence) for sequence in corpus.train], seed)
    return placed.indices, _make_rows(corpus.train, placed.indices, placed.offsets)


def training_batches(
    way: str, seed: int, corpus: LetterCorpus, setup: AblationSetup
) -> Iterator[PretrainingBatch]:
    """The batches of a run; step by step, all ways get the same sequences and masks."""
    numbers, rows = _pack_corpus(corpus, seed)
    for step in range(setup.steps):
        epoch, number = divmod(step, max(1, len(rows) // setup.rows))
        begin = number * setup.rows
        end = min(len(rows), (number + 1) * setup.rows)
        part = rows.cut(begin, end)
        inside = slice(rows.offsets[begin], rows.offsets[end])
        if way == UNPACKED:  # the sequences of the packed step, each in a row of its own
            part = replace(part, offsets=np.arange(len(part.lengths) + 1))
        mask_arguments = numbers[inside], (seed, epoch), corpus.specials, corpus.recipe
        yield batch_of(
            _apply_masks(part, *mask_arguments),
            setup.max_length if way == UNPACKED else setup.capacity,
            {},
        )


def train_once(
    way: str, seed: int, corpus: LetterCorpus, setup: AblationSetup, advance: Callable[[int], None]
) -> AblationRun:
    """Train the mini model one way, and evaluate it every `evaluate_every` steps."""
    settings = _settings(setup, seed)
    schedule = StepSchedule(settings, 1.0, 1.0)
    config = BertConfig(corpus.specials.vocab_size, 128, 3, 4, 512, max_positions=setup.capacity)
    model = prepare(settings, config, OBJECTIVE.heads, attention.kernel("mask"))[0].model.train()
    optimizer = optimizer_for(settings, model, half=False)
    trained = WronglyPackedModel(model, MISTAKES[way]) if way in MISTAKES else model
    training = []
    held_out = []
    evaluation = {}
    for step, batch in enumerate(training_batches(way, seed, corpus, setup)):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss, _ = OBJECTIVE.loss(trained, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        training.append((step + 1, float(loss.detach())))
        if (step + 1) % setup.evaluate_every == 0 or step + 1 == setup.steps:
            # `model`, not `trained`: evaluation is without the mistake.
            evaluation = OBJECTIVE.evaluate(model, corpus.held_out)
            held_out.append((step + 1, evaluation["loss"]))
        advance(step + 1)
    return AblationRun(way, seed, tuple(training), tuple(held_out), evaluation["mlm_accuracy"])


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


def seed_spreads(result: AblationResult) -> list[float]:
    """The largest difference between the seeds of unpacked training, at each evaluation.

    A packed run that differs by less than that differs no more than another seed would.
    """
    curves = [run.held_out for run in result.runs if run.way == UNPACKED]
    losses = [[loss for _, loss in points] for points in zip(*curves, strict=True)]
    return [max(seed_losses) - min(seed_losses) for seed_losses in losses]


def loss_gaps(result: AblationResult, run: AblationRun) -> list[float]:
    """Held-out loss minus that of unpacked training with the same seed, at each evaluation."""
    reference = result.run(UNPACKED, run.seed).held_out
    return [
        loss - reference_loss
        for (_, loss), (_, reference_loss) in zip(run.held_out, reference, strict=True)
    ]


def table(result: AblationResult) -> Table:
    """One line per run; "apart" is the gap to unpacked training with the same seed."""
    columns = ("way", "seed", "training loss", "held-out loss", "accuracy", "apart", "at most")
    rows = []
    for run in result.runs:
        last = run.training[-max(1, len(run.training) // 10) :]
        gaps = loss_gaps(result, run)
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
    """What was trained on which data, and how large the effect of chance is."""
    spreads = seed_spreads(result)
    return {
        "workload": f"docstrings of Python's library in letters: {result.sequences:,} sequences of "
        f"{result.length:.1f} tokens, {setup.max_length} at most",
        "model": f"mini (3 layers, 128 wide), {len(SPECIAL) + 2 * len(LETTERS)} words, "
        f"{setup.mask_probability:.0%} masked, no next sentence, no dropout, fp32",
        "batches": f"{result.per_pack * setup.rows:.0f} sequences per step, unpacked or in "
        f"{setup.rows} rows of {setup.capacity}, {result.per_pack:.1f} a row",
        "learning": f"{setup.steps} steps of AdamW, learning rate {setup.learning_rate:g}, "
        f"{WARMUP:.0%} of them warm-up, then linear",
        "noise": f"{setup.seeds} unpacked seeds are {spreads[-1]:.4f} apart at the end, "
        f"{max(spreads):.4f} at most on the way, {fmean(spreads):.4f} on average",
        "seconds": f"{result.seconds:.0f}",
    }


def curves(
    result: AblationResult, of: str = "held_out"
) -> dict[str, tuple[tuple[int, float], ...]]:
    """One curve per way, of the first seed."""
    return {way: getattr(result.run(way), of) for way in (UNPACKED, PACKED, *MISTAKES)}
