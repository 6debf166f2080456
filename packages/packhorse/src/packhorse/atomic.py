"""Atomic file writes, and locks that end with their process.

A new file is written under a hidden name in the same folder, flushed to the disk, and renamed:
whenever the process or the machine stops, the file is either the old one or the new one, complete.
The cost is one fsync per file. A lock belongs to the open file, so it ends with the process,
however that ends, and never becomes stale.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from packhorse.errors import InputError


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` if the block succeeds and is removed otherwise."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync(path.parent)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a folder's entries, or a closed file, to the disk, if the system supports it."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock(file: BinaryIO, path: Path) -> None:
    """Lock `file` until it is closed; raises if another process has locked it."""
    try:
        import fcntl
    except ImportError:  # Windows has no flock, but there the second process fails to rename
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{path} is being written by another process; wait for it") from error
