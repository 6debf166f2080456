"""Headerless files: the size of a record is checked, the kind found, the records read."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from packhorse.data.records import fixed_width, graphcore
from packhorse.data.records.graphcore import RecordSizes
from packhorse.errors import InputError

SIZES, VOCAB = RecordSizes(max_length=40, max_predictions=7, max_per_pack=3), 100


def read(path: Path, sizes: RecordSizes = SIZES) -> list[fixed_width.Unpacked]:
    return [
        fixed_width.unpack(r.columns, VOCAB, r.place) for r in graphcore.read_blocks(path, sizes)
    ]


@pytest.fixture
def sequences(record_files: ModuleType, rng: np.random.Generator) -> list:
    return [record_files.draw(rng, 40 if i % 2 else 12, VOCAB) for i in range(50)]


@pytest.fixture
def packed(record_files: ModuleType, sequences: list, tmp_path: Path) -> Path:
    rows = record_files.packs(sequences, 40, 3)
    path = tmp_path / "strategy_10_10_20_part_0"
    content = (record_files.ten_arrays(row, 40, 7, 3) for row in rows)
    path.write_bytes(b"".join(map(record_files.words, content)))
    return path


@pytest.fixture
def unpacked(record_files: ModuleType, sequences: list, tmp_path: Path) -> Path:
    path = tmp_path / "part_00000"
    content = (record_files.unpacked(sequence, 40, 7) for sequence in sequences)
    path.write_bytes(b"".join(map(record_files.words, content)))
    return path


def test_the_published_sizes() -> None:
    assert RecordSizes().record_bytes("unpacked") == 4 * (3 * 512 + 3 * 76 + 1) == 7060
    assert RecordSizes().record_bytes("packed") == 4 * (4 * 512 + 3 * 79 + 3 * 3) == 9176


def test_both_kinds_are_read(
    record_files: ModuleType,
    sequences: list,
    packed: Path,
    unpacked: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert graphcore.kind_of(packed, SIZES) == "packed"
    assert graphcore.kind_of(unpacked, SIZES) == "unpacked"
    monkeypatch.setattr(graphcore, "BLOCK_RECORDS", 7)
    for path in (packed, unpacked):
        result = read(path)
        assert len(result) > 3
        assert [
            sequence for run in result for sequence in record_files.as_drawn(run.sequences)
        ] == sequences
    sizes = [len(item.offsets) - 1 for item in read(packed)]
    assert sum(sizes) == len(record_files.packs(sequences, 40, 3))


def test_a_size_that_fits_both_kinds(
    record_files: ModuleType, rng: np.random.Generator, tmp_path: Path
) -> None:
    """As many records of one as take the room of some of the other."""
    packed_bytes, unpacked_bytes = (SIZES.record_bytes(kind) for kind in ("packed", "unpacked"))
    least = np.lcm(packed_bytes, unpacked_bytes)
    short = [record_files.draw(rng, 8, VOCAB) for _ in range(2 * least // unpacked_bytes)]
    path = tmp_path / "some"
    rows = (
        record_files.ten_arrays([sequence], 40, 7, 3) for sequence in short[: least // packed_bytes]
    )
    path.write_bytes(b"".join(map(record_files.words, rows)))
    assert path.stat().st_size % unpacked_bytes == 0
    assert graphcore.kind_of(path, SIZES) == "packed"
    rows = (record_files.unpacked(sequence, 40, 7) for sequence in short[: least // unpacked_bytes])
    path.write_bytes(b"".join(map(record_files.words, rows)))
    assert path.stat().st_size % packed_bytes == 0
    assert graphcore.kind_of(path, SIZES) == "unpacked"


def test_a_size_that_fits_neither(packed: Path) -> None:
    content = packed.read_bytes()
    packed.write_bytes(content[:-4])
    message = f"{len(content) - 4} bytes are not a whole number.* 796 bytes .packed. nor of 568"
    with pytest.raises(InputError, match=message):
        read(packed)
    assert RecordSizes(40, 7, 3).record_bytes("packed") == 796


def test_the_sizes_that_would_fit_are_reported(
    record_files: ModuleType, rng: np.random.Generator, tmp_path: Path
) -> None:
    sequences = [record_files.draw(rng, 128, VOCAB) for _ in range(7)]
    path = tmp_path / "part"
    content = (record_files.unpacked(sequence, 128, 20) for sequence in sequences)
    path.write_bytes(b"".join(map(record_files.words, content)))
    message = "could be unpacked with --max-length 128 --max-predictions 20"
    with pytest.raises(InputError, match=message) as caught:
        read(path, RecordSizes())
    assert str(caught.value).count(f"{message.removeprefix('could be ')} ") == 1
    content = (record_files.ten_arrays([sequence], 128, 20, 2) for sequence in sequences)
    path.write_bytes(b"".join(map(record_files.words, content)))
    message = (
        "could be packed with --max-length 128 --max-predictions 20 --max-sequences-per-pack 2"
    )
    with pytest.raises(InputError, match=message):
        read(path, RecordSizes())
    path.write_bytes(b"words and words" * 10)
    with pytest.raises(InputError, match="no usual sizes fit"):
        read(path, RecordSizes())


def test_a_bad_record_is_named(unpacked: Path) -> None:
    content = bytearray(unpacked.read_bytes())
    content[568 * 9 + 4 * 40 : 568 * 9 + 4 * 41] = b"\xff\xff\xff\xff"
    unpacked.write_bytes(content)
    with pytest.raises(InputError, match=r"part_00000, record 9 \(byte 5112\): input_mask: -1"):
        read(unpacked)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="is empty"):
        read(tmp_path / "empty")
    with pytest.raises(InputError, match="must be 1 or more"):
        RecordSizes(0, 1, 1)
