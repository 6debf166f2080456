"""Start one command as several ranks on this machine, and end them as one.

    code = launch(2, [sys.executable, "train.py"], say=note)

The ranks meet in a file (torch's FileStore) in a folder that only this user may enter, and Gloo and
NCCL are told to use the loopback interface: no port is open to another machine, and nothing that
arrives on one is unpickled. torchrun is not used because its rendezvous does both: it listens on
every interface, whatever address it is given, and unpickles the state that any client may write.

A rank that fails ends the others, a signal is passed on to all of them, and no process of theirs
outlives `launch`. Where `launch` itself is killed, Linux asks the ranks to stop (`dist.joined`).
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
PATIENCE = 300  # seconds that a rank which was asked to stop has for its last checkpoint
AFTER_LOSS = 30  # seconds that the others have once a rank has failed: they cannot go on
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


def launch(
    nproc: int,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str | None] | None = None,
    say: Callable[[str], None] = lambda line: None,
    patience: float = PATIENCE,
) -> int:
    """Run a command as `nproc` ranks on this machine; returns the exit code of all.

    Rank 0 has this process's streams, and only it. A signal is passed on, and the ranks have
    `patience` seconds to end. If one fails the others are ended; `say` is told which one it was,
    and why if rank 0 did not say so itself. environ: changes to theirs; None removes a name.
    """
    if nproc < 1:
        raise InputError(f"{nproc} processes cannot be started; at least one is needed")
    with tempfile.TemporaryDirectory(prefix="packhorse-ranks-") as name:  # of mode 0700
        folder = Path(name)
        variables = _environment(nproc, folder, environ or {})
        ranks: list[subprocess.Popen[bytes]] = []
        events: SimpleQueue[tuple[str, int]] = SimpleQueue()
        with _signals(events), _ended(ranks):
            for rank in range(nproc):
                ranks.append(_start(rank, argv, variables, folder))
                _watch(rank, ranks[rank], events)
            stopped, failures = _wait(ranks, events, patience)
        if stopped:
            return 128 + stopped
        return _blame(failures, folder, say) if failures else 0


def _environment(
    nproc: int, folder: Path, changes: Mapping[str, str | None]
) -> dict[str, str | None]:
    """The variables of every rank; who it is comes with `_start`."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    usual = {"OMP_NUM_THREADS": str(max(1, cores // nproc))}
    ours: dict[str, str | None] = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "NCCL_COMM_ID": None,  # an address at which NCCL would listen
        STORE: str(folder / "store"),
        LAUNCHER: str(os.getpid()),
    }
    if loopback := LOOPBACK.get(sys.platform):
        ours |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {**usual, **os.environ, **ours, **changes}


def _start(
    rank: int, argv: Sequence[str], variables: Mapping[str, str | None], folder: Path
) -> subprocess.Popen[bytes]:
    """A rank in a session of its own, so that Ctrl-C in a terminal reaches it once, through us."""
    given = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    environ = {name: value for name, value in given.items() if value is not None}
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
    """Report the end of a rank, and end what it has started itself."""

    def watch() -> None:
        if hasattr(os, "waitid"):
            # Not reaped yet, so its group's number cannot be another's.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            _kill_group(process)
        process.wait()
        events.put(("ended", rank))

    threading.Thread(target=watch, name=f"rank {rank}", daemon=True).start()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: of a group that has ended
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _signals(events: SimpleQueue) -> Iterator[None]:
    """Signals become events; Python delivers them to the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    # nohup has SIGHUP ignored, and so it stays; None is a handler that Python cannot put back.
    before = {n: old for n, old in handlers.items() if old not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, lambda number, frame: events.put(("signal", number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended(ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever happens, no rank is left behind."""
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
    """Wait until all ranks have ended, or until those that must end have had their time.

    Returns the first signal that came, 0 if none did, and the exit codes of ranks that failed.
    """
    stopped, failures, deadline = 0, {}, None
    running = set(range(len(ranks)))
    while running:
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            kind, number = events.get(timeout=left)
        except Empty:
            break
        if kind == "signal":
            stopped = stopped or number
            deadline = deadline or time.monotonic() + patience
            _send(ranks, number)
            continue
        running.discard(number)
        if code := ranks[number].returncode:
            failures[number] = code
            if deadline is None:
                deadline = time.monotonic() + min(patience, AFTER_LOSS)
                _send(ranks, signal.SIGTERM)
    return stopped, failures


def _send(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    """To those that still run, and not to what they have started: it is theirs to end."""
    for process in ranks:
        process.send_signal(number)


def _blame(failures: Mapping[int, int], folder: Path, say: Callable[[str], None]) -> int:
    """The exit code of the rank that failed by itself, and a message about it."""

    def likeliest(rank: int) -> tuple[bool, bool, bool, int]:
        # The others end as lost or, if they do not notice, by our SIGTERM.
        code = failures[rank]
        return code == -signal.SIGTERM, code == RankLost.exit_code, code > 0, rank

    rank = min(failures, key=likeliest)
    code = failures[rank]
    if code < 0:
        name = signal.Signals(-code).name
        why = " (the system does that where memory runs out)" if -code == signal.SIGKILL else ""
        say(f"rank {rank} was killed by {name}{why}; the others were ended")
        return 128 - code
    if rank:
        lines = _log(folder, rank).read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it said nothing"
        say(f"rank {rank} ended with exit code {code}, and the others with it: {last}")
    return code
