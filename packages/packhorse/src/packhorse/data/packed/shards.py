"""Packed rows on disk: Arrow IPC files that are mapped, never loaded, and a manifest that vouches.

    writer = Writer(folder, layout, specials, config)
    writer.add(Rows.of(sequences, offsets))
    writer.finish()
    dataset = shards.open(folder)
    dataset.take(np.array([5, 3])).ids

A shard is one record batch with a list column for each thing a row knows: `ids`, and for each of
its sequences `lengths`, `first` (tokens of segment A with its [CLS] and [SEP]), `random_next`; with
static masks also `masked_counts` (of each sequence), `masked_positions` (within the row) and
`masked_ids` (the tokens that stood there). Rows are ragged, so no padding is stored, and all types
are the narrowest that the vocabulary and the capacity allow; any Arrow reader can open them. A
shard's bytes are a function of its rows alone: no compression, no clock, no threads.

`open` looks at the files' sizes alone. A shard's checksum is compared when it is first touched,
before anything in it is believed: some 20 ms a shard, once a process, so that no flipped bit is
ever trained on. The price is that the first touch reads a whole shard.

Follows Arrow's columnar format 1.5, IPC file.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from packhorse.atomic import new_file
from packhorse.data.output.rows import arrow
from packhorse.data.packed.manifest import NAME, Manifest, ShardInfo, read_manifest, write_manifest
from packhorse.data.packed.masking import Recipe
from packhorse.data.packed.packs import Layout, Rows, columns_of, cumulative, dtypes_of, troubles
from packhorse.errors import InputError
from packhorse.wire import crc32c

if TYPE_CHECKING:
    from packhorse.data.packed.masking import Specials

SHARD_BYTES = 64 << 20
MOST_VALUES = (1 << 31) - 1  # of a column: Arrow's lists count in int32
RESTORE = "copy it again from where it was made, or build the dataset again"


def shard_name(number: int) -> str:
    """What the shard of this number is called; the manifest's order is what counts."""
    return f"shard-{number:05d}.arrow"


def rows_a_shard(layout: Layout, shard_bytes: int = SHARD_BYTES) -> int:
    """How many rows make a shard of about so many bytes, if they are nearly full."""
    widths = {name: dtype.itemsize for name, dtype in dtypes_of(layout).items()}
    row = layout.capacity * widths["ids"] + 4 * len(widths) + 2 * sum(widths.values())
    if layout.static_masks:
        row += layout.capacity * (widths["masked_positions"] + widths["masked_ids"]) // 7
    return max(1, min(shard_bytes // row, MOST_VALUES // layout.capacity))


def write_shard(path: Path, layout: Layout, rows: Rows) -> ShardInfo:
    """One shard, whole or not at all; refused if the rows do not keep to the layout."""
    for trouble in troubles(rows, layout):
        raise InputError(f"{path} cannot be written: {trouble}")
    pa = arrow()
    schema, bounds = _schema(layout), rows.bounds()
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
    counts = len(rows), len(rows.lengths), len(rows.ids)
    return ShardInfo(path.name, *counts, bytes=len(written), crc32c=crc32c(written))


@final
class Writer:
    """Rows, as many as come, into a folder that becomes a dataset when `finish` is called.

    How the rows are cut into calls of `add` does not show in the files. An unfinished folder is
    written over; a finished one is refused.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
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
        self.folder, self.layout, self.specials, self.config = folder, layout, specials, config
        self._masking = masking or Recipe()
        self._rows_a_shard = rows_a_shard(layout, shard_bytes)
        self._waiting: list[Rows] = []
        self._shards: list[ShardInfo] = []
        self._histogram = np.zeros(layout.capacity + 1, np.int64)

    def add(self, rows: Rows) -> None:
        """Take rows; shards that are full by now are written."""
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= self._rows_a_shard:
            self._write(last=False)

    def finish(self) -> Manifest:
        """Write what waits, and the manifest."""
        if self._waiting:
            self._write(last=True)
        histogram = tuple(self._histogram[1:].tolist())
        shards = tuple(self._shards)
        told = self.layout, self.specials, histogram, shards, self.config, self._masking
        manifest = Manifest(*told)
        write_manifest(self.folder, manifest)
        return manifest

    def _write(self, last: bool) -> None:
        rows, size = Rows.join(self._waiting), self._rows_a_shard
        end = len(rows) if last else len(rows) // size * size
        for begin in range(0, end, size):
            shard = rows.cut(begin, min(begin + size, end))
            path = self.folder / shard_name(len(self._shards))
            self._shards.append(write_shard(path, self.layout, shard))
            self._histogram += np.bincount(shard.lengths, minlength=len(self._histogram))
        self._waiting = [rows.cut(end, len(rows))] if end < len(rows) else []


class _Column(NamedTuple):
    """A list column where it lies in the file."""

    values: np.ndarray
    bounds: np.ndarray  # [rows+1]


@final
class Dataset:
    """All rows of a folder, numbered through its shards; `open` makes one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest, self.fingerprint = folder, manifest, manifest.fingerprint
        for shard in manifest.shards:
            _refuse_other_size(folder / shard.name, shard)
        self._touched: list[dict[str, _Column] | None] = [None] * len(manifest.shards)
        self._begins = cumulative([shard.rows for shard in manifest.shards])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Path, Manifest]]:
        """Another process maps the files again; the rows do not travel."""
        return Dataset, (self.folder, self.manifest)

    def row(self, number: int) -> Rows:
        """One row, as views of the file."""
        return self._gathered([number], lambda views: views[0])

    def take(self, numbers: np.ndarray | Sequence[int]) -> Rows:
        """These rows, in this order, laid end to end."""
        return self._gathered(numbers, np.concatenate)

    def tokens(self, numbers: np.ndarray | Sequence[int]) -> np.ndarray:
        """[R] how many tokens each of these rows has."""
        bounds = ((self._columns(shard)["ids"].bounds, row) for shard, row in self._places(numbers))
        return np.array([b[row + 1] - b[row] for b, row in bounds], np.int64)

    def shard(self, number: int) -> Rows:
        """All rows of one shard, as views of the file; each keeps to the layout."""
        columns = self._columns(number)
        for trouble in _troubles(columns, self.manifest.layout):
            path = self.folder / self.manifest.shards[number].name
            raise InputError(f"{path} is damaged: {trouble}; {RESTORE}")
        return _rows(columns)

    def verify(self) -> None:
        """Read every byte, now: checksums, and that each row keeps to the layout."""
        for number in range(len(self._touched)):
            self._touched[number] = None
            self.shard(number)

    def _columns(self, shard: int) -> dict[str, _Column]:
        columns = self._touched[shard]
        if columns is None:
            info = self.manifest.shards[shard]
            columns = _mapped(self.folder / info.name, info, self.manifest.layout)
            self._touched[shard] = columns
        return columns

    def _places(self, numbers: np.ndarray | Sequence[int]) -> Iterator[tuple[int, int]]:
        wanted = np.asarray(numbers, np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise InputError(f"rows {wanted.min()} to {wanted.max()} of {len(self)} were asked for")
        shards = np.searchsorted(self._begins, wanted, side="right") - 1
        return zip(shards.tolist(), (wanted - self._begins[shards]).tolist(), strict=True)

    def _gathered(
        self, numbers: np.ndarray | Sequence[int], joined: Callable[[list[np.ndarray]], np.ndarray]
    ) -> Rows:
        names = columns_of(self.manifest.layout.static_masks)
        views: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for shard, row in self._places(numbers):
            for name, (values, bounds) in self._columns(shard).items():
                views[name].append(values[bounds[row] : bounds[row + 1]])
        columns = {name: joined(pieces) for name, pieces in views.items()}
        rows = Rows(offsets=cumulative([len(v) for v in views["lengths"]]), **columns)
        # It costs a twentieth of a batch; who writes into a mapped file shifts no sequence unseen.
        for trouble in troubles(rows, self.manifest.layout):
            raise InputError(f"{self.folder} is damaged: {trouble}; `verify` names the shard")
        return rows


def open(folder: str | Path, *, verify: bool = False) -> Dataset:
    """A finished dataset; each shard is checked for its size, when it is touched or now for all."""
    dataset = Dataset(Path(folder), read_manifest(Path(folder)))
    if verify:
        dataset.verify()
    return dataset


def _refuse_other_size(path: Path, info: ShardInfo) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"{path} is missing: {error.strerror or error}; {RESTORE}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size != info.bytes:
        raise InputError(
            f"{path} has {found.st_size} bytes, its manifest says {info.bytes}: it was cut off or"
            f" changed; {RESTORE}"
        )


def _mapped(path: Path, info: ShardInfo, layout: Layout) -> dict[str, _Column]:
    """A shard's columns where they lie in the file, once its checksum is right."""
    _refuse_other_size(path, info)
    pa = arrow()
    try:
        mapped = pa.memory_map(str(path))
        if crc32c(memoryview(mapped.read_buffer())) != info.crc32c:
            raise InputError(f"{path} is damaged: its checksum is wrong; {RESTORE}")
        file = pa.ipc.open_file(mapped)
        if file.num_record_batches != 1:
            raise InputError(f"{path} has {file.num_record_batches} record batches; {RESTORE}")
        _refuse_other_columns(file.schema, layout, path)
        batch = file.get_batch(0)
        names = columns_of(layout.static_masks)
        columns = {name: _column(batch.column(name), dtypes_of(layout)[name]) for name in names}
    except (pa.ArrowException, OSError, ValueError, IndexError, TypeError, SystemError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged: {error}; {RESTORE}") from error
    have = batch.num_rows, len(columns["lengths"].values), len(columns["ids"].values)
    if have != (info.rows, info.sequences, info.tokens):
        raise InputError(
            f"{path} has {have} rows, sequences and tokens, its manifest says"
            f" {(info.rows, info.sequences, info.tokens)}; {RESTORE}"
        )
    return columns


def _refuse_other_columns(schema: Any, layout: Layout, path: Path) -> None:
    expected = _schema(layout)
    if not schema.equals(expected):
        have = ", ".join(f"{field.name}: {field.type}" for field in schema)
        want = ", ".join(f"{field.name}: {field.type}" for field in expected)
        raise InputError(f"{path} has columns {have}; {want} are expected; {RESTORE}")


def _column(array: Any, dtype: np.dtype) -> _Column:
    """Views of Arrow's buffers; numpy refuses those that are shorter than they say."""
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


def _troubles(columns: dict[str, _Column], layout: Layout) -> Iterator[str]:
    """What is wrong with the rows of a shard, or with where its columns begin them."""
    rows = _rows(columns)
    yield from troubles(rows, layout)
    for name, bounds in rows.bounds().items():
        if not np.array_equal(bounds, columns[name].bounds):
            yield f"the rows of column {name} do not match"


def _schema(layout: Layout) -> Any:
    pa = arrow()
    kinds = dtypes_of(layout).items()
    return pa.schema({name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in kinds})
