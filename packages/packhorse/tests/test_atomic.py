"""A file is old or new and never between; a lock ends with who holds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.atomic import lock, new_file
from packhorse.errors import InputError

HOLD = """
import sys, time
from pathlib import Path
from packhorse.atomic import lock
path = Path(sys.argv[1])
with path.open("r+b") as file:
    lock(file, path)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_new_file_takes_the_place_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with new_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_the_old_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="in the middle"), new_file(path) as file:
        file.write(b"half")
        raise RuntimeError("in the middle")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "file"
    with (
        pytest.raises(InputError, match="cannot be written: No such"),
        new_file(missing),
    ):
        pass


def test_a_lock_is_refused_to_others_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout and holder.stdout.readline() == "held\n"
    with path.open("r+b") as file:
        with pytest.raises(InputError, match="being written by another process"):
            lock(file, path)
        holder.kill()
        holder.communicate()
        lock(file, path)
