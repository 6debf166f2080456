"""The folders of a run's checkpoints: step-00001200 is whole, whenever the process was killed.

    with claim(run):                          # one process a folder
        with draft(run, 1200) as folder:      # hidden, to be filled
            publish(folder, run, 1200)        # one rename

A checkpoint is filled under a hidden name and takes its own by a rename; one that goes is hidden by
a rename before it is deleted. Where a step is written a second time, the new folder first stands
beside the old as step-00001200.new, so that no moment is without the one or the other. What a kill
leaves under hidden names is swept away when the run is next claimed. The price is the room of one
more checkpoint on the disk while it is written.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packhorse.atomic import lock, sync
from packhorse.errors import CheckpointError

LOCK = "lock"
NAME = re.compile(r"step-(\d{8,})(\.new)?", re.ASCII)
# Hidden once by us, and once more by what writes the model into a draft.
LITTER = re.compile(r"\.+step-\d{8,}\..*\.(partial|old)", re.ASCII)


@contextmanager
def claim(run: Path) -> Iterator[None]:
    """Hold the folder alone, made if need be; what a killed process left half done is cleared."""
    with speaking(run):
        run.mkdir(parents=True, exist_ok=True)
        file = (run / LOCK).open("ab")
    with file:
        lock(file, run)
        with speaking(run):
            for path in list(run.iterdir()):
                if LITTER.fullmatch(path.name):
                    shutil.rmtree(path)
            settle(run)
        yield


def listed(run: Path) -> list[tuple[int, Path]]:
    """Steps and their folders, the last first; of one that was being replaced, the new first."""
    if not run.is_dir():
        return []
    found = [(match, path) for path in run.iterdir() if (match := NAME.fullmatch(path.name))]
    found.sort(key=lambda entry: (int(entry[0][1]), entry[0][2] is not None), reverse=True)
    return [(int(match[1]), path) for match, path in found]


def place(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / f"step-{step:08}"


@contextmanager
def draft(run: Path, step: int) -> Iterator[Path]:
    """A name for a folder to fill; what still has it at the end vanishes."""
    path = _hidden(place(run, step), "partial")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(draft: Path, run: Path, step: int) -> None:
    """The draft becomes the checkpoint of its step; an earlier one of the same step goes."""
    target = place(run, step)
    if not target.exists():
        draft.rename(target)
        sync(run)
        return
    draft.rename(target.with_name(f"{target.name}.new"))
    sync(run)
    settle(run)


def settle(run: Path) -> None:
    """Let every folder that was to replace another do so."""
    for path in run.glob("step-*.new"):
        if NAME.fullmatch(path.name):
            target = path.with_suffix("")
            if target.exists():
                discard(target)
            path.rename(target)
            sync(run)


def discard(path: Path) -> None:
    """Delete a checkpoint, which never stands there half deleted."""
    hidden = path.rename(_hidden(path, "old"))
    sync(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{kind}")


@contextmanager
def speaking(path: Path) -> Iterator[None]:
    """What the disk refuses is the user's to hear of, by name."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
