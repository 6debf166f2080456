"""Files that are whole or not there, and folders that one process at a time works in.

A new file is written under a hidden name beside its place, put on the disk, and renamed: whenever
the process or the machine stops, what has the file's name is the old one or the new one, whole. The
price is one fsync a file. A lock is held by the open file, so it ends with the process, however
that ends; no stale lock is ever left.
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
    """A file to write, which becomes `path` when the block ends well and vanishes otherwise."""
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
    """A folder's names, or a file that is closed, onto the disk; some systems cannot."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock(file: BinaryIO, path: Path) -> None:
    """Refuse if another process holds `file`; else hold it until it is closed."""
    try:
        import fcntl
    except ImportError:  # Windows has no flock; there the second process fails to rename
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{path} is being written by another process; wait for it") from error
