"""What a runner can say of itself: counters since it began, times over the last requests.

Counters always add up: what was admitted has been answered, has failed, was cancelled, waits or
runs. Times are those of a window, so that yesterday does not hide today. The last batches are kept
as they were laid, to be shown and to tell how fast it goes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

REQUESTS = 4096  # in the window of latencies
BATCHES = 512
RECENT = 64  # batches that are kept as they were laid


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


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch that was run, as it was laid."""

    number: int  # of the runner's batches
    ended: float  # seconds of `time.monotonic`
    rows: tuple[tuple[int, ...], ...]  # the lengths of the sequences in each row
    tokens: int  # of the batch, with what nobody asked for
    seconds: float

    @property
    def sequences(self) -> int:
        """That ran together."""
        return sum(map(len, self.rows))

    @property
    def used(self) -> int:
        """Tokens that were somebody's."""
        return sum(map(sum, self.rows))

    @property
    def fill(self) -> float:
        """Somebody's tokens / all tokens."""
        return self.used / max(1, self.tokens)


class Recorder:
    """Counts batches and answers; written by the engine, read by anyone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answered = self.failed = self.reruns = 0
        self.batches = self.sequences = self.tokens = self.batch_tokens = 0
        self._latency: deque[float] = deque(maxlen=REQUESTS)
        self._queue: deque[float] = deque(maxlen=REQUESTS)
        self._compute: deque[float] = deque(maxlen=BATCHES)
        self._recent: deque[Ran] = deque(maxlen=RECENT)

    def batch(self, rows: Sequence[Sequence[int]], tokens: int, seconds: float) -> Ran:
        """A batch of `tokens` tokens, sequences of these lengths among them, was run."""
        now, laid = time.monotonic(), tuple(map(tuple, rows))
        with self._lock:
            self.batches += 1
            ran = Ran(self.batches, now, laid, tokens, seconds)
            self.sequences += ran.sequences
            self.tokens += ran.used
            self.batch_tokens += tokens
            self._compute.append(seconds)
            self._recent.append(ran)
        return ran

    def recent(self) -> list[Ran]:
        """The last batches, the newest last."""
        with self._lock:
            return list(self._recent)

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


def throughput(batches: Sequence[Ran], now: float, seconds: float) -> float:
    """Somebody's tokens a second over the last `seconds`; `batches` as `Recorder.recent` gives.

    Where batches are so many that the memory is shorter, it is over what is remembered: from the
    end of the oldest, which then only marks the beginning.
    """
    since = now - seconds
    if len(batches) == RECENT:
        since = max(since, batches[0].ended)
    return sum(each.used for each in batches if each.ended > since) / max(1e-9, now - since)


def _percentiles(seconds: list[float], which: tuple[int, ...]) -> list[float]:
    return (1e3 * np.percentile(seconds or [0.0], which)).tolist()
