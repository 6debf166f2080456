"""TensorFlow checkpoints (the "tensor bundle", V2): PREFIX.index and PREFIX.data-…, read directly.

The index says where each tensor lies and is checked whole, against itself and against the files,
before any memory is taken. The bytes then go from the file straight into the tensors, on two
threads, a chunk at a time so that the checksum finds it in the cache. Large tensors lie in huge
pages, each freed with its tensor: most of the time goes into fresh memory, and pages of 4 KiB
double that time.

Optimizer slots are two thirds of a training checkpoint; unless asked for they are not read.

Follows tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from packhorse import wire
from packhorse.checkpoint import files
from packhorse.checkpoint.contents import Contents
from packhorse.checkpoint.tensorflow import sstable, tf1_index, tf1_sorting
from packhorse.checkpoint.tensorflow.tf1_index import Entry, Piece
from packhorse.checkpoint.tensorflow.tf1_sorting import OBJECT_VALUE, STEP
from packhorse.errors import CheckpointError

POINTER = "checkpoint"  # names the newest checkpoint of its folder
POINTER_LIMIT = 1 << 20  # bytes
POINTED = re.compile(rb'^\s*model_checkpoint_path\s*:\s*"((?:[^"\\\n]|\\.)*)"', re.M)
ENDINGS = re.compile(r"\.index$|\.data-\d{5}-of-\d{5}$")

THREADS = 2
CHUNK = 1 << 20  # bytes read and then summed
HUGE = 2 << 20  # bytes of a huge page


def find(path: Path) -> Path | None:
    """The prefix of the checkpoint that `path` is, or leads to; None if it is something else.

    A prefix, an index or a data file, a folder, its pointer file. What is a checkpoint and cannot
    be followed (a folder with several, a pointer that leads away, the V1 format) is an error.
    """
    if os.path.isdir(path) and (found := _pointed(path) or _only(path)):
        return found
    if path.name == POINTER and (found := _pointed(path.parent)):
        return found
    if not path.name:
        return None
    prefix = _stem(path)
    if _is_table(path.parent, prefix.name + ".index"):
        return prefix
    if _is_table(path.parent, path.name):
        raise CheckpointError(f"{path}: {tf1_index.V1}")
    return None


def damaged(path: Path) -> str | None:
    """What is wrong, where `path` is or holds a part of a checkpoint and `find` finds none."""
    folder, name = (path, "*") if os.path.isdir(path) else (path.parent, escape(_stem(path).name))
    parts = [one for one in folder.glob(f"{name}.*") if ENDINGS.search(one.name) and one.is_file()]
    if not parts:
        return None
    part = min(parts, key=lambda one: (one.suffix == ".index", one.name))
    prefix = _stem(part)
    index = prefix.with_name(f"{prefix.name}.index")
    if not files.exists(folder, index.name):
        return f"{part}: there is no {index.name} beside it, which says what is in it; add that"
    try:
        with files.open_file(folder, index.name) as file:
            size = os.fstat(file.fileno()).st_size
    except CheckpointError as error:
        return str(error)
    return (
        f"{index} is damaged or no index of a TensorFlow checkpoint: its {size} bytes do not end "
        f"as one does; copy the file again"
    )


def _stem(path: Path) -> Path:
    return path.with_name(ENDINGS.sub("", path.name) or path.name)


def _is_table(folder: Path, name: str) -> bool:
    if not os.path.isfile(folder / name):
        return False
    with suppress(CheckpointError, OSError), files.open_file(folder, name) as file:
        return sstable.is_table(file)
    return False


def _only(folder: Path) -> Path | None:
    """The one checkpoint of a folder."""
    names = sorted(path.name for path in folder.glob("*.index"))
    prefixes = [_stem(folder / name) for name in names if _is_table(folder, name)]
    if len(prefixes) > 1:
        listed = ", ".join(prefix.name for prefix in prefixes)
        raise CheckpointError(f"{folder} holds several checkpoints; pass one of them: {listed}")
    return prefixes[0] if prefixes else None


def _pointed(folder: Path) -> Path | None:
    """The checkpoint that the folder's pointer file names."""
    if not os.path.isfile(folder / POINTER):
        return None
    with files.open_file(folder, POINTER) as file:
        line = POINTED.search(file.read(POINTER_LIMIT))
    if line is None:
        return None
    said = _unescaped(line[1])
    prefix = folder / _beside(folder, said)
    if not _is_table(folder, prefix.name + ".index"):
        raise CheckpointError(
            f"{folder / POINTER} names {said}, but {prefix.name}.index is not there or is damaged; "
            f"pass the prefix of another checkpoint"
        )
    return prefix


def _unescaped(text: bytes) -> str:
    r"""A string of protobuf's text format: \" and the like, other bytes in octal."""
    plain = re.sub(
        rb"\\([0-7]{1,3}|.)",
        lambda found: bytes([int(found[1], 8) & 255]) if found[1].isdigit() else found[1],
        text,
    )
    return plain.decode("utf-8", "replace")


def _beside(folder: Path, said: str) -> str:
    """The plain name that a pointer means: folders get moved, and their old paths are gone."""
    path = PurePosixPath(said)
    elsewhere = path.is_absolute() or "://" in said
    gone = elsewhere and not os.path.exists(path.parent)
    here = elsewhere and not gone and os.path.realpath(path.parent) == os.path.realpath(folder)
    if not path.name or ".." in path.parts or not (gone or here or said == path.name):
        raise CheckpointError(
            f"{folder / POINTER} names {said}, which is not in its folder; "
            f"if that is the checkpoint you want, pass its own path"
        )
    return path.name


@dataclass(frozen=True, slots=True)
class _Shard:
    """A data file, open."""

    path: Path
    file: BinaryIO


def read(path: Path, *, slots: bool = False) -> Contents:
    """The tensors of a checkpoint; with `slots` also those of its optimizer, else unread."""
    prefix = find(path)
    if prefix is None and os.path.isdir(path):
        raise CheckpointError(f"{path}: there is no TensorFlow checkpoint (*.index) in this folder")
    prefix = prefix or _stem(path)
    folder, index = prefix.parent, prefix.name + ".index"
    with files.open_file(folder, index) as file, _naming(folder / index):
        count, entries = tf1_index.read(file)
        found = tf1_sorting.sort_out(entries, slots)
    wanted = [*found.weights.values(), *(e for kind in found.slots.values() for e in kind.values())]
    memory, used = _read_data(prefix, count, entries, wanted)
    tensors = {name: memory[entry.name] for name, entry in found.weights.items()}
    step = tensors.pop(STEP) if tf1_sorting.is_step(found.weights.get(STEP)) else None
    return Contents(
        format="tf1",
        folder=folder,
        files=(folder / index, *used),
        tensors=tensors,
        slots={
            kind: {weight: memory[entry.name] for weight, entry in of.items()}
            for kind, of in found.slots.items()
        },
        left_out=dict(found.left_out),
        step=None if step is None else int(step),
        notes=tuple(found.notes),
    )


def read_entries(prefix: Path, names: Container[str]) -> tuple[dict[str, Tensor], tuple[Path, ...]]:
    """Entries exactly as they are stored, those of `names` that are there; and the files."""
    folder, index = prefix.parent, prefix.name + ".index"
    with files.open_file(folder, index) as file, _naming(folder / index):
        count, entries = tf1_index.read(file)
    numbers = [entry for entry in entries if entry.dtype is not None]
    called = {entry.name.removesuffix(OBJECT_VALUE): entry for entry in numbers}
    called |= {entry.name: entry for entry in numbers}
    found = {name: entry for name, entry in called.items() if name in names}
    memory, used = _read_data(prefix, count, entries, {e.name: e for e in found.values()}.values())
    return {name: memory[entry.name] for name, entry in found.items()}, (folder / index, *used)


def _read_data(
    prefix: Path, count: int, entries: list[Entry], wanted: Iterable[Entry]
) -> tuple[dict[str, Tensor], list[Path]]:
    """The `wanted` of an index's entries by name, and the data files."""
    folder = prefix.parent
    numbers = sorted({piece.shard for entry in entries for piece in entry.pieces})
    with ExitStack() as stack:
        shards = {}
        for number in numbers:
            name = f"{prefix.name}.data-{number:05}-of-{count:05}"
            file = stack.enter_context(files.open_file(folder, name))
            shards[number] = _Shard(folder / name, file)
        _check_places(entries, shards)
        return _load(wanted, shards), [shard.path for shard in shards.values()]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors begin with the file they are about."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_places(entries: Iterable[Entry], shards: dict[int, _Shard]) -> None:
    """All bytes are there and none is used twice, so what is read is no larger than the files."""
    sizes = {number: os.fstat(shard.file.fileno()).st_size for number, shard in shards.items()}
    places = [(piece.shard, piece.offset, piece.end, e.name) for e in entries for piece in e.pieces]
    before = (-1, 0, 0, "")
    for place in sorted(place for place in places if place[1] < place[2]):
        shard, offset, end, name = place
        if end > sizes[shard]:
            raise CheckpointError(
                f"{shards[shard].path}: {name!r} is at bytes {offset} to {end}, "
                f"but the file has {sizes[shard]}"
            )
        if shard == before[0] and offset < before[2]:
            raise CheckpointError(
                f"{shards[shard].path}: {name!r} at byte {offset} overlaps {before[3]!r}"
            )
        before = place


_Job = tuple[_Shard, Entry, Piece, np.ndarray]  # the last: where the piece goes, [rows, bytes]


def _load(entries: Iterable[Entry], shards: dict[int, _Shard]) -> dict[str, Tensor]:
    """Read these tensors, by the names they have in the index."""
    memory: dict[str, Tensor] = {}
    jobs: list[_Job] = []
    for entry in entries:
        size = sum(piece.size for piece in entry.pieces)
        try:
            buffer = allocate(size)
        except (OSError, RuntimeError) as error:
            path = shards[entry.pieces[0].shard].path
            raise CheckpointError(f"{path}: {entry.name!r}: no memory for {size} bytes") from error
        memory[entry.name] = buffer.view(entry.dtype).reshape(entry.shape)  # pyright: ignore
        rows = buffer.numpy().reshape(entry.rows if size else 1, -1)
        for piece in entry.pieces:
            part = rows[:, piece.left : piece.left + piece.size // len(rows)]
            jobs.append((shards[piece.shard], entry, piece, part))
    jobs.sort(key=lambda job: (job[2].shard, job[2].offset))
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(_fill, jobs):  # an error cancels the jobs after it
            pass
    return memory


def allocate(size: int) -> Tensor:
    """Bytes that cost nothing until they are written."""
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _fill(job: _Job) -> None:
    """Read a piece into its part of the tensor and check its sum."""
    shard, entry, piece, memory = job
    at, crc = piece.offset, 0
    with _naming(shard.path):
        for part in _chunks(memory):
            target = part if part.flags.c_contiguous else np.empty(part.shape, np.uint8)
            view = target.reshape(-1).data
            _read_exactly(shard.file, at, view, entry.name)
            crc = wire.crc32c(view, crc)
            if target is not part:
                part[...] = target
            at += len(view)
        if wire.mask(crc) != piece.crc:
            raise CheckpointError(
                f"{entry.name!r}: the checksum of its {piece.size} bytes "
                f"at byte {piece.offset} is wrong"
            )


def _chunks(memory: np.ndarray) -> Iterator[np.ndarray]:
    """Parts of [rows, bytes] in the order of the bytes on disk."""
    rows, width = memory.shape
    step = max(1, CHUNK // max(1, width))
    for top in range(0, rows, step):
        for left in range(0, width, CHUNK):
            yield memory[top : top + step, left : left + CHUNK]


def _read_exactly(file: BinaryIO, at: int, target: memoryview, name: str) -> None:
    while len(target):
        count = os.preadv(file.fileno(), [target], at)
        if count == 0:
            raise CheckpointError(f"{name!r} ends at byte {at}, before its last one")
        target, at = target[count:], at + count
