"""Reading ahead beside the caller, and cutting batches anew.

    items = rebatched(iter(loader), size=64, drop_last=True)
    for batch in Ahead(items, depth=3): ...

A thread takes items from an iterator until `depth` of them wait. It overlaps with the caller as far
as either leaves the interpreter's lock: torch's operations do, waiting for worker processes and
files does. What a data set computes in Python does not, so `loader` puts a worker process under the
thread. An error of the iterator is raised where its item would have come.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from packhorse.errors import InputError


class Ahead:
    """An iterator over `items` that has up to `depth` of them ready.

    `first_here`: the caller reads the first one itself. An iterator that shuffles draws its order
    then, from the generator the model draws from next; in a thread, which comes first were chance.
    """

    def __init__(self, items: Iterator[Any], depth: int, first_here: bool = False) -> None:
        if depth < 1:
            raise InputError(
                f"a buffer of {depth} batches holds nothing; buffer_size is at least 1"
            )
        self._items, self._depth = items, depth
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._stopped = self._ended = False
        self._error: BaseException | None = None
        if first_here:
            self._take()
        self._thread = threading.Thread(target=self._read, name="packhorse-ahead", daemon=True)
        self._thread.start()

    def _take(self) -> bool:
        """Move one item from `items` to those ready; False when there is none or it failed."""
        try:
            item = next(self._items)
        except StopIteration:
            return self._end(None)
        except BaseException as error:
            return self._end(error)
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()
        return True

    def _end(self, error: BaseException | None) -> bool:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()
        return False

    def _read(self) -> None:
        while not self._ended:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                if self._stopped:
                    return
            self._take()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
            if self._stopped:
                raise InputError(
                    "this loop's batches were stopped, by terminate() or by another loop over the"
                    " same loader; give each loop a loader of its own"
                )
            if not self._ready:
                error, self._error = self._error, None
                raise error or StopIteration
            self._changed.notify_all()
            return self._ready.popleft()

    @property
    def waiting(self) -> int:
        """Items ready now."""
        return len(self._ready)

    def stop(self) -> None:
        """Read no further: whoever still iterates is told. Waits for the item being read."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            self._thread.join()


def held(owner: object, ahead: Ahead) -> Iterator[Any]:
    """The items, with the one who stops the reading when dropped kept alive by the loop."""
    yield from ahead


def rebatched(items: Iterator[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """The same elements in batches of `size`, whatever sizes they come in, in order."""
    parts: list[Any] = []
    held = 0
    for item in items:
        parts.append(item)
        held += length(item)
        if held < size:
            continue
        together, whole = joined(parts), held - held % size
        yield from (cut(together, at, at + size) for at in range(0, whole, size))
        parts = [cut(together, whole, held)] if held > whole else []
        held -= whole
    if held and not drop_last:
        yield joined(parts)


def length(batch: Any) -> int:
    """Elements in a batch: the first dimension of the first tensor in it."""
    if isinstance(batch, Tensor) and batch.dim():
        return batch.shape[0]
    if _texts(batch):
        return len(batch)
    inside = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(inside, list | tuple) and inside:
        return length(inside[0])
    raise InputError(
        f"cannot rebatch a {type(batch).__name__}: elements are tensors, texts, or tuples, lists"
        " and dictionaries of them; use DataLoaderMode.Async or another collate_fn"
    )


def joined(parts: list[Any]) -> Any:
    """Batches one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if _texts(first):
        return type(first)(text for part in parts for text in part)
    return _like(first, [joined(list(column)) for column in zip(*parts, strict=True)])


def cut(batch: Any, begin: int, end: int) -> Any:
    """Elements `begin` to `end` of a batch."""
    if isinstance(batch, Tensor) or _texts(batch):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return {key: cut(value, begin, end) for key, value in batch.items()}
    return _like(batch, [cut(column, begin, end) for column in batch])


def _texts(batch: Any) -> bool:
    """Is it a column of texts, as torch collates them, rather than several columns?"""
    sequence = isinstance(batch, list | tuple) and len(batch) > 0
    return sequence and all(isinstance(each, str | bytes) for each in batch)


def _like(pattern: Any, columns: list[Any]) -> Any:
    """A list, tuple or named tuple, as `pattern` is."""
    return type(pattern)(*columns) if hasattr(pattern, "_fields") else type(pattern)(columns)
