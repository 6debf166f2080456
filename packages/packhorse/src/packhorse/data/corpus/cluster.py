"""The engine of many machines: runs items as tasks of a Ray cluster.

    with ray_cluster(folder, address="192.0.2.1:6379") as run:
        for result in run(function, items): ...

All nodes share the work folder, which must be on a common file system. Finished files are there, so
only tasks and small reports cross the network, a dead node costs only its current items, and a
killed build continues where it was. Every node must first prove that it sees the folder, can write
there, reads the same sources and has the same libraries; a node that joins later does so before its
first task.

We use tasks, not Ray Data: its datasets begin with a list of all items, while ours are produced one
by one (a bz2 of one stream is unpacked as it is read, and would have to be held in memory); it
hides errors behind one of its own; and with items of half a second, as ours are, it took half as
long again. What it would add we have: a queue keeps the order of results, and its length limits
them.

Ray runs any code sent by anyone who reaches its ports. Without an address it is started here, on
the loopback interface alone and with a secret of its own, and ends with this process; else it is
the user's cluster, on the user's network.
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

from packhorse.data.corpus.workers import RESUME_HINT, RunTasks, call, cores
from packhorse.data.corpus.workfolder import disk_errors, library_versions
from packhorse.environment import secret_names
from packhorse.errors import InputError, MissingExtra, PackhorseError

T = TypeVar("T")

AHEAD = 4  # items in flight per CPU: results wait for the slowest before them, nodes must not
RETRIES = 3  # of an item whose worker or node died
PATIENCE = 120.0  # seconds to wait for the check of a node
ANSWER = 10.0  # seconds to wait for the cluster to answer
STORE = 128 << 20  # bytes for items in transit, if Ray is started here

# Named after the systems where 127.0.0.1 is the default; set to 0 it keeps Ray there on Linux too.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
HUB_TOKENS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}  # a replica may need to download its model

Libraries = tuple[tuple[str, str], ...]


@contextmanager
def ray_cluster(
    folder: Path,
    reads: Mapping[Path, int] | None = None,
    address: str | None = None,
    workers: int | None = None,
) -> Iterator[RunTasks]:
    """An engine on a Ray cluster whose nodes share `folder`.

    reads: the files that every node must see, and their sizes. address: of a running cluster, as
    `ray start` printed it; None starts Ray on this machine. workers: items in work at once; by
    default the number of CPUs.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers is {workers}; it must be 1 or more")
    with connected(address, workers) as ray, _node_folder(folder) as shared:
        libraries = tuple(library_versions().items())
        _check_nodes(
            ray, shared, libraries, {str(path): size for path, size in (reads or {}).items()}
        )
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run_item)

        def most_in_flight() -> int:  # asked again and again, because nodes come and go
            cpus = int(ray.cluster_resources().get("CPU", 0))
            return workers if workers and address else max(1, AHEAD * cpus)

        def run(function: Callable[..., T], items: Iterable[tuple[Any, ...]]) -> Iterator[T]:
            submitted = (task.remote(shared, libraries, function, item) for item in items)
            return _in_order(ray, submitted, most_in_flight)

        yield run


def _in_order(
    ray: Any, submitted: Iterator[Any], most_in_flight: Callable[[], int]
) -> Iterator[Any]:
    in_flight: deque[Any] = deque()
    for reference in submitted:
        in_flight.append(reference)
        while in_flight and (
            len(in_flight) >= most_in_flight() or ray.wait([in_flight[0]], timeout=0)[0]
        ):
            yield _result(ray, in_flight.popleft())
    while in_flight:
        yield _result(ray, in_flight.popleft())


def _result(ray: Any, reference: Any) -> Any:
    """The result of a task; an error meant for the user is raised without Ray's wrapper."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PackhorseError):
            raise InputError(str(error.cause)) from None
        raise
    except ray.exceptions.RayError as error:
        raise InputError(
            f"a worker of the cluster died {1 + RETRIES} times at the same piece, killed or out of"
            f" memory ({_first_line(error)}); {RESUME_HINT}"
        ) from error


# On the nodes ----------------------------------------------------------------------------------


def _run_item(shared: Path, libraries: Libraries, function: Callable[..., T], item: tuple) -> T:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task is one core
    _check_this_node(shared, libraries)
    return call(function, item)


@lru_cache  # once per process
def _check_this_node(shared: Path, libraries: Libraries) -> None:
    try:
        admit(shared, libraries, {})
    except InputError as error:
        raise InputError(f"the node {socket.gethostname()} {error}") from error


def admit(shared: Path, libraries: Libraries, reads: Mapping[str, int]) -> str:
    """Check that this node is like the driver's; leave a file in `shared` and return its name."""
    installed = library_versions()
    for name, version in libraries:
        if installed.get(name) != version:
            raise InputError(
                f"has {name} {installed.get(name)}, not {version}: the result would differ"
            )
    name = uuid.uuid4().hex
    try:
        (shared / name).touch()
    except FileNotFoundError as error:
        raise InputError(f"does not see {shared.parent}: it must be on a shared disk") from error
    except OSError as error:
        raise InputError(f"cannot write to {shared.parent}: {error.strerror or error}") from error
    for path, size in reads.items():
        try:
            actual = os.stat(path).st_size
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        if actual != size:
            raise InputError(f"sees {path} with {actual:,} bytes, not {size:,}")
    return name


# Before the work -------------------------------------------------------------------------------


@contextmanager
def _node_folder(folder: Path) -> Iterator[Path]:
    """A folder with a new name, which no network file system can have in its cache."""
    shared = folder.absolute() / f".nodes-{uuid.uuid4().hex[:12]}"
    with disk_errors(folder):
        shared.mkdir()
    try:
        yield shared
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def _check_nodes(ray: Any, shared: Path, libraries: Libraries, reads: dict[str, int]) -> None:
    """Check all nodes at once, and report all problems together."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At

    def check(*arguments: Any) -> str:  # sent by value: Packhorse may be missing there
        from packhorse.data.corpus.cluster import admit

        return admit(*arguments)

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if not nodes:
        raise InputError("no node of the Ray cluster has a CPU to work with")
    task = ray.remote(num_cpus=0, max_retries=0)(check)
    files = ray.put(reads)
    answers = [
        task.options(scheduling_strategy=At(node["NodeID"], soft=False)).remote(
            shared, libraries, files
        )
        for node in nodes
    ]
    ray.wait(answers, num_returns=len(answers), timeout=PATIENCE)
    problems = [
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) {problem}"
        for node, answer in zip(nodes, answers, strict=True)
        if (problem := _node_problem(ray, answer, shared))
    ]
    if problems:
        raise InputError(f"not every node of the Ray cluster can work: {'; '.join(problems)}")


def _node_problem(ray: Any, answer: Any, shared: Path) -> str | None:
    """Why a node cannot work; None if it can, or if it is gone."""
    try:
        name = ray.get(answer, timeout=0)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PackhorseError):
            return str(error.cause)
        return f"cannot run Packhorse: {error.cause}"
    except ray.exceptions.GetTimeoutError:
        return f"has not answered for {PATIENCE:.0f} seconds"
    except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
        return None
    except ray.exceptions.RayError as error:
        return f"cannot work: {_first_line(error)}"
    if not (shared / name).exists():
        return f"writes to another {shared.parent} than this one: it must be on a shared disk"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# The connection --------------------------------------------------------------------------------


@contextmanager
def connected(address: str | None, workers: int | None = None) -> Iterator[Any]:
    """Connect to the user's cluster, or start Ray here with `workers` CPUs; yields the module."""
    with _environment(local=address is None):
        ray = _ray()
        if ray.is_initialized():
            raise InputError("this process is connected to Ray already; call ray.shutdown() first")
        with (
            _remote_options(ray, address)
            if address
            else _local_options(ray, workers or cores()) as options
        ):
            try:
                _connect(ray, options)
                yield ray
            finally:
                ray.shutdown()


def _connect(ray: Any, options: dict[str, Any]) -> None:
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # Ray raises errors of many kinds
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
def _environment(local: bool) -> Iterator[None]:
    """Set the variables that configure Ray, some of which it reads when it is imported.

    A local Ray always requires a token, whatever RAY_AUTH_MODE says, and its processes get no
    secrets except those for downloading models.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    hidden = set(secret_names()) - before.keys() - HUB_TOKENS if local else set()
    before |= {name: os.environ.pop(name) for name in hidden}
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}  # silent
    if local:
        variables |= {LOOPBACK: "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _secret()}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)


@lru_cache(maxsize=1)  # Ray keeps the first token of a process
def _secret() -> str:
    return os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)


@contextmanager
def _local_options(ray: Any, cpus: int) -> Iterator[dict[str, Any]]:
    if not ray.util.get_node_ip_address().startswith("127."):
        raise InputError(
            f"Ray was imported before and would listen on the network; set {LOOPBACK}=0 before it"
            " is, or start Ray yourself and pass its address"
        )
    # Ray makes its folder accessible to all users, so it goes into a private one; not in $TMPDIR,
    # because the paths of sockets must be short.
    root = "/tmp" if os.path.isdir("/tmp") else None
    with tempfile.TemporaryDirectory("", "ray-", root, ignore_cleanup_errors=True) as home:
        yield {
            "address": "local",
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": STORE,
            "_temp_dir": f"{home}/r",
        }


@contextmanager
def _remote_options(ray: Any, address: str) -> Iterator[dict[str, Any]]:
    """Try to connect first ourselves: Ray would try for a quarter of an hour, with messages."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise InputError(f"{address!r} is no address of a Ray cluster; one is 192.0.2.1:6379")
    if host in ("localhost", "127.0.0.1"):  # as Ray does
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
