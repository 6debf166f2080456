"""Listening on a Unix socket: a path in the file system takes the place of host and port.

Who may connect is decided by the mode of the file and of its folder, so it is created for its owner
alone and gets its mode afterwards. A server that was killed leaves its file behind; the next one
replaces it. Whether a server still uses the path cannot be seen at the file: one that is loading
its models does not answer yet. So each holds a lock on PATH.lock, which ends with the process.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from packhorse.errors import InputError

PROBE_SECONDS = 1.0  # for another program to accept a connection; the kernel does it at once


class PathSocket(socket.socket):
    """A bound Unix socket, whose file is removed when it is closed."""

    def __init__(self, path: Path, mode: int, lock: BinaryIO) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.lock = lock
        self.path = path
        before = os.umask(0o177)
        try:
            self.bind(str(path))
        except BaseException:
            super().close()
            raise
        finally:
            os.umask(before)
        self.file = _file(path)  # another program may replace it
        path.chmod(mode)

    def close(self) -> None:
        """Remove the file and close the socket."""
        if self.lock.closed:
            return
        with suppress(OSError):
            if _file(self.path) == self.file:
                self.path.unlink()
            _lock_path(self.path).unlink()
        self.lock.close()
        super().close()


def bind(path: Path, mode: int) -> PathSocket:
    """Return a socket that is bound to a path but does not listen yet; raises `InputError`."""
    try:
        lock = _lock(path)
        try:
            _remove_stale(path)
            return PathSocket(path, mode, lock)
        except BaseException:
            _lock_path(path).unlink()
            lock.close()
            raise
    except OSError as error:
        raise InputError(f"cannot listen on {path}: {error.strerror or error}") from error


def _lock(path: Path) -> BinaryIO:
    """Return the open lock file of a path, locked."""
    lock_path = _lock_path(path)
    while True:
        lock = lock_path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _file(lock_path) == _identity(os.fstat(lock.fileno())):
                return lock
        except BlockingIOError as error:
            lock.close()
            raise InputError(
                f"another server uses {path}; end it or choose another path"
            ) from error
        except FileNotFoundError:
            pass
        lock.close()  # its server removed it between `open` and `flock`


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that is gone; raise `InputError` if it is something else."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise InputError(
            f"{path} exists and is not a socket; choose another path for --unix-socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return path.unlink()
    raise InputError(f"another program listens on {path}; end it or choose another path")


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _file(path: Path) -> tuple[int, int]:
    return _identity(path.lstat())


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
