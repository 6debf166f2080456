"""Messages of tf.train.Example, as columns of numbers: [records, values] by the feature's name.

    for run in tfrecord.runs(path):
        columns = numbers(run, ("input_ids", "input_mask"))

All records of a run are decoded together. They are written by one program, so their bytes have one
order of tags, and numpy walks a thousand of them in step (`_in_step`) in the time that Python takes
for ten; varints are of uneven width, but those of all lists end to end are a handful of calls.
Where a record was written in another order, `_one_by_one` walks them field by field, and is the
reference. The price is that a run must have one shape, as TensorFlow's fixed-length features must.

What protobuf would merge into one (a feature's values in two parts, or of two kinds) is refused,
for no program writes it. Follows TensorFlow's example.proto and feature.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from packhorse import wire
from packhorse.data.records.tfrecord import Run
from packhorse.errors import CheckpointError, InputError

FLOATS, INTEGERS = 2, 3  # kinds of list in a Feature; 1 are bytes
ELEMENT = {FLOATS: wire.FIXED32, INTEGERS: wire.VARINT}
FIRST, SECOND, THIRD = (number << 3 | wire.BYTES for number in (1, 2, 3))  # the tags in use
NAME_LIMIT, FEATURE_LIMIT = 32, 64  # bytes of a name and features of a record that go in step


class _Irregular(Exception):
    """Records that do not go in step."""


class Values(NamedTuple):
    """The values of a feature, still encoded, end to end."""

    kind: int
    data: bytes | memoryview


def names(run: Run) -> set[str]:
    """The features of numbers in a run's first record."""
    with _about(run, 0):
        return set(features(run.data[0]))


def numbers(run: Run, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """The features `wanted` of all records, each an array with a row for each record."""
    try:
        found = _in_step(run.data, wanted)
    except _Irregular:
        found = _one_by_one(run, wanted)
    return {name: _column(run, name, values) for name, values in found.items()}


def _one_by_one(run: Run, wanted: Sequence[str]) -> dict[str, list[Values]]:
    found: dict[str, list[Values]] = {name: [] for name in wanted}
    for record, data in enumerate(run.data):
        with _about(run, record):
            there = features(data)
            for name, column in found.items():
                if name not in there:
                    raise InputError(f"has no feature {name!r}")
                column.append(there[name])
    return found


def features(example: bytes) -> dict[str, Values]:
    """The features of numbers in one Example, by name; of two with one name the last counts."""
    view, found = memoryview(example), {}
    for features in _messages(view, 0, len(view)):
        for entry in _messages(view, features.begin, features.end):
            name, values = _entry(view, entry)
            found[name] = values
    return {name: values for name, values in found.items() if values is not None}


def _messages(view: memoryview, begin: int, end: int) -> Iterator[wire.Field]:
    """The messages in field 1; other fields are none of ours."""
    for field in wire.fields(view, begin, end):
        if field.number == 1:
            if field.kind != wire.BYTES:
                raise CheckpointError(f"byte {field.begin}: a number where a message belongs")
            yield field


def _entry(view: memoryview, entry: wire.Field) -> tuple[str, Values | None]:
    inner = _members(view, entry, (1, 2))
    name = wire.text(view, inner[1]) if 1 in inner else ""
    kinds = _members(view, inner[2], (1, 2, 3)) if 2 in inner else {}
    if len(kinds) > 1:
        raise InputError(f"has two kinds of values in the feature {name!r}")
    for kind, values in kinds.items():
        if kind in ELEMENT:
            return name, Values(kind, _values(view, values, ELEMENT[kind]))
    return name, None


def _members(view: memoryview, message: wire.Field, known: Sequence[int]) -> dict[int, wire.Field]:
    """The fields of a message that may each be there once, by number."""
    found: dict[int, wire.Field] = {}
    for field in wire.fields(view, message.begin, message.end):
        if field.number in known:
            if field.kind != wire.BYTES or field.number in found:
                raise CheckpointError(f"byte {field.begin}: not an Example as they are written")
            found[field.number] = field
    return found


def _values(view: memoryview, values: wire.Field, element: int) -> bytes:
    """A list's values end to end: a packed list has them so, of any other they are collected."""
    found = bytearray()
    for field in wire.fields(view, values.begin, values.end):
        if field.number == 1:
            if field.kind not in (wire.BYTES, element):
                raise CheckpointError(f"byte {field.begin}: a list with a value of another kind")
            found += view[field.begin : field.end]
    return bytes(found)


def _in_step(records: Sequence[bytes], wanted: Sequence[str]) -> dict[str, list[Values]]:
    """What `_one_by_one` finds, where each feature is its six tags and lengths in the usual order.

    Every length must then reach to the same end; the records may have their features in any order.
    """
    sizes = np.array([len(record) for record in records])
    joined = b"".join([*records, bytes(2 * NAME_LIMIT)])  # so that no look ahead leaves the array
    data, ends = np.frombuffer(joined, np.uint8), np.cumsum(sizes)
    found = {name: np.zeros((3, len(records)), np.int64) for name in wanted}
    at, end = _opened(data, ends - sizes, FIRST)
    _must(end == ends)
    for _ in range(FEATURE_LIMIT):
        if (at == ends).all():
            break
        at = _feature(data, at, ends, found)
    _must(at == ends)
    for places in found.values():
        _must(places[0] > 0)
    view = memoryview(joined)
    return {
        name: [Values(kind, view[begin:end]) for kind, begin, end in places.T.tolist()]
        for name, places in found.items()
    }


def _feature(
    data: np.ndarray, at: np.ndarray, ends: np.ndarray, found: dict[str, np.ndarray]
) -> np.ndarray:
    """Note where the values of the feature at `at` lie in each record; where the next one is."""
    name, end = _opened(data, at, FIRST)
    _must(end <= ends)
    name, name_end = _opened(data, name, FIRST)
    sizes = name_end - name
    _must(sizes <= NAME_LIMIT)
    feature, feature_end = _opened(data, name_end, SECOND)
    values, values_end = _opened(data, feature, SECOND, THIRD)
    values, packed_end = _opened(data, values, FIRST)
    _must((feature_end == end) & (values_end == end) & (packed_end == end))
    letters = data[name[:, None] + np.arange(NAME_LIMIT)]
    letters = np.where(np.arange(NAME_LIMIT) < sizes[:, None], letters, 0)
    _must(letters < 0x80)  # beyond ASCII only `wire.text` can say whether it is a text
    text = letters.astype(np.uint8).view(f"S{NAME_LIMIT}")[:, 0]
    for known, places in found.items():
        here = np.flatnonzero((text == known.encode()) & (sizes == len(known)))
        places[:, here] = data[feature[here]] >> 3, values[here], end[here]
    return end


def _opened(data: np.ndarray, at: np.ndarray, *tags: int) -> tuple[np.ndarray, np.ndarray]:
    """Past a tag and a length in each record: where what they announce begins, and its end."""
    _must(np.isin(data[at], tags))
    size, begin = (data[at + 1] & 0x7F).astype(np.int64), at + 2
    for byte in range(1, 4):
        more = data[begin - 1] >= 0x80
        if not more.any():
            break
        size += np.where(more, (data[begin] & 0x7F).astype(np.int64) << 7 * byte, 0)
        begin = begin + more
    _must(data[begin - 1] < 0x80)
    return begin, begin + size


def _must(regular: np.ndarray) -> None:
    if not regular.all():
        raise _Irregular


def _column(run: Run, name: str, values: Sequence[Values]) -> np.ndarray:
    """The values of a feature in all records, [n, width], of the width that the first one has."""
    kind = values[0].kind
    for record, value in enumerate(values):
        if value.kind != kind:
            raise InputError(f"{run.where(record)}: {name!r} is of another kind than before it")
    data = np.frombuffer(b"".join(value.data for value in values), np.uint8)
    ends = np.cumsum([len(value.data) for value in values])
    stops = np.arange(0, len(data) + 1, 4) if kind == FLOATS else _varint_stops(data)
    last = np.searchsorted(stops, ends, side="right") - 1  # the last value that ends in a record
    widths = np.diff(last, prepend=0)
    bad = (stops[last] != ends) | (widths != widths[0])
    if bad.any():
        record = int(bad.argmax())
        raise InputError(
            f"{run.where(record)}: {name!r} is cut, or has {widths[record]} values where "
            f"record {run.first} has {widths[0]}"
        )
    if kind == FLOATS:
        return data.view("<f4").reshape(len(values), -1)
    found, fits = _varints(data, stops)
    if not fits.all():
        record = int(np.searchsorted(ends, stops[fits.argmin()], side="right"))
        raise InputError(f"{run.where(record)}: {name!r} has a number of more than 64 bits")
    return found.reshape(len(values), -1)


def _varint_stops(data: np.ndarray) -> np.ndarray:
    """Where each varint ends, and the next one begins; first of all the beginning."""
    return np.concatenate([[0], np.flatnonzero(data < 0x80) + 1])


def _varints(data: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The signed numbers between `stops`, and whether each is one of 64 bits.

    32 bits are worked with where four bytes suffice, as they do for all that BERT counts.
    """
    if len(stops) > len(data):  # masks and segment ids: each number is one byte
        return data.astype(np.int32), np.ones(len(data), bool)
    starts, widths = stops[:-1], np.diff(stops)
    fits = (widths < 10) | (widths == 10) & (data[stops[1:] - 1] < 2)
    widest = int(widths.max(initial=1))
    low = (data & 0x7F).astype(np.int32 if widest <= 4 else np.int64)
    values = low[starts]
    for byte in range(1, min(widest, 10)):
        longer = np.flatnonzero(widths > byte)
        values[longer] |= low[starts[longer] + byte] << 7 * byte
    return values, fits


@contextmanager
def _about(run: Run, record: int) -> Iterator[None]:
    """What is wrong with a record is said with its place."""
    try:
        yield
    except (CheckpointError, InputError) as error:
        raise InputError(f"{run.where(record)}: {error}") from error
