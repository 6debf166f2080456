"""Engines run a function over many items in parallel; this one on the cores of one machine.

An engine is a context manager that yields a `RunTasks`: a function and its items in, results out,
in the order of the items. The local engine keeps at most two items per worker in flight, so memory
does not grow with the number of items. Its processes are spawned, never forked (a fork copies the
locks of threads that it does not copy). Each holds one end of a pipe whose other end only this
process has: when that closes, because the work is over, was interrupted or this process was killed,
the workers end at once. A worker that is killed ends the build with an error; finished files stay
on disk.

A single worker needs no process: its work is done in this one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

from packhorse.errors import InputError, PackhorseError

T = TypeVar("T")

AHEAD = 2  # items in flight per worker: one in work, one that waits
RESUME_HINT = "finished work is kept; run the same command to resume"


class RunTasks(Protocol):
    """Calls `function(*item)` for each item; yields results in the order of the items."""

    def __call__(
        self, function: Callable[..., T], items: Iterable[tuple[Any, ...]]
    ) -> Iterator[T]: ...


Engine = AbstractContextManager[RunTasks]


def cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local(workers: int | None = None) -> Iterator[RunTasks]:
    """An engine of `workers` processes; by default one per core."""
    workers = cores() if workers is None else workers
    if workers < 1:
        raise InputError(f"workers is {workers}; it must be 1 or more")
    if workers == 1:
        with _single_threaded():
            yield _run_here
        return
    spawn = multiprocessing.get_context("spawn")
    worker_end, driver_end = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (worker_end,))
    with _exit_on_sigterm(), driver_end, worker_end, pool:
        try:
            yield lambda function, items: _run_in_pool(pool, AHEAD * workers, function, items)
        except BaseException:
            driver_end.close()  # ends the workers: their current items are not waited for
            raise


def _run_here(function: Callable[..., T], items: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    return (function(*item) for item in items)


def _run_in_pool(
    pool: ProcessPoolExecutor,
    most_in_flight: int,
    function: Callable[..., T],
    items: Iterable[tuple[Any, ...]],
) -> Iterator[T]:
    in_flight: deque[Future[T]] = deque()
    try:
        for item in items:
            in_flight.append(pool.submit(call, function, item))
            if len(in_flight) >= most_in_flight:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool as error:
        raise InputError(
            f"a worker process died, killed or out of memory; {RESUME_HINT}, with fewer --workers"
            " if memory was short"
        ) from error


def call(function: Callable[..., T], item: tuple[Any, ...]) -> T:
    """Call the function in a worker; raise errors that can be sent between processes."""
    try:
        return function(*item)
    except PackhorseError as error:  # not every kind survives pickling
        is_disk_error = isinstance(error.__cause__, OSError)
        raise InputError(f"{error}; {RESUME_HINT}" if is_disk_error else str(error)) from None


def _start_worker(worker_end: Connection) -> None:
    """Prepare a new worker: one thread, no reaction to Ctrl-C, ends with the driver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_driver, args=(worker_end,), daemon=True).start()


def _end_with_driver(worker_end: Connection) -> None:
    """Wait until the driver's end of the pipe closes."""
    try:
        worker_end.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the pool is closed and leaks no semaphores."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # the application handles the signal itself
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Restrict the tokenizer to one core, as one worker is expected to use."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
