"""Reading ahead: order, overlap, errors, the end; and batches cut anew."""

from __future__ import annotations

import threading
import time
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse_port.loader import Prefetcher, batch_length, join_batches, rebatch, slice_batch
from packhorse_port.notices import UsageError

Pair = namedtuple("Pair", ["x", "y"])


def eventually(condition) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def test_all_items_in_order() -> None:
    for first_in_caller in (False, True):
        assert list(Prefetcher(iter(range(50)), 3, first_in_caller)) == list(range(50))
        assert list(Prefetcher(iter([]), 1, first_in_caller)) == []


def test_reads_while_the_caller_is_busy_and_no_further_than_the_depth() -> None:
    ahead = Prefetcher(iter(range(100)), size=3)
    assert eventually(lambda: ahead.ready == 3)
    time.sleep(0.01)
    assert ahead.ready == 3
    assert next(ahead) == 0
    assert eventually(lambda: ahead.ready == 3)
    ahead.stop()


def test_the_first_is_read_by_the_caller_where_asked() -> None:
    readers: list[threading.Thread] = []

    def items():
        for i in range(3):
            readers.append(threading.current_thread())
            yield i

    assert list(Prefetcher(items(), 2, first_in_caller=True)) == [0, 1, 2]
    assert readers[0] is threading.current_thread() and readers[1] is not readers[0]


def test_an_error_comes_where_its_item_would() -> None:
    def items():
        yield 1
        yield 2
        raise OSError("disk")

    ahead = Prefetcher(items(), 3)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_stop_ends_the_thread_and_tells_the_loop() -> None:
    ahead = Prefetcher(iter(range(10**9)), 2)
    next(ahead)
    ahead.stop()
    ahead.stop()
    assert not ahead._thread.is_alive()
    with pytest.raises(UsageError, match="terminate"):
        next(ahead)


def test_a_buffer_of_none_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Prefetcher(iter([]), 0)


@given(st.lists(st.integers(0, 7), max_size=12), st.integers(1, 9), st.booleans())
def test_rebatched_keeps_order_and_drops_only_the_last(sizes, size: int, drop_last: bool) -> None:
    numbers = torch.arange(sum(sizes))
    parts = [{"x": part, "y": (part * 2,)} for part in numbers.split(sizes)] if sizes else []
    batches = list(rebatch(iter(parts), size, drop_last))
    stored = sum(sizes) - (sum(sizes) % size if drop_last else 0)
    assert [batch_length(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert len(batches) == -(-stored // size)
    if batches:
        assert torch.equal(torch.cat([batch["x"] for batch in batches]), numbers[:stored])
        assert torch.equal(torch.cat([batch["y"][0] for batch in batches]), 2 * numbers[:stored])


def test_nested_batches_keep_their_kind() -> None:
    parts = [Pair(torch.ones(2, 3), [torch.zeros(2), ["a", "b"]]) for _ in range(2)]
    whole = join_batches(parts)
    assert isinstance(whole, Pair) and whole.x.shape == (4, 3)
    assert whole.y[1] == ["a", "b", "a", "b"]
    assert slice_batch(whole, 1, 3).y[1] == ["b", "a"] and slice_batch(whole, 1, 3).x.shape == (
        2,
        3,
    )


def test_what_has_no_length_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot rebatch a int"):
        list(rebatch(iter([3]), 2, True))
