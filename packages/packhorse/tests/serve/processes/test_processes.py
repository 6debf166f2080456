"""A server of fronts and engines: the same answers, one queue, and what happens when one dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

import packhorse
from packhorse.serve.processes import front

from .server import Load, Question, children, questions, total, wait_for

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="fronts share memory by memfd, which is Linux's"
)
TEXTS = ["w1 w2 w3", "w4 " * 20, "w5", "w6 w7 " * 8]


@pytest.fixture(scope="module")
def server(start) -> Any:
    """Two fronts and one engine."""
    return start("--fronts", "2", "--device", "cpu").wait_until_ready()


@pytest.fixture(scope="module")
def expected(checkpoint_folder) -> np.ndarray:
    return packhorse.load(checkpoint_folder, device="cpu").embed(TEXTS)


@pytest.fixture(scope="module")
def asked(checkpoint_folder) -> list[Question]:
    return questions(packhorse.load(checkpoint_folder, device="cpu"))


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


def test_results_that_a_thread_copies_are_those_of_the_library(server, checkpoint_folder) -> None:
    texts = [f"w{number} " * 508 for number in range(1, 35)]
    states = httpx.post(f"{server.url}/embed_all", json={"inputs": texts}, timeout=600).json()
    plain = [hidden.states for hidden in packhorse.load(checkpoint_folder).hidden(texts)]
    assert sum(rows.nbytes for rows in plain) > front.MAX_INLINE_BYTES
    for row, expected in zip(states, plain, strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-5)


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


def test_the_only_engine_that_is_killed_is_replaced(server, asked) -> None:
    """What happens to fronts, and to one of several engines, is in test_faults.py."""
    (victim,) = children(server.popen.pid)["engine"]
    with Load(server.port, asked) as load:
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: load.statuses[503])
        wait_for(lambda: victim not in children(server.popen.pid)["engine"])
        load.check_served()
    assert load.statuses.keys() == {200, 503}
    assert {refusal.retry_after for refusal in load.refusals} == {"5"}
    assert total(server, "packhorse_up") == 1
    assert "it is replaced" in server.log()


def test_a_client_that_leaves_takes_nothing_with_it(server, expected) -> None:
    """Ten clients send a large request each and hang up; their blocks and places come back."""
    body = {"inputs": ["w1 w2 w3 " * 15] * 32}
    data = json.dumps(body).encode()
    head = b"POST /embed_all HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    wait_for(lambda: total(server, "packhorse_in_flight") == 0)
    wait_for(lambda: total(server, "packhorse_runner_waiting_tokens") == 0)
    assert httpx.post(f"{server.url}/embed_all", json=body, timeout=60).status_code == 200


@pytest.fixture
def two_engines(start) -> Iterator[Any]:
    yield start("--devices", "cpu,cpu", "--max-queue-tokens", "700")


def test_two_engines_share_the_work_and_a_full_queue_refuses(two_engines, asked) -> None:
    server = two_engines.wait_until_ready()
    assert len(children(server.popen.pid)["engine"]) == 2
    with Load(server.port, asked, clients=16) as load:
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
    assert load.statuses.keys() <= {200, 429}
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


@pytest.mark.parametrize(
    ("settings", "kind", "cores", "fronts"),
    [
        ({}, "cpu", 64, 0),
        ({}, "cuda", 2, 0),
        ({}, "cuda", 4, 2),
        ({}, "cuda", 16, 8),
        ({}, "cuda", 128, 8),
        ({"fronts": 3}, "cpu", 2, 3),
        ({"devices": ("cpu", "cpu")}, "cpu", 2, 2),
    ],
)
def test_fronts_follow_the_cores(
    settings: dict[str, Any], kind: str, cores: int, fronts: int, monkeypatch
) -> None:
    """On machines that are not this one: with GPUs and more cores, or a quota of fewer."""
    from packhorse import device, processor
    from packhorse.serve.processes.supervisor import count_fronts
    from packhorse.serve.settings import ServeSettings

    monkeypatch.setattr(device, "choose_device", lambda name: SimpleNamespace(type=kind))
    monkeypatch.setattr(processor, "usable_cores", lambda: cores)
    assert count_fronts(ServeSettings(**settings)) == fronts


@pytest.mark.parametrize("visible", ["", "0"])
def test_the_gpu_that_torch_finds_is_found_without_it(visible: str) -> None:
    code = """
import sys
from packhorse.serve.processes.gpus import finds_gpu
found = finds_gpu("auto")
assert "torch" not in sys.modules
import torch
print(found, torch.cuda.is_available() and torch.version.hip is None)
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PACKHORSE_DEVICE": ""}
    words = [sys.executable, "-c", code]
    output = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    found, expected = output.stdout.split()
    assert found == expected
    if not visible:
        assert found == "False"


def test_settings_that_exclude_each_other(cli) -> None:
    assert "both name devices" in cli("serve", "--device", "cpu", "--devices", "cpu").err
    assert "has an empty name" in cli("serve", "--devices", "cpu,").err
    assert "are for --engine local" in cli("serve", "--engine", "ray", "--fronts", "2").err
