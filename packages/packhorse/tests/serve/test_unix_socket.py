"""A Unix socket in place of a port: who may connect, what a dead server leaves, real clients."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import packhorse
from packhorse.errors import InputError
from packhorse.serve import unix_socket
from packhorse.serve.settings import ServeSettings

TEXTS = ["w1 w2 w3", "w4"]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "serve.sock"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_is_its_owners_alone_and_goes_with_the_socket(path) -> None:
    with unix_socket.bind(path, 0o600):
        assert mode(path) == 0o600
    assert list(path.parent.iterdir()) == []
    with unix_socket.bind(path, 0o660) as bound:
        assert mode(path) == 0o660
        path.unlink()
        path.write_text("of another program")
    assert bound.fileno() == -1 and path.read_text() == "of another program"


def test_what_a_dead_server_left_is_replaced(path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with unix_socket.bind(path, 0o600) as bound:
        bound.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_server_that_loads_or_listens_is_not(path) -> None:
    with unix_socket.bind(path, 0o600):
        with pytest.raises(InputError, match="another server uses"):
            unix_socket.bind(path, 0o600)
        assert path.is_socket()
    with socket.socket(socket.AF_UNIX) as other:  # a program without our lock
        other.bind(str(path))
        other.listen()
        with pytest.raises(InputError, match="another program listens"):
            unix_socket.bind(path, 0o600)
        assert path.is_socket()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("text", "is not a socket"), ("no/folder", "No such file"), ("x" * 120, "path too long")],
)
def test_paths_that_cannot_be_used(tmp_path, name, reason) -> None:
    (tmp_path / "text").write_text("kept")
    with pytest.raises(InputError, match=reason):
        unix_socket.bind(tmp_path / name, 0o600)
    assert (tmp_path / "text").read_text() == "kept"


def test_settings() -> None:
    assert ServeSettings(unix_socket="x", host="0.0.0.0").is_local
    assert not ServeSettings(unix_socket="x", host="0.0.0.0", grpc_port=1).is_local
    for wrong in ({"unix_socket_mode": "rw-"}, {"tls_cert": "a", "tls_key": "b"}):
        with pytest.raises(InputError):
            ServeSettings(unix_socket="x", **wrong)


@pytest.fixture(scope="module", params=["one", pytest.param("fronts", marks=pytest.mark.slow)])
def server(request, start, tmp_path_factory) -> Iterator[Any]:
    fronts = [] if request.param == "one" else ["--fronts", "2"]
    if fronts and not hasattr(os, "memfd_create"):
        pytest.skip("fronts share memory by memfd, which is Linux's")
    path = tmp_path_factory.mktemp("socket") / "serve.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # a server that was killed
    words = ["--unix-socket", str(path), "--unix-socket-mode", "660", "--device", "cpu"]
    process = start(*words, *fronts).wait_until_ready()
    process.path = path
    yield process


def test_clients_are_answered(server, checkpoint_folder) -> None:
    assert mode(server.path) == 0o660 and server.port == 0
    transport = httpx.HTTPTransport(uds=str(server.path))
    # No Host rule: a browser cannot be made to come here.
    with httpx.Client(transport=transport, base_url="http://any.name", timeout=60) as client:
        vectors = client.post("/embed", json={"inputs": TEXTS}).json()
        expected = packhorse.load(checkpoint_folder, device="cpu").embed(TEXTS)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        assert client.get("/ready").status_code == 200
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    words = [curl, "-sS", "--unix-socket", str(server.path), "http://localhost/health"]
    assert '"ok"' in subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_end_removes_the_file(server) -> None:
    assert server.end(signal.SIGTERM, 60) == 0
    assert list(server.path.parent.iterdir()) == []
