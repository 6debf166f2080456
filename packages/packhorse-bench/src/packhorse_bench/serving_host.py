"""What the machine does while servers are under load: cores that processes use, and a GPU's work.

Load generators get cores of their own if there are enough, so that the server and they do not take
them from each other. Processor time is read from /proc, the GPU's from NVML; what cannot be read
is None.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from packhorse.monitor import nvidia
from packhorse.processor import usable_cores
from packhorse_bench.serving_servers import Endpoint, PeerServer

PROC = Path("/proc")
SAMPLE_SECONDS = 0.2  # between two looks at the GPU
ENGINE_AT = 0.8  # of the measured time: when the server is asked for its last batches
# For the thread that watches, when a loop has ended: NVML asks the driver, which may not answer.
END_SECONDS = 10.0
DUMP_SECONDS = 1.5  # for the processes of a server to write their stacks
LEAST_PINNED = 4  # cores of a machine on which generators get some for themselves


@dataclass(frozen=True)
class CoreDivision:
    """Which cores generators and servers run on; None: on all, where there are too few."""

    generators: tuple[int | None, ...]  # one core each
    servers: frozenset[int] | None

    @property
    def server_cores(self) -> int:
        """How many cores a server has."""
        return usable_cores() if self.servers is None else len(self.servers)


def divide_cores(generators: int, more: int = 0) -> CoreDivision:
    """Give generators, and `more` that are mostly idle, the last cores and servers all others.

    Only if servers keep at least half of the cores.
    """
    count = generators + more
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = cores[: usable_cores()]  # a container may use less processor time than it sees cores
    if len(cores) < max(LEAST_PINNED, 2 * count):
        return CoreDivision((None,) * count, None)
    return CoreDivision(tuple(cores[-count:]), frozenset(cores[:-count]))


def default_generators() -> int:
    """A quarter of the cores."""
    return max(1, usable_cores() // 4)


def raise_file_limit(files: int) -> None:
    """Let this process, and those that it starts, have this many open files, if that is allowed.

    A connection is an open file, and most systems start a process with a limit of about a thousand.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    limit = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@contextmanager
def on_cores(cores: frozenset[int] | None) -> Iterator[None]:
    """Processes that this thread starts inside run on these cores."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processor_seconds(root: int, proc: Path = PROC) -> dict[int, float] | None:
    """Processor time of a process and of all below it, by process id; None without /proc."""
    if not (proc / "self" / "stat").exists():
        return None
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for name in filter(str.isdigit, os.listdir(proc)):
        try:
            text = (proc / name / "stat").read_text("utf-8", "replace")
        except OSError:  # it has ended
            continue
        # The command is in brackets and may contain any character; what follows is field 3 of
        # proc(5) and on: the parent is field 4, utime and stime are 14 and 15.
        fields = text.rpartition(")")[2].split()
        parents[int(name)] = int(fields[1])
        seconds[int(name)] = (int(fields[11]) + int(fields[12])) / tick
    return {pid: spent for pid, spent in seconds.items() if _is_below(pid, root, parents)}


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == root:
            return True
        pid = parents.get(pid, 0)
    return False


def stacks(server: PeerServer, proc: Path = PROC) -> list[str]:
    """What all threads of our server are doing: the lines that its processes write on SIGUSR1."""
    begin = server.log.stat().st_size
    for pid in sorted(processor_seconds(server.process.pid, proc) or ()):
        with suppress(OSError):  # it has ended
            words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
            # Other programs that it starts, as compilers, would be killed by the signal.
            if b"packhorse.serve.processes" in words or b"packhorse" in words:
                os.kill(pid, signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)
    with server.log.open("rb") as log:
        log.seek(begin)
        return log.read().decode("utf-8", "replace").splitlines()


@dataclass(frozen=True)
class HostFigures:
    """What a server and the GPU did during a loop; None if it is not known."""

    server_cores: float | None = None  # cores that the server's processes kept busy
    gpu_busy: float | None = None  # share of the time in which the GPU ran a kernel
    fill: float | None = None  # of the server's batches: tokens of inputs / all tokens
    tokens_per_batch: float | None = None


class HostWatch:
    """Watches one loop from a thread: `with HostWatch(...) as watch`, then `watch.figures()`."""

    def __init__(
        self, endpoint: Endpoint, pid: int | None, gpu: int | None, warm: float, seconds: float
    ) -> None:
        """`pid`: of the server if it runs here; `gpu`: number of the GPU that it uses."""
        self.endpoint = endpoint
        self.pid = pid
        self.gpu = gpu
        self.warm = warm
        self.seconds = seconds
        self._figures = HostFigures()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-watch", daemon=True)

    def __enter__(self) -> HostWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join(END_SECONDS)

    @property
    def is_stuck(self) -> bool:
        """Whether it did not end with the loop, and so has no figures."""
        return self._thread.is_alive()

    def figures(self) -> HostFigures:
        """What was seen; call it after the loop."""
        return self._figures

    def _watch(self) -> None:
        if self._ended.wait(self.warm):
            return
        started = time.monotonic()
        before = self._processor()
        busy: list[float] = []
        batches: list[dict[str, Any]] | None = None
        with ExitStack() as stack:
            library = stack.enter_context(nvidia.opened())[0] if self.gpu is not None else None
            while (passed := time.monotonic() - started) < self.seconds:
                if self._ended.wait(min(SAMPLE_SECONDS, self.seconds - passed)):
                    break
                if library is not None and self.gpu is not None:
                    share = nvidia.utilization(library, self.gpu)
                    busy += [] if share is None else [share]
                if batches is None and time.monotonic() - started >= ENGINE_AT * self.seconds:
                    batches = last_batches(self.endpoint, time.monotonic() - started)
        after = self._processor()
        cores = None
        if before is not None and after is not None:
            spent = sum(after.values()) - sum(before.get(pid, 0.0) for pid in after)
            cores = spent / (time.monotonic() - started)
        computed = sum(batch["tokens"] for batch in batches or ())
        used = sum(batch["tokens"] * batch["fill"] for batch in batches or ())
        self._figures = HostFigures(
            server_cores=cores,
            gpu_busy=mean(busy) if busy else None,
            fill=used / computed if computed else None,
            tokens_per_batch=computed / len(batches) if batches else None,
        )

    def _processor(self) -> dict[int, float] | None:
        return None if self.pid is None else processor_seconds(self.pid)


def last_batches(endpoint: Endpoint, seconds: float) -> list[dict[str, Any]]:
    """Batches of a Packhorse server in the last seconds, from its /engine; none of another's."""
    try:
        status, answer = endpoint.ask("GET", "/engine", seconds=5.0)
        models = json.loads(answer)["models"] if status == 200 else []
        batches = [batch for model in models for batch in model["batches"]]
        return [batch for batch in batches if batch["seconds_ago"] <= seconds]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return []
