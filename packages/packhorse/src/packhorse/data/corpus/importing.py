"""Import of pretraining records that others prepared: TFRecords or Graphcore's files to shards.

    import_records(ImportOptions((Path("tfrecords"),), Path("corpus"), vocab_size=30522))

Workers check all records of a file and store them as parts; the rest is the corpus `driver`'s work.
Rows that were packed already come first and stay as they are, the other sequences follow, planned
in groups as the corpus builder plans them. Masks stay those of the records. Memory is flat for any
number of files, and after a kill finished files are not read again. An error in any record ends the
import, and nothing of it remains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from packhorse.atomic import new_file
from packhorse.data.corpus import arrays, workfolder
from packhorse.data.corpus.driver import (
    GROUP,
    CorpusJob,
    CorpusResult,
    DatasetSplit,
    PartGroup,
    PartTask,
    ReportProgress,
    cut_shards,
    make_groups,
    plan_rows,
    read_parts,
    run_job,
    sequence_arrays,
    write_dataset,
)
from packhorse.data.corpus.workers import RunTasks, local
from packhorse.data.packed.masking import Recipe, Specials, specials_of
from packhorse.data.packed.packs import RowLayout, cumulative
from packhorse.data.packed.shards import SHARD_BYTES, rows_per_shard
from packhorse.data.records import prepared
from packhorse.data.records.fixed_width import Unpacked
from packhorse.data.records.graphcore import RecordSizes
from packhorse.data.records.prepared import RecordBatch
from packhorse.data.sources.files import SourceFile
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer
from packhorse.tokens import files as tokenizer_files

PART_TOKENS = 1 << 24  # the most a part holds, and a worker at a time


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What to import, and how."""

    sources: tuple[Path, ...]
    out: Path
    tokenizer: Path | None = None
    vocab_size: int | None = None  # instead of a tokenizer
    eval: tuple[Path, ...] = ()  # sources of OUT/eval
    format: str | None = None  # of all sources; None: detected for each file
    sizes: RecordSizes = RecordSizes()  # noqa: RUF009 (frozen)
    repack: bool = False  # plan rows anew, also those that were packed already
    max_per_pack: int | None = 3  # sequences per planned row; None: as many as fit
    seed: int = 12345
    shard_bytes: int = SHARD_BYTES
    overwrite: bool = False
    workers: int | None = None  # None: one per core

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.vocab_size is None):
            raise InputError("pass either --tokenizer PATH or --vocab-size N")
        if not 1 <= (self.vocab_size or 1) < 1 << 31:
            raise InputError(
                f"--vocab-size is {self.vocab_size}; it must be 1 or more, BERT's is 30522"
            )
        workfolder.check_depth(self.max_per_pack)
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}; it must be 0 or more")
        if self.shard_bytes < 1:
            raise InputError(f"shard_bytes is {self.shard_bytes}; it must be 1 or more")


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """What one file held and the parts made from it, or the first problem in it."""

    records: int = 0
    empty: int = 0  # records without any sequence, which are left out
    sequences: int = 0
    tokens: int = 0
    width: int = 0  # tokens per record
    deepest: int = 0  # the most sequences in a record
    keeps_rows: bool = False  # its records are rows already
    parts: tuple[tuple[str, int, int], ...] = ()  # file name, sequences, rows
    problem: str = ""


def import_records(
    options: ImportOptions, report: ReportProgress = lambda stage, done, total: None
) -> CorpusResult:
    """Import the sources into OUT, or finish an interrupted import."""
    # Before the folders are searched: OUT inside one of them would be found as a source.
    workfolder.check_outside_sources(options.out, (*options.sources, *options.eval))
    paths = {"eval": options.eval, "train": options.sources}
    files = {name: prepared.find(p, options.format) for name, p in paths.items() if p}
    every_file = [source.local_path for sources in files.values() for source in sources]
    workfolder.check_sources_outside(options.out, every_file)
    _check_unused(options, every_file)
    specials = _specials(options, files["train"][0])
    stamps = {name: workfolder.file_stamps(sources) for name, sources in files.items()}
    made_by = _made_by(options, files, stamps, specials)
    job = CorpusJob(
        out=options.out,
        made_by=made_by,
        begun_by=made_by,
        stamps=[*chain.from_iterable(stamps.values())],
        overwrite=options.overwrite,
        tokenizer=options.tokenizer,
        has_eval=bool(options.eval),
        engine=lambda folder: local(options.workers),
    )

    def make(folder: Path, run: RunTasks) -> None:
        for name, sources in files.items():
            _make_split(_ImportStep(options, name, specials, folder, run, report), sources, made_by)

    return run_job(job, make)


def _check_unused(options: ImportOptions, files: Sequence[Path]) -> None:
    """No file serves both datasets, and OUT is empty or made by us."""
    paths = [path.resolve() for path in files]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"{path} is named both for training and for evaluation")
    if options.overwrite or not options.out.is_dir():
        return
    for path in options.out.iterdir():
        if path.name not in (*workfolder.NAMES, workfolder.HOME):
            raise InputError(
                f"{options.out} is not empty: it holds {path.name}; choose another folder, or pass"
                " --overwrite to put the dataset there as well"
            )


def _specials(options: ImportOptions, source: SourceFile) -> Specials:
    if options.tokenizer is not None:
        return specials_of(Tokenizer.load(options.tokenizer))
    return prepared.guess(source, options.sizes, options.vocab_size or 0)


def _made_by(
    options: ImportOptions,
    files: dict[str, list[SourceFile]],
    stamps: dict[str, list[str]],
    specials: Specials,
) -> dict[str, Any]:
    """Everything that decides the bytes of the result."""
    imported = {
        name: workfolder.fingerprint_sources(sources, stamps[name])
        for name, sources in files.items()
    }
    tokenizer = None
    if options.tokenizer is not None:
        paths = tokenizer_files.all_files(options.tokenizer).values()
        tokenizer = workfolder.hash_files(paths)
    ids = {name: getattr(specials, name) for name in ("cls", "sep", "mask", "pad", "vocab_size")}
    return {
        "imported": imported,
        "specials": ids,
        "tokenizer": tokenizer,
        "sizes": asdict(options.sizes),
        "repack": options.repack,
        "max_per_pack": options.max_per_pack,
        "seed": options.seed,
        "shard_bytes": options.shard_bytes,
        "group": GROUP,
        "versions": workfolder.library_versions(),
    }


@dataclass(frozen=True, slots=True)
class _ImportStep:
    """What the steps of one dataset share."""

    options: ImportOptions
    name: str  # of the dataset
    specials: Specials
    folder: Path
    run: RunTasks
    report: ReportProgress

    def report_stage(self, stage: str, done: int, total: int) -> None:
        self.report(f"{stage} {self.name}", done, total)


def _make_split(step: _ImportStep, sources: Sequence[SourceFile], made_by: dict[str, Any]) -> None:
    """Make one dataset from its files."""
    options = step.options
    files = _read_files(step, sources)
    if not any(file.sequences for file in files):
        _give_up(step, f"there is no sequence in {sources[0].path} or the other files named")
    capacity = max(file.width for file in files)
    unplanned = [part for file in files if not file.keeps_rows for part in file.parts]
    groups = make_groups(
        [step.folder / name for name, _, _ in unplanned],
        [sequences for _, sequences, _ in unplanned],
        lambda number: step.folder / f"{step.name}-plan-{number:05d}.arrow",
        options.seed,
        GROUP,
    )
    plans = plan_rows(
        step.run,
        groups,
        capacity,
        options.max_per_pack,
        lambda done, total: step.report_stage("planning", done, total),
    )
    packed_files = [file for file in files if file.keeps_rows]
    config = {"made_by": made_by, "found": _totals(files)}
    if not packed_files:  # the best plan for rows that others made is unknown
        config["lower_bound"] = sum(facts["lower_bound"] for _, facts in plans)
    depth = _depth(packed_files, options.max_per_pack if plans else 0)
    layout = RowLayout(capacity, step.specials.vocab_size, depth, static_masks=True)
    rows = [
        (PartGroup((step.folder / name,), (sequences,), plan=None), rows)
        for file in packed_files
        for name, sequences, rows in file.parts
    ]
    rows += [(group, facts["rows"]) for group, facts in plans]
    split = DatasetSplit(
        name=step.name,
        home=step.folder,
        layout=layout,
        specials=step.specials,
        shards=cut_shards(rows, rows_per_shard(layout, options.shard_bytes)),
        config=config,
        masking=Recipe(),  # not used: masks are stored
    )
    write_dataset(step.run, split, lambda done, total: step.report_stage("writing", done, total))


def _depth(packed_files: Sequence[ImportedFile], planned: int | None) -> int | None:
    """The most sequences a row may have, of kept rows and of planned ones; None: no limit."""
    if planned is None:
        return None
    return max(planned, *(file.deepest for file in packed_files), 0)


def _totals(files: Sequence[ImportedFile]) -> dict[str, int]:
    totals = {"files": len(files)}
    for name in ("records", "empty", "sequences", "tokens"):
        totals[name] = sum(getattr(file, name) for file in files)
    return totals


def _read_files(step: _ImportStep, sources: Sequence[SourceFile]) -> list[ImportedFile]:
    """Read all files in parallel; the first problem in any of them ends the import."""
    done = 0
    total = sum(source.size for source in sources)

    def on_result(number: int, task: PartTask, file: ImportedFile) -> None:
        nonlocal done
        if file.problem:
            _give_up(step, file.problem)
        done += task.size
        step.report_stage("reading", done, total)

    return read_parts(step.run, import_file, _file_tasks(step, sources), on_result)


def _file_tasks(step: _ImportStep, sources: Sequence[SourceFile]) -> Iterator[PartTask]:
    options = step.options
    for number, source in enumerate(sources):
        stem = f"{step.name}-{number:05d}"
        arguments = (source, options.sizes, step.specials, options.repack, step.folder, stem)
        yield PartTask(source.size, arguments, _read_receipt(step.folder, stem))


def _give_up(step: _ImportStep, problem: str) -> NoReturn:
    """Refuse the sources; there is nothing to continue, so the work folder goes as well."""
    workfolder.abandon(step.options.out)
    raise InputError(problem)


# In the workers ----------------------------------------------------------------------------------


def import_file(
    source: SourceFile,
    sizes: RecordSizes,
    specials: Specials,
    repack: bool,
    folder: Path,
    stem: str,
) -> ImportedFile:
    """Check all records of a file, store them as parts, and write a receipt when that is done."""
    file = ImportedFile()
    waiting: list[Unpacked] = []
    for batch in _batches(source, sizes, specials):
        if isinstance(batch, str):
            return ImportedFile(problem=batch)
        waiting.append(batch.unpacked)
        file = _counted(file, batch, repack)
        if sum(len(unpacked.sequences.ids) for unpacked in waiting) >= PART_TOKENS:
            file = _write_part(file, waiting, folder, stem)
            waiting = []
    file = _write_part(file, waiting, folder, stem)
    with new_file(folder / f"{stem}.json") as receipt:
        receipt.write(json.dumps(asdict(file)).encode())
    return file


def _read_receipt(folder: Path, stem: str) -> ImportedFile | None:
    """What an earlier run made of the file; None if it did not finish it."""
    path = folder / f"{stem}.json"
    if not path.exists():
        return None
    fields = json.loads(path.read_text("utf-8"))
    fields["parts"] = tuple(map(tuple, fields["parts"]))
    return ImportedFile(**fields)


def _batches(
    source: SourceFile, sizes: RecordSizes, specials: Specials
) -> Iterator[RecordBatch | str]:
    """Yield a problem of the file as a string: only errors of the disk are raised."""
    try:
        yield from prepared.read(source, sizes, specials)
    except InputError as error:
        yield str(error)


def _counted(file: ImportedFile, batch: RecordBatch, repack: bool) -> ImportedFile:
    unpacked = batch.unpacked
    return replace(
        file,
        records=file.records + batch.records,
        empty=file.empty + unpacked.empty,
        sequences=file.sequences + len(unpacked.records),
        tokens=file.tokens + len(unpacked.sequences.ids),
        width=batch.width,
        deepest=max(file.deepest, int(np.diff(unpacked.offsets).max(initial=0))),
        keeps_rows=batch.packed and not repack,
    )


def _write_part(
    file: ImportedFile, batches: Sequence[Unpacked], folder: Path, stem: str
) -> ImportedFile:
    """Write the sequences as the next part of the file, if there are any."""
    sequences = sum(len(batch.records) for batch in batches)
    if not sequences:
        return file
    name = f"{stem}-{len(file.parts):05d}.arrow"
    named = [sequence_arrays(batch.sequences) for batch in batches]
    joined = {key: np.concatenate([batch[key] for batch in named]) for key in named[0]}
    sequences_in_row = np.concatenate([np.diff(batch.offsets) for batch in batches])
    joined["offsets"] = cumulative(sequences_in_row)
    arrays.write(folder / name, joined, {})
    return replace(file, parts=(*file.parts, (name, sequences, len(sequences_in_row))))
