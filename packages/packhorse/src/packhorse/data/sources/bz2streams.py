"""Reads .bz2 files stream by stream, and recovers what is intact in a damaged one.

A bz2 file is one stream or several. Each begins on a byte boundary with its own header (`BZh`,
level, block magic), so a file of many streams can be read by many workers. MediaWiki's multistream
dumps have a hundred pages per stream. A single stream can only be read from its start.

The decoder is fed little by little, because a block's checksum is known only when the whole block
has been decoded: this way the text of a damaged block is lost inside the call that fails, and no
text is returned that was not verified. The rest of that stream is lost as well (its blocks begin on
bits, not bytes); reading continues at the next stream. Follows the format of bzip2 1.0.8.

The size of the unpacked text is limited to `RATIO` bytes per packed byte, plus `BURST` bytes. A
block of 45 bytes can hold 46 MB, so a malicious file could fill any memory.
"""

from __future__ import annotations

import bz2
import re
from collections.abc import Generator, Iterator
from typing import BinaryIO

from packhorse.data.sources.hub import SourcePath

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


def starts(path: SourcePath, begin: int = 0, end: int | None = None) -> Iterator[int]:
    """The positions at which streams begin, from byte `begin` to about byte `end`."""
    with path.open("rb") as file:
        file.seek(begin)
        position = begin
        tail = b""  # of the block before: a start may lie across two blocks
        while (end is None or position < end) and (block := file.read(BLOCK_BYTES)):
            window = tail + block
            for match in _START.finditer(window):
                yield position - len(tail) + match.start()
            position += len(block)
            # One byte too short for a start, so none is reported twice.
            tail = window[1 - _START_BYTES :]


def unpacked(
    path: SourcePath, begin: int = 0, end: int | None = None
) -> Iterator[tuple[bytes, str]]:
    """Decompress the streams in a byte range, in pieces.

    Yields (text, ""), or (b"", problem) where data is damaged; the problem names the byte.
    """
    end = path.stat().st_size if end is None else end
    allowance = Allowance()
    with path.open("rb") as file:
        while begin < end:
            begin = yield from _one_stream(file, path, begin, end, allowance)


class Allowance:
    """How many bytes of text may still be unpacked: a bucket that packed bytes refill."""

    def __init__(self) -> None:
        self.available = BURST

    def refill(self, packed: int) -> None:
        self.available = min(BURST, self.available + RATIO * packed)

    def spend(self, text: int) -> bool:
        """Take that many bytes; False if there were not enough."""
        self.available -= text
        return self.available >= 0


def _one_stream(
    file: BinaryIO, path: SourcePath, begin: int, end: int, allowance: Allowance
) -> Generator[tuple[bytes, str], None, int]:
    """Decompress one stream; return the position of the next one."""
    decoder = bz2.BZ2Decompressor()
    position = begin
    intact = begin  # up to here everything was decoded
    file.seek(begin)
    while not decoder.eof and position < end:
        fed = file.read(min(FED_BYTES, end - position))
        if not fed:
            break
        allowance.refill(len(fed))
        try:
            text = _decompress(decoder, fed, allowance)
        except OSError:
            following = next((start for start in starts(path, begin + 1) if start < end), end)
            yield b"", f"damaged bz2 data, lost from byte {intact} to byte {following}"
            return following
        if text is None:
            yield b"", f"from byte {position} on {TOO_MUCH}"
            return end
        if text:
            intact = position  # the next block begins in the bytes fed last
            yield text, ""
        position += len(fed)
    if not decoder.eof:
        yield b"", f"the bz2 stream from byte {begin} is cut at byte {position}"
    return position - len(decoder.unused_data)


def _decompress(decoder: bz2.BZ2Decompressor, fed: bytes, allowance: Allowance) -> bytes | None:
    """The text that these bytes unpack to; None if it is more than the allowance."""
    pieces = [decoder.decompress(fed, PIECE_BYTES)]
    while allowance.spend(len(pieces[-1])):
        if decoder.eof or decoder.needs_input:
            return b"".join(pieces)
        pieces.append(decoder.decompress(b"", PIECE_BYTES))
    return None
