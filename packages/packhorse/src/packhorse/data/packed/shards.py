"""Packed rows on disk: Arrow IPC files that are mapped, not loaded, and verified by a manifest.

    writer = Writer(folder, layout, specials, config)
    writer.add(Rows.of(sequences, offsets))
    writer.finish()
    dataset = shards.open_dataset(folder)
    dataset.take(np.array([5, 3])).ids

A shard is one record batch with list columns: `ids` per token, and per sequence `lengths`, `first`
(tokens of segment A, its [CLS] and [SEP] included) and `random_next`; with static masks also
`masked_counts` (per sequence), `masked_positions` (within the row) and `masked_ids` (the original
tokens). Rows are ragged, so no padding is stored, and all types are the narrowest that the
vocabulary and the capacity allow; any Arrow reader can open them. A shard's bytes are a function of
its rows alone: no compression, no clock, no threads.

`open_dataset` checks only the sizes of the files. A shard's checksum is compared when the shard is
first used: some 20 ms per shard, once per process, so that no flipped bit is ever trained on. The
price is that the first use reads a whole shard.

Follows Arrow's columnar format 1.5, IPC file.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from packhorse.atomic import new_file
from packhorse.data.output import import_pyarrow
from packhorse.data.packed.manifest import NAME, Manifest, ShardInfo, read_manifest, write_manifest
from packhorse.data.packed.masking import Recipe
from packhorse.data.packed.packs import (
    RowLayout,
    Rows,
    columns_of,
    cumulative,
    dtypes_of,
    row_problems,
)
from packhorse.errors import InputError
from packhorse.exports import renamed
from packhorse.wire import crc32c

if TYPE_CHECKING:
    from packhorse.data.packed.masking import Specials

SHARD_BYTES = 64 << 20
MOST_VALUES = (1 << 31) - 1  # per column: Arrow's list offsets are int32
RESTORE = "copy it again from where it was made, or build the dataset again"


def shard_name(number: int) -> str:
    """The file name of a shard; its place in the order is that in the manifest."""
    return f"shard-{number:05d}.arrow"


def rows_per_shard(layout: RowLayout, shard_bytes: int = SHARD_BYTES) -> int:
    """How many rows, if nearly full, make a shard of about `shard_bytes`."""
    widths = {name: dtype.itemsize for name, dtype in dtypes_of(layout).items()}
    # A full row: its tokens, an int32 offset per column, and two sequences. Static masks are at
    # about a seventh of the tokens.
    row = layout.capacity * widths["ids"] + 4 * len(widths) + 2 * sum(widths.values())
    if layout.static_masks:
        row += layout.capacity * (widths["masked_positions"] + widths["masked_ids"]) // 7
    return max(1, min(shard_bytes // row, MOST_VALUES // layout.capacity))


def write_shard(path: Path, layout: RowLayout, rows: Rows) -> ShardInfo:
    """Write one shard, whole or not at all; rows that do not fit the layout are refused."""
    for problem in row_problems(rows, layout):
        raise InputError(f"{path} cannot be written: {problem}")
    pa = import_pyarrow()
    schema = _schema(layout)
    bounds = rows.bounds()
    arrays = [
        pa.ListArray.from_arrays(
            pa.array(bounds[name].astype(np.int32)),
            pa.array(getattr(rows, name).astype(dtype)),
        )
        for name, dtype in dtypes_of(layout).items()
    ]
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(use_threads=False)
    with pa.ipc.new_file(sink, schema, options=options) as file:
        file.write_batch(pa.record_batch(arrays, schema=schema))
    written = memoryview(sink.getvalue())
    with new_file(path) as file:
        file.write(written)
    return ShardInfo(
        name=path.name,
        rows=len(rows),
        sequences=len(rows.lengths),
        tokens=len(rows.ids),
        bytes=len(written),
        crc32c=crc32c(written),
    )


@final
class Writer:
    """Writes any number of rows into a folder, which `finish` makes a dataset.

    The files do not depend on how the rows are divided into calls of `add`. An unfinished folder is
    overwritten; a finished one is refused.
    """

    def __init__(
        self,
        folder: Path,
        layout: RowLayout,
        specials: Specials,
        config: dict[str, Any],
        shard_bytes: int = SHARD_BYTES,
        masking: Recipe | None = None,
    ) -> None:
        if (folder / NAME).exists():
            raise InputError(f"{folder} holds a finished dataset; remove it or name another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be made: {error.strerror or error}") from error
        self.folder = folder
        self.layout = layout
        self.specials = specials
        self.config = config
        self._masking = masking or Recipe()
        self._rows_per_shard = rows_per_shard(layout, shard_bytes)
        self._waiting: list[Rows] = []
        self._shards: list[ShardInfo] = []
        self._histogram = np.zeros(layout.capacity + 1, np.int64)

    def add(self, rows: Rows) -> None:
        """Add rows; shards that are full are written."""
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= self._rows_per_shard:
            self._write(last=False)

    def finish(self) -> Manifest:
        """Write the remaining rows, and the manifest."""
        if self._waiting:
            self._write(last=True)
        manifest = Manifest(
            self.layout,
            self.specials,
            tuple(self._histogram[1:].tolist()),
            tuple(self._shards),
            self.config,
            self._masking,
        )
        write_manifest(self.folder, manifest)
        return manifest

    def _write(self, last: bool) -> None:
        rows = Rows.join(self._waiting)
        size = self._rows_per_shard
        end = len(rows) if last else len(rows) // size * size
        for begin in range(0, end, size):
            shard = rows.cut(begin, min(begin + size, end))
            path = self.folder / shard_name(len(self._shards))
            self._shards.append(write_shard(path, self.layout, shard))
            self._histogram += np.bincount(shard.lengths, minlength=len(self._histogram))
        self._waiting = [rows.cut(end, len(rows))] if end < len(rows) else []


class _Column(NamedTuple):
    """A list column, as views of the file."""

    values: np.ndarray
    bounds: np.ndarray  # [rows+1]


@final
class Dataset:
    """All rows of a folder, numbered through its shards; opened by `open_dataset`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.fingerprint = manifest.fingerprint
        for shard in manifest.shards:
            _check_size(folder / shard.name, shard)
        # Columns of each shard once it is verified; None before its first use.
        self._opened: list[dict[str, _Column] | None] = [None for _ in manifest.shards]
        self._begins = cumulative([shard.rows for shard in manifest.shards])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Path, Manifest]]:
        """Pickle without rows: the other process maps the files again."""
        return Dataset, (self.folder, self.manifest)

    def row(self, number: int) -> Rows:
        """One row, as views of the file."""
        return self._gathered([number], lambda views: views[0])

    def take(self, numbers: np.ndarray | Sequence[int]) -> Rows:
        """These rows, in this order, laid end to end."""
        return self._gathered(numbers, np.concatenate)

    def tokens(self, numbers: np.ndarray | Sequence[int]) -> np.ndarray:
        """[R] how many tokens each of these rows has."""
        bounds = ((self._columns(shard)["ids"].bounds, row) for shard, row in self._locate(numbers))
        return np.array([b[row + 1] - b[row] for b, row in bounds], np.int64)

    def shard(self, number: int) -> Rows:
        """All rows of one shard, checked, as views of the file."""
        columns = self._columns(number)
        for problem in _shard_problems(columns, self.manifest.layout):
            path = self.folder / self.manifest.shards[number].name
            raise InputError(f"{path} is damaged: {problem}; {RESTORE}")
        return _rows(columns)

    def verify(self) -> None:
        """Read every byte now; check checksums and all rows."""
        for number in range(len(self._opened)):
            self._opened[number] = None
            self.shard(number)

    def _columns(self, shard: int) -> dict[str, _Column]:
        columns = self._opened[shard]
        if columns is None:
            info = self.manifest.shards[shard]
            columns = _mapped(self.folder / info.name, info, self.manifest.layout)
            self._opened[shard] = columns
        return columns

    def _locate(self, numbers: np.ndarray | Sequence[int]) -> Iterator[tuple[int, int]]:
        """The shard of each row, and the row's number in it."""
        rows = np.asarray(numbers, np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise InputError(
                f"there are no rows {rows.min()} to {rows.max()} of {len(self)}; rows count from 0"
            )
        shards = np.searchsorted(self._begins, rows, side="right") - 1
        return zip(shards.tolist(), (rows - self._begins[shards]).tolist(), strict=True)

    def _gathered(
        self, numbers: np.ndarray | Sequence[int], joined: Callable[[list[np.ndarray]], np.ndarray]
    ) -> Rows:
        names = columns_of(self.manifest.layout.static_masks)
        views: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for shard, row in self._locate(numbers):
            for name, (values, bounds) in self._columns(shard).items():
                views[name].append(values[bounds[row] : bounds[row + 1]])
        columns = {name: joined(pieces) for name, pieces in views.items()}
        rows = Rows(offsets=cumulative([len(v) for v in views["lengths"]]), **columns)
        # Costs a twentieth of a batch, and notices a file that is changed while it is mapped.
        for problem in row_problems(rows, self.manifest.layout):
            raise InputError(f"{self.folder} is damaged: {problem}; `verify` names the shard")
        return rows


def open_dataset(folder: str | Path, *, verify: bool = False) -> Dataset:
    """Open a finished dataset; shards are verified when they are first used, or all of them now."""
    dataset = Dataset(Path(folder), read_manifest(Path(folder)))
    if verify:
        dataset.verify()
    return dataset


def _check_size(path: Path, info: ShardInfo) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path} is missing: {error.strerror or error}; {RESTORE}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size != info.bytes:
        raise InputError(
            f"{path} has {status.st_size} bytes, its manifest says {info.bytes}: it was cut off or"
            f" changed; {RESTORE}"
        )


def _mapped(path: Path, info: ShardInfo, layout: RowLayout) -> dict[str, _Column]:
    """The columns of a shard as views of the file, after its checksum is verified."""
    _check_size(path, info)
    pa = import_pyarrow()
    try:
        mapped = pa.memory_map(str(path))
        if crc32c(memoryview(mapped.read_buffer())) != info.crc32c:
            raise InputError(f"{path} is damaged: its checksum is wrong; {RESTORE}")
        file = pa.ipc.open_file(mapped)
        if file.num_record_batches != 1:
            raise InputError(f"{path} has {file.num_record_batches} record batches; {RESTORE}")
        _check_columns(file.schema, layout, path)
        batch = file.get_batch(0)
        names = columns_of(layout.static_masks)
        columns = {name: _column(batch.column(name), dtypes_of(layout)[name]) for name in names}
    except (pa.ArrowException, OSError, ValueError, IndexError, TypeError, SystemError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged: {error}; {RESTORE}") from error
    counts = (batch.num_rows, len(columns["lengths"].values), len(columns["ids"].values))
    expected = (info.rows, info.sequences, info.tokens)
    if counts != expected:
        raise InputError(
            f"{path} has {counts} rows, sequences and tokens, its manifest says {expected};"
            f" {RESTORE}"
        )
    return columns


def _check_columns(schema: Any, layout: RowLayout, path: Path) -> None:
    expected = _schema(layout)
    if not schema.equals(expected):
        actual_columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
        columns = ", ".join(f"{field.name}: {field.type}" for field in expected)
        raise InputError(f"{path} has columns {actual_columns}; {columns} are expected; {RESTORE}")


def _column(array: Any, dtype: np.dtype) -> _Column:
    """Views of Arrow's buffers; numpy refuses buffers that are too short."""
    if array.null_count or array.values.null_count or array.offset:
        raise ValueError("a column with nulls")
    _, bounds, _, values = array.buffers()
    count = len(array.values)
    return _Column(
        np.frombuffer(values, dtype, count) if count else np.zeros(0, dtype),
        np.frombuffer(bounds, np.int32, len(array) + 1),
    )


def _rows(columns: dict[str, _Column]) -> Rows:
    values = {name: column.values for name, column in columns.items()}
    return Rows(offsets=columns["lengths"].bounds, **values)


def _shard_problems(columns: dict[str, _Column], layout: RowLayout) -> Iterator[str]:
    """What is wrong with the rows of a shard, or with the bounds of its columns."""
    rows = _rows(columns)
    yield from row_problems(rows, layout)
    for name, bounds in rows.bounds().items():
        if not np.array_equal(bounds, columns[name].bounds):
            yield f"the rows of column {name} do not match"


def _schema(layout: RowLayout) -> Any:
    pa = import_pyarrow()
    dtypes = dtypes_of(layout).items()
    return pa.schema({name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in dtypes})


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
