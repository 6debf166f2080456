"""Token classification: a label for the first token of each word, as for entities (NER).

Follows transformers' token classifiers: the cross entropy averaged over the labeled tokens of the
step. Evaluation counts whole entities, as seqeval does.

Shapes: T tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.data.tasks.tagged import UNLABELED, entity_scores
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
class Tag:
    """Labels of words; the targets are those of `data.tasks.targets`."""

    labels: tuple[str, ...] = ()  # their names, to tell entities in evaluation

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        return ("tokens",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """The number of labeled tokens, [1]."""
        return (batch.targets != UNLABELED).sum()[None]

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        logits = self._logits(model, batch)
        total = F.cross_entropy(logits, batch.targets, ignore_index=UNLABELED, reduction="sum")
        weights = self.weigh(batch)
        right = (logits.detach().argmax(-1) == batch.targets).sum()
        figures = {"loss": (total, weights[0]), "accuracy": (right, weights[0])}
        loss = share_of_loss(total[None], weights if totals is None else totals)
        return loss, BatchStats.of(batch.packed, batch.tokens, **figures)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = single_process
    ) -> dict[str, float]:
        """Loss and accuracy over labeled tokens, precision, recall and F1 of entities."""
        local: list[tuple[float, list[list[int]], list[list[int]]]] = []
        with evaluating(model):
            for batch in batches:
                logits = self._logits(model, batch)
                total = F.cross_entropy(
                    logits, batch.targets, ignore_index=UNLABELED, reduction="sum"
                )
                predicted = batch.packed.split(logits.argmax(-1).cpu())
                expected = batch.packed.split(batch.targets.cpu())
                labeled = [truth != UNLABELED for truth in expected]
                local.append(
                    (
                        float(total),
                        [p[keep].tolist() for p, keep in zip(predicted, labeled, strict=True)],
                        [t[keep].tolist() for t, keep in zip(expected, labeled, strict=True)],
                    )
                )
        results = gather(local)
        predictions = [sentence for _, sentences, _ in results for sentence in sentences]
        truth = [sentence for _, _, sentences in results for sentence in sentences]
        tokens = sum(map(len, truth))
        if not tokens:
            raise InputError("there is nothing to evaluate on: the data has no labeled word")
        right = sum(
            p == t
            for guess, gold in zip(predictions, truth, strict=True)
            for p, t in zip(guess, gold, strict=True)
        )
        names = self.labels or tuple(map(str, range(1 + max(map(max, filter(None, truth))))))
        scores = entity_scores(
            [[names[t] for t in gold] for gold in truth],
            [[names[p] for p in guess] for guess in predictions],
        )
        loss = sum(total for total, _, _ in results) / tokens
        figures = {"loss": loss, "accuracy": right / tokens, **scores}
        return {**figures, "sequences": float(len(truth))}

    def _logits(self, model: nn.Module, batch: TaskBatch) -> Tensor:
        """[T, C]; filler that a compiled batch has at its end is left out."""
        (logits,) = model(batch.packed, *self.heads)
        if self.labels and logits.shape[1] != len(self.labels):
            raise InputError(
                f"there are {len(self.labels)} labels; the model's head has {logits.shape[1]}"
            )
        return at_least_fp32(logits)[: len(batch.targets)]
