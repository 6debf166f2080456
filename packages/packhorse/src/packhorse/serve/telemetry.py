"""OpenTelemetry: a trace per request and metrics, sent over OTLP (extra `otel`).

A request is one server span, which continues the client's trace by the ids of `tracing`, with a
child span each for tokenizing, for waiting in the queue and for computing. Spans are made after a
request has ended, from the times in its record, so that tracing does not delay it. Without a
collector this module is not imported.

Everything else is the SDK's and set by its own variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_BSP_…, OTEL_METRIC_EXPORT_INTERVAL, OTEL_EXPORTER_OTLP_…): a queue of bounded size, and threads
that send. A collector that is away costs what does not fit into that queue, and one line of log.

No provider is set for the whole process: libraries that would then send spans of their own would
double ours. Names are those of the semantic conventions for HTTP servers and, for gRPC, of those
for RPC: https://opentelemetry.io/docs/specs/semconv/http/http-spans/
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from packhorse import __version__
from packhorse.serve import logs
from packhorse.serve.metrics import (
    RUNNER_METRICS,
    CounterMetricFamily,
    RequestRecord,
    RunnerFigures,
)
from packhorse.serve.otlp import MetricSender, SpanSender
from packhorse.serve.settings import ServeSettings
from packhorse.serve.tracing import RequestIds

CLOSE_SECONDS = 3.0  # for the last spans and metrics to be sent when the server ends
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT")
OTHER_METHOD = "_OTHER"  # the conventions' name for all others: methods must not make time series
MAX_PATH = 1024  # characters of a path in a span
# Boundaries that the conventions advise for durations in seconds.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

Scope = Mapping[str, Any]


class Telemetry:
    """What one process of the server sends."""

    def __init__(self, settings: ServeSettings) -> None:
        endpoint = settings.otlp_endpoint
        problems = _FirstProblem()
        logger = logging.getLogger("opentelemetry")
        logger.handlers = [problems]
        logger.propagate = False
        resource = _resource()
        self._ids = _RequestIdGenerator()
        self._tracers = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        if os.environ.get("OTEL_TRACES_EXPORTER") != "none":
            spans = BatchSpanProcessor(SpanSender(endpoint, problems.report))
            self._tracers.add_span_processor(spans)
        self._tracer = self._tracers.get_tracer("packhorse", __version__)
        readers: list[MetricReader] = []
        if os.environ.get("OTEL_METRICS_EXPORTER") != "none":
            metrics = MetricSender(endpoint, problems.report)
            readers.append(PeriodicExportingMetricReader(metrics))
        self._meters = MeterProvider(readers, resource, shutdown_on_exit=False)
        self._meter = self._meters.get_meter("packhorse", __version__)

        def histogram(name: str, description: str) -> Any:
            return self._meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=SECONDS
            )

        self._requests = histogram("http.server.request.duration", "Duration of HTTP requests.")
        self._calls = histogram("rpc.server.call.duration", "Duration of gRPC calls.")
        self._tokenize = histogram("packhorse.tokenize.duration", "Time to tokenize the inputs.")
        self._queue = histogram("packhorse.queue.duration", "Time from queue to device.")
        self._compute = histogram("packhorse.compute.duration", "Compute time of the batch.")
        self._inputs = self._meter.create_counter(
            "packhorse.inputs", "{input}", "Texts and pairs answered."
        )
        self._tokens = self._meter.create_counter(
            "packhorse.tokens", "{token}", "Tokens of answered inputs."
        )

    def observe(self, read_figures: Callable[[], Sequence[RunnerFigures]]) -> None:
        """Send the figures of runners too, which are read each time that metrics are sent."""
        for field, (kind, description) in RUNNER_METRICS.items():

            def observe(_: CallbackOptions, field: str = field) -> Iterable[Observation]:
                return [
                    Observation(getattr(runner.stats, field), _labels(runner))
                    for runner in read_figures()
                ]

            name = f"packhorse.runner.{field}"
            if kind is CounterMetricFamily:
                self._meter.create_observable_counter(name, [observe], description=description)
            else:
                self._meter.create_observable_gauge(name, [observe], description=description)

    def record(self, scope: Scope, record: RequestRecord, route: str | None, status: int) -> None:
        """Make the spans of a request that has ended, and count it.

        `route` is None for requests that match none; `status` is 499 if the client left.
        """
        now = perf_counter()
        ended = time.time_ns()
        seconds = now - record.started
        is_rpc = scope["http_version"] == "2"  # which only gRPC speaks here
        labels = _rpc_labels(scope) if is_rpc else _http_labels(scope, route, status)
        if record.error and status >= 400:
            labels["error.type"] = record.error
        (self._calls if is_rpc else self._requests).record(seconds, labels)
        if record.pack and record.model is not None:
            model = {"packhorse.model": record.model.name}
            timed = model if route is None else {**model, "http.route": route}
            self._tokenize.record(record.tokenize_seconds, timed)
            self._queue.record(record.queue_seconds, timed)
            self._compute.record(record.compute_seconds, timed)
            self._inputs.add(record.inputs, model)
            self._tokens.add(record.tokens, model)
        self._record_spans(scope, record, labels, status, now, ended)

    def _record_spans(
        self,
        scope: Scope,
        record: RequestRecord,
        labels: Mapping[str, Any],
        status: int,
        now: float,
        ended: int,
    ) -> None:
        """`now` and `ended` are the same moment, on the clock of the record and on the wall's."""
        place = labels.get("http.route") or labels.get("rpc.method") or ""
        self._ids.set_next(record.ids)
        span = self._tracer.start_span(
            f"{labels.get('http.request.method', '')} {place}".strip(),
            _parent(scope, record.ids),
            SpanKind.SERVER,
            {**labels, **_details(scope, record)},
            start_time=ended - _nanoseconds(now - record.started),
        )
        self._ids.clear()
        if not span.is_recording():
            return
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error or None))
        if record.pack and record.tokenized:
            # Of several calls for one request, as late chunking or zero-shot labels may make, the
            # times are sums and maxima, and so the spans are only about where they were.
            tokenized = ended - _nanoseconds(now - record.tokenized)
            launched = tokenized + _nanoseconds(record.queue_seconds)
            times = {
                "tokenize": (tokenized - _nanoseconds(record.tokenize_seconds), tokenized),
                "queue": (tokenized, launched),
                "compute": (launched, launched + _nanoseconds(record.compute_seconds)),
            }
            inside = set_span_in_context(span, Context())
            for name, (begin, end) in times.items():
                self._tracer.start_span(name, inside, start_time=begin).end(end)
        span.end(ended)

    def close(self) -> None:
        """Send what is left, for at most `CLOSE_SECONDS`, and end the threads."""
        closing = [
            threading.Thread(target=shutdown, daemon=True)
            for shutdown in (self._tracers.shutdown, self._meters.shutdown)
        ]
        until = time.monotonic() + CLOSE_SECONDS
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(max(0.0, until - time.monotonic()))


class _RequestIdGenerator(RandomIdGenerator):
    """Gives the next span the ids that the response and the log have, and others random ones."""

    def __init__(self) -> None:
        self._span = 0
        self._trace = 0

    def set_next(self, ids: RequestIds) -> None:
        self._span = int(ids.span, 16)
        self._trace = int(ids.trace, 16)

    def clear(self) -> None:
        self._span = 0
        self._trace = 0

    def generate_span_id(self) -> int:
        return self._span or super().generate_span_id()

    def generate_trace_id(self) -> int:
        return self._trace or super().generate_trace_id()


class _FirstProblem(logging.Handler):
    """Logs the first problem of the SDK in our log; the SDK itself would log one per batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._is_logged = False

    def emit(self, record: logging.LogRecord) -> None:
        self.report(record.getMessage())

    def report(self, problem: str) -> None:
        """Log a problem unless there was one before."""
        if not self._is_logged:
            self._is_logged = True
            logs.LOGGER.warning(
                "OpenTelemetry: %s; requests are answered all the same, and this is logged once",
                problem,
            )


def _resource() -> Resource:
    """Return what identifies this process; variables of OpenTelemetry come first."""
    own = {"service.version": __version__, "service.instance.id": str(uuid.uuid4())}
    resource = Resource({SERVICE_NAME: "packhorse", **own})
    variables = Resource.create()
    if str(variables.attributes[SERVICE_NAME]).startswith("unknown_service"):
        named = {k: v for k, v in variables.attributes.items() if k != SERVICE_NAME}
        variables = Resource(named)
    return resource.merge(variables)


def _parent(scope: Scope, ids: RequestIds) -> Context:
    """Return the client's span as the parent; an empty context begins a trace."""
    if not ids.parent:
        return Context()
    states = [value.decode("latin-1") for name, value in scope["headers"] if name == b"tracestate"]
    client = SpanContext(
        int(ids.trace, 16),
        int(ids.parent, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if ids.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header(states),
    )
    return set_span_in_context(NonRecordingSpan(client), Context())


def _http_labels(scope: Scope, route: str | None, status: int) -> dict[str, Any]:
    method = scope["method"]
    labels: dict[str, Any] = {
        "http.request.method": method if method in METHODS else OTHER_METHOD,
        "url.scheme": scope.get("scheme") or "http",
    }
    if route is not None:
        labels["http.route"] = route
    if status != 499:  # which is never sent
        labels["http.response.status_code"] = status
    return labels


def _rpc_labels(scope: Scope) -> dict[str, Any]:
    return {"rpc.system.name": "grpc", "rpc.method": scope["path"].lstrip("/")}


def _details(scope: Scope, record: RequestRecord) -> dict[str, Any]:
    """Return what a span says beside the labels of the metric."""
    details: dict[str, Any] = {
        "url.path": scope["path"][:MAX_PATH],
        "network.protocol.version": scope["http_version"],
        "packhorse.request_id": record.ids.request,
    }
    if record.model is not None:
        details |= {
            "packhorse.model": record.model.name,
            "packhorse.task": record.task,
            "packhorse.inputs": record.inputs,
            "packhorse.tokens": record.tokens,
        }
    if record.truncated:
        details["packhorse.truncated_inputs"] = record.truncated
    return details


def _labels(runner: RunnerFigures) -> dict[str, str]:
    return {f"packhorse.{name}": value for name, value in runner.labels.items()}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
