"""What all lanes of `packhorse bench train` share: model, optimizer, batches, and weights on disk.

The training job is assembled as `train.job` does it, but from random data in memory. Its weights
are then written as a folder that transformers reads, so that every lane starts from the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from packhorse import attention, checkpoint, executable
from packhorse.checkpoint import Checkpoint
from packhorse.errors import InputError
from packhorse.model.config import BertConfig
from packhorse.reports import random_model
from packhorse.reports.random_model import CONFIGS
from packhorse.train import cost
from packhorse.train.feed import StepBatches, TrainingFeed
from packhorse.train.job import (
    Placement,
    StepSchedule,
    TrainingJob,
    choose_placement,
    recorder_for,
    use_fast_layers,
)
from packhorse.train.objectives import Classify, Objective, Pretrain
from packhorse.train.preparing import LabelSet, in_fp32, optimizer_for, prepare
from packhorse.train.settings import TrainSettings
from packhorse_bench import training_sets

# (sequences per step, steps per round) by task and by whether there is a GPU; fewer without one, so
# that rounds stay short and lanes take turns often.
SIZES = {
    ("pretrain", True): (256, 4),
    ("pretrain", False): (16, 2),
    ("classify", True): (256, 50),
    ("classify", False): (32, 4),
}


@dataclass(frozen=True)
class TrainingSetup:
    """What to measure, on `model` or, with random weights, on a geometry named by `config`."""

    model: str = ""
    config: str | None = None
    vocab: str | None = None
    heads: int | None = None
    task: str = "pretrain"
    histogram: str | None = None  # FILE[:NAME] of lengths, instead of the task's own
    max_length: int | None = None  # of a row, and of a padded sequence
    batch: int | None = None  # sequences per step; None: from SIZES
    steps: int | None = None  # per round; None: from SIZES
    micro_tokens: int = 0  # computed at once; 0: chosen by the device's memory
    dropout: float = 0.1
    dtype: str | None = None
    device: str | None = None
    peers: tuple[str, ...] | None = None  # None: those that make sense on the device
    repeats: int = 3
    seed: int = 0


@dataclass(frozen=True)
class TrainingStage:
    """The model, data and files that all lanes share."""

    job: TrainingJob
    steps: Sequence[StepBatches]  # of a round, in the memory of the host
    folder: Path  # the weights, as transformers reads them
    longest: int  # tokens to which `padded` fills every sequence
    micro_tokens: int  # computed at once, at most

    @property
    def pretrains(self) -> bool:
        """Whether the task is pretraining; otherwise it is classification."""
        return self.job.settings.task == "pretrain"


def open_stage(setup: TrainingSetup, device: torch.device, scratch: Path) -> TrainingStage:
    """Build the training job and its data, and write its weights into `scratch`."""
    longest = setup.max_length or training_sets.LONGEST[setup.task]
    source = _source(setup)
    config = source.config
    if longest > config.max_positions:
        raise InputError(
            f"sequences of up to {longest} tokens, but the model has {config.max_positions} "
            f"positions; pass --max-length {config.max_positions}"
        )
    place = choose_placement(setup.dtype or "auto", device)
    micro = setup.micro_tokens or cost.micro_tokens(config, device, place.half)
    batch, steps = _sizes(setup, device)
    settings = TrainSettings(
        task="pretrain" if setup.task == "pretrain" else "classify",
        optimizer="lamb" if setup.task == "pretrain" else "adamw",
        batch=batch,
        steps=steps,
        schedule="constant",
        dropout=setup.dropout,
        micro_tokens=micro,
        seed=setup.seed,
    )
    feed = _feed(setup, settings, config, longest)
    job = _job(settings, place, source, feed)
    # Peers read fp32 weights, also if ours are trained in half precision beside an fp32 copy.
    folder = checkpoint.write(scratch / "model", in_fp32(job.checkpoint, job.optimizer))
    return TrainingStage(job, list(islice(feed.steps(None), steps)), folder, longest, micro)


def _source(setup: TrainingSetup) -> Checkpoint:
    """The weights to start from: random ones of a named geometry, or a checkpoint."""
    if setup.config in CONFIGS:
        config = CONFIGS[setup.config]
        model = random_model.build(config, setup.seed)
        return Checkpoint(config, model, None, f"random-{setup.config}", config.max_positions)
    if setup.config and not Path(setup.config).exists():
        known = ", ".join(CONFIGS)
        raise InputError(f"unknown configuration {setup.config!r}; there are {known}, or a file")
    files = {"config": setup.config, "vocab": setup.vocab, "heads": setup.heads}
    return checkpoint.load(setup.model, **files)


def _sizes(setup: TrainingSetup, device: torch.device) -> tuple[int, int]:
    """Sequences per step and steps per round."""
    batch, steps = SIZES[setup.task, device.type != "cpu"]
    return setup.batch or batch, setup.steps or steps


def _feed(
    setup: TrainingSetup, settings: TrainSettings, config: BertConfig, longest: int
) -> TrainingFeed:
    """Random sequences for all steps of a round, with lengths like those of the task."""
    count = settings.batch * settings.steps
    seed = setup.seed
    micro = settings.micro_tokens
    lengths = training_sets.draw_lengths(setup.task, count, longest, seed, setup.histogram)
    if setup.task == "classify":
        return training_sets.classification(lengths, config.vocab_size, settings, micro)
    steps = settings.steps
    words = config.vocab_size
    return training_sets.pretraining(lengths, words, longest, steps, micro, seed)


def _job(
    settings: TrainSettings, place: Placement, source: Checkpoint, feed: TrainingFeed
) -> TrainingJob:
    """A training job like that of `train.job.assemble`, which reads its data from files."""
    pretrains = settings.task == "pretrain"
    objective: Objective = Pretrain() if pretrains else Classify()
    needs = source.config.needs
    kernel = attention.pick(place.device, place.dtype, backward=True, **needs).kernel
    labels = LabelSet() if pretrains else LabelSet(("0", "1"))
    model, _ = prepare(settings, source, objective.heads, kernel, labels)
    model.model.train().to(place.device)
    use_fast_layers(model.model.bert, place)
    compiled = place.device.type == "cuda" and kernel.serves.compiles_backward
    optimizer = optimizer_for(settings, model.model, place.half)
    if compiled:
        executable.allow_every_bucket()
        executable.compile(model.model.bert.layers)
    schedule = StepSchedule(settings, feed.batch, feed.epoch)
    return TrainingJob(
        settings,
        place,
        model,
        objective,
        feed,
        schedule,
        optimizer,
        compiled,
        measure="loss",
        recorder=recorder_for(settings, place, compiled),
    )
