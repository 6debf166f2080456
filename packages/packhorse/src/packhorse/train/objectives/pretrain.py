"""BERT's pretraining (Devlin et al. 2018): masked words and next-sentence prediction.

Logits are computed at masked tokens only: V is large, and no other logit enters the loss. The loss
is averaged over the masked tokens of the step, as in MLPerf's reference, or first within each
sequence and then over sequences, as in Graphcore's v1.0 (`average`). Both are what unpacked
training would compute; nothing depends on how sequences share rows.

Accuracy is MLPerf's: correct tokens among the masked ones. `mlm_sequence_accuracy` is the mean over
sequences, Graphcore's stopping criterion in v1.0.

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
from packhorse.train.objectives.stats import (
    BatchStats,
    Gather,
    at_least_fp32,
    evaluating,
    share_of_loss,
    single_process,
)
from packhorse.train.objectives.word_loss import word_loss

if TYPE_CHECKING:
    from packhorse.data.packed.loader import PretrainingBatch

Average = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class Pretrain:
    """The sum of the mean losses of masked words and, optionally, of next sentences."""

    average: Average = "token"
    next_sentence: bool = True

    def __post_init__(self) -> None:
        if self.average not in get_args(Average):
            known = " or ".join(map(repr, get_args(Average)))
            raise InputError(f"average is {self.average!r}; the loss can be averaged by {known}")

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the model must have."""
        return ("mlm", "nsp") if self.next_sentence else ("mlm",)

    def weigh(self, batch: PretrainingBatch) -> Tensor:
        """The number of masked tokens, or of sequences that have any; and of sequences: [parts]."""
        masked = batch.masked_at
        words = _sequences_with_masks(batch) if self.average == "sequence" else len(masked)
        # Filled, not copied: the host would wait for a copy to the device.
        counts = masked.new_full((len(self.heads),), len(batch.packed.places))
        counts[:1].fill_(words)
        return counts

    def loss(
        self, model: nn.Module, batch: PretrainingBatch, totals: Tensor | None = None
    ) -> tuple[Tensor, BatchStats]:
        """The batch's share of the step's loss, and its figures."""
        word_logits, *sentence_logits = model(batch.packed, *self.heads, at=batch.masked_at)
        weights = self.weigh(batch)
        nll, is_correct = word_loss(word_logits, batch.masked_ids)  # [M]
        correct = is_correct.to(nll.dtype)
        shares = _shares(batch, nll.dtype)
        sums = [(nll * shares if self.average == "sequence" else nll).sum()]
        figures = {
            "mlm_loss": (sums[0], weights[0]),
            "mlm_accuracy": (correct.sum(), len(correct)),
            "mlm_sequence_accuracy": ((correct * shares).sum(), shares.sum()),
        }
        for logits in sentence_logits:
            logits = batch.packed.pick(logits)
            sums.append(F.cross_entropy(at_least_fp32(logits), batch.next_labels, reduction="sum"))
            correct = (logits.detach().argmax(-1) == batch.next_labels).sum()
            figures["nsp_loss"] = (sums[1], weights[1])
            figures["nsp_accuracy"] = (correct, weights[1])
        loss = share_of_loss(torch.stack(sums), weights if totals is None else totals)
        return loss, BatchStats.of(batch.packed, batch.tokens, **figures)

    def evaluate(
        self, model: nn.Module, batches: Iterable[PretrainingBatch], gather: Gather = single_process
    ) -> dict[str, float]:
        """Loss and accuracies over the batches of all ranks, and their number of sequences."""
        with evaluating(model):
            local = [self.loss(model, batch)[1].cpu() for batch in batches]
        stats = gather([reduce(add, local)] if local else [])
        if not stats:
            raise InputError("there is nothing to evaluate on: the data has no batch")
        total = reduce(add, stats)
        means = total.means()
        loss = sum(mean for name, mean in means.items() if name.endswith("_loss"))
        return {"loss": loss, **means, "sequences": float(total.sequences)}


def _shares(batch: PretrainingBatch, dtype: torch.dtype) -> Tensor:
    """[M]: 1 over the number of masked tokens in the same sequence."""
    owner = _owners(batch)
    counts = owner.new_zeros(len(batch.packed)).index_add(0, owner, torch.ones_like(owner))
    return 1 / counts[owner].to(dtype)


def _sequences_with_masks(batch: PretrainingBatch) -> Tensor:
    has_mask = torch.zeros(len(batch.packed), dtype=torch.bool, device=batch.masked_at.device)
    return has_mask.index_fill(0, _owners(batch), True).sum()


def _owners(batch: PretrainingBatch) -> Tensor:
    """[M]: the sequence slot of each masked token."""
    return torch.searchsorted(batch.packed.cu_seqlens, batch.masked_at.contiguous(), right=True) - 1
