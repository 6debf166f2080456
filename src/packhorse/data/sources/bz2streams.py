"""A .bz2 file stream by stream, and what can be saved of a damaged one.

A bz2 file is one stream or several, each with its own beginning (`BZh`, level, block magic) on a
byte, so a file of many streams can be read by many workers. MediaWiki's multistream dumps are such:
a hundred pages a stream. A single stream can only be read from its start.

The decoder is fed little by little, because a block's checksum is known only when all of it has
been written out: this way the text of a damaged block is lost inside the call that fails, and
nothing that was not verified is ever given. The rest of that stream is lost as well (its blocks lie
on bits, not bytes); reading goes on at the next stream. Follows the format as bzip2 1.0.8 has it.
"""

from __future__ import annotations

import bz2
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
FED_BYTES = 256  # also bounds what a file made to explode can unfold at once
MAGIC = b"BZh"

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
    with path.open("rb") as file:
        while begin < end:
            begin = yield from _one_stream(file, path, begin, end)


def _one_stream(
    file: BinaryIO, path: Path, begin: int, end: int
) -> Generator[tuple[bytes, str], None, int]:
    """One stream's text; returns where the next one begins."""
    decoder, at, sound = bz2.BZ2Decompressor(), begin, begin
    file.seek(begin)
    while not decoder.eof and at < end:
        fed = file.read(min(FED_BYTES, end - at))
        if not fed:
            break
        try:
            text = decoder.decompress(fed)
        except OSError:
            after = next((start for start in starts(path, begin + 1) if start < end), end)
            yield b"", f"damaged bz2 data, lost from byte {sound} to byte {after}"
            return after
        if text:
            sound = at  # the block that is lost next begins in what was fed last
            yield text, ""
        at += len(fed)
    if not decoder.eof:
        yield b"", f"the bz2 stream from byte {begin} is cut at byte {at}"
    return at - len(decoder.unused_data)
