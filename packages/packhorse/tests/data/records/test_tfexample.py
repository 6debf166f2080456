"""Examples are decoded as TensorFlow decodes them, and in step as one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse import wire
from packhorse.data.records import tfrecord
from packhorse.data.records.tfrecord import TFRecordBlock, read_features
from packhorse.errors import InputError

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
FIGURES = st.one_of(st.integers(0, 300), INT64)


def run_of(*records: bytes) -> TFRecordBlock:
    offsets = np.cumsum([0, *(len(record) + 16 for record in records)])[:-1]
    return TFRecordBlock(Path("some.tfrecord"), 0, tuple(offsets.tolist()), records)


def read(records: Sequence[bytes], *expected: str) -> dict[str, list]:
    return {
        name: array.tolist() for name, array in read_features(run_of(*records), expected).items()
    }


def goes_in_step(records: Sequence[bytes], *expected: str) -> bool:
    try:
        tfrecord._in_step(records, expected)
    except tfrecord._Irregular:
        return False
    return True


def test_what_tensorflow_wrote(tf: ModuleType, rng: np.random.Generator) -> None:
    """Widths, signs and the order of features that TensorFlow gives them."""
    feature, several = tf.train.Feature, []
    for _ in range(50):
        values = {
            "small": rng.integers(0, 2, 40),
            "tokens": rng.integers(0, 30522, 40),
            "any": rng.integers(-(1 << 63), 1 << 63, 7, dtype=np.int64),
            "weights": rng.random(5).astype(np.float32),
        }
        features = {
            name: feature(float_list=tf.train.FloatList(value=array))
            if array.dtype == np.float32
            else feature(int64_list=tf.train.Int64List(value=array))
            for name, array in values.items()
        }
        example = tf.train.Example(features=tf.train.Features(feature=features))
        several.append((values, example.SerializeToString()))
    records = [record for _, record in several]
    assert goes_in_step(records, "small", "tokens")  # or the fast way is never gone
    result = read_features(run_of(*records), ("small", "tokens", "any", "weights"))
    for name, array in result.items():
        assert np.array_equal(array, [values[name] for values, _ in several])
    assert result["small"].dtype == result["tokens"].dtype == np.int32
    assert result["any"].dtype == np.int64


@given(st.data())
@settings(max_examples=40)
def test_any_numbers(record_files: ModuleType, data: st.DataObject) -> None:
    width, count = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    lists = st.lists(FIGURES, min_size=width, max_size=width)
    columns = {name: [data.draw(lists) for _ in range(count)] for name in ("a", "b")}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(count)]
    packed = [record_files.example(row) for row in rows]
    assert goes_in_step(packed, "a", "b")
    assert read(packed, "a", "b") == columns
    unpacked = [record_files.example(row, packed=False) for row in rows]
    assert not goes_in_step(unpacked, "a", "b")
    assert read(unpacked, "a", "b") == columns
    assert read([unpacked[0], *packed[1:]], "b") == {"b": columns["b"]}


def test_features_in_any_order_and_more_of_them(record_files: ModuleType) -> None:
    row = {"a": [1, 200, 3], "b": [0.5, 2.0], "more": [7] * 300}
    turned = dict(reversed(row.items()))
    records = [record_files.example(row), record_files.example(turned)]
    assert goes_in_step(records, "a", "b")
    assert read(records, "b", "a") == {"a": [row["a"]] * 2, "b": [row["b"]] * 2}
    assert tfrecord.feature_names(run_of(*records)) == {"a", "b", "more"}


def test_a_name_is_not_its_beginning(record_files: ModuleType) -> None:
    records = [record_files.example({"ab\0": [1], "a": [2], "abc": [3], "ab": [4], "é" * 20: [5]})]
    assert read(records, "ab") == {"ab": [[4]]}
    assert read(records, "ab\0") == {"ab\0": [[1]]}
    assert read(records, "é" * 20) == {"é" * 20: [[5]]}


def test_of_two_features_with_one_name_the_last_counts(record_files: ModuleType, tf) -> None:
    entries = [record_files.entry("a", [1, 2]), record_files.entry("a", [3, 4])]
    record = wire.write_field(1, b"".join(wire.write_field(1, entry) for entry in entries))
    reference = tf.train.Example.FromString(record).features.feature["a"].int64_list.value
    assert read([record], "a") == {"a": [list(reference)]} == {"a": [[3, 4]]}
    bytes_last = wire.write_field(3, "a") + wire.write_field(1, b"")
    assert read([record + wire.write_field(2, bytes_last)], "a") == {"a": [[3, 4]]}


def odd(name: str, kind: int, content: bytes) -> bytes:
    value = wire.write_field(1, name) + wire.write_field(2, wire.write_field(kind, content))
    return wire.write_field(1, wire.write_field(1, value))


LONG = b"\xff" * 10 + b"\x01"
REFUSED: dict[str, tuple[bytes, str]] = {
    "no feature": (wire.write_field(1, b""), "has no feature 'a'"),
    "nothing": (b"", "has no feature 'a'"),
    "bytes": (odd("a", 1, wire.write_field(1, b"x")), "has no feature 'a'"),
    "empty": (odd("a", 3, b""), "'a' .*has 0 values"),
    "another width": (odd("a", 3, wire.write_field(1, b"\1\2\3")), "'a' .*has 3 values"),
    "a cut number": (odd("a", 3, wire.write_field(1, b"\1\x82")), "'a' is cut"),
    "a long number": (odd("a", 3, wire.write_field(1, b"\1" + LONG)), "more than 64 bits"),
    "65 bits": (odd("a", 3, wire.write_field(1, b"\1" + b"\xff" * 9 + b"\x02")), "64 bits"),
    "floats": (odd("a", 2, wire.write_field(1, bytes(8))), "'a' is of another kind"),
    "cut floats": (odd("a", 2, wire.write_field(1, bytes(9))), "'a' is of another kind"),
    "a fixed number": (odd("a", 3, wire.write_fixed32(1, 7)), "a value of another kind"),
    "two kinds": (
        wire.write_field(
            1,
            wire.write_field(
                1,
                wire.write_field(1, "a")
                + wire.write_field(2, wire.write_field(2, b"") + wire.write_field(3, b"")),
            ),
        ),
        "two kinds of values",
    ),
    "a number for a message": (wire.write_field(1, 5), "a number where a message belongs"),
    "not a message": (b"\xff\xff", "byte 0"),
    "a length that lies": (wire.write_varint(10) + wire.write_varint(1 << 40), "does not fit"),
    "a name that is no text": (
        wire.write_field(1, wire.write_field(1, wire.write_field(1, b"\xff"))),
        "not UTF-8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(record_files: ModuleType, name: str) -> None:
    bad, message = REFUSED[name]
    good = record_files.example({"a": [1, 2]})
    with pytest.raises(
        InputError, match=rf"some.tfrecord, record 1 \(byte {len(good) + 16}\).*{message}"
    ):
        read([good, bad, good], "a")


def test_mutated_messages_are_read_as_tensorflow_does_or_refused(
    record_files: ModuleType, tf: ModuleType, rng: np.random.Generator
) -> None:
    row = {"a": [1, 300, 70000], "b": [0.5, 1.0], "c": [5]}
    seeds = [record_files.example(row), record_files.example(row, packed=False)]
    read_as_theirs = 0
    for turn in range(3000):
        content = bytearray(seeds[turn % 2])
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(content)))
            content[at : at + int(rng.integers(0, 3))] = rng.bytes(int(rng.integers(0, 3)))
        try:
            result = read([bytes(content)], *row)
        except InputError:
            continue
        reference = tf.train.Example.FromString(bytes(content)).features.feature
        for name in row:
            values = reference[name].int64_list.value or reference[name].float_list.value
            assert np.array_equal(result[name], [list(values)], equal_nan=True), content
        read_as_theirs += 1
    assert read_as_theirs > 100
