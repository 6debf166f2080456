"""Write the results of a stream of texts to a file, chunk by chunk, for `packhorse run --out`.

The ranges of their vectors are written here too, for `--write-calibration`.

Reading, the model and writing overlap (`runtime.pipeline`), and several devices take chunks in
turn. Memory is bounded by a few chunks. Everything that decides the rows (input, model, task, how
it runs) is stored with the unfinished file, and work that was begun with other settings is not
resumed. The model is known by the parts of its fingerprint, which the finished file carries too.
For the input, path, size and modification time stand for the content: hashing a large one would
cost more than it finds. Standard input cannot be read twice, so results of it are never resumed.
"""

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse import __version__
from packhorse.atomic import new_file
from packhorse.cli.console import note, progress, stage_progress
from packhorse.cli.flags import RunFlags
from packhorse.cli.tasks import TASKS, result_rows
from packhorse.data.columns import column_types, row_count
from packhorse.data.delimited import CsvFormat
from packhorse.data.output import ResumableFile
from packhorse.data.tables import Record, kept_names
from packhorse.errors import InputError, PackhorseError

if TYPE_CHECKING:
    from packhorse.checkpoint.fingerprint import Fingerprint
    from packhorse.data.output import Row
    from packhorse.runtime.encoder import Encoder

PER_ACCELERATOR = 2  # chunks at a time: one is tokenized while the other runs


def write(
    records: Iterable[Record], encoders: Sequence["Encoder"], flags: RunFlags
) -> dict[str, Any]:
    """Write all results to `flags.out`; returns the path, rows and seconds.

    The encoders are of one model on different devices.
    """
    from packhorse.runtime import cores
    from packhorse.runtime.pipeline import Pipeline

    encoder = encoders[0]
    out = flags.out or Path()
    chunk_size = flags.chunk or _default_chunk(encoder, flags.task)
    fingerprint = result_fingerprint(encoder, flags)
    settings = {
        **fingerprint.parts,  # first, so that a message names the part that differs
        **run_facts(encoders, flags),
        **_input_facts(records, flags),
        "chunk": chunk_size,
    }
    file = ResumableFile(
        out,
        TASKS[flags.task].shape(encoder, flags.task_options),
        settings,
        kept=partial(_kept_types, flags),
        metadata=_metadata(encoder, fingerprint, flags),
        overwrite=flags.overwrite,
    )
    start = time.perf_counter()
    rows_before = file.rows
    if rows_before:
        note(f"{out}: resuming after {rows_before:,} rows")
    total = _RowCount(flags)
    facts = {"model": encoder.name, "device": device_names(encoders)}

    def append(chunk: Sequence[Record], rows: Sequence["Row"]) -> None:
        done = chunk[-1].number + 1  # rows of the input, skipped ones too
        file.append(rows, done)
        figures = {"sequences": file.rows}
        report(f"writing {out}", done, total.at_least(done), figures=figures)

    def encode(encoder: "Encoder", chunk: Sequence[Record]) -> list["Row"]:
        return _encode_chunk(chunk, encoder, flags, check=pipeline.check)

    workers = [
        partial(encode, worker)
        for worker in encoders
        for _ in range(1 if worker.device.type == "cpu" else PER_ACCELERATOR)
    ]
    on_cpu = sum(worker.device.type == "cpu" for worker in encoders)
    pipeline = Pipeline(workers, append, prepare=partial(cores.share_threads, on_cpu))
    with closing(file), stage_progress(facts=facts) as report, _note_interruption(file):
        chunks = _chunks(_not_written(records, file), chunk_size)
        pipeline.run(chunks, first=rows_before // chunk_size)
        file.finish()
    seconds = time.perf_counter() - start
    new_rows = file.rows - rows_before
    note(f"{out}: {file.rows:,} rows, {new_rows:,} of them new, in {seconds:.1f} s")
    return {"out": str(out), "rows": file.rows, "resumed_after": rows_before, "seconds": seconds}


def write_calibration(
    records: Iterable[Record], encoder: "Encoder", flags: RunFlags
) -> dict[str, Any]:
    """Write the ranges of all vectors to `flags.write_calibration`; returns the path and rows."""
    import numpy as np

    from packhorse.runtime.precision import FEW_VECTORS

    path = flags.write_calibration or Path()
    if path.exists() and not flags.overwrite:
        raise InputError(f"{path} exists already; pass --overwrite to replace it")
    extremes: list[np.ndarray] = []
    rows = 0
    total = _RowCount(flags)
    facts = {"model": encoder.name, "device": str(encoder.device)}
    with progress(f"calibrating {path}", counts="sequences", facts=facts) as advance:
        for chunk in _chunks(records, flags.chunk or _default_chunk(encoder, flags.task)):
            vectors = np.stack([row["vector"] for row in _encode_chunk(chunk, encoder, flags)])
            extremes += [vectors.min(axis=0), vectors.max(axis=0)]
            rows += len(vectors)
            advance(rows, total.at_least(rows))
    if rows < FEW_VECTORS:
        note(f"warning: {rows} texts calibrate badly; take a few thousand like those to embed")
    ranges = np.stack([np.min(extremes, axis=0), np.max(extremes, axis=0)]).astype(np.float32)
    with new_file(path) as file:
        np.save(file, ranges)
    note(f"{path}: the ranges of {rows:,} vectors of {ranges.shape[1]} dimensions")
    return {"calibration": str(path), "rows": rows}


def run_facts(encoders: Sequence["Encoder"], flags: RunFlags) -> dict[str, Any]:
    """Return the model, the task and how they run."""
    from packhorse.device import dtype_name

    encoder = encoders[0]
    return {
        "model": encoder.name,
        "fingerprint": str(result_fingerprint(encoder, flags)),
        "task": flags.task,
        "device": device_names(encoders),
        "dtype": dtype_name(encoder.dtype),
        "kernel": encoder.kernel,
        "graphs": flags.graphs,
        "invariant": flags.invariant,
    }


def device_names(encoders: Sequence["Encoder"]) -> str:
    """Return the devices as --devices names them."""
    return ",".join(str(encoder.device) for encoder in encoders)


def result_fingerprint(encoder: "Encoder", flags: RunFlags) -> "Fingerprint":
    """Return the fingerprint of the results, which depends on the prompt and the length limit."""
    from packhorse.runtime.tasks import task_prompt

    prompt = task_prompt(encoder, flags.task, [""], flags.prompt, flags.as_query)
    return encoder.fingerprint_parts(prompt=prompt, max_length=flags.max_length)


def _input_facts(records: Iterable[Record], flags: RunFlags) -> dict[str, Any]:
    """Return what else decides the rows.

    `--skip-empty` and `--keep-empty` are not part of it: a run without them stops at the first
    empty text, so all rows written until then are the same. `_not_written` tells them apart.
    """
    return {
        "version": __version__,
        "input": _input_stamp(records, flags),
        "column": flags.column,
        "keep": flags.kept,
        **{
            name: getattr(flags.form, name) for name in ("delimiter", "quote", "escape", "encoding")
        },
        "pair": flags.pair,
        "query": flags.query,
        "top_k": flags.top_k,
        "stride": flags.stride,
        **({"as_query": True} if flags.as_query else {}),
        **_number_facts(flags),
    }


def _number_facts(flags: RunFlags) -> dict[str, Any]:
    """Return the number type of vectors that are not floats, and a digest of its ranges."""
    if flags.precision == "float32":
        return {}
    content = flags.calibration.read_bytes() if flags.calibration else b""
    return {
        "precision": flags.precision,
        "calibration": hashlib.sha256(content).hexdigest()[:16] if content else None,
    }


def _input_stamp(records: Iterable[Record], flags: RunFlags) -> str:
    if flags.input == "-":
        return f"standard input {uuid.uuid4()}"
    if flags.input:
        path = Path(flags.input)
        # A saved Dataset is a folder, whose own time does not change with its files.
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return f"{flags.input} {_stamp(files or [path])}"
    # Texts of the command line are a list, so that reading them here uses nothing up.
    return hashlib.sha256(repr(list(records)).encode()).hexdigest()[:16]


def _stamp(paths: Sequence[Path]) -> str:
    """Return a digest that changes when one of the files does."""
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _not_written(records: Iterable[Record], file: ResumableFile) -> Iterator[Record]:
    """The records without a row in the file: whole chunks have one, so the cuts stay the same."""
    remaining = iter(records)
    written = 0
    for record in remaining:
        if record.number >= file.consumed:
            remaining = chain([record], remaining)
            break
        written += 1
    if written != file.rows:
        raise InputError(
            f"the unfinished {file.path} was begun with another of --skip-empty and --keep-empty; "
            f"pass that one, or remove {file.path}.partial.json to begin again"
        )
    yield from remaining


def _chunks(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    remaining = iter(records)
    while chunk := list(islice(remaining, size)):
        yield chunk


def _encode_chunk(
    chunk: Sequence[Record],
    encoder: "Encoder",
    flags: RunFlags,
    check: Callable[[], None] = lambda: None,
) -> list["Row"]:
    """Return the rows of a chunk: id, columns of the input, results."""
    options = replace(flags.task_options, progress=lambda *counts: check())
    try:
        results = result_rows(flags.task, chunk, encoder, options)
    except InputError as error:
        raise InputError(f"among the texts {chunk[0].id} to {chunk[-1].id}: {error}") from error
    for record, row in results:
        if shared := record.cells.keys() & row.keys():
            raise InputError(_taken(min(shared)))
    return [{"id": record.id, **record.cells, **row} for record, row in results]


def _taken(name: str) -> str:
    return (
        f"the input has a column {name!r}, as the results have; give it another name with "
        f"--keep {name}=NEW, or name only the columns to keep"
    )


def _default_chunk(encoder: "Encoder", task: str) -> int:
    on_cpu = encoder.device.type == "cpu"
    return TASKS[task].chunk if on_cpu else TASKS[task].accelerator_chunk or TASKS[task].chunk


def _kept_types(flags: RunFlags) -> dict[str, Any]:
    """Return the types of the columns that are kept, for a format that must know them."""
    if flags.kept is None or flags.out is None or flags.out.suffix.lower() != ".parquet":
        return {}
    if not flags.input:
        return {new: str for new in kept_names(["text"], flags.kept, "the texts").values()}
    return column_types(flags.input, flags.kept, flags.form)


def _metadata(encoder: "Encoder", fingerprint: "Fingerprint", flags: RunFlags) -> dict[str, Any]:
    """Return what the finished file says about all its rows."""
    from packhorse.runtime.sentences import embedding_dimension

    metadata: dict[str, Any] = {
        "model": encoder.name,
        "fingerprint": str(fingerprint),
        "fingerprint_parts": fingerprint.parts,
        **_number_facts(flags),
    }
    if flags.task == "embed":
        bits = 8 if flags.precision in ("binary", "ubinary") else 1
        metadata["dimensions"] = embedding_dimension(encoder) // bits
    if flags.task == "sparse" and encoder.sparse_settings is not None:
        metadata["width"] = encoder.sparse_settings.width
    return metadata


class _RowCount:
    """The rows of the input, counted while the first of them are encoded."""

    def __init__(self, flags: RunFlags) -> None:
        self._rows = 0
        if flags.input:
            threading.Thread(
                target=self._count, args=(flags.input, flags.form), daemon=True
            ).start()

    def _count(self, source: str, form: CsvFormat) -> None:
        with suppress(PackhorseError, OSError, UnicodeError):  # reported where they are read
            self._rows = row_count(source, form)

    def at_least(self, done: int) -> int:
        """The total, 0 as long as it is unknown; never less than what is done."""
        return max(done, self._rows) if self._rows else 0


@contextmanager
def _note_interruption(file: ResumableFile) -> Iterator[None]:
    """On Ctrl-C, tell how many rows are kept."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"{file.rows:,} rows are kept; run the same command to resume after them")
        raise
