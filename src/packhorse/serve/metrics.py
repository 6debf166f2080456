"""Figures for Prometheus: what came over HTTP is counted here, what ran is asked of the runners.

The registry is the server's own, so that two servers in one process do not add up. Labels are route
templates, statuses and names of models: a client cannot make new ones. What a runner counts is read
when the page is asked for, and costs a request nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

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
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    error: str = ""  # the kind of error it ended with
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class Metrics:
    """All figures of a server."""

    def __init__(self, hosts: Hosts) -> None:
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
        self.registry.register(_Runners(hosts))

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

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def collect(self) -> Iterator[Metric]:
        stats = {each.name: each.runner.stats() for each in self.hosts}
        yield _family(
            GaugeMetricFamily("packhorse_up", "1 while the engine runs.", labels=["model"]),
            {each.name: int(each.runner.alive) for each in self.hosts},
        )
        yield _family(
            GaugeMetricFamily(
                "packhorse_tokens_per_second", "Of the last batches.", labels=["model"]
            ),
            {each.name: each.runner.rate() for each in self.hosts},
        )
        for name, (kind, help) in RUNNER_FIGURES.items():
            family = kind(f"packhorse_runner_{name}", help, labels=["model"])
            yield _family(family, {model: getattr(each, name) for model, each in stats.items()})
        batches = SummaryMetricFamily(
            "packhorse_batch_tokens", "Tokens of batches that ran.", labels=["model"]
        )
        for model, each in stats.items():
            batches.add_metric([model], each.batches, each.tokens)
        yield batches


# Fields of `runtime.statistics.Stats`; those that only grow are counters.
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


def _family(family: Any, values: dict[str, float]) -> Metric:
    for model, value in values.items():
        family.add_metric([model], value)
    return family
