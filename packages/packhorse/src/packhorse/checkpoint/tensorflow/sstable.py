"""LevelDB's sorted table, in which TensorFlow keeps the index of a checkpoint.

A table is small (17 kB for BERT-Large with its optimizer), so it is read whole, checked from end to
end and given as a list, where LevelDB would seek in it: every block against its checksum, every
restart point, the order of all keys and the separators between blocks. What passes is what a seek
would have found, and no single flipped bit passes. Snappy blocks, which TensorFlow can read and
never writes, are refused.

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
FOOTER, TRAILER = 48, 5  # bytes
RESTART_INTERVAL = 16  # keys between two that are written whole
BLOCK = 256 << 10  # bytes of a block that we write, as TensorFlow's

TABLE_LIMIT = 4 << 20  # bytes
ITEM_LIMIT = 20_000
KEY_LIMIT = 2_048  # bytes; a long key that all others share would fill memory


class Item(NamedTuple):
    """A key, and where its value lies in the table."""

    key: bytes
    begin: int
    end: int


def is_table(file: BinaryIO) -> bool:
    """Does the file end as a table does?"""
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
    """The items of a table; keys ascend strictly."""
    last, free, count = None, 0, 0  # the last key or separator, where the last block ended
    for block in _items_of(table, *_index(table)):
        offset, size, _ = _handle(table, block.begin, block.end)
        if offset < free:  # else one block could be read, and paid for, many times
            raise CheckpointError(f"byte {block.begin}: a block that begins in the one before it")
        begin, free = _block(table, offset, size)
        for item in _items_of(table, begin, free):
            count += 1
            if count > ITEM_LIMIT:
                raise CheckpointError(f"byte {item.begin}: more than {ITEM_LIMIT} keys")
            if last is not None and item.key <= last:
                raise CheckpointError(f"byte {item.begin}: the key {item.key!r} is out of order")
            last = item.key
            yield item
        if last is None or last > block.key:
            raise CheckpointError(f"byte {block.begin}: keys that are not where the index says")
        last = block.key


def _index(table: bytes) -> tuple[int, int]:
    """Where the block that lists the others lies."""
    footer = len(table) - FOOTER
    if footer < 0 or not table.endswith(MAGIC):
        raise CheckpointError(
            f"the {len(table)} bytes do not end as an index does: it is truncated, or another file"
        )
    end = len(table) - len(MAGIC)
    *metadata, at = _handle(table, footer, end)
    *index, _ = _handle(table, at, end)
    written = b"".join(map(wire.write_varint, (*metadata, *index)))
    if table[footer:end] != written.ljust(end - footer, b"\0"):
        raise CheckpointError(f"byte {footer}: the footer is damaged")
    _block(table, *metadata)  # nobody writes any, but its checksum is there to be checked
    return _block(table, *index)


def _handle(table: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Offset and size of a block, and where the handle ends."""
    offset, at = wire.varint(table, at, end)
    size, at = wire.varint(table, at, end)
    return offset, size, at


def _block(table: bytes, offset: int, size: int) -> tuple[int, int]:
    """Begin and end of a block whose checksum is right."""
    end = offset + size
    if end > len(table) - FOOTER - TRAILER:
        raise CheckpointError(f"byte {offset}: a block of {size} bytes is not in the file")
    stored = int.from_bytes(table[end + 1 : end + TRAILER], "little")
    if wire.mask(wire.crc32c(memoryview(table)[offset : end + 1])) != stored:
        raise CheckpointError(f"byte {offset}: the checksum of a block of {size} bytes is wrong")
    if kind := table[end]:
        how = "with snappy" if kind == 1 else f"in a way ({kind}) that is not known"
        raise CheckpointError(
            f"byte {offset}: the index is compressed {how}; TensorFlow saves it without"
        )
    return offset, end


def _items_of(table: bytes, begin: int, end: int) -> Iterator[Item]:
    """The items of one block: a key is so many bytes of the key before it, and the rest."""
    limit, restarts = _restarts(table, begin, end)
    at, key = begin, b""
    while at < limit:
        place = at
        shared, at = wire.varint(table, at, min(at + 5, limit))
        rest, at = wire.varint(table, at, min(at + 5, limit))
        size, at = wire.varint(table, at, min(at + 5, limit))
        if place - begin in restarts and shared == 0:
            restarts.remove(place - begin)
        if shared > len(key) or shared + rest > KEY_LIMIT or at + rest + size > limit:
            raise CheckpointError(f"byte {place}: an entry that does not fit its block")
        key = key[:shared] + table[at : at + rest]
        yield Item(key, at + rest, at + rest + size)
        at += rest + size
    if restarts:
        raise CheckpointError(f"byte {limit}: restart points where no key begins")


def _restarts(table: bytes, begin: int, end: int) -> tuple[int, set[int]]:
    """Where the items of a block end, and the places in it where a key is whole."""
    count = int.from_bytes(table[max(begin, end - 4) : end], "little")
    limit = end - 4 - 4 * count
    if not 0 < count <= ITEM_LIMIT or limit < begin:
        raise CheckpointError(f"byte {begin}: a block with {count} restart points")
    found = np.frombuffer(table, "<u4", count, limit).tolist()
    if found[0] != 0 or any(a >= b for a, b in pairwise(found)):
        raise CheckpointError(f"byte {limit}: restart points that do not ascend")
    return limit, set(found)


def build(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A table of these keys and values, which are in ascending order."""
    table = bytearray()
    listed: list[tuple[bytes, bytes]] = []  # the last key of each block, its handle
    waiting: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in pairs:
        waiting.append((key, value))
        size += len(key) + len(value)
        if size >= BLOCK:
            listed.append((key, _append(table, waiting, RESTART_INTERVAL)))
            waiting, size = [], 0
    if waiting:
        listed.append((waiting[-1][0], _append(table, waiting, RESTART_INTERVAL)))
    footer = _append(table, [], 1) + _append(table, listed, 1)
    return bytes(table + footer.ljust(FOOTER - len(MAGIC), b"\0") + MAGIC)


def _append(table: bytearray, pairs: list[tuple[bytes, bytes]], interval: int) -> bytes:
    """Add a block; its handle."""
    offset, restarts, before = len(table), [0], b""
    for number, (key, value) in enumerate(pairs):
        shared = 0
        if number % interval:
            shared = _shared(before, key)
        elif number:
            restarts.append(len(table) - offset)
        sizes = (shared, len(key) - shared, len(value))
        table += b"".join(map(wire.write_varint, sizes)) + key[shared:] + value
        before = key
    table += np.array([*restarts, len(restarts)], "<u4").tobytes()
    size = len(table) - offset
    table += b"\0"  # not compressed
    table += wire.mask(wire.crc32c(bytes(table[offset:]))).to_bytes(4, "little")
    return wire.write_varint(offset) + wire.write_varint(size)


def _shared(before: bytes, key: bytes) -> int:
    """How many bytes the two begin with in common."""
    limit = min(len(before), len(key))
    return next((n for n in range(limit) if before[n] != key[n]), limit)
