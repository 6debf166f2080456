"""Sorted tables: what was put in comes out, and no table that is not sound passes."""

from __future__ import annotations

import io
import random
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse import wire
from packhorse.checkpoint.tensorflow import sstable
from packhorse.errors import CheckpointError

Entry = tuple[int, bytes, bytes]  # bytes shared with the key before, the rest of the key, the value
PAIRS = [(b"", b"head"), (b"bert/a", b"1"), (b"bert/b", b"22"), (b"cls", b"")]
ENTRIES: list[Entry] = [(0, b"", b"head"), (0, b"bert/a", b"1"), (5, b"b", b"22"), (0, b"cls", b"")]


def block(entries: list[Entry], restarts: list[int] | None = None, kind: int = 0) -> bytes:
    """A block with its trailer, as wrong as need be."""
    content = b""
    for shared, rest, value in entries:
        sizes = (shared, len(rest), len(value))
        content += b"".join(map(wire.write_varint, sizes)) + rest + value
    restarts = [0] if restarts is None else restarts
    content += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    return sealed(content, kind)


def sealed(content: bytes, kind: int = 0) -> bytes:
    content += bytes([kind])
    return content + struct.pack("<I", wire.mask(wire.crc32c(content)))


def handle(offset: int, size: int) -> bytes:
    return wire.write_varint(offset) + wire.write_varint(size)


def table(blocks: list[bytes], keys: list[bytes], index: bytes | None = None) -> bytes:
    """Blocks under these separators, and what stands around them."""
    content, listed = b"", []
    for item, key in zip(blocks, keys, strict=True):
        listed.append((0, key, handle(len(content), len(item) - sstable.TRAILER)))
        content += item
    empty = block([])
    if index is None:
        places = [0]
        for _, key, value in listed[:-1]:
            places.append(places[-1] + 3 + len(key) + len(value))
        index = block(listed, places)
    footer = handle(len(content), len(empty) - sstable.TRAILER)
    content += empty
    footer += handle(len(content), len(index) - sstable.TRAILER)
    return content + index + footer.ljust(40, b"\0") + sstable.MAGIC


def read(content: bytes) -> list[tuple[bytes, bytes]]:
    _, items = sstable.read(io.BytesIO(content))
    return [(item.key, content[item.begin : item.end]) for item in items]


GOOD = table([block(ENTRIES)], [b"cls"])


def test_a_table_by_hand() -> None:
    assert read(GOOD) == PAIRS
    assert read(sstable.build(PAIRS)) == PAIRS


@given(st.dictionaries(st.binary(max_size=40), st.binary(max_size=40), min_size=1))
def test_what_is_built_is_read(pairs: dict[bytes, bytes]) -> None:
    assert read(sstable.build(sorted(pairs.items()))) == sorted(pairs.items())


def test_several_blocks() -> None:
    rng = random.Random(0)
    pairs = sorted((rng.randbytes(50), rng.randbytes(150)) for _ in range(5_000))
    content = sstable.build(pairs)
    assert len(content) > 3 * sstable.BLOCK and read(content) == pairs


def test_a_table_is_recognized_by_its_last_bytes(tmp_path: Path) -> None:
    for content, want in ((GOOD, True), (GOOD[:-1], False), (b"", False), (sstable.MAGIC, False)):
        (tmp_path / "x").write_bytes(content)
        with (tmp_path / "x").open("rb") as file:
            assert sstable.is_table(file) is want


def _flip(content: bytes, at: int, bit: int = 0) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)


SECOND = block([(0, b"dense", b"3")])
FIRST_END = len(block(ENTRIES)) - sstable.TRAILER
LONG = b"k" * sstable.KEY_LIMIT
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes do not end as an index does"),
    "a footer too short": (sstable.MAGIC, "8 bytes do not end"),
    "bad magic": (_flip(GOOD, -1), "do not end as an index does"),
    "only a footer": (bytes(40) + sstable.MAGIC, "a block of 0 bytes is not in the file"),
    "something after the handles": (_flip(GOOD, -9), r"byte \d+: the footer is damaged"),
    "bad checksum": (_flip(GOOD, 5), "byte 0: the checksum of a block"),
    "bad checksum of the metadata": (_flip(GOOD, len(block(ENTRIES)) + 1), "the checksum"),
    "snappy": (table([block(ENTRIES, kind=1)], [b"cls"]), "compressed with snappy"),
    "another compression": (table([block(ENTRIES, kind=4)], [b"cls"]), r"a way \(4\)"),
    "a block beyond the file": (
        table([b""], [b"x"], block([(0, b"x", handle(9, 1 << 62))])),
        "byte 9: a block of 4611686018427387904 bytes is not in the file",
    ),
    "a handle cut off": (table([b""], [b"x"], block([(0, b"x", b"\x80")])), "does not end"),
    "no restart points": (table([block([], [])], [b"cls"]), "a block with 0 restart points"),
    "a block of nothing": (table([sealed(b"")], [b"cls"]), "a block with 0 restart points"),
    "more restart points than bytes": (
        table([sealed(struct.pack("<I", 1 << 30))], [b"cls"]),
        "1073741824 restart points",
    ),
    "a restart within a key": (table([block(ENTRIES, [0, 9])], [b"cls"]), "where no key begins"),
    "a restart where a key is not whole": (
        table([block(ENTRIES, [0, 17])], [b"cls"]),
        "where no key begins",
    ),
    "a restart beyond": (table([block(ENTRIES, [0, 99])], [b"cls"]), "where no key begins"),
    "restarts that descend": (table([block(ENTRIES, [0, 7, 3])], [b"cls"]), "do not ascend"),
    "restarts not from 0": (table([block(ENTRIES, [7])], [b"cls"]), "do not ascend"),
    "a block without keys": (table([block([])], [b"cls"]), "where no key begins"),
    "unsorted": (table([block(ENTRIES[::-1])], [b"cls"]), "out of order|does not fit"),
    "a key twice": (table([block([*ENTRIES, ENTRIES[-1]])], [b"cls"]), r"b'cls' is out of order"),
    "a key in two blocks": (
        table([block(ENTRIES), block([ENTRIES[-1]])], [b"cls", b"d"]),
        r"b'cls' is out of order",
    ),
    "blocks in disorder": (
        table([SECOND, block(ENTRIES)], [b"dense", b"z"]),
        "b'' is out of order",
    ),
    "a separator too small": (
        table([block(ENTRIES)], [b"bert"]),
        "keys outside the range that the index states",
    ),
    "a separator too large": (
        table([block(ENTRIES), SECOND], [b"dense", b"x"]),
        "b'dense' is out of order",
    ),
    "one block twice": (
        table(
            [block(ENTRIES)],
            [b"cls"],
            block([(0, b"cls", handle(0, FIRST_END)), (0, b"d", handle(0, FIRST_END))]),
        ),
        "begins in the one before it",
    ),
    "more shared than there is": (
        table([block([(0, b"a", b""), (2, b"b", b"")])], [b"cls"]),
        "byte 4: an entry that does not fit its block",
    ),
    "a value beyond the block": (
        table([sealed(b"\0\1\x7fa" + struct.pack("<II", 0, 1))], [b"cls"]),
        "byte 0: an entry that does not fit its block",
    ),
    "a size without end": (
        table([sealed(b"\xff" * 6 + struct.pack("<II", 0, 1))], [b"cls"]),
        "byte 0: a number that does not end",
    ),
    "a size of six bytes": (
        table([sealed(b"\x80" * 5 + b"\0\0\0" + struct.pack("<II", 0, 1))], [b"cls"]),
        "byte 0: a number that does not end",
    ),
    "a key too long": (
        table([block([(0, LONG, b""), (len(LONG), b"k", b"")])], [b"l"]),
        "an entry that does not fit its block",
    ),
    "too many keys": (
        table([block([(0, b"%08d" % n, b"") for n in range(sstable.ITEM_LIMIT + 1)])], [b"z"]),
        "more than 20000 keys",
    ),
    "too large": (bytes(sstable.TABLE_LIMIT + 1), "larger than 4194304 bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables(case: str) -> None:
    content, message = BAD[case]
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        read(content)
    assert time.process_time() - start < 10  # not a speed claim: none may loop on and on


def test_truncations_and_flips_are_all_found() -> None:
    for size in range(len(GOOD)):
        with pytest.raises(CheckpointError):
            read(GOOD[:size])
    for place in range(8 * len(GOOD)):
        with pytest.raises(CheckpointError):
            read(_flip(GOOD, place // 8, place % 8))


@given(st.data())
def test_a_mutation_under_a_good_checksum_is_refused_or_sorted(data: st.DataObject) -> None:
    """The checksums made good again, so that the structure itself is what is tried."""
    content = bytearray(block(ENTRIES)[: -sstable.TRAILER])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = read(table([sealed(bytes(content))], [b"\xff" * 30]))
    except CheckpointError:
        return
    keys = [key for key, _ in result]
    assert keys == sorted(set(keys))
