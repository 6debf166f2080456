"""TFRecord files, read without TensorFlow: records of bytes, one after the other.

A record is its length, the length's masked crc32c, its bytes and theirs; both checksums are always
compared. A file may be gzip or zlib throughout, which is found by its first bytes. Nothing is
allocated before a limit has allowed it: a length that lies or a bomb costs no more than
`RECORD_LIMIT`, and a file of any size no more than `RUN_BYTES`. A file that was cut between two
records looks whole: the format has no end mark. Records count from 0.

Follows TensorFlow's record_writer.cc; what the records hold is read by `tfexample`.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

from packhorse import wire
from packhorse.errors import InputError

RECORD_LIMIT = 1 << 22  # bytes; BERT's have some 4,000, packed ones of 4,096 tokens 60,000
RUN_BYTES, RUN_RECORDS = 1 << 22, 1024
READ_BYTES = 1 << 18  # of a compressed file at a time
HEAD = struct.Struct("<QI")
EITHER_HEADER = zlib.MAX_WBITS + 32  # gzip's or zlib's


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive records of a file."""

    path: Path
    first: int  # the number of the first
    offsets: tuple[int, ...]  # where each begins in the (decompressed) file
    data: tuple[bytes, ...]

    def where(self, record: int) -> str:
        """How messages name a record of this run."""
        return f"{self.path}, record {self.first + record} (byte {self.offsets[record]})"


def sniff(path: Path) -> bool:
    """Whether the file begins as a TFRecord does, compressed or not."""
    with _readable(path), path.open("rb") as file:
        try:
            head = _stream(file).read(HEAD.size)
        except (zlib.error, InputError):
            return False
        return _vouched(head)


def runs(path: Path) -> Iterator[Run]:
    """The records of a file, in order, as many at a time as memory may hold."""
    offsets: list[int] = []
    data: list[bytes] = []
    first = size = 0
    for offset, record in read(path):
        if data and (len(data) == RUN_RECORDS or size + len(record) > RUN_BYTES):
            yield Run(path, first, tuple(offsets), tuple(data))
            first, size, offsets, data = first + len(data), 0, [], []
        offsets.append(offset)
        data.append(record)
        size += len(record)
    if data:
        yield Run(path, first, tuple(offsets), tuple(data))


def read(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each record's place in the (decompressed) file and its bytes, checksums compared."""
    with _readable(path), path.open("rb") as file:
        stream, offset, number = _stream(file), 0, 0
        while (record := _next(stream, f"{path}, record {number} (byte {offset})")) is not None:
            yield offset, record
            offset += HEAD.size + len(record) + 4
            number += 1


def _next(stream: BinaryIO, where: str) -> bytes | None:
    try:
        head = stream.read(HEAD.size)
        if not head:
            return None
        length = _length(head)
        body = stream.read(length + 4)
        if len(body) < length + 4:
            raise InputError(f"the file ends after {len(body)} of the record's {length + 4} bytes")
        record = body[:length]
        if wire.mask(wire.crc32c(record)) != int.from_bytes(body[length:], "little"):
            raise InputError("the checksum of its data is wrong: the file is damaged")
        return record
    except zlib.error as error:
        raise InputError(f"{where}: the compressed data is damaged: {error}") from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _length(head: bytes) -> int:
    if len(head) < HEAD.size:
        raise InputError(f"the file ends after {len(head)} of a record's first {HEAD.size} bytes")
    if not _vouched(head):
        raise InputError("the checksum of its length is wrong: damaged, or not a TFRecord")
    length, _ = HEAD.unpack(head)
    if length > RECORD_LIMIT:
        raise InputError(f"a record of {length} bytes; more than {RECORD_LIMIT} are not read")
    return length


def _vouched(head: bytes) -> bool:
    return len(head) == HEAD.size and wire.mask(wire.crc32c(head[:8])) == HEAD.unpack(head)[1]


def _stream(file: BinaryIO) -> BinaryIO:
    """What the file holds once it is decompressed, where it must be.

    A length may look like the magic of either compression; then its checksum tells them apart.
    """
    head = file.read(HEAD.size)
    file.seek(0)
    zlibbed = head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0
    if _vouched(head) or not (zlibbed or head[:2] == b"\x1f\x8b"):
        return file
    return io.BufferedReader(_Inflated(file), READ_BYTES)


@final
class _Inflated(io.RawIOBase):
    """A gzip or zlib file as what it decompresses to, never more of it than is asked for."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.engine, self.waiting = file, zlib.decompressobj(EITHER_HEADER), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        part = b""
        while not part:
            self.waiting = self.waiting or self.file.read(READ_BYTES)
            if self.engine.eof:
                if not self.waiting:
                    return 0
                self.engine = zlib.decompressobj(EITHER_HEADER)  # gzip's members follow each other
            part = self.engine.decompress(self.waiting, len(buffer))
            if not (part or self.waiting or self.engine.eof):
                raise InputError("the compressed file is cut")
            self.waiting = self.engine.unused_data or self.engine.unconsumed_tail
        buffer[: len(part)] = part
        return len(part)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
