"""The server of many machines: this process is the door, its models run in replicas of Ray Serve.

    with afar(settings) as (app, hosts): ...

Ray Serve starts the replicas, replaces those that die, starts more under load and ends them when
there is little to do; it finds the least busy for each request. Its own HTTP proxy stays off:
it answers 500 when a replica dies under a request, and knows neither our keys nor our limits. The
door is `ingress`, behind the guard that every server of ours has, on the node where the command was
given.

A replica is the whole application over its own models, one process with its share of the CPUs, or
one GPU. Where its engine dies it ends itself, so that whoever waits there is asked again elsewhere:
only a new process gets a new device.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from packhorse.data.corpus.cluster import connected
from packhorse.errors import InputError, MissingExtra, RunnerStopped
from packhorse.serve import hosting, ingress, logs
from packhorse.serve.app import create
from packhorse.serve.hosting import Hosts
from packhorse.serve.ingress import Card, Fleet, Question, ReplicaAway, ReplicaDied, Reply
from packhorse.serve.metrics import Figures, figures
from packhorse.serve.settings import Settings

BUSY = 32  # requests in flight a replica, beyond which another is started
GROW_SECONDS, SHRINK_SECONDS = 5.0, 120.0  # it stays so before the number changes
HEALTH_SECONDS = 2.0  # between two questions whether a replica lives
LOOK_SECONDS = 1.0  # between two looks at the replicas' figures
TELL_SECONDS = 30.0  # between two lines that say what is waited for
EXIT_DEAD = 70  # of a replica whose engine died
DEPLOYMENT = "models"
FAILED, RUNNING = ("DEPLOY_FAILED", "UNHEALTHY"), "RUNNING"


class Replica:
    """The application over its models, in a process of Ray's."""

    def __init__(self, settings: Settings) -> None:
        from ray import serve

        _keep_to_the_node()
        logs.set_up(settings)
        self.name = serve.get_replica_context().replica_id.unique_id
        self.hosts = hosting.open(settings)
        self.app = create(settings, self.hosts)

    async def ask(self, question: Question) -> Reply:
        """Answer one request."""
        reply = await ingress.answer(self.app, question)
        if not self.hosts.alive:
            os._exit(EXIT_DEAD)
        return reply

    async def ask_first(self, question: Question) -> tuple[str, Reply]:
        """Answer what all replicas are asked; with the name, by which one is chosen."""
        return self.name, await self.ask(question)

    def cards(self) -> list[Card]:
        """The models it has."""
        return [ingress.card(host) for host in self.hosts]

    def figures(self) -> list[Figures]:
        """How their runners do."""
        return [figures(host, replica=self.name) for host in self.hosts]

    def check_health(self) -> None:
        """Ray asks, and replaces the replica that raises."""
        if not self.hosts.alive:
            raise RunnerStopped("an engine died")


def _keep_to_the_node() -> None:
    """Bind the port that Ray Serve opens for a replica to its node's address alone.

    It is meant for calls between deployments, which unpickle what they are sent, and would listen
    on all networks of the machine, also where the rest of Ray keeps to the loopback. Ray has no
    setting for it; where a later one has no such function, no replica starts.
    """
    import ray

    replica: Any = import_module("ray.serve._private.replica")
    add, host = replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    place = f"[{host}]:0" if ":" in host else f"{host}:0"
    replica.add_port_to_grpc_server = lambda server, _: add(server, place)


@contextmanager
def afar(settings: Settings) -> Iterator[tuple[FastAPI, Hosts]]:
    """The door and its replicas; these end when this ends."""
    with connected(settings.ray_address or None) as ray, _deployed(ray, settings) as handle:
        asked = Asked(handle)
        fleet = Fleet(asked.ask, asked.ask_first)
        models = ingress.hosts(handle.cards.remote().result(), fleet)
        with _looking(handle, fleet):
            yield ingress.create(settings, models, fleet), models


class Asked:
    """Replicas behind a handle of Ray Serve, whose errors become the two that count here."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def ask(self, question: Question) -> Reply:
        """The least busy."""
        with _understood():
            response = self.handle.ask.remote(question)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()  # where it still runs: nobody waits for it any more
                raise

    async def ask_first(self, question: Question) -> Reply:
        """All of them, to hear the first by name."""
        with _understood():
            response = self.handle.broadcast("ask_first", question)
            replies = await response.results_async(return_exceptions=True)
        told = [each for each in replies if not isinstance(each, BaseException)]
        if not told:
            raise ReplicaAway("no replica answered")
        return min(told, key=lambda each: each[0])[1]


@contextmanager
def _understood() -> Iterator[None]:
    """What Ray raises for a replica that is gone; a mistake within one stays what it is."""
    from ray import exceptions
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    try:
        yield
    except exceptions.RayTaskError:
        raise
    except (
        exceptions.ActorUnavailableError,
        BackPressureError,
        DeploymentUnavailableError,
    ) as error:
        raise ReplicaAway(str(error)) from error
    except (
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,  # the answer, with the node it lay on
        exceptions.OutOfMemoryError,
        exceptions.TaskCancelledError,  # not by us: then nobody would hear of it
    ) as error:
        raise ReplicaDied(str(error)) from error


@contextmanager
def _looking(handle: Any, fleet: Fleet) -> Iterator[None]:
    """Keep the fleet's figures fresh, from a thread: who asks for them must not wait."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            fleet.figures = _figures(handle)
            over.wait(LOOK_SECONDS)

    thread = threading.Thread(target=look, name="packhorse-replicas", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _figures(handle: Any) -> Sequence[Figures]:
    try:
        told = handle.broadcast("figures").results(timeout_s=5, return_exceptions=True)
    except Exception:  # no replica lives just now, or all are too busy to say
        return ()
    every = [each for each in told if not isinstance(each, BaseException)]
    return sorted((each for one in every for each in one), key=lambda each: [*each.labels.values()])


# Starting the replicas -------------------------------------------------------------------------


@contextmanager
def _deployed(ray: Any, settings: Settings) -> Iterator[Any]:
    serve = _serve()
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # what matters of it, we say
    name = f"packhorse-{socket.gethostname()}-{settings.port or os.getpid()}"
    _leave_in_order()
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(**options(settings, _nodes(ray)))(Replica)
    target = serve.RunTarget(
        deployment.bind(_travelling(settings, deployment)), name=name, route_prefix=None
    )
    try:
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        _wait(serve, name)
        yield handle
    finally:
        if settings.ray_address:  # else all of Ray ends with us
            serve.delete(name)


def options(settings: Settings, nodes: Sequence[dict[str, float]]) -> dict[str, Any]:
    """How Ray Serve is to keep the replicas, on nodes with these resources."""
    least, most = settings.replicas, settings.max_replicas or settings.replicas
    chosen: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": _share(settings, nodes, most),
        # The guard lets no more in, so nothing ever waits between the door and the replicas.
        "max_ongoing_requests": settings.max_concurrent_requests,
        "health_check_period_s": HEALTH_SECONDS,
        "max_constructor_retry_count": 1,  # of the first: a model that cannot be opened is told
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": settings.drain_seconds,
    }
    if most == least:
        return chosen | {"num_replicas": least}
    scaling = {
        "min_replicas": least,
        "initial_replicas": least,
        "max_replicas": most,
        "target_ongoing_requests": BUSY,
        "upscale_delay_s": GROW_SECONDS,
        "downscale_delay_s": SHRINK_SECONDS,
    }
    return chosen | {"autoscaling_config": scaling}


def _share(settings: Settings, nodes: Sequence[dict[str, float]], most: int) -> dict[str, float]:
    """A GPU, or as many CPUs as each can have when there are `most` replicas."""
    kind, _, which = settings.device.partition(":")
    if which:
        raise InputError(f"Ray chooses which {kind} a replica gets; say --device {kind}")
    if kind == "cuda" or (not kind and any(node.get("GPU") for node in nodes)):
        return {"num_cpus": 1, "num_gpus": 1}
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    fitting = (
        share
        for share in range(max(cpus, default=0), 0, -1)
        if sum(each // share for each in cpus) >= most
    )
    return {"num_cpus": settings.threads or next(fitting, 1)}


def _travelling(settings: Settings, deployment: Any) -> Settings:
    """The settings for the replicas: keys stay here, paths are whole, threads are their share."""
    actor = deployment.ray_actor_options
    threads = settings.threads if actor.get("num_gpus") else int(actor["num_cpus"])
    return replace(
        settings,
        model=tuple(map(_absolute, settings.model)),
        token_ids=_absolute(settings.token_ids),
        threads=threads,
        keys=(),
        api_key_file="",
    )


def _absolute(given: str) -> str:
    name, sign, source = given.rpartition("=")
    exists = source and Path(source).exists()
    return f"{name}{sign}{Path(source).absolute()}" if exists else given


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _wait(serve: Any, name: str) -> None:
    """Until all replicas of the beginning are there, however long their models take to load."""
    told = time.monotonic()
    while True:
        found = serve.status().applications[name]
        if found.status == RUNNING:
            return
        deployment = found.deployments.get(DEPLOYMENT)
        message = deployment.message if deployment else found.message
        if found.status in FAILED:
            raise InputError(f"no replica could be started: {_last_line(message)}")
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            logs.LOGGER.info("waiting for replicas: %s", _last_line(message) or found.status)
        time.sleep(0.1)


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1].removeprefix("packhorse.errors.") if lines else ""


def _leave_in_order() -> None:
    """A signal while replicas load ends them too, and Ray if it was started here."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def _serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:  # Ray is there, but without what its extra brings
        raise MissingExtra("ray", "cluster") from error
    return serve
