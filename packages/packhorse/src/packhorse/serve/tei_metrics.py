"""The metrics of text-embeddings-inference, beside ours.

Names, labels and meanings are those of its router and its queue (te_request_count, te_queue_size
and so on), so that dashboards and alerts made for it go on working. What differs, because nothing
here measures the same:

- Histograms have our buckets, and te_batch_next_size and te_batch_next_tokens have a sum and a
  count but no buckets.
- `method` is "single" for a request of one input; there it is for an input outside of a list.
- Times are per request, not per input, so te_embed_duration, te_predict_duration and their parts
  are absent, and so is te_request_input_length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import Histogram, Metric
from prometheus_client.core import GaugeMetricFamily, SummaryMetricFamily

from packhorse.runtime.statistics import RunnerStats

METHODS = ("single", "batch")
EMBED_TASKS = ("embed", "hidden")
PREDICT_TASKS = ("classify", "rerank", "zero_shot")
# Our kinds of errors and what the label `err` of te_request_failure calls them.
FAILURES = {
    "Empty": "validation",
    "InputError": "validation",
    "Invalid": "validation",
    "TooLarge": "validation",
    "CheckpointError": "model_type",
    "Overloaded": "overloaded",
    "DeadlineExceeded": "overloaded",
    "429": "overloaded",
    "KernelError": "inference",
    "MissingExtra": "inference",
    "RequestFailed": "inference",
    "RunnerStopped": "inference",
    "ClientGone": "dropped",
}
SUCCESS = 200


class Collected(Protocol):
    """A metric of prometheus_client."""

    def collect(self) -> Iterable[Metric]:
        """Return its time series."""
        ...


class RequestCollector:
    """A Prometheus collector for the metrics of requests; `record` is called once for each."""

    def __init__(self, errors: Collected, buckets: Sequence[float]) -> None:
        """Create the metrics; failures are computed from `errors`, which counts them by kind."""
        self.errors = errors

        def histogram(name: str, help: str) -> Histogram:
            return Histogram(name, help, buckets=buckets, registry=None)

        # Series of their own, not ours added up: that would go through all of those at each scrape.
        self.seconds = histogram("te_request_duration", "Time from headers to answer.")
        self.tokenize = histogram(
            "te_request_tokenization_duration", "Time to tokenize the inputs."
        )
        self.queue = histogram("te_request_queue_duration", "Time from queue to device.")
        self.compute = histogram(
            "te_request_inference_duration", "Compute time of the request's batch."
        )
        self.requests: Counter[str] = Counter(dict.fromkeys(METHODS, 0))
        self.successes: Counter[str] = Counter(dict.fromkeys(METHODS, 0))
        self.inputs: Counter[str] = Counter()  # by the name of the metric

    def record(self, task: str, inputs: int, status: int) -> None:
        """Count a request for a model that has ended."""
        method = METHODS[0] if inputs == 1 else METHODS[1]
        kind = "embed" if task in EMBED_TASKS else "predict" if task in PREDICT_TASKS else ""
        self.requests[method] += 1
        if kind:
            self.inputs[f"te_{kind}_count"] += inputs
        if status == SUCCESS:
            self.successes[method] += 1
            if kind:
                self.inputs[f"te_{kind}_success"] += inputs

    def record_times(self, seconds: float, tokenize: float, queue: float, compute: float) -> None:
        """Add the times of a request that a model answered."""
        self.seconds.observe(seconds)
        self.tokenize.observe(tokenize)
        self.queue.observe(queue)
        self.compute.observe(compute)

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of requests; prometheus_client calls this."""
        yield _counter("te_request_count", "Requests for a model.", "method", self.requests)
        yield _counter("te_request_success", "Requests answered.", "method", self.successes)
        failures = Counter(dict.fromkeys(FAILURES.values(), 0))
        for metric in self.errors.collect():
            for sample in metric.samples:
                kind = sample.labels.get("kind", "")
                if kind in FAILURES and sample.name.endswith("_total"):
                    failures[FAILURES[kind]] += int(sample.value)
        yield _counter("te_request_failure", "Requests that failed, by kind.", "err", failures)
        for kind in ("embed", "predict"):
            for name, help in (("count", "Inputs received."), ("success", "Inputs answered.")):
                metric = Metric(f"te_{kind}_{name}", help, "unknown")
                metric.add_sample(metric.name, {}, self.inputs[metric.name])
                yield metric
        for histogram in (self.seconds, self.tokenize, self.queue, self.compute):
            yield from histogram.collect()


def runner_families(runners: Sequence[RunnerStats]) -> Iterator[Metric]:
    """Return the metrics of the queue and of batches, over all runners together."""
    size = GaugeMetricFamily("te_queue_size", "Inputs in the queue.")
    sequences = SummaryMetricFamily("te_batch_next_size", "Sequences per batch.")
    tokens = SummaryMetricFamily("te_batch_next_tokens", "Tokens per batch.")
    if runners:
        batches = sum(stats.batches for stats in runners)
        size.add_metric([], sum(stats.waiting_requests for stats in runners))
        sequences.add_metric(
            [], batches, round(sum(stats.sequences_a_batch * stats.batches for stats in runners))
        )
        tokens.add_metric([], batches, sum(stats.tokens for stats in runners))
    yield size
    yield sequences
    yield tokens


def _counter(name: str, help: str, label: str, counts: Counter[str]) -> Metric:
    # Not of the type "counter": prometheus_client would append "_total" to the name.
    metric = Metric(name, help, "unknown")
    for value, count in counts.items():
        metric.add_sample(name, {label: value}, count)
    return metric
