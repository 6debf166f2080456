"""Files of prepared pretraining records, TFRecords or Graphcore's, read as verified sequences.

    for source in find([Path("tfrecords")], None):
        for batch in read(source, RecordSizes(), specials): ...

The format is detected from the content: a TFRecord begins with a valid checksum, and any other file
is read as Graphcore's headerless words, whose sizes must then fit. Within a file all records have
one form and one width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.data.packed.masking import Specials
from packhorse.data.records import fixed_width, graphcore, tfrecord
from packhorse.data.records.graphcore import RecordSizes
from packhorse.data.sources.files import SourceFile
from packhorse.errors import InputError

FORMATS = ("tfrecord", "graphcore")
COMPANIONS = (".index",)  # Graphcore's offsets of records, which are not needed


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """The sequences of consecutive records of a file."""

    unpacked: fixed_width.Unpacked
    packed: bool  # a record may hold several sequences, and becomes a row of the dataset
    width: int  # tokens that fit into a record
    records: int


@dataclass(frozen=True, slots=True)
class _RecordBlock:
    """Columns of records by their role, whatever the format of the file."""

    columns: dict[str, np.ndarray]
    place: fixed_width.PlaceOf


def find(paths: Sequence[Path], format: str | None) -> list[SourceFile]:
    """The files that are named, and those in named folders, sorted by name.

    In a folder, hidden and auxiliary files are left out: `.x`, `_SUCCESS`, `x.index`.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"there is no format {format!r}; use {' or '.join(FORMATS)}")
    sources: dict[Path, SourceFile] = {}
    for path in paths:
        for file in _files(path):
            if file.resolve() in sources:
                raise InputError(f"{file} is named twice; its sequences would be doubled")
            size = file.stat().st_size
            if not size:
                raise InputError(f"{file} is empty; copy it again, or leave it out")
            kind = format or ("tfrecord" if tfrecord.sniff(file) else "graphcore")
            sources[file.resolve()] = SourceFile(file, kind, size)
    if not sources:
        raise InputError("no files in " + " and ".join(map(str, paths)))
    return [*sources.values()]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file())
        return sorted(f for f in inside if f.name[0] not in "._" and f.suffix not in COMPANIONS)
    if not path.is_file():
        raise InputError(f"{path} is no file and no folder")
    return [path]


def read(source: SourceFile, sizes: RecordSizes, specials: Specials) -> Iterator[RecordBatch]:
    """All records of a file, in order; errors name the record."""
    for block, batch in _unpacked(source, sizes, specials.vocab_size):
        fixed_width.check_specials(batch.unpacked, specials, block.place)
        yield batch


def guess(source: SourceFile, sizes: RecordSizes, vocab_size: int) -> Specials:
    """Guess the special tokens from the first records of a file."""
    for _, batch in _unpacked(source, sizes, vocab_size):
        if len(batch.unpacked.records):
            return fixed_width.guess(batch.unpacked, vocab_size)
    raise InputError(f"{source.path} holds no sequence")


def _unpacked(
    source: SourceFile, sizes: RecordSizes, vocab_size: int
) -> Iterator[tuple[_RecordBlock, RecordBatch]]:
    widths: dict[str, int] = {}
    for block in _blocks(source, sizes):
        block_widths = {role: array.shape[1] for role, array in block.columns.items()}
        widths = widths or block_widths
        if block_widths != widths:
            raise InputError(
                f"{block.place(0)}: other widths than before: {block_widths}, not {widths}"
            )
        unpacked = fixed_width.unpack(block.columns, vocab_size, block.place)
        count, width = block.columns["ids"].shape
        yield block, RecordBatch(unpacked, "positions" in block.columns, width, count)


def _blocks(source: SourceFile, sizes: RecordSizes) -> Iterator[_RecordBlock]:
    if source.kind == "tfrecord":
        return _tfrecord_blocks(source.local_path)
    blocks = graphcore.read_blocks(source.local_path, sizes)
    return (_RecordBlock(block.columns, block.place) for block in blocks)


def _tfrecord_blocks(path: Path) -> Iterator[_RecordBlock]:
    names: dict[str, str] = {}
    for block in tfrecord.read_blocks(path):
        names = names or _features(block)
        table = tfrecord.read_features(block, [*names.values()])
        yield _RecordBlock({role: table[name] for role, name in names.items()}, block.place)


def _features(block: tfrecord.TFRecordBlock) -> dict[str, str]:
    """The names of the features in this file, by their roles."""
    available = tfrecord.feature_names(block)
    for key, names in fixed_width.FORMS.values():
        if key in available:
            return names
    known = ", ".join(key for key, _ in fixed_width.FORMS.values())
    raise InputError(
        f"{block.place(0)}: not a record for BERT's pretraining: it has none of {known}, but "
        + (", ".join(sorted(available)[:12]) or "no numbers at all")
    )
