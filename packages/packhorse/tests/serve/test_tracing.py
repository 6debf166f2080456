"""Request ids and trace context: what is taken over, what is made anew, and where it is told."""

from __future__ import annotations

import io
import json
import re
import socket
from typing import Any

import pytest

from packhorse.serve import logs
from packhorse.serve.settings import ServeSettings
from packhorse.serve.tracing import CURRENT, read_ids

from .test_app import _own_logging
from .test_ingress import front

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"  # the example of the W3C's recommendation
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
IDS = {"x-request-id": "Req_1.2:3", "traceparent": TRACEPARENT}


def read(*headers: tuple[str, str]) -> Any:
    return read_ids([(name.encode(), value.encode()) for name, value in headers])


@pytest.mark.parametrize("value", ["a", "x" * 128, "Root=1-67891233-abcdef012345", "a.b_c:d/e+f@g"])
def test_a_request_id_is_kept(value: str) -> None:
    assert read(("x-request-id", value)).request == value


@pytest.mark.parametrize(
    "value", ["", "x" * 129, "a b", "a\tb", 'a"b', "a\\b", "é", "a\x7fb", "a;b"]
)
def test_a_request_id_that_no_log_line_should_have_is_replaced(value: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", read(("x-request-id", value)).request)


def test_two_request_ids_are_none() -> None:
    assert read(("x-request-id", "a"), ("x-request-id", "b")).request not in ("a", "b")


def test_a_child_of_the_clients_span() -> None:
    ids = read(("traceparent", TRACEPARENT))
    assert (ids.trace, ids.parent, ids.sampled) == (TRACE, PARENT, True)
    assert ids.span != PARENT and ids.traceparent == f"00-{TRACE}-{ids.span}-01"
    assert read(("traceparent", TRACEPARENT[:-1] + "0")).traceparent.endswith("-00")
    assert read(("traceparent", TRACEPARENT[:-2] + "ff")).traceparent.endswith("-01")


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    for header in (f"01-{TRACE}-{PARENT}-01", f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be"):
        assert read(("traceparent", header)).trace == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        TRACEPARENT + "-",
        TRACEPARENT + "-extra",
        f"ff-{TRACE}-{PARENT}-01",
        f"0-{TRACE}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01.rest",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-0g",
        f"00_{TRACE}_{PARENT}_01",
        f"00-{TRACE}-{PARENT}-01, 00-{TRACE}-{PARENT}-01",
    ],
)
def test_an_invalid_header_begins_a_new_trace(header: str) -> None:
    ids = read(("traceparent", header))
    assert ids.trace != TRACE and re.fullmatch("[0-9a-f]{32}", ids.trace)
    assert (ids.parent, ids.sampled) == ("", False)
    assert read(("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)).trace != TRACE


def test_ids_are_never_the_same() -> None:
    many = [read() for _ in range(100)]
    assert len({ids.request for ids in many}) == len({ids.trace for ids in many}) == 100


@pytest.mark.parametrize("place", ["one process", "replicas"])
@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/embed", {"json": {"inputs": "the cat"}}, 200),
        ("POST", "/embed", {"json": {"inputs": ""}}, 400),
        ("POST", "/embed", {"json": {"inputs": 3}}, 422),
        ("POST", "/embed", {"content": b"{", "headers": {"content-type": "text/plain"}}, 415),
        ("GET", "/nowhere", {}, 404),
        ("GET", "/health", {}, 200),
        ("GET", "/metrics", {"headers": {"host": "evil.example"}}, 403),
    ],
)
def test_every_response_has_the_ids(
    served, place: str, method: str, path: str, options: Any, status: int
) -> None:
    server = served if place == "one process" else front(served)
    options = {**options, "headers": {**options.get("headers", {}), **IDS}}
    response = server.ask(method, path, **options)
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == [IDS["x-request-id"]]
    (parent,) = response.headers.get_list("traceparent")
    assert parent.startswith(f"00-{TRACE}-") and PARENT not in parent
    del options["headers"]["x-request-id"], options["headers"]["traceparent"]
    assert re.fullmatch("[0-9a-f]{32}", server.ask(method, path, **options).headers["x-request-id"])


def test_refusals_of_the_guard_and_of_cors_have_the_ids(serving) -> None:
    served = serving(keys=("sesame",), cors_origin=("https://a.org",))
    assert (
        served.post("/embed", {"inputs": "a"}, headers=IDS).headers["x-request-id"] == "Req_1.2:3"
    )
    preflight = {"origin": "https://a.org", "access-control-request-method": "POST", **IDS}
    response = served.ask("OPTIONS", "/embed", headers=preflight)
    assert (response.status_code, response.headers["x-request-id"]) == (200, "Req_1.2:3")
    served.guard.draining = True
    key = {"authorization": "Bearer sesame"}
    response = served.post("/embed", {"inputs": "a"}, headers={**IDS, **key})
    assert (response.status_code, response.headers["x-request-id"]) == (503, "Req_1.2:3")


def test_bytes_that_are_no_request_get_an_id(served, listen) -> None:
    with socket.create_connection(("127.0.0.1", listen(served)), timeout=60) as client:
        client.sendall(b"NO HTTP\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\ntraceparent: 00-", answer)


@pytest.mark.parametrize("place", ["one process", "replicas"])
@pytest.mark.parametrize("form", ["plain", "json"])
def test_every_log_line_of_a_request_has_the_ids(serving, place, form, monkeypatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with _own_logging():
        logs.set_up(ServeSettings(log_format=form, log_requests=True, log_level="debug"))
        served = serving()
        server = served if place == "one process" else front(served)
        server.post("/v1/embeddings", {"input": "the cat " * 40}, headers=IDS)  # a warning too
        monkeypatch.setattr(served.models, "find", lambda *arguments: {}["brown"])
        server.post("/embed", {"inputs": "a"}, headers=IDS)  # and an error
        logs.LOGGER.info("of no request")
    assert CURRENT.get() is None
    lines = out.getvalue().splitlines()
    if form == "json":
        records = [json.loads(line) for line in lines]
        assert len(records) >= 5
        for record in records[:-1]:
            assert (record["request_id"], record["trace_id"]) == ("Req_1.2:3", TRACE), record
            assert re.fullmatch("[0-9a-f]{16}", record["span_id"])
        assert "request_id" not in records[-1]
    else:
        log_lines = [line for line in lines if re.match(r"\d\d:\d\d:\d\d ", line)]
        assert len(log_lines) >= 5
        for line in log_lines[:-1]:
            assert f" request_id=Req_1.2:3 trace_id={TRACE} span_id=" in line, line
        assert "request_id" not in log_lines[-1]
