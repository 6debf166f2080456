"""Servers in processes of their own: started, asked, and always stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packhorse_bench import serving_servers as servers
from packhorse_bench.peers import Unserved
from packhorse_bench.serving_servers import PeerServer, ServerPlace, start, stopping

PLACE = ServerPlace(Path("model"), "cpu", "fp32", 1, 8)
# Answers on its port, ignores SIGTERM, and has started a process of its own.
STUBBORN = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
class Answer(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(200, b"")
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        bad = b"bad" in body
        self.answer(500 if bad else 200, b'{"data": [{"embedding": [%d, 1]}]}' % child.pid)
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_SECONDS", 0.3)
    command = lambda place, port: [sys.executable, "-S", "-c", STUBBORN, str(port)]  # noqa: E731
    monkeypatch.setitem(servers.SERVERS, "stubborn", command)


def is_alive(pid: int) -> bool:
    """A process that has ended and that nobody asked for is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("stubborn")
@pytest.mark.parametrize("ends", ["well", "error", "SIGTERM"])
def test_whatever_happens_it_is_stopped_with_what_it_started(ends: str, tmp_path: Path) -> None:
    running: list[PeerServer] = []
    child, before = 0, signal.getsignal(signal.SIGTERM)
    try:
        with stopping(running):
            running.append(start("stubborn", PLACE, tmp_path))
            running[0].wait()
            vectors = running[0].vectors(["a"])
            child = int(vectors[0, 0])
            assert vectors.dtype == np.float32 and is_alive(child)
            if ends == "error":
                raise ValueError("of the bench")
            if ends == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
    except (ValueError, KeyboardInterrupt):
        assert ends != "well"
    assert running[0].process.poll() is not None
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("stubborn")
def test_what_a_server_cannot_do_is_its_row(tmp_path: Path) -> None:
    running: list[PeerServer] = []
    with stopping(running):
        running.append(start("stubborn", PLACE, tmp_path))
        running[0].wait()
        with pytest.raises(Unserved, match="answers 500"):
            running[0].vectors(["bad"])
        running[0].process.kill()
        running[0].process.wait()
        with pytest.raises(Unserved, match="stopped answering"):
            running[0].vectors(["a"])


def test_one_that_ends_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import sys; sys.exit('no such model')"
    monkeypatch.setitem(servers.SERVERS, "dying", lambda *_: [sys.executable, "-S", "-c", code])
    running = [start("dying", PLACE, tmp_path)]
    with stopping(running), pytest.raises(Unserved, match="ended with 1: no such model"):
        running[0].wait()


def test_infinity_where_it_is_and_where_it_is_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unserved, match="not installed; `make peers`"):
        servers.infinity(PLACE, 1)
    absent = ServerPlace(Path("model"), "cpu", "fp32", 1, 8, Path("nowhere/infinity_emb"))
    with pytest.raises(Unserved, match="there is no nowhere/infinity_emb"):
        servers.infinity(absent, 1)
    servers.INFINITY.parent.mkdir(parents=True)
    servers.INFINITY.touch()
    command = servers.infinity(PLACE, 1234)
    assert command[0] == str(tmp_path / servers.INFINITY)
    assert "1234" in command and "float32" in command and "torch" in command
    fused = servers.infinity(replace(PLACE, onnx=tmp_path / "onnx"), 1234)
    assert "optimum" in fused and fused[fused.index("--model-id") + 1] == "."
    assert fused[fused.index("--pooling-method") + 1] == "mean"


def test_no_key_and_no_setting_of_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHORSE_API_KEY", "secret")
    monkeypatch.setenv("PACKHORSE_SERVE_PORT", "1")
    monkeypatch.setenv("PACKHORSE_CACHE", "here")
    variables = servers._environment(3)
    assert variables["OMP_NUM_THREADS"] == "3" and variables["PACKHORSE_CACHE"] == "here"
    assert not {"PACKHORSE_API_KEY", "PACKHORSE_SERVE_PORT"} & set(variables)
