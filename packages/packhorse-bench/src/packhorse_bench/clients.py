"""Those who ask: how long each request takes under a closed loop and under an open one.

*Closed*: a number of clients, each of which asks its next question when the last one is answered.
They slow down with the server, so it says what a server does when it is as busy as they can make
it. *Open*: requests come at random at a given rate (Poisson), however slow the answers are, as
from a large public. There a latency counts from the moment a request was due and not from when it
was sent: one that could not even be sent while the server kept everyone waiting waited too (the
other way is known as coordinated omission, and makes any server look good).

A client is no thread. Fifty-six threads would wake each other up on the cores that compute, and
what they measured would be themselves. Here the future's callback takes the time, on the engine's
thread and at the moment the answer is there, and one thread, asleep in between, asks all the next
questions. Clients asking as quickly as they are answered, one at a time each: the same load.
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

MIDDLE = 0.6  # of a closed loop's requests, without the rush at the start and the last stragglers

Submit = Callable[[Any], Future[Any]]


def closed_loop(submit: Submit, requests: Sequence[Any], clients: int) -> np.ndarray:
    """Seconds from question to answer of the middle 60 % of the requests."""
    if clients < 1:
        raise InputError(f"{clients} clients ask nothing; there must be at least 1")
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
    """Seconds from when each request was due to its answer; `rate` of them come in a second."""
    if not rate > 0:
        raise InputError(f"at a rate of {rate} requests a second none comes; it must be above 0")
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
    """The 50th, 90th and 99th in milliseconds, each the median of the rounds.

    Not of all rounds together: one in which the machine was busy would be all of their 99th.
    """
    rounds = [1e3 * np.percentile(latencies, (50, 90, 99)) for latencies in seconds]
    p50, p90, p99 = np.median(rounds, axis=0)
    return float(p50), float(p90), float(p99)


def _middle(seconds: np.ndarray) -> np.ndarray:
    """At least one."""
    skipped = int(len(seconds) * (1 - MIDDLE) / 2)
    return seconds[skipped : len(seconds) - skipped]


class _Answers:
    """When each request was answered; `wait` returns once for each of them."""

    def __init__(self, submit: Submit, count: int) -> None:
        self.submit, self.at = submit, np.zeros(count)
        self._ready: SimpleQueue[Future[Any]] = SimpleQueue()

    def ask(self, place: int, request: Any) -> None:
        self.submit(request).add_done_callback(partial(self._take, place))

    def wait(self) -> None:
        """For one answer more; raises what it failed with."""
        self._ready.get().result()

    def _take(self, place: int, future: Future[Any]) -> None:
        self.at[place] = time.perf_counter()
        self._ready.put(future)
