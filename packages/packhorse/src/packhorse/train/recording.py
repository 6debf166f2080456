"""A fine-tuning step as one CUDA graph: one launch instead of a thousand.

A step over a few hundred short sequences keeps a GPU busy for two milliseconds and its host for
twenty: forward, backward, clipping and update are about a thousand small kernels. So a step whose
shapes have occurred before is recorded, including the update, and from then on replayed with its
inputs copied in. The values that change from step to step, learning rate and optimizer age, must
therefore be on the device. They are there from the first step on, so that recorded and unrecorded
steps are the same to the bit.

Only steps with one part on one rank are recorded, and only if their shapes recur. Those of
pretraining never do, since the number of masked words differs, and large batches leave the host
idle anyway. Steps with filler between sequences (`layout = "padded"`) are not recorded either:
their results are selected by an index that is copied from the host, which a capture cannot do. A
graph holds the memory of its step; all graphs share it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from packhorse import executable

Batch = Any  # of `data.tasks.targets`, on the device
Computed = tuple[tuple[str, ...], Tensor]  # names of the figures, and their row
Compute = Callable[[list[Batch], Tensor], Computed]

LOGGER = logging.getLogger(__name__)
WARMUP_STEPS = 2  # per shape before recording: compilers and allocators have settled then
MAX_GRAPHS = 32  # beyond it, the oldest is dropped
MAX_SHAPES = 1024  # whose occurrences are counted
MAX_TOKENS = 1 << 15  # beyond it, the device takes longer than the host
PACKED_TENSORS = ("ids", "types", "positions", "cu_seqlens")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One captured step."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: list[Tensor]
    names: tuple[str, ...]
    row: Tensor


@dataclass(eq=False)
class StepRecorder:
    """Runs steps, as a graph where one is recorded."""

    device: torch.device
    seen: dict[Hashable, int] = field(default_factory=dict)  # occurrences by shape
    recorded: dict[Hashable, RecordedStep] = field(default_factory=dict)
    refused: str = ""  # why nothing more is recorded

    def __post_init__(self) -> None:
        with torch.cuda.device(self.device):
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()
        self.age, self.rate = torch.zeros(2, device=self.device)

    def __call__(
        self, compute: Compute, optimizer: Optimizer, parts: list[Batch], totals: Tensor
    ) -> Computed:
        """Run a step, the update included, and return what `compute` returns."""
        if self.refused or len(parts) > 1 or len(parts[0].packed.ids) > MAX_TOKENS:
            return compute(parts, totals)
        if parts[0].packed.prompt_lengths is not None:  # would be held by value
            return compute(parts, totals)
        key = _key(parts[0], optimizer)
        # Popped and inserted again: the dict is then ordered by the last occurrence.
        occurrences = self.seen.pop(key, 0) + 1
        self.seen[key] = occurrences
        if len(self.seen) > MAX_SHAPES:
            del self.seen[next(iter(self.seen))]
        with self._rates_on_device(optimizer):
            if occurrences <= WARMUP_STEPS or not _has_filler_last(parts[0]):
                return self._on_capture_stream(compute, parts, totals)
            return self._by_graph(key, compute, optimizer, parts, totals)

    @contextmanager
    def _rates_on_device(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the optimizer read learning rate and age from the device meanwhile."""
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        self.rate.fill_(rates[0])
        self.age.fill_(1 + max(map(int, _ages(optimizer)), default=0))
        for group in groups:
            group["lr"] = self.rate
            group["age"] = self.age
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
                del group["age"]

    def _on_capture_stream(self, compute: Compute, parts: list[Batch], totals: Tensor) -> Computed:
        """Run a step unrecorded, but on the stream of captures.

        What it leaves behind (gradients, cached buffers) must not tie a later capture to the
        current stream.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            computed = compute(parts, totals)
        torch.cuda.current_stream().wait_stream(self.stream)
        return computed

    def _by_graph(
        self,
        key: Hashable,
        compute: Compute,
        optimizer: Optimizer,
        parts: list[Batch],
        totals: Tensor,
    ) -> Computed:
        tensors = [*_tensors(parts[0]), totals]
        step = self.recorded.get(key)
        if step is not None:
            for buffer, tensor in zip(step.inputs, tensors, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            # Ages are on the host, so no graph can count them.
            torch._foreach_add_(_ages(optimizer), 1)  # pyright: ignore[reportPrivateImportUsage]
        else:
            ages = [age.clone() for age in _ages(optimizer)]
            try:
                step = self._record(compute, parts[0], tensors)
            except RuntimeError as error:
                self.refused = str(error).partition("\n")[0]
                LOGGER.warning("steps run without CUDA graphs, slower: %s", self.refused)
                for age, before in zip(_ages(optimizer), ages, strict=True):
                    age.copy_(before)
                return self._on_capture_stream(compute, parts, totals)
            self.recorded[key] = step
            if len(self.recorded) > MAX_GRAPHS:
                del self.recorded[next(iter(self.recorded))]
        step.graph.replay()
        return step.names, step.row.clone()

    def _record(self, compute: Compute, batch: Batch, tensors: list[Tensor]) -> RecordedStep:
        """Capture a step. Nothing runs yet; the optimizer counts the step of the first replay."""
        inputs = [tensor.clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        with executable.recording(graph, pool=self.pool, stream=self.stream):
            names, row = compute([_with_tensors(batch, inputs[:-1])], inputs[-1])
        return RecordedStep(graph, inputs, names, row)


def _key(batch: Batch, optimizer: Optimizer) -> Hashable:
    """Everything that a graph holds by value."""
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(batch))
    betas = tuple(tuple(group["betas"]) for group in optimizer.param_groups)
    packed = batch.packed
    return shapes, packed.max_seqlen, packed.capacity, packed.places, betas


def _has_filler_last(batch: Batch) -> bool:
    """Do the sequences come first, with all filler after them?"""
    return batch.packed.places == tuple(range(len(batch.packed.places)))


def _tensors(batch: Batch) -> list[Tensor]:
    return [*(getattr(batch.packed, name) for name in PACKED_TENSORS), batch.targets]


def _with_tensors(batch: Batch, tensors: list[Tensor]) -> Batch:
    packed = replace(batch.packed, **dict(zip(PACKED_TENSORS, tensors[:-1], strict=True)))
    return replace(batch, packed=packed, targets=tensors[-1])


def _ages(optimizer: Optimizer) -> list[Tensor]:
    """The number of steps of each parameter, on the host."""
    return [state["step"] for state in optimizer.state.values() if "step" in state]
