"""The work folder of an unfinished corpus, OUT/.build, and the fingerprint that decides its reuse.

    with claim(out, made_by, overwrite=False) as folder:
        ...                     # every file in `folder` is written whole, and once
        publish(folder, out)

build.json holds what decides the work that is done first and costs most (`begun_by`). Work that was
begun with other options, or from a source that has changed since, is not continued. The build is
unfinished as long as build.json exists. Files are made in a folder named after a hash of
`begun_by`, so that even a leftover worker of another build cannot write among them. They move to
OUT at the very end: old datasets out, new ones in, `train` last. Every step may run twice, so after
a kill anywhere in between the next run does the rest. The price is that an old dataset and the new
one share the disk until then.

`made_by` contains everything that decides the bytes of the result. A source stands in it by its
name, size, and a hash of its first and last MiB: hashing a whole corpus would take as long as
reading it. All files together make one digest, so the value stays small for a million files. Paths
and times are not in it (a corpus may be moved or copied), nor are options that only decide how the
work is done: workers, engine, how much bad input is accepted.

An unfinished build needs to know more: which file has changed, and whether a large one was changed
in its middle. For that it keeps a line per file, its *stamp*; there, and only there, a file that
was not hashed whole is also identified by its modification time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from packhorse import __version__
from packhorse.atomic import lock, new_file, sync
from packhorse.data.packed import manifest
from packhorse.data.sources.files import SourceFile
from packhorse.data.sources.hub import HubFile, SourcePath
from packhorse.data.sources.unpacking import STANDARD_INPUT
from packhorse.errors import InputError

HOME = ".build"
STATE = "build.json"
STAMPS = "sources.jsonl"
LOCK_ATTEMPTS = 100  # another process may remove the folder while we wait for its lock
NAMES = ("tokenizer", "eval", "train")  # train last: with it OUT is complete
AGAIN = "pass --overwrite to begin again"

EDGE_BYTES = 1 << 20  # hashed at either end of a file
NAMES_SHOWN = 8  # sources that a fingerprint names, for people who read it
# Libraries whose releases may clean, split, tokenize or draw differently.
DECISIVE_LIBRARIES = ("mwparserfromhell", "nupunkt", "numpy", "scipy", "tokenizers", "pyarrow")
CLEANING_LIBRARIES = ("rensa", "py3langid")


# The folder --------------------------------------------------------------------------------------


@contextmanager
def claim(
    out: Path,
    made_by: dict[str, Any],
    overwrite: bool = False,
    begun_by: dict[str, Any] | None = None,
    stamps: Sequence[str] = (),
) -> Iterator[Path | None]:
    """Lock OUT and yield the folder to work in; None if OUT was made by `made_by` already.

    overwrite: replace datasets and unfinished work of other options. begun_by: the part of
    `made_by` that decides whether work can be continued; default all of it. stamps: of the sources
    (`file_stamps`). The work folder is removed at the end if there is nothing to continue.
    """
    home = out / HOME
    with _acquire_lock(home, out):
        try:
            with disk_errors(out):
                folder = _prepare(
                    out, _as_json(made_by), _as_json(begun_by or made_by), stamps, overwrite
                )
            yield folder
        finally:
            if not (home / STATE).exists():
                shutil.rmtree(home, ignore_errors=True)


def _acquire_lock(home: Path, out: Path) -> BinaryIO:
    """The locked file; retried, because its previous holder may just be removing the folder."""
    for _ in range(LOCK_ATTEMPTS):
        with disk_errors(out):
            home.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                file = (home / "lock").open("ab")
                if _lock_is_current(file, home / "lock", out):
                    return file
                file.close()
    raise InputError(f"{out} is being written by other processes; wait for them")


def _lock_is_current(file: BinaryIO, path: Path, out: Path) -> bool:
    """Lock the file; False if the path no longer leads to it, so that the lock protects nothing."""
    try:
        lock(file, out)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except BaseException as error:
        file.close()
        if isinstance(error, FileNotFoundError):
            return False
        raise


def check_outside_sources(out: Path, sources: Sequence[Path]) -> None:
    """Refuse an OUT inside a source folder: the next run would read it as a source."""
    for source in sources:
        if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            raise InputError(
                f"the result {out} lies in the source folder {source}, whose files are all read;"
                " choose a folder outside of it"
            )


def check_sources_outside(out: Path, files: Iterable[SourcePath]) -> None:
    """Refuse a source file inside OUT, which may be overwritten."""
    for path in files:
        if isinstance(path, Path) and path.resolve().is_relative_to(out.resolve()):
            raise InputError(f"{path} lies in {out}; choose another folder for the result")


def check_depth(max_per_pack: int | None) -> None:
    """Refuse a number of sequences per row that no row can have."""
    if max_per_pack is not None and max_per_pack < 1:
        raise InputError(
            f"max_per_pack is {max_per_pack}; it must be 1 or more, or for as many as fit 0"
            " (None in Python)"
        )


def publish(folder: Path, out: Path, eval_home: Path | None = None) -> None:
    """Move the finished datasets to OUT, in place of older ones, and end the build.

    eval_home: the folder in which `eval` was made, if not `folder`.
    """
    new = {name: folder / name for name in NAMES}
    if eval_home is not None:
        new["eval"] = eval_home / "eval"
    with disk_errors(out):
        for name in reversed(NAMES):
            if (out / name).exists():
                _remove(folder / f"old-{name}")
                (out / name).rename(folder / f"old-{name}")
        for name in NAMES:
            if new[name].exists():
                _remove_drafts(new[name])
                new[name].rename(out / name)
        sync(out)
        (out / HOME / STATE).unlink()
        sync(out / HOME)


def abandon(out: Path) -> None:
    """Mark the unfinished work in OUT as not worth continuing; `claim` then removes it."""
    (out / HOME / STATE).unlink(missing_ok=True)


def _remove_drafts(folder: Path) -> None:
    """Remove files that were being written when a process was killed."""
    for draft in folder.glob(".*.partial"):
        draft.unlink()


def is_finished(out: Path) -> bool:
    """Whether OUT holds a dataset and no unfinished work."""
    return (out / "train" / manifest.NAME).exists() and not (out / HOME / STATE).exists()


def finished_by(out: Path) -> dict[str, Any] | None:
    """The `made_by` of the dataset in OUT; None if there is no dataset."""
    if not (out / "train" / manifest.NAME).exists():
        return None
    made_by = manifest.read_manifest(out / "train").config.get("made_by")
    return made_by if isinstance(made_by, dict) else {}


def first_difference(then: Any, now: Any, key: str = "") -> str | None:
    """The first key whose value differs, with both values; None if nothing differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        prefix = f"{key}." if key else ""
        for name in {**then, **now}:
            if difference := first_difference(then.get(name), now.get(name), prefix + name):
                return difference
        return None
    return None if then == now else f"{key} ({then!r:.60}, now {now!r:.60})"


def _prepare(
    out: Path,
    made_by: dict[str, Any],
    begun_by: dict[str, Any],
    stamps: Sequence[str],
    overwrite: bool,
) -> Path | None:
    """Continue what is in OUT, or begin, or refuse; None if OUT is finished."""
    changed = _changed_source(out, stamps)
    try:
        state = _read_state(out)
        finished = finished_by(out)
        if finished is not None and (difference := first_difference(finished, made_by)):
            raise InputError(f"{out} was made with another {difference}; {AGAIN}")
        if state is not None and changed:
            raise InputError(
                f"the source {changed} is not what it was when the work in {out} was begun; {AGAIN}"
            )
        if state is not None and (difference := first_difference(state, begun_by)):
            raise InputError(f"{out} was begun with another {difference}; {AGAIN}")
    except InputError:
        if not overwrite:
            raise
        state = None if changed else _read_state(out, damaged={})
        finished = {}
    if state is None and finished is None:
        _refuse_foreign(out)
    if state is None and finished and not overwrite:
        return None
    if state != begun_by:
        _begin(out, begun_by, stamps)
    digest = hashlib.sha256(json.dumps(begun_by, sort_keys=True).encode()).hexdigest()[:12]
    folder = out / HOME / digest
    folder.mkdir(exist_ok=True)
    return folder


def _read_state(out: Path, damaged: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The `begun_by` of unfinished work in OUT; None if there is none.

    damaged: returned for a file that cannot be read, instead of raising.
    """
    path = out / HOME / STATE
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        if damaged is not None:
            return damaged
        raise InputError(f"{path} is damaged; {AGAIN}") from error


def _changed_source(out: Path, stamps: Sequence[str]) -> str | None:
    """The first source that has changed since the unfinished work in OUT was begun."""
    try:
        then = (out / HOME / STAMPS).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return None
    return changed_file(then, stamps)


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    """The value as it will be after writing and reading: tuples become lists."""
    return json.loads(json.dumps(value))


def _begin(out: Path, begun_by: dict[str, Any], stamps: Sequence[str]) -> None:
    """Remove older work and describe the new one."""
    # First of all the state: killed in between, no file may claim to be work of the new build.
    (out / HOME / STATE).unlink(missing_ok=True)
    for path in (out / HOME).iterdir():
        if path.name != "lock":
            _remove(path)
    with new_file(out / HOME / STAMPS) as file:
        file.write("\n".join(stamps).encode())
    with new_file(out / HOME / STATE) as file:
        file.write(json.dumps(begun_by, indent=1).encode())


def _refuse_foreign(out: Path) -> None:
    """Never remove a folder that Packhorse did not make."""
    for name in NAMES:
        if (out / name).exists():
            raise InputError(
                f"{out / name} exists and is not from a build; choose another folder for the result"
            )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk into a message that names the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


# Fingerprints ------------------------------------------------------------------------------------


def file_stamps(sources: Sequence[SourceFile]) -> list[str]:
    """A line per file: its name, its time if it is too long to be hashed whole, its content."""
    return [_stamp(source) for source in sources]


def changed_file(then: Sequence[str], now: Sequence[str]) -> str | None:
    """The name of the first file that changed, is new or is gone; None if all are the same."""
    for old, new in zip_longest(then, now):
        if old != new:
            return json.loads(new or old)[0]
    return None


def fingerprint_sources(sources: Sequence[SourceFile], stamps: Sequence[str]) -> dict[str, object]:
    """A small value that identifies the files of a corpus, in their order."""
    digest = hashlib.sha256()
    for line in stamps:
        name, _, *content = json.loads(line)
        digest.update(repr((name, *content)).encode())
    return {
        "files": len(sources),
        "bytes": sum(source.size for source in sources),
        "names": [source.path.name for source in sources[:NAMES_SHOWN]],
        "sha256": digest.hexdigest(),
    }


def hash_files(paths: Iterable[Path]) -> str:
    """One hash of the content of small files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def library_versions(cleaned: bool = False) -> dict[str, str]:
    """The installed versions of all libraries that can change the result."""
    versions = {"packhorse": __version__}
    for name in DECISIVE_LIBRARIES + (CLEANING_LIBRARIES if cleaned else ()):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _stamp(source: SourceFile) -> str:
    if source.path == STANDARD_INPUT:  # its content is compared part by part
        return json.dumps(["-", None, source.kind, source.column])
    if isinstance(source.path, HubFile):  # its commit and content have names
        hub = source.path
        names = (hub.file, hub.repository, hub.commit, hub.content_id)
        return json.dumps([hub.name, None, source.kind, source.column, hub.size, *names])
    try:
        status = source.path.stat()
        with source.path.open("rb") as file:
            edges = hashlib.sha256(file.read(EDGE_BYTES))
            file.seek(max(0, status.st_size - EDGE_BYTES))
            edges.update(file.read(EDGE_BYTES))
    except OSError as error:
        raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from error
    time = status.st_mtime_ns if status.st_size > 2 * EDGE_BYTES else None
    content = (source.kind, source.column, status.st_size, edges.hexdigest())
    return json.dumps([source.path.name, time, *content])
