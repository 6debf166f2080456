"""What a further start of a run goes on from, and what it refuses.

A checkpoint is found, or named by the user. It is refused where its place in the data would mean
nothing: with another seed, or other data. A finished run is refused other settings: nothing is left
to train with them, and what it wrote down says how its model was made. Anything else may change
from one start to the next, and is told.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

from packhorse.errors import InputError
from packhorse.train import folders, state
from packhorse.train.job import Job
from packhorse.train.ranks import Ranks
from packhorse.train.settings import TASK

MODEL = "model"  # the folder of the result
# Settings that may change from one start to the next without a word: they decide no figure.
HERE = ("out", "device", "log_every", "save_every", "keep", "tensorboard")


def choose(out: Path, resume: str, ranks: Ranks) -> state.Saved | None:
    """The checkpoint to go on from, if any: what rank 0 found, for all."""
    mine: list[state.Saved] = []

    def find() -> str | None:
        mine.extend(found for found in (_found(out, resume),) if found)
        return str(mine[0].path) if mine else None

    path = ranks.lead(find)
    return mine[0] if mine else state.read(Path(path)) if path else None


def _found(out: Path, resume: str) -> state.Saved | None:
    if resume not in ("auto", "never"):
        return _named(Path(resume), out)
    found = state.newest(out)
    if found and resume == "never":
        raise InputError(
            f"{out} holds a run that has come to step {found.step}; go on with --resume auto, or "
            "name another folder"
        )
    return found


def _named(path: Path, out: Path) -> state.Saved:
    """The checkpoint that the user named; one of another run begins a new one in `out`."""
    if is_foreign(path, out) and (folders.listed(out) or (out / MODEL).exists()):
        raise InputError(
            f"{out} holds another run than {path}, which would be lost; choose another --out, or "
            "go on with the one that is there by --resume auto"
        )
    return state.read(path)


def refuse_nowhere(path: Path) -> None:
    """Before a folder is made for the run."""
    if not path.exists():
        there = ", ".join(each.name for _, each in reversed(folders.listed(path.parent)))
        have = f"in {path.parent} there is {there or 'no checkpoint'}"
        raise InputError(f"{path} does not exist; {have}")


def is_foreign(path: Path, out: Path) -> bool:
    """Is the checkpoint that of a run in another folder?"""
    return path.resolve().parent != out.resolve()


def refuse_another_seed(found: state.Saved, job: Job) -> None:
    """The place in the data means another with another seed."""
    now = job.settings.seed
    then = found.progress.config.get("seed", now)
    if then != now:
        raise InputError(
            f"the seed is {now}, but {found.path} was written with {then}; use --seed {then} or "
            "another --out"
        )


def refuse_other_data(found: state.Saved, job: Job) -> None:
    """The place in the data means nothing in another."""
    cursor, settings = found.progress.cursor, job.settings
    if not cursor or cursor.get("dataset", cursor.get("set")) in job.feed.data:
        return
    about = [each.name for each in fields(settings) if each.metadata["group"] == TASK]
    said = [note for note in changes(found, job) if note.partition(" ")[0] in about]
    what = "; ".join(said) or f"what {settings.train} holds has changed since"
    raise InputError(
        f"{found.path} learned from other data ({what}). Go on with that, or begin a new run with "
        f"its weights: --model {found.path} and another --out"
    )


def refuse_other_settings(found: state.Saved, job: Job, out: Path, ranks: Ranks) -> None:
    """For a run that is over: what it wrote down must go on saying how its model was made."""
    differing = changes(found, job)
    if differing and ranks.lead((out / MODEL).is_dir):
        raise InputError(
            f"{out} is finished, at step {found.step}, and nothing is left to train with other "
            f"settings: {'; '.join(differing)}. Give it the settings that it had, raise what ends "
            "it (steps, epochs, max_sequences, target) to go on, or choose another --out"
        )


def changes(found: state.Saved, job: Job) -> list[str]:
    """What was set otherwise when the checkpoint was written."""
    then = found.progress.config
    now = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(job.settings).items()}
    return [
        f"{name} is now {value!r}; it was {then[name]!r} when {found.path.name} was written"
        for name, value in now.items()
        if name not in HERE and name in then and then[name] != value
    ]
