"""Status of running processes, published as small JSON files for `packhorse monitor`.

    status.publish("runner-1", {"model": "minilm", "requests": 1200})
    status.read()         # every living process of this user
    status.withdraw("runner-1")
    with status.publishing("build", {"does": "reading"}) as update:
        update({"documents": 12, "done": 40, "total": 100})

Files instead of a socket or shared memory: readers need no protocol, cannot delay a writer, and the
files of a process that was killed are recognized and removed by the next reader. Files are replaced
as a whole, so a reader never sees half of one. The folder belongs to the user
(`PACKHORSE_RUNTIME`, or below `XDG_RUNTIME_DIR`, or in the system's temporary folder) and is closed
to everyone else. Writers decide how often to publish; once a second is enough.

The monitor shows `does` (a few words), `model`, `device`, `done` of `total`, `fill`, `queue` (or a
runner's `waiting_requests`) and the speeds in `SPEEDS`, which `publishing` computes from counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse.errors import InputError

MAX_FILE_BYTES = 1 << 16  # larger files are not read
PAUSE = 0.9  # seconds between two updates; below 1, so that a writer of one per second loses none
SPEEDS = {name: f"{name}_per_second" for name in ("sequences", "tokens", "documents")}


@dataclass(frozen=True, slots=True)
class PublishedStatus:
    """The last status of one process."""

    pid: int
    name: str
    time: float  # seconds since the epoch
    figures: dict[str, Any]


def folder() -> Path:
    """The folder of status files; created if missing, refused if others could write to it."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    if configured := os.environ.get("PACKHORSE_RUNTIME"):
        path = Path(configured)
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(runtime) / "packhorse"
    else:
        path = Path(tempfile.gettempdir()) / f"packhorse-{user}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()  # of a link itself: where it leads, others could have chosen
    except OSError as error:
        raise InputError(
            f"cannot use the folder {path}: {error.strerror}; "
            "set PACKHORSE_RUNTIME to a folder of your own"
        ) from error
    if os.name == "posix":
        is_own_folder = stat.S_ISDIR(info.st_mode) and info.st_uid == user
        if not is_own_folder or stat.S_IMODE(info.st_mode) & 0o022:
            raise InputError(
                f"the folder {path} is not yours alone; "
                "make it so (chmod 700) or set PACKHORSE_RUNTIME to one that is"
            )
    return path


def publish(name: str, figures: Mapping[str, Any]) -> None:
    """Publish `figures` as the status of this process under `name`."""
    status = {
        "pid": os.getpid(),
        "born": _born(os.getpid()),
        "name": name,
        "time": time.time(),
        "figures": dict(figures),
    }
    text = json.dumps(status, allow_nan=False)
    target = _file(name)
    fresh = target.with_suffix(".new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(fresh, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error


def withdraw(name: str) -> None:
    """Remove the status of this process under `name`."""
    with contextlib.suppress(OSError, InputError):
        _file(name).unlink(missing_ok=True)


@contextmanager
def publishing(
    name: str, constants: Mapping[str, Any]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function to call with new figures, as often as you like; withdrawn at the end.

    It writes at most one status per second, which has all of `constants` and the growth per second
    of what is counted. It raises nothing: work goes on even if no status can be written.
    """
    last_time = -math.inf
    last_figures: Mapping[str, Any] = {}

    def update(figures: Mapping[str, Any]) -> None:
        nonlocal last_time, last_figures
        now = time.monotonic()
        if now - last_time < PAUSE:
            return
        speeds = {
            SPEEDS[count]: (figures[count] - last_figures[count]) / (now - last_time)
            for count in SPEEDS.keys() & figures.keys() & last_figures.keys()
        }
        last_time = now
        last_figures = figures
        with contextlib.suppress(InputError):
            publish(name, _finite({**constants, **speeds, **figures}))

    try:
        yield update
    finally:
        withdraw(name)


def _finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures without NaN and infinities, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def read() -> list[PublishedStatus]:
    """The status of every living process, oldest process first; removes files of dead ones."""
    statuses: list[tuple[int, PublishedStatus]] = []
    for path in folder().glob("*.json"):
        try:
            content = _parse(path)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue  # incomplete, not written by us, or removed meanwhile
        if _alive(content["pid"], content["born"]):
            status = PublishedStatus(
                pid=content["pid"],
                name=content["name"],
                time=content["time"],
                figures=content["figures"],
            )
            statuses.append((content["born"] or 0, status))
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    statuses.sort(key=lambda item: (item[0], item[1].pid))
    return [status for _, status in statuses]


def _file(name: str) -> Path:
    if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
        raise InputError(f"figures need a plain name (letters, digits, - _ .), not {name!r:.80}")
    return folder() / f"{os.getpid()}.{name}.json"


def _parse(path: Path) -> dict[str, Any]:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("not a regular file")  # opening a pipe would wait for a writer
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    content = json.loads(text)
    types = {"pid": int, "born": int | None, "name": str, "time": float, "figures": dict}
    if not all(isinstance(content[key], expected) for key, expected in types.items()):
        raise ValueError("not a status file")
    return content


def _alive(pid: int, born: int | None) -> bool:
    """Does the process that wrote the file still run? Its id may have been reused."""
    if os.name == "posix":
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
    return pid > 0 and born == _born(pid)


def _born(pid: int) -> int | None:
    """When the process started, in kernel ticks; None if the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The process name, in parentheses, may contain anything, so parse what follows the last one.
    state, *numbers = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(numbers[18])
