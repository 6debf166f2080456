"""A server of fronts and engines: the same answers, one queue, and what happens when one dies."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import packhorse

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="fronts share memory by memfd, which is Linux's"
)
TEXTS = ["w1 w2 w3", "w4 " * 20, "w5", "w6 w7 " * 8]


def children(pid: int) -> dict[str, list[int]]:
    """The fronts and engines of a server, by kind."""
    kinds: dict[str, list[int]] = {"front": [], "engine": []}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = re.search(r"PPid:\s+(\d+)", (folder / "status").read_text())
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if parent and int(parent[1]) == pid and b"packhorse.serve.processes" in words:
                kinds[words[-3].decode()].append(int(folder.name))
    return kinds


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def server(start) -> Any:
    """Two fronts and one engine."""
    return start("--fronts", "2", "--device", "cpu").wait_until_ready()


@pytest.fixture(scope="module")
def expected(checkpoint_folder) -> np.ndarray:
    return packhorse.load(checkpoint_folder, device="cpu").embed(TEXTS)


class Load:
    """Clients that send the texts again and again; counts statuses and wrong vectors."""

    def __init__(self, url: str, expected: np.ndarray, clients: int = 8) -> None:
        self.url = url
        self.expected = expected
        self.statuses: Counter[Any] = Counter()
        self.wrong = 0
        self.retry_after: set[str] = set()
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self._send, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        wait_for(lambda: self.statuses[200] >= 20)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "a request hangs"

    def _send(self) -> None:
        while not self.stopped.is_set():
            with httpx.Client(base_url=self.url, timeout=60) as client:
                try:
                    self._send_until_lost(client)
                except httpx.TransportError:
                    self.statuses["lost"] += 1

    def _send_until_lost(self, client: httpx.Client) -> None:
        while not self.stopped.is_set():
            response = client.post("/embed", json={"inputs": TEXTS})
            self.statuses[response.status_code] += 1
            if response.status_code == 200:
                self.wrong += not np.allclose(response.json(), self.expected, atol=1e-5)
            else:
                self.retry_after.add(response.headers.get("retry-after", ""))
                time.sleep(0.01)


def test_answers_are_those_of_the_library(server, expected, checkpoint_folder) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        response = client.post("/embed", json={"inputs": TEXTS})
        np.testing.assert_allclose(response.json(), expected, atol=1e-5)
        model = packhorse.load(checkpoint_folder, device="cpu")
        assert response.headers["x-packhorse-fingerprint"] == model.fingerprint
        assert client.get("/info").json()["models"][0]["fingerprint"] == model.fingerprint
        states = client.post("/embed_all", json={"inputs": TEXTS[:2]}).json()
        plain = model.hidden(TEXTS[:2])
        for row, hidden in zip(states, plain, strict=True):
            np.testing.assert_allclose(row, hidden.states, atol=1e-5)
        late = {"input": TEXTS[:2], "late_chunking": True}
        chunks = client.post("/v1/embeddings", json=late).json()["data"]
        vectors = model.embed(TEXTS[:2], late_chunking=True)
        np.testing.assert_allclose([row["embedding"] for row in chunks], vectors, atol=1e-5)
        raw = client.post("/embed", json={"inputs": TEXTS, "normalize": False}).json()
        np.testing.assert_allclose(
            raw / np.linalg.norm(raw, axis=1, keepdims=True), expected, atol=1e-5
        )
        assert client.post("/embed", json={"inputs": ""}).status_code == 400
        for path in ("/ready", "/health", "/info", "/engine", "/"):
            assert client.get(path).status_code == 200, path


def test_truncation_is_told_by_any_front(server, checkpoint_folder) -> None:
    model = packhorse.load(checkpoint_folder, device="cpu")
    texts = ["w1 w2 " * 400, "w5"]
    before = total(server, "packhorse_truncated_inputs_total")
    for _ in range(4):  # each with a connection of its own, and so maybe to the other front
        response = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}, timeout=60)
        assert response.headers["x-packhorse-truncated"] == "1"
        vectors = [row["embedding"] for row in response.json()["data"]]
        expected = model.embed(texts, long="truncate")
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert total(server, "packhorse_truncated_inputs_total") == before + 4


def total(server: Any, name: str) -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_fronts_share_one_queue_and_one_set_of_metrics(server, expected) -> None:
    requests = 'packhorse_requests_total{route="/embed",status="200"}'
    before = total(server, requests)
    texts = total(server, "packhorse_runner_answered_total")

    def post(_: int) -> Any:
        # A connection of its own, so that either front may accept it.
        return httpx.post(f"{server.url}/embed", json={"inputs": TEXTS}, timeout=60).json()

    with ThreadPoolExecutor(8) as pool:
        for vectors in pool.map(post, range(64)):
            np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert total(server, requests) == before + 64
    assert total(server, "packhorse_runner_answered_total") == texts + 64 * len(TEXTS)
    (engine,) = httpx.get(f"{server.url}/engine", timeout=60).json()["models"]
    lengths = [len(row) for batch in engine["batches"] for row in batch["rows"]]
    assert max(lengths) > len(TEXTS), "no batch held the texts of two requests"


def test_a_front_that_is_killed_is_replaced(server, expected) -> None:
    requests = 'packhorse_requests_total{route="/embed",status="200"}'
    before = total(server, requests)
    victim, survivor = children(server.popen.pid)["front"]
    with Load(server.url, expected) as load:
        os.kill(victim, signal.SIGKILL)
        fronts = wait_for(
            lambda: [pid for pid in children(server.popen.pid)["front"] if pid != victim][1:]
        )
        answered = load.statuses[200]
        wait_for(lambda: load.statuses[200] > answered + 20)
    assert load.wrong == 0
    # Clients of the other front noticed nothing; the dead one's lost their connections.
    assert load.statuses.keys() <= {200, "lost"} and load.statuses["lost"] <= 16
    assert survivor in children(server.popen.pid)["front"] and fronts
    assert total(server, requests) >= before, "a counter went back"
    wait_for(lambda: total(server, "packhorse_in_flight") == 0)


def test_an_engine_that_is_killed_is_replaced(server, expected) -> None:
    (victim,) = children(server.popen.pid)["engine"]
    with Load(server.url, expected) as load:
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: load.statuses[503])
        answered = load.statuses[200]
        wait_for(lambda: load.statuses[200] > answered + 20)
    assert load.wrong == 0
    assert load.statuses.keys() <= {200, 503}
    assert load.retry_after == {"5"}
    assert total(server, "packhorse_up") == 1
    assert children(server.popen.pid)["engine"] not in ([], [victim])
    assert "it is replaced" in server.log()


def test_a_client_that_leaves_takes_nothing_with_it(server, expected) -> None:
    """Ten clients send a large request each and hang up; their blocks and places come back."""
    body = {"inputs": ["w1 w2 w3 " * 15] * 32}
    for _ in range(10):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/embed_all", json=body, timeout=httpx.Timeout(60, read=0.001))
    wait_for(lambda: total(server, "packhorse_in_flight") == 0)
    wait_for(lambda: total(server, "packhorse_runner_waiting_tokens") == 0)
    assert httpx.post(f"{server.url}/embed_all", json=body, timeout=60).status_code == 200


def test_it_drains_and_leaves_no_process(server, expected) -> None:
    """The last test of this server."""
    everyone = children(server.popen.pid)
    with Load(server.url, expected) as load:
        server.popen.send_signal(signal.SIGTERM)
        wait_for(lambda: load.statuses["lost"])
        load.stopped.set()
    assert server.popen.wait(60) == 0
    assert load.wrong == 0 and load.statuses.keys() <= {200, 503, "lost"}
    for pid in (*everyone["front"], *everyone["engine"]):
        assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def two_engines(start) -> Iterator[Any]:
    yield start("--devices", "cpu", "--devices", "cpu", "--max-queue-tokens", "700")


def test_two_engines_share_the_work_and_a_full_queue_refuses(two_engines, expected) -> None:
    server = two_engines.wait_until_ready()
    assert len(children(server.popen.pid)["engine"]) == 2
    with Load(server.url, expected, clients=16) as load:
        both = (
            'packhorse_runner_answered_total{engine="0"',
            'packhorse_runner_answered_total{engine="1"',
        )
        wait_for(lambda: all(total(server, name) > 0 for name in both))
        body = {"inputs": ["w1 " * 40] * 32}

        def statuses() -> set[int]:
            """What twelve large requests at once get; the queue holds half of one."""

            def post(_: int) -> int:
                return httpx.post(f"{server.url}/embed", json=body, timeout=60).status_code

            return set(pool.map(post, range(12)))

        with ThreadPoolExecutor(12) as pool:
            wait_for(lambda: statuses() == {200, 429})
    assert load.wrong == 0 and load.statuses[200] and load.statuses.keys() <= {200, 429}
    # A supervisor that is gone takes everyone with it.
    everyone = children(server.popen.pid)
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    pids = (*everyone["front"], *everyone["engine"])
    wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))


def test_what_cannot_start_says_why_in_one_line(start, tmp_path) -> None:
    process = start("--fronts", "1", "--model", str(tmp_path / "nothing"))
    assert process.popen.wait(120) != 0
    log = process.log()
    assert "nothing" in log and "Traceback" not in log


def test_a_signal_while_models_are_loaded_ends_it_at_once(start) -> None:
    process = start("--fronts", "1", "--device", "cpu")
    wait_for(lambda: children(process.popen.pid)["engine"])
    everyone = children(process.popen.pid)["engine"]
    assert process.end(signal.SIGTERM, timeout=60) == 0
    wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in everyone))


def test_another_model_is_not_served_under_the_same_name() -> None:
    from packhorse.errors import CheckpointError
    from packhorse.serve.processes.supervisor import _check_same

    model: dict[str, Any] = {"name": "tiny", "place": 0, "outputs": {}}
    model["fingerprint"] = {"weights": "a", "dtype": "fp32"}
    _check_same([model], [dict(model)])
    other = {**model, "fingerprint": {"weights": "b", "dtype": "fp32"}}
    with pytest.raises(CheckpointError, match="its weights differs"):
        _check_same([model], [other])
    with pytest.raises(CheckpointError, match="other outputs"):
        _check_same([model], [{**model, "outputs": {"embed": [3]}}])
    with pytest.raises(CheckpointError, match="models were changed"):
        _check_same([model], [{**model, "place": 1}])


def test_an_engine_that_is_being_replaced_is_down_in_the_metrics() -> None:
    from packhorse.serve.metrics import merged_page
    from packhorse.serve.processes.supervisor import Supervisor
    from packhorse.serve.settings import ServeSettings

    unused: Any = None
    supervisor = Supervisor(ServeSettings(devices=("cpu", "cpu")), unused, unused, 1)
    supervisor.models = [{"name": "tiny"}]
    page = merged_page([supervisor._down(1)]).decode()
    assert 'packhorse_up{engine="1",model="tiny"} 0.0' in page


def test_one_device_without_fronts_is_that_device(start) -> None:
    process = start("--devices", "cpu").wait_until_ready()
    assert children(process.popen.pid) == {"front": [], "engine": []}
    assert httpx.get(f"{process.url}/info").json()["models"][0]["device"] == "cpu"
    assert process.end() == 0


def test_settings_that_exclude_each_other(cli) -> None:
    assert "both name devices" in cli("serve", "--device", "cpu", "--devices", "cpu").err
    assert "are for --engine local" in cli("serve", "--engine", "ray", "--fronts", "2").err
