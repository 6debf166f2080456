"""Answers as spans of a context, as BERT learns SQuAD: a chance for each first and last token.

The chances of a sequence's tokens are a softmax over that sequence alone. (transformers' own, over
padded rows, gives padding a chance too.) The loss is the mean of the two ends' cross entropies,
averaged over the windows of the step; a window without the answer has both ends at its first token.

Scoring asks the questions themselves, all of them, windows and all: `asked` lays them out.

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
from packhorse.train.objectives.stats import Gather, Stats, alone, divided, evaluating, wide

if TYPE_CHECKING:
    from packhorse.data.tasks.squad import SquadQuestion
    from packhorse.data.tasks.targets import TaskBatch, TrainingTask
    from packhorse.tokens import Encoding, Tokenizer

NOTHING = "there is nothing to evaluate on: no window was given"


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions and the windows of each: what a model is scored on."""

    questions: Sequence[SquadQuestion]
    windows: Sequence[Sequence[Encoding]]

    def task(self) -> TrainingTask:
        """Every window as an example, in order; what they are taught is not looked at."""
        from packhorse.data.tasks.targets import Span, TaskExample, TrainingTask

        flat = [window for each in self.windows for window in each]
        return TrainingTask([TaskExample((window,), Span(0, 0)) for window in flat], "span")


def asked(
    questions: Sequence[SquadQuestion],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    stride: int | None = None,
) -> Asked:
    """Lay the questions out; lengths and stride are those of `Tokenizer.windows`."""
    pairs = [(question.question, question.context) for question in questions]
    return Asked(questions, tokenizer.windows(pairs, max_length, stride))


@dataclass(frozen=True, slots=True)
class SpanEnds:
    """With `asked`, evaluation takes batches of its task and scores answers; else loss alone."""

    asked: Asked | None = None
    longest: int = 30  # tokens of an answer, in scoring

    @property
    def heads(self) -> tuple[str, ...]:
        """What the model must have."""
        return ("span",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """[1]: windows."""
        return batch.targets.new_full((1,), len(batch.targets))

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, Stats]:
        """The batch's share of the step's loss, and its figures."""
        weights, packed = self.weigh(batch), batch.packed
        (logits,) = model(packed, *self.heads)
        logits = wide(logits)
        top, norms = _norms(logits, packed)  # [N, 2] each
        chosen = logits.gather(0, batch.targets)
        total = (norms - chosen).mean(1).sum()
        right = (chosen.detach() >= top).all(1).sum()
        loss = divided(total[None], weights if totals is None else totals)
        figures = {"loss": (total, weights[0]), "accuracy": (right, weights[0])}
        return loss, Stats.of(packed, batch.tokens, **figures)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = alone
    ) -> dict[str, float]:
        """Exact match and F1, in percent; without questions, loss and right pairs of ends."""
        if self.asked is not None:
            return self._score(self.asked, model, batches, gather)
        with evaluating(model):
            found = gather([self.loss(model, batch)[1].cpu() for batch in batches])
        if not sum(stats.sequences for stats in found):
            raise InputError(NOTHING)
        total = reduce(add, found)
        return {**total.means(), "windows": float(total.sequences)}

    def _score(
        self, asked: Asked, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather
    ) -> dict[str, float]:
        with evaluating(model):
            found = gather([pair for batch in batches for pair in _numbered(model, batch)])
        logits = dict(found)
        bounds = list(accumulate(map(len, asked.windows), initial=0))
        if sorted(logits) != list(range(bounds[-1])) or not found:
            raise InputError(
                f"{len(logits)} of {bounds[-1]} windows were given; evaluate on one epoch of `task`"
            )
        no_answer = 0.0 if is_v2(asked.questions) else None
        predicted = {}
        for i, (question, windows) in enumerate(zip(asked.questions, asked.windows, strict=True)):
            mine = [logits[number] for number in range(bounds[i], bounds[i + 1])]
            best = results.answers(
                mine, windows, question.context, 1, self.longest, no_answer=no_answer
            )
            predicted[question.id] = [answer.text for answer in best] or [""]
        scores = score(asked.questions, marks(asked.questions, predicted))
        named = {("" if part == "all" else f"{part}_"): each for part, each in scores.items()}
        return {
            f"{part}{measure}": float(getattr(each, measure))
            for part, each in named.items()
            for measure in ("exact_match", "f1", "questions")
        }


def _norms(logits: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Of each of the caller's sequences the largest logits, and the logarithms of their sums."""
    lengths = packed.lengths.long()
    numbers = torch.arange(len(lengths), device=lengths.device)
    owner = numbers.repeat_interleave(lengths, output_size=len(logits))
    top = torch.segment_reduce(logits.detach(), "max", lengths=lengths, axis=0, unsafe=True)
    powers = (logits - top[owner]).exp()
    sums = torch.segment_reduce(powers, "sum", lengths=lengths, axis=0, unsafe=True)
    # Picked before the logarithm: an empty slot has none, and no gradient either.
    mine = packed.pick(top)
    return mine, mine + packed.pick(sums).log()


def _numbered(model: nn.Module, batch: TaskBatch) -> list[tuple[int, np.ndarray]]:
    """The number of each window and its logits, [n, 2]."""
    (logits,) = model(batch.packed, "span")
    pieces = batch.packed.split(wide(logits).cpu())
    return [(n, piece.numpy()) for n, piece in zip(batch.numbers, pieces, strict=True)]
