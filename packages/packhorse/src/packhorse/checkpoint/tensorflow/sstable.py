"""LevelDB's sorted table, the format of a TensorFlow checkpoint's index.

A table is small (17 kB for BERT-Large with its optimizer), so it is read whole, where LevelDB would
seek in it, and checked from end to end: the checksum of every block, every restart point, the order
of all keys and the separators between blocks. So a table that passes has exactly the items that a
seek would find, and no single flipped bit passes. Snappy blocks, which TensorFlow can read but
never writes, are refused.

A block is a list of items, each with a key that shares a prefix with the key before it; then the
offsets of its restart points (items whose key is whole) and their count; then a trailer of a
compression type and a masked crc32c. The index block maps the last key of each data block to its
handle (offset and size, two varints). The footer holds the handles of metaindex and index block,
padded, and the magic number.

Follows https://github.com/google/leveldb/blob/main/doc/table_format.md
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import BinaryIO, NamedTuple

import numpy as np

from packhorse import wire
from packhorse.errors import CheckpointError

MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
FOOTER = 48  # bytes
TRAILER = 5  # bytes after a block: compression type, checksum
RESTART_INTERVAL = 16  # items from one whole key to the next
BLOCK = 256 << 10  # bytes of a block that we write, as in TensorFlow

TABLE_LIMIT = 4 << 20  # bytes; it is read into memory whole
ITEM_LIMIT = 20_000  # with TABLE_LIMIT, bounds the time to check a table
KEY_LIMIT = (
    2_048  # bytes; items store what follows a shared prefix, so a long key could be repeated
)


class Item(NamedTuple):
    """A key, and the bytes of its value in the table."""

    key: bytes
    begin: int
    end: int


def is_table(file: BinaryIO) -> bool:
    """Does the file end with a table's magic number?"""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - len(MAGIC)))
    return size >= FOOTER and file.read(len(MAGIC)) == MAGIC


def read(file: BinaryIO) -> tuple[bytes, list[Item]]:
    """The bytes of a table, and its items in the order of their keys, all checked."""
    table = file.read(TABLE_LIMIT + 1)
    if len(table) > TABLE_LIMIT:
        raise CheckpointError(f"the index is larger than {TABLE_LIMIT} bytes")
    return table, list(items(table))


def items(table: bytes) -> Iterator[Item]:
    """The items of a table; raises unless their keys ascend strictly."""
    last: bytes | None = None  # key or separator
    previous_end = 0
    count = 0
    for block in _block_items(table, *_index(table)):
        offset, size, _ = _handle(table, block.begin, block.end)
        if offset < previous_end:  # else the index could list one block many times
            raise CheckpointError(f"byte {block.begin}: a block that begins in the one before it")
        begin, previous_end = _block(table, offset, size)
        for item in _block_items(table, begin, previous_end):
            count += 1
            if count > ITEM_LIMIT:
                raise CheckpointError(f"byte {item.begin}: more than {ITEM_LIMIT} keys")
            if last is not None and item.key <= last:
                raise CheckpointError(f"byte {item.begin}: the key {item.key!r} is out of order")
            last = item.key
            yield item
        if last is None or last > block.key:
            raise CheckpointError(
                f"byte {block.begin}: keys outside the range that the index states"
            )
        last = block.key


def _index(table: bytes) -> tuple[int, int]:
    """Begin and end of the index block, from the footer."""
    footer = len(table) - FOOTER
    if footer < 0 or not table.endswith(MAGIC):
        raise CheckpointError(
            f"the {len(table)} bytes do not end as an index does: it is truncated, or another file"
        )
    end = len(table) - len(MAGIC)
    *metadata, at = _handle(table, footer, end)
    *index, _ = _handle(table, at, end)
    # Compared with what a writer would write: padding and varints have no other form.
    written = b"".join(map(wire.write_varint, (*metadata, *index)))
    if table[footer:end] != written.ljust(end - footer, b"\0"):
        raise CheckpointError(f"byte {footer}: the footer is damaged")
    _block(table, *metadata)  # always empty, but its checksum is checked
    return _block(table, *index)


def _handle(table: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Offset and size of a block, and the end of the handle itself."""
    offset, at = wire.varint(table, at, end)
    size, at = wire.varint(table, at, end)
    return offset, size, at


def _block(table: bytes, offset: int, size: int) -> tuple[int, int]:
    """Begin and end of a block, after checking that it is in the table and its checksum."""
    end = offset + size
    if end > len(table) - FOOTER - TRAILER:
        raise CheckpointError(f"byte {offset}: a block of {size} bytes is not in the file")
    stored = int.from_bytes(table[end + 1 : end + TRAILER], "little")
    if wire.mask(wire.crc32c(memoryview(table)[offset : end + 1])) != stored:
        raise CheckpointError(f"byte {offset}: the checksum of a block of {size} bytes is wrong")
    if compression := table[end]:
        method = (
            "with snappy" if compression == 1 else f"in a way ({compression}) that is not known"
        )
        raise CheckpointError(
            f"byte {offset}: the index is compressed {method}; TensorFlow saves it without"
        )
    return offset, end


def _block_items(table: bytes, begin: int, end: int) -> Iterator[Item]:
    """The items of one block: lengths of shared key, rest of key and value, then the bytes."""
    limit, restarts = _restarts(table, begin, end)
    at = begin
    key = b""
    while at < limit:
        start = at
        # Each is a varint32, of at most 5 bytes.
        shared, at = wire.varint(table, at, min(at + 5, limit))
        unshared, at = wire.varint(table, at, min(at + 5, limit))
        size, at = wire.varint(table, at, min(at + 5, limit))
        if start - begin in restarts and shared == 0:
            restarts.remove(start - begin)
        if shared > len(key) or shared + unshared > KEY_LIMIT or at + unshared + size > limit:
            raise CheckpointError(f"byte {start}: an entry that does not fit its block")
        key = key[:shared] + table[at : at + unshared]
        yield Item(key, at + unshared, at + unshared + size)
        at += unshared + size
    if restarts:
        raise CheckpointError(f"byte {limit}: restart points where no key begins")


def _restarts(table: bytes, begin: int, end: int) -> tuple[int, set[int]]:
    """The end of a block's items, and the offsets in it where a key is whole."""
    count = int.from_bytes(table[max(begin, end - 4) : end], "little")
    limit = end - 4 - 4 * count
    if not 0 < count <= ITEM_LIMIT or limit < begin:
        raise CheckpointError(f"byte {begin}: a block with {count} restart points")
    offsets = np.frombuffer(table, "<u4", count, limit).tolist()
    if offsets[0] != 0 or any(a >= b for a, b in pairwise(offsets)):
        raise CheckpointError(f"byte {limit}: restart points that do not ascend")
    return limit, set(offsets)


def build(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A table of these keys and values; keys must ascend."""
    table = bytearray()
    index: list[tuple[bytes, bytes]] = []  # the last key of each block, and its handle
    waiting: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in pairs:
        waiting.append((key, value))
        size += len(key) + len(value)
        if size >= BLOCK:
            index.append((key, _append_block(table, waiting, RESTART_INTERVAL)))
            waiting = []
            size = 0
    if waiting:
        index.append((waiting[-1][0], _append_block(table, waiting, RESTART_INTERVAL)))
    footer = _append_block(table, [], 1) + _append_block(table, index, 1)
    return bytes(table + footer.ljust(FOOTER - len(MAGIC), b"\0") + MAGIC)


def _append_block(table: bytearray, pairs: list[tuple[bytes, bytes]], interval: int) -> bytes:
    """Append a block to the table, and return its handle."""
    offset = len(table)
    restarts = [0]
    previous = b""
    for number, (key, value) in enumerate(pairs):
        shared = 0
        if number % interval:
            shared = _shared(previous, key)
        elif number:
            restarts.append(len(table) - offset)
        sizes = (shared, len(key) - shared, len(value))
        table += b"".join(map(wire.write_varint, sizes)) + key[shared:] + value
        previous = key
    table += np.array([*restarts, len(restarts)], "<u4").tobytes()
    size = len(table) - offset
    table += b"\0"  # not compressed
    table += wire.mask(wire.crc32c(bytes(table[offset:]))).to_bytes(4, "little")
    return wire.write_varint(offset) + wire.write_varint(size)


def _shared(previous: bytes, key: bytes) -> int:
    """The length of the common prefix of two keys."""
    limit = min(len(previous), len(key))
    return next((n for n in range(limit) if previous[n] != key[n]), limit)
