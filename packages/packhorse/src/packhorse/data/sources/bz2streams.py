"""A .bz2 file stream by stream, and what can be saved of a damaged one.

A bz2 file is one stream or several, each with its own beginning (`BZh`, level, block magic) on a
byte, so a file of many streams can be read by many workers. MediaWiki's multistream dumps are such:
a hundred pages a stream. A single stream can only be read from its start.

The decoder is fed little by little, because a block's checksum is known only when all of it has
been written out: this way the text of a damaged block is lost inside the call that fails, and
nothing that was not verified is ever given. The rest of that stream is lost as well (its blocks lie
on bits, not bytes); reading goes on at the next stream. Follows the format as bzip2 1.0.8 has it.

What a file unpacks to is bounded: `RATIO` bytes of text for each packed one, and `BURST` bytes more
at a time. A block of 45 bytes can hold 46 MB, so that a file made for it would fill any memory.
"""

from __future__ import annotations

import bz2
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
FED_BYTES = 256
PIECE_BYTES = 1 << 20
RATIO = 100  # Wikipedia's is 4, that of repetitive logs 20 to 50
BURST = 1 << 26  # bytes; more than any block holds
MAGIC = b"BZh"
TOO_MUCH = (
    f"it unpacks to more than {RATIO} times its size, as no text does, and the rest is left out;"
    " if it is right, unpack it with bunzip2 and build from that"
)

_START = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
_START_BYTES = 10


def starts(path: Path, at: int = 0, end: int | None = None) -> Iterator[int]:
    """Where streams begin, from byte `at` to about byte `end`."""
    with path.open("rb") as file:
        file.seek(at)
        before = b""
        while (end is None or at < end) and (block := file.read(BLOCK_BYTES)):
            window = before + block
            for found in _START.finditer(window):
                yield at - len(before) + found.start()
            at += len(block)
            # No start fits into what is kept, so none is found twice.
            before = window[1 - _START_BYTES :]


def unpacked(path: Path, begin: int = 0, end: int | None = None) -> Iterator[tuple[bytes, str]]:
    """The text of the streams in a byte range, in pieces; beside them, what is wrong.

    A piece is text and an empty string, or nothing and a complaint that names the byte.
    """
    end = path.stat().st_size if end is None else end
    allowance = _Allowance()
    with path.open("rb") as file:
        while begin < end:
            begin = yield from _one_stream(file, path, begin, end, allowance)


class _Allowance:
    """The bytes of text that may still come: a bucket that packed bytes refill."""

    def __init__(self) -> None:
        self.left = BURST

    def refill(self, packed: int) -> None:
        self.left = min(BURST, self.left + RATIO * packed)

    def spend(self, text: int) -> bool:
        """Is there enough left?"""
        self.left -= text
        return self.left >= 0


def _one_stream(
    file: BinaryIO, path: Path, begin: int, end: int, allowance: _Allowance
) -> Generator[tuple[bytes, str], None, int]:
    """One stream's text; returns where the next one begins."""
    decoder, at, sound = bz2.BZ2Decompressor(), begin, begin
    file.seek(begin)
    while not decoder.eof and at < end:
        fed = file.read(min(FED_BYTES, end - at))
        if not fed:
            break
        allowance.refill(len(fed))
        try:
            text = _text(decoder, fed, allowance)
        except OSError:
            after = next((start for start in starts(path, begin + 1) if start < end), end)
            yield b"", f"damaged bz2 data, lost from byte {sound} to byte {after}"
            return after
        if text is None:
            yield b"", f"from byte {at} on {TOO_MUCH}"
            return end
        if text:
            sound = at  # the block that is lost next begins in what was fed last
            yield text, ""
        at += len(fed)
    if not decoder.eof:
        yield b"", f"the bz2 stream from byte {begin} is cut at byte {at}"
    return at - len(decoder.unused_data)


def _text(decoder: bz2.BZ2Decompressor, fed: bytes, allowance: _Allowance) -> bytes | None:
    """What the fed bytes unpack to, piece by piece; None where that is more than is allowed."""
    pieces = [decoder.decompress(fed, PIECE_BYTES)]
    while allowance.spend(len(pieces[-1])):
        if decoder.eof or decoder.needs_input:
            return b"".join(pieces)
        pieces.append(decoder.decompress(b"", PIECE_BYTES))
    return None
