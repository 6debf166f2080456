"""Embeddings whose cosine is the similarity of two texts, learned from scores or from pairs alone.

`Similarity` fits the cosine of each pair to its score. `Contrastive` (van den Oord et al. 2018, the
multiple negatives of sentence-transformers) has pairs without scores: among the second texts of its
batch each first text should be nearest to its own. A pair is never divided between batches. The
negatives are those of the batch as it is run; pairs of other ranks and parts are not used. So a
step's parts should be as large as memory allows, and their number is part of the recipe.

Shapes: N pairs (sequences 2i and 2i + 1), E width of a vector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

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

NO_PAIRS = "there is nothing to evaluate on: the data has no pair"


@dataclass(frozen=True, slots=True)
class Similarity:
    """The squared error of the cosine, averaged over the pairs of the step."""

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        return ("embed",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """The number of pairs, [1]."""
        return _pairs(batch)

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        cosines = _cosines(model, batch)
        total = F.mse_loss(cosines, batch.targets.to(cosines), reduction="sum")
        return _share(batch, totals, loss=total)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = single_process
    ) -> dict[str, float]:
        """Loss and correlations over the batches of all ranks."""
        with evaluating(model):
            local = [(_cosines(model, batch).cpu(), batch.targets.cpu()) for batch in batches]
        results = gather(local)
        if not sum(len(scores) for _, scores in results):
            raise InputError(NO_PAIRS)
        cosines, scores = (torch.cat(column).double() for column in zip(*results, strict=True))
        return {
            "loss": float(F.mse_loss(cosines, scores)),
            "pearson": glue_score.pearson(cosines.numpy(), scores.numpy()),
            "spearman": glue_score.spearman(cosines.numpy(), scores.numpy()),
            "pairs": float(len(scores)),
        }


@dataclass(frozen=True, slots=True)
class Contrastive:
    """Cross entropy of cosines divided by the temperature, averaged over the pairs of the step."""

    temperature: float = 0.05

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError(f"temperature is {self.temperature}; it must be above 0")

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        return ("embed",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """The number of pairs, [1]."""
        return _pairs(batch)

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        first, second = _vectors(model, batch)
        cosines = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T  # [N, N]
        logits = cosines / self.temperature
        partners = torch.arange(len(logits), device=logits.device)
        total = (logits.logsumexp(1) - logits.diagonal()).sum()
        # argmax refuses a batch without pairs.
        correct = (logits.detach().argmax(1) == partners).sum() if len(logits) else partners.sum()
        return _share(batch, totals, loss=total, accuracy=correct)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = single_process
    ) -> dict[str, float]:
        """Loss, and how often the nearest text in the batch is the partner."""
        with evaluating(model):
            results = gather([self.loss(model, batch)[1].cpu() for batch in batches])
        if not sum(stats.sequences for stats in results):
            raise InputError(NO_PAIRS)
        total = reduce(add, results)
        return {**total.means(), "pairs": total.sequences / 2}


def _pairs(batch: TaskBatch) -> Tensor:
    return batch.targets.new_full((1,), len(batch.targets), dtype=torch.int64)


def _share(batch: TaskBatch, totals: Tensor | None, **sums: Tensor) -> tuple[Tensor, BatchStats]:
    """The batch's share of the step's loss and its figures, from sums over its pairs."""
    pairs = _pairs(batch)
    loss = share_of_loss(sums["loss"][None], pairs if totals is None else totals)
    figures = {name: (total, pairs[0]) for name, total in sums.items()}
    return loss, BatchStats.of(batch.packed, batch.tokens, **figures)


def _vectors(model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """The embeddings of the first texts [N, E] and of the second [N, E]."""
    (vectors,) = model(batch.packed, "embed")
    vectors = at_least_fp32(batch.packed.pick(vectors))
    return vectors[::2], vectors[1::2]


def _cosines(model: nn.Module, batch: TaskBatch) -> Tensor:
    return F.cosine_similarity(*_vectors(model, batch))
