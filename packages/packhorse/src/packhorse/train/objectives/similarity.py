"""Vectors whose cosine says how alike two texts are: learned from scores, or from pairs alone.

`Similarity` brings the cosine of each pair to its score. `Contrastive` (van den Oord et al. 2018,
as sentence-transformers' multiple negatives) has pairs without scores: among the second texts of
its batch each first text should be nearest to its own. A pair is never divided between batches.
What it is told from is the batch as it is run: pairs of other ranks and parts are not looked at, so
a step's parts should be as large as memory allows, and their number is part of the recipe.

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
from packhorse.train.objectives.stats import Gather, Stats, alone, divided, evaluating, wide

if TYPE_CHECKING:
    from packhorse.data.tasks.targets import TaskBatch

NOTHING = "there is nothing to evaluate on: no pair was given"


@dataclass(frozen=True, slots=True)
class Similarity:
    """The squared error of the cosine, averaged over the pairs of the step."""

    @property
    def heads(self) -> tuple[str, ...]:
        """What the model must have."""
        return ("embed",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """[1]: pairs."""
        return _pairs(batch)

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, Stats]:
        """The batch's share of the step's loss, and its figures."""
        cosines = _cosines(model, batch)
        total = F.mse_loss(cosines, batch.targets.to(cosines), reduction="sum")
        return _share(batch, totals, loss=total)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = alone
    ) -> dict[str, float]:
        """Loss and correlations over all batches of all ranks."""
        with evaluating(model):
            mine = [(_cosines(model, batch).cpu(), batch.targets.cpu()) for batch in batches]
        found = gather(mine)
        if not sum(len(scores) for _, scores in found):
            raise InputError(NOTHING)
        cosines, scores = (torch.cat(column).double() for column in zip(*found, strict=True))
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
            raise InputError(f"the temperature must be above 0, got {self.temperature}")

    @property
    def heads(self) -> tuple[str, ...]:
        """What the model must have."""
        return ("embed",)

    def weigh(self, batch: TaskBatch) -> Tensor:
        """[1]: pairs."""
        return _pairs(batch)

    def loss(
        self, model: nn.Module, batch: TaskBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, Stats]:
        """The batch's share of the step's loss, and its figures."""
        first, second = _vectors(model, batch)
        likeness = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T  # [N, N]
        logits = likeness / self.temperature
        own = torch.arange(len(logits), device=logits.device)
        total = (logits.logsumexp(1) - logits.diagonal()).sum()
        right = (logits.detach().argmax(1) == own).sum() if len(own) else own.sum()
        return _share(batch, totals, loss=total, accuracy=right)

    def evaluate(
        self, model: nn.Module, batches: Iterable[TaskBatch], gather: Gather = alone
    ) -> dict[str, float]:
        """Loss, and how often a text's own partner is the nearest in its batch."""
        with evaluating(model):
            found = gather([self.loss(model, batch)[1].cpu() for batch in batches])
        if not sum(stats.sequences for stats in found):
            raise InputError(NOTHING)
        total = reduce(add, found)
        return {**total.means(), "pairs": total.sequences / 2}


def _pairs(batch: TaskBatch) -> Tensor:
    return batch.targets.new_full((1,), len(batch.targets), dtype=torch.int64)


def _share(batch: TaskBatch, totals: Tensor | None, **sums: Tensor) -> tuple[Tensor, Stats]:
    """The batch's share of the step's loss, and its figures, of sums over its pairs."""
    pairs = _pairs(batch)
    loss = divided(sums["loss"][None], pairs if totals is None else totals)
    figures = {name: (total, pairs[0]) for name, total in sums.items()}
    return loss, Stats.of(batch.packed, batch.tokens, **figures)


def _vectors(model: nn.Module, batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """[N, E] each: of the first texts and of the second."""
    (vectors,) = model(batch.packed, "embed")
    mine = wide(batch.packed.pick(vectors))
    return mine[::2], mine[1::2]


def _cosines(model: nn.Module, batch: TaskBatch) -> Tensor:
    return F.cosine_similarity(*_vectors(model, batch))
