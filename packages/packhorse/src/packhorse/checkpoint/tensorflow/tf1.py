"""Read and write TensorFlow checkpoints (the "tensor bundle", V2): PREFIX.index, PREFIX.data-….

The index (`tf1_index`) says where each tensor is. It is checked completely, against itself and
against the sizes of the data files, before any memory is allocated. The bytes are then read from
the file straight into the tensors, on two threads, in chunks that are still in the processor's
cache when their checksum is computed. Large tensors use huge pages, freed with each tensor: most of
the time goes into fresh memory, and pages of 4 KiB double that time.

Optimizer slots are two thirds of a training checkpoint; they are read only on request.

What is written is what `tf.train.load_checkpoint` and `Saver.restore` open: one data file, the
index, and the pointer file that names it; no graph (.meta). Tensors are written one after the
other, so that weights that are computed on the way, or are on a device, are never all in memory.

Follows tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Container, Generator, Iterable, Mapping
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
from packhorse.checkpoint.tensorflow import sstable, tf1_index
from packhorse.checkpoint.tensorflow.tf1_index import (
    DIMENSION_LIMIT,
    DTYPES,
    OBJECT_VALUE,
    STEP,
    TENSOR_LIMIT,
    VERSION,
    ByteRange,
    TensorEntry,
)
from packhorse.errors import CheckpointError, InputError

POINTER = "checkpoint"  # file that names the newest checkpoint of its folder
POINTER_LIMIT = 1 << 20  # bytes of it that are read
POINTED = re.compile(rb'^\s*model_checkpoint_path\s*:\s*"((?:[^"\\\n]|\\.)*)"', re.M)
ENDINGS = re.compile(r"\.index$|\.data-\d{5}-of-\d{5}$")

THREADS = 2
CHUNK = 1 << 20  # bytes that are read or written, and added to the checksum, at a time
HUGE_PAGE = 2 << 20  # bytes
CODES = {dtype: code for code, dtype in DTYPES.items()}


def find(path: Path) -> Path | None:
    """The prefix of the checkpoint that `path` means; None if it is something else.

    path: a prefix, an index or a data file, a folder, or its pointer file. Raises if it means a
    checkpoint that cannot be read: a folder with several, a pointer out of it, the V1 format.
    """
    if os.path.isdir(path) and (prefix := _pointed(path) or _only(path)):
        return prefix
    if path.name == POINTER and (prefix := _pointed(path.parent)):
        return prefix
    if not path.name:
        return None
    prefix = _stem(path)
    if _is_table(path.parent, prefix.name + ".index"):
        return prefix
    if _is_table(path.parent, path.name):
        raise CheckpointError(f"{path}: {tf1_index.V1}")
    return None


def damaged(path: Path) -> str | None:
    """The problem if `path` is or holds a part of a checkpoint that `find` does not find."""
    folder, name = (path, "*") if os.path.isdir(path) else (path.parent, escape(_stem(path).name))
    parts = [
        file for file in folder.glob(f"{name}.*") if ENDINGS.search(file.name) and file.is_file()
    ]
    if not parts:
        return None
    part = min(parts, key=lambda file: (file.suffix == ".index", file.name))
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
    """The only checkpoint of a folder; raises if there are several."""
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
    target = _unescaped(line[1])
    prefix = folder / _plain_name(folder, target)
    if not _is_table(folder, prefix.name + ".index"):
        raise CheckpointError(
            f"{folder / POINTER} names {target}, but {prefix.name}.index is not there or is "
            f"damaged; pass the prefix of another checkpoint"
        )
    return prefix


def _unescaped(text: bytes) -> str:
    r"""A string of protobuf's text format: \" and the like, other bytes in octal."""
    plain = re.sub(
        rb"\\([0-7]{1,3}|.)",
        lambda escape: bytes([int(escape[1], 8) & 255]) if escape[1].isdigit() else escape[1],
        text,
    )
    return plain.decode("utf-8", "replace")


def _plain_name(folder: Path, target: str) -> str:
    """The name in the folder that a pointer means.

    A pointer may hold an absolute path that no longer exists, because its folder was moved; a path
    to another folder that does exist is refused.
    """
    path = PurePosixPath(target)
    absolute = path.is_absolute() or "://" in target
    gone = absolute and not os.path.exists(path.parent)
    here = absolute and not gone and os.path.realpath(path.parent) == os.path.realpath(folder)
    if not path.name or ".." in path.parts or not (gone or here or target == path.name):
        raise CheckpointError(
            f"{folder / POINTER} names {target}, which is not in its folder; "
            f"if that is the checkpoint you want, pass its own path"
        )
    return path.name


@dataclass(frozen=True, slots=True)
class _Shard:
    """An open data file."""

    path: Path
    file: BinaryIO


def read(path: Path, *, slots: bool = False) -> Contents:
    """Read the tensors of a checkpoint; with `slots`, those of its optimizer too."""
    prefix = find(path)
    if prefix is None and os.path.isdir(path):
        raise CheckpointError(f"{path}: there is no TensorFlow checkpoint (*.index) in this folder")
    prefix = prefix or _stem(path)
    folder = prefix.parent
    index = f"{prefix.name}.index"
    with files.open_file(folder, index) as file, _naming(folder / index):
        count, entries = tf1_index.read(file)
        by_use = tf1_index.sort_entries(entries, slots)
    needed = list(by_use.weights.values())
    for slot in by_use.slots.values():
        needed += slot.values()
    memory, paths = _read_data(prefix, count, entries, needed)
    tensors = {name: memory[entry.name] for name, entry in by_use.weights.items()}
    step = tensors.pop(STEP) if tf1_index.is_step(by_use.weights.get(STEP)) else None
    return Contents(
        format="tf1",
        folder=folder,
        files=(folder / index, *paths),
        tensors=tensors,
        slots={
            kind: {weight: memory[entry.name] for weight, entry in slot.items()}
            for kind, slot in by_use.slots.items()
        },
        left_out=dict(by_use.left_out),
        step=None if step is None else int(step),
        notes=tuple(by_use.notes),
    )


def read_entries(prefix: Path, names: Container[str]) -> tuple[dict[str, Tensor], tuple[Path, ...]]:
    """The entries of these `names` that exist, as they are stored; and the files they are in."""
    folder = prefix.parent
    index = f"{prefix.name}.index"
    with files.open_file(folder, index) as file, _naming(folder / index):
        count, entries = tf1_index.read(file)
    numbers = [entry for entry in entries if entry.dtype is not None]
    by_name = {entry.name.removesuffix(OBJECT_VALUE): entry for entry in numbers}
    by_name |= {entry.name: entry for entry in numbers}
    selected = {name: entry for name, entry in by_name.items() if name in names}
    distinct = {entry.name: entry for entry in selected.values()}  # one entry may have two names
    memory, paths = _read_data(prefix, count, entries, distinct.values())
    tensors = {name: memory[entry.name] for name, entry in selected.items()}
    return tensors, (folder / index, *paths)


def _read_data(
    prefix: Path, count: int, entries: list[TensorEntry], needed: Iterable[TensorEntry]
) -> tuple[dict[str, Tensor], list[Path]]:
    """The tensors of the `needed` entries by name, and the data files; all entries are checked."""
    folder = prefix.parent
    numbers = sorted({part.shard for entry in entries for part in entry.ranges})
    with ExitStack() as stack:
        shards: dict[int, _Shard] = {}
        for number in numbers:
            name = f"{prefix.name}.data-{number:05}-of-{count:05}"
            file = stack.enter_context(files.open_file(folder, name))
            shards[number] = _Shard(folder / name, file)
        _check_ranges(entries, shards)
        return _load(needed, shards), [shard.path for shard in shards.values()]


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Put the path of the file that is read before its errors."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_ranges(entries: Iterable[TensorEntry], shards: dict[int, _Shard]) -> None:
    """Raise if bytes are missing or used twice: so tensors take no more memory than the files."""
    sizes = {number: os.fstat(shard.file.fileno()).st_size for number, shard in shards.items()}
    ranges = [
        (part.shard, part.offset, part.end, entry.name)
        for entry in entries
        for part in entry.ranges
        if part.size
    ]
    last_shard = -1
    last_end = 0
    last_name = ""
    for shard, offset, end, name in sorted(ranges):
        if end > sizes[shard]:
            raise CheckpointError(
                f"{shards[shard].path}: {name!r} is at bytes {offset} to {end}, "
                f"but the file has {sizes[shard]}"
            )
        if shard == last_shard and offset < last_end:
            raise CheckpointError(
                f"{shards[shard].path}: {name!r} at byte {offset} overlaps {last_name!r}"
            )
        last_shard = shard
        last_end = end
        last_name = name


@dataclass(frozen=True, slots=True)
class _ReadJob:
    """A range of a data file, and the memory to read it into."""

    shard: _Shard
    name: str
    range: ByteRange
    memory: np.ndarray  # [rows, bytes] of uint8


def _load(entries: Iterable[TensorEntry], shards: dict[int, _Shard]) -> dict[str, Tensor]:
    """Read the tensors of these entries, by their names in the index."""
    memory: dict[str, Tensor] = {}
    jobs: list[_ReadJob] = []
    for entry in entries:
        size = sum(part.size for part in entry.ranges)
        try:
            buffer = allocate(size)
        except (OSError, RuntimeError) as error:
            path = shards[entry.ranges[0].shard].path
            raise CheckpointError(f"{path}: {entry.name!r}: no memory for {size} bytes") from error
        memory[entry.name] = buffer.view(entry.dtype).reshape(entry.shape)  # pyright: ignore
        rows = buffer.numpy().reshape(entry.rows if size else 1, -1)
        for part in entry.ranges:
            columns = rows[:, part.column : part.column + part.size // len(rows)]
            jobs.append(_ReadJob(shards[part.shard], entry.name, part, columns))
    jobs.sort(key=lambda job: (job.range.shard, job.range.offset))  # in the order of the disk
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(_fill, jobs):  # an error cancels the jobs after it
            pass
    return memory


def allocate(size: int) -> Tensor:
    """Memory that takes no pages until it is written, and then huge ones if it is large."""
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _fill(job: _ReadJob) -> None:
    """Read a range into its part of the tensor and check its checksum."""
    at = job.range.offset
    crc = 0
    with _naming(job.shard.path):
        for chunk in _chunks(job.memory):
            # Slices of a tensor are columns of its memory, which a file cannot be read into.
            target = chunk if chunk.flags.c_contiguous else np.empty(chunk.shape, np.uint8)
            view = target.reshape(-1).data
            _read_exactly(job.shard.file, at, view, job.name)
            crc = wire.crc32c(view, crc)
            if target is not chunk:
                chunk[...] = target
            at += len(view)
        if wire.mask(crc) != job.range.crc:
            raise CheckpointError(
                f"{job.name!r}: the checksum of its {job.range.size} bytes "
                f"at byte {job.range.offset} is wrong"
            )


def _chunks(memory: np.ndarray) -> Generator[np.ndarray]:
    """Parts of [rows, bytes] in the order of the bytes in the file."""
    rows, width = memory.shape
    step = max(1, CHUNK // max(1, width))
    for top in range(0, rows, step):
        for column in range(0, width, CHUNK):
            yield memory[top : top + step, column : column + CHUNK]


def _read_exactly(file: BinaryIO, at: int, target: memoryview, name: str) -> None:
    while len(target):
        count = os.preadv(file.fileno(), [target], at)
        if count == 0:
            raise CheckpointError(f"{name!r} ends at byte {at}, before its last one")
        target = target[count:]
        at += count


def write(prefix: Path, tensors: Mapping[str, Tensor], step: int | None = None) -> None:
    """Write `tensors`, which have TensorFlow's names and layout, to PREFIX.index and its data."""
    names = _sorted_names(tensors, step)
    # BundleHeaderProto: num_shards, version
    header = wire.write_field(1, 1) + wire.write_field(3, wire.write_field(1, VERSION))
    entries = [(b"", header)]
    with prefix.with_name(f"{prefix.name}.data-00000-of-00001").open("wb") as file:
        for name in names:
            tensor = tensors[name] if name in tensors else torch.tensor(step, dtype=torch.int64)
            entries.append((name.encode(), _append(file, name, tensor)))
    prefix.with_name(f"{prefix.name}.index").write_bytes(sstable.build(entries))
    escaped = prefix.name.replace("\\", "\\\\").replace('"', '\\"')
    keys = ("model_checkpoint_path", "all_model_checkpoint_paths")
    lines = [f'{key}: "{escaped}"\n' for key in keys]
    prefix.with_name(POINTER).write_text("".join(lines), "utf-8")


def _sorted_names(tensors: Mapping[str, Tensor], step: int | None) -> list[str]:
    """The names in the order of the index, after checking that the reader will accept them."""
    if step is not None and STEP in tensors:
        raise InputError(f"there is both a tensor {STEP} and a step; pass one of them")
    names = list(tensors)
    if step is not None:
        names.append(STEP)
    if len(names) > TENSOR_LIMIT:
        raise InputError(f"{len(names)} tensors; more than {TENSOR_LIMIT} would not be read")
    for name in names:
        if not name or name.startswith("\0") or len(name.encode()) > sstable.KEY_LIMIT:
            raise InputError(f"{name!r} is not a name that a TensorFlow checkpoint can hold")
    return sorted(names, key=str.encode)


def _append(file: BinaryIO, name: str, tensor: Tensor) -> bytes:
    """Write a tensor's bytes, and return its entry in the index (BundleEntryProto)."""
    if tensor.dtype not in CODES or tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"{name!r} ({tensor.dtype}) is not a tensor that TensorFlow stores")
    if tensor.dim() > DIMENSION_LIMIT:
        raise InputError(f"{name!r} has more than {DIMENSION_LIMIT} dimensions")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data
    offset = file.tell()
    crc = 0
    for at in range(0, len(data), CHUNK):
        crc = wire.crc32c(data[at : at + CHUNK], crc)
        file.write(data[at : at + CHUNK])
    shape = b"".join(wire.write_field(2, wire.write_field(1, size)) for size in tensor.shape)
    return (
        wire.write_field(1, CODES[tensor.dtype])
        + wire.write_field(2, shape)
        + wire.write_field(4, offset)
        + wire.write_field(5, len(data))
        + wire.write_fixed32(6, wire.mask(crc))
    )
