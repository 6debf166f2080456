"""A step of fine-tuning as one CUDA graph: one launch in place of a thousand.

A step over a few hundred short sequences keeps a GPU busy for two milliseconds and its host for
twenty: forward, backward, clipping and the update are some thousand small kernels. So a step whose
shapes were met before is recorded, the update included, and from then on replayed with its inputs
copied in. What changes from step to step, the learning rate and the optimizer's age, lies on the
device for that; it does so from the first step on, so that a recorded step and one that is not are
the same to the bit.

Only steps in one part, on one rank, whose shapes come again: pretraining's never do, as the number
of masked words differs, and large batches keep the host idle anyway. Nor are steps recorded whose
sequences have filler between them (`layout = "padded"`): which results are theirs is told by an
index that is copied from the host, and a capture cannot do that. A graph holds the memory of its
step; all graphs share it.
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
Computed = tuple[tuple[str, ...], Tensor]  # names of the figures, and the row
Compute = Callable[[list[Batch], Tensor], Computed]

LOGGER = logging.getLogger(__name__)
WARM = 2  # steps of a shape before it is recorded: compilers and allocators have settled
GRAPHS = 32  # kept; the oldest goes
SHAPES = 1024  # of which it is remembered how often they came
MOST_TOKENS = 1 << 15  # beyond, the device takes longer than the host
OF_PACKED = ("ids", "types", "positions", "cu_seqlens")


@dataclass(frozen=True, slots=True)
class Recording:
    """One captured step."""

    graph: Any  # torch.cuda.CUDAGraph
    inputs: list[Tensor]
    names: tuple[str, ...]
    row: Tensor


@dataclass(eq=False)
class Recorder:
    """Runs steps, by a graph where there is one."""

    device: torch.device
    seen: dict[Hashable, int] = field(default_factory=dict)
    recorded: dict[Hashable, Recording] = field(default_factory=dict)
    refused: str = ""  # why nothing more is recorded

    def __post_init__(self) -> None:
        with torch.cuda.device(self.device):
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.age, self.rate = torch.zeros(2, device=self.device)

    def __call__(
        self, compute: Compute, optimizer: Optimizer, parts: list[Batch], totals: Tensor
    ) -> Computed:
        """What `compute` makes of the step, which it has learned from then."""
        if self.refused or len(parts) > 1 or len(parts[0].packed.ids) > MOST_TOKENS:
            return compute(parts, totals)
        key = _key(parts[0], optimizer)
        self.seen[key] = met = self.seen.pop(key, 0) + 1
        if len(self.seen) > SHAPES:
            del self.seen[next(iter(self.seen))]
        with self._on_device(optimizer):
            if met <= WARM or not _side_by_side(parts[0]):
                return self._aside(compute, parts, totals)
            return self._by_graph(key, compute, optimizer, parts, totals)

    @contextmanager
    def _on_device(self, optimizer: Optimizer) -> Iterator[None]:
        """The rate and the age are read from the device meanwhile."""
        groups = optimizer.param_groups
        rates, age = (
            [group["lr"] for group in groups],
            1 + max(map(int, _ages(optimizer)), default=0),
        )
        self.rate.fill_(rates[0])
        self.age.fill_(age)
        for group in groups:
            group["lr"], group["age"] = self.rate, self.age
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
                del group["age"]

    def _aside(self, compute: Compute, parts: list[Batch], totals: Tensor) -> Computed:
        """As it is, on the stream of captures: what it leaves behind must not tie them to ours."""
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
        new = [*_tensors(parts[0]), totals]
        if found := self.recorded.get(key):
            for kept, tensor in zip(found.inputs, new, strict=True):
                kept.copy_(tensor, non_blocking=True)
            torch._foreach_add_(_ages(optimizer), 1)  # pyright: ignore[reportPrivateImportUsage]
        else:
            ages = [age.clone() for age in _ages(optimizer)]
            try:
                found = self._record(compute, parts[0], new)
            except RuntimeError as error:
                self.refused = str(error).partition("\n")[0]
                LOGGER.warning("steps run without CUDA graphs, slower: %s", self.refused)
                for age, before in zip(_ages(optimizer), ages, strict=True):
                    age.copy_(before)
                return self._aside(compute, parts, totals)
            self.recorded[key] = found
            if len(self.recorded) > GRAPHS:
                del self.recorded[next(iter(self.recorded))]
        found.graph.replay()
        return found.names, found.row.clone()

    def _record(self, compute: Compute, batch: Batch, tensors: list[Tensor]) -> Recording:
        """Nothing runs yet; the optimizer counts the step that the first replay makes."""
        inputs = [tensor.clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        with executable.recording(graph, pool=self.pool, stream=self.stream):
            names, row = compute([_holding(batch, inputs[:-1])], inputs[-1])
        return Recording(graph, inputs, names, row)


def _key(batch: Batch, optimizer: Optimizer) -> Hashable:
    """All that a graph holds by value."""
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(batch))
    betas = tuple(tuple(group["betas"]) for group in optimizer.param_groups)
    packed = batch.packed
    return shapes, packed.max_seqlen, packed.capacity, packed.places, betas


def _side_by_side(batch: Batch) -> bool:
    """Do its sequences come first, with all filler behind them?"""
    return batch.packed.places == tuple(range(len(batch.packed.places)))


def _tensors(batch: Batch) -> list[Tensor]:
    return [*(getattr(batch.packed, name) for name in OF_PACKED), batch.targets]


def _holding(batch: Batch, tensors: list[Tensor]) -> Batch:
    packed = replace(batch.packed, **dict(zip(OF_PACKED, tensors[:-1], strict=True)))
    return replace(batch, packed=packed, targets=tensors[-1])


def _ages(optimizer: Optimizer) -> list[Tensor]:
    """How many steps each parameter has made, on the host."""
    return [state["step"] for state in optimizer.state.values() if "step" in state]
