"""The packhorse processes that run: what they said of themselves, and what the kernel says of them.

Two sources are joined by the number of the process. Who publishes (`packhorse.status`) is shown
with its figures, one line for each name it publishes under. Who only looks like packhorse by its
command line, because it has just begun or is another user's, is shown without. The kernel is asked
through /proc where there is one, because reading three small files is faster than importing psutil;
elsewhere psutil is asked, and without it only what was published is known.

What was published is text from a file: every value is checked for its kind before it is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from packhorse.errors import MissingExtra
from packhorse.monitor.device import Device
from packhorse.status import PublishedStatus

PROC = Path("/proc")
LONGEST = 200  # characters of a word that someone published
LARGEST = 1e18  # beyond it nothing is a figure
WITH_VALUE = {"-X", "-W", "--check-hash-based-pycs"}  # of Python's own options


@dataclass(frozen=True, slots=True)
class Facts:
    """What the system says of one process; None is what it keeps to itself."""

    command: Sequence[str] = ()
    user: str | None = None
    memory: int | None = None  # bytes that are resident
    seconds: float | None = None  # since it began


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the monitor; None is what is not known or does not apply."""

    pid: int
    user: str | None
    command: str
    name: str | None = None  # what it publishes under; None: it does not
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
    figures: dict[str, Any] | None = None  # all that it published


class System(Protocol):
    """Who runs, and facts about them."""

    def pids(self) -> Iterable[int]:
        """Every process that can be seen."""
        ...

    def command(self, pid: int) -> Sequence[str]:
        """Its command line; nothing where that is not told."""
        ...

    def facts(self, pid: int) -> Facts | None:
        """About one of them; None: it is gone."""
        ...


def system(proc: Path = PROC) -> tuple[System, list[str]]:
    """The way to ask that there is here, and what a user should know of that."""
    if (proc / "uptime").exists():
        return ByFiles(proc), []
    try:
        import psutil
    except ImportError:
        why = MissingExtra("psutil", "monitor")
        return Unknown(), [f"of processes only what they publish is known: {why}"]
    return ByPsutil(psutil), []


@dataclass(frozen=True, slots=True)
class ByFiles:
    """Linux: a folder a process."""

    proc: Path

    def pids(self) -> Iterable[int]:
        """Every process that can be seen."""
        return [int(name) for name in os.listdir(self.proc) if name.isdigit()]

    def command(self, pid: int) -> Sequence[str]:
        """Its command line; nothing where that is not told."""
        try:
            text = (self.proc / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            return ()
        return text.removesuffix("\0").split("\0") if text else ()

    def facts(self, pid: int) -> Facts | None:
        """About one of them; None: it is gone."""
        place = self.proc / str(pid)
        try:
            owner, text = place.stat().st_uid, (place / "stat").read_text("utf-8", "replace")
        except PermissionError:
            return Facts()
        except OSError:
            return None
        # Its name stands in brackets and may hold anything: what follows the last one counts.
        state, *numbers = text.rpartition(")")[2].split()
        if state in "ZX":
            return None
        ticks, pages = int(numbers[18]), int(numbers[20])
        memory, seconds = pages * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK")
        return Facts(self.command(pid), _user(owner), memory, max(0.0, self._up() - seconds))

    def _up(self) -> float:
        return float((self.proc / "uptime").read_text().split()[0])


@dataclass(frozen=True, slots=True)
class ByPsutil:
    """Everywhere else."""

    psutil: Any

    def pids(self) -> Iterable[int]:
        """Every process that can be seen."""
        return self.psutil.pids()

    def command(self, pid: int) -> Sequence[str]:
        """Its command line; nothing where that is not told."""
        try:
            return self.psutil.Process(pid).cmdline()
        except self.psutil.Error:
            return ()

    def facts(self, pid: int) -> Facts | None:
        """About one of them; None: it is gone."""
        try:
            process = self.psutil.Process(pid)
            # What is not allowed to be read is None.
            told = process.as_dict(["cmdline", "username", "memory_info", "create_time", "status"])
        except self.psutil.NoSuchProcess:  # a zombie is one, too
            return None
        if told["status"] == self.psutil.STATUS_ZOMBIE:
            return None
        memory, born = told["memory_info"], told["create_time"]
        return Facts(
            told["cmdline"] or (),
            told["username"],
            memory and memory.rss,
            None if born is None else max(0.0, time.time() - born),
        )


@dataclass(frozen=True, slots=True)
class Unknown:
    """No way to ask."""

    def pids(self) -> Iterable[int]:
        """Every process that can be seen."""
        return ()

    def command(self, pid: int) -> Sequence[str]:
        """Its command line; nothing where that is not told."""
        return ()

    def facts(self, pid: int) -> Facts | None:
        """About one of them; None: it is gone."""
        return Facts()


def found(system: System, said: Sequence[PublishedStatus], gpus: Sequence[Device]) -> list[Process]:
    """Every packhorse process, those that run longest first."""
    facts = {each.pid: system.facts(each.pid) for each in said}
    lines = [_speaker(each, known) for each in said if (known := facts[each.pid]) is not None]
    for pid in system.pids():
        if pid in facts or ours(system.command(pid))[1:2] in ([], ["monitor"]):
            continue
        if (known := system.facts(pid)) is not None:
            lines.append(_line(pid, known))
    lines = [_on(gpus, line) for line in lines]
    return sorted(lines, key=lambda line: (-(line.seconds or 0.0), line.pid, line.name or ""))


def ours(command: Sequence[str]) -> list[str]:
    """A packhorse command line as one would type it; nothing where it is none."""
    if not command:
        return []
    first, *rest = command
    name = os.path.basename(first)
    if name == "packhorse":
        return [name, *rest]
    while name.startswith(("python", "pypy")) and rest:
        word, *rest = rest
        if word == "-m":
            named = bool(rest) and rest[0].split(".")[0] == "packhorse"
            return rest if named else []
        if word in WITH_VALUE:
            rest = rest[1:]
        elif not word.startswith("-"):
            return ours([word, *rest]) if os.path.basename(word) == "packhorse" else []
    return []


def _line(pid: int, known: Facts) -> Process:
    first, *rest = known.command or ("",)
    words = ours(known.command) or [os.path.basename(first), *rest]
    return Process(pid, known.user, " ".join(words), memory=known.memory, seconds=known.seconds)


def _speaker(said: PublishedStatus, known: Facts) -> Process:
    figures = said.figures
    queue = _number(figures, "queue")
    return replace(
        _line(said.pid, known),
        name=said.name,
        does=_does(figures),
        device=_words(figures, "device"),
        sequences_per_second=_number(figures, "sequences_per_second"),
        tokens_per_second=_number(figures, "tokens_per_second"),
        fill=_number(figures, "fill"),
        queue=_number(figures, "waiting_requests") if queue is None else queue,
        silent=_number({"silent": max(0.0, time.time() - said.time)}, "silent"),
        figures=figures,
    )


def _does(figures: dict[str, Any]) -> str | None:
    """A few words: what, how far, with which model."""
    done, total = _number(figures, "done"), _number(figures, "total")
    parts = [_words(figures, "does")]
    if done is not None and total and total > 0:
        parts.append(f"{min(1.0, done / total):.0%}")
    parts.append(_words(figures, "model"))
    if (speed := _number(figures, "documents_per_second")) is not None:
        parts.append(f"{speed:,.0f} documents/s")
    return ", ".join(part for part in parts if part) or None


def _words(figures: dict[str, Any], name: str) -> str | None:
    value = figures.get(name)
    return value[:LONGEST] if isinstance(value, str) else None


def _number(figures: dict[str, Any], name: str) -> float | None:
    value = figures.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -LARGEST < value < LARGEST else None


def _on(gpus: Sequence[Device], line: Process) -> Process:
    """With what it uses of GPUs, as far as NVML tells."""
    used = {gpu.device: gpu.memory_by_pid[line.pid] for gpu in gpus if line.pid in gpu.pids}
    if not used:
        return line
    known = [amount for amount in used.values() if amount is not None]
    return replace(
        line, device=line.device or ", ".join(used), gpu_memory=sum(known) if known else None
    )


def _user(number: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return str(number)
