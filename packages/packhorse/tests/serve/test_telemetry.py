"""Traces and metrics at a collector, read by OpenTelemetry's own classes."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from .processes.test_processes import wait_for
from .test_metrics_port import free_port

pytest.importorskip("opentelemetry.exporter.otlp.proto.common")

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "congo=t61rcWkgMzE"}
# The SDK's own variables: send often, so that the tests need not wait.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_METRIC_EXPORT_INTERVAL": "200"}


class Collector:
    """A collector of OTLP over HTTP."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}  # the last of each name and process
        self.resources: list[dict[str, str]] = []
        self.headers: list[Any] = []
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"] or 0))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                collector.headers.append(self.headers)
                collector.bodies.append(body)
                if self.path == "/v1/traces":
                    traces = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                    for part in traces.resource_spans:
                        collector.resources.append(attributes(part.resource))
                        for scope in part.scope_spans:
                            collector.spans += scope.spans
                elif self.path == "/v1/metrics":
                    message = metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
                    for part in message.resource_metrics:
                        process = attributes(part.resource)["service.instance.id"]
                        for scope in part.scope_metrics:
                            for metric in scope.metrics:
                                collector.metrics[f"{metric.name} {process}"] = metric
                self.send_response(200 if self.path.startswith("/v1/") else 404)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(60)

    def named(self, name: str) -> list[Any]:
        """The last state of a metric, for each process that has sent it."""
        return [metric for key, metric in self.metrics.items() if key.startswith(f"{name} ")]


def attributes(holder: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in holder.attributes
    }


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module", params=["one", pytest.param("fronts", marks=pytest.mark.slow)])
def server(request, start, collector) -> Any:
    fronts = [] if request.param == "one" else ["--fronts", "2"]
    if fronts and not hasattr(os, "memfd_create"):
        pytest.skip("fronts share memory by memfd, which is Linux's")
    collector.spans.clear()
    collector.metrics.clear()
    words = ["--otlp-endpoint", collector.url, "--device", "cpu", "--log-requests", *fronts]
    collector.bodies.clear()
    variables = {
        **SOON,
        "OTEL_SERVICE_NAME": "search",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue%20team",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    return start(*words, **variables).wait_until_ready()


def test_a_request_is_a_span_of_the_clients_trace(server, collector) -> None:
    response = httpx.post(
        f"{server.url}/embed", json={"inputs": ["w1 w2", "w3"]}, headers=CLIENT, timeout=60
    )
    assert response.status_code == 200
    span_id = response.headers["traceparent"].split("-")[2]
    wait_for(lambda: any(span.span_id.hex() == span_id for span in collector.spans))
    spans = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    root = next(span for span in spans if span.span_id.hex() == span_id)
    assert root.parent_span_id.hex() == PARENT and root.trace_state == CLIENT["tracestate"]
    assert root.name == "POST /embed" and root.kind == root.SPAN_KIND_SERVER
    facts = attributes(root)
    assert facts["http.request.method"] == "POST" and facts["http.route"] == "/embed"
    assert facts["http.response.status_code"] == 200 and facts["url.scheme"] == "http"
    assert (facts["packhorse.model"], facts["packhorse.inputs"]) == ("tiny", 2)
    assert facts["packhorse.tokens"] == 7  # with [CLS] and [SEP]
    assert facts["packhorse.request_id"] == response.headers["x-request-id"]
    wait_for(lambda: f"span_id={span_id}" in server.log())
    children = {span.name: span for span in spans if span.parent_span_id == root.span_id}
    assert set(children) == {"tokenize", "queue", "compute"}
    tokenize, queue, compute = (children[name] for name in ("tokenize", "queue", "compute"))
    assert root.start_time_unix_nano <= tokenize.start_time_unix_nano
    assert tokenize.end_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == compute.start_time_unix_nano
    assert compute.start_time_unix_nano < compute.end_time_unix_nano
    assert attributes_of_process(collector) == {"search"}
    assert {headers["x-tenant"] for headers in collector.headers} == {"blue team"}


def test_neither_texts_nor_keys_are_sent(server, collector) -> None:
    secret = "mysterious"
    headers = {"authorization": f"Bearer {secret}", "x-request-id": "to-be-found"}
    response = httpx.post(
        f"{server.url}/embed?{secret}=1", json={"inputs": secret}, headers=headers, timeout=60
    )
    assert response.status_code == 200
    # The control: the request has come.
    wait_for(lambda: any(b"to-be-found" in body for body in collector.bodies))
    assert not any(secret.encode() in body for body in collector.bodies)


def attributes_of_process(collector: Collector) -> set[Any]:
    return {resource["service.name"] for resource in collector.resources}


def test_new_traces_errors_and_traces_that_are_not_sampled(server, collector) -> None:
    url = f"{server.url}/embed"
    quiet = {"traceparent": f"00-{'c' * 32}-{PARENT}-00"}
    assert httpx.post(url, json={"inputs": "w1"}, headers=quiet, timeout=60).status_code == 200
    refused = httpx.post(url, json={"inputs": ""}, timeout=60)
    lost = httpx.get(f"{server.url}/no/such/route", timeout=60)
    for response, name, status in ((refused, "POST /embed", 400), (lost, "GET", 404)):
        _, trace, span_id, _ = response.headers["traceparent"].split("-")
        wait_for(lambda t=trace: any(s.trace_id.hex() == t for s in collector.spans))
        (span,) = [s for s in collector.spans if s.trace_id.hex() == trace]
        assert span.span_id.hex() == span_id and not span.parent_span_id
        facts = attributes(span)
        assert span.name == name and facts["http.response.status_code"] == status
        assert facts["error.type"]
        assert span.status.code == span.status.STATUS_CODE_UNSET  # the client's mistake
    # The control: it was sent before the others, and never comes.
    assert not [span for span in collector.spans if span.trace_id.hex() == "c" * 32]


def test_metrics_come_too(server, collector) -> None:
    body = {"inputs": ["w1", "w2 w3"]}
    for _ in range(4):
        assert httpx.post(f"{server.url}/embed", json=body, timeout=60).status_code == 200

    def answered() -> int:
        metrics = collector.named("packhorse.runner.answered")
        return sum(point.as_int for metric in metrics for point in metric.sum.data_points)

    wait_for(lambda: answered() >= 8)

    def points() -> list[Any]:
        metrics = collector.named("http.server.request.duration")
        return [
            point
            for metric in metrics
            for point in metric.histogram.data_points
            if attributes(point).get("http.route") == "/embed"
            and attributes(point)["http.response.status_code"] == 200
        ]

    wait_for(lambda: sum(point.count for point in points()) >= 4)
    assert sum(sum(point.bucket_counts) for point in points()) >= 4
    wait_for(lambda: collector.named("packhorse.tokens"))
    for metric in collector.named("packhorse.tokens"):
        assert [attributes(point) for point in metric.sum.data_points] == [
            {"packhorse.model": "tiny"}
        ]
    assert server.end(timeout=60) == 0


@pytest.fixture(scope="module")
def alone(start) -> dict[str, Any]:
    """Servers whose collector is away, and that have none; started together."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    small = {**SOON, "OTEL_BSP_MAX_QUEUE_SIZE": "8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}
    away = start("--device", "cpu", OTEL_EXPORTER_OTLP_ENDPOINT=nowhere, **small)
    other = start(
        "--device", "cpu", OTEL_EXPORTER_OTLP_ENDPOINT=nowhere, OTEL_EXPORTER_OTLP_PROTOCOL="grpc"
    )
    off = start("--device", "cpu", PYTHONPROFILEIMPORTTIME="1")
    return {"away": away, "other": other, "off": off}


@pytest.mark.slow
def test_a_collector_that_is_away_is_told_once_and_fails_nothing(alone) -> None:
    server = alone["away"].wait_until_ready()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(50):  # many times the queue
            assert client.post("/embed", json={"inputs": "w1"}).status_code == 200
    wait_for(lambda: "OpenTelemetry: " in server.log())
    assert server.end(timeout=60) == 0
    assert server.log().count("OpenTelemetry: ") == 1


def test_a_redirect_does_not_get_the_headers(collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may hold a key; and as a GET, which urllib makes of it, nothing would arrive."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    from packhorse.serve.otlp import Sender

    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"{collector.url}/v1/traces")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    problems: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        sender = Sender("traces", f"http://127.0.0.1:{server.server_port}", problems.append)
        assert not sender.send(trace_service_pb2.ExportTraceServiceRequest())
        server.shutdown()
        thread.join(60)
    assert asked == ["/v1/traces"] and "302" in problems[0]
    assert all(headers["api-key"] != "secret" for headers in collector.headers)
    plain = Sender("traces", collector.url, problems.append)  # the control
    assert plain.send(trace_service_pb2.ExportTraceServiceRequest())
    assert collector.headers[-1]["api-key"] == "secret"


def test_variables_alone_never_stop_the_server(alone) -> None:
    server = alone["other"].wait_until_ready()
    assert "traces and metrics are not sent: OTEL_EXPORTER_OTLP_PROTOCOL is grpc" in server.log()
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_without_a_collector_nothing_of_it_is_imported(alone) -> None:
    server = alone["off"].wait_until_ready()
    assert httpx.post(f"{server.url}/embed", json={"inputs": "w1"}, timeout=60).status_code == 200
    names = {line.rpartition("|")[2].strip() for line in server.log().splitlines()}
    assert "packhorse.serve.guard" in names
    assert not names & {"packhorse.serve.telemetry", "opentelemetry.sdk", "opentelemetry.sdk.trace"}
