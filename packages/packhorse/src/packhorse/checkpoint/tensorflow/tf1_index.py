"""Read the index of a TensorFlow checkpoint: its tensors, where their bytes are, and their uses.

The index is a sorted table (`sstable`). The empty key has a header (BundleHeaderProto), each name
an entry (BundleEntryProto). A partitioned variable's entry lists its slices, each of which has an
entry of its own under a key that begins with a zero byte. TensorFlow can store any set of boxes
that way, but its partitioners cut along one axis; only such slices are joined here, and they must
cover the tensor exactly. A repeated field, a wrong wire type and a slice that belongs to no tensor
are refused, where protobuf and TensorFlow would take the last, skip it or never look.

Entries are weights, optimizer slots or training state (`sort_entries`). A BERT has no weight
without dimensions, yet a scalar is skipped only if it is known: training code leaves its step, its
loss scale and the counters of that scale. Everything else counts as a weight, and a model that does
not know it refuses the checkpoint.

Follows tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as default
from typing import BinaryIO

import torch

from packhorse import wire
from packhorse.checkpoint.tensorflow import sstable
from packhorse.errors import CheckpointError

DTYPES = {  # DataType of tensorflow/core/framework/types.proto
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    8: torch.complex64,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    17: torch.uint16,
    18: torch.complex128,
    19: torch.float16,
    22: torch.uint32,
    23: torch.uint64,
}
NO_TENSORS = {7: "string", 20: "resource", 21: "variant"}
TENSOR_LIMIT = 10_000  # BERT-Large with its optimizer has 1,200
SHARD_LIMIT = 256  # data files; all are open at once
DIMENSION_LIMIT = 8  # of a TensorShapeProto or TensorSliceProto
VERSION = 1  # of the format (VersionDef.producer)
V1 = (
    "the V1 format, of TensorFlow before 0.12, is not read: "
    "restore the checkpoint in TensorFlow and save it with tf.compat.v1.train.Saver"
)

SLOTS = {  # what an optimizer appends to the name of a weight → kind of slot
    "adam_m": "m",
    "adam_v": "v",
    "LAMB": "m",
    "LAMB_1": "v",
    "Adam": "m",
    "Adam_1": "v",
    "Momentum": "m",
}
POWERS = ("beta1_power", "beta2_power")  # Adam's, which follow from the step
STEP = "global_step"
OBJECT_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"  # suffix of names in a TF2 object graph
OBJECT_SLOT = "/.OPTIMIZER_SLOT/"
BOOKKEEPING = re.compile(
    r"_CHECKPOINTABLE_OBJECT_GRAPH|save_counter/\.ATTRIBUTES/VARIABLE_VALUE"
    r"|.*/\.ATTRIBUTES/OBJECT_CONFIG_JSON"
)
# The last part of the names of known scalars: those of loss scaling (TensorFlow's DynamicLossScale,
# Keras' LossScaleOptimizer, tf.contrib's ExponentialUpdateLossScaleManager) and of optimizers.
TRAINING_STATE = re.compile(
    r"((current_|dynamic_)?loss_scale|(num_)?(good|bad)_steps|(global|local)_step"
    r"|iter|iterations|learning_rate|decay|momentum)(_\d+)?"
)

Extents = tuple[tuple[int, int], ...]  # start and length in each dimension; length -1 is all of it


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A run of bytes in a data file: a tensor, or a slice of one."""

    shard: int
    offset: int
    size: int
    crc: int  # masked crc32c
    column: int = 0  # where its part begins in each row of the tensor's bytes

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its bytes form `rows` rows, and each row has a part of every range."""

    name: str
    dtype: torch.dtype | None  # None: strings and other values that are no numbers
    shape: tuple[int, ...]
    ranges: tuple[ByteRange, ...]
    rows: int = 1


@dataclass(frozen=True, slots=True)
class _BundleEntry:
    """A BundleEntryProto."""

    code: int  # DataType
    shape: tuple[int, ...]
    range: ByteRange
    slices: tuple[Extents, ...]


@dataclass(frozen=True, slots=True)
class SortedEntries:
    """The entries of an index by their use."""

    weights: dict[str, TensorEntry] = default(
        default_factory=dict[str, TensorEntry]
    )  # by the names users know
    slots: dict[str, dict[str, TensorEntry]] = default(
        default_factory=dict[str, dict[str, TensorEntry]]
    )
    notes: list[str] = default(default_factory=list[str])
    left_out: Counter[str] = default(default_factory=Counter[str])  # slots that are not read


def read(file: BinaryIO) -> tuple[int, list[TensorEntry]]:
    """The number of data files, and the tensors in the order of their names."""
    table, items = sstable.read(file)
    if not items or items[0].key != b"":
        raise CheckpointError("the index has no header")
    shards = _read_header(table, items[0])
    tensors: dict[str, _BundleEntry] = {}
    slices: dict[bytes, _BundleEntry] = {}
    for item in items[1:]:
        try:
            bundle_entry = _read_entry(table, item, shards)
        except CheckpointError as error:
            raise CheckpointError(f"{_name(item)!r}: {error}") from error.__cause__
        if item.key[0] == 0:
            slices[item.key] = bundle_entry
        else:
            tensors[_name(item)] = bundle_entry
    if len(tensors) > TENSOR_LIMIT:
        raise CheckpointError(f"{len(tensors)} tensors are more than {TENSOR_LIMIT}")
    entries = [_tensor_entry(name, entry, slices) for name, entry in tensors.items()]
    if slices:
        raise CheckpointError(f"{min(slices)!r}: a slice that no tensor lists")
    return shards, entries


def _name(item: sstable.Item) -> str:
    try:
        return item.key.decode("utf-8")
    except UnicodeDecodeError:
        if item.key[0] == 0:  # a slice's key, which ends with encoded numbers
            return repr(item.key)
        raise CheckpointError(f"byte {item.begin}: the name {item.key!r} is not UTF-8") from None


def _fields(
    table: bytes, begin: int, end: int, single: Mapping[int, int], repeated: int | None = None
) -> tuple[dict[int, wire.Field], list[wire.Field]]:
    """The known fields of a message.

    single: numbers of fields that may occur once, and their wire types. repeated: the number of a
    field of messages that may occur many times.
    """
    by_number: dict[int, wire.Field] = {}
    occurrences: list[wire.Field] = []
    for field in wire.fields(table, begin, end):
        kind = wire.BYTES if field.number == repeated else single.get(field.number)
        if kind is None:
            continue
        too_many = len(occurrences) > sstable.ITEM_LIMIT
        if field.kind != kind or field.number in by_number or too_many:
            raise CheckpointError(f"byte {field.begin}: a field {field.number} that does not fit")
        if field.number == repeated:
            occurrences.append(field)
        else:
            by_number[field.number] = field
    return by_number, occurrences


def _number(fields: Mapping[int, wire.Field], number: int, default: int = 0) -> int:
    return wire.signed(fields[number].value) if number in fields else default


def _read_header(table: bytes, item: sstable.Item) -> int:
    """The number of data files, from the BundleHeaderProto."""
    try:
        # num_shards, endianness, version
        single = {1: wire.VARINT, 2: wire.VARINT, 3: wire.BYTES}
        fields, _ = _fields(table, item.begin, item.end, single)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, for the header of a V2 checkpoint; {V1}") from None
    shards = _number(fields, 1)
    if not 0 < shards <= SHARD_LIMIT:
        raise CheckpointError(f"byte {item.begin}: {shards} data files, not 1 to {SHARD_LIMIT}")
    if _number(fields, 2):
        raise CheckpointError(f"byte {item.begin}: the tensors are big-endian; these are not read")
    if 3 in fields:
        message = fields[3]
        # VersionDef: producer, min_consumer, and bad_consumers, which no writer sets.
        single = {1: wire.VARINT, 2: wire.VARINT}
        version, bad = _fields(table, message.begin, message.end, single, repeated=3)
        if bad or _number(version, 2) > VERSION or not 0 <= _number(version, 1) < 1 << 31:
            raise CheckpointError(
                f"byte {message.begin}: a version of the format that is not known"
            )
    return shards


def _read_entry(table: bytes, item: sstable.Item, shards: int) -> _BundleEntry:
    single = {
        1: wire.VARINT,  # dtype
        2: wire.BYTES,  # shape
        3: wire.VARINT,  # shard_id
        4: wire.VARINT,  # offset
        5: wire.VARINT,  # size
        6: wire.FIXED32,  # crc32c
    }
    fields, slices = _fields(table, item.begin, item.end, single, repeated=7)
    code, shard, offset, size = (_number(fields, number) for number in (1, 3, 4, 5))
    if code not in DTYPES and code not in NO_TENSORS:
        raise CheckpointError(f"byte {item.begin}: TensorFlow's data type {code} is not read")
    if not 0 <= shard < shards or offset < 0 or size < 0:
        raise CheckpointError(
            f"byte {item.begin}: {size} bytes from {offset} in file {shard} of {shards}"
        )
    shape = _read_shape(table, fields[2]) if 2 in fields else ()
    if code in DTYPES and not slices and size != math.prod(shape) * DTYPES[code].itemsize:
        raise CheckpointError(
            f"byte {item.begin}: {size} bytes, but its shape {list(shape)} and "
            f"{DTYPES[code]} need {math.prod(shape) * DTYPES[code].itemsize}"
        )
    crc = fields[6].value if 6 in fields else 0
    extents = tuple(_read_slice(table, message) for message in slices)
    return _BundleEntry(code, shape, ByteRange(shard, offset, size, crc), extents)


def _read_shape(table: bytes, message: wire.Field) -> tuple[int, ...]:
    """The sizes in a TensorShapeProto; a size or rank that is unknown (-1) is refused."""
    fields, dimensions = _fields(table, message.begin, message.end, {3: wire.VARINT}, repeated=2)
    sizes = [
        _number(_fields(table, dim.begin, dim.end, {1: wire.VARINT})[0], 1)
        for dim in dimensions[: DIMENSION_LIMIT + 1]
    ]
    if _number(fields, 3) or len(sizes) > DIMENSION_LIMIT or any(size < 0 for size in sizes):
        raise CheckpointError(
            f"byte {message.begin}: the shape {sizes} is not that of a stored tensor"
        )
    return tuple(sizes)


def _read_slice(table: bytes, message: wire.Field) -> Extents:
    """The start and length in each dimension of a TensorSliceProto."""
    _, extents = _fields(table, message.begin, message.end, {}, repeated=1)
    fields = [
        _fields(table, extent.begin, extent.end, {1: wire.VARINT, 2: wire.VARINT})[0]
        for extent in extents[: DIMENSION_LIMIT + 1]
    ]
    return tuple((_number(extent, 1), _number(extent, 2, -1)) for extent in fields)


def _tensor_entry(name: str, entry: _BundleEntry, slices: dict[bytes, _BundleEntry]) -> TensorEntry:
    dtype = DTYPES.get(entry.code)
    if not entry.slices:
        return TensorEntry(name, dtype, entry.shape, (entry.range,))
    try:
        return _join_slices(name, entry, slices)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from error.__cause__


def _join_slices(name: str, entry: _BundleEntry, slices: dict[bytes, _BundleEntry]) -> TensorEntry:
    """The entry of a partitioned variable; removes its slices from `slices`."""
    shape = entry.shape
    parts = [
        (*_box(extents, shape), slices.pop(slice_key(name, extents), None))
        for extents in entry.slices
    ]
    cut = {d for _, sizes, _ in parts for d, size in enumerate(sizes) if size != shape[d]}
    if len(cut) > 1:
        raise CheckpointError(f"its slices are cut along the axes {sorted(cut)}, not along one")
    axis = min(cut, default=0)
    dtype = DTYPES.get(entry.code)
    step = math.prod(shape[axis + 1 :]) * (dtype.itemsize if dtype else 0)  # bytes per index
    ranges: list[ByteRange] = []
    covered = 0
    for starts, sizes, part in sorted(parts, key=lambda part: (part[0][axis], part[1][axis])):
        if part is None or part.slices or part.code != entry.code or part.shape != sizes:
            raise CheckpointError(f"its slice at {list(starts)} is missing, or of another kind")
        if starts[axis] != covered:
            raise CheckpointError(f"its slices do not meet: {covered}, then {starts[axis]}")
        covered += sizes[axis]
        ranges.append(replace(part.range, column=starts[axis] * step))
    if covered != shape[axis]:
        raise CheckpointError(f"its slices end at {covered} of {shape[axis]}")
    return TensorEntry(name, dtype, shape, tuple(ranges), math.prod(shape[:axis]))


def _box(extents: Extents, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The start and the shape of a slice, after checking that it is inside the tensor."""
    if not shape or len(extents) != len(shape):
        raise CheckpointError(f"a slice of {len(extents)} dimensions, where it has {len(shape)}")
    for (start, length), size in zip(extents, shape, strict=True):
        whole = length == -1 and start == 0
        if not whole and not (start >= 0 and length > 0 and start + length <= size):
            raise CheckpointError(f"a slice of {length} from {start}, in a dimension of {size}")
    sizes = (d if n == -1 else n for (_, n), d in zip(extents, shape, strict=True))
    return tuple(start for start, _ in extents), tuple(sizes)


def slice_key(name: str, extents: Extents) -> bytes:
    """The key of a slice, in TensorFlow's OrderedCode, whose bytes sort as the encoded values."""
    escaped = name.encode().replace(b"\0", b"\0\xff")  # 0xff would be escaped too; UTF-8 has none
    key = b"\0" + escaped + b"\0\1" + _ordered(len(extents))
    return key + b"".join(_ordered_signed(n) for extent in extents for n in extent)


def _ordered(value: int) -> bytes:
    """An unsigned number: its length, then its bytes, big-endian."""
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _ordered_signed(value: int) -> bytes:
    """A signed number: big-endian, as many leading ones as bytes; all inverted if negative."""
    size = (value if value >= 0 else ~value).bit_length() // 7 + 1
    ones = ((1 << size) - 1) << 7 * size
    return ((value ^ ones) & ((1 << 8 * size) - 1)).to_bytes(size, "big")


def is_step(entry: TensorEntry | None) -> bool:
    """Is the entry under the name of the training step a count?"""
    return entry is not None and entry.shape == () and entry.dtype in (torch.int64, torch.int32)


def sort_entries(entries: Iterable[TensorEntry], slots: bool) -> SortedEntries:
    """Separate weights, optimizer slots (only with `slots`), and notes on what is left out."""
    result = SortedEntries()
    left_out = result.left_out
    training_state: list[str] = []
    named = _by_name(entries, result.notes)
    for name, entry in named.items():
        weight, _, kind = name.rpartition("/")
        if OBJECT_SLOT in name:
            left_out[name.partition(OBJECT_SLOT)[2]] += 1
        elif kind in SLOTS and weight in named and named[weight].shape == entry.shape:
            if not slots:
                left_out[kind] += 1
            elif result.slots.setdefault(SLOTS[kind], {}).setdefault(weight, entry) is not entry:
                raise CheckpointError(f"{weight!r} has slots of two optimizers; read it without")
        elif kind in POWERS and entry.shape == ():
            left_out[kind] += 1
        elif name == STEP and is_step(entry):
            result.weights[name] = entry
        elif TRAINING_STATE.fullmatch(kind) and entry.shape == ():
            training_state.append(name)
        else:
            result.weights[name] = entry
    if left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
        result.notes.append(f"optimizer state left out: {counts}")
    if training_state:
        result.notes.append(f"training state skipped: {', '.join(sorted(training_state))}")
    return result


def _by_name(entries: Iterable[TensorEntry], notes: list[str]) -> dict[str, TensorEntry]:
    """The entries that are numbers; those of an object graph without the suffix of their names."""
    named: dict[str, TensorEntry] = {}
    not_numbers: list[str] = []
    for entry in entries:
        name = entry.name.removesuffix(OBJECT_VALUE)
        if BOOKKEEPING.fullmatch(entry.name):
            continue
        if entry.dtype is None:
            not_numbers.append(entry.name)
        elif named.setdefault(name, entry) is not entry:
            raise CheckpointError(f"{name!r} is there twice, with and without {OBJECT_VALUE}")
    if any(name != entry.name for name, entry in named.items()):
        notes.append(f"a TF2 object graph; names are given without {OBJECT_VALUE}")
    if not_numbers:
        listed = ", ".join(not_numbers[:3]) + (" …" if len(not_numbers) > 3 else "")
        notes.append(f"{len(not_numbers)} entries that are no numbers left out: {listed}")
    return named
