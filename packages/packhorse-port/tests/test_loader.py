"""DataLoader: combined batches in every mode, the same elements, errors that name the numbers."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, TensorDataset

from packhorse_port import loader as module
from packhorse_port import notices
from packhorse_port.enums import DataLoaderMode
from packhorse_port.loader import (
    AsynchronousDataAccessor,
    CombinedBatchSampler,
    DataLoader,
    ProcessSampler,
)
from packhorse_port.notices import UsageError
from packhorse_port.options import Options
from packhorse_port.settings import OptionsError

# Python 3.12 warns of any fork beside threads, torch's own included; scripts count on forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
MODES = list(DataLoaderMode)
nothing: Any = 1


@pytest.fixture(autouse=True)
def fresh() -> None:
    notices.reset()


class Numbers(IterableDataset):
    """0 … n − 1, divided among the workers; says its length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        step, begin = (worker.num_workers, worker.id) if worker else (1, 0)
        return iter(range(begin, self.n, step))


class Whereabouts(torch.utils.data.Dataset):
    """Each element is the process that read it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def options(iterations: int = 1, replicas: int = 1, accumulation: int = 1) -> Options:
    opts = Options().deviceIterations(iterations).replicationFactor(replicas)
    opts.Training.gradientAccumulation(accumulation)
    return opts


def data(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n), torch.arange(n) * 10)


def elements(batches) -> list[int]:
    return torch.cat([batch[0] for batch in batches]).tolist()


@settings(max_examples=40)
@given(*[st.integers(1, 5)] * 4, st.integers(1, 300), st.booleans())
def test_combined_batches(batch, iterations, replicas, accumulation, n, drop_last) -> None:
    combined = batch * iterations * replicas * accumulation
    opts = options(iterations, replicas, accumulation)
    if n < combined and drop_last:
        with pytest.raises(UsageError, match=rf"consumes {combined} elements.*has {n}"):
            DataLoader(opts, data(n), batch_size=batch)
        return
    loader = DataLoader(opts, data(n), batch_size=batch, drop_last=drop_last)
    batches = list(loader)
    assert loader.combinedBatchSize == combined and loader.options is opts
    assert len(batches) == len(loader) == (n // combined if drop_last else -(-n // combined))
    stored = n - n % combined if drop_last else n
    assert elements(batches) == list(range(stored))
    assert all(len(item[0]) == combined for item in batches[: n // combined])


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_in_the_same_order(mode: DataLoaderMode) -> None:
    torch.manual_seed(3)
    plain = torch.utils.data.DataLoader(data(100), 12, shuffle=True, drop_last=True)
    expected = [(elements(plain), float(torch.rand(()))) for _ in range(3)]
    torch.manual_seed(3)
    with DataLoader(options(4), data(100), batch_size=3, shuffle=True, mode=mode) as loader:
        assert [(elements(loader), float(torch.rand(()))) for _ in range(3)] == expected
        assert len(loader) == 8
    (first, _), (again, _), _ = expected
    assert sorted(again) != again and len(again) == 96 and again != first


@pytest.mark.parametrize("mode", MODES)
def test_workers_that_were_asked_for_draw_as_torchs_do(mode: DataLoaderMode) -> None:
    requested = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
    torch.manual_seed(3)
    plain = torch.utils.data.DataLoader(data(24), 4, drop_last=True, **requested)
    expected = [elements(plain) for _ in range(3)]
    torch.manual_seed(3)
    with DataLoader(None, data(24), 4, mode=mode, **requested) as loader:
        assert [elements(loader) for _ in range(3)] == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 2])
def test_left_halfway_and_begun_again(mode: DataLoaderMode, workers: int) -> None:
    with DataLoader(options(2), data(40), 2, num_workers=workers, mode=mode) as loader:
        for _ in range(3):
            first = next(iter(loader))
            assert first[0].tolist() == [0, 1, 2, 3]
        assert elements(loader) == list(range(40))
        assert elements(loader) == list(range(40))
        loader.terminate()
        assert elements(loader) == list(range(40))


def test_async_reads_in_another_process_and_ahead() -> None:
    with DataLoader(None, Whereabouts(), 2, mode=DataLoaderMode.Async) as loader:
        assert loader.num_workers == 1 and loader.persistent_workers
        readers = {int(pid) for batch in loader for pid in batch}
    assert len(readers) == 1 and readers != {os.getpid()}
    sync = DataLoader(None, Whereabouts(), 2)
    assert {int(pid) for batch in sync for pid in batch} == {os.getpid()}


def test_without_forks_async_is_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_starts_by_fork", lambda: False)
    with DataLoader(None, Whereabouts(), 2, mode=DataLoaderMode.Async) as loader:
        assert loader.num_workers == 0
        assert {int(pid) for batch in loader for pid in batch} == {os.getpid()}


def test_async_has_batches_ready_while_the_caller_works() -> None:
    with DataLoader(None, data(20), 1, mode=DataLoaderMode.Async) as loader:
        reading = iter(loader)
        end = time.monotonic() + 10
        while (not loader._prefetcher or loader._prefetcher.ready < 3) and time.monotonic() < end:
            time.sleep(0.001)
        assert loader._prefetcher and loader._prefetcher.ready == 3
        assert int(next(reading)[0]) == 0


def test_early_preload_begins_at_once() -> None:
    early = {"early_preload": True, "buffer_size": 2}
    with DataLoader(None, data(20), 1, mode=DataLoaderMode.Async, async_options=early) as loader:
        assert loader._prefetcher is not None
        assert elements(loader) == list(range(20)) == elements(loader)


@pytest.mark.parametrize("read", [DataLoader, AsynchronousDataAccessor])
def test_a_loader_nobody_else_holds_is_read_to_the_end(read) -> None:
    def unnamed():
        if read is DataLoader:
            return DataLoader(None, data(64), 1, mode=DataLoaderMode.Async)
        return AsynchronousDataAccessor(DataLoader(None, data(64), 1))

    seen = []
    for x, _ in unnamed():
        seen.append(int(x))
    assert seen == list(range(64))


def test_two_loops_over_one_loader_are_reported() -> None:
    with DataLoader(None, data(8), 2, mode=DataLoaderMode.Async) as loader:
        first = iter(loader)
        next(first)
        assert elements(loader) == list(range(8))
        with pytest.raises(UsageError, match="give each loop a loader of its own"):
            next(first)


def test_a_dropped_loader_leaves_no_thread() -> None:
    loader = DataLoader(None, data(2000), 1, mode=DataLoaderMode.Async)
    next(iter(loader))
    names = [thread.name for thread in threading.enumerate()]
    assert "packhorse-ahead" in names
    del loader
    gc.collect()
    assert "packhorse-ahead" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_data_arrives(mode: DataLoaderMode) -> None:
    def refuse(batch):
        if batch[0][0] >= 4:
            raise OSError("torn page")
        return torch.tensor([item[0] for item in batch])

    with DataLoader(None, data(8), 2, mode=mode, collate_fn=refuse) as loader:
        reading = iter(loader)
        assert [next(reading).tolist(), next(reading).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="torn page"):
            next(reading)


@pytest.mark.parametrize(
    ("mode", "drop_last", "worker_size", "expected"),
    [
        (DataLoaderMode.Async, True, None, 16),  # two workers of 11 and 10: each drops a remainder
        (DataLoaderMode.AsyncRebatched, True, None, 16),
        (DataLoaderMode.AsyncRebatched, True, 1, 16),
        (DataLoaderMode.AsyncRebatched, False, 3, 21),
    ],
)
def test_iterable_data_sets(mode, drop_last: bool, worker_size, expected: int) -> None:
    def nothing(_: int) -> None: ...

    with DataLoader(
        options(2), Numbers(21), 4, num_workers=2, drop_last=drop_last, mode=mode,
        rebatched_worker_size=worker_size, worker_init_fn=nothing,
    ) as loader:  # fmt: skip
        batches = list(loader)
    assert sum(len(batch) for batch in batches) == expected
    assert all(len(batch) == 8 for batch in batches[:2]) and len(set(elements([batches]))) == 8
    if mode == DataLoaderMode.AsyncRebatched:
        assert len(loader) == len(batches)
    assert not notices.logged()


def test_rebatching_saves_what_each_worker_would_drop() -> None:
    def count(mode: DataLoaderMode) -> int:
        with DataLoader(options(2), Numbers(22), 4, num_workers=2, mode=mode) as loader:
            return sum(len(batch) for batch in loader)

    assert count(DataLoaderMode.Async) == 16 and count(DataLoaderMode.AsyncRebatched) == 16
    with DataLoader(None, Numbers(22), 10, num_workers=2, mode=DataLoaderMode.Async) as loader:
        assert sum(len(batch) for batch in loader) == 20
    with DataLoader(None, Numbers(22), 12, num_workers=2, mode=DataLoaderMode.Async) as loader:
        assert sum(len(batch) for batch in loader) == 0
    mode = DataLoaderMode.AsyncRebatched
    with DataLoader(None, Numbers(22), 12, num_workers=2, mode=mode) as loader:
        assert sum(len(batch) for batch in loader) == 12
    assert [notice.key for notice in notices.logged()] == ["worker_init_fn"]


def test_batch_sampler_batches_are_joined() -> None:
    batches = BatchSampler(SequentialSampler(range(30)), 3, drop_last=True)
    for mode in MODES:
        with DataLoader(options(2, 2), data(30), batch_sampler=batches, mode=mode) as loader:
            assert loader.combinedBatchSize == 12 and len(loader) == 2
            assert [len(batch[0]) for batch in loader] == [12, 12]
            assert elements(loader) == list(range(24))
    last = CombinedBatchSampler([[0], [1], [2]], 2, drop_last=False)
    assert list(last) == [[0, 1], [2]] and len(last) == 2
    assert list(CombinedBatchSampler([[0, 1], [2]], 2, drop_last=False)) == [
        [0, 1, 2]
    ]  # as PopTorch's does
    for batches_of, drop_last in (([[0, 1], [2]], True), ([[0, 1], [2], [3, 4]], False)):
        with pytest.raises(UsageError, match="batches of one size"):
            list(CombinedBatchSampler(batches_of, 2, drop_last))
    assert list(CombinedBatchSampler([[0, 1], [2]], 1, drop_last=True)) == [
        [0, 1],
        [2],
    ]  # one batch per call
    with pytest.raises(UsageError, match="shuffle"):
        DataLoader(None, data(4), batch_sampler=batches, shuffle=True)


def test_no_batching_hands_elements_on() -> None:
    loader = DataLoader(options(5), data(3), batch_size=None)
    assert loader.combinedBatchSize is None
    assert [int(x) for x, _ in loader] == [0, 1, 2]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(12, 60), st.booleans(), st.booleans())
def test_processes_divide_the_data(processes, combined, n, shuffle, drop_last) -> None:
    shares = []
    for number in range(processes):
        opts = Options().randomSeed(5)
        opts.Distributed.configureProcessId(number, processes)
        shares.append(ProcessSampler(n, opts, combined, shuffle, drop_last))
    first, second = ([list(share) for share in shares] for _ in range(2))
    for epoch in (first, second):
        together = [index for share in epoch for index in share]
        assert len(set(together)) == len(together)
        if drop_last:
            assert {len(share) for share in epoch} == {n // (combined * processes) * combined}
        else:
            assert sorted(together) == list(range(n))
    assert [len(share) for share in shares] == [len(indices) for indices in first]
    assert (first == second) == (not shuffle or not any(len(share) for share in first))


def test_a_distributed_loader_reads_its_share() -> None:
    opts = options(2)
    opts.Distributed.configureProcessId(1, 2)
    assert elements(DataLoader(opts, data(22), 5)) == list(range(10, 20))
    assert elements(DataLoader(opts, data(20), 5, auto_distributed_partitioning=False)) == list(
        range(20)
    )
    with pytest.raises(UsageError, match=r"opts\.randomSeed"):
        DataLoader(opts, data(20), 5, shuffle=True)
    with pytest.raises(UsageError, match="auto_distributed_partitioning=False"):
        DataLoader(opts, Numbers(20), 5)
    with pytest.raises(UsageError, match="processes 2"):
        DataLoader(opts, data(15), 5)


def test_worker_counts_are_capped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_core_count", lambda: 2)
    loader = DataLoader(None, data(8), 2, num_workers=20)
    assert loader.num_workers == 2 and loader.persistent_workers
    assert "2 workers read" in notices.logged()[0].text
    assert DataLoader(None, data(8), 2, num_workers=2, persistent_workers=False).num_workers == 2
    assert DataLoader(None, data(8), 2).num_workers == 0
    assert len(notices.logged()) == 1


def test_the_options_are_fixed_by_a_loader() -> None:
    opts = options(2)
    DataLoader(opts, data(8), 2)
    with pytest.raises(OptionsError, match=r"a DataLoader took them at test_loader\.py:\d+.*clone"):
        opts.deviceIterations(4)


def test_a_last_batch_that_is_too_small_is_reported() -> None:
    DataLoader(options(4, 2), data(100), 3, drop_last=False)
    assert "100 elements are not divisible by the 24" in notices.logged()[0].text
    assert "deviceIterations 4 x replicationFactor 2" in notices.logged()[0].text
    assert "the last batch has 4" in notices.logged()[0].text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoader(*[data(4), 2]), "first argument of DataLoader is the options"),
        (lambda: DataLoader(Options()), "has no dataset"),
        (lambda: DataLoader(None, data(4), 0), "batch_size must be at least 1"),
        (lambda: DataLoader(None, data(4), 2, num_workers=-1), "at least 0"),
        (lambda: DataLoader(None, data(4), 2, mode=nothing), "poptorch.DataLoaderMode.Async"),
        (lambda: DataLoader(None, data(4), 2, async_options={"size": 3}), "no 'size'; it has"),
        (
            lambda: DataLoader(
                None, data(4), 2, mode=DataLoaderMode.AsyncRebatched, rebatched_worker_size=3
            ),
            "more than the combined batch of 2",
        ),
    ],
)
def test_wrong_use_says_what_is_right(make, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_accessor_over_any_iterable() -> None:
    with AsynchronousDataAccessor([1, 2, 3], buffer_size=2) as accessor:
        assert list(accessor) == [1, 2, 3] == list(accessor)
        assert next(iter(accessor)) == 1 and next(accessor) == 2 and len(accessor) == 3


def test_accessor_over_a_loader() -> None:
    sync = DataLoader(options(2), data(20), 2)
    with AsynchronousDataAccessor(sync, early_preload=True, rebatched_size=6) as accessor:
        assert [len(batch[0]) for batch in accessor] == [6, 6, 6] and len(accessor) == 3
        assert elements(accessor) == list(range(18))
    ahead = DataLoader(None, data(20), 2, mode=DataLoaderMode.Async)
    with pytest.raises(UsageError, match="reads ahead already"):
        AsynchronousDataAccessor(ahead)


def test_a_shuffled_accessor_draws_before_the_model_does() -> None:
    def run(read) -> tuple[list[int], list[float]]:
        torch.manual_seed(1)
        seen, drawn = [], []
        for x, _ in read(DataLoader(None, data(16), 4, shuffle=True)):
            drawn.append(float(torch.rand(())))
            seen += x.tolist()
        return seen, drawn

    assert run(iter) == run(AsynchronousDataAccessor)


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_tensors_come_as_torch_gives_them(shuffle: bool) -> None:
    data = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    options = Options().deviceIterations(2)
    torch.manual_seed(3)
    packhorse_result = list(DataLoader(options, data, batch_size=2, shuffle=shuffle))
    after = torch.rand(1)
    torch.manual_seed(3)
    expected = list(torch.utils.data.DataLoader(data, 4, shuffle, drop_last=True))
    assert torch.equal(after, torch.rand(1)), "the generator is left as torch's loader leaves it"
    assert len(packhorse_result) == len(expected) == 2
    for ported, another in zip(packhorse_result, expected, strict=True):
        assert type(ported) is type(another)
        assert all(torch.equal(a, b) for a, b in zip(ported, another, strict=True))
