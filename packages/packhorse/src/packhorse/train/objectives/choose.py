"""Multiple choice: a score for each of several sequences, of which one is right.

Follows transformers' multiple choice models: a head with one output, and the cross entropy over the
choices of an example, averaged over examples. All choices of a step are one packed batch.

Shapes: N examples of K choices each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


@dataclass(frozen=True, slots=True)
class Choose:
    """The right one of several choices."""

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        return ("classify",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """The number of examples, [1]."""
        return torch.tensor([len(batch.numbers)])

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        scores = self._scores(model, batch)
        if len(scores):
            total = F.cross_entropy(scores, batch.targets, reduction="sum")
            right = (scores.detach().argmax(1) == batch.targets).sum().to(total)
        else:
            total = scores.sum()
            right = total.detach()
        examples = float(len(scores))
        loss = share_of_loss(total[None], self.weigh(batch) if totals is None else totals)
        figures = {"loss": (total, examples), "accuracy": (right, examples)}
        return loss, BatchStats.of(batch.packed, batch.tokens, **figures)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = single_process
    ) -> dict[str, float]:
        """Loss and accuracy over the batches of all ranks."""
        with evaluating(model):
            local = [(self._scores(model, b).cpu(), b.targets.cpu()) for b in batches]
        results = [(scores, right) for scores, right in gather(local) if len(scores)]
        if not results:
            raise InputError("there is nothing to evaluate on: the data has no example")
        scores, right = (torch.cat(column) for column in zip(*results, strict=True))
        return {
            "loss": float(F.cross_entropy(scores, right)),
            "accuracy": float((scores.argmax(1) == right).double().mean()),
            "sequences": float(len(right)),
        }

    def _scores(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """[N, K]."""
        (logits,) = model(batch.packed, *self.heads)
        logits = at_least_fp32(batch.packed.pick(logits))
        if logits.shape[1] != 1:
            raise InputError(f"choices need one output; the model's head has {logits.shape[1]}")
        count = len(batch.numbers)
        return logits.view(count, len(logits) // max(1, count))
