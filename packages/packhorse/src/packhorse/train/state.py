"""Checkpoints of a run, to go on from exactly: weights, optimizer, random numbers, place in data.

    consolidate(optimizer)                                          # on every rank
    rng = gather([capture(device)])                                 # of every rank
    save(run, of, optimizer, Progress(step, cursor), rng, keep=2)   # on rank 0
    saved = newest(run)                                             # the last whole one, or None
    restore(saved, model, optimizer, rank=rank, world=world)        # on every rank

step-00001200 is a model folder like any other, config.json and model.safetensors under the names of
transformers, with optimizer.safetensors, rng.safetensors and state.json (`saved`) beside them: what
a run has reached can be tried, served or fine-tuned at once. The price is a walk through the tables
of names on the way back; no tensor's bits change on either way. Nothing is pickled.

A checkpoint is whole or not there (`folders`). Kept are the last few and the best; which is best
follows from the metrics that each carries, so no pointer can go stale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from packhorse import checkpoint
from packhorse.checkpoint import Checkpoint, hf
from packhorse.checkpoint.safetensors import read_tensors
from packhorse.errors import CheckpointError, InputError
from packhorse.model.model import Model
from packhorse.train import folders, optimizer_state, randomness, saved
from packhorse.train.folders import claim
from packhorse.train.optimizer_state import consolidate
from packhorse.train.randomness import capture
from packhorse.train.saved import Progress, Saved, read

OPTIMIZER, RNG = "optimizer.safetensors", "rng.safetensors"

__all__ = [
    "Best",
    "Progress",
    "Saved",
    "best_of",
    "capture",
    "claim",
    "consolidate",
    "newest",
    "read",
    "restore",
    "save",
]


@dataclass(frozen=True, slots=True)
class Best:
    """What makes a checkpoint the best: one of its metrics."""

    metric: str
    larger: bool = True


def save(
    run: Path,
    of: Checkpoint,
    optimizer: Optimizer,
    progress: Progress,
    rng: Sequence[Mapping[str, Tensor]],
    *,
    keep: int = 2,
    best: Best | None = None,
) -> Path:
    """Write the checkpoint of a step whole, or raise and leave those there are as they were.

    `of` holds the model, unwrapped; `rng` is what each rank captured. Then all but the last `keep`
    and the best so far go, and those of later steps: a run that was wound back goes on from here.
    """
    if keep < 1:
        raise InputError(f"keep is {keep}; at least the newest checkpoint is kept")
    tensors, told = optimizer_state.dismantle(optimizer, of.model)
    states = {f"{rank}.{kind}": t for rank, kinds in enumerate(rng) for kind, t in kinds.items()}
    target = folders.place(run, progress.step)
    with _speaking(target), folders.draft(run, progress.step) as draft:
        checkpoint.write(draft, of)
        hf.write_tensors(draft / OPTIMIZER, tensors)
        hf.write_tensors(draft / RNG, states)
        saved.vouch(draft, progress, told, len(rng))
        for step, path in folders.listed(run):
            if step > progress.step and _readable(path):
                folders.discard(path)
        folders.publish(draft, run, progress.step)
    with folders.speaking(run):
        _prune(run, keep, best)
    return target


def newest(run: Path) -> Saved | None:
    """The last checkpoint of a run that is whole; notes name those that are not.

    None where there is none at all; where there are some and none is whole, an error. So it is
    where a newer Packhorse wrote the last: it may be whole, and going back would throw it away.
    """
    passed: list[str] = []
    for _, path in folders.listed(run):
        try:
            found = saved.read(path)
        except CheckpointError as error:
            passed.append(str(error))
            continue
        notes = [f"passed over: {why}" for why in passed]
        return replace(found, notes=(*notes, f"going on from {path}") if notes else ())
    if passed:
        raise CheckpointError(
            f"{run}: no checkpoint is whole ({'; '.join(passed)}); begin again in another folder"
        )
    return None


def best_of(run: Path, best: Best) -> Path | None:
    """The checkpoint whose metric is best, the first of equals; None where none has a number."""
    sign = 1 if best.larger else -1
    found = [
        (sign * value, -step, path)
        for step, path in folders.listed(run)
        if (told := _readable(path))
        and isinstance(value := told.progress.metrics.get(best.metric), int | float)
        and math.isfinite(value)
    ]
    return max(found)[2] if found else None


def restore(
    source: Saved | str | Path,
    model: Model,
    optimizer: Optimizer | None = None,
    *,
    rank: int = 0,
    world: int = 1,
) -> Saved:
    """Put a checkpoint into a model of its kind, and let optimizer and random numbers go on.

    A path is checked first, what `newest` found is so already. Without an optimizer, the weights
    alone. Nothing is changed unless all of it fits.
    """
    found = source if isinstance(source, Saved) else saved.read(source)
    weights = _weights(found.path, model)
    if optimizer is None:
        model.load_state_dict(weights)
        return found
    with _naming(found.path):
        tensors, states = read_tensors(found.path, OPTIMIZER), _by_rank(found)
        state, notes = optimizer_state.assemble(tensors, found.optimizer, optimizer, model)
    model.load_state_dict(weights)
    optimizer_state.load(optimizer, state)
    device = next(model.parameters()).device
    notes += randomness.put_back(states, device, rank, world)
    return replace(found, notes=(*found.notes, *notes))


def _prune(run: Path, keep: int, best: Best | None) -> None:
    """All but the last and the best go; what cannot be read is left to the user."""
    readable = [path for _, path in folders.listed(run) if _readable(path)]
    kept = {*readable[:keep], best_of(run, best) if best else None}
    for path in readable:
        if path not in kept:
            folders.discard(path)


def _readable(path: Path) -> Saved | None:
    try:
        return saved.tell(path)
    except (CheckpointError, InputError):
        return None


def _weights(path: Path, model: Model) -> dict[str, Tensor]:
    """The model's tensors out of the folder, each of its shape."""
    theirs = checkpoint.load(path, dtype=None, allow_nonfinite=True).model.state_dict()
    ours = model.state_dict()
    wrong = [
        f"{name} is {list(theirs[name].shape) if name in theirs else 'not'} in the checkpoint "
        f"and {list(tensor.shape)} in the model"
        for name, tensor in ours.items()
        if name not in theirs or theirs[name].shape != tensor.shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise CheckpointError(f"{path} is of another model: {wrong[0]}{more}")
    return {name: theirs[name] for name in ours}


def _by_rank(found: Saved) -> list[dict[str, Tensor]]:
    """The states of random numbers of each rank."""
    states: list[dict[str, Tensor]] = [{} for _ in range(found.world)]
    for place, tensor in read_tensors(found.path, RNG).items():
        rank, _, kind = place.partition(".")
        if not rank.isdecimal() or int(rank) >= found.world:
            raise CheckpointError(f"{RNG}: {place} is of none of {found.world} ranks")
        states[int(rank)][kind] = tensor
    if not all(randomness.CPU in state for state in states):
        raise CheckpointError(f"{RNG} has no state of the CPU for each of {found.world} ranks")
    return states


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What does not fit is told with the checkpoint's name."""
    try:
        yield
    except (CheckpointError, InputError) as error:
        raise type(error)(f"{path}: {error}") from error.__cause__


@contextmanager
def _speaking(target: Path) -> Iterator[None]:
    """A write that fails is told with the checkpoint's own name, not with that of its draft."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise CheckpointError(
            f"{target} cannot be written: {why}; the checkpoints before it are as they were"
        ) from error
