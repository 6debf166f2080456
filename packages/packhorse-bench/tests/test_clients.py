"""Loops that ask: never more clients than there are, and no waiting that goes uncounted."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from packhorse.errors import InputError
from packhorse_bench import clients


def answered(value: object = None) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class Server:
    """Answers in threads, the first time when `crowd` are waiting; remembers how many were."""

    def __init__(self, pool: ThreadPoolExecutor, crowd: int) -> None:
        self.pool, self.crowd, self.begin = pool, crowd, threading.Event()
        self.lock, self.waiting, self.most, self.asked = threading.Lock(), 0, 0, []

    def submit(self, request: int) -> Future:
        with self.lock:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            self.asked.append(request)
            if self.waiting == self.crowd:
                self.begin.set()
        return self.pool.submit(self.answer)

    def answer(self) -> None:
        assert self.begin.wait(120)
        time.sleep(0.002)
        with self.lock:
            self.waiting -= 1


@pytest.mark.parametrize(("count", "most"), [(40, 4), (3, 3)])
def test_as_many_wait_as_there_are_clients(count: int, most: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        server = Server(pool, crowd=most)
        seconds = clients.closed_loop(server.submit, range(count), clients=4)
    assert server.most == most and server.waiting == 0
    assert server.asked == list(range(count))
    assert len(seconds) == count - 2 * int(count * 0.2)
    assert seconds.min() >= 0.002


def test_the_middle_leaves_out_both_ends() -> None:
    assert clients._middle(np.arange(10.0)).tolist() == [2, 3, 4, 5, 6, 7]
    assert clients._middle(np.arange(1.0)).tolist() == [0]


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    def stall_once(request: int) -> Future:
        if request == 0:
            time.sleep(0.3)
        return answered()  # counted from the sending, no one would have waited

    seconds = clients.open_loop(stall_once, range(20), rate=1000.0, seed=0)
    due = np.cumsum(np.random.default_rng(0).exponential(1 / 1000, 20))
    assert (seconds[1:] >= 0.3 - (due[1:] - due[0])).all() and due[-1] < 0.1


def test_an_open_loop_keeps_its_pace() -> None:
    start = time.perf_counter()
    clients.open_loop(answered, range(10), rate=100.0, seed=3)
    due = np.random.default_rng(3).exponential(1 / 100, 10).sum()
    assert time.perf_counter() - start >= due  # no request before its time


@pytest.mark.parametrize(
    "loop",
    [
        lambda submit: clients.closed_loop(submit, range(9), 2),
        lambda submit: clients.open_loop(submit, range(9), 1e4),
    ],
)
def test_a_request_that_fails_ends_the_measurement(loop) -> None:
    def refuse(request: int) -> Future:
        future: Future = Future()
        future.set_exception(ValueError("no"))
        return future

    with pytest.raises(ValueError, match="no"):
        loop(refuse)


def test_percentiles_are_the_medians_of_the_rounds() -> None:
    usual = np.linspace(0, 0.1, 101)
    assert clients.percentiles([usual]) == pytest.approx((50, 90, 99))
    assert clients.percentiles([usual, 10 * usual, usual]) == pytest.approx((50, 90, 99))
    assert clients.percentiles([usual, 3 * usual]) == pytest.approx((100, 180, 198))


def test_mistakes() -> None:
    with pytest.raises(InputError, match="0 clients"):
        clients.closed_loop(answered, [1], 0)
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="above 0"):
            clients.open_loop(answered, [1], rate)
