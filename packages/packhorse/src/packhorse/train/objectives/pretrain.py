"""BERT's own objective (Devlin et al. 2018): masked words, and whether two segments follow.

Words are scored at masked tokens alone: V is large, and no other logit enters the loss. It is
averaged over the masked tokens of the step, as MLPerf's reference does, or first within each
sequence and then over sequences, as Graphcore's v1.0 did: `average` says which. Both count what
unpacked training would count; nothing depends on how sequences share rows.

Accuracy is MLPerf's, correct tokens among the masked ones; `mlm_sequence_accuracy` is the mean of
the sequences' own, on which Graphcore's v1.0 stopped.

Shapes: T tokens, S sequences, M masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.errors import InputError
from packhorse.train.objectives.stats import Gather, Stats, alone, divided, evaluating, wide

if TYPE_CHECKING:
    from packhorse.data.packed.loader import PretrainingBatch

Average = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class Pretrain:
    """Masked words and, unless left out, the next sentence: the sum of the two means."""

    average: Average = "token"
    next_sentence: bool = True

    def __post_init__(self) -> None:
        if self.average not in get_args(Average):
            known = " or ".join(map(repr, get_args(Average)))
            raise InputError(f"the loss can be averaged by {known}, not by {self.average!r}")

    @property
    def heads(self) -> tuple[str, ...]:
        """What the model must have."""
        return ("mlm", "nsp") if self.next_sentence else ("mlm",)

    def weigh(self, batch: PretrainingBatch) -> Tensor:
        """[parts]: masked tokens, or sequences that have any; and sequences."""
        at, sequences = batch.masked_at, len(batch.packed.places)
        words = _sequences_with_masks(batch) if self.average == "sequence" else len(at)
        # Filled, not set: a number that is copied to a device is waited for.
        counts = at.new_full((len(self.heads),), sequences)
        counts[:1].fill_(words)
        return counts

    def loss(
        self, model: nn.Module, batch: PretrainingBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, Stats]:
        """The batch's share of the step's loss, and its figures."""
        words, *follows = model(batch.packed, *self.heads, at=batch.masked_at)
        weights = self.weigh(batch)
        nll = F.cross_entropy(wide(words), batch.masked_ids, reduction="none")  # [M]
        right = (words.detach().argmax(-1) == batch.masked_ids).to(nll.dtype)
        shares = _shares(batch, nll.dtype)
        sums = [(nll * shares if self.average == "sequence" else nll).sum()]
        figures = {
            "mlm_loss": (sums[0], weights[0]),
            "mlm_accuracy": (right.sum(), len(right)),
            "mlm_sequence_accuracy": ((right * shares).sum(), shares.sum()),
        }
        for logits in follows:
            mine = batch.packed.pick(logits)
            sums.append(F.cross_entropy(wide(mine), batch.next_labels, reduction="sum"))
            hits = (mine.detach().argmax(-1) == batch.next_labels).sum()
            figures |= {"nsp_loss": (sums[1], weights[1]), "nsp_accuracy": (hits, weights[1])}
        loss = divided(torch.stack(sums), weights if totals is None else totals)
        return loss, Stats.of(batch.packed, batch.tokens, **figures)

    def evaluate(
        self, model: nn.Module, batches: Iterable[PretrainingBatch], gather: Gather = alone
    ) -> dict[str, float]:
        """Loss and accuracies over all batches of all ranks, and how many sequences they held."""
        with evaluating(model):
            found = [self.loss(model, batch)[1].cpu() for batch in batches]
        found = gather([reduce(add, found)] if found else [])
        if not found:
            raise InputError("there is nothing to evaluate on: no batch was given")
        total = reduce(add, found)
        means = total.means()
        loss = sum(mean for name, mean in means.items() if name.endswith("_loss"))
        return {"loss": loss, **means, "sequences": float(total.sequences)}


def _shares(batch: PretrainingBatch, dtype: torch.dtype) -> Tensor:
    """[M]: the part that each masked token is of those of its sequence."""
    owner = _owners(batch)
    counts = owner.new_zeros(len(batch.packed)).index_add(0, owner, torch.ones_like(owner))
    return 1 / counts[owner].to(dtype)


def _sequences_with_masks(batch: PretrainingBatch) -> Tensor:
    holds = torch.zeros(len(batch.packed), dtype=torch.bool, device=batch.masked_at.device)
    return holds.index_fill(0, _owners(batch), True).sum()


def _owners(batch: PretrainingBatch) -> Tensor:
    """[M]: the sequence slot of each masked token."""
    return torch.searchsorted(batch.packed.cu_seqlens, batch.masked_at.contiguous(), right=True) - 1
