"""What a runner can say of itself: counters since it began, times over the last requests.

Counters always add up: what was admitted has been answered, has failed, was cancelled, waits or
runs. Times are those of a window, so that yesterday does not hide today.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

REQUESTS = 4096  # in the window of latencies
BATCHES = 512


@dataclass(frozen=True, slots=True)
class Stats:
    """The figures of a runner at one moment; times in milliseconds."""

    requests: int  # admitted
    answered: int
    failed: int
    cancelled: int
    refused: int  # Overloaded: not admitted
    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    tokens: int  # that were somebody's, over all batches
    batches: int
    reruns: int  # batches run again because a request in them failed
    fill: float  # somebody's tokens / all tokens of the batches
    sequences_a_batch: float
    p50_ms: float  # from admission to the answer
    p99_ms: float
    queue_ms: float  # from admission to the device, median
    compute_ms: float  # of a batch, median


class Recorder:
    """Counts batches and answers; written by the engine, read by anyone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answered = self.failed = self.reruns = 0
        self.batches = self.sequences = self.tokens = self.batch_tokens = 0
        self._latency: deque[float] = deque(maxlen=REQUESTS)
        self._queue: deque[float] = deque(maxlen=REQUESTS)
        self._compute: deque[float] = deque(maxlen=BATCHES)

    def batch(self, lengths: Sequence[int], tokens: int, seconds: float) -> None:
        """A batch of `tokens` tokens, these sequences among them, was run."""
        with self._lock:
            self.batches += 1
            self.sequences += len(lengths)
            self.tokens += sum(lengths)
            self.batch_tokens += tokens
            self._compute.append(seconds)

    def rerun(self) -> None:
        """Part of a batch that failed is run again."""
        with self._lock:
            self.reruns += 1

    def answer(self, seconds: Sequence[tuple[float, float]]) -> None:
        """Requests were answered, each after so many seconds, of which so many in the queue."""
        with self._lock:
            self.answered += len(seconds)
            self._latency.extend(total for total, _ in seconds)
            self._queue.extend(queued for _, queued in seconds)

    def fail(self) -> None:
        """A request was answered with an error."""
        with self._lock:
            self.failed += 1

    def times(self) -> dict[str, float]:
        """Percentiles over the window, in milliseconds; 0 where nothing was measured yet."""
        with self._lock:
            latency, queue, compute = map(list, (self._latency, self._queue, self._compute))
        p50, p99 = _percentiles(latency, (50, 99))
        (queued,), (computed,) = _percentiles(queue, (50,)), _percentiles(compute, (50,))
        return {"p50_ms": p50, "p99_ms": p99, "queue_ms": queued, "compute_ms": computed}


def _percentiles(seconds: list[float], which: tuple[int, ...]) -> list[float]:
    return (1e3 * np.percentile(seconds or [0.0], which)).tolist()
