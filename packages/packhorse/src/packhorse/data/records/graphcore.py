"""Graphcore's files of pretraining records: little-endian uint32 and nothing else, no header.

    sizes = RecordSizes(max_length=512, max_predictions=76, max_per_pack=3)
    for block in read_blocks(path, sizes): block.columns           # {role: [n, width]}

A file holds unpacked records (three arrays of tokens, three of masks, a label: 7,060 bytes at these
sizes) or packed ones (ten arrays, 9,176 bytes; their files are called `strategy_*_part_*`). Nothing
in it says which, nor how wide the arrays are. So the size of the file must be a whole number of
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

BLOCK_RECORDS = 512  # records that are read and checked at a time
WORD = np.dtype("<i4")  # signed: no id exceeds 2^31, and negative ones are refused
KINDS = ("packed", "unpacked")
KNOWN_SIZES = ((128, 20), (256, 40), (384, 56), (512, 76), (512, 80))  # (length, predictions)


@dataclass(frozen=True, slots=True)
class RecordSizes:
    """The widths of a record's arrays, which the files do not state."""

    max_length: int = 512
    max_predictions: int = 76  # per unpacked record; packed ones have one more per sequence
    max_per_pack: int = 3

    def __post_init__(self) -> None:
        if min(self.max_length, self.max_predictions, self.max_per_pack) < 1:
            raise InputError(f"{self.flags()}: all of them must be 1 or more")

    def flags(self) -> str:
        """The sizes as options of the command line."""
        return (
            f"--max-length {self.max_length} --max-predictions {self.max_predictions}"
            f" --max-sequences-per-pack {self.max_per_pack}"
        )

    def widths(self, kind: str) -> dict[str, int]:
        """Words of each array, by its role, in the order of the file."""
        tokens = ["ids", "owner", "types"]
        masks = ["masked_at", "masked_ids", "masked_owner"]
        if kind == "unpacked":
            widths = dict.fromkeys(tokens, self.max_length)
            widths |= dict.fromkeys(masks, self.max_predictions)
            widths["labels"] = 1
            return widths
        widths = dict.fromkeys([*tokens, "positions"], self.max_length)
        widths |= dict.fromkeys(masks, self.max_predictions + self.max_per_pack)
        widths |= dict.fromkeys(["cls_at", "labels", "present"], self.max_per_pack)
        return widths

    def record_bytes(self, kind: str) -> int:
        return sum(self.widths(kind).values()) * WORD.itemsize


@dataclass(frozen=True, slots=True)
class GraphcoreBlock:
    """Consecutive records of a file."""

    path: Path
    first: int  # the number of the first
    record_bytes: int
    columns: dict[str, np.ndarray]

    def place(self, record: int) -> str:
        """How messages name a record of this block."""
        number = self.first + record
        return f"{self.path}, record {number} (byte {number * self.record_bytes})"


def read_blocks(path: Path, sizes: RecordSizes) -> Iterator[GraphcoreBlock]:
    """The records of a file, in order, some hundreds at a time."""
    kind = kind_of(path, sizes)
    mapped = _mapped(path, sizes, kind)
    for first in range(0, len(mapped), BLOCK_RECORDS):
        yield _block(path, mapped[first : first + BLOCK_RECORDS], first, sizes, kind)


def kind_of(path: Path, sizes: RecordSizes) -> str:
    """Which kind of records a file holds; refused if it can hold neither."""
    size = _size(path)
    fitting = [kind for kind in KINDS if size % sizes.record_bytes(kind) == 0]
    if not fitting:
        raise InputError(_misfit(path, sizes))
    valid = [kind for kind in fitting if _first_record_is_valid(path, sizes, kind)]
    # If none is valid, reading the file as one that fits raises an error that says why.
    return (valid or fitting)[0]


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if not size:
        raise InputError(f"{path} is empty")
    return size


def _mapped(path: Path, sizes: RecordSizes, kind: str) -> np.ndarray:
    """The whole file, [records, words]."""
    words = sizes.record_bytes(kind) // WORD.itemsize
    try:
        return np.memmap(path, WORD, mode="r").reshape(-1, words)
    except (OSError, ValueError) as error:  # it may have been cut since it was measured
        raise InputError(f"{path} cannot be read: {error}") from error


def _block(
    path: Path, rows: np.ndarray, first: int, sizes: RecordSizes, kind: str
) -> GraphcoreBlock:
    widths = sizes.widths(kind)
    arrays = np.split(np.asarray(rows), np.cumsum([*widths.values()])[:-1], axis=1)
    return GraphcoreBlock(
        path, first, sizes.record_bytes(kind), dict(zip(widths, arrays, strict=True))
    )


def _first_record_is_valid(path: Path, sizes: RecordSizes, kind: str) -> bool:
    """Whether the first record is consistent when it is read as this kind."""
    block = _block(path, _mapped(path, sizes, kind)[:1], 0, sizes, kind)
    try:
        fixed_width.unpack(block.columns, np.iinfo(WORD).max, block.place)
    except InputError:
        return False
    return True


def _misfit(path: Path, sizes: RecordSizes) -> str:
    packed = sizes.record_bytes("packed")
    unpacked = sizes.record_bytes("unpacked")
    guesses = dict.fromkeys(
        f"{kind} with {candidate.flags()}" for kind, candidate in _fitting_sizes(path, sizes)
    )
    advice = "no usual sizes fit either; if it is a TFRecord, --format tfrecord says what is wrong"
    if guesses:
        advice = f"it could be {' or '.join(guesses)}"
    return (
        f"{path}: {_size(path)} bytes are not a whole number of records, neither of {packed} bytes"
        f" (packed) nor of {unpacked} (unpacked), the sizes for {sizes.flags()}; {advice}"
    )


def _fitting_sizes(path: Path, sizes: RecordSizes) -> Iterator[tuple[str, RecordSizes]]:
    """Usual sizes that divide the file and make its first record consistent."""
    for length, predictions in (*KNOWN_SIZES, (sizes.max_length, sizes.max_predictions)):
        for depth in (sizes.max_per_pack, 2, 3, 4):
            candidate = RecordSizes(length, predictions, depth)
            # An unpacked record does not depend on the depth, so it is tried with one of them.
            kinds = KINDS if depth == sizes.max_per_pack else ("packed",)
            for kind in kinds:
                if _size(path) % candidate.record_bytes(kind) == 0 and _first_record_is_valid(
                    path, candidate, kind
                ):
                    yield kind, candidate
