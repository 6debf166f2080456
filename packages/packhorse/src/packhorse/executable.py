"""Compile once for each shape bucket, and keep what was compiled on disk.

`compile` hands modules to torch.compile with its caches in a folder of the user's own, so that a
second process starts from the first one's work. `CudaGraphs` records what a callable launches for a
bucket and replays it, which takes the host out of the loop where batches are small. Nothing here
knows what is being compiled.

Compiled code is loaded only from folders that nobody else can have written to (`packhorse.cache`).
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.cache import keep_compiled_code_private

COMPILED_LIMIT = 4096  # buckets before torch gives up; its own default is 8
RECORDED_LIMIT = 64  # CUDA graphs kept; the one not used for longest goes
ONE_CAPTURE = RLock()  # torch captures one graph at a time; compiling for it comes first


@cache
def cpp_compiler() -> str | None:
    """The C++ compiler torch.compile would use, or None."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def compile(modules: Iterable[nn.Module]) -> None:
    """Have each module compiled for each shape it meets; where nothing can be, say so once.

    Modules of one class share what is compiled: given the layers of a model rather than the model,
    a bucket costs one layer's compilation.
    """
    if cpp_compiler() is None:  # on CUDA too: its launchers are compiled for the host
        return _say_uncompiled()
    keep_compiled_code_private()
    for module in modules:
        module.compile(dynamic=False, fullgraph=True)


def allow_every_bucket() -> None:
    """Lift torch's limit on compilations in this thread; its settings are a thread's own.

    While one thread compiles, torch up to 2.12 takes a call of a compiled module in any other
    thread for a part of that and raises. Such a call runs uncompiled instead.
    """
    torch._dynamo.config.error_on_nested_fx_trace = False
    torch._dynamo.config.recompile_limit = COMPILED_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = COMPILED_LIMIT


@cache
def _say_uncompiled() -> None:
    warnings.warn(
        "no C++ compiler found (g++ or clang++): running uncompiled", RuntimeWarning, stacklevel=3
    )


def cache_misses() -> int:
    """Graphs this process had to compile because the disk cache did not hold them."""
    counted = torch._dynamo.utils.counters["inductor"]
    return int(counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"])


def round_up(size: int, smallest: int = 64) -> int:
    """The next bucket size: four to each power of two, so that at most a fifth is spare."""
    if size <= smallest:
        return smallest
    step = max(1, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step


def sizes(largest: int, smallest: int = 64) -> Iterator[int]:
    """Every bucket size up to the one that holds `largest`."""
    size = 0
    while size < largest:
        size = round_up(size + 1, smallest)
        yield size


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
    """Record what is launched, undisturbed, and where that fails have all as it was before.

    A graph that the collector ends meanwhile would spoil the capture, so it does not collect. torch
    leaves a failed capture with its stream current and the generator still recording, so that the
    next dropout would raise.

    cuBLAS has one workspace per stream. One from before the capture is not the graph's memory:
    torch.compile frees it when it records graphs of its own, and a replay would write into what is
    somebody else's by then. So the capture begins without one and keeps what it allocates.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    with ONE_CAPTURE, torch.cuda.stream(torch.cuda.current_stream()):
        collects, before = gc.isenabled(), generator.clone_state()
        gc.disable()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **how):
                yield
        except BaseException:
            generator.graphsafe_set_state(before)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if collects:
                gc.enable()


@dataclass
class CudaGraphs:
    """Replays `function` for each bucket: inputs are copied in, one launch, the output is copied.

    The output is copied because the next replay writes over it: all buckets share one pool of
    memory, so that it holds the largest, not the sum. So callers take turns: on the host, a lock is
    held from the look-up to the copy; on the device, where callers may use several streams, a
    replay waits for the copy of the one before.
    """

    function: Callable[..., Tensor]
    recorded: dict[Hashable, _Recording] = field(default_factory=dict)
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)  # the last output
    turn: Lock = field(default_factory=Lock)

    def __call__(self, *tensors: Tensor, **constants: Any) -> Tensor:
        """Replay, or record first; constants are part of the bucket."""
        key = (*((x.shape, x.dtype) for x in tensors), *sorted(constants.items()))
        with self.turn:
            torch.cuda.current_stream().wait_event(self.copied)
            recording = self.recorded.pop(key, None) or self._record(tensors, constants)
            self.recorded[key] = recording  # at the end: used last
            if len(self.recorded) > RECORDED_LIMIT:
                self.copied.synchronize()  # it may still run, on a stream that is not ours
                del self.recorded[next(iter(self.recorded))]
            try:
                return recording.replay(tensors)
            finally:  # also where there was no memory for the copy: the graph was launched
                self.copied.record()

    def _record(self, tensors: tuple[Tensor, ...], constants: dict[str, Any]) -> _Recording:
        with ONE_CAPTURE:
            return self._record_alone(tensors, constants)

    def _record_alone(self, tensors: tuple[Tensor, ...], constants: dict[str, Any]) -> _Recording:
        inputs = tuple(x.clone() for x in tensors)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up where allocations and compilation do no harm
            for _ in range(3):
                self.function(*inputs, **constants)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with recording(graph, pool=self.pool):
            output = self.function(*inputs, **constants)
        return _Recording(graph, inputs, output)


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: Any  # torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor

    def replay(self, tensors: tuple[Tensor, ...]) -> Tensor:
        for kept, new in zip(self.inputs, tensors, strict=True):
            kept.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.output.clone()
