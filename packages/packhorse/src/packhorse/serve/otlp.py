"""OTLP over HTTP for OpenTelemetry's SDK: spans and metrics as protobuf to a collector.

Written here and not taken from opentelemetry-exporter-otlp-proto-http, which brings requests and
two packages that are still betas, for one POST. The messages are made by
opentelemetry-exporter-otlp-proto-common. What a collector does not take at once is dropped: metrics
are sent again with the next ones, and a span is not worth a queue of its own.
https://opentelemetry.io/docs/specs/otlp/#otlphttp
https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import gzip
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import unquote

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics import Counter, Histogram, ObservableCounter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from packhorse.errors import InputError

PREFIX = "OTEL_EXPORTER_OTLP_"
TIMEOUT_SECONDS = 10.0  # the specification's default
Signal = Literal["traces", "metrics"]
OnProblem = Callable[[str], None]


class Sender:
    """Sends messages of one signal, as OTEL_EXPORTER_OTLP_… say, to a collector."""

    def __init__(self, signal: Signal, endpoint: str, on_problem: OnProblem) -> None:
        """`endpoint`, if not empty, is used in place of that of the variables."""
        self.on_problem = on_problem
        base = endpoint or os.environ.get(f"{PREFIX}ENDPOINT", "http://localhost:4318")
        own = os.environ.get(f"{PREFIX}{signal.upper()}_ENDPOINT", "")
        self.url = own if own and not endpoint else f"{base.rstrip('/')}/v1/{signal}"

        def variable(name: str, default: str = "") -> str:
            common = os.environ.get(PREFIX + name, default)
            return os.environ.get(f"{PREFIX}{signal.upper()}_{name}", common)

        self.headers = {"content-type": "application/x-protobuf"} | _headers(variable("HEADERS"))
        self.compresses = variable("COMPRESSION") == "gzip"
        if self.compresses:
            self.headers["content-encoding"] = "gzip"
        try:
            self.timeout = float(variable("TIMEOUT", str(TIMEOUT_SECONDS)))
            self.context = ssl.create_default_context(cafile=variable("CERTIFICATE") or None)
            if certificate := variable("CLIENT_CERTIFICATE"):
                self.context.load_cert_chain(certificate, variable("CLIENT_KEY") or None)
        except (OSError, ValueError) as error:
            raise InputError(f"a variable {PREFIX}… cannot be used: {error}") from error

    def send(self, message: Any) -> bool:
        """Send a protobuf message; return whether the collector took it."""
        body: bytes = message.SerializeToString()
        if self.compresses:
            body = gzip.compress(body)
        try:
            request = urllib.request.Request(self.url, body, self.headers)
            with urllib.request.urlopen(request, timeout=self.timeout, context=self.context) as got:
                got.read()
        except (OSError, ValueError) as error:  # a URL without a host is a ValueError
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            self.on_problem(f"{self.url} did not take what was sent: {error}")
            return False
        return True


class SpanSender(SpanExporter):
    """Sends spans, for the SDK's processor."""

    def __init__(self, endpoint: str, on_problem: OnProblem) -> None:
        self.sender = Sender("traces", endpoint, on_problem)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        taken = self.sender.send(encode_spans(spans))
        return SpanExportResult.SUCCESS if taken else SpanExportResult.FAILURE


class MetricSender(MetricExporter):
    """Sends metrics, for the SDK's reader."""

    def __init__(self, endpoint: str, on_problem: OnProblem) -> None:
        preference = os.environ.get(f"{PREFIX}METRICS_TEMPORALITY_PREFERENCE", "").lower()
        kinds = (Counter, Histogram, ObservableCounter) if preference == "delta" else ()
        super().__init__(dict.fromkeys(kinds, AggregationTemporality.DELTA))
        self.sender = Sender("metrics", endpoint, on_problem)

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Send metrics."""
        taken = self.sender.send(encode_metrics(metrics_data))
        return MetricExportResult.SUCCESS if taken else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Return True: nothing is kept here."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Do nothing: nothing is kept here."""


def _headers(text: str) -> dict[str, str]:
    """Return the headers of `name=value,name=value`, whose values are percent-encoded."""
    pairs = (entry.partition("=") for entry in text.split(",") if "=" in entry)
    return {name.strip().lower(): unquote(value.strip()) for name, _, value in pairs}
