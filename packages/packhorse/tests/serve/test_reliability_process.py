"""Scenarios of docs/reliability.md about a process: no network, a sudden end, hours of load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

SOAK = Path(__file__).with_name("soak.py")
REQUESTS = Path(__file__).with_name("soak_requests.py")
# Records and refuses all connections and name lookups, and checks at once that it does.
SHUT = """
import socket
def hook(event, given):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        print("refused", event, file=sys.stderr, flush=True)
        raise PermissionError(event)
sys.addaudithook(hook)
try:
    socket.create_connection(("127.0.0.1", 9))
except PermissionError:
    print("the door is shut", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def shut(start) -> Any:
    """A server without network access."""
    return start("--receive-seconds", "1", before=SHUT).wait_until_ready()


def test_a_server_that_can_call_nobody_serves(shut) -> None:
    """From startup on; what requests could do is tested in test_reliability.py."""
    address = "http://169.254.169.254/latest/meta-data"
    with httpx.Client(base_url=shut.url) as client:
        assert client.post("/embed", json={"inputs": ["w1 w2", address]}).status_code == 200
        named = {"input": "w1", "model": address}
        assert client.post("/v1/embeddings", json=named).json()["model"] == "tiny"
        for path in ("/ready", "/metrics", "/info", "/"):
            assert client.get(path).status_code == 200, path
    before, _, after = shut.log().partition("the door is shut")
    assert before.startswith("refused"), "the control was not refused"
    assert "refused" not in after


def test_a_client_does_not_pay_for_time_that_the_server_did_not_get(shut) -> None:
    """Its request arrived in time, but the server was suspended or starved."""
    body = json.dumps({"inputs": "w1 w2"}).encode()
    headers = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", shut.port), timeout=10) as patient:
        time.sleep(0.1)
        shut.popen.send_signal(signal.SIGSTOP)
        patient.sendall(headers + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(1.5)
        shut.popen.send_signal(signal.SIGCONT)
        assert patient.recv(100).startswith(b"HTTP/1.1 200")


def test_a_sudden_end_leaves_nothing_behind(shut) -> None:
    """The last test of that process: no child survives, and the port is free."""
    tasks = Path(f"/proc/{shut.popen.pid}/task")
    if not (tasks / str(shut.popen.pid) / "children").exists():
        pytest.skip("the kernel does not tell")
    assert not any((task / "children").read_text() for task in tasks.iterdir())
    with socket.create_connection(("127.0.0.1", shut.port)) as open_one:
        assert shut.end(signal.SIGKILL) == -signal.SIGKILL
        # If it was not accepted yet, the kernel resets it.
        with contextlib.suppress(ConnectionResetError):
            assert open_one.recv(1) == b""
    again = socket.socket()
    again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    again.bind(("127.0.0.1", shut.port))
    again.listen()
    again.close()


def sent(*words: str) -> tuple[int, dict[str, Any]]:
    """Send requests to fronts; returns exit code and figures. PACKHORSE_SOAK_REQUESTS: so many."""
    count = os.environ.get("PACKHORSE_SOAK_REQUESTS", "20000")
    command = [sys.executable, str(REQUESTS), "--requests", count, "--fronts", "2", *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell")
def test_fronts_and_an_engine_do_not_grow() -> None:
    code, figures = sent()
    assert (code, figures["wrong"]) == (0, [])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell")
def test_fronts_that_lose_two_kibibytes_a_request_are_noticed(monkeypatch) -> None:
    """The control."""
    monkeypatch.delenv("PACKHORSE_SOAK_REQUESTS", raising=False)
    code, figures = sent("--leak", "2048")
    assert code == 1
    assert any("memory grew" in message for message in figures["wrong"])


def soaked(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the script; returns its exit code and figures. PACKHORSE_SOAK_SECONDS: its length."""
    seconds = float(os.environ.get("PACKHORSE_SOAK_SECONDS", "60"))
    out = folder / "soak.json"
    command = [sys.executable, str(SOAK), "--seconds", str(seconds), "--out", str(out), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3 * seconds + 600)
    assert out.exists(), ran.stderr
    return ran.returncode, json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel does not tell")
def test_soak(tmp_path: Path) -> None:
    code, figures = soaked(tmp_path)
    assert (code, figures["wrong"]) == (0, [])
    assert figures["statuses"]["burst"].get("429"), "there was no overload"
    assert figures["statuses"]["poison"].get("424"), "there was no poison"


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel does not tell")
def test_a_leak_of_a_kibibyte_a_request_is_noticed(tmp_path: Path, monkeypatch) -> None:
    """The control: a leak is noticed."""
    monkeypatch.delenv("PACKHORSE_SOAK_SECONDS", raising=False)
    code, figures = soaked(tmp_path, "--leak", "1024")
    assert code == 1
    assert any("bytes per request" in message for message in figures["wrong"])
