"""The models that a server serves: opened at startup, found by name, checked for liveness.

Each model has a runner of its own. Runners share the device, so several models in one process take
turns on it. That suits a few models with little traffic each; for a model with much traffic, run
one process per device.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from packhorse import device as devices
from packhorse import processor
from packhorse.checkpoint.fingerprint import Fingerprint
from packhorse.errors import CheckpointError, InputError, Overloaded, RunnerStopped
from packhorse.runtime.backend import TorchBackend
from packhorse.runtime.encoder import Encoder
from packhorse.runtime.loading import load, shortened
from packhorse.runtime.runner import PackRunner
from packhorse.runtime.statistics import BatchRecord, throughput
from packhorse.runtime.tasks import TASKS
from packhorse.serve.failures import UnknownModel
from packhorse.serve.settings import ServeSettings
from packhorse.serve.streams import Dispatcher, LocalDispatcher

LOGGER = logging.getLogger("packhorse.serve")
# Smaller than offline batches: a request cannot leave or enter a batch that runs already, so the
# run time of one batch is added to everybody's latency.
BATCH_TOKENS = {"cpu": 2048}
THROUGHPUT_SECONDS = 5.0  # of the last batches, for the page
PROBE_SECONDS = 1.5  # a forward pass of one sequence that takes longer makes /ready fail
MAX_RETRY_AFTER = 3600  # seconds
# Of the batch that measures the speed at the start: enough for a core to be as fast as it gets.
MEASURED_TOKENS = {"cpu": 512}
MEASURED_TOKENS_ELSEWHERE = 8192
MAX_WAITING_BATCHES = 16  # batches of tokens in the queue, unless --max-queue-tokens says otherwise


@dataclass(frozen=True)
class ServedModel:
    """A loaded model with the runner that answers requests for it."""

    name: str
    source: str  # as passed to --model
    encoder: Encoder
    runner: PackRunner
    dispatcher: Dispatcher  # runs the requests of clients
    fingerprint_parts: Fingerprint  # with the model's default prompt
    opened: float = field(default_factory=time.time)  # seconds since 1970
    adapter: str | None = None  # in its weights, as passed to --adapter
    # By the text of the prompt; a request can only name one of the model's prompts.
    _fingerprints: dict[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of `runtime.tasks` that the model's heads support; `hidden` always is one."""
        labels = self.encoder.labels
        heads = self.encoder.heads
        lacking = set() if len(labels) == 1 or "classify" not in heads else {"rerank"}
        if not is_entailment(labels):
            lacking.add("zero_shot")
        able = (task for task, spec in TASKS.items() if spec.is_served_by(heads))
        return tuple(task for task in able if task not in lacking)

    def check_task(self, task: str) -> None:
        """Raise `CheckpointError`, with the supported tasks, unless `task` is one of them."""
        if task in self.tasks:
            return
        if task == "zero_shot":
            reason = (
                "cannot classify into labels of the request, because it is not a natural language "
                "inference model: none of its labels is entailment"
            )
        else:
            reason = f"has no head for {task!r}"
        raise CheckpointError(
            f"the model {self.name} {reason}; it supports: {', '.join(self.tasks)}"
        )

    def fingerprint(self, prompt: str) -> str:
        """The fingerprint of results for texts with this prompt before them."""
        if prompt not in self._fingerprints:
            self._fingerprints[prompt] = str(replace(self.fingerprint_parts, prompt=prompt))
        return self._fingerprints[prompt]

    def begin_preparing(self) -> None:
        """Compile or record batches from now on, with `--graphs`, while no request waits."""
        backend = getattr(self.encoder, "backend", None)  # None: it runs in another process
        if isinstance(backend, TorchBackend) and backend.graphs:
            # Most requests ask for what the model was trained for.
            heads = [head for head in ("classify", "embed") if head in self.encoder.heads][:1]
            backend.prepare_later(self.runner.batches_of_every_size(), tuple(heads))
            # Its batch wakes the engine, which looks for such work when a batch has ended.
            self.runner.submit(_probe_input(), "hidden")

    def retry_after(self) -> int:
        """Whole seconds until the current queue has run, at the speed of the last batches."""
        return retry_seconds(self.runner.seconds_until_run())


def retry_seconds(seconds: float) -> int:
    """Return a number of seconds as the header Retry-After takes it."""
    return min(MAX_RETRY_AFTER, max(1, math.ceil(seconds)))


def is_entailment(labels: Sequence[str]) -> bool:
    """Return whether these are the labels of a natural language inference model."""
    return len(labels) > 1 and any(map(_entails, labels))


def entailment(labels: Sequence[str]) -> tuple[str, str]:
    """Return the labels for a contradicted and for an entailed hypothesis.

    Contradiction is recognized by its name ("contradiction", "not_entailment"). If no label is
    named so, it is the first label, or the last if the first is entailment, as in transformers.
    """
    entailed = next(filter(_entails, labels))
    named = (label for label in labels if label.lower().startswith(("contradict", "not", "non")))
    contradicted = next(named, labels[-1] if labels[0] == entailed else labels[0])
    return contradicted, entailed


def _entails(label: str) -> bool:
    return label.lower().startswith("entail")


class OtherProcesses(Protocol):
    """The other processes of a server, where models do not run in this one."""

    async def engines(self, batches: int) -> list[dict[str, Any]]:
        """Return what the page shows of every engine, with its last batches."""
        ...

    async def metrics(self) -> bytes:
        """Return the metrics of all processes, as /metrics has them."""
        ...

    async def open(self, name: str, source: str) -> None:
        """Open a model and serve it, in place of the one of this name if there is one."""
        ...

    async def remove(self, name: str) -> None:
        """Serve a model no more."""
        ...


class ServedModels:
    """All models of a server, by name; the first is the default."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}
        if len(self._by_name) != len(models):
            names = ", ".join(model.name for model in models)
            raise InputError(f"two models have the same name ({names}); use --model NAME=MODEL")

    def put(self, model: ServedModel) -> ServedModel | None:
        """Serve a model from now on; return the one of its name, whose place it takes."""
        replaced = self._by_name.get(model.name)
        # A new dictionary: other threads may be iterating over the old one.
        self._by_name = {**self._by_name, model.name: model}
        return replaced

    def serve(self, models: Sequence[ServedModel]) -> None:
        """Serve these models from now on, and no others."""
        self._by_name = {model.name: model for model in models}

    def remove(self, name: str) -> ServedModel:
        """Serve a model no more, and return it; raises `UnknownModel`."""
        removed = self.named(name)
        self._by_name = {key: model for key, model in self._by_name.items() if key != name}
        return removed

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def default(self) -> ServedModel:
        """The model for requests that name none."""
        return next(iter(self))

    def find(self, name: str | None = None, task: str | None = None) -> ServedModel:
        """Return the model of this name or, without a name, the first that supports the task.

        If only one model is served, every name means that one: many clients have the name of
        another server's model built in. Raises `UnknownModel`, and `CheckpointError` if the model
        does not support the task.
        """
        if len(self) == 1:
            model = self.default
        elif name is None:
            able = (candidate for candidate in self if task in candidate.tasks)
            model = next(able, self.default)
        else:
            model = self.named(name)
        if task is not None:
            model.check_task(task)
        return model

    def named(self, name: str) -> ServedModel:
        """Return the model of exactly this name; raises `UnknownModel`."""
        if name not in self._by_name:
            raise UnknownModel(f"no model of that name is served; there are: {self.names}")
        return self._by_name[name]

    @property
    def names(self) -> str:
        """All names in one string, for messages."""
        return ", ".join(self._by_name)

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks that at least one of the models supports."""
        return tuple(dict.fromkeys(task for model in self for task in model.tasks))

    @property
    def alive(self) -> bool:
        """Whether all engines run. An engine that died never comes back in this process."""
        return all(model.runner.alive for model in self)

    async def check_ready(self, max_age: float) -> None:
        """Raise `RunnerStopped` unless every model ran a batch within `max_age` seconds.

        A model that has been idle for longer runs one token now.
        """
        for model in self:
            if not model.runner.alive:
                raise RunnerStopped(f"the engine of {model.name} is not running")
            if model.runner.idle_seconds() > max_age:
                await _run_probe(model)

    def begin_preparing(self) -> None:
        """Call this when requests are answered: batches are compiled while none waits."""
        for model in self:
            model.begin_preparing()

    def close(self, drain: bool = True) -> None:
        """Stop all engines; waiting requests are answered with `drain`, failed without."""
        for model in self:
            model.runner.close(drain)


def open_models(
    settings: ServeSettings, served: Sequence[tuple[str, str, str | None]] = ()
) -> ServedModels:
    """Load all models and run each once, so that the first client does not pay for warming up.

    Within `--gpu-memory` each runs its largest batch: what does not fit fails here and not later.
    `served` are the name, source and adapter of each model that is served now, where these are no
    longer those of the settings.
    """
    _use_threads(settings.threads)
    if not settings.gpu_memory:
        return _open_all(settings, served)
    limit_gpu_memory(devices.choose_device(settings.device or None), settings.gpu_memory)
    try:
        models = _open_all(settings, served)
        for model in models:
            model.runner.run_largest()
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"the models and their largest batch need more than the {settings.gpu_memory:g} GiB of "
            "--gpu-memory; raise it or lower --batch-tokens"
        ) from error
    return models


def open_model(entry: str, settings: ServeSettings) -> ServedModel:
    """Load a model beside those that are served; raises the reason why it cannot be loaded."""
    try:
        model = _open(entry, settings)
        if settings.gpu_memory:
            try:
                model.runner.run_largest()
            except BaseException:
                model.runner.close(drain=False)
                raise
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"there is not enough memory for {entry} beside the models that are served; remove one "
            "first"
        ) from error
    model.begin_preparing()
    return model


def release(model: ServedModel) -> None:
    """Close a model's runner as soon as no request refers to the model any more."""
    weakref.finalize(model, _close_in_thread, model.name, model.runner).atexit = False


def _close_in_thread(name: str, runner: PackRunner) -> None:
    # The last reference may be dropped on any thread, also on the runner's own.
    threading.Thread(target=_close_last, args=[name, [runner]], daemon=True).start()


def _close_last(name: str, runners: list[PackRunner]) -> None:
    """End the threads of a runner, which the caller refers to by this list alone."""
    runner = runners.pop()
    runner.close()
    is_cuda = runner.encoder.device.type == "cuda"
    LOGGER.info("no request uses the former %s any more; its memory is free", name)
    del runner  # nothing refers to it and to its model any more; there are no cycles to collect
    if is_cuda:
        torch.cuda.empty_cache()


def limit_gpu_memory(device: torch.device, gib: float) -> None:
    """Make torch refuse to take more of a GPU's memory than so much, in this process."""
    if device.type != "cuda":
        raise InputError(f"--gpu-memory is for GPUs, and the models run on {device.type}")
    total = torch.cuda.get_device_properties(device).total_memory
    if gib * (1 << 30) > total:
        raise InputError(f"--gpu-memory is {gib:g} GiB, and {device} has {total / (1 << 30):.1f}")
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(gib * (1 << 30) / total, number)


def serve_model(
    encoder: Encoder,
    settings: ServeSettings,
    name: str = "",
    source: str = "",
    publish: bool = True,
) -> ServedModel:
    """Start a runner for a loaded model, with the batch size and queue limits of the settings.

    With graphs, batches are compiled or recorded while no request waits: first those of sizes that
    have come, then all others; and not before `begin_preparing`, because the compiler
    would take the interpreter from a server that is starting.
    """
    tokens = settings.batch_tokens or BATCH_TOKENS.get(encoder.device.type, encoder.budget)
    capacity = min(settings.max_input_tokens or encoder.max_length, encoder.max_length)
    rows = max(1, tokens // capacity)
    backend = encoder.backend
    graphs = backend if isinstance(backend, TorchBackend) and backend.graphs else None
    runner = PackRunner(
        encoder,
        capacity=capacity,
        rows=rows,
        timeout=settings.batch_wait_ms / 1e3,
        wait_alone=False,
        max_waiting_tokens=settings.max_queue_tokens or MAX_WAITING_BATCHES * rows * capacity,
        max_waiting_requests=settings.max_queue_inputs,
        publish=publish,
        when_idle=graphs.prepare_next if graphs else None,
    )
    if graphs:
        graphs.hold()
    return ServedModel(
        name or encoder.name,
        source or encoder.name,
        runner.encoder,
        runner,
        LocalDispatcher(runner),
        runner.encoder.fingerprint_parts(),
    )


def _open_all(
    settings: ServeSettings, served: Sequence[tuple[str, str, str | None]]
) -> ServedModels:
    """The models, and after them each with its adapters, named MODEL:NAME."""
    if served:
        named = [(f"{name}={source}", adapter) for name, source, adapter in served]
        return ServedModels([_open(entry, settings, adapter) for entry, adapter in named])
    models = [_open(entry, settings) for entry in settings.model]
    by_name = {model.name: model for model in models}
    for entry in settings.adapter:
        name, _, folder = entry.partition("=")
        of, _, short = name.rpartition(":")
        base = by_name.get(of or models[0].name)
        if not short or not folder or base is None:
            raise InputError(
                f"--adapter {entry!r} is not NAME=FOLDER, or MODEL:NAME=FOLDER with one of the "
                f"models {', '.join(by_name)}"
            )
        models.append(_open(f"{base.name}:{short}={base.source}", settings, folder))
    return ServedModels(models)


def _open(entry: str, settings: ServeSettings, adapter: str | None = None) -> ServedModel:
    """Load the model of one `--model` entry, MODEL or NAME=MODEL, with an adapter in it or none."""
    name, _, source = entry.rpartition("=")
    graphs = settings.graphs
    if graphs is None:
        graphs = False if settings.invariant else "small"
    encoder = load(
        source,
        device=settings.device or None,
        dtype=settings.dtype,
        kernel=settings.kernel or None,
        graphs=graphs,
        budget=settings.batch_tokens or None,
        invariant=settings.invariant,
        gelu=settings.gelu,
        ignore=settings.ignore,
        adapter=adapter,
    )
    if settings.truncate_dim and encoder.width:  # other models make no vectors
        encoder = shortened(encoder, settings.truncate_dim)
    model = replace(serve_model(encoder, settings, name, source), adapter=adapter)
    model.runner.run([_probe_input()], "hidden")
    with suppress(torch.OutOfMemoryError):  # requests may be smaller
        model.runner.measure(MEASURED_TOKENS.get(encoder.device.type, MEASURED_TOKENS_ELSEWHERE))
    return model


def _use_threads(count: int) -> None:
    torch.set_num_threads(count or processor.usable_cores())


def _probe_input() -> np.ndarray:
    """A sequence of one token, whose id 0 every vocabulary has."""
    return np.zeros(1, np.int32)


async def _run_probe(model: ServedModel) -> None:
    """Raise `RunnerStopped` unless the model runs one token within `PROBE_SECONDS`."""
    try:
        future: Future[Any] = model.runner.submit(_probe_input(), "hidden")
    except Overloaded as error:  # a full queue of which nothing has run lately: the engine hangs
        raise RunnerStopped(f"{model.name} has a full queue and runs nothing of it") from error
    try:
        await asyncio.wait_for(asyncio.wrap_future(future), PROBE_SECONDS)
    except TimeoutError as error:
        raise RunnerStopped(f"{model.name} ran nothing for {PROBE_SECONDS} seconds") from error


def describe_engine(model: ServedModel, count: int) -> dict[str, Any]:
    """Return what the page shows of a model's engine, with its last `count` batches."""
    runner = model.runner
    now = time.monotonic()
    shape = runner.shape
    stats = runner.stats()
    recent = runner.recent()
    listed = recent[len(recent) - min(count, len(recent)) :]
    # Only the mask mode has separate rows; otherwise sequences lie end to end over the whole batch.
    has_rows = shape.mode == "mask"
    tokenizer = model.encoder.tokenizer
    used = sum(batch.used for batch in listed)
    computed = sum(batch.tokens for batch in listed)
    return {
        "name": model.name,
        "alive": runner.alive,
        "mask": None if tokenizer.mask_id is None else tokenizer.token(tokenizer.mask_id),
        "mode": shape.mode,
        "rows_a_batch": shape.rows if has_rows else 1,
        "row_tokens": shape.capacity if has_rows else shape.tokens,
        "waiting_inputs": stats.waiting_requests,
        "waiting_tokens": stats.waiting_tokens,
        "most_waiting_tokens": runner.max_waiting_tokens,
        "running_inputs": stats.running_requests,
        "tokens_per_second": throughput(recent, now, THROUGHPUT_SECONDS),
        "fill": used / max(1, computed),
        "p50_ms": stats.p50_ms,
        "p99_ms": stats.p99_ms,
        "queue_ms": stats.queue_ms,
        "compute_ms": stats.compute_ms,
        "batches": [_describe_batch(batch, now) for batch in listed],
    }


def _describe_batch(batch: BatchRecord, now: float) -> dict[str, Any]:
    return {
        "number": batch.number,
        "seconds_ago": now - batch.ended,
        "ms": 1e3 * batch.seconds,
        "tokens": batch.tokens,
        "fill": batch.fill,
        "rows": batch.rows,
    }
