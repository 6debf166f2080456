"""What a training checkpoint says of itself: state.json, written last, which vouches for the rest.

Beside progress and settings it holds the size and crc32c of every file, and a sum of its own. A
file that is missing, cut or changed by a bit is found before anything is put into a model; of
state.json itself every byte counts, for it must be what its content would be written as. `vouch`
reads each file back once it is on the disk, at some GB/s: the price of knowing.

The format's number grows only when an older Packhorse would misread a checkpoint. That one then
refuses it as input that it cannot use, not as a damaged one, for which a run would go back to an
older; so how state.json is summed stays the same in every format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch

from packhorse import __version__
from packhorse.atomic import sync
from packhorse.checkpoint import files
from packhorse.errors import CheckpointError, InputError
from packhorse.wire import crc32c

FORMAT = 1
NAME = "state.json"
LARGEST = 64 << 20  # bytes of state.json
CHUNK = 1 << 20


@dataclass(frozen=True)
class Progress:
    """How far a run is, in JSON's values; a tuple comes back as a list."""

    step: int  # steps that are done
    cursor: dict[str, Any] = field(default_factory=dict)  # of the data, behind the last batch used
    counters: dict[str, Any] = field(default_factory=dict)  # sequences, tokens, bytes of the log
    metrics: dict[str, float] = field(default_factory=dict)  # of the evaluation at this step
    config: dict[str, Any] = field(default_factory=dict)  # the settings, resolved


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, as its state.json tells it."""

    path: Path
    progress: Progress
    optimizer: dict[str, Any] = field(repr=False)  # its kind, and its groups by parameter names
    world: int  # ranks that wrote it
    files: dict[str, tuple[int, str]] = field(repr=False)  # bytes and crc32c
    notes: tuple[str, ...] = ()  # what a user should know of how it was found or restored

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.progress.step


def vouch(folder: Path, progress: Progress, optimizer: Mapping[str, Any], world: int) -> None:
    """Make the files of a folder a checkpoint; they are on the disk when this returns."""
    inside = sorted(folder.rglob("*"))
    told = {
        "format": FORMAT,
        "written_by": __version__,
        "torch": str(torch.__version__),
        **asdict(progress),
        "world": world,
        "optimizer": dict(optimizer),
        "files": {_name(path, folder): _settled(path) for path in inside if path.is_file()},
    }
    (folder / NAME).write_bytes(_rendered(told))
    _settled(folder / NAME)
    for each in (*(path for path in inside if path.is_dir()), folder):
        sync(each)


def tell(path: Path) -> Saved:
    """What a checkpoint says; of its files only the sizes are looked at."""
    if not files.exists(path, NAME):
        raise CheckpointError(f"{path} is damaged, or no checkpoint of a run: there is no {NAME}")
    with _naming(path), files.open_file(path, NAME) as file:
        told = _parsed(file.read(LARGEST), path / NAME)
        try:
            saved = _saved(path, told)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            what = f"{path / NAME} is no state of a run: {error!r:.80}"
            raise CheckpointError(what) from error
        _check_sizes(saved)
    return saved


def read(path: str | Path) -> Saved:
    """What a checkpoint says, every byte of it checked."""
    saved = tell(Path(path))
    for name, (_, told) in saved.files.items():
        place = PurePosixPath(name)
        folder = saved.path / place.parent
        with _naming(folder / place.name), files.open_file(folder, place.name) as file:
            found = _summed(file)
        if found != told:
            raise CheckpointError(
                f"{saved.path / name} is damaged: its checksum is {found}, not {told}"
            )
    return saved


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What the disk does not give back is damage, too."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _parsed(text: bytes, path: Path) -> dict[str, Any]:
    try:
        told = json.loads(text)
        told.pop("crc32c", None)
        whole = _rendered(told) == text
    except (ValueError, RecursionError, TypeError, AttributeError):
        whole, told = False, {}
    if not whole:
        raise CheckpointError(f"{path} is damaged: it is not as it was written")
    if told.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {told.get('format')!r:.20}, written by Packhorse "
            f"{told.get('written_by')!r:.20}; {__version__} reads format {FORMAT}: update it"
        )
    return told


def _saved(path: Path, told: Mapping[str, Any]) -> Saved:
    progress = Progress(**{each.name: told[each.name] for each in fields(Progress)})
    sums = {str(name): (int(size), str(crc)) for name, (size, crc) in told["files"].items()}
    return Saved(path, progress, dict(told["optimizer"]), int(told["world"]), sums)


def _rendered(told: Mapping[str, Any]) -> bytes:
    crc = crc32c(json.dumps(told).encode())
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in told.items()]
    return ("{\n" + ",\n".join([*lines, f' "crc32c": "{crc:08x}"']) + "\n}\n").encode()


def _check_sizes(saved: Saved) -> None:
    found = (path for path in saved.path.rglob("*") if path.is_file())
    # Only what was found here is ever opened: a name cannot lead out of the folder.
    there = {_name(path, saved.path): path.stat().st_size for path in found}
    for name, (size, _) in saved.files.items():
        if name not in there:
            raise CheckpointError(f"{saved.path} is damaged: there is no {name}")
        if there[name] != size:
            raise CheckpointError(
                f"{saved.path / name} is damaged: it has {there[name]} bytes, not {size}"
            )


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _settled(path: Path) -> tuple[int, str]:
    """A file's size and sum, once it is on the disk; an error of the disk is raised, not lost."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, _summed(file)


def _summed(file: BinaryIO) -> str:
    crc = 0
    while chunk := file.read(CHUNK):
        crc = crc32c(chunk, crc)
    return f"{crc:08x}"
