"""The models that are served: opened at the start, found by name, asked whether they still work.

Each has a runner of its own. Runners share the device, so several models in one process take turns
at it; that is right for a few models with little traffic each. For one with much traffic, run one
process a device.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packhorse.errors import CheckpointError, InputError, Overloaded, RunnerStopped
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load
from packhorse.runtime.runner import PackRunner
from packhorse.runtime.tasks import TASKS
from packhorse.serve.failures import UnknownModel
from packhorse.serve.settings import Settings

BATCH_TOKENS = {"cpu": 2048}  # smaller than offline: nobody can leave a batch that runs
CANARY_SECONDS = 1.5  # what a forward pass of one sequence may take before /ready says no
MOST_RETRY = 60
BATCHES_WAITING = 16


@dataclass(frozen=True)
class Hosted:
    """One model, ready to be asked."""

    name: str
    source: str  # as it was given to --model
    encoder: Encoder
    runner: PackRunner
    opened: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def tasks(self) -> tuple[str, ...]:
        """What it can be asked: names of `runtime.tasks`, of which `hidden` always goes."""
        labels = self.encoder.labels
        lacking = set() if len(labels) == 1 else {"rerank"}
        if not is_entailment(labels):
            lacking.add("zero_shot")
        heads = ("hidden", *self.encoder.heads)
        return tuple(t for t, spec in TASKS.items() if spec.head in heads and t not in lacking)

    def check(self, task: str) -> None:
        """Refuse a task it has no head for, with those it has."""
        if task in self.tasks:
            return
        if task == "zero_shot":
            lack = (
                "cannot classify into labels of the request: it is no model of language inference"
            )
            lack += ", none of its labels is entailment"
        else:
            lack = f"has no head for {task!r}"
        raise CheckpointError(
            f"the model {self.name} {lack}; it can be asked for: {', '.join(self.tasks)}"
        )

    def retry_after(self) -> int:
        """Whole seconds until what waits now was run, at the speed of the last batches."""
        waiting, rate = self.runner.waiting_tokens, self.runner.rate()
        return min(MOST_RETRY, max(1, math.ceil(waiting / rate))) if rate else 1


def is_entailment(labels: Sequence[str]) -> bool:
    """Are these the labels of a model of natural language inference?"""
    return len(labels) > 1 and any(map(_entails, labels))


def entailment(labels: Sequence[str]) -> tuple[str, str]:
    """The labels for a contradicted and for an entailed hypothesis.

    Contradiction is found by its name ("contradiction", "not_entailment"). Where none is named so
    it is the first label, or the last where the first is entailment, as transformers has it.
    """
    entailed = next(filter(_entails, labels))
    named = (name for name in labels if name.lower().startswith(("contradict", "not", "non")))
    contradicted = next(named, labels[-1] if labels[0] == entailed else labels[0])
    return contradicted, entailed


def _entails(label: str) -> bool:
    return label.lower().startswith("entail")


class Hosts:
    """All models of a server; the first is the default."""

    def __init__(self, hosted: Sequence[Hosted]) -> None:
        self._by_name = {each.name: each for each in hosted}
        if len(self._by_name) != len(hosted):
            names = ", ".join(each.name for each in hosted)
            raise InputError(f"two models have the same name ({names}); give --model NAME=MODEL")

    def __iter__(self) -> Iterator[Hosted]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def default(self) -> Hosted:
        """What answers where no model is named."""
        return next(iter(self))

    def find(self, name: str | None = None, task: str | None = None) -> Hosted:
        """The model of this name; without one, the first that can do the task.

        Where one model is served, any name means it: many clients have that of another server's
        model written into them. A task that it has no head for is refused (`CheckpointError`).
        """
        if len(self) == 1:
            host = self.default
        elif name is None:
            able = (each for each in self if task in each.tasks)
            host = next(able, self.default)
        else:
            host = self.named(name)
        if task is not None:
            host.check(task)
        return host

    def named(self, name: str) -> Hosted:
        """The model of exactly this name."""
        if name not in self._by_name:
            raise UnknownModel(f"there is no model of that name; there are: {self.names}")
        return self._by_name[name]

    @property
    def names(self) -> str:
        """For messages."""
        return ", ".join(self._by_name)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What any of the models can be asked."""
        return tuple(dict.fromkeys(task for each in self for task in each.tasks))

    @property
    def alive(self) -> bool:
        """Would every model take a request? False for good once an engine has died."""
        return all(each.runner.alive for each in self)

    async def ready(self, believe: float) -> None:
        """Raise `RunnerStopped` unless each model ran a batch within `believe` seconds, or now."""
        for each in self:
            if not each.runner.alive:
                raise RunnerStopped(f"the engine of {each.name} is not running")
            if each.runner.idle_seconds() > believe:
                await _canary(each)

    def close(self, drain: bool = True) -> None:
        """Answer what waits, or fail it, and end the engines."""
        for each in self:
            each.runner.close(drain)


def open(settings: Settings) -> Hosts:
    """Load every model and run each once, so that the first client does not pay for warming up."""
    _use_threads(settings.threads)
    return Hosts([_open(given, settings) for given in settings.model])


def host(
    encoder: Encoder,
    settings: Settings,
    name: str = "",
    source: str = "",
    publish: bool = True,
) -> Hosted:
    """A loaded model with a runner, as the settings want it."""
    tokens = settings.batch_tokens or BATCH_TOKENS.get(encoder.device.type, encoder.budget)
    capacity = min(settings.max_input_tokens or encoder.max_length, encoder.max_length)
    rows = max(1, tokens // capacity)
    runner = PackRunner(
        encoder,
        capacity=capacity,
        rows=rows,
        timeout=settings.batch_wait_ms / 1e3,
        max_waiting_tokens=settings.max_queue_tokens or BATCHES_WAITING * rows * capacity,
        max_waiting_requests=settings.max_queue_inputs,
        publish=publish,
    )
    return Hosted(name or encoder.name, source or encoder.name, runner.encoder, runner)


def _open(given: str, settings: Settings) -> Hosted:
    name, _, source = given.rpartition("=")
    encoder = load(
        source,
        device=settings.device or None,
        dtype=settings.dtype,
        kernel=settings.kernel or None,
        graphs=settings.graphs,
        budget=settings.batch_tokens or None,
        invariant=settings.invariant,
    )
    hosted = host(encoder, settings, name, source)
    if settings.graphs:
        hosted.runner.warm("hidden")
    hosted.runner.run([_probe(hosted)], "hidden")
    return hosted


def _use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count or len(os.sched_getaffinity(0)))


def _probe(host: Hosted) -> np.ndarray:
    """A sequence that every model can run."""
    return np.zeros(1, np.int32)


async def _canary(host: Hosted) -> None:
    try:
        future: Future[Any] = host.runner.submit(_probe(host), "hidden")
    except Overloaded as error:  # and nothing of what waits was run for long
        raise RunnerStopped(f"{host.name} runs nothing of what waits") from error
    try:
        await asyncio.wait_for(asyncio.wrap_future(future), CANARY_SECONDS)
    except TimeoutError as error:
        raise RunnerStopped(f"{host.name} ran nothing for {CANARY_SECONDS} seconds") from error
