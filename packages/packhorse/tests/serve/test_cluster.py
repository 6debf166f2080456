"""Replicas on a real Ray cluster of two nodes, all on 127.0.0.1; the server is on the head.

Everything is looked at from outside: the cluster is a process of its own (tests/data/ray_nodes.py),
the server another. Ray must not be imported here: it reads some of its variables when it is, and
other tests have others.
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
from packhorse.serve.settings import Settings

from .conftest import Process

HEAD, SECOND = {"CPU": 4.0}, {"CPU": 6.0, "memory": 1.0}
KEY = {"authorization": "Bearer sesame"}
SECONDS = 60.0  # for what takes a few


# Without Ray -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "cpus"),
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
def test_each_replica_has_its_share_of_the_cpus(said: dict[str, int], cpus: int) -> None:
    found = cluster.options(Settings(engine="ray", **said), [HEAD, SECOND])  # type: ignore[arg-type]
    assert found["ray_actor_options"] == {"num_cpus": cpus}
    assert ("autoscaling_config" in found) == ("max_replicas" in said)


def test_or_a_gpu() -> None:
    one = {"num_cpus": 1, "num_gpus": 1}
    on = {**HEAD, "GPU": 2.0}
    assert cluster.options(Settings(engine="ray"), [on])["ray_actor_options"] == one
    assert cluster.options(Settings(engine="ray", device="cuda"), [])["ray_actor_options"] == one
    forced = cluster.options(Settings(engine="ray", device="cpu"), [on])
    assert forced["ray_actor_options"] == {"num_cpus": 4}
    with pytest.raises(InputError, match="Ray chooses"):
        cluster.options(Settings(engine="ray", device="cuda:1"), [on])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"replicas": 2}, "are for --engine ray"),
        ({"ray_address": "192.0.2.1:6379"}, "are for --engine ray"),
        ({"engine": "ray", "replicas": 3, "max_replicas": 2}, "at least replicas"),
    ],
)
def test_what_cannot_be_meant(said: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Settings(**said)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"packhorse\[cluster\]"), cluster.afar(Settings()):
        pass


def test_a_replica_whose_engine_died_ends(served, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its requests are asked of another; as long as it lives it answers."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    replica = cluster.Replica.__new__(cluster.Replica)
    replica.app, replica.hosts = served.guard.app, served.hosts
    question = cluster.Question("GET", "/info")
    assert asyncio.run(replica.ask(question)).status == 200
    replica.check_health()
    assert not ended
    dead = cluster.Replica.__new__(cluster.Replica)
    dead.app, dead.hosts = served.guard.app, type("Dead", (), {"alive": False})()
    asyncio.run(dead.ask(question))
    assert ended == [cluster.EXIT_DEAD]
    with pytest.raises(cluster.RunnerStopped):
        dead.check_health()


@pytest.mark.slow
def test_only_what_means_a_lost_replica_is_asked_again() -> None:
    """In a process of its own, for it imports Ray."""
    said = subprocess.run([sys.executable, "-c", UNDERSTOOD], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr


UNDERSTOOD = """
from ray import exceptions as e
from ray.serve.exceptions import BackPressureError
from packhorse.serve.cluster import _understood

def kind(error):
    try:
        with _understood():
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
    """A cluster in another process, which obeys."""

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
def door(nodes: Nodes, start) -> Iterator[Callable[..., Process]]:
    """Starts a server over the cluster."""
    begun: list[Process] = []

    def begin(*words: str, before: str = "") -> Process:
        flags = ["--engine", "ray", "--ray-address", nodes.address, *words]
        server = start(*flags, before=before, PACKHORSE_API_KEY="sesame", **nodes.variables)
        begun.append(server)
        return server.wait_until_ready()

    yield begin
    for each in begun:
        assert each.end(timeout=SECONDS) == 0, each.log()


def replicas(server: Process) -> list[int]:
    """Their processes."""
    title = f"ray::ServeReplica:packhorse-{socket.gethostname()}-{server.popen.pid}:"
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(entry.parent.name)] if entry.read_text().startswith(title) else []
        except OSError:
            continue
    return sorted(found)


def ups(server: Process) -> int:
    """How many replicas tell figures."""
    import httpx

    page = httpx.get(f"{server.url}/metrics", headers=KEY, timeout=SECONDS).text
    return page.count('packhorse_up{model="tiny",replica="')


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def load(server: Process, least: int, event: Callable[[], Any], clients: int = 16) -> Counter[int]:
    """Statuses of requests before, while and after something happens, `least` of 200 each time."""
    import httpx

    statuses: Counter[int] = Counter()

    async def ask(client: httpx.AsyncClient, on: Callable[[], bool]) -> None:
        while on():
            body = {"inputs": ["a text", "another one " * 20]}
            found = await client.post(f"{server.url}/embed", json=body, headers=KEY)
            statuses[found.status_code] += 1
            if found.status_code == 429:
                assert int(found.headers["retry-after"]) >= 1
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
def test_a_killed_replica_costs_no_answer(door, checkpoint_folder: Path) -> None:
    """Also: both nodes work, vectors are those of one process, keys are asked for."""
    import httpx
    import numpy as np

    import packhorse

    server = door("--replicas", "2", "--max-concurrent-requests", "12")
    before = replicas(server)
    assert len(before) == 2
    found = load(server, 100, lambda: os.kill(before[0], signal.SIGKILL))
    assert set(found) == {200, 429}, found
    assert "a replica was lost" in server.log()
    until(lambda: len(replicas(server)) == 2 and ups(server) == 2)
    assert before[0] not in replicas(server)

    texts = ["the first text", "and a second one, longer than that"]
    assert httpx.post(f"{server.url}/embed", json={"inputs": texts}).status_code == 401
    vectors = httpx.post(f"{server.url}/embed", json={"inputs": texts}, headers=KEY).json()
    model = packhorse.load(checkpoint_folder, device="cpu", dtype="fp32")
    np.testing.assert_allclose(np.array(vectors), model.embed(texts), atol=1e-6)


@pytest.mark.slow
def test_a_lost_node_costs_no_answer(nodes: Nodes, door) -> None:
    server = door("--replicas", "2")
    before = replicas(server)
    try:
        found = load(server, 100, lambda: nodes.say("kill"))
        assert set(found) <= {200, 429}, found
        assert "a replica was lost" in server.log()
        assert len(before) == 2 and len({*before} & {*replicas(server)}) == 1
    finally:
        nodes.say("add")
    until(lambda: ups(server) == 2)


@pytest.mark.slow
def test_without_asking_again_it_would(door) -> None:
    """The control."""
    code = "import packhorse.serve.ingress as i; i.DEATHS = 1"
    server = door("--replicas", "2", before=code)
    found = load(server, 50, lambda: os.kill(replicas(server)[0], signal.SIGKILL))
    assert found[503] > 0, found


@pytest.mark.slow
def test_more_replicas_under_load_and_what_is_asked_waits_for_the_last(door) -> None:
    code = "import packhorse.serve.cluster as c; c.BUSY, c.GROW_SECONDS = 2, 0.5"
    server = door("--max-replicas", "2", before=code)
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
    ours = family(server.popen.pid)
    assert len(replicas(server)) == 1
    assert {*listening(ours)} == {"127.0.0.1"}
    assert server.end(timeout=SECONDS) == 0, server.log()
    until(lambda: not [pid for pid in ours if alive(pid)])


@pytest.mark.slow
def test_a_model_that_is_not_there(nodes: Nodes, start, tmp_path: Path) -> None:
    words = ["--engine", "ray", "--ray-address", nodes.address, "--model", str(tmp_path / "none")]
    server = start(*words, **nodes.variables)
    assert server.popen.wait(SECONDS) == 2
    (line,) = server.log().splitlines()
    assert "no replica could be started" in line and "none is no folder" in line
