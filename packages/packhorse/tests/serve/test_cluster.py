"""Replicas on a real Ray cluster of two nodes, all on 127.0.0.1; the server is on the head.

Everything is tested from outside: the cluster is one process (tests/data/ray_nodes.py), the server
another. Ray must not be imported here: it reads environment variables at import, and other tests
set others.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import InputError, MissingExtra
from packhorse.serve import cluster
from packhorse.serve.settings import ServeSettings

from .conftest import Process

HEAD = {"CPU": 4.0}
SECOND = {"CPU": 6.0, "memory": 1.0}
KEY = {"authorization": "Bearer sesame"}
SECONDS = 60.0  # timeout for what takes a few seconds


# Without Ray -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "cpus"),
    [
        ({}, 6),
        ({"replicas": 2}, 4),
        ({"replicas": 3}, 3),
        ({"replicas": 2, "max_replicas": 5}, 2),
        ({"replicas": 10}, 1),
        ({"replicas": 99}, 1),  # the cluster may grow
        ({"replicas": 2, "threads": 3}, 3),
    ],
)
def test_each_replica_has_its_share_of_the_cpus(settings: dict[str, int], cpus: int) -> None:
    options = cluster.deployment_options(ServeSettings(engine="ray", **settings), [HEAD, SECOND])  # type: ignore[arg-type]
    assert options["ray_actor_options"] == {"num_cpus": cpus}
    assert ("autoscaling_config" in options) == ("max_replicas" in settings)


def test_or_a_gpu() -> None:
    one_gpu = {"num_cpus": 1, "num_gpus": 1}
    on = {**HEAD, "GPU": 2.0}
    assert (
        cluster.deployment_options(ServeSettings(engine="ray"), [on])["ray_actor_options"]
        == one_gpu
    )
    assert (
        cluster.deployment_options(ServeSettings(engine="ray", device="cuda"), [])[
            "ray_actor_options"
        ]
        == one_gpu
    )
    forced = cluster.deployment_options(ServeSettings(engine="ray", device="cpu"), [on])
    assert forced["ray_actor_options"] == {"num_cpus": 4}
    with pytest.raises(InputError, match="Ray chooses"):
        cluster.deployment_options(ServeSettings(engine="ray", device="cuda:1"), [on])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 2}, "need --engine ray"),
        ({"ray_address": "192.0.2.1:6379"}, "need --engine ray"),
        ({"engine": "ray", "replicas": 3, "max_replicas": 2}, "at least replicas"),
    ],
)
def test_what_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServeSettings(**settings)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(MissingExtra, match=r"packhorse\[cluster\]"),
        cluster.cluster_app(ServeSettings()),
    ):
        pass


def test_a_replica_whose_engine_died_ends(served, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its requests are sent to another replica; until then it answers."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    replica = cluster.Replica.__new__(cluster.Replica)
    replica.app = served.guard.app
    replica.models = served.models
    question = cluster.ForwardedRequest("GET", "/info")
    assert asyncio.run(replica.answer(question)).status == 200
    replica.check_health()
    assert not ended
    dead = cluster.Replica.__new__(cluster.Replica)
    dead.app = served.guard.app
    dead.models = type("Dead", (), {"alive": False})()
    asyncio.run(dead.answer(question))
    assert ended == [cluster.EXIT_ENGINE_DIED]
    with pytest.raises(cluster.RunnerStopped):
        dead.check_health()


@pytest.mark.slow
def test_only_what_means_a_lost_replica_is_asked_again() -> None:
    """In a separate process, because it imports Ray."""
    process = subprocess.run([sys.executable, "-c", UNDERSTOOD], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


UNDERSTOOD = """
from ray import exceptions as e
from ray.serve.exceptions import BackPressureError
from packhorse.serve.cluster import _translated_errors

def kind(error):
    try:
        with _translated_errors():
            raise error
    except BaseException as raised:
        return type(raised).__name__

died = [e.ActorDiedError(), e.WorkerCrashedError(), e.TaskCancelledError()]
died += [e.ObjectLostError("ff", "", ""), e.OwnerDiedError("ff", "", "")]
assert [kind(each) for each in died] == ["ReplicaDied"] * len(died)
away = [e.ActorUnavailableError("gone", None), BackPressureError(1, 1)]
assert [kind(each) for each in away] == ["ReplicaAway"] * len(away)
assert kind(ZeroDivisionError()) == "ZeroDivisionError"
ours = e.RayTaskError("ask", "...", ZeroDivisionError()).as_instanceof_cause()
assert kind(ours) == "RayTaskError(ZeroDivisionError)"
"""


# On two nodes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nodes:
    """A cluster in another process, which takes commands on its stdin."""

    process: subprocess.Popen[str]
    address: str
    variables: dict[str, str]

    def say(self, line: str) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no ray: pip install 'packhorse[cluster]'")
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
    variables |= {"RAY_AUTH_TOKEN": os.urandom(32).hex(), "OMP_NUM_THREADS": "1"}
    quick = {"RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "500"}
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need short paths
    script = Path(__file__).parents[1] / "data" / "ray_nodes.py"
    with subprocess.Popen(
        [sys.executable, script, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables, **quick},
    ) as process:
        assert process.stdin and process.stdout
        try:
            yield Nodes(process, process.stdout.readline().strip(), variables)
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def front(nodes: Nodes, start) -> Iterator[Callable[..., Process]]:
    """Start a server over the cluster."""
    begun: list[Process] = []

    def begin(*words: str, before: str = "") -> Process:
        flags = ["--engine", "ray", "--ray-address", nodes.address, *words]
        server = start(*flags, before=before, PACKHORSE_API_KEY="sesame", **nodes.variables)
        begun.append(server)
        return server.wait_until_ready()

    yield begin
    for process in begun:
        assert process.end(timeout=SECONDS) == 0, process.log()


def replicas(server: Process) -> list[int]:
    """Return the process ids of a server's replicas."""
    title = f"ray::ServeReplica:packhorse-{socket.gethostname()}-{server.popen.pid}:"
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            pids += [int(entry.parent.name)] if entry.read_text().startswith(title) else []
        except OSError:
            continue
    return sorted(pids)


def ups(server: Process) -> int:
    """Return how many replicas report figures."""
    import httpx

    page = httpx.get(f"{server.url}/metrics", headers=KEY, timeout=SECONDS).text
    return page.count('packhorse_up{model="tiny",replica="')


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def load(server: Process, least: int, event: Callable[[], Any], clients: int = 16) -> Counter[int]:
    """Count statuses of requests before, during and after an event, `least` of 200 each time."""
    import httpx

    statuses: Counter[int] = Counter()

    async def ask(client: httpx.AsyncClient, on: Callable[[], bool]) -> None:
        while on():
            body = {"inputs": ["a text", "another one " * 20]}
            response = await client.post(f"{server.url}/embed", json=body, headers=KEY)
            statuses[response.status_code] += 1
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                await asyncio.sleep(0.02)

    async def go() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=SECONDS, limits=limits) as client:
            on = [True]
            tasks = [asyncio.ensure_future(ask(client, lambda: on[0])) for _ in range(clients)]
            for work in (event, lambda: None):
                goal = statuses[200] + least
                while statuses[200] < goal and not any(task.done() for task in tasks):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(work)
            on[0] = False
            await asyncio.gather(*tasks)

    asyncio.run(go())
    return statuses


@pytest.mark.slow
def test_a_killed_replica_costs_no_answer(front, checkpoint_folder: Path) -> None:
    """Also: both nodes work, vectors are those of one process, keys are required."""
    import httpx
    import numpy as np

    import packhorse

    server = front("--replicas", "2", "--max-concurrent-requests", "12")
    before = replicas(server)
    assert len(before) == 2
    counts = load(server, 100, lambda: os.kill(before[0], signal.SIGKILL))
    assert set(counts) == {200, 429}, counts
    assert "a replica was lost" in server.log()
    until(lambda: len(replicas(server)) == 2 and ups(server) == 2)
    assert before[0] not in replicas(server)

    texts = ["the first text", "and a second one, longer than that"]
    assert httpx.post(f"{server.url}/embed", json={"inputs": texts}).status_code == 401
    vectors = httpx.post(f"{server.url}/embed", json={"inputs": texts}, headers=KEY).json()
    model = packhorse.load(checkpoint_folder, device="cpu", dtype="fp32")
    np.testing.assert_allclose(np.array(vectors), model.embed(texts), atol=1e-6)


@pytest.mark.slow
def test_a_lost_node_costs_no_answer(nodes: Nodes, front) -> None:
    server = front("--replicas", "2")
    before = replicas(server)
    try:
        counts = load(server, 100, lambda: nodes.say("kill"))
        assert set(counts) <= {200, 429}, counts
        assert "a replica was lost" in server.log()
        assert len(before) == 2 and len({*before} & {*replicas(server)}) == 1
    finally:
        nodes.say("add")
    until(lambda: ups(server) == 2)


@pytest.mark.slow
def test_without_asking_again_it_would(front) -> None:
    """The control: without retries requests fail."""
    code = "import packhorse.serve.ingress as i; i.MAX_DEATHS = 1"
    server = front("--replicas", "2", before=code)
    counts = load(server, 50, lambda: os.kill(replicas(server)[0], signal.SIGKILL))
    assert counts[503] > 0, counts


@pytest.mark.slow
def test_more_replicas_under_load_and_what_is_asked_waits_for_the_last(front) -> None:
    code = "import packhorse.serve.cluster as c; c.TARGET_REQUESTS, c.GROW_SECONDS = 2, 0.5"
    server = front("--max-replicas", "2", before=code)
    assert len(replicas(server)) == 1

    def kill_the_only_one() -> None:
        os.kill(replicas(server)[0], signal.SIGKILL)

    assert set(load(server, 20, kill_the_only_one, clients=2)) == {200}
    assert set(load(server, 20, lambda: until(lambda: ups(server) == 2))) == {200}


@pytest.mark.slow
def test_a_cluster_of_its_own_listens_here_alone_and_ends(start) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no ray: pip install 'packhorse[cluster]'")
    from ..data.processes import alive, family, listening

    server = start("--engine", "ray").wait_until_ready()
    pids = family(server.popen.pid)
    assert len(replicas(server)) == 1
    assert {*listening(pids)} == {"127.0.0.1"}
    assert server.end(timeout=SECONDS) == 0, server.log()
    until(lambda: not [pid for pid in pids if alive(pid)])


@pytest.mark.slow
def test_a_model_that_is_not_there(nodes: Nodes, start, tmp_path: Path) -> None:
    words = ["--engine", "ray", "--ray-address", nodes.address, "--model", str(tmp_path / "none")]
    server = start(*words, **nodes.variables)
    assert server.popen.wait(SECONDS) == 2
    (line,) = server.log().splitlines()
    assert "no replica could be started" in line and "none is no folder" in line
