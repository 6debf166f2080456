"""Compile or record once per shape bucket, and keep compiled code on disk.

`compile` passes modules to torch.compile with its caches in a private folder of the user, so that a
second process reuses the first one's work. `CudaGraphs` records what a callable launches for a
bucket and replays it, which removes the host's overhead for small batches. Nothing here depends on
what is compiled.

Compiled code is loaded only from folders that nobody else can have written to (`packhorse.cache`).
"""

from __future__ import annotations

import codecs
import gc
import locale
import os
import shutil
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import Lock, RLock
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.cache import keep_compiled_code_private

COMPILED_LIMIT = 4096  # buckets before torch stops compiling; its own default is 8
RECORDED_LIMIT = 128  # CUDA graphs in memory; the least recently used one is dropped
# torch captures one graph per process at a time. The lock is reentrant because a capture begins
# with a warm-up that holds it too. Order: `CudaGraphs.turn` before ONE_CAPTURE, never the reverse.
ONE_CAPTURE = RLock()


@cache
def cpp_compiler() -> str | None:
    """The C++ compiler torch.compile would use, or None."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def compile(modules: Iterable[nn.Module]) -> None:
    """Compile each module for each shape that it gets; where that cannot be done, warn once.

    Modules of one class share compiled code: if the layers of a model are passed instead of the
    model, a bucket takes the compilation of only one layer.
    """
    if warn_if_uncompiled():
        return
    keep_compiled_code_private()
    for module in modules:
        module.compile(dynamic=False, fullgraph=True)


def compiled(modules: Iterable[nn.Module]) -> list[Callable[..., Any]]:
    """Return compiled versions beside the modules themselves, which stay as they are.

    Where nothing can be compiled, warn once and return the modules.
    """
    if warn_if_uncompiled():
        return list(modules)
    keep_compiled_code_private()
    # What `nn.Module.compile` compiles too: so modules of one class share the code.
    return [torch.compile(m._call_impl, dynamic=False, fullgraph=True) for m in modules]


def allow_every_bucket() -> None:
    """Raise torch's limit on compilations in this thread; torch's settings are per thread.

    While one thread compiles, torch up to 2.12 takes a call of a compiled module in another thread
    for a nested compilation and raises. Such a call runs uncompiled instead.
    """
    torch._dynamo.config.error_on_nested_fx_trace = False
    torch._dynamo.config.recompile_limit = COMPILED_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = COMPILED_LIMIT


def why_uncompiled() -> str:
    """Return why nothing can be compiled here; empty if it can."""
    if cpp_compiler() is None:  # needed on CUDA too: its launchers are compiled for the host
        return "no C++ compiler found (g++ or clang++)"
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8":  # in which torch's compiler reads its own files
        return f"torch's compiler cannot read its files as {encoding} (set PYTHONUTF8=1)"
    return ""


def warn_if_uncompiled() -> bool:
    """Return whether nothing can be compiled here; the first time warn why."""
    if reason := why_uncompiled():
        _warn_uncompiled(reason)
    return bool(reason)


@cache
def _warn_uncompiled(reason: str) -> None:
    warnings.warn(f"{reason}: running uncompiled", RuntimeWarning, stacklevel=3)


def cache_misses() -> int:
    """The number of graphs that this process compiled because the disk cache did not have them."""
    counters = torch._dynamo.utils.counters["inductor"]
    return int(counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"])


def round_up(size: int, smallest: int = 64) -> int:
    """The next bucket size: four per power of two, so that at most a fifth is unused."""
    if size <= smallest:
        return smallest
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


def sizes(largest: int, smallest: int = 64) -> Iterator[int]:
    """Every bucket size up to the one that holds `largest`."""
    size = 0
    while size < largest:
        size = round_up(size + 1, smallest)
        yield size


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record what is launched into `graph`; after a failure restore the previous state.

    If the garbage collector destroyed another graph meanwhile, the capture would become invalid, so
    it is off. After a failed capture torch leaves its stream current and the random generator
    recording, so that the next dropout would raise; both are restored.

    cuBLAS has one workspace per stream. A workspace from before the capture is not part of the
    graph's memory: torch.compile frees it when it records graphs of its own, and a replay would
    write to memory that belongs to others by then. So the capture begins without a workspace and
    keeps the one it allocates.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    with ONE_CAPTURE, torch.cuda.stream(torch.cuda.current_stream()):
        gc_was_enabled = gc.isenabled()
        generator_state = generator.clone_state()
        gc.disable()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
                yield
        except BaseException:
            generator.graphsafe_set_state(generator_state)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if gc_was_enabled:
                gc.enable()


@dataclass
class CudaGraphs:
    """Replays `function` per bucket: copy the inputs in, launch once, copy the outputs out.

    Outputs are copied because the next replay overwrites it: all buckets share one memory pool,
    whose size is that of the largest bucket, not of the sum. Therefore callers take turns: on the
    host, a lock is held from the lookup to the copy; on the device, where callers may use several
    streams, a replay waits for the output copy of the previous one.
    """

    function: Callable[..., Sequence[Tensor]]
    recorded: dict[Hashable, _RecordedGraph] = field(default_factory=dict)
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)  # of the last outputs
    turn: Lock = field(default_factory=Lock)

    def __call__(self, *tensors: Tensor, **constants: Any) -> list[Tensor]:
        """Replay, after recording if the bucket is new; constants are part of the bucket."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        key = shapes + tuple(sorted(constants.items()))
        with self.turn:
            torch.cuda.current_stream().wait_event(self.copied)
            graph = self.recorded.pop(key, None) or self._record(tensors, constants)
            self.recorded[key] = graph  # moves it to the end: most recently used
            if len(self.recorded) > RECORDED_LIMIT:
                self.copied.synchronize()  # the dropped graph may still run on another stream
                del self.recorded[next(iter(self.recorded))]
            try:
                return graph.replay(tensors)
            finally:  # also if there was no memory for the copy: the graph has been launched
                self.copied.record()

    def _record(self, tensors: tuple[Tensor, ...], constants: dict[str, Any]) -> _RecordedGraph:
        with ONE_CAPTURE:  # the warm-up too: it may compile, which must not happen in a capture
            inputs = tuple(tensor.clone() for tensor in tensors)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # warm up: lazy allocations and compilation
                for _ in range(3):
                    self.function(*inputs, **constants)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with recording(graph, pool=self.pool):
                outputs = self.function(*inputs, **constants)
            return _RecordedGraph(graph, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _RecordedGraph:
    graph: Any  # torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Sequence[Tensor]

    def replay(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        for buffer, tensor in zip(self.inputs, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self.graph.replay()
        return [output.clone() for output in self.outputs]
