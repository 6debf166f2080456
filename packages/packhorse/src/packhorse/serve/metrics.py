"""Figures for Prometheus: what came over HTTP is counted here, what ran is asked of the runners.

The registry is the server's own, so that two servers in one process do not add up. Labels are route
templates, statuses and names of models: a client cannot make new ones. What a runner counts is read
when the page is asked for, and costs a request nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from packhorse.runtime.statistics import RunnerStats
from packhorse.serve.hosting import Hosted, Hosts

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
ELSEWHERE = "other"  # the route of what no route fits


@dataclass(slots=True)
class Seen:
    """What is known of one request while it is answered; `scope["packhorse"]`."""

    begun: float = field(default_factory=perf_counter)
    host: Hosted | None = None  # that was asked
    inputs: int = 0
    tokens: int = 0
    pack: str = ""  # the header's value
    ignored: str = ""  # names of fields, for another header
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    error: str = ""  # the kind of error it ended with
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a runner says of itself."""

    labels: Mapping[str, str]  # which it is
    alive: bool
    rate: float  # tokens a second of the last batches
    stats: RunnerStats


def figures(host: Hosted, **labels: str) -> Figures:
    """Those of one model, now."""
    runner = host.runner
    return Figures({"model": host.name, **labels}, runner.alive, runner.rate(), runner.stats())


class Metrics:
    """All figures of a server; `tell` gives those of the runners where they are not here."""

    def __init__(self, hosts: Hosts, tell: Callable[[], Sequence[Figures]] | None = None) -> None:
        self.hosts, self.registry = hosts, CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "packhorse_requests", "Requests by route and status.", ["route", "status"], **own
        )
        self.errors = Counter("packhorse_errors", "Requests that failed, by kind.", ["kind"], **own)
        self.dropped = Counter(
            "packhorse_dropped", "Requests whose client left before the answer.", **own
        )
        self.in_flight = Gauge("packhorse_in_flight", "Requests being worked on.", **own)
        self.seconds = Histogram(
            "packhorse_request_seconds", "From the headers to the answer.", buckets=SECONDS, **own
        )
        self.queue = Histogram(
            "packhorse_queue_seconds", "From the queue to the device.", buckets=SECONDS, **own
        )
        self.compute = Histogram(
            "packhorse_compute_seconds", "Of the batch it ran in.", buckets=SECONDS, **own
        )
        self.inputs = Counter("packhorse_inputs", "Texts and pairs that were answered.", **own)
        self.tokens = Counter("packhorse_input_tokens", "Tokens of what was answered.", **own)
        self.registry.register(_Runners(tell or (lambda: [figures(host) for host in hosts])))

    def record(self, seen: Seen, route: str, status: int) -> None:
        """A request has ended."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.observe(perf_counter() - seen.begun)
        if seen.error:
            self.errors.labels(seen.error).inc()
        if seen.pack:
            self.queue.observe(seen.queue_seconds)
            self.compute.observe(seen.compute_seconds)
            self.inputs.inc(seen.inputs)
            self.tokens.inc(seen.tokens)

    def page(self) -> bytes:
        """For `GET /metrics`."""
        return generate_latest(self.registry)


class _Runners:
    """Asks every runner when the page is asked for."""

    def __init__(self, tell: Callable[[], Sequence[Figures]]) -> None:
        self.tell = tell

    def collect(self) -> Iterator[Metric]:
        told = self.tell()
        labels = list(told[0].labels) if told else ["model"]
        who = [list(each.labels.values()) for each in told]

        def family(kind: Any, name: str, help: str, values: Sequence[tuple[float, ...]]) -> Metric:
            found = kind(f"packhorse_{name}", help, labels=labels)
            for each, value in zip(who, values, strict=True):
                found.add_metric(each, *value)
            return found

        up, rate = [(int(each.alive),) for each in told], [(each.rate,) for each in told]
        yield family(GaugeMetricFamily, "up", "1 while the engine runs.", up)
        yield family(GaugeMetricFamily, "tokens_per_second", "Of the last batches.", rate)
        for name, (kind, help) in RUNNER_FIGURES.items():
            values = [(getattr(each.stats, name),) for each in told]
            yield family(kind, f"runner_{name}", help, values)
        ran = [(each.stats.batches, each.stats.tokens) for each in told]
        yield family(SummaryMetricFamily, "batch_tokens", "Tokens of batches that ran.", ran)


# Fields of `runtime.statistics.RunnerStats`; those that only grow are counters.
RUNNER_FIGURES: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str]] = {
    "requests": (CounterMetricFamily, "Inputs admitted to the queue."),
    "answered": (CounterMetricFamily, "Inputs answered."),
    "failed": (CounterMetricFamily, "Inputs the model failed on."),
    "cancelled": (CounterMetricFamily, "Inputs cancelled before they ran."),
    "refused": (CounterMetricFamily, "Inputs refused because too much waited."),
    "reruns": (CounterMetricFamily, "Batches run again because an input in them failed."),
    "waiting_requests": (GaugeMetricFamily, "Inputs that wait."),
    "waiting_tokens": (GaugeMetricFamily, "Tokens that wait."),
    "running_requests": (GaugeMetricFamily, "Inputs on the device."),
    "fill": (GaugeMetricFamily, "Somebody's tokens / all tokens of batches."),
    "sequences_a_batch": (GaugeMetricFamily, "Sequences that share a batch, on average."),
    "p50_ms": (GaugeMetricFamily, "From admission to the answer, median of the last inputs."),
    "p99_ms": (GaugeMetricFamily, "The same, 99th percentile."),
}
