"""How fast a model will be trained here, found by trying: a step on made-up tokens, timed.

For devices whose peak no data sheet names, a CPU above all. What is tried has the model's widths,
its words and its optimizer, but two layers at most, so that BERT-Large answers within seconds; the
rest is arithmetic: a step takes as long as its operations, an update as long as its parameters are
many. Tokens are as many as run at once, up to a bound, for small products are slow. The trial runs
uncompiled, and on a machine that is busy it is as slow as the run would be.

Shapes: T tokens.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from packhorse import device as devices
from packhorse.data.packed.loader import PretrainingBatch
from packhorse.train import cost, feed
from packhorse.train.job import Ground
from packhorse.train.objectives import Pretrain
from packhorse.train.preparing import optimizer_for, prepare
from packhorse.train.warmup import made_up

LAYERS = 2
TOKENS = 2048  # at once, at most
ROUNDS, SECONDS = 5, 0.5  # so many are timed, or as many as fit: one at least


@dataclass(frozen=True, slots=True)
class Trial:
    """What one device did, a second."""

    operations: float  # forward and backward
    parameters: float  # updated

    def step(self, operations: float, parameters: float) -> float:
        """Seconds of a step of so much."""
        return operations / self.operations + parameters / self.parameters


def attempt(ground: Ground) -> Trial:
    """Make a model like the one of a run, and let it take some steps."""
    place, settings = ground.place, ground.settings
    config = replace(ground.config, layers=min(LAYERS, ground.config.layers))
    kernel = ground.attention().kernel
    words = ground.problem == "pretrain"
    made, _ = prepare(settings, config, ("mlm",) if words else (), kernel)
    model = made.model.train().to(place.device)
    optimizer = optimizer_for(settings, model, place.half)
    batch = feed.placed(_batch(ground), place.device)
    learned, updated = _timed(model, optimizer, batch, words)
    count = sum(parameter.numel() for parameter in model.parameters())
    guessed = len(batch.masked_at) if words else 0
    done = replace(cost.work([batch]), guessed=guessed)
    return Trial(cost.operations(config, done) / learned, count / updated)


def _batch(ground: Ground) -> PretrainingBatch:
    """As many tokens as run at once, in sequences of the usual length."""
    fed = ground.feed
    at_once = fed.batch * fed.tokens / fed.parts / ground.place.world
    return made_up(max(1, min(TOKENS, round(at_once))), max(1, round(fed.tokens)))


def _timed(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: PretrainingBatch, words: bool
) -> tuple[float, float]:
    """Seconds of forward and backward, and of the update: medians; the first round warms up."""
    times: list[tuple[float, float]] = []
    device, begun = batch.packed.ids.device, time.perf_counter()
    while len(times) < 2 or (len(times) <= ROUNDS and time.perf_counter() - begun < SECONDS):
        optimizer.zero_grad(set_to_none=True)
        moments = [_now(device)]
        _loss(model, batch, words).backward()
        moments.append(_now(device))
        optimizer.step()
        moments.append(_now(device))
        times.append((moments[1] - moments[0], moments[2] - moments[1]))
    learned, updated = zip(*times[1:], strict=True)
    return statistics.median(learned), statistics.median(updated)


def _now(device: torch.device) -> float:
    devices.synchronize(device)
    return time.perf_counter()


def _loss(model: nn.Module, batch: PretrainingBatch, words: bool) -> Tensor:
    if words:
        return Pretrain(next_sentence=False).loss(model, batch)[0]
    return model(batch.packed, "hidden")[0].float().square().mean()
