"""What a run will be like before it starts: its batches, its steps, and roughly how long it takes.

The speed is what the same run reached before in the same folder; else a usual share of the device's
peak, if that is known; else (on a CPU above all) what a short trial reaches. The trial takes steps
on synthetic tokens with a model of the same widths, vocabulary and optimizer but at most two
layers, so that BERT-Large answers within seconds. The rest is arithmetic: time grows with the
operations of a step and with the parameters of an update. The trial has as many tokens as run at
once, up to a bound, because small matrix products are slow. It runs uncompiled, and on a busy
machine it is as slow as the run would be.

Shapes: T tokens.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from packhorse import device as devices
from packhorse.data.packed.loader import PretrainingBatch
from packhorse.errors import InputError
from packhorse.packing.batch import Packed
from packhorse.train import cost, feed
from packhorse.train.job import RunInputs, open_inputs
from packhorse.train.journal import last_speed
from packhorse.train.loop import SETTINGS
from packhorse.train.objectives import Pretrain
from packhorse.train.preparing import optimizer_for, prepare
from packhorse.train.settings import TrainSettings, resolve

# Settings that make a run longer or shorter, but not faster or slower.
LENGTH_SETTINGS = frozenset(
    {"out", "seed", "steps", "epochs", "max_sequences", "target", "keep", "write"}
)

# The trial
MAX_LAYERS = 2
MAX_TOKENS = 2048
MAX_ROUNDS = 5
MAX_SECONDS = 0.5  # at least one round is timed, whatever it takes
MASK_INTERVAL = 7  # every seventh synthetic token is masked


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The figures of a run that has not started."""

    device: str
    precision: str
    global_batch: float  # mean sequences per step
    micro_batch: float  # of these, how many run at once on a device
    micro_tokens: int  # maximum tokens that run at once
    accumulation: int  # parts of a step, on each device
    devices: int
    steps: int
    sequences: int
    epochs: float
    hours: float
    rate: str  # where the hours come from


def estimate(settings: TrainSettings, out: Path, world: int = 1) -> RunEstimate:
    """Estimate a run; for a model whose sizes are set, the weights need not exist yet."""
    if world < 1:
        raise InputError(f"{world} processes cannot be started; at least one is needed")
    inputs = open_inputs(settings, world=world, weights=False)
    batches = inputs.feed
    steps = inputs.schedule.steps
    sequences = round(steps * batches.batch)
    speed, source = _sequences_per_second(inputs, out)
    return RunEstimate(
        device=devices.describe(inputs.place.device),
        precision="float8" if inputs.place.float8 else devices.dtype_name(inputs.place.dtype),
        global_batch=batches.batch,
        micro_batch=batches.batch / batches.parts / world,
        micro_tokens=inputs.micro_tokens,
        accumulation=batches.parts,
        devices=world,
        steps=steps,
        sequences=sequences,
        epochs=steps / batches.epoch,
        hours=sequences / speed / 3600,
        rate=source,
    )


def _sequences_per_second(inputs: RunInputs, out: Path) -> tuple[float, str]:
    """The speed on all devices, and where it comes from."""
    batches = inputs.feed
    place = inputs.place
    if earlier := _earlier_speed(inputs.settings, out, place.world):
        return earlier, f"as an earlier run in {out}"
    masked = cost.MASKED_SHARE * batches.tokens if inputs.problem == "pretrain" else 0.0
    work = cost.StepWork(batches.tokens, batches.squares, masked)
    operations = cost.operations(inputs.config, work) * inputs.settings.passes  # per sequence
    peak = cost.peak(place.device)
    if peak is not None:
        source = f"{cost.USUAL_SHARE:.0%} of the device's peak, as is usual"
        return place.world * peak * cost.USUAL_SHARE / operations, source
    # Ranks on a CPU share its cores, so their speeds do not add up.
    independent = 1 if place.device.type == "cpu" else place.world
    share = batches.batch / independent
    seconds = measure_speed(inputs).step(share * operations, cost.parameters(inputs.config))
    return batches.batch / seconds, "by a trial of some steps, just now"


def _earlier_speed(settings: TrainSettings, out: Path, world: int) -> float | None:
    """The sequences per second that the same run reached in this folder before."""
    speed = last_speed(out) or {}
    try:
        earlier = resolve(out / SETTINGS).settings
    except InputError:
        return None
    names = [item.name for item in fields(TrainSettings) if item.name not in LENGTH_SETTINGS]
    is_same = all(getattr(earlier, name) == getattr(settings, name) for name in names)
    is_same = is_same and speed.get("devices") == world
    return speed.get("sequences_per_second") if is_same else None


@dataclass(frozen=True, slots=True)
class SpeedTrial:
    """What one device did per second."""

    operations: float  # forward and backward
    parameters: float  # updated

    def step(self, operations: float, parameters: float) -> float:
        """Seconds for a step of this size."""
        return operations / self.operations + parameters / self.parameters


def measure_speed(inputs: RunInputs) -> SpeedTrial:
    """Time some steps of a model like the one of the run."""
    place = inputs.place
    config = replace(inputs.config, layers=min(MAX_LAYERS, inputs.config.layers))
    has_mlm = inputs.problem == "pretrain"
    heads = ("mlm",) if has_mlm else ()
    prepared, _ = prepare(inputs.settings, config, heads, inputs.attention().kernel)
    model = prepared.model.train().to(place.device)
    optimizer = optimizer_for(inputs.settings, model, place.half)
    batch = feed.to_device(_trial_batch(inputs), place.device)
    pass_seconds, update_seconds = _time_steps(model, optimizer, batch, has_mlm)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    work = replace(cost.work([batch]), masked=len(batch.masked_at) if has_mlm else 0)
    return SpeedTrial(cost.operations(config, work) / pass_seconds, parameters / update_seconds)


def _trial_batch(inputs: RunInputs) -> PretrainingBatch:
    """As many tokens as run at once, in sequences of the mean length."""
    batches = inputs.feed
    at_once = batches.batch * batches.tokens / batches.parts / inputs.place.world
    tokens = max(1, min(MAX_TOKENS, round(at_once)))
    return synthetic_batch(tokens, max(1, round(batches.tokens)))


def synthetic_batch(tokens: int, longest: int) -> PretrainingBatch:
    """A pretraining batch of this many zeros, in sequences of length `longest`."""
    cu_seqlens = torch.tensor([*range(0, tokens, longest), tokens], dtype=torch.int32)
    sequences = len(cu_seqlens) - 1
    zeros = torch.zeros(tokens, dtype=torch.int64)  # [T]
    positions = torch.arange(tokens) % longest
    places = tuple(range(sequences))
    packed = Packed(zeros, zeros, positions, cu_seqlens, min(tokens, longest), places)
    masked = torch.arange(0, tokens, MASK_INTERVAL)
    labels = torch.zeros(sequences, dtype=torch.int64)
    return PretrainingBatch(packed, masked, torch.zeros_like(masked), labels, sequences, tokens, {})


def _time_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: PretrainingBatch, has_mlm: bool
) -> tuple[float, float]:
    """Median seconds of forward and backward, and of the update; the first round warms up."""
    times: list[tuple[float, float]] = []
    device = batch.packed.ids.device
    start = time.perf_counter()
    while len(times) < 2 or (
        len(times) <= MAX_ROUNDS and time.perf_counter() - start < MAX_SECONDS
    ):
        optimizer.zero_grad(set_to_none=True)
        begin = _now(device)
        _loss(model, batch, has_mlm).backward()
        middle = _now(device)
        optimizer.step()
        end = _now(device)
        times.append((middle - begin, end - middle))
    passes, updates = zip(*times[1:], strict=True)
    return statistics.median(passes), statistics.median(updates)


def _now(device: torch.device) -> float:
    devices.synchronize(device)
    return time.perf_counter()


def _loss(model: nn.Module, batch: PretrainingBatch, has_mlm: bool) -> Tensor:
    if has_mlm:
        return Pretrain(next_sentence=False).loss(model, batch)[0]
    return model(batch.packed, "hidden")[0].float().square().mean()
