"""Files of prepared pretraining records, TFRecords or Graphcore's, as sequences that were checked.

    for source in find([Path("tfrecords")], None):
        for batch in read(source, Sizes(), specials): ...

What a file is, is found by its content: a TFRecord vouches for its first record by a checksum, and
whatever does not is taken for Graphcore's headerless words, which are then held against the sizes
they must have. Within a file all records have one form and one width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.data.packed.masking import Specials
from packhorse.data.records import fixed_width, graphcore, tfexample, tfrecord
from packhorse.data.records.graphcore import Sizes
from packhorse.data.sources.files import Source
from packhorse.errors import InputError

FORMATS = ("tfrecord", "graphcore")
BESIDE = (".index",)  # Graphcore's places of records, which a TFRecord does not need


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of some consecutive records of a file."""

    unpacked: fixed_width.Unpacked
    packed: bool  # whether records may hold several sequences, in which case they are rows
    width: int  # tokens a record may have
    records: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Records by their roles, whatever they were read from."""

    columns: dict[str, np.ndarray]
    where: fixed_width.Where


def find(paths: Sequence[Path], format: str | None) -> list[Source]:
    """The files that are named, and those in the folders that are, in the order of their names.

    In a folder, what is hidden or only about others is left out: `.x`, `_SUCCESS`, `x.index`.
    """
    if format is not None and format not in FORMATS:
        raise InputError(f"there is no format {format!r}; use {' or '.join(FORMATS)}")
    found: dict[Path, Source] = {}
    for path in paths:
        for file in _files(path):
            if file.resolve() in found:
                raise InputError(f"{file} is named twice; its sequences would be doubled")
            size = file.stat().st_size
            if not size:
                raise InputError(f"{file} is empty; copy it again, or leave it out")
            kind = format or ("tfrecord" if tfrecord.sniff(file) else "graphcore")
            found[file.resolve()] = Source(file, kind, size)
    if not found:
        raise InputError("no files in " + " and ".join(map(str, paths)))
    return [*found.values()]


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file())
        return sorted(f for f in inside if f.name[0] not in "._" and f.suffix not in BESIDE)
    if not path.is_file():
        raise InputError(f"{path} is no file and no folder")
    return [path]


def read(source: Source, sizes: Sizes, specials: Specials) -> Iterator[Batch]:
    """Every record of a file, in order; whatever is wrong with one is said with its number."""
    for run, batch in _unpacked(source, sizes, specials.vocab_size):
        fixed_width.check_specials(batch.unpacked, specials, run.where)
        yield batch


def guess(source: Source, sizes: Sizes, vocab_size: int) -> Specials:
    """The special tokens, from the first records of a file."""
    for _, batch in _unpacked(source, sizes, vocab_size):
        if len(batch.unpacked.records):
            return fixed_width.guess(batch.unpacked, vocab_size)
    raise InputError(f"{source.path} holds no sequence")


def _unpacked(source: Source, sizes: Sizes, vocab_size: int) -> Iterator[tuple[_Run, Batch]]:
    widths: dict[str, int] = {}
    for run in _runs(source, sizes):
        here = {role: array.shape[1] for role, array in run.columns.items()}
        if (widths := widths or here) != here:
            raise InputError(f"{run.where(0)}: other widths than before: {here}, not {widths}")
        unpacked = fixed_width.unpack(run.columns, vocab_size, run.where)
        count, width = run.columns["ids"].shape
        yield run, Batch(unpacked, "positions" in run.columns, width, count)


def _runs(source: Source, sizes: Sizes) -> Iterator[_Run]:
    if source.kind == "tfrecord":
        return _tfrecord_runs(source.path)
    return (_Run(run.columns, run.where) for run in graphcore.runs(source.path, sizes))


def _tfrecord_runs(path: Path) -> Iterator[_Run]:
    names: dict[str, str] = {}
    for run in tfrecord.runs(path):
        names = names or _features(run)
        table = tfexample.numbers(run, [*names.values()])
        yield _Run({role: table[name] for role, name in names.items()}, run.where)


def _features(run: tfrecord.Run) -> dict[str, str]:
    """The features of the form that a file is in, by their roles."""
    there = tfexample.names(run)
    for key, names in fixed_width.FORMS.values():
        if key in there:
            return names
    known = ", ".join(key for key, _ in fixed_width.FORMS.values())
    raise InputError(
        f"{run.where(0)}: not a record for BERT's pretraining: it has none of {known}, but "
        + (", ".join(sorted(there)[:12]) or "no numbers at all")
    )
