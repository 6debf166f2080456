"""One training step: gradients summed over its parts and over ranks, clipped and applied.

The weight of a step (tokens, sequences or pairs) is counted over all parts and ranks before the
first part runs. Each part's loss is then its share of the step's loss, and gradients only have to
be added. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from packhorse.train import cost, feed
from packhorse.train.feed import Batch, StepBatches
from packhorse.train.job import TrainingJob
from packhorse.train.objectives.stats import BatchStats
from packhorse.train.ranks import RankGroup, add_gradients, update


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; its figures are still on the device."""

    names: tuple[str, ...]
    row: Tensor  # loss, norm of the gradient, then a sum and a count per name
    sequences: int  # of all ranks
    tokens: int  # of all ranks
    work: cost.StepWork  # of this rank


def train_step(job: TrainingJob, step: StepBatches, ranks: RankGroup) -> StepResult:
    """Run forward and backward over the step's parts, and update the weights."""
    weights = torch.stack([job.objective.weigh(batch) for batch in step.batches]).sum(0)
    counts = torch.tensor([step.sequences, step.tokens], dtype=torch.int64)
    # One reduction for everything: each costs a round trip between the ranks.
    sequences, tokens, *rest = ranks.add(torch.cat([counts, weights])).tolist()
    totals = feed.send(torch.tensor(rest), job.place.device)
    shape = job.feed.shape if job.compiled else None
    parts = [feed.to_device(batch, job.place.device, shape) for batch in step.batches]
    compute = partial(_compute, job, ranks)
    if job.recorder:
        names, row = job.recorder(compute, job.optimizer, parts, totals)
    else:
        names, row = compute(parts, totals)
    work = cost.work(step.batches * job.settings.passes, shape.tokens if shape else 0)
    return StepResult(names, row, sequences, tokens, work)


def _compute(
    job: TrainingJob, ranks: RankGroup, parts: list[Batch], totals: Tensor
) -> tuple[tuple[str, ...], Tensor]:
    """The names of the step's figures, and the row that holds them."""
    job.optimizer.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    stats: list[BatchStats] = []
    gradients: list[Tensor] = []  # sums over the earlier parts
    for number, batch in enumerate(parts, 1):
        loss, batch_stats = job.objective.loss(job.model, batch, totals)
        loss.backward()
        losses.append(loss.detach())
        stats.append(batch_stats)
        if job.compiled and len(parts) > 1:
            gradients = _accumulate(job, gradients, is_last=number == len(parts))
    norm = _clip(job, ranks)
    update(job.optimizer)
    sums = torch.stack([batch_stats.sums for batch_stats in stats]).sum(0)
    head = torch.stack([torch.stack(losses).sum().to(sums), norm.to(sums)])
    return stats[0].names, torch.cat([head, sums.flatten()])


def set_rates(job: TrainingJob, step: int) -> None:
    """Set learning rate and betas to their values at this step; the first step is 0."""
    for group in job.optimizer.param_groups:
        group["lr"] = job.schedule.rate(step)
        group["betas"] = job.schedule.betas(step)


def _accumulate(job: TrainingJob, earlier: list[Tensor], is_last: bool) -> list[Tensor]:
    """The gradients so far, detached from their parameters until the last part has run.

    The compiler refuses parameters whose gradient has another dtype, and the gradients of bf16
    parameters are fp32.
    """
    gradients = [p.grad for p in _parameters(job) if p.grad is not None]
    if earlier:
        torch._foreach_add_(gradients, earlier)  # pyright: ignore[reportPrivateImportUsage]
    if not is_last:
        job.optimizer.zero_grad(set_to_none=True)
    return gradients


def _parameters(job: TrainingJob) -> list[Tensor]:
    return [p for group in job.optimizer.param_groups for p in group["params"]]


def _clip(job: TrainingJob, ranks: RankGroup) -> Tensor:
    """Sum gradients over ranks, clip them in place, and return their norm before clipping."""
    parameters = _parameters(job)
    gradients = [p.grad for p in parameters if p.grad is not None]
    add_gradients(gradients, ranks)
    norm = get_total_norm(gradients)
    if job.settings.clip:
        clip_grads_with_norm_(parameters, job.settings.clip, norm)
    return norm
