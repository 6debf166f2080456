"""Engines: the same work over many items, here on the cores of one machine.

An engine is a context manager that gives a `Run`: a function and its items in, results out, in the
order of the items. The local one keeps at most two items a worker in flight, so memory does not
grow with the number of items. Its processes are spawned, never forked (a fork copies the locks of
threads it does not copy), and each holds one end of a pipe whose other end only this process has:
when that closes, because the work is over, was interrupted or this process was killed, they end at
once. A worker that is killed ends the build with an error; what was done is on the disk.

One worker needs no process: the work is then done here.
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

AHEAD = 2  # items in flight for each worker: one that it does, one that waits
GO_ON = "what is done is kept: run the same command to go on"


class Run(Protocol):
    """`function(*item)` for each item; the results in the order of the items."""

    def __call__(
        self, function: Callable[..., T], items: Iterable[tuple[Any, ...]]
    ) -> Iterator[T]: ...


Engine = AbstractContextManager[Run]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local(workers: int | None = None) -> Iterator[Run]:
    """An engine of so many processes; by default one for each core."""
    workers = cores() if workers is None else workers
    if workers < 1:
        raise InputError(f"{workers} workers cannot work; use 1 or more")
    if workers == 1:
        with _one_thread():
            yield _here
        return
    spawn = multiprocessing.get_context("spawn")
    theirs, ours = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, spawn, _begin, (theirs,))
    with _tidy_when_terminated(), ours, theirs, pool:
        try:
            yield lambda function, items: _pooled(pool, AHEAD * workers, function, items)
        except BaseException:
            ours.close()  # what they are at is not waited for
            raise


def _here(function: Callable[..., T], items: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    return (function(*item) for item in items)


def _pooled(
    pool: ProcessPoolExecutor,
    most: int,
    function: Callable[..., T],
    items: Iterable[tuple[Any, ...]],
) -> Iterator[T]:
    flying: deque[Future[T]] = deque()
    try:
        for item in items:
            flying.append(pool.submit(call, function, item))
            if len(flying) >= most:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    except BrokenProcessPool as error:
        raise InputError(
            f"a worker process died, killed or out of memory; {GO_ON}, with fewer --workers if"
            " memory was short"
        ) from error


def call(function: Callable[..., T], item: tuple[Any, ...]) -> T:
    """In a worker: the function, its errors fit to travel."""
    try:
        return function(*item)
    except PackhorseError as error:  # not every kind survives the way between processes
        disk = isinstance(error.__cause__, OSError)
        raise InputError(f"{error}; {GO_ON}" if disk else str(error)) from None


def _begin(theirs: Connection) -> None:
    """In a new worker: one thread, deaf to Ctrl-C, and no life after its master's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(theirs,), daemon=True).start()


def _end_with(theirs: Connection) -> None:
    try:
        theirs.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


@contextmanager
def _tidy_when_terminated() -> Iterator[None]:
    """SIGTERM as an exception: ended at once, Python complains of semaphores that are left."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # whoever uses this has its own way
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One worker is one core: the tokenizer would take them all."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
