"""The folder that a build works in, OUT/.build: whose it is, what made it, how it becomes OUT.

    with claim(out, made_by, overwrite=False) as folder:
        ...                     # every file in `folder` is whole, and done once
        publish(folder, out)

build.json holds what decides the work that is done first and costs most (`begun_by`); work begun
otherwise, or of a source that has changed since, is not continued. As long as it is there the build
is unfinished. Files are made in a folder named after it, so that even a straggler of another build
can never write among them, and move to OUT at the very end: old ones out, new ones in, `train`
last. Killed anywhere on this way, the next run does the rest, for each step may be taken twice. The
price is that an old dataset and the new one share the disk until then.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from packhorse.atomic import lock, new_file, sync
from packhorse.data.corpus import fingerprint
from packhorse.data.packed import manifest
from packhorse.errors import InputError

HOME, STATE, STAMPS = ".build", "build.json", "sources.jsonl"
TRIES = 100  # to take a lock whose folder others take away
NAMES = ("tokenizer", "eval", "train")  # train last: with it OUT is whole
AGAIN = "pass --overwrite to begin again"


@contextmanager
def claim(
    out: Path,
    made_by: dict[str, Any],
    overwrite: bool = False,
    begun_by: dict[str, Any] | None = None,
    stamps: Sequence[str] = (),
) -> Iterator[Path | None]:
    """The folder to work in, held alone; None where OUT was made by the same already.

    overwrite: what was made or begun otherwise may go. Where nothing is left to continue, nothing
    is left of the work folder. begun_by: as much of `made_by` as decides whether work can be
    continued; default all of it. stamps: of the sources (`fingerprint.stamps`).
    """
    home = out / HOME
    with _held(home, out):
        try:
            with speaking(out):
                folder = _folder(out, _json(made_by), _json(begun_by or made_by), stamps, overwrite)
            yield folder
        finally:
            if not (home / STATE).exists():
                shutil.rmtree(home, ignore_errors=True)


def _held(home: Path, out: Path) -> BinaryIO:
    """The lock, ours. Who held it before may just be taking the folder away: then once more."""
    for _ in range(TRIES):
        with speaking(out):
            home.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                file = (home / "lock").open("ab")
                if _took(file, home / "lock", out):
                    return file
                file.close()
    raise InputError(f"{out} is being written by other processes; wait for them")


def _took(file: BinaryIO, path: Path, out: Path) -> bool:
    """Whether what is locked is still what has the name."""
    try:
        lock(file, out)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except BaseException as error:
        file.close()
        if isinstance(error, FileNotFoundError):
            return False
        raise


def refuse_inside(out: Path, sources: Sequence[Path]) -> None:
    """What is made must not lie where sources are looked for: it would be read as one."""
    for source in sources:
        if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            raise InputError(
                f"the result {out} lies in the source folder {source}, whose files are all read;"
                " choose a folder outside of it"
            )


def refuse_depth(most: int | None) -> None:
    """Of the sequences a row may have."""
    if most is not None and most < 1:
        raise InputError(
            f"max_per_pack is {most}; it must be 1 or more, or for as many as fit 0"
            " (None in Python)"
        )


def publish(folder: Path, out: Path, eval_home: Path | None = None) -> None:
    """What was made takes its place; what was there before, and the work folder, are gone.

    eval_home: where `eval` was made, if not with the others.
    """
    made = {name: folder / name for name in NAMES}
    if eval_home is not None:
        made["eval"] = eval_home / "eval"
    with speaking(out):
        for name in reversed(NAMES):
            if (out / name).exists():
                _discard(folder / f"old-{name}")
                (out / name).rename(folder / f"old-{name}")
        for name in NAMES:
            if made[name].exists():
                _sweep(made[name])
                made[name].rename(out / name)
        sync(out)
        (out / HOME / STATE).unlink()
        sync(out / HOME)


def _sweep(folder: Path) -> None:
    """What was being written when the process was killed."""
    for draft in folder.glob(".*.partial"):
        draft.unlink()


def made_already(out: Path) -> dict[str, Any] | None:
    """What made the dataset in OUT; None where there is none."""
    if not (out / "train" / manifest.NAME).exists():
        return None
    made_by = manifest.read_manifest(out / "train").config.get("made_by")
    return made_by if isinstance(made_by, dict) else {}


def difference(then: Any, now: Any, key: str = "") -> str | None:
    """The first key with another value, and both values; None where there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        before = f"{key}." if key else ""
        found = (difference(then.get(n), now.get(n), before + n) for n in {**then, **now})
        return next((each for each in found if each), None)
    return None if then == now else f"{key} ({then!r:.60}, now {now!r:.60})"


def _folder(
    out: Path,
    made_by: dict[str, Any],
    begun_by: dict[str, Any],
    stamps: Sequence[str],
    overwrite: bool,
) -> Path | None:
    """Go on with what is there, or begin, or refuse."""
    changed = _changed(out, stamps)
    try:
        state, there = _begun(out), made_already(out)
        if there is not None and (other := difference(there, made_by)):
            raise InputError(f"{out} was made with another {other}; {AGAIN}")
        if state is not None and changed:
            raise InputError(
                f"the source {changed} is not what it was when the work in {out} was begun; {AGAIN}"
            )
        if state is not None and (other := difference(state, begun_by)):
            raise InputError(f"{out} was begun with another {other}; {AGAIN}")
    except InputError:
        if not overwrite:
            raise
        state = None if changed else _begun(out, damaged={})
        there = {}
    if state is None and there is None:
        _refuse_foreign(out)
    if state is None and there and not overwrite:
        return None
    if state != begun_by:
        _begin(out, begun_by, stamps)
    digest = hashlib.sha256(json.dumps(begun_by, sort_keys=True).encode()).hexdigest()[:12]
    folder = out / HOME / digest
    folder.mkdir(exist_ok=True)
    return folder


def _begun(out: Path, damaged: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """What made the unfinished work in OUT; None where there is none."""
    path = out / HOME / STATE
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        if damaged is not None:
            return damaged
        raise InputError(f"{path} is damaged; {AGAIN}") from error


def _changed(out: Path, stamps: Sequence[str]) -> str | None:
    """The source that is not what it was when the unfinished work in OUT was begun."""
    try:
        then = (out / HOME / STAMPS).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return None
    return fingerprint.changed(then, stamps)


def _json(value: dict[str, Any]) -> dict[str, Any]:
    """As it will be when it is read again."""
    return json.loads(json.dumps(value))


def _begin(out: Path, begun_by: dict[str, Any], stamps: Sequence[str]) -> None:
    """Away with the old work, so that build.json never stands for it."""
    (out / HOME / STATE).unlink(missing_ok=True)
    for path in (out / HOME).iterdir():
        if path.name != "lock":
            _discard(path)
    with new_file(out / HOME / STAMPS) as file:
        file.write("\n".join(stamps).encode())
    with new_file(out / HOME / STATE) as file:
        file.write(json.dumps(begun_by, indent=1).encode())


def _refuse_foreign(out: Path) -> None:
    """Never take a folder away that no build of ours made."""
    for name in NAMES:
        if (out / name).exists():
            raise InputError(
                f"{out / name} is there and not from a build; choose another folder for the result"
            )


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def speaking(path: Path) -> Iterator[None]:
    """What the disk refuses is the user's to hear of, by name."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
