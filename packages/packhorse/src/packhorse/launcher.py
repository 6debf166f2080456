"""Start a command as several ranks on this machine, and end them together.

    code = launch(2, [sys.executable, "train.py"], report=note)

The ranks meet in a file (torch's FileStore) in a folder that only this user may enter, and Gloo and
NCCL use the loopback interface: no port is open to another machine, and nothing that arrives on one
is unpickled. torchrun is not used because its rendezvous does both: it listens on every interface,
whatever its address, and unpickles the state that any client may write.

A rank that fails ends the others, a signal is passed on to all of them, and none of their processes
outlives `launch`. If `launch` itself is killed, Linux sends the ranks SIGTERM (`dist.joined`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from packhorse.errors import InputError, RankLost

STORE = "PACKHORSE_STORE"  # the file in which the ranks meet
LAUNCHER = "PACKHORSE_LAUNCHER"  # the process id of `launch`
PATIENCE = 300  # seconds that ranks have to write a last checkpoint after a signal
AFTER_LOSS = 30  # seconds that the others have after a rank has failed: they cannot continue
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


def launch(
    nproc: int,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str | None] | None = None,
    report: Callable[[str], None] = lambda line: None,
    patience: float = PATIENCE,
) -> int:
    """Run a command as `nproc` ranks on this machine; returns the exit code of the whole.

    Only rank 0 has this process's streams. A signal is passed on, and the ranks have `patience`
    seconds to end. If one fails the others are ended; `report` is called with a message that names
    the rank, and the reason if rank 0 did not print it itself. environ: changes to the environment
    of the ranks; None removes a variable.
    """
    if nproc < 1:
        raise InputError(f"cannot start {nproc} processes; at least one is needed")
    with tempfile.TemporaryDirectory(prefix="packhorse-ranks-") as name:  # has mode 0700
        folder = Path(name)
        variables = _environment(nproc, folder, environ or {})
        ranks: list[subprocess.Popen[bytes]] = []
        events: SimpleQueue[tuple[str, int]] = SimpleQueue()
        with _signals_as_events(events), _killed_at_exit(ranks):
            for rank in range(nproc):
                ranks.append(_start(rank, argv, variables, folder))
                _watch(rank, ranks[rank], events)
            signal_number, failures = _wait(ranks, events, patience)
        if signal_number:
            return 128 + signal_number
        return _report_failure(failures, folder, report) if failures else 0


def _environment(
    nproc: int, folder: Path, changes: Mapping[str, str | None]
) -> dict[str, str | None]:
    """The variables of every rank; `_start` adds the rank itself."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    required: dict[str, str | None] = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "NCCL_COMM_ID": None,  # an address on which NCCL would listen
        STORE: str(folder / "store"),
        LAUNCHER: str(os.getpid()),
    }
    if loopback := LOOPBACK.get(sys.platform):
        required |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {**defaults, **os.environ, **required, **changes}


def _start(
    rank: int, argv: Sequence[str], variables: Mapping[str, str | None], folder: Path
) -> subprocess.Popen[bytes]:
    """Start a rank in its own session, so that Ctrl-C in a terminal reaches it once, through us."""
    variables = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    environ = {name: value for name, value in variables.items() if value is not None}
    if rank == 0:
        return subprocess.Popen(argv, env=environ, start_new_session=True)
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(
            argv,
            env=environ,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )


def _log(folder: Path, rank: int) -> Path:
    return folder / f"stderr-{rank}"


def _watch(rank: int, process: subprocess.Popen[bytes], events: SimpleQueue) -> None:
    """In a thread: kill what a rank has started when it ends, and report the end."""

    def watch() -> None:
        if hasattr(os, "waitid"):
            # WNOWAIT: the process is not reaped yet, so its group id cannot be reused by another.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            _kill_group(process)
        process.wait()
        events.put(("ended", rank))

    threading.Thread(target=watch, name=f"rank {rank}", daemon=True).start()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: the group has ended
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _signals_as_events(events: SimpleQueue) -> Iterator[None]:
    """Put signals into the queue; Python delivers them to the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    # An ignored signal stays ignored (nohup ignores SIGHUP); None is a handler that was not
    # installed from Python, which Python cannot restore.
    replaced = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (None, signal.SIG_IGN)
    }
    for number in replaced:
        signal.signal(number, lambda number, frame: events.put(("signal", number)))
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


@contextmanager
def _killed_at_exit(ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Kill all ranks that still run when the block ends, however it ends."""
    try:
        yield
    finally:
        for process in ranks:
            if process.poll() is None:
                _kill_group(process)
        for process in ranks:
            process.wait()


def _wait(
    ranks: list[subprocess.Popen[bytes]], events: SimpleQueue, patience: float
) -> tuple[int, dict[int, int]]:
    """Wait until all ranks have ended, or until the deadline after a signal or a failure.

    Returns the first signal that came, 0 if none did, and the exit codes of ranks that failed.
    """
    first_signal = 0
    failures: dict[int, int] = {}
    deadline = None
    running = set(range(len(ranks)))
    while running:
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            kind, number = events.get(timeout=timeout)
        except Empty:
            break
        if kind == "signal":
            first_signal = first_signal or number
            deadline = deadline or time.monotonic() + patience
            _send(ranks, number)
            continue
        running.discard(number)
        if code := ranks[number].returncode:
            failures[number] = code
            if deadline is None:
                deadline = time.monotonic() + min(patience, AFTER_LOSS)
                _send(ranks, signal.SIGTERM)
    return first_signal, failures


def _send(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    """Signal the ranks that still run, not their children: ending those is up to the ranks."""
    for process in ranks:
        process.send_signal(number)


def _report_failure(
    failures: Mapping[int, int], folder: Path, report: Callable[[str], None]
) -> int:
    """Report the rank that failed first, and return its exit code."""

    def consequence(rank: int) -> tuple[bool, bool, bool, int]:
        # After the first failure the other ranks end with RankLost or, if they do not notice, by
        # our SIGTERM: what ended otherwise is the cause, and death by another signal most likely.
        code = failures[rank]
        return code == -signal.SIGTERM, code == RankLost.exit_code, code > 0, rank

    rank = min(failures, key=consequence)
    code = failures[rank]
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
        report(f"rank {rank} was killed by {name}{hint}; the others were ended")
        return 128 - code
    if rank:
        lines = _log(folder, rank).read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        report(f"rank {rank} ended with exit code {code}, and the others with it: {last}")
    return code
