"""`DataLoader`: one item is what one host call consumes.

    loader = DataLoader(opts, dataset, batch_size=16, shuffle=True, num_workers=4)
    loader.combinedBatchSize      # 16 × device iterations × replicas × accumulation

torch's own loader underneath, with PopTorch's arguments and defaults (`drop_last=True`, persistent
workers). `Async` reads ahead in a thread and, as PopTorch does, keeps a worker process under it
even if none was requested: that is what overlaps, and the data set then draws from its own
generator, so that results do not depend on timing. `AsyncRebatched` lets workers of an iterable
data set yield what they have and cuts full batches from all of it together, where `Async` would
drop each worker's remainder. A loop over a loader may be left early and started again.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, TensorDataset, default_collate

from packhorse_port.enums import DataLoaderMode, SharingStrategy
from packhorse_port.notices import UsageError, line_prefix, log_once
from packhorse_port.options import Options
from packhorse_port.settings import check_integer, check_member

BUFFER_SIZE = 3  # batches read ahead, PopTorch's default


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Yields combined batches.

    batch_size: what the model sees at once; None passes single elements on. batch_sampler: yields
    the indices of such batches; as many as a host call consumes are joined. drop_last: skip a last,
    incomplete combined batch. rebatched_worker_size: elements that a worker yields at once in
    `AsyncRebatched`. async_options: `buffer_size` and `early_preload`. Other arguments are torch's.
    """

    def __init__(
        self,
        options: Options | None = None,
        dataset: Any = None,
        batch_size: int | None = 1,
        shuffle: bool = False,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._options = _check_options(options, dataset)
        self._mode = check_member("mode", mode, DataLoaderMode)
        self._drop_last = drop_last
        self._prefetcher: Prefetcher | None = None
        self._preloaded: Prefetcher | None = None  # started early, for the first loop
        self._combined = self._combined_size(batch_size, batch_sampler)
        self._async = _check_async_options(async_options)
        workers = self._worker_count(num_workers, isinstance(dataset, IterableDataset))
        self._extra_worker = workers > 0 and not num_workers  # one that the script did not request
        if kwargs.get("sampler") is not None or batch_sampler is not None:
            auto_distributed_partitioning = False
        _check_data(dataset, self, auto_distributed_partitioning, workers, kwargs)
        if batch_sampler is not None:
            batching = self._sampler_arguments(batch_sampler, shuffle)
        else:
            batching = self._batch_arguments(dataset, shuffle, auto_distributed_partitioning)
        if self._rebatches:
            batching["batch_size"] = self._worker_batch_size(rebatched_worker_size)
            batching["drop_last"] = False
        persistent = workers > 0 if persistent_workers is None else persistent_workers
        kwargs |= {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        super().__init__(dataset, **batching, **kwargs)
        if self._async["early_preload"] and self._mode != DataLoaderMode.Sync:
            self._preloaded = self._start()

    def _sampler_arguments(
        self, batch_sampler: Iterable[Sequence[int]], shuffle: bool
    ) -> dict[str, Any]:
        """torch's arguments if a sampler yields the batches; they are not rebatched."""
        if shuffle:
            raise UsageError(
                f"{line_prefix()}leave out shuffle=True: a batch_sampler gives the order"
            )
        if self._mode == DataLoaderMode.AsyncRebatched:
            self._mode = DataLoaderMode.Async
        combined = CombinedBatchSampler(
            batch_sampler, self._options.batches_per_call, self._drop_last
        )
        return {"batch_sampler": combined}

    def _batch_arguments(self, dataset: Any, shuffle: bool, automatic: bool) -> dict[str, Any]:
        """torch's arguments if this loader forms the batches."""
        batching = {"batch_size": self._combined}
        batching["drop_last"] = self._drop_last and self._combined is not None
        if self._is_partitioned(dataset, automatic):
            size = self._combined or 1
            sampler = ProcessSampler(len(dataset), self._options, size, shuffle, self._drop_last)
            return batching | {"sampler": sampler}
        return batching | {"shuffle": shuffle}

    @property
    def _rebatches(self) -> bool:
        return self._mode == DataLoaderMode.AsyncRebatched and self._combined is not None

    def _combined_size(self, batch_size: int | None, batch_sampler: Any) -> int | None:
        if batch_sampler is not None:
            batch_size = getattr(batch_sampler, "batch_size", None)
        if batch_size is None:
            return None
        return check_integer("batch_size", batch_size) * self._options.batches_per_call

    def _worker_count(self, requested: int, iterable: bool) -> int:
        """The requested number, at most one per core.

        Not limited for an iterable data set: there the workers decide among them what each reads.
        """
        cores = _core_count()
        requested = check_integer("num_workers", requested, least=0)
        if not requested and self._mode != DataLoaderMode.Sync and _starts_by_fork():
            return 1
        if requested <= cores or iterable:
            return requested
        log_once(
            f"num_workers={requested}",
            f"num_workers={requested} is more than the {cores} cores here: {cores} workers read",
        )
        return cores

    def _worker_batch_size(self, requested: int | None) -> int | None:
        if requested is None or self._combined is None:
            return self._combined
        if check_integer("rebatched_worker_size", requested) > self._combined:
            raise UsageError(
                f"{line_prefix()}rebatched_worker_size={requested} is more than the combined batch"
                f" of {self._combined}; give at most that"
            )
        return requested

    def _is_partitioned(self, dataset: Any, automatic: bool) -> bool:
        distributed = self._options.Distributed.numProcesses > 1
        return distributed and automatic and not isinstance(dataset, IterableDataset)

    @property
    def combinedBatchSize(self) -> int | None:
        """Elements that one host call consumes; None if the data set yields its own batches."""
        return self._combined

    @property
    def options(self) -> Options:
        """The options that the loader was built with, frozen."""
        return self._options

    def __len__(self) -> int:
        if not self._rebatches or self._combined is None:
            return super().__len__()
        iterable = isinstance(self.dataset, IterableDataset)
        elements = len(self.dataset if iterable else self.sampler)  # pyright: ignore[reportArgumentType]
        return _batch_count(elements, self._combined, self._drop_last)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._mode == DataLoaderMode.Sync:
            return self._iterate_rows() if self._has_rows else super().__iter__()
        preloaded = self._preloaded
        self._preloaded = None
        return iterate_while_alive(self, preloaded or self._start())

    @property
    def _has_rows(self) -> bool:
        """Whether a batch can be indexed from tensors at once, instead of element by element."""
        plain = self.collate_fn is default_collate and not (self.num_workers or self.pin_memory)
        return plain and type(self.dataset) is TensorDataset and self.batch_sampler is not None

    def _iterate_rows(self) -> Iterator[list[Tensor]]:
        self._draw_seed()
        tensors = cast(TensorDataset, self.dataset).tensors
        for rows in cast(Iterable[Sequence[int]], self.batch_sampler):
            yield [tensor[rows] for tensor in tensors]

    def _draw_seed(self) -> None:
        # torch's loader draws a seed for its workers at the beginning of an epoch, even if it has
        # none. What draws after it must get the same numbers although that loader was bypassed.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def _start(self) -> Prefetcher:
        self._stop()
        if self._extra_worker and self._iterator is not None:
            # Persistent workers get no new seed: without this draw the extra worker of `Async`
            # would change the order of a shuffle from the second epoch on.
            self._draw_seed()
        # Workers start here, in the caller's thread: a fork beside a computing thread could copy a
        # lock that nothing in the child will ever release.
        items = super().__iter__()
        if self._rebatches and self._combined is not None:
            items = rebatch(items, self._combined, self._drop_last)
        size = self._async["buffer_size"]
        self._prefetcher = Prefetcher(items, size, first_in_caller=self.num_workers == 0)
        self._finalizer = weakref.finalize(self, self._prefetcher.stop)
        return self._prefetcher

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._finalizer()
        self._prefetcher = None
        self._preloaded = None

    def terminate(self) -> None:
        """Stop reading and end the worker processes; the loader may be iterated again."""
        self._stop()
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


class AsynchronousDataAccessor:
    """Reads any iterable ahead of the caller, in a thread, as `Async` does for a `DataLoader`.

    rebatched_size: cut batches of this size from what is read. Of PopTorch's other arguments
    `buffer_size` and `early_preload` have an effect; a thread shares everything and does not poll.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        buffer_size: int = BUFFER_SIZE,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.FileSystem,
        rebatched_size: int | None = None,
    ) -> None:
        if isinstance(dataset, DataLoader) and dataset._mode != DataLoaderMode.Sync:
            raise UsageError(
                "this DataLoader reads ahead already; iterate over it, or build it with"
                " mode=poptorch.DataLoaderMode.Sync"
            )
        self._dataset = dataset
        self._buffer_size = check_integer("buffer_size", buffer_size)
        self.rebatched_size = rebatched_size and check_integer("rebatched_size", rebatched_size)
        self._prefetcher: Prefetcher | None = None
        self._preloaded = self._start(first_in_caller=False) if early_preload else None

    def _start(self, first_in_caller: bool) -> Prefetcher:
        self.terminate()
        items = iter(self._dataset)
        if self.rebatched_size:
            items = rebatch(items, self.rebatched_size, self._drop_last)
        self._prefetcher = Prefetcher(items, self._buffer_size, first_in_caller)
        self._finalizer = weakref.finalize(self, self._prefetcher.stop)
        return self._prefetcher

    @property
    def _drop_last(self) -> bool:
        return getattr(self._dataset, "drop_last", True)

    def __iter__(self) -> Iterator[Any]:
        preloaded = self._preloaded
        self._preloaded = None
        return iterate_while_alive(self, preloaded or self._start(first_in_caller=True))

    def __next__(self) -> Any:
        return next(self._prefetcher or self._start(first_in_caller=True))

    def __len__(self) -> int:
        items = len(self._dataset)  # pyright: ignore[reportArgumentType]
        if not self.rebatched_size:
            return items
        elements = items * (getattr(self._dataset, "batch_size", 1) or 1)
        return _batch_count(elements, self.rebatched_size, self._drop_last)

    def terminate(self) -> None:
        """Stop reading."""
        if self._prefetcher is not None:
            self._finalizer()
        self._prefetcher = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


def _batch_count(elements: int, size: int, drop_last: bool) -> int:
    full, rest = divmod(elements, size)
    return full + (rest > 0 and not drop_last)


def _check_options(options: Any, dataset: Any) -> Options:
    if options is not None and not isinstance(options, Options):
        raise UsageError(
            f"{line_prefix()}the first argument of DataLoader is the options, not a"
            f" {type(options).__name__}; write poptorch.DataLoader(opts, dataset, …)"
        )
    if dataset is None:
        raise UsageError(
            f"{line_prefix()}it has no dataset; write poptorch.DataLoader(opts, dataset)"
        )
    options = options or Options()
    options.freeze("a DataLoader")
    return options


def _check_async_options(options: dict[str, Any] | None) -> dict[str, Any]:
    defaults = {
        "buffer_size": BUFFER_SIZE,
        "early_preload": False,
        "miss_sleep_time_in_ms": 0.1,
        "load_indefinitely": True,
        "sharing_strategy": None,
    }
    if unknown := sorted(set(options or {}) - set(defaults)):
        raise UsageError(f"async_options has no {unknown[0]!r}; it has {', '.join(defaults)}")
    return defaults | (options or {})


def _check_data(
    dataset: Any, loader: DataLoader, partitioned: bool, workers: int, kwargs: dict[str, Any]
) -> None:
    processes = loader.options.Distributed.numProcesses
    if isinstance(dataset, IterableDataset):
        if processes > 1 and partitioned:
            raise UsageError(
                f"an IterableDataset cannot be divided among {processes} processes; divide it"
                " yourself and pass auto_distributed_partitioning=False"
            )
        if workers > 1 and kwargs.get("worker_init_fn") is None:
            log_once(
                "worker_init_fn",
                f"each of the {workers} workers reads the whole IterableDataset unless it asks"
                " torch.utils.data.get_worker_info() or gets a worker_init_fn",
            )
    elif loader.combinedBatchSize is not None:
        elements = kwargs.get("sampler") or dataset
        if hasattr(elements, "__len__"):
            _check_size(len(elements), loader, processes if partitioned else 1)


def _check_size(elements: int, loader: DataLoader, processes: int) -> None:
    """Raise if no batch is left; log if the last batch is smaller than the others."""
    options = loader.options
    combined = (loader.combinedBatchSize or 1) * processes
    factors = f"batch_size {combined // processes // options.batches_per_call}"
    factors += f" x deviceIterations {options.device_iterations}"
    factors += f" x replicationFactor {options.replication_factor}"
    factors += f" x gradientAccumulation {options.gradient_accumulation}"
    factors += f" x processes {processes}" if processes > 1 else ""
    if elements < combined and loader._drop_last:
        raise UsageError(
            f"{line_prefix()}one host call consumes {combined} elements ({factors}) and the data"
            f" set has {elements}: with drop_last=True no batch is left. Lower one of the factors"
        )
    if elements % combined and not loader._drop_last:
        log_once(
            f"drop_last {elements} {combined}",
            f"{elements} elements are not divisible by the {combined} of one host call"
            f" ({factors}): the last batch has {elements % combined}, which a model refuses unless"
            f" divisible by {options.batches_per_call}; drop_last=True leaves it out",
        )


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _starts_by_fork() -> bool:
    """Whether new processes are forks; otherwise a script without a main guard would break."""
    method = multiprocessing.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"


class CombinedBatchSampler(Sampler[list[int]]):
    """Joins the batches of a sampler, as many as a host call consumes."""

    def __init__(self, batches: Iterable[Sequence[int]], count: int, drop_last: bool) -> None:
        self.batches = batches
        self.count = count
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        pending: list[Sequence[int]] = []
        uneven = False
        for batch in self.batches:
            sizes = f"{len(pending[0]) if pending else 0} and {len(batch)}"
            pending.append(batch)
            if uneven or (self.drop_last and len(batch) != len(pending[0])):
                raise UsageError(
                    f"a host call consumes {self.count} batches of one size, and the batch_sampler"
                    f" gave {sizes} elements; build it with drop_last=True"
                )
            uneven = len(batch) != len(pending[0])  # which only the very last batch may be
            if len(pending) == self.count:
                yield [index for indices in pending for index in indices]
                pending = []
        if pending and not self.drop_last:
            yield [index for indices in pending for index in indices]

    def __len__(self) -> int:
        batches = len(self.batches)  # pyright: ignore[reportArgumentType]
        return _batch_count(batches, self.count, self.drop_last)


class ProcessSampler(Sampler[int]):
    """The elements of one of several processes: a block of the data, or of its shuffled order.

    PopTorch partitions the data set itself; here the order of its indices is partitioned, so that
    the data set stays the user's own object. All processes draw the same order, from the options'
    seed and the epoch. With `drop_last` each has the same number of combined batches; otherwise
    those with more would wait forever for the others.
    """

    def __init__(
        self, elements: int, options: Options, combined: int, shuffle: bool, drop_last: bool
    ) -> None:
        count = options.Distributed.numProcesses
        number = options.Distributed.processId
        if shuffle and options.random_seed is None:
            raise UsageError(
                f"{count} processes shuffle alike only from one seed; write opts.randomSeed(n)"
                " before the DataLoader"
            )
        self.elements = elements
        self.seed = options.random_seed
        self.shuffle = shuffle
        self.epoch = 0
        if drop_last:
            size = elements // (combined * count) * combined
            self.begin = number * size
            self.end = (number + 1) * size
        else:
            self.begin = elements * number // count
            self.end = elements * (number + 1) // count

    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] = range(self.elements)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.elements, generator=generator).tolist()
        self.epoch += 1
        return iter(order[self.begin : self.end])

    def __len__(self) -> int:
        return self.end - self.begin


class Prefetcher:
    """An iterator over `items` that reads up to `size` of them ahead, in a thread.

    It overlaps with the caller as far as either releases the interpreter's lock: torch's operations
    do, waiting for worker processes and files does. What a data set computes in Python does not, so
    `DataLoader` puts a worker process under the thread. An error of the iterator is raised where
    its item would have come.

    `first_in_caller`: the caller's thread reads the first item. An iterator that shuffles draws its
    order then, from the generator that the model draws from next; in a thread the order of these
    draws would be random.
    """

    def __init__(self, items: Iterator[Any], size: int, first_in_caller: bool = False) -> None:
        if size < 1:
            raise UsageError(f"a buffer of {size} batches holds nothing; buffer_size is at least 1")
        self._items = items
        self._size = size
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()  # guards all fields below and `_ready`
        self._stopped = False
        self._ended = False
        self._error: BaseException | None = None
        if first_in_caller:
            self._read_item()
        self._thread = threading.Thread(target=self._read, name="packhorse-ahead", daemon=True)
        self._thread.start()

    def _read_item(self) -> bool:
        """Read one item; False at the end of `items` or after an error."""
        # Outside the lock: the caller takes items while the next one is read.
        try:
            item = next(self._items)
        except StopIteration:
            return self._finish(None)
        except BaseException as error:
            return self._finish(error)
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()
        return True

    def _finish(self, error: BaseException | None) -> bool:
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()
        return False

    def _read(self) -> None:
        while not self._ended:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._size)
                if self._stopped:
                    return
            self._read_item()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
            if self._stopped:
                raise UsageError(
                    "this loop's batches were stopped, by terminate() or by another loop over the"
                    " same loader; give each loop a loader of its own"
                )
            if not self._ready:
                error = self._error
                self._error = None
                raise error or StopIteration
            self._changed.notify_all()
            return self._ready.popleft()

    @property
    def ready(self) -> int:
        """Number of items that can be taken without waiting."""
        return len(self._ready)

    def stop(self) -> None:
        """Stop reading, after the item being read; loops that still iterate get an error."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        # A finalizer may run in any thread, this one included.
        if threading.current_thread() is not self._thread:
            self._thread.join()


def iterate_while_alive(owner: object, prefetcher: Prefetcher) -> Iterator[Any]:
    """The items; the generator keeps `owner` alive, whose finalizer would stop the reading."""
    yield from prefetcher


def rebatch(items: Iterator[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """The same elements in order, in batches of `size`, whatever sizes they come in."""
    parts: list[Any] = []
    elements = 0
    for item in items:
        parts.append(item)
        elements += batch_length(item)
        if elements < size:
            continue
        joined = join_batches(parts)
        full = elements - elements % size
        yield from (slice_batch(joined, begin, begin + size) for begin in range(0, full, size))
        parts = [slice_batch(joined, full, elements)] if elements > full else []
        elements -= full
    if elements and not drop_last:
        yield join_batches(parts)


def batch_length(batch: Any) -> int:
    """Elements in a batch: the first dimension of the first tensor in it."""
    if isinstance(batch, Tensor) and batch.dim():
        return batch.shape[0]
    if _is_texts(batch):
        return len(batch)
    columns = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(columns, list | tuple) and columns:
        return batch_length(columns[0])
    raise UsageError(
        f"cannot rebatch a {type(batch).__name__}: elements are tensors, texts, or tuples, lists"
        " and dictionaries of them; use DataLoaderMode.Async or another collate_fn"
    )


def join_batches(parts: list[Any]) -> Any:
    """Concatenate batches."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: join_batches([part[key] for part in parts]) for key in first}
    if _is_texts(first):
        return type(first)(text for part in parts for text in part)
    return _like(first, [join_batches(list(column)) for column in zip(*parts, strict=True)])


def slice_batch(batch: Any, begin: int, end: int) -> Any:
    """Elements `begin` to `end` of a batch."""
    if isinstance(batch, Tensor) or _is_texts(batch):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return {key: slice_batch(value, begin, end) for key, value in batch.items()}
    return _like(batch, [slice_batch(column, begin, end) for column in batch])


def _is_texts(batch: Any) -> bool:
    """Whether it is a column of texts, as torch collates them, rather than several columns."""
    sequence = isinstance(batch, list | tuple) and len(batch) > 0
    return sequence and all(isinstance(text, str | bytes) for text in batch)


def _like(pattern: Any, columns: list[Any]) -> Any:
    """A list, tuple or named tuple, as `pattern` is."""
    return type(pattern)(*columns) if hasattr(pattern, "_fields") else type(pattern)(columns)
