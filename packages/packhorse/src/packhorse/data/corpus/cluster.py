"""The engine of many machines: the same work as tasks of a Ray cluster.

    with ray_cluster(folder, address="192.0.2.1:6379") as run:
        for result in run(function, items): ...

The nodes meet in the work folder, which must lie on a file system that all of them share: what is
done is there, so nothing but orders and small reports crosses the network, a node that dies costs
what it was at, and a killed build goes on where it was. Every node shows first that it sees the
folder, can write there, reads the same sources and has the same libraries; one that joins later
does so before its first task.

Tasks, not Ray Data. Its datasets begin with a list of all items, while ours come one by one (a bz2
of one stream is unpacked as it is read, and would have to lie in memory whole); it hides what went
wrong behind an error of its own; and with items of half a second, as ours are, it took half as long
again. What it would add we have: the results' order is a queue, backpressure its length.

Ray runs whatever it is sent by anyone who reaches its ports. Without an address it is started here,
on the loopback alone and with a secret of its own, and ends with this process; with one it is the
user's cluster, on the user's network.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from packhorse.data.corpus import fingerprint
from packhorse.data.corpus.workers import GO_ON, Run, call, cores
from packhorse.data.corpus.workfolder import speaking
from packhorse.environment import secret_names
from packhorse.errors import InputError, MissingExtra, PackhorseError

T = TypeVar("T")

AHEAD = 4  # items in flight for each CPU: results wait for the slowest before them, nodes must not
RETRIES = 3  # of an item whose worker or node died
PATIENCE = 120.0  # seconds for a node to show itself
ANSWER = 10.0  # seconds for the cluster to
STORE = 128 << 20  # bytes for items on their way, where Ray is started here

# So named as it is the default on those systems; on Linux too it keeps Ray on 127.0.0.1.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
HUB_TOKENS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}  # a replica may have to fetch its model

Libraries = tuple[tuple[str, str], ...]


@contextmanager
def ray_cluster(
    folder: Path,
    reads: Mapping[Path, int] | None = None,
    address: str | None = None,
    workers: int | None = None,
) -> Iterator[Run]:
    """An engine of a Ray cluster whose nodes share `folder`.

    reads: the files that every node must see, and their sizes. address: of a running cluster, as
    its `ray start` tells it; None starts Ray on this machine. workers: items at once; by default as
    many as there are CPUs.
    """
    if workers is not None and workers < 1:
        raise InputError(f"{workers} workers cannot work; use 1 or more")
    with connected(address, workers) as ray, _meeting(folder) as place:
        libraries = tuple(fingerprint.of_libraries().items())
        _check(ray, place, libraries, {str(path): size for path, size in (reads or {}).items()})
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_work)

        def most() -> int:  # nodes come and go
            cpus = int(ray.cluster_resources().get("CPU", 0))
            return workers if workers and address else max(1, AHEAD * cpus)

        def run(function: Callable[..., T], items: Iterable[tuple[Any, ...]]) -> Iterator[T]:
            submitted = (task.remote(place, libraries, function, item) for item in items)
            return _in_order(ray, submitted, most)

        yield run


def _in_order(ray: Any, submitted: Iterator[Any], most: Callable[[], int]) -> Iterator[Any]:
    flying: deque[Any] = deque()
    for reference in submitted:
        flying.append(reference)
        while flying and (len(flying) >= most() or ray.wait([flying[0]], timeout=0)[0]):
            yield _result(ray, flying.popleft())
    while flying:
        yield _result(ray, flying.popleft())


def _result(ray: Any, reference: Any) -> Any:
    """What a task gave; what it raised, if that is for the user, without Ray's wrapping."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PackhorseError):
            raise InputError(str(error.cause)) from None
        raise
    except ray.exceptions.RayError as error:
        raise InputError(
            f"a worker of the cluster died {1 + RETRIES} times at the same piece, killed or out of"
            f" memory ({_first_line(error)}); {GO_ON}"
        ) from error


# On the nodes ----------------------------------------------------------------------------------


def _work(place: Path, libraries: Libraries, function: Callable[..., T], item: tuple) -> T:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task is one core
    _admitted(place, libraries)
    return call(function, item)


@lru_cache
def _admitted(place: Path, libraries: Libraries) -> None:
    try:
        admit(place, libraries, {})
    except InputError as error:
        raise InputError(f"the node {socket.gethostname()} {error}") from error


def admit(place: Path, libraries: Libraries, reads: Mapping[str, int]) -> str:
    """Refuse to work where not all is as the driver has it; else leave a file in `place`."""
    here = fingerprint.of_libraries()
    for name, version in libraries:
        if here.get(name) != version:
            raise InputError(f"has {name} {here.get(name)}, not {version}: the result would differ")
    name = uuid.uuid4().hex
    try:
        (place / name).touch()
    except FileNotFoundError as error:
        raise InputError(f"does not see {place.parent}: it must be on a shared disk") from error
    except OSError as error:
        raise InputError(f"cannot write to {place.parent}: {error.strerror or error}") from error
    for path, size in reads.items():
        try:
            there = os.stat(path).st_size
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        if there != size:
            raise InputError(f"sees {path} with {there:,} bytes, not {size:,}")
    return name


# Before the work -------------------------------------------------------------------------------


@contextmanager
def _meeting(folder: Path) -> Iterator[Path]:
    """A folder of a name that nobody has asked for yet: no network file system knows it cached."""
    place = folder.absolute() / f".nodes-{uuid.uuid4().hex[:12]}"
    with speaking(folder):
        place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _check(ray: Any, place: Path, libraries: Libraries, reads: dict[str, int]) -> None:
    """Each node, at once; all complaints together."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At

    def look(*arguments: Any) -> str:  # travels by value: Packhorse may be missing there
        from packhorse.data.corpus.cluster import admit

        return admit(*arguments)

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if not nodes:
        raise InputError("no node of the Ray cluster has a CPU to work with")
    task, files = ray.remote(num_cpus=0, max_retries=0)(look), ray.put(reads)
    asked = [
        task.options(scheduling_strategy=At(node["NodeID"], soft=False)).remote(
            place, libraries, files
        )
        for node in nodes
    ]
    ray.wait(asked, num_returns=len(asked), timeout=PATIENCE)
    complaints = [
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) {complaint}"
        for node, answer in zip(nodes, asked, strict=True)
        if (complaint := _complaint(ray, answer, place))
    ]
    if complaints:
        raise InputError(f"not every node of the Ray cluster can work: {'; '.join(complaints)}")


def _complaint(ray: Any, answer: Any, place: Path) -> str | None:
    try:
        name = ray.get(answer, timeout=0)
    except ray.exceptions.RayTaskError as error:
        mild = isinstance(error.cause, PackhorseError)
        return str(error.cause) if mild else f"cannot run Packhorse: {error.cause}"
    except ray.exceptions.GetTimeoutError:
        return f"has not answered for {PATIENCE:.0f} seconds"
    except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
        return None  # it is gone
    except ray.exceptions.RayError as error:
        return f"cannot work: {_first_line(error)}"
    if not (place / name).exists():
        return f"writes to another {place.parent} than this one: it must be on a shared disk"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# The connection --------------------------------------------------------------------------------


@contextmanager
def connected(address: str | None, workers: int | None = None) -> Iterator[Any]:
    """Ray, on the user's cluster, or started here with so many CPUs; ended when this ends."""
    with _environment(alone=address is None):
        ray = _ray()
        if ray.is_initialized():
            raise InputError("this process is connected to Ray already; call ray.shutdown() first")
        with _reached(ray, address) if address else _alone(ray, workers or cores()) as options:
            try:
                _connect(ray, options)
                yield ray
            finally:
                ray.shutdown()


def _connect(ray: Any, options: dict[str, Any]) -> None:
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # Ray raises all kinds
        if options["address"] == "local":
            raise InputError(f"Ray cannot be started here: {_first_line(error)}") from error
        raise InputError(
            f"{_first_line(error)}; this machine must be a node of the cluster and have the same"
            f" Ray ({ray.__version__}); if it asks for a token, set RAY_AUTH_MODE=token and the"
            " same RAY_AUTH_TOKEN"
        ) from error


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("ray", "cluster") from error
    return ray


@contextmanager
def _environment(alone: bool) -> Iterator[None]:
    """Ray is told most things by variables, some of them when it is imported.

    Alone it asks for a token whatever RAY_AUTH_MODE says, and its processes get no other secrets
    than those that fetch models.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    hidden = set(secret_names()) - before.keys() - HUB_TOKENS if alone else set()
    before |= {name: os.environ.pop(name) for name in hidden}
    told = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}  # say nothing
    if alone:
        told |= {LOOPBACK: "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _secret()}
    os.environ.update(told)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)


@lru_cache(maxsize=1)  # Ray keeps the first that a process has
def _secret() -> str:
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)


@contextmanager
def _alone(ray: Any, cpus: int) -> Iterator[dict[str, Any]]:
    if not ray.util.get_node_ip_address().startswith("127."):
        raise InputError(
            f"Ray was imported before and would listen on the network; set {LOOPBACK}=0 before it"
            " is, or start Ray yourself and pass its address"
        )
    # Ray opens its folder to all, so it lies in one that is ours; not in $TMPDIR, for the paths of
    # sockets must be short.
    root = "/tmp" if os.path.isdir("/tmp") else None
    with tempfile.TemporaryDirectory("", "ray-", root, ignore_cleanup_errors=True) as home:
        local = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        yield {**local, "object_store_memory": STORE, "_temp_dir": f"{home}/r"}


@contextmanager
def _reached(ray: Any, address: str) -> Iterator[dict[str, Any]]:
    """Asked first by ourselves: Ray tries for a quarter of an hour, and not in silence."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise InputError(f"{address!r} is no address of a Ray cluster; one is 192.0.2.1:6379")
    if host in ("localhost", "127.0.0.1"):  # so Ray takes it
        host = ray.util.get_node_ip_address()
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"no Ray cluster answers at {address}: {reason}; name the address that"
            " `ray start --head` printed"
        ) from error
    yield {"address": address}
