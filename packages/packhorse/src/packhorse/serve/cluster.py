"""A server over many machines: this process takes requests, Ray Serve runs replicas of the models.

    with cluster_app(settings) as (app, models): ...

Ray Serve starts the replicas, replaces those that die, adds and removes some with the load, and
finds the least busy one for each request. Its own HTTP proxy stays off: it answers 500 when a
replica dies under a request, and has neither our keys nor our limits. `ingress` takes its place,
behind the same guard as every server of ours, on the node where the command was started.

A replica is the whole application over its own models: one process with its share of the CPUs, or
one GPU. If its engine dies it exits, so that its requests are sent to another replica: only a new
process gets a new device context.
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
from packhorse.serve.hosting import ServedModels
from packhorse.serve.ingress import (
    ForwardedRequest,
    ForwardedResponse,
    ModelCard,
    ReplicaAway,
    ReplicaDied,
    ReplicaPool,
)
from packhorse.serve.metrics import RunnerFigures, runner_figures
from packhorse.serve.settings import ServeSettings

TARGET_REQUESTS = 32  # in flight per replica; with more, another replica is started
# How long the load must stay high or low before the number of replicas changes. Replicas are
# removed late, because one that is needed again has to load its models first.
GROW_SECONDS = 5.0
SHRINK_SECONDS = 120.0
HEALTH_SECONDS = 2.0  # between Ray's health checks of a replica
FIGURES_SECONDS = 1.0  # between two readings of the replicas' figures
PROGRESS_SECONDS = 30.0  # between two log lines while replicas start
EXIT_ENGINE_DIED = 70
DEPLOYMENT = "models"
# Ray Serve's names for the states of an application:
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
RUNNING = "RUNNING"


class Replica:
    """The application over its models, in a process of Ray Serve that calls these methods."""

    def __init__(self, settings: ServeSettings) -> None:
        from ray import serve

        _restrict_grpc_port()
        logs.set_up(settings)
        self.name = serve.get_replica_context().replica_id.unique_id
        self.models = hosting.open_models(settings)
        self.app = create(settings, self.models)
        self.models.begin_preparing()

    async def answer(self, request: ForwardedRequest) -> ForwardedResponse:
        """Answer one request."""
        response = await ingress.run_forwarded(self.app, request)
        if not self.models.alive:
            os._exit(EXIT_ENGINE_DIED)
        return response

    async def answer_named(self, request: ForwardedRequest) -> tuple[str, ForwardedResponse]:
        """Answer a request that all replicas got; the caller chooses a response by the name."""
        return self.name, await self.answer(request)

    def cards(self) -> list[ModelCard]:
        """Describe the models."""
        return [ingress.model_card(model) for model in self.models]

    def figures(self) -> list[RunnerFigures]:
        """Return the figures of all runners."""
        return [runner_figures(model, replica=self.name) for model in self.models]

    def check_health(self) -> None:
        """Raise if an engine died; Ray Serve calls this and replaces a replica that raises."""
        if not self.models.alive:
            raise RunnerStopped("an engine died")


def _restrict_grpc_port() -> None:
    """Bind the gRPC port that Ray Serve opens for a replica to its node's own address.

    The port is for calls between deployments, which unpickle what they receive. It would listen on
    all networks of the machine, even if the rest of Ray uses only the loopback. Ray has no setting
    for it, so its function is replaced; if a later Ray has no such function, no replica starts.
    """
    import ray

    replica: Any = import_module("ray.serve._private.replica")
    add_port = replica.add_port_to_grpc_server
    host = ray.util.get_node_ip_address()
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    replica.add_port_to_grpc_server = lambda server, _: add_port(server, address)


@contextmanager
def cluster_app(settings: ServeSettings) -> Iterator[tuple[FastAPI, ServedModels]]:
    """Start the replicas and return an application that forwards to them; end them afterwards."""
    with connected(settings.ray_address or None) as ray, _deployed(ray, settings) as handle:
        client = ReplicaClient(handle)
        pool = ReplicaPool(client.to_any, client.to_first)
        models = ingress.remote_models(handle.cards.remote().result(), pool)
        with _polling_figures(handle, pool):
            yield ingress.create(settings, models, pool), models


class ReplicaClient:
    """Sends requests to replicas by a Ray Serve handle; raises `ReplicaDied` and `ReplicaAway`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def to_any(self, request: ForwardedRequest) -> ForwardedResponse:
        """Send a request to the least busy replica."""
        with _translated_errors():
            response = self.handle.answer.remote(request)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()  # cancels it in the replica too
                raise

    async def to_first(self, request: ForwardedRequest) -> ForwardedResponse:
        """Send a request to all replicas and return the response of the first by name.

        Ray Serve cannot send a request to a chosen replica.
        """
        with _translated_errors():
            broadcast = self.handle.broadcast("answer_named", request)
            results = await broadcast.results_async(return_exceptions=True)
        responses = [result for result in results if not isinstance(result, BaseException)]
        if not responses:
            raise ReplicaAway("no replica answered")
        return min(responses, key=lambda named: named[0])[1]


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Translate Ray's errors for a lost replica; errors of the application stay as they are."""
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
        exceptions.ObjectLostError,  # the response was on a node that died
        exceptions.OutOfMemoryError,
        exceptions.TaskCancelledError,  # by Ray; if we cancel, nobody waits for the result
    ) as error:
        raise ReplicaDied(str(error)) from error


@contextmanager
def _polling_figures(handle: Any, pool: ReplicaPool) -> Iterator[None]:
    """Keep the pool's figures fresh in a thread, so that requests for them need not wait."""
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.is_set():
            pool.figures = _read_figures(handle)
            stopped.wait(FIGURES_SECONDS)

    thread = threading.Thread(target=poll, name="packhorse-replicas", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _read_figures(handle: Any) -> Sequence[RunnerFigures]:
    try:
        results = handle.broadcast("figures").results(timeout_s=5, return_exceptions=True)
    except Exception:  # no replica is alive at the moment, or all are too busy to answer
        return ()
    figures: list[RunnerFigures] = []
    for result in results:
        if not isinstance(result, BaseException):
            figures += result
    return sorted(figures, key=lambda runner: list(runner.labels.values()))


# Starting the replicas -------------------------------------------------------------------------


@contextmanager
def _deployed(ray: Any, settings: ServeSettings) -> Iterator[Any]:
    serve = _serve()
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # we log what matters of it
    name = f"packhorse-{socket.gethostname()}-{settings.port or os.getpid()}"
    _exit_on_sigterm()
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(**deployment_options(settings, _nodes(ray)))(Replica)
    target = serve.RunTarget(
        deployment.bind(_replica_settings(settings, deployment)), name=name, route_prefix=None
    )
    try:
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        _wait(serve, name)
        yield handle
    finally:
        if settings.ray_address:  # otherwise Ray itself ends with this process
            serve.delete(name)


def deployment_options(
    settings: ServeSettings, nodes: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Return Ray Serve's options for the replicas, on nodes with these resources."""
    min_replicas = settings.replicas
    max_replicas = settings.max_replicas or settings.replicas
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": _replica_resources(settings, nodes, max_replicas),
        # The guard admits no more than this, so no request ever waits in Ray's own queues.
        "max_ongoing_requests": settings.max_concurrent_requests,
        "health_check_period_s": HEALTH_SECONDS,
        "max_constructor_retry_count": 1,  # a model that cannot be opened is reported at once
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": settings.drain_seconds,
    }
    if max_replicas == min_replicas:
        return options | {"num_replicas": min_replicas}
    scaling = {
        "min_replicas": min_replicas,
        "initial_replicas": min_replicas,
        "max_replicas": max_replicas,
        "target_ongoing_requests": TARGET_REQUESTS,
        "upscale_delay_s": GROW_SECONDS,
        "downscale_delay_s": SHRINK_SECONDS,
    }
    return options | {"autoscaling_config": scaling}


def _replica_resources(
    settings: ServeSettings, nodes: Sequence[dict[str, float]], max_replicas: int
) -> dict[str, float]:
    """Return one GPU, or as many CPUs as each of `max_replicas` replicas can have."""
    kind, _, index = settings.device.partition(":")
    if index:
        raise InputError(f"Ray chooses which {kind} a replica gets; pass --device {kind}")
    if kind == "cuda" or (not kind and any(node.get("GPU") for node in nodes)):
        return {"num_cpus": 1, "num_gpus": 1}
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    fitting = (
        share
        for share in range(max(cpus, default=0), 0, -1)
        if sum(count // share for count in cpus) >= max_replicas
    )
    return {"num_cpus": settings.threads or next(fitting, 1)}


def _replica_settings(settings: ServeSettings, deployment: Any) -> ServeSettings:
    """Return the settings for replicas: no keys, absolute paths, as many threads as CPUs."""
    actor = deployment.ray_actor_options
    threads = settings.threads if actor.get("num_gpus") else int(actor["num_cpus"])
    return replace(
        settings,
        model=tuple(map(_absolute, settings.model)),
        adapter=tuple(map(_absolute, settings.adapter)),
        token_ids=_absolute(settings.token_ids),
        calibration=tuple(map(_absolute, settings.calibration)),
        threads=threads,
        keys=(),
        api_key_file="",
    )


def _absolute(entry: str) -> str:
    """Make the path of a PATH or NAME=PATH absolute, if it exists; a hub id stays as it is."""
    name, sign, source = entry.rpartition("=")
    exists = source and Path(source).exists()
    return f"{name}{sign}{Path(source).absolute()}" if exists else entry


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _wait(serve: Any, name: str) -> None:
    """Wait until the first replicas are running, however long their models take to load."""
    last_report = time.monotonic()
    while True:
        application = serve.status().applications[name]
        if application.status == RUNNING:
            return
        deployment = application.deployments.get(DEPLOYMENT)
        message = deployment.message if deployment else application.message
        if application.status in FAILED:
            raise InputError(f"no replica could be started: {_last_line(message)}")
        if time.monotonic() - last_report > PROGRESS_SECONDS:
            last_report = time.monotonic()
            logs.LOGGER.info("waiting for replicas: %s", _last_line(message) or application.status)
        time.sleep(0.1)


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1].removeprefix("packhorse.errors.") if lines else ""


def _exit_on_sigterm() -> None:
    """Exit by an exception, so that a signal while replicas load ends them, and Ray, as well."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def _serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:  # Ray is installed, but without its extra `serve`
        raise MissingExtra("ray", "cluster") from error
    return serve
