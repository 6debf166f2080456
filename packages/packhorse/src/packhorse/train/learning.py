"""One step of learning: gradients added up over its parts and over ranks, clipped, applied.

What a step weighs is counted over all parts and ranks before the first of them runs, so each part's
loss is its share of the step's and gradients only have to be added. Nothing here waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from packhorse.train import cost, feed
from packhorse.train.feed import Batch, Step
from packhorse.train.job import Job
from packhorse.train.objectives.stats import Stats
from packhorse.train.ranks import Ranks, add_gradients, update


@dataclass(frozen=True, slots=True)
class Learned:
    """What a step did; its figures are on the device."""

    names: tuple[str, ...]
    row: Tensor  # loss, norm of the gradient, then a sum and a count for each name
    sequences: int  # of all ranks
    tokens: int
    work: cost.Work  # of this one


def learn(job: Job, step: Step, ranks: Ranks) -> Learned:
    """Forward and backward over the step's parts, and the update."""
    weights = torch.stack([job.objective.weigh(batch) for batch in step.batches]).sum(0)
    counts = torch.tensor([step.sequences, step.tokens], dtype=torch.int64)
    sequences, tokens, *rest = ranks.add(torch.cat([counts, weights])).tolist()
    totals = feed.sent(torch.tensor(rest), job.place.device)
    shape = job.feed.shape if job.compiled else None
    parts = [feed.placed(batch, job.place.device, shape) for batch in step.batches]
    compute = partial(_computed, job, ranks)
    if job.recorder:
        names, row = job.recorder(compute, job.optimizer, parts, totals)
    else:
        names, row = compute(parts, totals)
    done = cost.work(step.batches * job.settings.passes, shape.tokens if shape else 0)
    return Learned(names, row, sequences, tokens, done)


def _computed(
    job: Job, ranks: Ranks, parts: list[Batch], totals: Tensor
) -> tuple[tuple[str, ...], Tensor]:
    """The names of the step's figures, and the row that holds them."""
    job.optimizer.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    figures: list[Stats] = []
    earlier: list[Tensor] = []  # gradients of the parts before
    for number, batch in enumerate(parts, 1):
        loss, stats = job.objective.loss(job.model, batch, totals)
        loss.backward()
        losses.append(loss.detach())
        figures.append(stats)
        if job.compiled and len(parts) > 1:
            earlier = _added(job, earlier, last=number == len(parts))
    norm = _clip(job, ranks)
    update(job.optimizer)
    sums = torch.stack([stats.sums for stats in figures]).sum(0)
    ends = torch.stack([torch.stack(losses).sum().to(sums), norm.to(sums)])
    return figures[0].names, torch.cat([ends, sums.flatten()])


def tune(job: Job, number: int) -> None:
    """Set what changes from step to step, as it is for this one; the first is 0."""
    for group in job.optimizer.param_groups:
        group["lr"] = job.pace.rate(number)
        group["betas"] = job.pace.betas(number)


def _added(job: Job, earlier: list[Tensor], last: bool) -> list[Tensor]:
    """Gradients so far; they are kept away from parameters until the last part is through.

    The compiler refuses parameters whose gradient is of another type, and those of bf16 are fp32.
    """
    mine = [p.grad for p in _trained(job) if p.grad is not None]
    if earlier:
        torch._foreach_add_(mine, earlier)  # pyright: ignore[reportPrivateImportUsage]
    if not last:
        job.optimizer.zero_grad(set_to_none=True)
    return mine


def _trained(job: Job) -> list[Tensor]:
    return [p for group in job.optimizer.param_groups for p in group["params"]]


def _clip(job: Job, ranks: Ranks) -> Tensor:
    """The gradient's norm; afterwards it is no longer than it may be."""
    trained = _trained(job)
    gradients = [p.grad for p in trained if p.grad is not None]
    add_gradients(gradients, ranks)
    norm = get_total_norm(gradients)
    if job.settings.clip:
        clip_grads_with_norm_(trained, job.settings.clip, norm)
    return norm
