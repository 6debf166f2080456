"""Reading, computing on several devices and writing, overlapped; results are written in order.

    pipeline = Pipeline([encode_on_first_gpu, encode_on_second_gpu], write)
    pipeline.run(chunks)

The thread that calls `run` reads, each worker has a thread of its own, and so has writing. Threads
of one process are enough: tokenizing, the model and the disk all run without Python's lock. The
number of items in progress is bounded, and so is memory. Item i goes to worker i modulo their
number, so that a result does not depend on which worker was faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Generic, TypeVar, final

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING = 2  # items that are read or written while the workers are busy


class Stopped(Exception):
    """The work was stopped: another worker or the writer failed, or the user interrupted it."""


@final
class Pipeline(Generic[Item, Result]):
    """Workers that take items in turn, and one writer that gets their results in order."""

    def __init__(
        self,
        workers: Sequence[Callable[[Item], Result]],
        write: Callable[[Item, Result], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """`prepare` is called first in the thread of each worker."""
        self._workers = workers
        self._write = write
        self._prepare = prepare
        self._slots = threading.Semaphore(len(workers) + WAITING)
        self._failures: list[BaseException] = []
        self._stopped = threading.Event()

    def check(self) -> None:
        """Raise if the work was stopped; a worker calls it now and then to end early."""
        if self._stopped.is_set():
            raise Stopped

    def run(self, items: Iterable[Item], first: int = 0) -> None:
        """Compute all items and write their results; the first failure in their order is raised.

        Results of items before a failure are written. An interruption ends the workers where they
        call `check`. `first` is the number of the first item.
        """
        try:
            with ExitStack() as threads:
                pools = [
                    threads.enter_context(ThreadPoolExecutor(1, initializer=self._prepare))
                    for _ in self._workers
                ]
                writer = threads.enter_context(ThreadPoolExecutor(1))
                try:
                    self._feed(enumerate(items, first), pools, writer)
                except Exception:
                    _wait_for(writer)  # what came before the failure is written
                    raise
                except BaseException:
                    self._stopped.set()
                    raise
        except Exception as error:
            raise (self._failures or [error])[0] from None
        if self._failures:
            raise self._failures[0]

    def _feed(
        self,
        items: Iterable[tuple[int, Item]],
        pools: Sequence[ThreadPoolExecutor],
        writer: ThreadPoolExecutor,
    ) -> None:
        for number, item in items:
            self._slots.acquire()
            if self._stopped.is_set():
                break
            turn = number % len(pools)
            writer.submit(self._finish, item, pools[turn].submit(self._workers[turn], item))
        _wait_for(writer)  # here, not in `shutdown`, so that Ctrl-C stops the workers

    def _finish(self, item: Item, future: Future[Result]) -> None:
        try:
            result = future.result()
            self.check()
            self._write(item, result)
        except BaseException as error:  # it is raised by `run`
            self._failures.append(error)
            self._stopped.set()
        finally:
            self._slots.release()


def _wait_for(pool: ThreadPoolExecutor) -> None:
    """Return when all that was submitted to a pool of one thread is done."""
    pool.submit(int).result()  # `int` does nothing, and runs after the rest
