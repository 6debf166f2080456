"""Checkpoints of a training run: weights, optimizer state, random numbers and data position.

    with claim(run):                                                    # one process per folder
        optimizer_state.consolidate(optimizer)                          # on every rank
        rng = gather([capture_rng(device)])                             # from every rank
        save(run, model, optimizer, RunProgress(step, cursor), rng)     # on rank 0
        latest = newest(run)                                            # the last complete one
        restore(latest, model, optimizer, rank=rank, world=world)       # on every rank

A run resumed from a checkpoint continues to the bit as if it had never stopped. Nothing is pickled.

step-00001200 is a model folder like any other (config.json and model.safetensors with transformers'
names) plus optimizer.safetensors, rng.safetensors and state.json, so it can be tried, served or
fine-tuned at once. The price is a pass through the name tables on restore; no tensor changes a bit.

state.json is written last and vouches for the rest: progress, settings, size and crc32c of every
file, and a checksum of itself. A file that is missing, truncated or changed by a bit is detected
before anything is loaded into a model. The format number grows only when an older Packhorse would
misread a checkpoint. That older version then refuses it as unusable input, not as damaged, because
a run falls back to an older checkpoint when one is damaged. So the checksum of state.json must be
computed the same way in every format.

A checkpoint folder is complete or absent, whenever the process is killed. It is filled under a
hidden name and renamed; one that is deleted is renamed to a hidden name first. When a step is
written a second time, the new folder first appears as step-00001200.new, so at no moment are both
missing. Hidden leftovers are removed when the run is next claimed. The price is disk space for one
more checkpoint while it is written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from packhorse import __version__, checkpoint
from packhorse.atomic import lock, sync
from packhorse.checkpoint import Checkpoint, files, hf
from packhorse.checkpoint.safetensors import read_tensors
from packhorse.errors import CheckpointError, InputError
from packhorse.model.model import Model
from packhorse.train import lora, optimizer_state
from packhorse.wire import crc32c

OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"
STATE = "state.json"
FORMAT = 1  # of state.json
MAX_STATE_BYTES = 64 << 20
CHUNK = 1 << 20  # bytes read at a time for a checksum

LOCK = "lock"
FOLDER_NAME = re.compile(r"step-(\d{8,})(\.new)?", re.ASCII)
# Two dots at the start are possible: hidden once by us and once by the writer of the model.
LEFTOVER_NAME = re.compile(r"\.+step-\d{8,}\..*\.(partial|old)", re.ASCII)

CPU = "cpu"


@dataclass(frozen=True)
class RunProgress:
    """How far a run is, as JSON values; a tuple comes back as a list."""

    step: int  # completed steps
    cursor: dict[str, Any] = field(default_factory=dict)  # of the data, after the last batch used
    counters: dict[str, Any] = field(default_factory=dict)  # sequences, tokens, bytes of the log
    metrics: dict[str, float] = field(default_factory=dict)  # of the evaluation at this step
    config: dict[str, Any] = field(default_factory=dict)  # the resolved settings


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint on disk, as its state.json describes it."""

    path: Path
    progress: RunProgress
    optimizer: dict[str, Any] = field(repr=False)  # its kind, and its groups by parameter names
    world: int  # ranks that wrote it
    files: dict[str, tuple[int, str]] = field(repr=False)  # bytes and crc32c
    notes: tuple[str, ...] = ()  # for the user, about how it was found or restored

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.progress.step


@dataclass(frozen=True, slots=True)
class BestMetric:
    """The metric that decides which checkpoint is the best."""

    metric: str
    larger: bool = True  # larger values are better


def save(
    run: Path,
    model: Checkpoint,
    optimizer: Optimizer,
    progress: RunProgress,
    rng: Sequence[Mapping[str, Tensor]],
    *,
    keep: int = 2,
    best: BestMetric | None = None,
) -> Path:
    """Write the checkpoint of a step completely, or raise and leave the existing ones unchanged.

    `model` is unwrapped; `rng` is what each rank captured. Afterwards all but the last `keep`
    checkpoints and the best one are deleted. So are those of later steps, since a run that was
    wound back continues from here.
    """
    if keep < 1:
        raise InputError(f"keep is {keep}; keep at least the newest checkpoint")
    tensors, description = optimizer_state.dismantle(optimizer, model.model)
    states = {f"{rank}.{kind}": t for rank, kinds in enumerate(rng) for kind, t in kinds.items()}
    target = checkpoint_path(run, progress.step)
    with _write_errors(target), draft(run, progress.step) as folder:
        (lora.write if lora.is_adapted(model.model) else checkpoint.write)(folder, model)
        hf.write_tensors(folder / OPTIMIZER, tensors)
        hf.write_tensors(folder / RNG, states)
        write_state(folder, progress, description, len(rng))
        for step, path in list_checkpoints(run):
            if step > progress.step and _read_state_or_none(path):
                discard(path)
        publish(folder, run, progress.step)
    with disk_errors(run):
        _prune(run, keep, best)
    return target


def newest(run: Path) -> TrainingCheckpoint | None:
    """The last complete checkpoint of a run; its notes name newer ones that are damaged.

    None if there are no checkpoints; an error if none of them is complete. A checkpoint of a newer
    Packhorse is an error too: it may be complete, and going back further would throw it away.
    """
    problems: list[str] = []
    for _, path in list_checkpoints(run):
        try:
            latest = read(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        notes = [f"skipped: {problem}" for problem in problems]
        return replace(latest, notes=(*notes, f"resuming from {path}") if notes else ())
    if problems:
        raise CheckpointError(
            f"{run}: no checkpoint is complete ({'; '.join(problems)}); start again in another "
            "folder"
        )
    return None


def best_of(run: Path, best: BestMetric) -> Path | None:
    """The checkpoint with the best metric, the first of equals; None if none has the metric.

    Every checkpoint carries its own metrics, so no pointer to the best can become stale.
    """
    sign = 1 if best.larger else -1
    candidates = []
    for step, path in list_checkpoints(run):
        state = _read_state_or_none(path)
        value = state.progress.metrics.get(best.metric) if state else None
        if isinstance(value, int | float) and math.isfinite(value):
            candidates.append((sign * value, -step, path))
    return max(candidates)[2] if candidates else None


def restore(
    source: TrainingCheckpoint | str | Path,
    model: Model,
    optimizer: Optimizer | None = None,
    *,
    rank: int = 0,
    world: int = 1,
) -> TrainingCheckpoint:
    """Load a checkpoint into a model of its architecture, its optimizer and the random numbers.

    A path is verified first; what `newest` returned already is. Without an optimizer, only the
    weights are loaded. Nothing is changed unless everything fits.
    """
    saved = source if isinstance(source, TrainingCheckpoint) else read(source)
    weights = _weights(saved.path, model)
    if optimizer is None:
        model.load_state_dict(weights)
        return saved
    with _named_errors(saved.path):
        tensors = read_tensors(saved.path, OPTIMIZER)
        states = _rng_by_rank(saved)
        state, notes = optimizer_state.assemble(tensors, saved.optimizer, optimizer, model)
    model.load_state_dict(weights)
    optimizer_state.load(optimizer, state)
    device = next(model.parameters()).device
    notes += restore_rng(states, device, rank, world)
    return replace(saved, notes=(*saved.notes, *notes))


def _prune(run: Path, keep: int, best: BestMetric | None) -> None:
    """Delete all but the last and the best; a damaged checkpoint is left for the user to judge."""
    readable = [path for _, path in list_checkpoints(run) if _read_state_or_none(path)]
    needed = {*readable[:keep], best_of(run, best) if best else None}
    for path in readable:
        if path not in needed:
            discard(path)


def _weights(path: Path, model: Model) -> dict[str, Tensor]:
    """The model's tensors from the folder, checked for their shapes."""
    if lora.is_adapted(model):
        return lora.read(path, model)
    stored = checkpoint.load(path, dtype=None, allow_nonfinite=True).model.state_dict()
    expected = model.state_dict()
    wrong = [
        f"{name} is {list(stored[name].shape) if name in stored else 'not'} in the checkpoint "
        f"and {list(tensor.shape)} in the model"
        for name, tensor in expected.items()
        if name not in stored or stored[name].shape != tensor.shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise CheckpointError(f"{path} is of another model: {wrong[0]}{more}")
    return {name: stored[name] for name in expected}


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Add the checkpoint's name to what does not fit."""
    try:
        yield
    except (CheckpointError, InputError) as error:
        raise type(error)(f"{path}: {error}") from error.__cause__


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Report a failed write by the checkpoint's final name, not by that of its draft."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise CheckpointError(
            f"{target} cannot be written: {reason}; the earlier checkpoints are unchanged"
        ) from error


# state.json


def write_state(
    folder: Path, progress: RunProgress, optimizer: Mapping[str, Any], world: int
) -> None:
    """Write state.json, which makes the files of a folder a checkpoint, and sync all of them.

    Every file is read back once it is on the disk, at some GB/s: the price of knowing.
    """
    entries = sorted(folder.rglob("*"))
    document = {
        "format": FORMAT,
        "written_by": __version__,
        "torch": str(torch.__version__),
        **asdict(progress),
        "world": world,
        "optimizer": dict(optimizer),
        "files": {
            _relative_name(path, folder): _sync_and_sum(path) for path in entries if path.is_file()
        },
    }
    (folder / STATE).write_bytes(_render(document))
    _sync_and_sum(folder / STATE)
    for path in entries:
        if path.is_dir():
            sync(path)
    sync(folder)


def read_state(path: Path) -> TrainingCheckpoint:
    """What a checkpoint's state.json says; of the other files only the sizes are verified."""
    if not files.exists(path, STATE):
        raise CheckpointError(f"{path} is damaged, or no checkpoint of a run: there is no {STATE}")
    with _read_errors(path), files.open_file(path, STATE) as file:
        document = _parse(file.read(MAX_STATE_BYTES), path / STATE)
        try:
            saved = _from_document(path, document)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path / STATE} is no state of a run: {error!r:.80}") from error
        _check_sizes(saved)
    return saved


def read(path: str | Path) -> TrainingCheckpoint:
    """What a checkpoint's state.json says, with every byte of every file verified."""
    saved = read_state(Path(path))
    for name, (_, expected) in saved.files.items():
        relative = PurePosixPath(name)
        folder = saved.path / relative.parent
        with _read_errors(folder / relative.name), files.open_file(folder, relative.name) as file:
            checksum = _checksum(file)
        if checksum != expected:
            raise CheckpointError(
                f"{saved.path / name} is damaged: its checksum is {checksum}, not {expected}"
            )
    return saved


def _read_state_or_none(path: Path) -> TrainingCheckpoint | None:
    try:
        return read_state(path)
    except (CheckpointError, InputError):
        return None


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """A file that the disk does not return counts as damaged."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    # Comparing with a fresh rendering protects every byte, formatting included.
    try:
        document = json.loads(text)
        document.pop("crc32c", None)
        is_intact = _render(document) == text
    except (ValueError, RecursionError, TypeError, AttributeError):
        document = {}
        is_intact = False
    if not is_intact:
        raise CheckpointError(f"{path} is damaged: it is not as it was written")
    if document.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {document.get('format')!r:.20}, written by Packhorse "
            f"{document.get('written_by')!r:.20}; {__version__} reads format {FORMAT}: update it"
        )
    return document


def _from_document(path: Path, document: Mapping[str, Any]) -> TrainingCheckpoint:
    progress = RunProgress(**{item.name: document[item.name] for item in fields(RunProgress)})
    sums = {str(name): (int(size), str(crc)) for name, (size, crc) in document["files"].items()}
    optimizer = dict(document["optimizer"])
    return TrainingCheckpoint(path, progress, optimizer, int(document["world"]), sums)


def _render(document: Mapping[str, Any]) -> bytes:
    crc = crc32c(json.dumps(document).encode())
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    return ("{\n" + ",\n".join([*lines, f' "crc32c": "{crc:08x}"']) + "\n}\n").encode()


def _check_sizes(saved: TrainingCheckpoint) -> None:
    paths = (path for path in saved.path.rglob("*") if path.is_file())
    # Only files found here are ever opened, so a name in state.json cannot lead out of the folder.
    sizes = {_relative_name(path, saved.path): path.stat().st_size for path in paths}
    for name, (size, _) in saved.files.items():
        if name not in sizes:
            raise CheckpointError(f"{saved.path} is damaged: there is no {name}")
        if sizes[name] != size:
            raise CheckpointError(
                f"{saved.path / name} is damaged: it has {sizes[name]} bytes, not {size}"
            )


def _relative_name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _sync_and_sum(path: Path) -> tuple[int, str]:
    """A file's size and checksum once it is on the disk; a disk error is raised here, not lost."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, _checksum(file)


def _checksum(file: BinaryIO) -> str:
    crc = 0
    while chunk := file.read(CHUNK):
        crc = crc32c(chunk, crc)
    return f"{crc:08x}"


# Folders


@contextmanager
def claim(run: Path) -> Iterator[None]:
    """Lock the run's folder, creating it if needed, and clean up after a killed process."""
    with disk_errors(run):
        run.mkdir(parents=True, exist_ok=True)
        file = (run / LOCK).open("ab")
    with file:
        lock(file, run)
        with disk_errors(run):
            for path in list(run.iterdir()):
                if LEFTOVER_NAME.fullmatch(path.name):
                    shutil.rmtree(path)
            finish_replacements(run)
        yield


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Steps and their folders, the last first; a replacement comes before what it replaces."""
    if not run.is_dir():
        return []
    matches = [(match, p) for p in run.iterdir() if (match := FOLDER_NAME.fullmatch(p.name))]
    matches.sort(key=lambda entry: (int(entry[0][1]), entry[0][2] is not None), reverse=True)
    return [(int(match[1]), path) for match, path in matches]


def checkpoint_path(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run / f"step-{step:08}"


@contextmanager
def draft(run: Path, step: int) -> Iterator[Path]:
    """A hidden path to fill; what is still there at the end is deleted."""
    path = _hidden(checkpoint_path(run, step), "partial")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(draft: Path, run: Path, step: int) -> None:
    """Turn the draft into the checkpoint of its step, replacing an earlier one of the same step."""
    target = checkpoint_path(run, step)
    if not target.exists():
        draft.rename(target)
        sync(run)
        return
    draft.rename(target.with_name(f"{target.name}.new"))
    sync(run)
    finish_replacements(run)


def finish_replacements(run: Path) -> None:
    """Put every step-N.new in the place of step-N."""
    for path in run.glob("step-*.new"):
        if FOLDER_NAME.fullmatch(path.name):
            target = path.with_suffix("")
            if target.exists():
                discard(target)
            path.rename(target)
            sync(run)


def discard(path: Path) -> None:
    """Delete a checkpoint without ever leaving half of it under its name."""
    hidden = path.rename(_hidden(path, "old"))
    sync(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{kind}")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Report what the disk refuses as an error of the user's, by name."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


# Random numbers
#
# Training draws from torch's generators of the CPU and of the accelerator only (dropout). Order and
# masks of the data are functions of seed and position (`data.order`, `data.packed.masking`), and
# nothing draws from Python's or numpy's generators, so there is nothing else to save.


def seed_rank(seed: int, rank: int) -> None:
    """Seed this rank's generators; rank 0 draws what a run without ranks would."""
    torch.manual_seed(_derived_seed(torch.tensor(seed), rank) if rank else seed)


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """The generator states of this process, by device type; `device` is the one it trains on."""
    states = {CPU: torch.get_rng_state()}
    if device.type != CPU:
        states[device.type] = torch.get_device_module(device.type).get_rng_state()
    return states


def restore_rng(
    states: Sequence[Mapping[str, Tensor]], device: torch.device, rank: int, world: int
) -> list[str]:
    """Continue this rank's random numbers; the notes say where that is impossible.

    A rank or a device type without a saved state is seeded from rank 0's state and its own number:
    always the same, and different from the other ranks.
    """
    notes = []
    if len(states) != world:
        notes.append(
            f"ranks: {len(states)} when it was written, {world} now; "
            "random numbers differ from here on"
        )
    saved = states[rank] if rank < len(states) else {}
    if not {CPU, device.type} <= saved.keys():
        torch.manual_seed(_derived_seed(states[0][CPU], rank))
    if saved and device.type not in saved:
        notes.append(
            f"it was not written on {device.type}; random numbers there start from a new seed"
        )
    if CPU in saved:
        torch.set_rng_state(saved[CPU])
    if device.type != CPU and device.type in saved:
        torch.get_device_module(device.type).set_rng_state(saved[device.type])
    return notes


def _derived_seed(state: Tensor, rank: int) -> int:
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:7], "little")  # 56 bits: not negative as an int64


def _rng_by_rank(saved: TrainingCheckpoint) -> list[dict[str, Tensor]]:
    """The saved generator states of each rank."""
    states: list[dict[str, Tensor]] = [{} for _ in range(saved.world)]
    for key, tensor in read_tensors(saved.path, RNG).items():
        rank, _, kind = key.partition(".")
        if not rank.isdecimal() or int(rank) >= saved.world:
            raise CheckpointError(f"{RNG}: {key} belongs to none of {saved.world} ranks")
        states[int(rank)][kind] = tensor
    if not all(CPU in state for state in states):
        raise CheckpointError(f"{RNG} has no state of the CPU for each of {saved.world} ranks")
    return states
