"""Stages that overlap: results in order, failures in order, a bounded number under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from packhorse.runtime.pipeline import WAITING, Pipeline, Stopped


def numbers(count: int, seen: list[int] | None = None) -> Iterator[int]:
    for number in range(count):
        if seen is not None:
            seen.append(number)
        yield number


@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.parametrize("first", [0, 1])
def test_in_order_and_in_turn(count: int, first: int) -> None:
    """Whoever is slow: item i is of worker i modulo three."""
    written: list[tuple[int, str]] = []

    def worker(name: str, delay: float) -> Callable[[int], str]:
        def work(item: int) -> str:
            time.sleep(delay)
            return name

        return work

    workers = [worker("a", 0.003), worker("b", 0.0), worker("c", 0.001)]
    Pipeline(workers, lambda item, name: written.append((item, name))).run(numbers(count), first)
    assert written == [(item, "abc"[(item + first) % 3]) for item in range(count)]


def test_stages_overlap() -> None:
    """Each stage waits until the two others are at work on their own items."""
    reading = threading.Event()
    writing = threading.Event()

    def read() -> Iterator[int]:
        yield 0
        yield 1
        assert writing.wait(300), "nothing is written while more is read"
        reading.set()
        yield 2

    def compute(item: int) -> int:
        if item == 1:
            assert reading.wait(300), "nothing is read while the model runs"
        return item

    written: list[int] = []

    def write(item: int, result: int) -> None:
        writing.set()
        written.append(result)

    Pipeline([compute], write).run(read())
    assert written == [0, 1, 2]


def test_a_bounded_number_is_under_way() -> None:
    seen: list[int] = []
    most = 0
    release = threading.Event()

    def write(item: int, result: int) -> None:
        nonlocal most
        release.wait(0.02)  # time in which more would be read
        most = max(most, len(seen) - item)

    Pipeline([int, int], write).run(numbers(30, seen))
    assert 2 <= most <= 2 + WAITING + 1, "two workers, what waits, and one in the reader's hands"


def failing(at: int) -> Callable[[int], int]:
    def work(item: int) -> int:
        if item == at:
            raise ValueError(f"item {item}")
        return item

    return work


def test_the_first_failure_is_raised_and_what_came_before_is_written() -> None:
    written: list[int] = []

    def write(item: int, result: int) -> None:
        written.append(result)

    with pytest.raises(ValueError, match="item 8"):
        Pipeline([failing(8), failing(9)], write).run(numbers(50))
    assert written == [0, 1, 2, 3, 4, 5, 6, 7]

    def read() -> Iterator[int]:
        yield from range(5)
        raise ValueError("cannot be read")

    written.clear()
    with pytest.raises(ValueError, match="cannot be read"):
        Pipeline([failing(99)], write).run(read())
    assert written == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="item 2"):
        Pipeline([failing(2)], write).run(read())

    def full(item: int, result: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Pipeline([int], full).run(numbers(50))


def test_an_interruption_ends_workers_where_they_check() -> None:
    """Not after the hour that an item may take."""
    written: list[int] = []
    busy = threading.Event()

    def compute(item: int) -> int:
        busy.set()
        deadline = time.monotonic() + 60
        while item == 1:
            pipeline.check()
            assert time.monotonic() < deadline, "it was not stopped"
            time.sleep(0.001)
        return item

    def read() -> Iterator[int]:
        yield 0
        yield 1
        assert busy.wait(300)
        raise KeyboardInterrupt

    pipeline = Pipeline([compute], lambda item, result: written.append(item))
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(read())
    assert written in ([], [0])
    with pytest.raises(Stopped):
        pipeline.check()
