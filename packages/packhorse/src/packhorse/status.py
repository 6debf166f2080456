"""The figures a running process makes public: one small JSON file each, for `packhorse monitor`.

    status.publish("runner-1", {"model": "minilm", "requests": 1200})
    status.read()         # every living process of this user
    status.withdraw("runner-1")
    with status.speaking("build", {"does": "reading"}) as say:
        say({"documents": 12, "done": 40, "total": 100})

A file instead of a socket or shared memory: readers need no protocol, a writer cannot be held up
by one, and what is left of a process that was killed is recognised and removed by the next reader.
Files are replaced whole, so a reader never sees half of one. The folder is the user's own
(`PACKHORSE_RUNTIME`, else below `XDG_RUNTIME_DIR`, else in the system's temporary folder), closed
to everyone else. How often to publish is the writer's business; once a second is plenty.

What the monitor knows to show: `does` (a few words), `model`, `device`, `done` of `total`, `fill`,
`queue` (or a runner's `waiting_requests`) and the speeds in `SPEEDS`, which `speaking` finds itself
from what is counted.
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

LARGEST = 1 << 16  # bytes of a file that is still read
PAUSE = 0.9  # seconds between two words of one who speaks; who waits a second is never too early
SPEEDS = {name: f"{name}_per_second" for name in ("sequences", "tokens", "documents")}


@dataclass(frozen=True, slots=True)
class Published:
    """What one process said last."""

    pid: int
    name: str
    time: float  # seconds since the epoch
    figures: dict[str, Any]


def folder() -> Path:
    """Where the figures lie; made if it is not there, refused if others could write to it."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    if named := os.environ.get("PACKHORSE_RUNTIME"):
        place = Path(named)
    elif home := os.environ.get("XDG_RUNTIME_DIR"):
        place = Path(home) / "packhorse"
    else:
        place = Path(tempfile.gettempdir()) / f"packhorse-{user}"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.lstat()
    except OSError as error:
        raise InputError(
            f"cannot use the folder {place}: {error.strerror}; "
            "set PACKHORSE_RUNTIME to a folder of your own"
        ) from error
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == user if os.name == "posix" else True
    if not mine or (os.name == "posix" and stat.S_IMODE(found.st_mode) & 0o022):
        raise InputError(
            f"the folder {place} is not yours alone; "
            "make it so (chmod 700) or set PACKHORSE_RUNTIME to one that is"
        )
    return place


def publish(name: str, figures: Mapping[str, Any]) -> None:
    """Make `figures` the last word of this process under `name`."""
    said = {"pid": os.getpid(), "born": _born(os.getpid()), "name": name, "time": time.time()}
    text = json.dumps({**said, "figures": dict(figures)}, allow_nan=False)
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
    """This process has nothing more to say under `name`."""
    with contextlib.suppress(OSError, InputError):
        _file(name).unlink(missing_ok=True)


@contextmanager
def speaking(name: str, about: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Something to tell figures to, as often as one likes; withdrawn when the work is over.

    A word a second is written, each with all of `about` and how fast what is counted has grown
    since the one before. Nothing is raised: that nobody can look is no reason to stop working.
    """
    last, counted = -math.inf, {}

    def say(figures: Mapping[str, Any]) -> None:
        nonlocal last, counted
        now = time.monotonic()
        if now - last < PAUSE:
            return
        speeds = {
            SPEEDS[each]: (figures[each] - counted[each]) / (now - last)
            for each in SPEEDS.keys() & figures.keys() & counted.keys()
        }
        last, counted = now, figures
        with contextlib.suppress(InputError):
            publish(name, _finite({**about, **speeds, **figures}))

    try:
        yield say
    finally:
        withdraw(name)


def _finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is not a number."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def read() -> list[Published]:
    """The last word of every living process, oldest process first; dead ones are tidied away."""
    found = []
    for path in folder().glob("*.json"):
        try:
            said = _parse(path)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue  # half made, not ours, or gone: a monitor has no use for it
        if _alive(said["pid"], said["born"]):
            words = said["pid"], said["name"], said["time"], said["figures"]
            found.append((said["born"] or 0, Published(*words)))
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return [published for _, published in sorted(found, key=lambda one: (one[0], one[1].pid))]


def _file(name: str) -> Path:
    if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
        raise InputError(f"figures need a plain name (letters, digits, - _ .), not {name!r:.80}")
    return folder() / f"{os.getpid()}.{name}.json"


def _parse(path: Path) -> dict[str, Any]:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("a pipe would be waited for")
    with path.open("rb") as file:
        text = file.read(LARGEST + 1)
    said = json.loads(text)
    kinds = {"pid": int, "born": int | None, "name": str, "time": float, "figures": dict}
    if not all(isinstance(said[key], kind) for key, kind in kinds.items()):
        raise ValueError("written by someone else")
    return said


def _alive(pid: int, born: int | None) -> bool:
    """Does the process that wrote still run? Its number alone may be another's by now."""
    if os.name == "posix":
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
    return pid > 0 and born == _born(pid)


def _born(pid: int) -> int | None:
    """When the process started, in ticks of the kernel; None where no kernel tells."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    state, *numbers = text.rpartition(")")[2].split()  # its name, in brackets, may hold anything
    return None if state in "ZX" else int(numbers[18])
