"""Text of packed files as a stream of pieces: gzip, bzip2, xz and Zstandard, tar and zip archives.

    for stream in open_streams(path, "gzip"):     # one, or one for each file in an archive
        for text, problem in stream.pieces: ...

Everything is unpacked from front to back in bounded memory. A damaged or cut file gives its text up
to the damage and then one problem, so a caller loses what is missing and nothing else. As in
`bz2streams` the text may be `RATIO` times as long as what was packed, plus `BURST` bytes: a file of
a few kilobytes can unpack to terabytes otherwise. Archives may hold packed files, no archives.

A zip is read by its directory, which stands at its end. If it is cut, the entries that are left are
found by their own headers.

Follows RFC 1952 (gzip), RFC 8878 (Zstandard), the xz format 1.2.1, POSIX.1-2001's pax (tar) and
PKWARE's APPNOTE 6.3 (zip), by the libraries of each.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from io import BufferedReader, BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from packhorse.data.sources import bz2streams
from packhorse.data.sources.bz2streams import PIECE_BYTES, RATIO, Allowance
from packhorse.data.sources.hub import SourcePath
from packhorse.errors import InputError, MissingExtra

Pieces = Iterator[tuple[bytes, str]]  # text and "", or b"" and a problem

STANDARD_INPUT = Path("-")
FED_BYTES = 1 << 16
# A block of Zstandard holds up to 128 KiB in 4 bytes, and its decoder has no limit for one call.
FED_BYTES_ZSTD = 1 << 11
MOST_HEADERS = 1 << 22  # of a tar before one file: long names, pax records, maps of holes
MOST_MEMORY = 1 << 27  # of a decoder; what `xz -9` and `zstd --ultra -22` need

ARCHIVES = ("tar", "zip")
_MAGICS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_MAGIC_BYTES = 265  # up to here a tar has shown what it is
_LARGEST_BLOCK = 1 << 20  # packed; bzip2 unpacks nothing before 900 kB of text are complete
_ZSTD_SKIPPABLE = range(0x184D2A50, 0x184D2A60)  # frames of other programs (pzstd, zstd seekable)
_ZIP_HEADER = struct.Struct("<4sHHHHHIIIHH")  # in front of each entry
_ZIP_NO_TEXT = "its directory is missing, so the file is cut; the entries that are left are used"
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # an encrypted entry of a zip
    NotImplementedError,  # a compression that zipfile does not know
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)


class Readable(Protocol):
    """A file that is read from front to back."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TextStream:
    """One text of a packed file; `member` is its name in an archive, "" if it is no archive."""

    member: str
    pieces: Pieces
    packed_bytes: Callable[[], int] | None = None  # how much of the file has been read, if known


def packing_of(head: bytes) -> str:
    """How a file is packed, by its first bytes: "" if it is not."""
    for magic, packing in _MAGICS.items():
        if head.startswith(magic):
            return packing
    if len(head) >= 4 and int.from_bytes(head[:4], "little") in _ZSTD_SKIPPABLE:
        return "zstd"
    return "tar" if head[257:262] == b"ustar" else ""


def packing_of_file(path: SourcePath) -> tuple[str, ...]:
    """How a file is packed, from the outside in: ("gzip", "tar") for a .tar.gz."""
    if path == STANDARD_INPUT:
        outer = packing_of(standard_input().peek(_MAGIC_BYTES))
        if outer == "zip":
            raise InputError("standard input is a zip, which must be a file; save it first")
    else:
        with path.open("rb") as file:
            outer = packing_of(file.read(_MAGIC_BYTES))
    if outer in ("", *ARCHIVES):
        return (outer,) if outer else ()
    if path == STANDARD_INPUT:
        inner = _peek_packed(BytesIO(standard_input().peek(_LARGEST_BLOCK)), outer)
    else:
        with path.open("rb") as file:
            inner = _peek_packed(file, outer)
    return (outer, "tar") if packing_of(inner) == "tar" else (outer,)


def _peek_packed(file: Readable, packing: str) -> bytes:
    """The first bytes that a packed file unpacks to."""
    text = b""
    for piece, _ in unpack(file, packing):
        text += piece
        if len(text) >= _MAGIC_BYTES:
            break
    return text[:_MAGIC_BYTES]


def open_streams(path: SourcePath, packing: tuple[str, ...]) -> Iterator[TextStream]:
    """The texts of a file that is packed this way (`packing_of_file`), each read to its end.

    A stream must be read before the next one is asked for.
    """
    if packing == ("zip",):
        yield from _zip_streams(path)
        return
    if packing == ("bz2",) and path != STANDARD_INPUT:
        # Damage costs one of its streams, not the rest.
        yield TextStream("", bz2streams.unpacked(path))
        return
    file = standard_input() if path == STANDARD_INPUT else path.open("rb")
    counted = _CountedFile(file)
    try:
        pieces = _plain(counted)
        for layer in packing:
            if layer == "tar":
                yield from _tar_streams(_PieceReader(pieces), counted)
                return
            pieces = unpack(_PieceReader(pieces) if layer != packing[0] else counted, layer)
        yield TextStream("", pieces, lambda: counted.position)
    finally:
        file.close()


# Standard input ----------------------------------------------------------------------------------


class _StandardInput:
    """Standard input, whose first bytes can be looked at before they are read."""

    def __init__(self, stream: BufferedReader) -> None:
        self.stream = stream
        self.head = b""

    def peek(self, count: int) -> bytes:
        while len(self.head) < count and (more := self.stream.read1(count - len(self.head))):
            self.head += more
        return self.head[:count]

    def read(self, size: int, /) -> bytes:
        if self.head:
            taken = self.head[:size]
            self.head = self.head[size:]
            return taken
        return self.stream.read1(size)  # what has arrived: a slow pipe is not waited for

    def close(self) -> None:
        """Do nothing: it stays open, as Python has it."""


@cache
def standard_input() -> _StandardInput:
    """The standard input of this process, which can be read once."""
    import sys

    if sys.stdin is None:  # a service, or <&-
        raise InputError("standard input is closed; pipe text into it, or name a file")
    return _StandardInput(cast(BufferedReader, sys.stdin.buffer))


class _CountedFile:
    """Counts the bytes that are read of a file."""

    def __init__(self, file: Readable) -> None:
        self.file = file
        self.position = 0

    def read(self, size: int, /) -> bytes:
        data = self.file.read(size)
        self.position += len(data)
        return data


class _PieceReader:
    """Reads pieces as a file, and keeps the problems that come with them."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.rest = b""
        self.tail = b""  # what was read last, a tar block of it
        self.problems: list[str] = []

    def read(self, size: int, /) -> bytes:
        while not self.rest and (piece := next(self.pieces, None)):
            self.rest, problem = piece
            if problem:
                self.problems.append(problem)
        taken = self.rest[:size]
        self.rest = self.rest[size:]
        self.tail = (self.tail + taken[-tarfile.BLOCKSIZE :])[-tarfile.BLOCKSIZE :]
        return taken


def _plain(file: Readable) -> Pieces:
    while data := file.read(PIECE_BYTES):
        yield data, ""


# Compressions ------------------------------------------------------------------------------------


def unpack(file: Readable, packing: str) -> Pieces:
    """The text of one compressed file, of any number of streams laid end to end."""
    fed_bytes = FED_BYTES_ZSTD if packing == "zstd" else FED_BYTES
    make_decoder, decode = _decoders(packing)
    allowance = Allowance()
    decoder = make_decoder()
    position = 0  # in the file, behind the bytes fed last
    fed = b""
    empty = True  # nothing was fed to this decoder
    while True:
        if not fed:
            fed = file.read(fed_bytes)
            position += len(fed)
            allowance.refill(len(fed))
        if not fed:
            break
        if empty and packing in ("gzip", "xz"):
            fed = fed.lstrip(b"\0")  # padding between and behind streams
            if not fed:
                continue
        try:
            for text in decode(decoder, fed):
                if not allowance.spend(len(text)):
                    yield b"", f"from byte {position} on it unpacks to {_TOO_MUCH}"
                    return
                if text:
                    yield text, ""
        except _BROKEN + _zstd_errors(packing) as error:
            yield b"", f"damaged {packing} data before byte {position}, lost from there: {error}"
            return
        empty = decoder.eof
        fed = b""
        if decoder.eof:
            fed = decoder.unused_data
            decoder = make_decoder()
    if not empty:
        yield b"", f"the {packing} stream is cut at byte {position}"


_TOO_MUCH = (
    f"more than {RATIO} times its size, as no text does, and the rest is left out; if it is right,"
    " unpack it and build from that"
)

Decode = Callable[[Any, bytes], Iterator[bytes]]


def _decoders(packing: str) -> tuple[Callable[[], Any], Decode]:
    """A maker of decoders for single streams, and the function that feeds one."""
    match packing:
        case "gzip":
            return partial(zlib.decompressobj, 16 + zlib.MAX_WBITS), _decode_zlib
        case "bz2":
            return bz2.BZ2Decompressor, _decode_bounded
        case "xz":
            return (
                partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, MOST_MEMORY),
                _decode_bounded,
            )
        case "zstd":
            try:
                import zstandard
            except ImportError as error:
                raise MissingExtra("zstandard", "data") from error
            context = zstandard.ZstdDecompressor(max_window_size=MOST_MEMORY)
            return context.decompressobj, _decode_whole
    raise ValueError(f"no packing is called {packing!r}")


def _zstd_errors(packing: str) -> tuple[type[Exception], ...]:
    if packing != "zstd":
        return ()
    import zstandard

    return (zstandard.ZstdError,)


def _decode_zlib(decoder: Any, fed: bytes) -> Iterator[bytes]:
    yield decoder.decompress(fed, PIECE_BYTES)
    while decoder.unconsumed_tail:
        yield decoder.decompress(decoder.unconsumed_tail, PIECE_BYTES)


def _decode_bounded(decoder: Any, fed: bytes) -> Iterator[bytes]:
    yield decoder.decompress(fed, PIECE_BYTES)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", PIECE_BYTES)


def _decode_whole(decoder: Any, fed: bytes) -> Iterator[bytes]:
    yield decoder.decompress(fed)


# Archives ----------------------------------------------------------------------------------------


def _is_data(name: str) -> bool:
    """Whether a file in an archive is read; like in folders, names with . or _ are not data."""
    return not any(part[:1] in (".", "_") for part in name.split("/") if part != ".")


def _member_pieces(pieces: Pieces) -> Pieces:
    """The text of a file in an archive, which may be compressed itself."""
    head = next(pieces, (b"", ""))
    packing = packing_of(head[0])
    whole = chain([head], pieces)
    if packing in ("", *ARCHIVES):
        yield from whole
        return
    reader = _PieceReader(whole)
    yield from unpack(reader, packing)
    yield from ((b"", problem) for problem in reader.problems)


class _TarFile:
    """A reader as tarfile wants its file; headers are bounded, which may have any size in a tar."""

    def __init__(self, reader: _PieceReader) -> None:
        self.reader = reader
        self.position = 0
        self.headers = 0  # bytes that were read since the last file

    def read(self, size: int) -> bytes:
        """So many bytes, less at the end."""
        self.headers += size
        if self.headers > MOST_HEADERS:
            raise tarfile.ReadError(f"headers of more than {MOST_HEADERS} bytes before a file")
        parts: list[bytes] = []
        while size and (part := self.reader.read(size)):
            parts.append(part)
            size -= len(part)
        data = b"".join(parts)
        self.position += len(data)
        return data

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> int:
        """Go forward."""
        while self.position < position:
            passed = self.reader.read(min(PIECE_BYTES, position - self.position))
            if not passed:
                break  # tarfile then finds nothing to read
            self.position += len(passed)
        return self.position


def _tar_streams(reader: _PieceReader, counted: _CountedFile) -> Iterator[TextStream]:
    file = _TarFile(reader)
    try:
        with tarfile.open(fileobj=cast(BinaryIO, file), mode="r:") as archive:
            for info in archive:
                file.headers = 0
                # It remembers each file, which a large archive has millions of.
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]
                archive.pax_headers = {}  # and what headers say of all files that follow
                if info.isreg() and _is_data(info.name):
                    pieces = _member_pieces(_tar_pieces(archive, info, file))
                    yield TextStream(info.name, pieces, lambda: counted.position)
                    file.headers = 0
            # tarfile takes a damaged header for the end; and the packed data may be damaged here.
            while rest := reader.read(PIECE_BYTES):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError(
                        "what follows is no file, or stands behind its end mark"
                    )
        if reader.tail.strip(b"\0"):
            raise tarfile.ReadError("it has no end mark")
    except _BROKEN as error:
        _note_cut(reader, error)
    if reader.problems:
        problems = iter([(b"", problem) for problem in reader.problems])
        yield TextStream("", problems, lambda: counted.position)


def _note_cut(reader: _PieceReader, error: Exception) -> None:
    """Note that an archive ends early, unless it is known already that its packed data does."""
    if not reader.problems:
        reader.problems.append(f"the tar is damaged or cut: {error}")


def _tar_pieces(archive: tarfile.TarFile, info: tarfile.TarInfo, file: _TarFile) -> Pieces:
    member = archive.extractfile(info)
    if member is None or info.issparse():
        yield b"", "a sparse file, which is not unpacked; pack it without holes"
        return
    try:
        while piece := member.read(PIECE_BYTES):
            file.headers = 0
            yield piece, ""
    except _BROKEN as error:
        _note_cut(file.reader, error)


def _zip_streams(path: SourcePath) -> Iterator[TextStream]:
    try:
        with path.open("rb") as packed, zipfile.ZipFile(packed) as archive:
            end = 0
            for info in archive.infolist():
                end += info.compress_size
                if not info.is_dir() and _is_data(info.filename):
                    pieces = _member_pieces(_zip_pieces(archive, info))
                    yield TextStream(info.filename, pieces, lambda end=end: end)
            return
    except _BROKEN as error:
        problem = str(error)
    yield TextStream("", iter([(b"", f"{_ZIP_NO_TEXT} ({problem})")]))
    with path.open("rb") as file:
        yield from _entries_without_directory(file)


def _zip_pieces(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Pieces:
    allowance = Allowance()
    remaining = info.compress_size
    try:
        with archive.open(info) as file:
            while piece := file.read(PIECE_BYTES):
                # zipfile does not say how many packed bytes it has read: allow for all of them.
                allowance.refill(min(remaining, FED_BYTES))
                remaining -= min(remaining, FED_BYTES)
                if not allowance.spend(len(piece)):
                    yield b"", f"it unpacks to {_TOO_MUCH}"
                    return
                yield piece, ""
    except _BROKEN as error:
        yield b"", f"damaged zip data: {error}"


def _entries_without_directory(file: BinaryIO) -> Iterator[TextStream]:
    """The entries at the front of a cut zip; those whose size stands behind them end it."""
    while len(header := file.read(_ZIP_HEADER.size)) == _ZIP_HEADER.size:
        magic, _, flags, method, _, _, _, size, _, name_bytes, extra_bytes = _ZIP_HEADER.unpack(
            header
        )
        if magic != b"PK\x03\x04":
            return
        name = file.read(name_bytes).decode("utf-8" if flags & 0x800 else "cp437", "replace")
        file.seek(extra_bytes, 1)
        begin = file.tell()
        size_follows = bool(flags & 8)
        if flags & 1 or method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return
        if size_follows and method == zipfile.ZIP_STORED:
            return
        decoder = zlib.decompressobj(-zlib.MAX_WBITS) if method else None
        end = None if size_follows else begin + size
        if not name.endswith("/") and _is_data(name):
            pieces = _member_pieces(_entry_pieces(file, end, decoder))
            yield TextStream(name, pieces, file.tell)
        for _ in _entry_pieces(file, end, decoder):
            pass  # to the end of what was not read
        if end is not None:
            file.seek(end)
        else:
            with suppress(AttributeError):
                file.seek(-len(decoder.unused_data), 1)  # pyright: ignore[reportOptionalMemberAccess]
            if file.read(4) != b"PK\x07\x08":  # the descriptor's mark may be left out
                file.seek(-4, 1)
            file.seek(12, 1)


def _entry_pieces(file: BinaryIO, end: int | None, decoder: Any) -> Pieces:
    """The text of the entry at the file's position, up to `end` or where its data ends itself."""
    allowance = Allowance()
    while decoder is None or not decoder.eof:
        room = FED_BYTES if end is None else min(FED_BYTES, end - file.tell())
        if not room:
            return
        fed = file.read(room)
        if not fed:
            yield b"", "the zip is cut here"
            return
        allowance.refill(len(fed))
        try:
            for text in [fed] if decoder is None else _decode_zlib(decoder, fed):
                if not allowance.spend(len(text)):
                    yield b"", f"it unpacks to {_TOO_MUCH}"
                    return
                yield text, ""
        except zlib.error as error:
            yield b"", f"damaged zip data: {error}"
            return
