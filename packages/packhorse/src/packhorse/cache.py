"""Folders for compiled code that only this user can have written to.

    folder = private_folder("native")
    keep_compiled_code_private()        # before torch.compile or a Triton kernel compiles

Whoever can write a library, its folder or a folder above it can run code as this user. Therefore
`cache_folder()` raises if the folder, one above it or a link on the way to it can be changed by
anyone but this user and root. Closing an open folder (`chmod 700`) is not enough, because files put
there before are still there: a `private_folder` is created closed, and one that is open, or holds a
file of another user, is thrown away and created anew.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from packhorse.errors import InputError

CLOSED = 0o700
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MAX_LINKS = 40  # on the way to a file; Linux has the same limit
CHECKS = hasattr(os, "getuid")  # Windows has permissions of another kind


def cache_folder() -> Path:
    """The folder of compiled code: `PACKHORSE_CACHE`, or packhorse in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    chosen = Path(os.environ.get("PACKHORSE_CACHE") or Path(home) / "packhorse").expanduser()
    folder = Path(os.path.abspath(chosen))
    try:
        _make(folder)
        problem = _exposure(folder) if CHECKS else None
    except OSError as error:
        raise InputError(
            f"cannot use the cache folder {folder}: {error.strerror}; "
            "set PACKHORSE_CACHE to a folder of your own"
        ) from error
    if problem:
        raise InputError(
            f"the cache folder {folder} can be written by others ({problem}), and code is loaded "
            "from it; set PACKHORSE_CACHE to a new folder in your home"
        )
    return folder


def private_folder(name: str) -> Path:
    """A folder in the cache that has been closed to others since its creation."""
    folder = cache_folder() / name
    try:
        if os.path.lexists(folder) and CHECKS and not _is_private(folder):
            # Files in another user's folder cannot be removed, but the folder can be moved away.
            discarded = Path(mkdtemp(prefix="discarded-", dir=folder.parent))
            folder.rename(discarded / name)
            shutil.rmtree(discarded, ignore_errors=True)
        folder.mkdir(mode=CLOSED, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot use the cache folder {folder}: {error.strerror}; remove it, or set "
            "PACKHORSE_CACHE to a folder of your own"
        ) from error
    return folder


def keep_compiled_code_private() -> None:
    """Make torch.compile and Triton store compiled code in the user's private folders.

    Loops that torch.compile has written for one width of vectors are wrong with another, and its
    keys do not tell the width: machines that share a home, and PACKHORSE_CPU, need folders apart.
    """
    import torch

    vectors = torch.backends.cpu.get_cpu_capability().replace(" ", "-").lower()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder(f"inductor-{vectors}"))
    os.environ["TRITON_CACHE_DIR"] = str(private_folder("triton"))


@cache
def keep_kernels_private() -> None:
    """The same, once a process: for every launch of a kernel, where checking folders would show."""
    keep_compiled_code_private()


def is_private_file(file: Path) -> bool:
    """Is it a regular file of this user that nobody else may write to?"""
    info = file.lstat()
    if not stat.S_ISREG(info.st_mode):
        return False
    return not CHECKS or (info.st_uid == os.getuid() and not info.st_mode & OTHERS_WRITE)


def _make(folder: Path) -> None:
    """Create the folder and missing parents, for this user only whatever the umask is."""
    missing = []
    while not folder.exists() and not folder.is_symlink():
        missing.append(folder)
        folder = folder.parent
    for parent in reversed(missing):
        parent.mkdir(mode=CLOSED, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(20, "it is not a folder, or lies below something that is not one")


def _exposure(folder: Path) -> str | None:
    """How another user could change what this path leads to; None if nobody can."""
    me = os.getuid()
    for place, info in _steps(folder):
        if info.st_uid not in (me, 0):
            return f"{place} belongs to user {info.st_uid}"
        last = place.samefile(folder)
        if last and info.st_uid != me and not stat.S_ISLNK(info.st_mode):
            return f"{place} belongs to root and not to you"
        # In a sticky folder such as /tmp others can add files, but not replace those of this user.
        sticky = info.st_mode & stat.S_ISVTX and not last
        if _others_write(info) and not sticky:
            return f"{place} has mode {stat.S_IMODE(info.st_mode):o}"
    return None


def _steps(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and link on the way from the root to `folder`, following links."""
    here = Path(folder.anchor)
    rest = list(folder.parts[1:])
    links = 0
    yield here, here.lstat()
    while rest:
        name = rest.pop(0)
        if name == "..":
            here = here.parent
            continue
        place = here / name
        info = place.lstat()
        yield place, info
        if not stat.S_ISLNK(info.st_mode):
            here = place
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(40, "too many links")
        target = Path(os.readlink(place))
        if target.is_absolute():
            here = Path(target.anchor)
            rest = [*target.parts[1:], *rest]
        else:
            rest = [*target.parts, *rest]


def _others_write(info: os.stat_result) -> bool:
    """May anyone but the owner write to it? A group with only the owner in it does not count."""
    if stat.S_ISLNK(info.st_mode) or not info.st_mode & OTHERS_WRITE:
        return False
    return bool(info.st_mode & stat.S_IWOTH) or not _is_personal_group(info.st_gid)


def _is_personal_group(number: int) -> bool:
    """Is it the personal group that many systems create per user, with nobody else in it?"""
    import grp
    import pwd

    try:
        group = grp.getgrgid(number)
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return group.gr_name == user.pw_name and user.pw_gid == number and alone


def _is_private(folder: Path) -> bool:
    """Is it closed to others, and does everything in it belong to this user?"""
    me = os.getuid()
    info = folder.lstat()
    closed = stat.S_ISDIR(info.st_mode) and stat.S_IMODE(info.st_mode) == CLOSED
    return closed and info.st_uid == me and all(owner == me for owner in _owners(folder))


def _owners(folder: Path) -> Iterator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                yield entry.stat(follow_symlinks=False).st_uid
                if entry.is_dir(follow_symlinks=False):
                    yield from _owners(Path(entry.path))
            except FileNotFoundError:  # removed by another process meanwhile
                continue
