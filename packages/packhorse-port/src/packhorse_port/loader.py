"""`DataLoader`: one item is what one host call consumes.

    loader = DataLoader(opts, dataset, batch_size=16, shuffle=True, num_workers=4)
    loader.combinedBatchSize      # 16 × device iterations × replicas × accumulation

torch's own loader underneath, with PopTorch's arguments and defaults (`drop_last=True`, persistent
workers). `Async` reads ahead beside the caller and keeps a worker process under the reading thread
even where none was asked for, as PopTorch does: that is what overlaps, and the data set then draws
from a generator of its own, so that results do not depend on who came first. `AsyncRebatched` lets
workers of an iterable data set give what they have and cuts full batches from all of it together,
where `Async` would drop each worker's remainder. A loader may be left halfway and begun again.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from packhorse.errors import InputError
from packhorse_port.enums import DataLoaderMode, SharingStrategy
from packhorse_port.notices import place, say_once
from packhorse_port.options import Options
from packhorse_port.prefetch import Ahead, held, rebatched
from packhorse_port.samplers import Joined, Share
from packhorse_port.settings import member, whole

BUFFER = 3  # batches read ahead, PopTorch's default


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Gives combined batches.

    batch_size: what the model sees at once; None hands single elements on. batch_sampler: gives the
    indices of such batches; as many of them as a host call consumes are joined. drop_last: leave a
    last, incomplete combined batch out. rebatched_worker_size: elements a worker gives at once in
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
        self._options = _options(options, dataset)
        self._mode = member("mode", mode, DataLoaderMode)
        self._drop_last = drop_last
        self._ahead: Ahead | None = None
        self._early: Ahead | None = None
        self._combined = self._combine(batch_size, batch_sampler)
        self._async = _async_options(async_options)
        workers = self._workers(num_workers, isinstance(dataset, IterableDataset))
        self._lent = workers > 0 and not num_workers  # a worker that nobody asked for
        if kwargs.get("sampler") is not None or batch_sampler is not None:
            auto_distributed_partitioning = False
        _check_data(dataset, self, auto_distributed_partitioning, workers, kwargs)
        if batch_sampler is not None:
            batching = self._sampled(batch_sampler, shuffle)
        else:
            batching = self._batched(dataset, shuffle, auto_distributed_partitioning)
        if self._rebatches:
            batching["batch_size"] = self._worker_size(rebatched_worker_size)
            batching["drop_last"] = False
        persistent = workers > 0 if persistent_workers is None else persistent_workers
        kwargs |= {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        super().__init__(dataset, **batching, **kwargs)
        if self._async["early_preload"] and self._mode != DataLoaderMode.Sync:
            self._early = self._start()

    def _sampled(self, batch_sampler: Iterable[Sequence[int]], shuffle: bool) -> dict[str, Any]:
        """torch's arguments where a sampler gives the batches; they are whole, none is recut."""
        if shuffle:
            raise InputError(f"{place()}leave out shuffle=True: a batch_sampler gives the order")
        if self._mode == DataLoaderMode.AsyncRebatched:
            self._mode = DataLoaderMode.Async
        joined = Joined(batch_sampler, self._options.batches_per_call, self._drop_last)
        return {"batch_sampler": joined}

    def _batched(self, dataset: Any, shuffle: bool, automatic: bool) -> dict[str, Any]:
        """torch's arguments where this loader makes the batches."""
        batching = {"batch_size": self._combined}
        batching["drop_last"] = self._drop_last and self._combined is not None
        if self._partitioned(dataset, automatic):
            size = self._combined or 1
            share = Share(len(dataset), self._options, size, shuffle, self._drop_last)
            return batching | {"sampler": share}
        return batching | {"shuffle": shuffle}

    @property
    def _rebatches(self) -> bool:
        return self._mode == DataLoaderMode.AsyncRebatched and self._combined is not None

    def _combine(self, batch_size: int | None, batch_sampler: Any) -> int | None:
        if batch_sampler is not None:
            batch_size = getattr(batch_sampler, "batch_size", None)
        if batch_size is None:
            return None
        return whole("batch_size", batch_size) * self._options.batches_per_call

    def _workers(self, asked: int, iterable: bool) -> int:
        """As many as asked for, up to the cores; each of an iterable data set has its own data."""
        cores, asked = _cores(), whole("num_workers", asked, least=0)
        if not asked and self._mode != DataLoaderMode.Sync and _forks():
            return 1
        if asked <= cores or iterable:
            return asked
        say_once(
            f"num_workers={asked}",
            f"num_workers={asked} is more than the {cores} cores here: {cores} workers read",
        )
        return cores

    def _worker_size(self, asked: int | None) -> int | None:
        if asked is None or self._combined is None:
            return self._combined
        if whole("rebatched_worker_size", asked) > self._combined:
            raise InputError(
                f"{place()}rebatched_worker_size={asked} is more than the combined batch of"
                f" {self._combined}; give at most that"
            )
        return asked

    def _partitioned(self, dataset: Any, automatic: bool) -> bool:
        several = self._options.Distributed.numProcesses > 1
        return several and automatic and not isinstance(dataset, IterableDataset)

    @property
    def combinedBatchSize(self) -> int | None:
        """Elements that one host call consumes; None where the data set makes its own batches."""
        return self._combined

    @property
    def options(self) -> Options:
        return self._options

    def __len__(self) -> int:
        if not self._rebatches or self._combined is None:
            return super().__len__()
        iterable = isinstance(self.dataset, IterableDataset)
        elements = len(self.dataset if iterable else self.sampler)  # pyright: ignore[reportArgumentType]
        whole_ones, rest = divmod(elements, self._combined)
        return whole_ones + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._mode == DataLoaderMode.Sync:
            return self._by_rows() if self._has_rows else super().__iter__()
        early, self._early = self._early, None
        return held(self, early or self._start())

    @property
    def _has_rows(self) -> bool:
        """Are batches rows of tensors, to be had in one piece instead of one by one?"""
        plain = self.collate_fn is default_collate and not (self.num_workers or self.pin_memory)
        return plain and type(self.dataset) is TensorDataset and self.batch_sampler is not None

    def _by_rows(self) -> Iterator[list[Tensor]]:
        self._draw()
        tensors = cast(TensorDataset, self.dataset).tensors
        for rows in cast(Iterable[Sequence[int]], self.batch_sampler):
            yield [tensor[rows] for tensor in tensors]

    def _draw(self) -> None:
        # torch's loader draws a seed for its workers at the beginning of an epoch, even where it
        # has none; who draws after it must not notice that it was passed by.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def _start(self) -> Ahead:
        self._stop()
        if self._lent and self._iterator is not None:
            # Workers that live on get no new seed: without this the worker lent to `Async` would
            # be seen in the order of a shuffle from the second epoch on.
            self._draw()
        # Workers are started here, in the caller's thread: a fork beside a computing thread could
        # copy a lock that nobody in the child will ever release.
        items = super().__iter__()
        if self._rebatches and self._combined is not None:
            items = rebatched(items, self._combined, self._drop_last)
        self._ahead = Ahead(items, self._async["buffer_size"], first_here=self.num_workers == 0)
        self._finalizer = weakref.finalize(self, self._ahead.stop)
        return self._ahead

    def _stop(self) -> None:
        if self._ahead is not None:
            self._finalizer()
        self._ahead = self._early = None

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

    rebatched_size: cut batches of this size from what comes. Of PopTorch's other arguments
    `buffer_size` and `early_preload` have a meaning; a thread shares everything and does not poll.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        buffer_size: int = BUFFER,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.FileSystem,
        rebatched_size: int | None = None,
    ) -> None:
        if isinstance(dataset, DataLoader) and dataset._mode != DataLoaderMode.Sync:
            raise InputError(
                "this DataLoader reads ahead already; iterate over it, or build it with"
                " mode=poptorch.DataLoaderMode.Sync"
            )
        self._dataset, self._depth = dataset, whole("buffer_size", buffer_size)
        self.rebatched_size = rebatched_size and whole("rebatched_size", rebatched_size)
        self._ahead: Ahead | None = None
        self._early = self._start(first_here=False) if early_preload else None

    def _start(self, first_here: bool) -> Ahead:
        self.terminate()
        items = iter(self._dataset)
        if self.rebatched_size:
            items = rebatched(items, self.rebatched_size, self._drop_last)
        self._ahead = Ahead(items, self._depth, first_here)
        self._finalizer = weakref.finalize(self, self._ahead.stop)
        return self._ahead

    @property
    def _drop_last(self) -> bool:
        return getattr(self._dataset, "drop_last", True)

    def __iter__(self) -> Iterator[Any]:
        early, self._early = self._early, None
        return held(self, early or self._start(first_here=True))

    def __next__(self) -> Any:
        return next(self._ahead or self._start(first_here=True))

    def __len__(self) -> int:
        items = len(self._dataset)  # pyright: ignore[reportArgumentType]
        if not self.rebatched_size:
            return items
        whole_ones, rest = divmod(
            items * (getattr(self._dataset, "batch_size", 1) or 1), self.rebatched_size
        )
        return whole_ones + (rest > 0 and not self._drop_last)

    def terminate(self) -> None:
        """Stop reading."""
        if self._ahead is not None:
            self._finalizer()
        self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


def _options(options: Any, dataset: Any) -> Options:
    if options is not None and not isinstance(options, Options):
        raise InputError(
            f"{place()}the first argument of DataLoader is the options, not a"
            f" {type(options).__name__}; write poptorch.DataLoader(opts, dataset, …)"
        )
    if dataset is None:
        raise InputError(f"{place()}it has no dataset; write poptorch.DataLoader(opts, dataset)")
    options = options or Options()
    options.freeze("a DataLoader")
    return options


def _async_options(given: dict[str, Any] | None) -> dict[str, Any]:
    known = {"buffer_size": BUFFER, "early_preload": False}
    known |= {"miss_sleep_time_in_ms": 0.1, "load_indefinitely": True, "sharing_strategy": None}
    if unknown := sorted(set(given or {}) - set(known)):
        raise InputError(f"async_options has no {unknown[0]!r}; it has {', '.join(known)}")
    return known | (given or {})


def _check_data(
    dataset: Any, loader: DataLoader, partitioned: bool, workers: int, kwargs: dict[str, Any]
) -> None:
    processes = loader.options.Distributed.numProcesses
    if isinstance(dataset, IterableDataset):
        if processes > 1 and partitioned:
            raise InputError(
                f"an IterableDataset cannot be divided among {processes} processes; divide it"
                " yourself and pass auto_distributed_partitioning=False"
            )
        if workers > 1 and kwargs.get("worker_init_fn") is None:
            say_once(
                "worker_init_fn",
                f"each of the {workers} workers reads the whole IterableDataset unless it asks"
                " torch.utils.data.get_worker_info() or gets a worker_init_fn",
            )
    elif loader.combinedBatchSize is not None:
        counted = kwargs.get("sampler") or dataset
        if hasattr(counted, "__len__"):
            _check_size(len(counted), loader, processes if partitioned else 1)


def _check_size(elements: int, loader: DataLoader, processes: int) -> None:
    """A last batch that is too small: dropped, or said; nothing left at all is an error."""
    options, combined = loader.options, (loader.combinedBatchSize or 1) * processes
    factors = f"batch_size {combined // processes // options.batches_per_call}"
    factors += f" x deviceIterations {options.device_iterations}"
    factors += f" x replicationFactor {options.replication_factor}"
    factors += f" x gradientAccumulation {options.gradient_accumulation}"
    factors += f" x processes {processes}" if processes > 1 else ""
    if elements < combined and loader._drop_last:
        raise InputError(
            f"{place()}one host call consumes {combined} elements ({factors}) and the data set has"
            f" {elements}: with drop_last=True no batch is left. Lower one of the factors"
        )
    if elements % combined and not loader._drop_last:
        say_once(
            f"drop_last {elements} {combined}",
            f"{elements} elements are not divisible by the {combined} of one host call"
            f" ({factors}): the last batch has {elements % combined}, which a model refuses unless"
            f" divisible by {options.batches_per_call}; drop_last=True leaves it out",
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forks() -> bool:
    """Do new processes get a copy of this one? Else a script without a main guard would break."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return (chosen or multiprocessing.get_all_start_methods()[0]) == "fork"
