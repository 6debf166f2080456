"""Prepared pretraining records to packed shards: what others made is taken over as it is.

    import_records(Config((Path("tfrecords"),), Path("corpus"), vocab_size=30522))

Each file becomes parts (arrays on the disk, all its records checked), in parallel; then one writer
makes shards of them, first the rows that were packed already, as they are, then the others, planned
in groups as the corpus builder does. Masks stay those of the records. So memory is flat for any
number of files, and after a kill the files that are done are not read again; the price is the disk
for the parts, which lie beside the shards until the end. What is wrong with any record ends the
import, and nothing is left of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from packhorse.atomic import new_file
from packhorse.data.corpus import arrays, fingerprint
from packhorse.data.corpus.planning import GROUP, Group, columns, gather, grouped, plan_group
from packhorse.data.corpus.workers import Run, local
from packhorse.data.corpus.workfolder import (
    HOME,
    NAMES,
    STATE,
    claim,
    publish,
    refuse_depth,
    refuse_inside,
)
from packhorse.data.packed.examples import Sequences
from packhorse.data.packed.manifest import NAME, Manifest, read_manifest
from packhorse.data.packed.masking import Masks, Specials, specials_of
from packhorse.data.packed.packs import Layout, Rows, cumulative
from packhorse.data.packed.shards import SHARD_BYTES, Writer, rows_a_shard
from packhorse.data.records import prepared
from packhorse.data.records.fixed_width import Unpacked
from packhorse.data.records.graphcore import Sizes
from packhorse.data.records.prepared import Batch
from packhorse.data.sources.files import Source
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.tokens import files as tokenizer_files

PART_TOKENS = 1 << 24  # what a worker holds at a time, and a part at most
Advance = Callable[[str, int, int], None]  # the stage, how much of it is done, and of how much


@dataclass(frozen=True, slots=True)
class Config:
    """What to take over, and how."""

    sources: tuple[Path, ...]
    out: Path
    tokenizer: Path | None = None  # or, where there is none at hand,
    vocab_size: int | None = None
    eval: tuple[Path, ...] = ()  # what becomes OUT/eval
    format: str | None = None  # of all sources; None: told by each
    sizes: Sizes = Sizes()  # noqa: RUF009 (frozen)
    repack: bool = False  # plan anew what was packed already
    max_per_pack: int | None = 3  # sequences a row where rows are planned; None: as many as fit
    seed: int = 12345
    shard_bytes: int = SHARD_BYTES
    overwrite: bool = False
    workers: int | None = None  # None: one for each core

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.vocab_size is None):
            raise InputError("pass --tokenizer PATH or --vocab-size N, one of them")
        if not 1 <= (self.vocab_size or 1) < 1 << 31:
            raise InputError(f"--vocab-size {self.vocab_size} cannot be; BERT has 30522 words")
        refuse_depth(self.max_per_pack)
        if self.seed < 0 or self.shard_bytes < 1:
            raise InputError(f"seed {self.seed} and shard_bytes {self.shard_bytes} must be above 0")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a file held, or what is wrong with it."""

    records: int = 0
    empty: int = 0  # records without any sequence, which are left out
    sequences: int = 0
    tokens: int = 0
    width: int = 0  # of a record, in tokens
    most: int = 0  # sequences of a record
    stays: bool = False  # its records are rows already
    parts: tuple[tuple[str, int], ...] = ()  # the files made of it, and how many sequences each has
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made."""

    train: Manifest
    eval: Manifest | None
    already: bool = False  # by an earlier run, of the same


@dataclass(frozen=True, slots=True)
class _Split:
    """One of the two datasets in the making, and what its steps need."""

    config: Config
    name: str
    specials: Specials
    folder: Path
    run: Run
    advance: Advance


def import_records(config: Config, advance: Advance = lambda *step: None) -> Imported:
    """Make OUT of the sources, or the rest of it; `advance` is told how far it is."""
    refuse_inside(config.out, (*config.sources, *config.eval))
    named = {"eval": config.eval, "train": config.sources}
    found = {name: prepared.find(paths, config.format) for name, paths in named.items() if paths}
    _refuse_in_the_way(config, [source for sources in found.values() for source in sources])
    specials = _specials(config, found["train"][0])
    stamps = {name: fingerprint.stamps(sources) for name, sources in found.items()}
    made_by = _made_by(config, found, stamps, specials)
    claimed = claim(config.out, made_by, config.overwrite, stamps=[*chain(*stamps.values())])
    with _not_left_empty(config.out), claimed as folder:
        if folder is not None:
            with local(config.workers) as run:
                for name, sources in found.items():
                    _make(_Split(config, name, specials, folder, run, advance), sources, made_by)
            _copy_tokenizer(config.tokenizer, folder / "tokenizer")
            publish(folder, config.out)
        eval = read_manifest(config.out / "eval") if config.eval else None
        return Imported(read_manifest(config.out / "train"), eval, already=folder is None)


def _refuse_in_the_way(config: Config, sources: Sequence[Source]) -> None:
    """OUT is empty or ours, nothing that is read lies in it, and none is for both datasets."""
    paths = [source.path.resolve() for source in sources]
    for path in paths:
        if path.is_relative_to(config.out.resolve()):
            raise InputError(f"{path} lies in {config.out}; import into another folder")
        if paths.count(path) > 1:
            raise InputError(f"{path} is named for training and for evaluation")
    if config.overwrite or not config.out.is_dir():
        return
    for path in config.out.iterdir():
        if path.name not in (*NAMES, HOME):
            raise InputError(
                f"{config.out} is not empty: it holds {path.name}; choose another folder, or pass"
                " --overwrite to put the dataset beside it"
            )


def _specials(config: Config, source: Source) -> Specials:
    if config.tokenizer is not None:
        return specials_of(Tokenizer.load(config.tokenizer))
    return prepared.guess(source, config.sizes, config.vocab_size or 0)


def _made_by(
    config: Config,
    found: dict[str, list[Source]],
    stamps: dict[str, list[str]],
    specials: Specials,
) -> dict[str, Any]:
    """All that decides the result."""
    imported = {n: fingerprint.of_sources(each, stamps[n]) for n, each in found.items()}
    files = tokenizer_files.all_files(config.tokenizer) if config.tokenizer else {}
    ids = {name: getattr(specials, name) for name in ("cls", "sep", "mask", "pad", "vocab_size")}
    return {
        "imported": imported,
        "specials": ids,
        "tokenizer": fingerprint.of_files(files.values()) if files else None,
        "sizes": asdict(config.sizes),
        "repack": config.repack,
        "max_per_pack": config.max_per_pack,
        "seed": config.seed,
        "shard_bytes": config.shard_bytes,
        "group": GROUP,
        "versions": fingerprint.of_libraries(),
    }


def _make(split: _Split, sources: Sequence[Source], made_by: dict[str, Any]) -> None:
    """Files to parts, parts to a dataset."""
    target = split.folder / split.name
    if (target / NAME).exists():  # finished by a run that was stopped later
        return
    taken = _read(split, sources)
    if not any(each.sequences for each in taken):
        _give_up(split, f"there is no sequence in {sources[0].path} or whatever else was named")
    width = max(each.width for each in taken)
    plans = _plan(split, taken, width)
    kept = [each for each in taken if each.stays]
    rows = sum(each.records - each.empty for each in kept)
    told = {"made_by": made_by, "found": _sums(taken)}
    if not kept:  # of rows that others made nobody knows
        told["lower_bound"] = sum(facts["lower_bound"] for _, facts in plans)
    depth = _depth(kept, planned=bool(plans), most=split.config.max_per_pack)
    layout = Layout(width, split.specials.vocab_size, depth, static_masks=True)
    bytes_a_shard = split.config.shard_bytes
    writer = Writer(target, layout, split.specials, told, bytes_a_shard)
    total, done = rows + sum(facts["rows"] for _, facts in plans), 0
    planned = _planned_rows(plans, rows_a_shard(layout, bytes_a_shard))
    for part in chain(_kept_rows(split.folder, kept), planned):
        writer.add(part)
        done += len(part)
        split.advance(f"writing {split.name}", done, total)
    writer.finish()


def _read(split: _Split, sources: Sequence[Source]) -> list[Taken]:
    """What each file held; the first mistake in any of them ends it all."""
    config, taken, done = split.config, [], 0
    total = sum(source.size for source in sources)
    items = (
        (source, config.sizes, split.specials, config.repack, split.folder, f"{split.name}-{n:05d}")
        for n, source in enumerate(sources)
    )
    for source, each in zip(sources, split.run(take, items), strict=True):
        if each.problem:
            _give_up(split, each.problem)
        taken.append(each)
        done += source.size
        split.advance(f"reading {split.name}", done, total)
    return taken


def _give_up(split: _Split, why: str) -> NoReturn:
    """Where the sources are to blame, there is nothing to go on with."""
    (split.config.out / HOME / STATE).unlink(missing_ok=True)
    raise InputError(why)


def take(
    source: Source, sizes: Sizes, specials: Specials, repack: bool, folder: Path, stem: str
) -> Taken:
    """Make the parts of a file, unless they are there; what it held."""
    receipt = folder / f"{stem}.json"
    if receipt.exists():
        told = json.loads(receipt.read_text("utf-8"))
        return Taken(**told | {"parts": tuple(map(tuple, told["parts"]))})
    taken, waiting = Taken(), []
    for batch in _batches(source, sizes, specials):
        if isinstance(batch, str):
            return Taken(problem=batch)
        waiting.append(batch.unpacked)
        taken = _counted(taken, batch, repack)
        if sum(len(each.sequences.ids) for each in waiting) >= PART_TOKENS:
            taken, waiting = _put(taken, waiting, folder, stem), []
    taken = _put(taken, waiting, folder, stem)
    with new_file(receipt) as file:
        file.write(json.dumps(asdict(taken)).encode())
    return taken


def _batches(source: Source, sizes: Sizes, specials: Specials) -> Iterator[Batch | str]:
    """What is wrong with a file is a value, not an error: errors are left for the disk's."""
    try:
        yield from prepared.read(source, sizes, specials)
    except InputError as error:
        yield str(error)


def _counted(taken: Taken, batch: Batch, repack: bool) -> Taken:
    unpacked = batch.unpacked
    return replace(
        taken,
        records=taken.records + batch.records,
        empty=taken.empty + unpacked.empty,
        sequences=taken.sequences + len(unpacked.records),
        tokens=taken.tokens + len(unpacked.sequences.ids),
        width=batch.width,
        most=max(taken.most, int(np.diff(unpacked.offsets).max(initial=0))),
        stays=batch.packed and not repack,
    )


def _put(taken: Taken, waiting: Sequence[Unpacked], folder: Path, stem: str) -> Taken:
    """Put down a part; what has been taken, with it."""
    counts = sum(len(each.records) for each in waiting)
    if not counts:
        return taken
    name = f"{stem}-{len(taken.parts):05d}.arrow"
    named = [columns(each.sequences) for each in waiting]
    joined = {key: np.concatenate([each[key] for each in named]) for key in named[0]}
    joined["offsets"] = cumulative(np.concatenate([np.diff(each.offsets) for each in waiting]))
    arrays.write(folder / name, joined, {})
    return replace(taken, parts=(*taken.parts, (name, counts)))


def _plan(split: _Split, taken: Sequence[Taken], width: int) -> list[tuple[Group, dict[str, Any]]]:
    """Who shares a row with whom, of the sequences that have none yet."""
    parts = [part for each in taken if not each.stays for part in each.parts]
    groups = grouped(
        [split.folder / name for name, _ in parts],
        [count for _, count in parts],
        lambda number: split.folder / f"{split.name}-plan-{number:05d}.arrow",
        split.config.seed,
        GROUP,
    )
    items = ((group, width, split.config.max_per_pack) for group in groups)
    plans = []
    for group, facts in zip(groups, split.run(plan_group, items), strict=True):
        plans.append((group, facts))
        split.advance(f"planning {split.name}", len(plans), len(groups))
    return plans


def _depth(kept: Sequence[Taken], planned: bool, most: int | None) -> int | None:
    """The most sequences a row may have."""
    if planned and most is None:
        return None
    return max([each.most for each in kept] + [most or 0] * planned)


def _kept_rows(folder: Path, kept: Sequence[Taken]) -> Iterator[Rows]:
    """The rows of records that were packed already."""
    for name, _ in (part for each in kept for part in each.parts):
        a = arrays.read(folder / name)[0]
        masks = Masks(a["masked_positions"], a["masked_ids"], a["masked_counts"])
        sequences = Sequences(a["ids"], a["lengths"], a["first"], a["random_next"], masks)
        yield Rows.of(sequences, a["offsets"])


def _planned_rows(plans: Sequence[tuple[Group, dict[str, Any]]], size: int) -> Iterator[Rows]:
    for group, facts in plans:
        places = arrays.read(group.plan)[0]
        for begin in range(0, facts["rows"], size):
            offsets = places["offsets"][begin : begin + size + 1]
            chosen = places["indices"][offsets[0] : offsets[-1]]
            yield Rows.of(gather(group.parts, group.counts, chosen), offsets - offsets[0])


def _sums(taken: Sequence[Taken]) -> dict[str, int]:
    names = ("records", "empty", "sequences", "tokens")
    return {"files": len(taken)} | {n: sum(getattr(each, n) for each in taken) for n in names}


def _copy_tokenizer(path: Path | None, folder: Path) -> None:
    for name, file in (tokenizer_files.all_files(path) if path else {}).items():
        folder.mkdir(exist_ok=True)
        with file.open("rb") as there, new_file(folder / name) as copy:
            shutil.copyfileobj(there, copy)


@contextmanager
def _not_left_empty(out: Path) -> Iterator[None]:
    """Where nothing came of it there is no folder either, unless it was there before."""
    there = out.exists()
    try:
        yield
    except InputError:
        if not there:
            with suppress(OSError):
                out.rmdir()
        raise
