"""Models that come and go in all fronts and engines."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import packhorse
from packhorse.reports import random_model

from .test_processes import children, wait_for

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="fronts share memory by memfd, which is Linux's"
)
ADMIN = {"authorization": "Bearer sesame"}
TEXTS = ["w1 w2 w3", "w4 " * 20]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    home = tmp_path_factory.mktemp("models")
    return [random_model.write("tiny", home / f"seed{seed}", seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def expected(folders) -> list[np.ndarray]:
    return [packhorse.load(folder, device="cpu").embed(TEXTS) for folder in folders]


@pytest.fixture(scope="module")
def server(start, tmp_path_factory) -> Any:
    key = tmp_path_factory.mktemp("key") / "key"
    key.touch(0o600)
    key.write_text("sesame")
    return start(
        "--fronts", "2", "--device", "cpu", "--admin-key-file", str(key)
    ).wait_until_ready()


class Clients:
    """Requests one after another, each on a connection of its own, so that all fronts get some."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, self.server.url + path, timeout=120, **options)

    def put(self, name: str, source: Path, **fields: Any) -> httpx.Response:
        body = {"name": name, "model": str(source), **fields}
        return self.ask("POST", "/admin/models", json=body, headers=ADMIN)

    def embed(self, name: str) -> httpx.Response:
        return self.ask("POST", "/v1/embeddings", json={"model": name, "input": TEXTS})

    def vectors(self, name: str) -> list[Any]:
        response = self.embed(name)
        assert response.status_code == 200, response.text
        return [row["embedding"] for row in response.json()["data"]]


def test_all_fronts_and_engines_follow(server, folders, expected) -> None:
    clients = Clients(server)
    assert clients.ask("GET", "/admin/models").status_code == 401
    added = clients.put("new", folders[0])
    assert added.status_code == 200, added.text
    for _ in range(8):
        np.testing.assert_allclose(clients.vectors("new"), expected[0], atol=1e-5)
        assert len(clients.ask("GET", "/info").json()["models"]) == 2
    assert 'packhorse_up{model="new"} 1.0' in clients.ask("GET", "/metrics").text
    broken = clients.put("new", folders[0] / "nowhere", replace=True)
    assert broken.status_code in (422, 424), broken.text
    np.testing.assert_allclose(clients.vectors("new"), expected[0], atol=1e-5)


def test_a_replacement_under_load_loses_no_request(server, folders, expected) -> None:
    clients = Clients(server)
    ended = threading.Event()
    answers: list[tuple[int, Any]] = []

    def send() -> None:
        while not ended.is_set():
            response = clients.embed("new")
            rows = [row["embedding"] for row in response.json().get("data", ())]
            answers.append((response.status_code, np.array(rows)))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(answers) > 8)
        replaced = clients.put("new", folders[1], replace=True)
        count = len(answers)
        wait_for(lambda: len(answers) > count + 8)
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert "the fingerprint is another one" in replaced.json()["warnings"][0]
    assert {status for status, _ in answers} == {200}
    which = [[np.allclose(rows, vectors, atol=1e-5) for vectors in expected] for _, rows in answers]
    assert {tuple(row) for row in which} == {(True, False), (False, True)}
    wait_for(lambda: "no request uses the former new any more" in server.log())


@pytest.mark.slow
def test_processes_that_are_replaced_have_the_same_models(server, expected) -> None:
    clients = Clients(server)
    processes = children(server.popen.pid)
    os.kill(processes["engine"][0], signal.SIGKILL)
    os.kill(processes["front"][0], signal.SIGKILL)

    def answers() -> bool:
        try:
            return clients.embed("new").status_code == 200
        except httpx.TransportError:
            return False

    def all_back() -> bool:
        now = children(server.popen.pid)
        return len(now["engine"]) == 1 and len(now["front"]) == 2 and answers()

    wait_for(all_back)
    for _ in range(8):
        np.testing.assert_allclose(clients.vectors("new"), expected[1], atol=1e-5)


def test_removed_models_are_gone_everywhere(server) -> None:
    clients = Clients(server)
    removed = clients.ask("DELETE", "/admin/models/new", headers=ADMIN)
    assert removed.status_code == 200, removed.text
    for _ in range(8):
        assert [m["name"] for m in clients.ask("GET", "/info").json()["models"]] == ["tiny"]
    last = clients.ask("DELETE", "/admin/models/tiny", headers=ADMIN)
    assert last.status_code == 422
    wait_for(lambda: server.log().count("no request uses the former new any more") == 2)
    assert server.end(timeout=60) == 0
