"""Training objectives: losses of packed batches that weight sequences as unpacked training would.

An objective defines the heads that the model must have, the weight of a batch, its loss and
figures, and the evaluation. A step may be many batches on many ranks, and the mean of their means
is not the mean, since packed batches hold as many sequences as fit. So a loss is a sum divided by
the weight of the *whole step*. The loop sums `weigh` over the step's batches and ranks before the
first forward pass (counts of labels, no model needed), passes the totals to each `loss`, and sums
gradients:

    totals = sum(objective.weigh(batch) for batch in batches)      # and over ranks: all_reduce
    for batch in batches:
        loss, stats = objective.loss(model, batch, totals)
        loss.backward()                                            # ranks sum their gradients

The losses then sum to the step's loss, exactly as if every sequence had been run alone. Without
totals a batch counts as a whole step. Parts of a loss (masked words, next sentences) have separate
weights. Dummy sequences have none.

`model` is called as `model(packed, *heads, at=…)`: a `Model`, or a wrapper of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from packhorse.train.objectives.choose import Choose
from packhorse.train.objectives.classify import Classify
from packhorse.train.objectives.embedding import Embedding
from packhorse.train.objectives.pretrain import Pretrain
from packhorse.train.objectives.span import SpanEnds
from packhorse.train.objectives.stats import BatchStats, Gather, single_process
from packhorse.train.objectives.tag import Tag


class Objective(Protocol):
    """A training objective; batches are from `data.packed.loader` or `data.tasks.targets`."""

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        ...

    def weigh(self, batch: Any) -> Tensor:
        """The batch's weight in each part of the loss, [parts] int64."""
        ...

    def loss(
        self, model: nn.Module, batch: Any, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        ...

    def evaluate(
        self, model: nn.Module, batches: Iterable[Any], gather: Gather = single_process
    ) -> dict[str, float]:
        """Measures of the model; `gather` joins the results of all ranks."""
        ...


# By the problem of a `data.tasks.targets.Task`.
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "pretrain": Pretrain,
    "single_label": partial(Classify, "single_label"),
    "multi_label": partial(Classify, "multi_label"),
    "regression": partial(Classify, "regression"),
    "similarity": partial(Embedding, "cosine"),
    "contrastive": partial(Embedding, "ranking"),
    "distill": partial(Embedding, "margin"),
    "tokens": Tag,
    "choice": Choose,
    "span": SpanEnds,
}

__all__ = [
    "OBJECTIVES",
    "BatchStats",
    "Choose",
    "Classify",
    "Embedding",
    "Objective",
    "Pretrain",
    "SpanEnds",
    "Tag",
]
