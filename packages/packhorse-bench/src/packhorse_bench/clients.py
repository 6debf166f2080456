"""Simulated clients: the latency of each request in a closed loop and in an open loop.

*Closed*: a number of clients, each of which sends its next request when the last is answered. They
slow down with the server, so this measures a server that is as busy as they can make it. *Open*:
requests come at random times at a given rate (Poisson), however slow the answers are, as from many
independent users. There a latency counts from when a request was due, not from when it was sent:
one that could not be sent because the server kept all waiting has waited too (to count otherwise is
known as coordinated omission, and makes any server look good).

A client is not a thread: 56 threads would wake each other up on the cores that compute, and measure
themselves. Instead the future's callback takes the time, on the engine's thread at the moment of
the answer, and one thread, asleep in between, sends all the next requests. The load is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from packhorse.errors import InputError

MIDDLE = 0.6  # share of a closed loop's requests that counts: without its start and its end

Submit = Callable[[Any], Future[Any]]


def closed_loop(submit: Submit, requests: Sequence[Any], clients: int) -> np.ndarray:
    """Latencies in seconds of the middle 60 % of the requests.

    At the start all clients send at once, and at the end fewer and fewer wait: neither is the
    steady state.
    """
    if clients < 1:
        raise InputError(f"there are {clients} clients; pass at least 1")
    answers = _Answers(submit, len(requests))
    submitted = np.zeros(len(requests))
    for place, request in enumerate(requests):
        if place >= clients:
            answers.wait()
        submitted[place] = time.perf_counter()
        answers.ask(place, request)
    for _ in range(min(clients, len(requests))):
        answers.wait()
    return _middle(answers.at - submitted)


def open_loop(submit: Submit, requests: Sequence[Any], rate: float, seed: int = 0) -> np.ndarray:
    """Latencies in seconds since each request was due; `rate` requests come per second."""
    if not rate > 0:
        raise InputError(f"the rate is {rate} requests per second; it must be above 0")
    answers = _Answers(submit, len(requests))
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests))
    due = time.perf_counter() + np.cumsum(gaps)
    for place, request in enumerate(requests):
        time.sleep(max(0.0, due[place] - time.perf_counter()))
        answers.ask(place, request)
    for _ in requests:
        answers.wait()
    return answers.at - due


def percentiles(seconds: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th percentile in milliseconds, each the median over the rounds.

    Not over all rounds together: one round in which the machine was busy would make up the 99th.
    """
    rounds = [1e3 * np.percentile(latencies, (50, 90, 99)) for latencies in seconds]
    p50, p90, p99 = np.median(rounds, axis=0)
    return float(p50), float(p90), float(p99)


def _middle(seconds: np.ndarray) -> np.ndarray:
    """The middle share of the latencies, at least one of them."""
    skipped = int(len(seconds) * (1 - MIDDLE) / 2)
    return seconds[skipped : len(seconds) - skipped]


class _Answers:
    """Submits requests and notes when each is answered; `wait` returns once per answer."""

    def __init__(self, submit: Submit, count: int) -> None:
        self.submit = submit
        self.at = np.zeros(count)
        self._ready: SimpleQueue[Future[Any]] = SimpleQueue()

    def ask(self, place: int, request: Any) -> None:
        self.submit(request).add_done_callback(partial(self._take, place))

    def wait(self) -> None:
        """Wait for one more answer; raises if that request failed."""
        self._ready.get().result()

    def _take(self, place: int, future: Future[Any]) -> None:
        self.at[place] = time.perf_counter()
        self._ready.put(future)
