"""Results of a stream of texts into a file: chunk after chunk, as much memory as one chunk takes.

What decides the rows (input, model, task, how it runs) is written beside the unfinished file, and
work that was begun otherwise is not continued. Of a file and of weights the path, size and time of
change stand for the content: hashing a large input would cost more than it finds. Standard input
cannot be read twice, so nothing that came from there is continued.
"""

import hashlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse import __version__
from packhorse.cli.console import note, progress
from packhorse.cli.flags import Options
from packhorse.cli.tasks import TASKS, rows_of
from packhorse.data.output import ResumableFile
from packhorse.data.tables import Record
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.data.output import Row
    from packhorse.runtime.encoder import Encoder

# What a model may be made of, in any format.
KINDS = ("json", "txt", "safetensors", "bin", "index", "data-*", "meta", "pb", "onnx", "onnx*data")


def write(records: Iterable[Record], encoder: "Encoder", options: Options) -> dict[str, Any]:
    """All results into `options.out`; what was done, for the user to read."""
    task, out = TASKS[options.task], options.out or Path()
    size = options.chunk or task.chunk
    made_by = {**made_with(encoder, options), **_made_from(records, options), "chunk": size}
    file = ResumableFile(out, task.shape(encoder), made_by, overwrite=options.overwrite)
    start, before = time.perf_counter(), file.rows
    if before:
        note(f"{out}: going on after {before:,} rows")
    about = {"model": encoder.name, "device": str(encoder.device)}
    shown = progress(f"writing {out}", counts="sequences", about=about)
    with closing(file), shown as advance, _kept(file):
        for chunk in _chunks(records, size, skip=file.consumed):
            rows = _rows(chunk, encoder, options)
            file.append(rows, file.consumed + len(chunk))
            advance(file.rows, 0)
        file.finish()
    seconds = time.perf_counter() - start
    note(f"{out}: {file.rows:,} rows, {file.rows - before:,} of them now in {seconds:.1f} s")
    return {"out": str(out), "rows": file.rows, "resumed_after": before, "seconds": seconds}


def made_with(encoder: "Encoder", options: Options) -> dict[str, Any]:
    """The model, and how it runs."""
    from packhorse.device import dtype_name

    return {
        "model": encoder.name,
        "task": options.task,
        "device": str(encoder.device),
        "dtype": dtype_name(encoder.dtype),
        "kernel": encoder.kernel,
        "graphs": options.graphs,
        "invariant": options.invariant,
    }


def _made_from(records: Iterable[Record], options: Options) -> dict[str, Any]:
    """What else decides the rows; `--skip-empty` does not: without it there are none to skip."""
    from packhorse.checkpoint.hub import resolve

    model, beside = resolve(options.checkpoint or options.model), options.beside
    folder = model if model.is_dir() else model.parent
    found = (folder.glob(f"{depth}*.{kind}") for depth in ("", "*/") for kind in KINDS)
    given = (Path(path) for path in (beside.config, beside.vocab) if path)
    files = sorted(path for paths in (*found, given) for path in paths if path.is_file())
    return {
        "version": __version__,
        "weights": _stamp(files),
        "input": _input(records, options),
        **{name: getattr(beside, name) for name in ("heads", "gelu", "ignore")},
        **{name: getattr(options, name) for name in ("column", "pair")},
        **{name: getattr(options.ask, name) for name in options.ask.__slots__},
    }


def _input(records: Iterable[Record], options: Options) -> str:
    if options.input == "-":
        return f"standard input {uuid.uuid4()}"
    if options.input:
        path = Path(options.input)
        inside = sorted(file for file in path.rglob("*") if file.is_file())  # of a saved Dataset
        return f"{options.input} {_stamp(inside or [path])}"
    return hashlib.sha256(repr(list(records)).encode()).hexdigest()[:16]  # a list: from arguments


def _stamp(paths: Sequence[Path]) -> str:
    """Changes when one of the files does."""
    found = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _chunks(records: Iterable[Record], size: int, skip: int) -> Iterator[list[Record]]:
    """Cut at the same places whatever is skipped, for what is skipped are whole chunks."""
    left = islice(records, skip, None)
    while chunk := list(islice(left, size)):
        yield chunk


def _rows(chunk: Sequence[Record], encoder: "Encoder", options: Options) -> list["Row"]:
    try:
        found = rows_of(options.task, chunk, encoder, options.ask)
    except InputError as error:
        raise InputError(f"among the texts {chunk[0].id} to {chunk[-1].id}: {error}") from error
    return [{"id": record.id, **row} for record, row in found]


@contextmanager
def _kept(file: ResumableFile) -> Iterator[None]:
    """Tell what an interruption leaves."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"{file.rows:,} rows are kept; the same command goes on after them")
        raise
