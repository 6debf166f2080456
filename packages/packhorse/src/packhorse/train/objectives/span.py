"""Extractive question answering as in SQuAD: probabilities of the first and last answer token.

The probabilities are a softmax over the tokens of one sequence. (That of transformers, over padded
rows, includes padding.) The loss is the mean of the cross entropies of the two ends, averaged over
the windows of the step; in a window without the answer both ends are at its first token.

Evaluation scores whole questions, over all of their windows: see `squad_evaluation`.

Shapes: T tokens, S sequences, N windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from packhorse import results
from packhorse.data.tasks.squad import is_v2, marks, score
from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.train.objectives.stats import (
    BatchStats,
    Gather,
    at_least_fp32,
    evaluating,
    share_of_loss,
    single_process,
)

if TYPE_CHECKING:
    from packhorse.data.tasks.squad import SquadQuestion
    from packhorse.data.tasks.targets import TaskBatch, TrainingTask
    from packhorse.tokens import Encoding, Tokenizer

NO_WINDOWS = "there is nothing to evaluate on: the data has no window"


@dataclass(frozen=True, slots=True)
class SquadEvaluation:
    """Questions and the windows of each, to score a model on."""

    questions: Sequence[SquadQuestion]
    windows: Sequence[Sequence[Encoding]]

    def task(self) -> TrainingTask:
        """Every window as an example, in order; their targets are not used."""
        from packhorse.data.tasks.targets import Span, TaskExample, TrainingTask

        windows = [window for question_windows in self.windows for window in question_windows]
        return TrainingTask([TaskExample((window,), Span(0, 0)) for window in windows], "span")


def squad_evaluation(
    questions: Sequence[SquadQuestion],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    stride: int | None = None,
) -> SquadEvaluation:
    """Split the questions' contexts into windows, as `Tokenizer.windows` does."""
    pairs = [(question.question, question.context) for question in questions]
    return SquadEvaluation(questions, tokenizer.windows(pairs, max_length, stride))


@dataclass(frozen=True, slots=True)
class SpanEnds:
    """Loss of the two ends; with `evaluation`, answers are scored, on the batches of its task."""

    evaluation: SquadEvaluation | None = None
    longest: int = 30  # maximum tokens of an answer in scoring

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        return ("span",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """The number of windows, [1]."""
        return batch.targets.new_full((1,), len(batch.targets))

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        weights = self.weigh(batch)
        packed = batch.packed
        (logits,) = model(packed, *self.heads)
        logits = at_least_fp32(logits)
        top, log_sums = _log_sums(logits, packed)  # [N, 2] each
        chosen = logits.gather(0, batch.targets)
        total = (log_sums - chosen).mean(1).sum()
        correct = (chosen.detach() >= top).all(1).sum()
        loss = share_of_loss(total[None], weights if totals is None else totals)
        figures = {"loss": (total, weights[0]), "accuracy": (correct, weights[0])}
        return loss, BatchStats.of(packed, batch.tokens, **figures)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = single_process
    ) -> dict[str, float]:
        """Exact match and F1 in percent; without questions, loss and accuracy of both ends."""
        if self.evaluation is not None:
            return self._score(self.evaluation, model, batches, gather)
        with evaluating(model):
            local = [self.loss(model, batch)[1].cpu() for batch in batches]
        all_stats = gather(local)
        if not sum(stats.sequences for stats in all_stats):
            raise InputError(NO_WINDOWS)
        total = reduce(add, all_stats)
        return {**total.means(), "windows": float(total.sequences)}

    def _score(
        self,
        evaluation: SquadEvaluation,
        model: nn.Module,
        batches: Iterable[TaskBatch],
        gather: Gather,
    ) -> dict[str, float]:
        with evaluating(model):
            local = [pair for batch in batches for pair in _numbered_logits(model, batch)]
        logits = dict(gather(local))
        questions = evaluation.questions
        bounds = list(accumulate(map(len, evaluation.windows), initial=0))
        if sorted(logits) != list(range(bounds[-1])) or not logits:
            raise InputError(
                f"{len(logits)} of {bounds[-1]} windows were given; evaluate on one epoch of `task`"
            )
        no_answer = 0.0 if is_v2(questions) else None
        predicted = {}
        for i, (question, windows) in enumerate(zip(questions, evaluation.windows, strict=True)):
            window_logits = [logits[number] for number in range(bounds[i], bounds[i + 1])]
            best = results.answers(
                window_logits, windows, question.context, 1, self.longest, no_answer=no_answer
            )
            predicted[question.id] = [answer.text for answer in best] or [""]
        scores = score(questions, marks(questions, predicted))
        measures = {}
        for part, part_score in scores.items():
            prefix = "" if part == "all" else f"{part}_"
            for measure in ("exact_match", "f1", "questions"):
                measures[f"{prefix}{measure}"] = float(getattr(part_score, measure))
        return measures


def _log_sums(logits: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Per sequence (without dummies) the largest logits, and the logarithm of their softmax sum."""
    lengths = packed.lengths.long()
    numbers = torch.arange(len(lengths), device=lengths.device)
    owner = numbers.repeat_interleave(lengths, output_size=len(logits))
    top = torch.segment_reduce(logits.detach(), "max", lengths=lengths, axis=0, unsafe=True)
    powers = (logits - top[owner]).exp()
    sums = torch.segment_reduce(powers, "sum", lengths=lengths, axis=0, unsafe=True)
    # Picked before the logarithm: that of an empty slot is not finite, nor is its gradient.
    top = packed.pick(top)
    return top, top + packed.pick(sums).log()


def _numbered_logits(model: nn.Module, batch: TaskBatch) -> list[tuple[int, np.ndarray]]:
    """The number of each window, and its logits [n, 2]."""
    (logits,) = model(batch.packed, "span")
    pieces = batch.packed.split(at_least_fp32(logits).cpu())
    return [(n, piece.numpy()) for n, piece in zip(batch.numbers, pieces, strict=True)]
