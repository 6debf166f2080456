"""Sequence classification: one label, several labels or a score per sequence, as in GLUE.

Follows transformers' sequence classifiers: cross entropy, binary cross entropy per label, or
squared error, each averaged over the sequences of the step (with several labels, over all labels).

With `agreement` each sequence is predicted twice with different dropout, and the two predictions
should agree (R-Drop, Liang et al. 2021): the loss gets half the sum of both Kullback-Leibler
divergences. For all three problems that is half of the difference of expectations times the
difference of logits, because the normalizers cancel out.

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
from packhorse.train.objectives.stats import (
    BatchStats,
    Gather,
    at_least_fp32,
    evaluating,
    share_of_loss,
    single_process,
)

if TYPE_CHECKING:
    from packhorse.data.tasks.targets import TaskBatch

Problem = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True, slots=True)
class Classify:
    """Classification of sequences; the targets are those of `data.tasks.targets`."""

    problem: Problem = "single_label"
    agreement: float = 0.0  # weight of the difference between two predictions; 0: predict once

    def __post_init__(self) -> None:
        if self.problem not in get_args(Problem):
            known = ", ".join(get_args(Problem))
            raise InputError(f"problem is {self.problem!r}; it can be {known}")

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        return ("classify",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """The number of sequences, or of all their labels if each has several; [1]."""
        targets = batch.targets
        return targets.new_full((1,), targets.numel(), dtype=torch.int64)

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        logits = self._logits(model, batch)
        weights = self.weigh(batch)
        total = ERRORS[self.problem](logits, batch.targets)
        if self.agreement:
            total = self._with_agreement(model, batch, logits, total)
        figures: dict[str, tuple[Tensor, Tensor | float]] = {"loss": (total, weights[0])}
        if self.problem != "regression":
            right = self._predicted(logits.detach()) == batch.targets
            figures["accuracy"] = (right.sum(), weights[0])
        loss = share_of_loss(total[None], weights if totals is None else totals)
        return loss, BatchStats.of(batch.packed, batch.tokens, **figures)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = single_process
    ) -> dict[str, float]:
        """Loss and GLUE's measures over the batches of all ranks."""
        with evaluating(model):
            local = [(self._logits(model, batch).cpu(), batch.targets.cpu()) for batch in batches]
        results = gather(local)
        if not sum(len(targets) for _, targets in results):
            raise InputError("there is nothing to evaluate on: the data has no example")
        logits, targets = (torch.cat(column) for column in zip(*results, strict=True))
        loss = float(ERRORS[self.problem](logits, targets)) / targets.numel()
        predictions = self._predicted(logits).numpy()
        measures = glue_score.measured(self.problem, predictions, targets.numpy(), logits.shape[1])
        return {"loss": loss, **measures, "sequences": float(len(targets))}

    def _logits(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """[N, C]."""
        (logits,) = model(batch.packed, *self.heads)
        logits = at_least_fp32(batch.packed.pick(logits))
        outputs = logits.shape[1]
        if self.problem == "regression" and outputs != 1:
            raise InputError(f"a score needs one output; the model's head has {outputs}")
        if self.problem == "multi_label" and outputs != batch.targets.shape[1]:
            labels = batch.targets.shape[1]
            raise InputError(f"there are {labels} labels; the model's head has {outputs}")
        return logits

    def _with_agreement(
        self, model: nn.Module, batch: TaskBatch, first: Tensor, error: Tensor
    ) -> Tensor:
        """The mean error of two predictions, plus the weighted difference between them."""
        second = self._logits(model, batch)
        expected = EXPECTED[self.problem]
        mean_error = (error + ERRORS[self.problem](second, batch.targets)) / 2
        divergence = ((expected(first) - expected(second)) * (first - second)).sum() / 2
        return mean_error + self.agreement * divergence

    def _predicted(self, logits: Tensor) -> Tensor:
        if self.problem == "single_label":
            return logits.argmax(-1)
        return logits.squeeze(1) if self.problem == "regression" else (logits > 0).to(logits.dtype)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def _binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="sum")


def _squared_error(logits: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(logits.squeeze(1), targets.to(logits), reduction="sum")


ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label": _cross_entropy,
    "multi_label": _binary_cross_entropy,
    "regression": _squared_error,
}

# The expectation that logits stand for.
EXPECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "single_label": lambda logits: logits.softmax(-1),
    "multi_label": torch.sigmoid,
    "regression": lambda scores: scores,
}
