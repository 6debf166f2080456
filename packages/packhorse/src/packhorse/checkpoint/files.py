"""Open files of a model's folder and no others; write a folder whole or not at all.

A model folder is not trusted: its index, its modules.json and its links can name any file of this
machine. The rule for every reader: a name in a file must be a plain file name, and it must resolve,
links followed, to a regular file inside the model's folder. The one exception is a snapshot in the
hub's cache (`models--org--name/snapshots/REVISION`), where each file is by design a link into the
`blobs` of its repository or of the cache; links to anywhere else are refused there too. Hard links
are accepted: they cannot be told from a copy, and installers such as uv make them.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from packhorse.errors import CheckpointError, InputError
from packhorse.json_types import is_object

JSON_LIMIT = 4 << 20  # bytes; the largest index of a real model is under 1 MiB

# O_NOFOLLOW: the path was resolved already, and must not have become a link since. O_NONBLOCK:
# without it, opening a FIFO would wait for a writer for ever.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)


def inside(folder: Path, name: str) -> Path:
    """The real path of `name` in `folder`; raises if that is outside the model's folder."""
    if name in ("", ".", "..") or any(character in name for character in "/\\:\0"):
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name")
    real = Path(os.path.realpath(folder / name))
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise CheckpointError(
            f"{folder / name} is a link to {real}, outside the model's folder; "
            f"copy the file there, or pass the folder that it is in"
        )
    return real


def _roots(folder: Path) -> list[Path]:
    """The folders that files of `folder` may be in."""
    real = Path(os.path.realpath(folder))
    for snapshot in (real, *real.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
            return [snapshot, repository / "blobs", repository.parent / "blobs"]
    return [real]


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open the regular file `name` of `folder` for reading."""
    path = inside(folder, name)
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: there is no {name}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def exists(folder: Path, name: str) -> bool:
    """Does `name` exist in `folder`? True for a dangling link, so that opening it reports it."""
    return os.path.lexists(folder / name)


def read_json(folder: Path, name: str) -> Any:
    """Read the JSON document `name` of `folder`."""
    with open_file(folder, name) as file:
        text = file.read(JSON_LIMIT + 1)
    if len(text) > JSON_LIMIT:
        raise CheckpointError(f"{folder / name} is larger than {JSON_LIMIT} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / name} is not valid JSON: {error}") from error


def read_object(folder: Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    """Read the JSON object `name` of `folder`; empty if it is `optional` and absent."""
    if optional and not exists(folder, name):
        return {}
    document = read_json(folder, name)
    if not is_object(document):
        raise CheckpointError(f"{folder / name} holds no JSON object")
    return document


def write_json(folder: Path, name: str, value: Any) -> None:
    """Write `value` as indented JSON."""
    (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def check_new(folder: Path, *, overwrite: bool) -> None:
    """Raise if `new_folder` would refuse this folder; for callers that compute long before it."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; choose another name for the folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise InputError(
            f"{folder} is not empty; choose another folder, or pass --overwrite (overwrite=True)"
        )


@contextmanager
def new_folder(folder: Path, *, overwrite: bool) -> Generator[Path]:
    """Yield a draft folder, which becomes `folder` if the block succeeds and is deleted otherwise.

    An old folder is moved aside before it is deleted: whenever the process is killed, a folder
    called `folder` is complete, old or new. (Between two renames it may be absent; then both are
    beside it under hidden names.)
    """
    target = Path(os.path.abspath(folder))
    check_new(folder, overwrite=overwrite)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        draft.mkdir(parents=True)
        yield draft
        _sync(draft)
        _swap(draft, target)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush all files: a power cut soon after the rename could else leave them empty."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())


def _swap(draft: Path, target: Path) -> None:
    """Rename `draft` to `target`, and put an old `target` back if that fails."""
    if not target.exists():
        draft.rename(target)
        return
    old = draft.with_suffix(".old")
    target.rename(old)
    try:
        draft.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
