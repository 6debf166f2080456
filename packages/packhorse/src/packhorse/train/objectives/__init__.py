"""What is learned: a loss for a packed batch that weights sequences as unpacked training would.

An objective says what the model must have (`heads`), what a batch weighs, its loss and its figures,
and how good a model is. A step may be many batches on many ranks, and the mean of their means is
not the mean: packed batches hold as many sequences as fit. So a loss is a sum over what the *whole
step* weighs. The loop adds up `weigh` over the step's batches and ranks before the first forward
pass (counts of labels, no model needed), hands the totals to each `loss`, and adds gradients up:

    totals = sum(objective.weigh(batch) for batch in batches)      # and over ranks: all_reduce
    for batch in batches:
        loss, stats = objective.loss(model, batch, totals)
        loss.backward()                                            # ranks add their gradients up

The losses then sum to the step's loss, exactly as if every sequence had been run alone. Without
totals a batch is a step of its own. Parts of a loss (words, next sentences) weigh by themselves.
Dummy sequences weigh nothing.

`model` is called as `model(packed, *heads, at=…)`: a `Model`, or what wraps one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from packhorse.train.objectives.classify import Classify
from packhorse.train.objectives.pretrain import Pretrain
from packhorse.train.objectives.similarity import Contrastive, Similarity
from packhorse.train.objectives.span import SpanEnds
from packhorse.train.objectives.stats import Gather, Stats, alone


class Objective(Protocol):
    """Batches come from `data.packed.loader` or `data.tasks.targets`, on the model's device."""

    @property
    def heads(self) -> tuple[str, ...]:
        """What the model must have."""
        ...

    def weigh(self, batch: Any) -> Tensor:
        """[parts] int64: what each part of the batch's loss is divided by."""
        ...

    def loss(
        self, model: nn.Module, batch: Any, totals: Tensor | None = None
    ) -> tuple[Tensor, Stats]:
        """The batch's share of the step's loss, to be summed, and its figures."""
        ...

    def evaluate(
        self, model: nn.Module, batches: Iterable[Any], gather: Gather = alone
    ) -> dict[str, float]:
        """How good the model is; `gather` joins a rank's results with those of the others."""
        ...


# By the problem of a `data.tasks.targets.Task`, which says so itself.
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "pretrain": Pretrain,
    "single_label": partial(Classify, "single_label"),
    "multi_label": partial(Classify, "multi_label"),
    "regression": partial(Classify, "regression"),
    "similarity": Similarity,
    "contrastive": Contrastive,
    "span": SpanEnds,
}

__all__ = [
    "OBJECTIVES",
    "Classify",
    "Contrastive",
    "Objective",
    "Pretrain",
    "Similarity",
    "SpanEnds",
    "Stats",
]
