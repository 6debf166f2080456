"""TFRecords are read as TensorFlow reads them; damage is refused with its place."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from packhorse import wire
from packhorse.data.records import tfrecord
from packhorse.errors import InputError

RECORDS = [b"one", b"", b"three" * 100, bytes(range(256))]


@pytest.fixture
def reference(tf: ModuleType) -> Callable[..., list[bytes] | None]:
    """What TensorFlow reads; None where it refuses."""

    def read(path: Path, compression: str = "") -> list[bytes] | None:
        try:
            return [item.numpy() for item in tf.data.TFRecordDataset(str(path), compression)]
        except (tf.errors.DataLossError, tf.errors.OutOfRangeError):
            return None

    return read


def read_records(path: Path) -> list[bytes]:
    return [record for _, record in tfrecord.read(path)]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_what_tensorflow_wrote(tf: ModuleType, compression: str, tmp_path: Path) -> None:
    path = tmp_path / "records"
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in RECORDS:
            writer.write(record)
    assert tfrecord.sniff(path)
    assert read_records(path) == RECORDS
    offsets = [offset for offset, _ in tfrecord.read(path)]
    assert offsets == np.cumsum([0, *(len(r) + 16 for r in RECORDS)])[:-1].tolist()


def test_what_is_written_by_hand(record_files: ModuleType, reference, tmp_path: Path) -> None:
    """The tests' own writer is used everywhere, so it must write what TensorFlow reads."""
    for name, compression in (("none", ""), ("gzip", "GZIP"), ("zlib", "ZLIB")):
        path = record_files.write(tmp_path / name, RECORDS, name)
        assert reference(path, compression) == read_records(path) == RECORDS


@pytest.mark.parametrize("size", [0x8B1F, 376, 0x9C78])
def test_a_length_that_looks_like_compression(
    record_files: ModuleType, size: int, tmp_path: Path
) -> None:
    path = record_files.write(tmp_path / "plain", [bytes(size)])
    assert path.read_bytes()[:2] in (b"\x1f\x8b", b"\x78\x01", b"\x78\x9c")
    assert tfrecord.sniff(path)
    assert read_records(path) == [bytes(size)]


def test_gzip_in_members(record_files: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "members.gz"
    parts = [gzip.compress(record_files.frame(record)) for record in RECORDS]
    path.write_bytes(b"".join(parts) + gzip.compress(b""))
    assert read_records(path) == RECORDS


def test_runs_are_cut_by_count_and_by_bytes(
    record_files: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [bytes([i]) * (1 + 3 * i) for i in range(20)]
    path = record_files.write(tmp_path / "records", records)
    monkeypatch.setattr(tfrecord, "BLOCK_RECORDS", 3)
    monkeypatch.setattr(tfrecord, "BLOCK_BYTES", 100)
    runs = list(tfrecord.read_blocks(path))
    assert [record for run in runs for record in run.data] == records
    assert [run.first for run in runs] == np.cumsum([0, *(len(r.data) for r in runs)])[:-1].tolist()
    assert {len(run.data) for run in runs} == {3, 2, 1}
    assert all(sum(map(len, run.data)) <= 100 for run in runs)
    assert "record 4 (byte " in runs[1].place(1)


def lied(length: int) -> bytes:
    """A record's head with a right checksum and any length."""
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", wire.mask(wire.crc32c(head)))


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in the head": (lambda b: b[:25], r"record 1 \(byte 19\).*ends after 6 of"),
    "cut in the data": (lambda b: b[:100], r"record 2 \(byte 35\).*ends after 53 of"),
    "cut in the checksum": (lambda b: b[:-1], r"record 3 \(byte 551\).*ends after 259"),
    "wrong length": (lambda b: b"\x04" + b[1:], r"record 0 \(byte 0\).*checksum of its length"),
    "wrong crc of it": (lambda b: b[:8] + b"\0" + b[9:], r"record 0.*checksum of its length"),
    "wrong data": (lambda b: b[:60] + b"!" + b[61:], r"record 2 \(byte 35\).*checksum of its data"),
    "an absurd length": (
        lambda b: b + lied(1 << 62),
        r"record 4 \(byte 823\).*4611686018427387904",
    ),
    "a long length": (lambda b: b + lied(1 << 21), r"record 4 \(byte 823\).*ends after 0 of"),
    "text": (lambda b: b"not a record at all", r"record 0 \(byte 0\).*not a TFRecord"),
}


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(
    record_files: ModuleType, name: str, compression: str, tmp_path: Path
) -> None:
    harm, message = DAMAGE[name]
    content = harm(b"".join(map(record_files.frame, RECORDS)))
    path = tmp_path / "damaged"
    path.write_bytes(record_files.COMPRESSIONS[compression](content))
    with pytest.raises(InputError, match=message) as error:
        read_records(path)
    assert str(path) in str(error.value)
    assert "record" in message


@pytest.mark.parametrize("at", [5, 40, -3, -1])
@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_damaged_stream(
    record_files: ModuleType, compression: str, at: int, tmp_path: Path
) -> None:
    path = record_files.write(tmp_path / "stream", [bytes(100), b"x" * 1000], compression)
    whole = path.read_bytes()
    path.write_bytes(whole[:at])
    with pytest.raises(InputError, match="cut"):
        read_records(path)
    path.write_bytes(whole + b"trailing")
    with pytest.raises(InputError, match=r"record 2 \(byte 1132\): the compressed data is damaged"):
        read_records(path)
    flipped = bytearray(whole)
    flipped[at] ^= 0x40
    path.write_bytes(flipped)
    if (compression, at) == ("gzip", 5):  # the time in gzip's header, which means nothing
        assert len(read_records(path)) == 2
    else:
        with pytest.raises(InputError, match="stream"):
            read_records(path)


@pytest.mark.parametrize("content", [b"", b"ab", b"\x1f\x8b", b"\x78\x9c\x00\x00", b"text" * 9])
def test_other_files_are_not_taken_for_tfrecords(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert not tfrecord.sniff(path)
    with pytest.raises(InputError, match="cannot be read"):
        tfrecord.sniff(tmp_path / "missing")


def test_memory_stays_flat(record_files: ModuleType, tmp_path: Path) -> None:
    """A bomb of a thousandth its size, and a length of 4 MB that is not there."""
    record = record_files.frame(bytes(1 << 20))
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(record)
    liar = tmp_path / "liar"
    liar.write_bytes(lied(tfrecord.RECORD_LIMIT))
    tracemalloc.start()
    try:
        assert sum(len(data) for _, data in tfrecord.read(path)) == 64 << 20
        with pytest.raises(InputError, match="ends after 0"):
            read_records(liar)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_mutated_files_are_read_as_tensorflow_does_or_refused(
    record_files: ModuleType, reference, rng: np.random.Generator, tmp_path: Path
) -> None:
    good = b"".join(map(record_files.frame, RECORDS[:3]))
    path, read = tmp_path / "mutated", 0
    for _ in range(150):
        content = bytearray(good)
        for _ in range(rng.integers(1, 3)):
            at = int(rng.integers(len(content)))
            content[at : at + int(rng.integers(0, 3))] = rng.bytes(int(rng.integers(0, 3)))
        path.write_bytes(content)
        try:
            result = read_records(path)
        except InputError:
            continue
        assert result == reference(path)
        read += 1
    assert read  # some mutations change nothing
