"""The port for operators: three routes without a key, nothing else, in one process and in many."""

from __future__ import annotations

import os
import re
import signal
import socket
from functools import partial
from typing import Any

import httpx
import pytest

from .processes.test_processes import children, wait_for

KEY = {"authorization": "Bearer sesame"}
ROUTES = ("/health", "/ready", "/metrics")


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


class Operated:
    """A server with a key, and its second port."""

    def __init__(self, start: Any, *arguments: str) -> None:
        self.port = free_port()
        port = str(self.port)
        environment = {"PACKHORSE_API_KEY": "sesame"}
        words = ("--metrics-port", port, "--device", "cpu", "--log-requests", *arguments)
        process = start(*words, **environment)
        self.process = process.wait_until_ready()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=60, **options)


@pytest.fixture(scope="module")
def one(start) -> Operated:
    return Operated(start)


@pytest.fixture(scope="module")
def fronts(start) -> Operated:
    return Operated(start, "--fronts", "2")


@pytest.fixture(params=["one", "fronts"])
def operated(request) -> Operated:
    if request.param == "fronts" and not hasattr(os, "memfd_create"):
        pytest.skip("fronts share memory by memfd, which is Linux's")
    return request.getfixturevalue(request.param)


def test_three_routes_without_the_key(operated) -> None:
    url = operated.process.url
    assert httpx.get(f"{url}/metrics", timeout=60).status_code == 401
    text = {"inputs": "w1 w2"}
    assert httpx.post(f"{url}/embed", json=text, headers=KEY, timeout=60).status_code == 200
    for path in ROUTES:
        response = operated.get(path)
        assert (response.status_code, "x-request-id" in response.headers) == (200, True), path
    assert httpx.head(f"http://127.0.0.1:{operated.port}/ready", timeout=60).status_code == 200
    page = operated.get("/metrics").text
    main = httpx.get(f"{url}/metrics", headers=KEY, timeout=60).text
    for line in (
        'packhorse_requests_total{route="/embed",status="200"} 1.0',
        'packhorse_requests_total{route="/ready",status="200"}',
        'packhorse_up{model="tiny"} 1.0',
        "te_queue_size 0.0",
    ):
        assert line in page and line in main, line


def test_ids_are_told_and_logged(operated) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    ids = {"x-request-id": "Req-1", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    url = f"{operated.process.url}/embed"
    text = {"inputs": "w1 w2"}
    response = httpx.post(url, json=text, headers={**KEY, **ids}, timeout=60)
    assert response.headers["x-request-id"] == "Req-1"
    span = re.fullmatch(rf"00-{trace}-([0-9a-f]{{16}})-01", response.headers["traceparent"])
    assert span is not None
    line = f" request_id=Req-1 trace_id={trace} span_id={span[1]}\n"
    wait_for(lambda: line in operated.process.log())
    operated.get("/health", headers={"x-request-id": "Req-2"})
    wait_for(lambda: " request_id=Req-2 " in operated.process.log())


def test_nothing_else(operated) -> None:
    url = f"http://127.0.0.1:{operated.port}"
    for path in ("/", "/info", "/engine", "/v1/models", "/openapi.json", "/docs", "/health/"):
        assert operated.get(path, headers=KEY).status_code == 404, path
    for path in ("/embed", "/v1/embeddings", "/health", "/metrics"):
        for content in (b'{"inputs":"w1"}', b"{"):
            status = httpx.post(
                url + path, content=content, headers={**KEY, "content-type": "application/json"}
            ).status_code
            assert status in (404, 405, 413), path
    # A page under a name of its own (DNS rebinding) reads nothing.
    assert operated.get("/metrics", headers={"host": "evil.example"}).status_code == 403


def test_connections_and_headers_are_bounded(operated) -> None:
    many = httpx.get(
        f"http://127.0.0.1:{operated.port}/health", headers={"x": "y" * 9000}, timeout=60
    )
    assert many.status_code == 431
    held = [socket.create_connection(("127.0.0.1", operated.port), 60) for _ in range(80)]
    try:
        closed = 0
        for connection in held[::-1]:
            connection.settimeout(60 if not closed else 5)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            try:
                closed += not connection.recv(1)
            except ConnectionError:
                closed += 1
        assert closed >= 16
    finally:
        for connection in held:
            connection.close()
    wait_for(lambda: _is_healthy(operated))


def _is_healthy(operated: Operated) -> bool:
    try:
        return operated.get("/health").status_code == 200
    except httpx.TransportError:  # the last connections are still being closed
        return False


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="fronts need memfd")
def test_the_port_answers_while_fronts_are_stopped_and_dead(fronts) -> None:
    before = children(fronts.process.popen.pid)["front"]
    os.kill(before[0], signal.SIGSTOP)
    try:
        assert fronts.get("/ready").status_code == 200  # the other answers
        for pid in before[1:]:
            os.kill(pid, signal.SIGSTOP)
        assert fronts.get("/health").status_code == 200  # the processes are there
        assert fronts.get("/ready").status_code == 503  # and nobody answers
        assert "packhorse_up" in fronts.get("/metrics").text
    finally:
        for pid in before:
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: fronts.get("/health").status_code == 503)
    wait_for(lambda: fronts.get("/ready").status_code == 200)
    assert set(children(fronts.process.popen.pid)["front"]).isdisjoint(before)


HOLD = """
import asyncio, os
from packhorse.serve import life
drain = life.DrainingServer._drain
async def held(self):
    while os.path.exists({file!r}):
        await asyncio.sleep(0.01)
    await drain(self)
life.DrainingServer._drain = held
"""


def test_draining_is_told_until_the_end(start, tmp_path) -> None:
    """Requests in flight seem to be there as long as the file is."""
    (file := tmp_path / "held").touch()
    server = Operated(partial(start, before=HOLD.format(file=str(file))))
    server.process.popen.send_signal(signal.SIGTERM)
    wait_for(lambda: server.get("/health").status_code == 503)
    assert (server.get("/ready").status_code, server.get("/metrics").status_code) == (503, 200)
    file.unlink()
    assert server.process.popen.wait(60) == 0
    with pytest.raises(httpx.TransportError):
        server.get("/health")


def test_a_port_in_use_is_reported_before_models_are_loaded(cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = cli("serve", "--port", "0", "--metrics-port", port, "--model", "no/such/model")
        assert f"cannot listen on 127.0.0.1:{port}" in result.err
    assert "must differ" in cli("serve", "--port", "9", "--metrics-port", "9").err
    assert "needs --metrics-port" in cli("serve", "--metrics-host", "127.0.0.1").err
