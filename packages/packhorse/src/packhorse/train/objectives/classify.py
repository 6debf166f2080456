"""One label, several labels or a score for each sequence, as fine-tuning on GLUE learns them.

Follows transformers' sequence classifiers: cross entropy, a binary one for every label, or the
squared error, each averaged over the sequences of the step (of several labels, over all of them).

With `agreement` each sequence is answered twice, dropout drawn anew, and the two answers are to
agree as well as to be right (R-Drop, Liang et al. 2021): half of both Kullback-Leibler divergences
between them. For all three kinds that is the difference of what they expect times the difference of
logits, halved, for what they are normalised by cancels out.

Shapes: N sequences, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.data.tasks import glue_score
from packhorse.errors import InputError
from packhorse.train.objectives.stats import Gather, Stats, alone, divided, evaluating, wide

if TYPE_CHECKING:
    from packhorse.data.tasks.targets import TaskBatch

Problem = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True, slots=True)
class Classify:
    """The targets are those of `data.tasks.targets` for the problem."""

    problem: Problem = "single_label"
    agreement: float = 0.0  # the weight of how far two answers are apart; 0: there is one

    def __post_init__(self) -> None:
        if self.problem not in get_args(Problem):
            known = ", ".join(get_args(Problem))
            raise InputError(f"unknown problem {self.problem!r}; there are {known}")

    @property
    def heads(self) -> tuple[str, ...]:
        """What the model must have."""
        return ("classify",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """[1]: sequences; of several labels, all labels of all sequences."""
        targets = batch.targets
        return targets.new_full((1,), targets.numel(), dtype=torch.int64)

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, Stats]:
        """The batch's share of the step's loss, and its figures."""
        logits, weights = self._logits(model, batch), self.weigh(batch)
        total = ERRORS[self.problem](logits, batch.targets)
        if self.agreement:
            total = self._with_another(model, batch, logits, total)
        figures: dict[str, tuple[Tensor, Tensor | float]] = {"loss": (total, weights[0])}
        if self.problem != "regression":
            right = self._predicted(logits.detach()) == batch.targets
            figures["accuracy"] = (right.sum(), weights[0])
        loss = divided(total[None], weights if totals is None else totals)
        return loss, Stats.of(batch.packed, batch.tokens, **figures)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = alone
    ) -> dict[str, float]:
        """Loss and GLUE's measures over all batches of all ranks."""
        with evaluating(model):
            mine = [(self._logits(model, batch).cpu(), batch.targets.cpu()) for batch in batches]
        found = gather(mine)
        if not sum(len(targets) for _, targets in found):
            raise InputError("there is nothing to evaluate on: no example was given")
        logits, targets = (torch.cat(column) for column in zip(*found, strict=True))
        loss = float(ERRORS[self.problem](logits, targets)) / targets.numel()
        both = self._predicted(logits).numpy(), targets.numpy()
        measured = glue_score.measured(self.problem, *both, logits.shape[1])
        return {"loss": loss, **measured, "sequences": float(len(targets))}

    def _logits(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """[N, C]."""
        (logits,) = model(batch.packed, *self.heads)
        mine = wide(batch.packed.pick(logits))
        outputs = mine.shape[1]
        if self.problem == "regression" and outputs != 1:
            raise InputError(f"a score is one output; the model's head has {outputs}")
        if self.problem == "multi_label" and outputs != batch.targets.shape[1]:
            labels = batch.targets.shape[1]
            raise InputError(f"there are {labels} labels; the model's head has {outputs}")
        return mine

    def _with_another(
        self, model: nn.Module, batch: TaskBatch, first: Tensor, error: Tensor
    ) -> Tensor:
        """The mean of two answers' errors, and how far they are apart."""
        second, expected = self._logits(model, batch), EXPECTED[self.problem]
        errors = (error + ERRORS[self.problem](second, batch.targets)) / 2
        apart = ((expected(first) - expected(second)) * (first - second)).sum() / 2
        return errors + self.agreement * apart

    def _predicted(self, logits: Tensor) -> Tensor:
        if self.problem == "single_label":
            return logits.argmax(-1)
        return logits.squeeze(1) if self.problem == "regression" else (logits > 0).to(logits.dtype)


def _one(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def _several(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="sum")


def _squared(logits: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(logits.squeeze(1), targets.to(logits), reduction="sum")


ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label": _one,
    "multi_label": _several,
    "regression": _squared,
}

# What logits stand for.
EXPECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "single_label": lambda logits: logits.softmax(-1),
    "multi_label": torch.sigmoid,
    "regression": lambda scores: scores,
}
