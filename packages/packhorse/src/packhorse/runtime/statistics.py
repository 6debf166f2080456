"""Statistics of a runner: counters since it started, times over the last requests.

Counters always add up: every admitted request was answered, failed or cancelled, or waits or runs.
Times are over a window, so that old requests do not hide what happens now. The last batches are
recorded as they were laid out, to be shown on the server's page and to compute the throughput.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

REQUESTS = 4096  # in the window of latencies
BATCHES = 512  # in the window of compute times
RECENT = 64  # batches that are recorded as they were laid out
PACE_BATCHES = 9  # of each size, of which the median is taken


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """The statistics of a runner at one moment; times in milliseconds."""

    requests: int  # admitted
    answered: int
    failed: int
    cancelled: int
    refused: int  # not admitted, `Overloaded` was raised
    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    tokens: int  # of requests, without padding, over all batches
    batches: int
    reruns: int  # batches that ran again because a request in them failed
    fill: float  # tokens of requests / all tokens of the batches
    sequences_a_batch: float  # mean sequences per batch
    p50_ms: float  # from admission to the answer
    p99_ms: float
    queue_ms: float  # from admission to the device, median
    compute_ms: float  # per batch, median


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch that ran, as it was laid out."""

    number: int  # counted from 1 since the runner started
    ended: float  # when it ended, by `time.monotonic`
    rows: tuple[tuple[int, ...], ...]  # the lengths of the sequences in each row
    tokens: int  # computed, padding included
    seconds: float
    # Both follow from `rows`, and are asked for by every request of the batch.
    sequences: int  # that ran together
    used: int  # tokens without padding

    @property
    def fill(self) -> float:
        """The share of tokens that is not padding."""
        return self.used / max(1, self.tokens)


class BatchPace:
    """How long batches take, by their size; predicts when what waits will have run.

    A batch of a few tokens takes nearly as long as one of a hundred, so the speed of small batches
    says nothing about a full queue. Sizes are kept apart by powers of two, each with the median of
    its last batches, because one that took unusually long must not count for the next minutes. A
    size that has not run yet is taken to be as fast, per token, as the nearest that has.
    """

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}  # seconds a token
        self._medians: dict[int, float] = {}
        self._rates: dict[int, float] = {}  # of full batches, by their size

    def add(self, tokens: int, seconds: float) -> None:
        """Note that a batch of so many tokens took so long."""
        if not tokens:
            return
        size = tokens.bit_length()
        last = self._last.setdefault(size, deque(maxlen=PACE_BATCHES))
        last.append(seconds / tokens)
        # Replaced at once: other threads read it.
        self._medians = {**self._medians, size: sorted(last)[len(last) // 2]}
        self._rates = {}

    def rate(self, batch_tokens: int) -> float:
        """Return the tokens per second at which full batches run; 0 if nothing is known."""
        rates = self._rates
        if batch_tokens not in rates:  # once a batch: every reply of a server has it
            seconds = self.seconds(batch_tokens, batch_tokens)
            rates[batch_tokens] = batch_tokens / seconds if seconds else 0.0
        return rates[batch_tokens]

    def seconds(self, tokens: float, batch_tokens: int) -> float:
        """Return how long so many tokens take in batches of at most `batch_tokens`; 0: unknown."""
        batches, rest = divmod(tokens, batch_tokens)
        full = batches * batch_tokens
        return full * self._seconds_a_token(batch_tokens) + rest * self._seconds_a_token(int(rest))

    def _seconds_a_token(self, tokens: int) -> float:
        medians = self._medians
        if not medians:
            return 0.0
        size = tokens.bit_length()
        nearest = min(medians, key=lambda known: (abs(known - size), -known))
        return medians[nearest]


class RunnerRecorder:
    """Counts batches and answers; the engine writes, any thread reads.

    Its lock is the last that a thread takes: no other is taken while it is held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answered = 0
        self.failed = 0
        self.reruns = 0
        self.batches = 0
        self.sequences = 0
        self.tokens = 0
        self.batch_tokens = 0
        self.rate = 0.0  # tokens per second while the last batches ran
        self.pace = BatchPace()
        self._latency: deque[float] = deque(maxlen=REQUESTS)
        self._queue: deque[float] = deque(maxlen=REQUESTS)
        self._compute: deque[float] = deque(maxlen=BATCHES)
        self._recent: deque[BatchRecord] = deque(maxlen=RECENT)

    def batch(self, rows: Sequence[Sequence[int]], tokens: int, seconds: float) -> BatchRecord:
        """Record a batch of `tokens` tokens; `rows` has the lengths of its sequences."""
        now = time.monotonic()
        lengths = tuple(map(tuple, rows))
        with self._lock:
            self.batches += 1
            record = BatchRecord(
                self.batches,
                now,
                lengths,
                tokens,
                seconds,
                sequences=sum(map(len, lengths)),
                used=sum(map(sum, lengths)),
            )
            self.sequences += record.sequences
            self.tokens += record.used
            self.batch_tokens += tokens
            # On an accelerator a batch is launched while the one before it runs.
            since = self._recent[-1].ended if self._recent else -math.inf
            self.pace.add(record.used, min(seconds, now - since))
            self._compute.append(seconds)
            self._recent.append(record)
            busy = sum(batch.seconds for batch in self._recent)
            self.rate = sum(batch.tokens for batch in self._recent) / max(1e-9, busy)
        return record

    def recent(self) -> list[BatchRecord]:
        """Return the last batches, the newest last."""
        with self._lock:
            return list(self._recent)

    def rerun(self) -> None:
        """Count a part of a failed batch that runs again."""
        with self._lock:
            self.reruns += 1

    def answer(self, answers: Sequence[tuple[float, float, int]]) -> None:
        """Count answered jobs: the latency of each, its time in the queue, and its inputs."""
        with self._lock:
            for latency, queued, inputs in answers:
                self.answered += inputs
                self._latency.append(latency)
                self._queue.append(queued)

    def fail(self, inputs: int = 1) -> None:
        """Count the inputs of a job that was answered with an error."""
        with self._lock:
            self.failed += inputs

    def times(self) -> dict[str, float]:
        """Return percentiles over the window in milliseconds; 0 before the first measurement."""
        with self._lock:
            latency = list(self._latency)
            queue = list(self._queue)
            compute = list(self._compute)
        p50, p99 = _percentiles(latency, (50, 99))
        (queue_ms,) = _percentiles(queue, (50,))
        (compute_ms,) = _percentiles(compute, (50,))
        return {"p50_ms": p50, "p99_ms": p99, "queue_ms": queue_ms, "compute_ms": compute_ms}


def throughput(batches: Sequence[BatchRecord], now: float, seconds: float) -> float:
    """Return tokens per second, without padding, over the last `seconds`.

    `batches` are those of `RunnerRecorder.recent`. Where these reach back less far than `seconds`,
    the time since the end of the oldest counts, and that batch only marks the beginning.
    """
    since = now - seconds
    if len(batches) == RECENT:
        since = max(since, batches[0].ended)
    used = sum(record.used for record in batches if record.ended > since)
    return used / max(1e-9, now - since)


def _percentiles(seconds: list[float], percents: tuple[int, ...]) -> list[float]:
    return (1e3 * np.percentile(seconds or [0.0], percents)).tolist()
