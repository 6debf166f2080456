"""Graphcore's files of pretraining records: little-endian uint32 and nothing else, no header.

    sizes = Sizes(max_length=512, max_predictions=76, max_per_pack=3)
    for run in runs(path, sizes): run.columns           # {role: [n, width]}

A file is unpacked records (three arrays of tokens, three of masks, a label: 7,060 bytes at these
sizes) or packed ones (ten arrays, 9,176 bytes; their files are called `strategy_*_part_*`). Nothing
in it says which, nor how wide the arrays are, so the size of the file must be a whole number of
records, and where both kinds divide it the first record decides: one kind read as the other
contradicts itself at once. Files are mapped, never loaded.

Follows the layouts of MLPerf training v1.0, Graphcore's record_to_binary and pack_pretraining_data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.data.records import fixed_width
from packhorse.errors import InputError

RUN_RECORDS = 512
WORD = np.dtype("<i4")  # above 2^31 there are no ids, and negative ones are refused
KINDS = ("packed", "unpacked")
KNOWN_SIZES = ((128, 20), (256, 40), (384, 56), (512, 76), (512, 80))  # (length, predictions)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a record's arrays are wide; the files do not say."""

    max_length: int = 512
    max_predictions: int = (
        76  # of an unpacked record; packed ones have room for one more a sequence
    )
    max_per_pack: int = 3

    def __post_init__(self) -> None:
        if min(self.max_length, self.max_predictions, self.max_per_pack) < 1:
            raise InputError(f"{self.flags()}: use numbers of 1 and above")

    def flags(self) -> str:
        """As they are written on the command line."""
        return (
            f"--max-length {self.max_length} --max-predictions {self.max_predictions}"
            f" --max-sequences-per-pack {self.max_per_pack}"
        )

    def widths(self, kind: str) -> dict[str, int]:
        """Words of each array, by its role, in the order of the file."""
        length, masks, packs = self.max_length, self.max_predictions, self.max_per_pack
        tokens = ["ids", "owner", "types"]
        if kind == "unpacked":
            return {**dict.fromkeys(tokens, length), **dict.fromkeys(MASKS, masks), "labels": 1}
        return {
            **dict.fromkeys([*tokens, "positions"], length),
            **dict.fromkeys(MASKS, masks + packs),
            **dict.fromkeys(["cls_at", "labels", "present"], packs),
        }

    def record_bytes(self, kind: str) -> int:
        return sum(self.widths(kind).values()) * WORD.itemsize


MASKS = ("masked_at", "masked_ids", "masked_owner")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive records of a file."""

    path: Path
    first: int  # the number of the first
    record_bytes: int
    columns: dict[str, np.ndarray]

    def where(self, record: int) -> str:
        """How messages name a record of this run."""
        number = self.first + record
        return f"{self.path}, record {number} (byte {number * self.record_bytes})"


def runs(path: Path, sizes: Sizes) -> Iterator[Run]:
    """The records of a file, in order, some hundred at a time."""
    kind = kind_of(path, sizes)
    mapped = _mapped(path, sizes, kind)
    for first in range(0, len(mapped), RUN_RECORDS):
        yield _run(path, mapped[first : first + RUN_RECORDS], first, sizes, kind)


def kind_of(path: Path, sizes: Sizes) -> str:
    """Which kind of records a file holds; refused where it cannot hold either."""
    size = _size(path)
    fitting = [kind for kind in KINDS if size % sizes.record_bytes(kind) == 0]
    if not fitting:
        raise InputError(_misfit(path, sizes))
    sound = [kind for kind in fitting if _sound(path, sizes, kind)]
    return (sound or fitting)[0]


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if not size:
        raise InputError(f"{path} is empty")
    return size


def _mapped(path: Path, sizes: Sizes, kind: str) -> np.ndarray:
    """The whole file, [records, words]."""
    words = sizes.record_bytes(kind) // WORD.itemsize
    try:
        return np.memmap(path, WORD, mode="r").reshape(-1, words)
    except (OSError, ValueError) as error:  # it may have been cut since it was measured
        raise InputError(f"{path} cannot be read: {error}") from error


def _run(path: Path, rows: np.ndarray, first: int, sizes: Sizes, kind: str) -> Run:
    widths = sizes.widths(kind)
    arrays = np.split(np.asarray(rows), np.cumsum([*widths.values()])[:-1], axis=1)
    return Run(path, first, sizes.record_bytes(kind), dict(zip(widths, arrays, strict=True)))


def _sound(path: Path, sizes: Sizes, kind: str) -> bool:
    """Whether the first record makes sense when it is read so."""
    run = _run(path, _mapped(path, sizes, kind)[:1], 0, sizes, kind)
    try:
        fixed_width.unpack(run.columns, np.iinfo(WORD).max, run.where)
    except InputError:
        return False
    return True


def _misfit(path: Path, sizes: Sizes) -> str:
    packed, unpacked = (sizes.record_bytes(kind) for kind in KINDS)
    others = dict.fromkeys(f"{kind} with {tried.flags()}" for kind, tried in _others(path, sizes))
    none = "no usual sizes fit either; if it is a TFRecord, --format tfrecord says what is wrong"
    return (
        f"{path}: {_size(path)} bytes are not a whole number of records, neither of {packed} bytes"
        f" (packed) nor of {unpacked} (unpacked), as {sizes.flags()} make them; "
        + (f"it could be {' or '.join(others)}" if others else none)
    )


def _others(path: Path, sizes: Sizes) -> Iterator[tuple[str, Sizes]]:
    """Sizes in use with which the file's size would be right, and its first record make sense."""
    for length, predictions in (*KNOWN_SIZES, (sizes.max_length, sizes.max_predictions)):
        for packs in (sizes.max_per_pack, 2, 3, 4):
            tried = Sizes(length, predictions, packs)
            for kind in KINDS[: 1 if packs != sizes.max_per_pack else 2]:
                if _size(path) % tried.record_bytes(kind) == 0 and _sound(path, tried, kind):
                    yield kind, tried
