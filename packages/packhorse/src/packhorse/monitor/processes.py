"""The packhorse processes that run: what they publish, and what the kernel knows about them.

Two sources are joined by process id. A process that publishes (`packhorse.status`) is shown with
its figures, one line per name it publishes under. One that is recognized only by its command line,
because it has just started or is another user's, is shown without. The kernel is read through /proc
where there is one, because reading three small files is faster than importing psutil; elsewhere
psutil is used, and without it only what was published is known.

Published figures are text from a file: every value's type is checked before it is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from packhorse.errors import MissingExtra
from packhorse.monitor.machine import Device
from packhorse.status import PublishedStatus

PROC = Path("/proc")
LONGEST = 200  # characters of a published text
LARGEST = 1e18  # larger numbers are not shown
WITH_VALUE = {"-X", "-W", "--check-hash-based-pycs"}  # Python's options that take a value


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the system knows about one process; None for what it does not reveal."""

    command: Sequence[str] = ()
    user: str | None = None
    memory: int | None = None  # resident, in bytes
    seconds: float | None = None  # since it started


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the monitor; None for what is unknown or does not apply."""

    pid: int
    user: str | None
    command: str
    name: str | None = None  # under which it publishes; None: it does not
    does: str | None = None
    device: str | None = None
    sequences_per_second: float | None = None
    tokens_per_second: float | None = None
    fill: float | None = None
    queue: float | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    seconds: float | None = None
    silent: float | None = None  # seconds since it published last
    figures: dict[str, Any] | None = None  # everything it published


class System(Protocol):
    """A way to list processes and to read facts about them."""

    def pids(self) -> Iterable[int]:
        """Return all visible processes."""
        ...

    def command(self, pid: int) -> Sequence[str]:
        """Return a process's command line; empty if it cannot be read."""
        ...

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return facts about a process; None if it has ended."""
        ...


def system(proc: Path = PROC) -> tuple[System, list[str]]:
    """Return the best way to read processes on this system, and notes for the user."""
    if (proc / "uptime").exists():
        return ProcSystem(proc), []
    try:
        import psutil
    except ImportError:
        missing = MissingExtra("psutil", "monitor")
        return NoSystem(), [f"only published figures of processes are known: {missing}"]
    return PsutilSystem(psutil), []


@dataclass(frozen=True, slots=True)
class ProcSystem:
    """Reads /proc, which has a folder per process (Linux)."""

    proc: Path

    def pids(self) -> Iterable[int]:
        """Return all visible processes."""
        return [int(name) for name in os.listdir(self.proc) if name.isdigit()]

    def command(self, pid: int) -> Sequence[str]:
        """Return a process's command line; empty if it cannot be read."""
        try:
            text = (self.proc / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            return ()
        return text.removesuffix("\0").split("\0") if text else ()

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return facts about a process; None if it has ended."""
        folder = self.proc / str(pid)
        try:
            owner = folder.stat().st_uid
            text = (folder / "stat").read_text("utf-8", "replace")
        except PermissionError:
            return ProcessFacts()
        except OSError:
            return None
        # The name of the process is in brackets and may contain any character, brackets too: the
        # other fields start after the last one, with number 3 of proc(5).
        state, *numbers = text.rpartition(")")[2].split()  # numbers[0] is field 4
        if state in "ZX":  # a zombie, or dead
            return None
        started = int(numbers[18]) / os.sysconf("SC_CLK_TCK")  # starttime (22), seconds since boot
        memory = int(numbers[20]) * os.sysconf("SC_PAGE_SIZE")  # rss (24)
        seconds = max(0.0, self._uptime() - started)
        return ProcessFacts(self.command(pid), _user(owner), memory, seconds)

    def _uptime(self) -> float:
        return float((self.proc / "uptime").read_text().split()[0])


@dataclass(frozen=True, slots=True)
class PsutilSystem:
    """Uses psutil, on other systems."""

    psutil: Any

    def pids(self) -> Iterable[int]:
        """Return all visible processes."""
        return self.psutil.pids()

    def command(self, pid: int) -> Sequence[str]:
        """Return a process's command line; empty if it cannot be read."""
        try:
            return self.psutil.Process(pid).cmdline()
        except self.psutil.Error:
            return ()

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return facts about a process; None if it has ended."""
        try:
            process = self.psutil.Process(pid)
            # Values that may not be read are None.
            values = process.as_dict(
                ["cmdline", "username", "memory_info", "create_time", "status"]
            )
        except self.psutil.NoSuchProcess:  # ZombieProcess is a subclass
            return None
        if values["status"] == self.psutil.STATUS_ZOMBIE:
            return None
        memory = values["memory_info"]
        created = values["create_time"]
        return ProcessFacts(
            values["cmdline"] or (),
            values["username"],
            memory and memory.rss,
            None if created is None else max(0.0, time.time() - created),
        )


@dataclass(frozen=True, slots=True)
class NoSystem:
    """Knows no processes."""

    def pids(self) -> Iterable[int]:
        """Return all visible processes."""
        return ()

    def command(self, pid: int) -> Sequence[str]:
        """Return a process's command line; empty if it cannot be read."""
        return ()

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return facts about a process; None if it has ended."""
        return ProcessFacts()


def find_processes(
    system: System, published: Sequence[PublishedStatus], gpus: Sequence[Device]
) -> list[Process]:
    """Return all packhorse processes, those that run longest first."""
    facts_by_pid = {status.pid: system.facts(status.pid) for status in published}
    lines: list[Process] = []
    for status in published:
        facts = facts_by_pid[status.pid]
        if facts is not None:
            lines.append(_publishing(status, facts))
    for pid in system.pids():
        if pid in facts_by_pid:
            continue
        # Without a command it is not packhorse, or only prints help; monitors are not shown.
        subcommand = packhorse_command(system.command(pid))[1:2]
        if subcommand in ([], ["monitor"]):
            continue
        facts = system.facts(pid)
        if facts is not None:
            lines.append(_line(pid, facts))
    lines = [_with_gpus(gpus, line) for line in lines]
    return sorted(lines, key=lambda line: (-(line.seconds or 0.0), line.pid, line.name or ""))


def packhorse_command(command: Sequence[str]) -> list[str]:
    """Return a packhorse command line as a user types it; empty if it is another program's."""
    if not command:
        return []
    first, *rest = command
    name = os.path.basename(first)
    if name == "packhorse":
        return [name, *rest]
    while name.startswith(("python", "pypy")) and rest:
        word, *rest = rest
        if word == "-m":
            is_packhorse = bool(rest) and rest[0].split(".")[0] in ("packhorse", "packhorse_port")
            return rest if is_packhorse else []
        if word in WITH_VALUE:
            rest = rest[1:]
        elif not word.startswith("-"):
            return packhorse_command([word, *rest]) if os.path.basename(word) == "packhorse" else []
    return []


def _line(pid: int, facts: ProcessFacts) -> Process:
    first, *rest = facts.command or ("",)
    words = packhorse_command(facts.command) or [os.path.basename(first), *rest]
    return Process(pid, facts.user, " ".join(words), memory=facts.memory, seconds=facts.seconds)


def _publishing(status: PublishedStatus, facts: ProcessFacts) -> Process:
    figures = status.figures
    queue = _number(figures, "queue")
    return replace(
        _line(status.pid, facts),
        name=status.name,
        does=_does(figures),
        device=_text(figures, "device"),
        sequences_per_second=_number(figures, "sequences_per_second"),
        tokens_per_second=_number(figures, "tokens_per_second"),
        fill=_number(figures, "fill"),
        queue=_number(figures, "waiting_requests") if queue is None else queue,
        silent=_number({"silent": max(0.0, time.time() - status.time)}, "silent"),
        figures=figures,
    )


def _does(figures: dict[str, Any]) -> str | None:
    """Describe the work in a few words: what it is, how far it is, with which model."""
    finished = _number(figures, "done")
    total = _number(figures, "total")
    parts = [_text(figures, "does")]
    if finished is not None and total and total > 0:
        parts.append(f"{min(1.0, finished / total):.0%}")
    parts.append(_text(figures, "model"))
    if (speed := _number(figures, "documents_per_second")) is not None:
        parts.append(f"{speed:,.0f} documents/s")
    return ", ".join(part for part in parts if part) or None


def _text(figures: dict[str, Any], name: str) -> str | None:
    value = figures.get(name)
    return value[:LONGEST] if isinstance(value, str) else None


def _number(figures: dict[str, Any], name: str) -> float | None:
    value = figures.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -LARGEST < value < LARGEST else None


def _with_gpus(gpus: Sequence[Device], line: Process) -> Process:
    """Add the GPUs and the GPU memory that a process uses, as far as NVML knows."""
    used = {gpu.device: gpu.memory_by_pid[line.pid] for gpu in gpus if line.pid in gpu.pids}
    if not used:
        return line
    amounts = [amount for amount in used.values() if amount is not None]
    return replace(
        line, device=line.device or ", ".join(used), gpu_memory=sum(amounts) if amounts else None
    )


def _user(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)
