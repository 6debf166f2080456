"""Parts of a CPU batch side by side, each on its own group of cores, instead of all cores on each.

One matrix product is too small for sixteen cores: in every layer they wait a dozen times for the
slowest of them. So a batch is cut between sequences into parts that cost the same, and each part
runs through the whole model on one group of cores. The number of tokens decides about the groups: a
large batch has one per core, a smaller one fewer groups of several cores, and a small batch runs
undivided on all cores. Groups take parts from one queue, so that the next batch can be launched
before this one is finished, and no group waits.

Results do not change: sequences do not see each other, and a part computes what it would compute
alone on as many threads.

Shapes: T tokens, S sequences.
"""

# torch leaves some of its functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar, final

import numpy as np
import torch
from torch import Tensor

from packhorse.native import INT, Obstacle, openmp_library
from packhorse.packing.batch import Packed
from packhorse.processor import usable_cores

# Tokens of a part. With fewer, a core's products are small and Python's overhead counts; with more,
# a layer's activations no longer fit into the core's cache.
SMALLEST_PART = 512
LARGEST_PART = 2048
# With sequences of so many tokens, attention takes as long as the rest of a layer; roughly, for any
# width of model.
DOUBLED_LENGTH = 1000
TOPOLOGY = Path("/sys/devices/system/cpu")

Result = TypeVar("Result")
Run = Callable[[Packed, Sequence[str], Tensor | None], Sequence[Tensor]]

_GROUPS: dict[tuple[int, int, int], CoreGroups] = {}


def default_budget(smallest: int) -> int:
    """Tokens of a batch that gives every core a part, at least `smallest`."""
    return max(smallest, LARGEST_PART * usable_threads())


def usable_threads() -> int:
    """Threads of all groups together: torch's, and no more than a container's quota keeps busy."""
    return min(torch.get_num_threads(), _usable_cores())


@cache
def _usable_cores() -> int:
    return usable_cores()


def group_layout(tokens: int, threads: int) -> tuple[int, int]:
    """How many groups run a batch of so many tokens, and how many threads each has."""
    size = 1
    while size < threads and tokens < threads // size * SMALLEST_PART:
        size *= 2
    return max(1, threads // size), min(size, threads)


def launch(
    run: Run, packed: Packed, heads: tuple[str, ...], only: int | None
) -> list[Future[Sequence[Tensor]]]:
    """Start a batch on groups of cores; empty if all cores should run it as a whole.

    With `only`, per-token heads run on the tokens with this id alone. The results of the parts, end
    to end, are those of the batch.
    """
    count, threads = group_layout(len(packed.ids), usable_threads())
    if count < 2 or len(packed) < 2 or packed.capacity or not _can_divide_threads():
        return []
    groups = _groups(count, threads)
    # A batch of a large budget: several parts for each group, none of them too large for its cache.
    rounds = -(-len(packed.ids) // (count * threads * LARGEST_PART))
    parts = divide(packed, count * rounds)
    try:
        return [groups.submit(partial(_run_part, run, part, heads, only)) for part in parts]
    except RuntimeError:  # the main thread has ended, and Python's pools with it
        return []


def _run_part(run: Run, part: Packed, heads: tuple[str, ...], only: int | None) -> Sequence[Tensor]:
    indices = None if only is None else (part.ids == only).nonzero().flatten()
    return run(part, heads, indices)


def divide(packed: Packed, count: int) -> list[Packed]:
    """Cut a ragged batch between sequences, into at most `count` parts that cost about the same."""
    bounds = packed.cu_seqlens.numpy().astype(np.int64)
    lengths = np.diff(bounds)
    # Linear layers cost as much as there are tokens, attention as their number times the length.
    cost: np.ndarray = np.concatenate([[0.0], np.cumsum(lengths * (1 + lengths / DOUBLED_LENGTH))])
    targets: np.ndarray = cost[-1] * np.arange(1, count) / count
    above: np.ndarray = np.searchsorted(cost, targets)
    below = above - 1
    cuts = np.where(targets - cost[below] < cost[above] - targets, below, above)
    edges: list[int] = np.unique([0, *cuts.tolist(), len(lengths)]).tolist()
    return [_slice(packed, begin, end) for begin, end in pairwise(edges)]


def _slice(packed: Packed, begin: int, end: int) -> Packed:
    """Sequences `begin` to `end` of a batch, as a batch."""
    bounds = packed.cu_seqlens[begin : end + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    prompts = packed.prompt_lengths
    keys = packed.key_lengths
    return Packed(
        ids=packed.ids[first:last],
        types=packed.types[first:last],
        positions=packed.positions[first:last],
        cu_seqlens=bounds - first,
        max_seqlen=int(bounds.diff().max()),
        places=tuple(range(end - begin)),
        prompt_lengths=None if prompts is None else prompts[begin:end],
        key_lengths=None if keys is None else keys[begin:end],
    )


@final
class CoreGroups:
    """Threads that take work from one queue, each bound to its own group of cores.

    They live as long as the process, because starting one takes as long as a short text. At the
    end of the process they finish their work: a thread killed inside torch would abort it.
    """

    def __init__(self, count: int, threads: int) -> None:
        cores = cores_to_bind(count * threads)
        self._unassigned: SimpleQueue[list[int]] = SimpleQueue()  # the cores of each group
        for first in range(0, count * threads, threads):
            self._unassigned.put(cores[first : first + threads])
        self._pool = ThreadPoolExecutor(count, "packhorse-cores", self._begin, (threads,))

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Have the next group that is free call a function."""
        return self._pool.submit(function)

    def _begin(self, threads: int) -> None:
        cores = self._unassigned.get_nowait()
        with suppress(OSError):  # the process has lost these cores since; any will do
            if cores:  # before OpenMP starts threads, which inherit it
                os.sched_setaffinity(0, cores)
        _use_threads(threads)


def _groups(count: int, threads: int) -> CoreGroups:
    """The groups of this process; a forked child has none of its parent's threads."""
    key = os.getpid(), count, threads
    # Of two callers that find none, one wins; threads begin with the first work.
    return _GROUPS.get(key) or _GROUPS.setdefault(key, CoreGroups(count, threads))


def cores_to_bind(count: int, topology: Path = TOPOLOGY) -> list[int]:
    """Physical cores to bind `count` threads to, if the process has exactly so many; else none.

    With fewer threads than cores, the operating system knows better which core is free. A user who
    sets OMP_PROC_BIND has decided about binding.
    """
    if not hasattr(os, "sched_setaffinity") or "OMP_PROC_BIND" in os.environ:
        return []
    allowed = sorted(os.sched_getaffinity(0))
    if usable_cores() != len(allowed):  # a quota of processor time, on any of the cores
        return []
    try:
        siblings = [
            (topology / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
            for core in allowed
        ]
    except OSError:
        return []
    # The first thread of each core: later entries of a dictionary replace earlier ones.
    physical = dict(zip(reversed(siblings), reversed(allowed), strict=True))
    cores = sorted(physical.values())
    return cores if len(cores) == count else []


@cache
def _can_divide_threads() -> bool:
    try:
        openmp_library()
    except Obstacle:
        return False
    return True


def share_threads(users: int) -> None:
    """Limit this thread to its share of torch's threads, where `users` threads run products."""
    if users > 1 and _can_divide_threads():
        _use_threads(max(1, torch.get_num_threads() // users))


def _use_threads(count: int) -> None:
    """Run this thread's products on `count` threads, without a change for other threads.

    `torch.set_num_threads` would also change the default of every thread that starts later.
    """
    torch.get_num_threads()  # torch sets its own number when a thread first asks
    setter = openmp_library().omp_set_num_threads
    setter.argtypes = (INT,)
    setter(count)
