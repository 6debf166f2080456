"""One training step: gradients summed over its parts and over ranks, clipped and applied.

The weight of a step (tokens, sequences or pairs) is counted over all parts and ranks before the
first part runs. Each part's loss is then its share of the step's loss, and gradients only have to
be added. Nothing here waits for the device.

Where a loss compares the examples of a step with each other (`objectives.embedding`), a step of
several parts or ranks runs twice: `_compute_across`.

Shapes: N examples of K texts each, E width of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from packhorse.train import checkpoints, cost, feed
from packhorse.train.feed import Batch, StepBatches
from packhorse.train.job import TrainingJob
from packhorse.train.objectives import Embedding
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
    objective = job.objective
    if isinstance(objective, Embedding) and objective.across and len(parts) * ranks.world > 1:
        return _compute_across(job, objective, ranks, parts, totals)
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


def _compute_across(
    job: TrainingJob, objective: Embedding, ranks: RankGroup, parts: list[Batch], totals: Tensor
) -> tuple[tuple[str, ...], Tensor]:
    """The same for a loss of all vectors of the step: vectors, their gradients, then the weights'.

    With a single part its graph is kept; otherwise each part runs again with the same dropout.
    Every rank computes the loss of all vectors, and rank 0 alone reports it.
    """
    device = job.place.device
    model = job.model
    is_single = len(parts) == 1
    states: list[dict[str, Tensor]] = []
    vectors: list[Tensor] = []
    for batch in parts:
        states.append(checkpoints.capture_rng(device))
        with torch.set_grad_enabled(is_single):
            vectors.append(objective.vectors(model, batch))
    pairs = zip(vectors, (batch.targets for batch in parts), strict=True)
    used = [(part.detach(), targets) for part, targets in pairs if len(part)]
    joined = torch.cat([part for part, _ in used]) if used else vectors[0].detach()
    targets = torch.cat([targets for _, targets in used]) if used else parts[0].targets
    joined, begin = _of_all_ranks(joined, ranks)
    targets, _ = _of_all_ranks(targets.to(joined), ranks)
    joined.requires_grad_()
    sums = objective.sums(joined, targets)
    loss = (sums["loss"] / totals.to(joined)).sum()
    (gradients,) = torch.autograd.grad(loss, joined)  # [N, K, E]
    accumulated: list[Tensor] = []
    for number, (batch, state) in enumerate(zip(parts, states, strict=True), 1):
        own = vectors[number - 1]
        if not is_single:
            checkpoints.restore_rng([state], device, 0, 1)
            own = objective.vectors(model, batch)
        end = begin + len(own)
        own.backward(gradients[begin:end].reshape(own.shape))
        begin = end
        if job.compiled and len(parts) > 1:
            accumulated = _accumulate(job, accumulated, is_last=number == len(parts))
    norm = _clip(job, ranks)
    update(job.optimizer)
    figures = torch.stack([x for s in sums.values() for x in (s.detach(), totals[0].to(s))])
    row = torch.cat([loss.detach()[None].to(figures), norm[None].to(figures), figures])
    return tuple(sums), row if ranks.rank == 0 else _only_norm(row)


def _of_all_ranks(mine: Tensor, ranks: RankGroup) -> tuple[Tensor, int]:
    """The rows [n, …] of all ranks, one after the other, and where this rank's begin."""
    if ranks.world == 1:
        return mine, 0
    shape = torch.tensor([len(mine), *mine.shape[1:]] if len(mine) else [0] * mine.ndim)
    shapes = torch.zeros(ranks.world, mine.ndim, dtype=torch.int64)
    shapes[ranks.rank] = shape
    shapes = ranks.add(shapes)
    begin = int(shapes[: ranks.rank, 0].sum())
    rest = shapes[:, 1:].amax(0).tolist()
    rows = mine.new_zeros(int(shapes[:, 0].sum()), *rest)
    rows[begin : begin + len(mine)] = mine.reshape(len(mine), *rest)
    return ranks.add(rows), begin


def _only_norm(row: Tensor) -> Tensor:
    """The row of a rank whose other figures another rank reports."""
    alone = torch.zeros_like(row)
    alone[1] = row[1]
    return alone


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
