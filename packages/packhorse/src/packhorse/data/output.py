"""Files of results: npy, jsonl and parquet, written in chunks and resumable after a kill.

A format turns rows (plain dicts, each with an `id`) into bytes that are valid as soon as they are
on disk, and makes the finished file from them at the end. npy and jsonl can be appended to.
parquet has its index at the end and cannot, so its rows are first an Arrow stream, whose messages
can be appended one by one, and are rewritten once. So is npz, whose rows are first records of a
count and that many numbers: sparse vectors become the arrays of `scipy.sparse.load_npz`, vectors of
tokens `embeddings` in fp16, all texts end to end, and `doclens`, the tokens of each, as indexes of
late interaction (PLAID) take them. npy and npz have no room for ids, so they go to a second file
next to it.

Metadata about all rows (the model that made them) is part of a parquet file; npy and jsonl have no
place that every reader skips, so it goes to `FILE.meta.json`.

`ResumableFile` appends rows to `FILE.partial`. Only when they are on disk does a small
`FILE.partial.json` say so; it is replaced as a whole, which a kill cannot tear. Bytes in the
partial file beyond what it states are the torn end of a chunk: they are cut off and that chunk is
done again. The finished file gets its name last, so a file of that name is always complete. Chunks
are cut at the same rows however often the work was interrupted, hence the result is the same, byte
for byte. The cost is one fsync per chunk. A lock keeps two processes apart; the kernel releases it
when its holder dies.

Follows the npy format 1.0, JSON Lines, and Arrow's IPC streaming format.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, BinaryIO, final

from packhorse.atomic import lock, new_file, sync
from packhorse.errors import InputError, MissingExtra

Row = dict[str, Any]
# The columns by name: str, int, float, "float32", "int8", "uint8", [the type of items],
# {the columns of a struct}, or a type of Arrow's, of columns that were read.
Shape = Mapping[str, Any]

SPARSE_COLUMNS = ("indices", "weights", "words")  # of rows that npz can hold
Metadata = Mapping[str, Any]  # as JSON can hold it

AGAIN = "pass --overwrite to begin again"


@dataclass(frozen=True, slots=True)
class Format:
    """How rows become a file, or a file and companions such as the ids of npy."""

    companions: tuple[str, ...]  # suffixes of further files, added to the name the user gave
    # Per file, from the first rows (none if there are none at all), their types and the metadata.
    head: Callable[[Sequence[Row], Shape, Metadata], Sequence[bytes]]
    body: Callable[[Sequence[Row], bytes], Sequence[bytes]]  # per file; takes the first one's head
    finish: Callable[
        [BinaryIO, int, Path], None
    ]  # partial file, number of rows, path to rewrite to
    holds_metadata: bool = False  # otherwise it is in a file of its own


def format_of(path: Path, shape: Shape) -> Format:
    """The format for the file's suffix; refused if it cannot hold such rows."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise InputError(f"{path}: cannot write results as {suffix or 'this'}; use one of {known}")
    if suffix == ".npy" and set(shape) != {"vector"}:
        raise InputError(f"{path}: npy holds one vector per text, these are not; write .jsonl")
    if suffix == ".npz" and set(shape) not in (set(SPARSE_COLUMNS), {"vectors"}):
        raise InputError(
            f"{path}: npz holds sparse vectors or one vector per token, these are neither; "
            "write .jsonl"
        )
    if suffix == ".parquet":
        import_pyarrow()
    return FORMATS[suffix]


def to_plain(value: Any) -> Any:
    """The value as JSON can hold it: arrays become lists, NaN and infinities become null.

    Numbers of a float32 array get the nine digits that distinguish any two of them, not seventeen.
    """
    if hasattr(value, "tolist"):
        digits = 9 if str(value.dtype) == "float32" else 17
        return _rounded(value.tolist(), digits)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _json_line(value: Any) -> str:
    return _json_text(value) + "\n"


def _json_text(value: Any) -> str:
    """The value as JSON, as `to_plain` has it.

    Vectors are most of a file, so their numbers are formatted at once: three times as fast.
    """
    if isinstance(value, dict):
        return f"{{{','.join(f'{_json_text(name)}:{_json_text(value[name])}' for name in value)}}}"
    if str(getattr(value, "dtype", "")) == "float32" and value.ndim:
        if value.ndim > 1:
            return f"[{','.join(map(_json_text, value))}]"
        text = ",".join(["%.9g"] * len(value)) % tuple(value.tolist())
        if "n" not in text:  # neither nan nor inf
            return f"[{text}]"
    return json.dumps(to_plain(value), ensure_ascii=False, separators=(",", ":"), default=_as_text)


def _as_text(value: Any) -> str:
    """A cell of a table that JSON has no type for: dates in ISO 8601, bytes in base64."""
    if isinstance(value, date | time):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _jsonl_head(rows: Sequence[Row], shape: Shape, metadata: Metadata) -> list[bytes]:
    return [b""]


def _jsonl_body(rows: Sequence[Row], head: bytes) -> list[bytes]:
    return ["".join(map(_json_line, rows)).encode()]


def _finish_nothing(partial: BinaryIO, rows: int, whole: Path) -> None:
    """Nothing to do: the partial file is complete as it is."""


def _npy_header(width: int, rows: int, numbers: str) -> bytes:
    """A header that has the same length for any number of rows, so it can be replaced."""
    import numpy as np

    buffer = io.BytesIO()
    description = {"descr": numbers, "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


def _npy_head(rows: Sequence[Row], shape: Shape, metadata: Metadata) -> list[bytes]:
    import numpy as np

    width = len(rows[0]["vector"]) if rows else metadata.get("dimensions", 0)
    (kind,) = shape["vector"]
    return [_npy_header(width, 0, np.dtype(kind).newbyteorder("<").str), b""]


def _npy_body(rows: Sequence[Row], head: bytes) -> list[bytes]:
    import numpy as np

    _, _, numbers = _read_npy_header(io.BytesIO(head))
    vectors = np.stack([row["vector"] for row in rows])
    ids = "".join(_json_line(row["id"]) for row in rows)
    return [vectors.astype(numbers, copy=False).tobytes(), ids.encode()]


def _read_npy_header(file: Any) -> Any:
    import numpy as np

    np.lib.format.read_magic(file)
    return np.lib.format.read_array_header_1_0(file)


def _npy_finish(partial: BinaryIO, rows: int, whole: Path) -> None:
    partial.seek(0)
    (_, width), _, numbers = _read_npy_header(partial)
    partial.seek(0)
    partial.write(_npy_header(width, rows, numbers.str))


def _npz_head(rows: Sequence[Row], shape: Shape, metadata: Metadata) -> list[bytes]:
    import numpy as np

    is_sparse = "vectors" not in shape
    width = metadata.get("width", 0)
    if rows and not is_sparse:
        width = rows[0]["vectors"].shape[1]
    return [np.array([is_sparse, width], "<i8").tobytes(), b""]


def _npz_body(rows: Sequence[Row], head: bytes) -> list[bytes]:
    import numpy as np

    parts: list[bytes] = []
    for row in rows:
        if "vectors" in row:
            parts += [
                np.int32(len(row["vectors"])).tobytes(),
                row["vectors"].astype("<f2").tobytes(),
            ]
            continue
        indices = np.asarray(row["indices"], "<i4")
        weights = np.asarray(row["weights"], "<f4")
        parts += [np.int32(len(indices)).tobytes(), indices.tobytes(), weights.tobytes()]
    ids = "".join(_json_line(row["id"]) for row in rows)
    return [b"".join(parts), ids.encode()]


def _npz_finish(partial: BinaryIO, rows: int, whole: Path) -> None:
    """Write the arrays of the records one after the other; none is in memory as a whole."""
    import numpy as np

    is_sparse, width = np.fromfile(partial.name, "<i8", 2).tolist()
    size = 8 if is_sparse else 2 * width  # bytes of one of a record's numbers
    records = np.memmap(partial.name, np.uint8, "r", offset=16)
    lengths = np.empty(rows, "<i4")
    starts = np.empty(rows, np.int64)
    at = 0
    for row in range(rows):
        lengths[row] = records[at : at + 4].view("<i4")[0]
        starts[row] = at + 4
        at += 4 + size * int(lengths[row])
    total = int(lengths.sum(dtype=np.int64))

    def column(offset: int, size: int) -> Iterator[bytes]:
        """Yield a column of each record: `size` bytes per entry, after `offset` bytes per entry."""
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            first = start + offset * length
            yield records[first : first + size * length].tobytes()

    with zipfile.ZipFile(whole, "w") as archive:
        if is_sparse:
            ends = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
            _add_array(archive, "indices", "<i4", (total,), column(0, 4))
            _add_array(archive, "indptr", "<i8", (rows + 1,), [ends.tobytes()])
            _add_array(archive, "format", "|S3", (), [b"csr"])
            _add_array(archive, "shape", "<i8", (2,), [np.array([rows, width], "<i8").tobytes()])
            _add_array(archive, "data", "<f4", (total,), column(4, 4))
        else:
            _add_array(archive, "embeddings", "<f2", (total, width), column(0, size))
            _add_array(archive, "doclens", "<i4", (rows,), [lengths.tobytes()])


def _add_array(
    archive: zipfile.ZipFile, name: str, descr: str, shape: tuple[int, ...], parts: Iterable[bytes]
) -> None:
    import numpy as np

    header = {"descr": descr, "fortran_order": False, "shape": shape}
    # A date of its own would make equal results unequal files.
    entry = zipfile.ZipInfo(f"{name}.npy")
    with archive.open(entry, "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(part)


def _parquet_head(rows: Sequence[Row], shape: Shape, metadata: Metadata) -> list[bytes]:
    pa = import_pyarrow()
    fields = {"id": pa.int64() if all(map(_has_integer_id, rows)) else pa.string()}
    fields |= {name: _arrow_type(kind) for name, kind in shape.items()}
    entries = {
        f"packhorse.{name}": value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }
    return [pa.schema(fields, metadata=entries or None).serialize().to_pybytes()]


def _has_integer_id(row: Row) -> bool:
    return isinstance(row["id"], int) and abs(row["id"]) < 1 << 63


def _parquet_body(rows: Sequence[Row], head: bytes) -> list[bytes]:
    pa = import_pyarrow()
    schema = pa.ipc.read_schema(pa.py_buffer(head))
    ids_are_text = schema.field("id").type == pa.string()
    for row in rows:
        if not (ids_are_text or _has_integer_id(row)):
            raise InputError(
                f"the id {row['id']!r:.40} is not a whole number, but those before it are;"
                " write .jsonl"
            )
    columns: list[Any] = []
    for field in schema:
        cells = [row.get(field.name) for row in rows]
        if field.name == "id" and ids_are_text:
            cells = list(map(str, cells))
        try:
            columns.append(_arrow_array(cells, field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError) as error:
            raise InputError(
                f"column {field.name!r} is {field.type}, and a cell of the rows {rows[0]['id']!r} "
                f"to {rows[-1]['id']!r} is not: {error}; write .jsonl"
            ) from error
    return [pa.RecordBatch.from_arrays(columns, schema=schema).serialize().to_pybytes()]


def _arrow_array(cells: Sequence[Any], kind: Any) -> Any:
    """The cells of a column; those that are arrays of numbers are copied at once."""
    import numpy as np

    pa = import_pyarrow()
    if not all(isinstance(cell, np.ndarray) for cell in cells):
        cells = [list(cell) if getattr(cell, "ndim", 1) > 1 else cell for cell in cells]
        return pa.array(cells, kind)
    numbers = np.concatenate(cells)
    if numbers.ndim > 1:
        items = _arrow_array(list(numbers), kind.value_type)
    else:
        items = pa.array(numbers, kind.value_type)
    ends = np.cumsum([0, *map(len, cells)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), items, type=kind)


def _parquet_finish(partial: BinaryIO, rows: int, whole: Path) -> None:
    """Rewrite the stream, batch by batch, as a parquet file at `whole`."""
    pa = import_pyarrow()
    from pyarrow import parquet

    with (
        pa.OSFile(partial.name) as source,
        pa.ipc.open_stream(source) as stream,
        parquet.ParquetWriter(whole, stream.schema) as writer,
    ):
        for batch in stream:
            writer.write_batch(batch)


def _arrow_type(kind: Any) -> Any:
    pa = import_pyarrow()
    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    if isinstance(kind, Mapping):
        return pa.struct({name: _arrow_type(item) for name, item in kind.items()})
    if isinstance(kind, pa.DataType):
        return kind
    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    types |= {"float32": pa.float32(), "int8": pa.int8(), "uint8": pa.uint8()}
    return types[kind]


def import_pyarrow() -> Any:
    """Import pyarrow; the error names the extra to install."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error
    return pyarrow


FORMATS = {
    ".npy": Format((".ids.jsonl",), _npy_head, _npy_body, _npy_finish),
    ".npz": Format((".ids.jsonl",), _npz_head, _npz_body, _npz_finish),
    ".jsonl": Format((), _jsonl_head, _jsonl_body, _finish_nothing),
    ".parquet": Format((), _parquet_head, _parquet_body, _parquet_finish, holds_metadata=True),
}


@dataclass
class _State:
    """What the partial files are known to hold."""

    made_by: dict[str, Any]
    consumed: int = 0  # rows of the input whose results are on disk, skipped ones too
    rows: int = 0
    numbered: bool = True  # ids are 0, 1, 2 …, so npy needs no file of ids
    head: int = 0  # bytes before the first row
    sizes: tuple[int, ...] = ()  # bytes of each file; none before the first row


@final
class ResumableFile:
    """Rows on their way to `path`; `consumed` says where in the input to continue."""

    def __init__(
        self,
        path: str | Path,
        shape: Shape,
        made_by: Mapping[str, Any],
        *,
        kept: Callable[[], Shape] = dict,
        metadata: Metadata | None = None,
        overwrite: bool = False,
    ) -> None:
        """Begin the file, or continue an unfinished one that has the same `made_by`.

        made_by: everything that decides the rows. kept: returns the columns that come before those
        of `shape`, of a file that has no row yet; it may take long. metadata: about all rows, for
        the finished file; it must follow from `made_by`. overwrite: replace a finished file, or
        unfinished work with another `made_by`.
        """
        self.path = Path(path)
        self._shape = shape
        self._kept = kept
        self._metadata = metadata or {}
        self._format = format_of(self.path, shape)
        self._state = _State(json.loads(json.dumps(made_by)))
        self._head = b""
        self._files: list[BinaryIO] = []
        self._owned = False  # until we hold the lock, the partial files may be another process's
        try:
            with self._disk_errors():
                self._refuse_existing(overwrite)
                self._open()
                # Again, because another process may have finished it while we waited.
                self._refuse_existing(overwrite)
                self._resume(overwrite)
                self._owned = True
        except BaseException:
            self.close()
            raise

    @property
    def consumed(self) -> int:
        """How much of the input has its results on disk, as passed to `append`."""
        return self._state.consumed

    @property
    def rows(self) -> int:
        """How many rows are on disk."""
        return self._state.rows

    def append(self, rows: Sequence[Row], consumed: int) -> None:
        """Write rows durably, together with how much of the input they account for."""
        with self._disk_errors():
            if rows:
                self._write(rows)
            self._state.consumed = consumed
            self._save()

    def finish(self) -> None:
        """Complete the file, even without a row, and give it its name."""
        whole = Path(f"{self.path}.whole")
        partials = self._partials()
        with self._disk_errors():
            if not self._state.sizes:
                self._write([])
            whole.unlink(missing_ok=True)  # left by a kill, or foreign: not these rows
            self._format.finish(self._files[0], self._state.rows, whole)
            self._sync()
            self.path.unlink(missing_ok=True)  # an old file must never have new ids next to it
            for partial, companion in zip(partials[1:], self._companions(), strict=True):
                if self._state.numbered:
                    companion.unlink(missing_ok=True)
                else:
                    partial.replace(companion)
            self._write_metadata()
            rewritten = whole if whole.exists() else partials[0]
            sync(rewritten)
            rewritten.replace(self.path)
            for leftover in (*partials, self._state_path()):
                leftover.unlink(missing_ok=True)
            sync(self.path.parent)
        self.close()

    def _write_metadata(self) -> None:
        """Write the metadata beside a file that cannot hold it; an old file's is removed."""
        path = Path(f"{self.path}.meta.json")
        if self._metadata and not self._format.holds_metadata:
            with new_file(path) as file:
                file.write(json.dumps(dict(self._metadata), indent=2).encode() + b"\n")
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the files; what was appended stays and can be continued."""
        for file in self._files:
            file.close()
            if self._owned and not self._state.sizes:
                Path(file.name).unlink(missing_ok=True)
        self._files = []

    def _open(self) -> None:
        partials = self._partials()
        for partial, companion in zip(partials[1:], self._companions(), strict=True):
            # `finish` renames the companion before the file itself. A kill in between leaves the
            # companion and the state, but neither file: undo the renaming.
            unfinished = self._state_path().exists() and not self.path.exists()
            if unfinished and companion.exists() and not partial.exists():
                companion.replace(partial)
        for partial in partials:
            partial.touch()
            self._files.append(partial.open("r+b"))
        lock(self._files[0], self.path)
        if not os.path.samestat(os.fstat(self._files[0].fileno()), partials[0].stat()):
            raise InputError(f"{self.path} was finished by another process just now")

    def _write(self, rows: Sequence[Row]) -> None:
        state = self._state
        heads: Sequence[bytes] = [b"" for _ in self._files]
        if not state.sizes:  # nothing is written yet
            shape = {**self._kept(), **self._shape}
            heads = self._format.head(rows, shape, self._metadata)
            self._head = heads[0]
        bodies = self._format.body(rows, self._head) if rows else [b"" for _ in self._files]
        for file, head, body in zip(self._files, heads, bodies, strict=True):
            file.seek(0, os.SEEK_END)
            file.write(head + body)
        self._sync()
        state.sizes = tuple(file.tell() for file in self._files)
        state.head = len(self._head)
        numbers = range(state.rows, state.rows + len(rows))
        state.numbered &= all(row["id"] == i for row, i in zip(rows, numbers, strict=True))
        state.rows += len(rows)

    def _sync(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def _save(self) -> None:
        draft = Path(f"{self._state_path()}.new")
        draft.write_text(json.dumps(asdict(self._state)), "utf-8")
        sync(draft)
        draft.replace(self._state_path())
        sync(self.path.parent)

    def _resume(self, overwrite: bool) -> None:
        """Continue the work of an earlier run; what it wrote beyond its state is cut off."""
        new_state = self._state
        try:
            self._state = self._read_state() or new_state
        except InputError:
            if not overwrite:
                raise
            self._state_path().unlink()
        for file, size in zip(self._files, self._state.sizes or (0, 0), strict=False):
            file.truncate(size)
        self._head = self._files[0].read(self._state.head)

    def _read_state(self) -> _State | None:
        """The state that an earlier run with the same `made_by` left; None if there is none."""
        path = self._state_path()
        if not path.exists():
            return None
        try:
            state = _State(**json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} is damaged; {AGAIN}") from error
        made_by = self._state.made_by
        for key in (*made_by, *state.made_by):
            then = state.made_by.get(key)
            now = made_by.get(key)
            if then != now:
                raise InputError(
                    f"{self._partials()[0]} was begun with another {key} "
                    f"({then!r:.60}, now {now!r:.60}); {AGAIN}"
                )
        for file, size in zip(self._files, state.sizes, strict=False):
            if os.fstat(file.fileno()).st_size < size:
                raise InputError(f"{file.name} is shorter than it was left; {AGAIN}")
        return state

    def _refuse_existing(self, overwrite: bool) -> None:
        if self.path.is_dir():
            raise InputError(f"{self.path} is a folder; name a file")
        if self.path.exists() and not overwrite:
            raise InputError(f"{self.path} exists already; {AGAIN}")

    def _partials(self) -> list[Path]:
        return [Path(f"{self.path}{suffix}.partial") for suffix in ("", *self._format.companions)]

    def _companions(self) -> list[Path]:
        return [Path(f"{self.path}{suffix}") for suffix in self._format.companions]

    def _state_path(self) -> Path:
        return Path(f"{self.path}.partial.json")

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn errors of the disk into a message that names the file."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{self.path} cannot be written: {reason}") from error
