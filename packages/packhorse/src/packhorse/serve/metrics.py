"""Prometheus metrics: HTTP requests are counted here, engine figures are read from the runners.

Every server has a registry of its own, so that two servers in one process do not add up. Labels are
route templates, status codes, names of models and of API keys, never request content: a client
cannot create new time series. A runner's figures are read when /metrics is requested and cost no
request anything.

Dashboards and alerts made for text-embeddings-inference find its names (te_*) too, as far as they
mean the same here; `tei_metrics` computes them from ours when /metrics is requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from packhorse.runtime.shares import Share, Ticket
from packhorse.runtime.statistics import RunnerStats
from packhorse.serve import tei_metrics
from packhorse.serve.keys import LANES, ApiKey
from packhorse.serve.tracing import RequestIds, new_ids

if TYPE_CHECKING:
    from packhorse.serve.hosting import ServedModel, ServedModels

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
UNMATCHED_ROUTE = "other"  # label for requests that match no route
NO_MODEL = "none"  # label for requests that reached no model
NO_KEY = "none"  # label for requests of a server without keys, and for those without a valid one


@dataclass(slots=True)
class RequestRecord:
    """What is known about one request while it is answered; stored as `scope["packhorse"]`.

    The guard creates it, the handlers fill it in, and the guard reports it to metrics and log.
    """

    started: float = field(default_factory=perf_counter)
    ids: RequestIds = field(default_factory=new_ids)
    model: ServedModel | None = None  # the model that the request was for
    task: str = ""  # of `runtime.tasks`
    offered: int = 0  # inputs of the request, answered or not
    inputs: int = 0  # answered
    tokens: int = 0
    pack: str = ""  # value of the response header x-packhorse-pack; empty if no model ran
    fingerprint: str = ""  # value of x-packhorse-fingerprint
    ignored: str = ""  # value of x-packhorse-ignored-fields
    truncated: int = 0  # inputs that were cut; value of x-packhorse-truncated
    api_key: ApiKey | None = None  # that the request came with
    key: str = NO_KEY  # its name, "key1" for the first without one; never the key itself
    bulk: bool = False  # is it in the lane for what nobody waits for?
    share: Share | None = None  # None: the server does not divide between shares
    deadline: float = math.inf  # by `time.monotonic`
    tokenize_seconds: float = 0.0
    tokenized: float = 0.0  # `perf_counter` when the inputs had been tokenized; 0 before
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    error: str = ""  # kind of error that the request ended with

    def use_key(self, key: ApiKey | None) -> None:
        """Note the API key that the request came with."""
        self.api_key = key
        self.key = key.name if key is not None else NO_KEY

    @property
    def ticket(self) -> Ticket | None:
        """What the queue asks for; None if that is nothing."""
        if self.share is None and self.deadline == math.inf:
            return None
        return Ticket(self.share, self.deadline)


@dataclass(frozen=True, slots=True)
class RunnerFigures:
    """The figures of one runner at one moment."""

    labels: Mapping[str, str]  # identify the runner: its model and, in a cluster, its replica
    alive: bool
    rate: float  # tokens per second over the last batches
    stats: RunnerStats


def runner_figures(model: ServedModel, **labels: str) -> RunnerFigures:
    """Read the current figures of one model's runner."""
    runner = model.runner
    return RunnerFigures(
        {"model": model.name, **labels}, runner.alive, runner.rate(), runner.stats()
    )


class _ModelTimers(NamedTuple):
    """The time series of a model's answers to one route with one status."""

    tokenize: Histogram
    queue: Histogram
    compute: Histogram


class Metrics:
    """All metrics of a server.

    `read_figures` replaces reading the models' own runners, for models that run in replicas.
    `labels` are added to those of each runner.
    """

    def __init__(
        self,
        models: ServedModels,
        read_figures: Callable[[], Sequence[RunnerFigures]] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        here: dict[str, Any] = {"registry": self.registry}
        timed: dict[str, Any] = {"registry": self.registry, "buckets": SECONDS}
        self.requests = Counter(
            "packhorse_requests", "Requests by route and status.", ["route", "status"], **here
        )
        self.errors = Counter("packhorse_errors", "Failed requests by kind.", ["kind"], **here)
        self.dropped = Counter(
            "packhorse_dropped", "Requests whose client left before the answer.", **here
        )
        self.in_flight = Gauge("packhorse_in_flight", "Requests being answered.", **here)
        labels_of_times = ["route", "model", "status"]
        self.seconds = Histogram(
            "packhorse_request_seconds", "Time from headers to answer.", labels_of_times, **timed
        )
        self.tokenize = Histogram(
            "packhorse_tokenize_seconds", "Time to tokenize the inputs.", labels_of_times, **timed
        )
        self.queue = Histogram(
            "packhorse_queue_seconds", "Time from queue to device.", labels_of_times, **timed
        )
        self.compute = Histogram(
            "packhorse_compute_seconds",
            "Compute time of the request's batch.",
            labels_of_times,
            **timed,
        )
        # Looking up a time series by its labels takes longer than adding to it.
        self._request_timers: dict[tuple[str, str, int], Histogram] = {}
        self._model_timers: dict[tuple[str, str, int], _ModelTimers] = {}
        self.inputs = Counter("packhorse_inputs", "Texts and pairs answered.", **here)
        self.tokens = Counter("packhorse_input_tokens", "Tokens of answered inputs.", **here)
        self.truncated = Counter(
            "packhorse_truncated_inputs",
            "Inputs cut to the length that the model takes, by model and name of the API key.",
            ["model", "key"],
            **here,
        )
        labels_of_keys = ["key", "lane"]
        self.key_requests = Counter(
            "packhorse_key_requests", "Requests by name of the API key.", labels_of_keys, **here
        )
        self.key_tokens = Counter(
            "packhorse_key_tokens",
            "Tokens of answered inputs by name of the API key.",
            labels_of_keys,
            **here,
        )
        self._key_counters: dict[tuple[str, bool], tuple[Counter, Counter]] = {}

        def read_local() -> list[RunnerFigures]:
            return [runner_figures(model, **(labels or {})) for model in models]

        self.read_figures = read_figures or read_local
        self._runners = _RunnerCollector(self.read_figures)
        self.registry.register(self._runners)
        self.tei = tei_metrics.RequestCollector(self.errors, SECONDS)
        self.registry.register(self.tei)

    def runners(self) -> list[Metric]:
        """Return the figures of the runners alone."""
        return list(self._runners.collect())

    def requests_only(self) -> list[Metric]:
        """Return what is counted here, without the figures of the runners."""
        runners = {metric.name for metric in self.runners()}
        return [metric for metric in self.registry.collect() if metric.name not in runners]

    def record(self, record: RequestRecord, route: str, status: int) -> None:
        """Count a request that has ended."""
        self.requests.labels(route, str(status)).inc()
        labels = (route, record.model.name if record.model else NO_MODEL, status)
        seconds = perf_counter() - record.started
        self._find_request_timer(labels).observe(seconds)
        if record.error:
            self.errors.labels(record.error).inc()
        if record.pack:
            timers = self._find_model_timers(labels)
            timers.tokenize.observe(record.tokenize_seconds)
            timers.queue.observe(record.queue_seconds)
            timers.compute.observe(record.compute_seconds)
            self.inputs.inc(record.inputs)
            self.tokens.inc(record.tokens)
        if record.api_key is not None or record.bulk:
            requests, tokens = self._find_key_counters((record.key, record.bulk))
            requests.inc()
            tokens.inc(record.tokens)
        if record.truncated and record.model is not None:
            self.truncated.labels(record.model.name, record.key).inc(record.truncated)
        if record.offered:
            self.tei.record(record.task, record.offered, status)
        if record.pack and status == tei_metrics.SUCCESS:
            self.tei.record_times(
                seconds, record.tokenize_seconds, record.queue_seconds, record.compute_seconds
            )

    def _find_request_timer(self, labels: tuple[str, str, int]) -> Histogram:
        timer = self._request_timers.get(labels)
        if timer is None:
            timer = self._request_timers[labels] = self.seconds.labels(*labels)
        return timer

    def _find_key_counters(self, share: tuple[str, bool]) -> tuple[Counter, Counter]:
        counters = self._key_counters.get(share)
        if counters is None:
            labels = (share[0], LANES[share[1]])
            counters = (self.key_requests.labels(*labels), self.key_tokens.labels(*labels))
            self._key_counters[share] = counters
        return counters

    def _find_model_timers(self, labels: tuple[str, str, int]) -> _ModelTimers:
        timers = self._model_timers.get(labels)
        if timers is None:
            families = (self.tokenize, self.queue, self.compute)
            timers = _ModelTimers(*(family.labels(*labels) for family in families))
            self._model_timers[labels] = timers
        return timers

    def page(self) -> bytes:
        """Return the body of `GET /metrics`."""
        return generate_latest(self.registry)


def families_to_json(metrics: Iterable[Metric]) -> list[Any]:
    """Return metrics as JSON values, to be added up in another process."""
    return [
        [
            metric.name,
            metric.documentation,
            metric.type,
            [[sample.name, sample.labels, sample.value] for sample in metric.samples],
        ]
        for metric in metrics
    ]


def merge_counters(processes: Iterable[list[Any]]) -> list[Any]:
    """Return the metrics of processes added up, without gauges: those of the past mean nothing."""
    metrics = (metric for metric in _merge(processes) if metric.type != "gauge")
    return families_to_json(metrics)


def merged_page(processes: Iterable[list[Any]]) -> bytes:
    """Return the body of `GET /metrics` for several processes, each as `families_to_json` gives it.

    Samples of the same name and labels are added up: of the metrics that processes share all are
    counters, histograms, or a gauge that counts requests in flight.
    """
    return generate_latest(_Merged(_merge(processes)))


def _merge(processes: Iterable[list[Any]]) -> list[Metric]:
    metrics: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in processes:
        for name, documentation, kind, samples in families:
            metrics.setdefault(name, Metric(name, documentation, kind))
            family = sums.setdefault(name, {})
            for sample, labels, value in samples:
                key = (sample, tuple(labels.items()))
                # When a process began to count is of no use once processes are added up.
                if not sample.endswith("_created"):
                    family[key] = family.get(key, 0.0) + value
    for name, family in sums.items():
        for (sample, labels), value in family.items():
            metrics[name].add_sample(sample, dict(labels), value)
    return list(metrics.values())


@dataclass(frozen=True, slots=True)
class _Merged:
    """Stands in for a registry, of which `generate_latest` only collects."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        return self.metrics


class _RunnerCollector:
    """A Prometheus collector that reads the runners each time /metrics is requested."""

    def __init__(self, read_figures: Callable[[], Sequence[RunnerFigures]]) -> None:
        self.read_figures = read_figures

    def collect(self) -> Iterator[Metric]:
        runners = self.read_figures()
        label_names = list(runners[0].labels) if runners else ["model"]

        def family(
            kind: Any, name: str, help: str, values: Callable[[RunnerFigures], tuple[float, ...]]
        ) -> Metric:
            metric = kind(f"packhorse_{name}", help, labels=label_names)
            for runner in runners:
                metric.add_metric(list(runner.labels.values()), *values(runner))
            return metric

        yield family(
            GaugeMetricFamily, "up", "1 while the engine runs.", lambda runner: (int(runner.alive),)
        )
        yield family(
            GaugeMetricFamily,
            "tokens_per_second",
            "Throughput of the last batches.",
            lambda runner: (runner.rate,),
        )
        for name, (kind, help) in RUNNER_METRICS.items():
            yield family(kind, f"runner_{name}", help, partial(_stat, name))
        yield family(
            SummaryMetricFamily,
            "batch_tokens",
            "Tokens of batches that ran.",
            lambda runner: (runner.stats.batches, runner.stats.tokens),
        )
        yield from tei_metrics.runner_families([runner.stats for runner in runners])


def _stat(name: str, runner: RunnerFigures) -> tuple[float]:
    return (getattr(runner.stats, name),)


# Fields of `runtime.statistics.RunnerStats`, which name the metrics packhorse_runner_*; those that
# only grow are counters.
RUNNER_METRICS: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str]] = {
    "requests": (CounterMetricFamily, "Inputs admitted to the queue."),
    "answered": (CounterMetricFamily, "Inputs answered."),
    "failed": (CounterMetricFamily, "Inputs the model failed on."),
    "cancelled": (CounterMetricFamily, "Inputs cancelled before they ran."),
    "refused": (CounterMetricFamily, "Inputs refused because the queue was full."),
    "reruns": (CounterMetricFamily, "Batches run again because an input in them failed."),
    "waiting_requests": (GaugeMetricFamily, "Inputs in the queue."),
    "waiting_tokens": (GaugeMetricFamily, "Tokens in the queue."),
    "running_requests": (GaugeMetricFamily, "Inputs on the device."),
    "fill": (GaugeMetricFamily, "Tokens of inputs / all tokens of batches."),
    "sequences_a_batch": (GaugeMetricFamily, "Mean number of sequences per batch."),
    "p50_ms": (GaugeMetricFamily, "Median time from admission to answer, over the last inputs."),
    "p99_ms": (GaugeMetricFamily, "99th percentile of the time from admission to answer."),
}
