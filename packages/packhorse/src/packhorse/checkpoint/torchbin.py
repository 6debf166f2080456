"""Read torch's `.bin`, `.pt` and `.pth`: a zip archive of a pickle and the storages it refers to.

Nothing in such a file is run. The archive's directory is read here: its records must be stored, not
compressed, must not overlap or exceed the file, and must have the checksum in the directory. The
pickle is interpreted by `pickled`, which only describes tensors; each description is checked
against its storage before anything is allocated, and storages are read straight into memory that
their tensors share, as tied weights do. Optimizers and counters in the file are not read.

The archive is the subset of PKWARE's APPNOTE that torch writes: one common prefix, no comment, no
encryption, ZIP64 where sizes need it. This reader accepts a subset of what torch's own
`weights_only` accepts, and returns the same tensors; there is no fallback to torch.load.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from packhorse.checkpoint import files, pickled
from packhorse.checkpoint.pickled import Pairs, Storage, View, brief
from packhorse.checkpoint.safetensors import read_bytes
from packhorse.errors import CheckpointError

ZIP = b"PK\x03\x04"
PICKLE = b"\x80"
TAR = b"ustar"
TAR_OFFSET = 257  # of a tar archive's signature
TAR_MEMBERS = (
    b"sys_info",
    b"storages",
    b"tensors\0",
    b"pickle\0\0",
)  # the first, as torch wrote it
# Bounds on what is read before it is checked.
PICKLE_LIMIT = 8 << 20  # bytes of data.pkl; that of ten thousand tensors has 1 MB
SMALL_LIMIT = 4096  # bytes of a record that is neither the pickle nor a storage
RECORD_LIMIT = pickled.TENSOR_LIMIT + 100
DIRECTORY_LIMIT = 4 << 20  # bytes of the central directory
VERSIONS = tuple(b"%d" % number for number in range(1, 11))  # of the record `version`; torch: 3
LISTED = 20  # names of other objects in a message
WRAPPERS = ("model", "state_dict", "model_state_dict", "module")  # keys that training scripts use
TORCHSCRIPT = (
    "this is a TorchScript program, which is not run; save its tensors: "
    "torch.save(torch.jit.load(…).state_dict(), …)"
)

# The structures of the archive, by APPNOTE's sections.
END = struct.Struct("<4s4H2LH")  # 4.3.16, end of central directory
END64 = struct.Struct("<4sQ2H2L4Q")  # 4.3.14, its ZIP64 form
LOCATOR = struct.Struct("<4sLQL")  # 4.3.15, locator of that
CENTRAL = struct.Struct("<4s6H3L5H2L")  # 4.3.12, entry of the central directory
LOCAL = struct.Struct("<4s5H3L2H")  # 4.3.7, header of a record
ZIP64 = 1  # id of the extra field with 64-bit numbers
LARGE = 0xFFFFFFFF  # a 32-bit number whose value is in that field
STREAMED = 1 << 3  # flag: sizes and checksum follow the record
UTF8 = 1 << 11  # flag: the name is UTF-8
FOLDER = 1 << 4  # external attribute


@dataclass(frozen=True, slots=True)
class _Record:
    """One member of the archive."""

    name: str  # with the prefix that all members share
    begin: int  # offset of its header
    start: int  # offset of its bytes
    size: int
    crc: int  # 0: the writer computed none


def looks_like(start: bytes) -> bool:
    """Is a file with these first 512 bytes one of torch's, in today's format or an old one?"""
    old = start[:1] == PICKLE and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    return (
        start.startswith(ZIP) or old or (start[TAR_OFFSET:262] == TAR and start[:8] in TAR_MEMBERS)
    )


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one torch file."""
    return read(folder, name)[0]


def read(folder: Path, name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of one torch file, and notes on what else is in it."""
    with files.open_file(folder, name) as file:
        try:
            _refuse_old(file)
            records = _read_directory(file)
            root, views = pickled.read(_read_pickle(file, records))
            state, left_out = _state(root)
            tensors = _read_views(file, records, state, views)
        except CheckpointError as error:
            raise CheckpointError(f"{folder / name}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    return tensors, (f"{name}: left out {', '.join(left_out)}",) if left_out else ()


def _refuse_old(file: BinaryIO) -> None:
    start = file.read(TAR_OFFSET + len(TAR))
    if start.startswith(PICKLE):
        # The file's own name stays out of the command: it could hold one for the shell.
        raise CheckpointError(
            "this is a pickle as torch wrote them before 1.6, which is not read; write it anew: "
            "python -c \"import torch; torch.save(torch.load('OLD.bin', weights_only=True, "
            "map_location='cpu'), 'NEW.bin')\""
        )
    if start[TAR_OFFSET:] == TAR:
        raise CheckpointError(
            "this is a tar archive as torch wrote them in 2016, which only torch.load without "
            "protection reads; if you trust it, load it on a machine without secrets and save its "
            "tensors anew"
        )
    if not start.startswith(ZIP):
        raise CheckpointError("this is no torch file: it is not a zip archive")


def _read_directory(file: BinaryIO) -> dict[str, _Record]:
    """All records by name."""
    start, size, count = _find_directory(file)
    directory = _at(file, start, size)
    records: list[_Record] = []
    offset = 0
    for _ in range(count):
        entry, length = _parse_record(directory, offset, start + offset)
        records.append(_locate(file, *entry, end=start))
        offset += length
    if offset != size:
        raise CheckpointError(
            f"byte {start + offset}: the directory does not end with its last record"
        )
    records.sort(key=lambda record: record.begin)
    for previous, record in pairwise(records):
        if previous.start + previous.size > record.begin:
            raise CheckpointError(f"byte {record.begin}: {record.name} overlaps {previous.name}")
    return _by_name(records)


def _find_directory(file: BinaryIO) -> tuple[int, int, int]:
    """Offset, size and number of entries of the central directory, from the archive's end."""
    end = os.fstat(file.fileno()).st_size - END.size
    fields = END.unpack(_at(file, end, END.size))
    signature, *disks, count_here, count, size, start, comment = fields
    if signature != b"PK\x05\x06" or comment or any(disks) or count_here != count:
        raise CheckpointError(f"byte {end}: no zip directory ends here; the file is truncated")
    locator = _at(file, end - LOCATOR.size, LOCATOR.size)
    if locator.startswith(b"PK\x06\x07"):
        end -= LOCATOR.size + END64.size
        if LOCATOR.unpack(locator)[1:] != (0, end, 1):  # first disk, offset, number of disks
            raise CheckpointError(f"byte {end}: the zip directory does not end where it says")
        small = (count, size, start)
        count, size, start = _read_end64(file, end)
        # The numbers of END are saturated where those of END64 exceed them.
        if small != (min(count, 0xFFFF), min(size, LARGE), min(start, LARGE)):
            raise CheckpointError(f"byte {end}: the zip directory is described in two ways")
    if start + size != end:
        raise CheckpointError(f"byte {end}: the zip directory does not end here")
    if count > RECORD_LIMIT or size > DIRECTORY_LIMIT:
        raise CheckpointError(f"{count} records, described in {size} bytes, are too many")
    return start, size, count


def _read_end64(file: BinaryIO, end: int) -> tuple[int, int, int]:
    """Number of entries, size and offset of a ZIP64 directory."""
    fields = END64.unpack(_at(file, end, END64.size))
    signature, length, _, _, *disks, count_here, count, size, start = fields
    # `length` leaves out the signature and itself.
    if signature != b"PK\x06\x06" or length != END64.size - 12:
        raise CheckpointError(f"byte {end}: no ZIP64 directory ends here")
    if any(disks) or count_here != count:
        raise CheckpointError(f"byte {end}: no ZIP64 directory ends here")
    return count, size, start


def _parse_record(
    directory: bytes, offset: int, at: int
) -> tuple[tuple[bytes, int, int, int, int], int]:
    """Parse the directory's entry at `offset`, which is byte `at` of the file.

    Returns its name, flags, offset of the header, size and checksum; and the entry's length.
    """
    if len(directory) - offset < CENTRAL.size:
        raise CheckpointError(f"byte {at}: the zip directory is truncated")
    fields = CENTRAL.unpack_from(directory, offset)
    signature, _, _, flags, method, _, _, crc, packed = fields[:9]
    size, name_length, extra_length, comment_length, disk, _, attributes, begin = fields[9:]
    start = offset + CENTRAL.size
    name = directory[start : start + name_length]
    extra = directory[start + name_length : start + name_length + extra_length]
    length = CENTRAL.size + name_length + extra_length + comment_length
    if signature != b"PK\x01\x02" or offset + length > len(directory):
        raise CheckpointError(f"byte {at}: this is no record of a zip directory")
    if disk or attributes & FOLDER:
        raise CheckpointError(f"byte {at}: this is no record of a zip directory")
    if method and b"/code/" in name:
        raise CheckpointError(TORCHSCRIPT)
    if method or flags & ~(STREAMED | UTF8):
        raise CheckpointError(
            f"byte {at}: {_text(name)} is compressed or encrypted, which torch never does; "
            f"unpack the file and save its tensors with torch.save"
        )
    size, packed, begin = _from_zip64(extra, at, size, packed, begin)
    if size != packed:
        raise CheckpointError(f"byte {at}: {_text(name)} has {size} bytes in {packed}")
    return (name, flags, begin, size, crc), length


def _from_zip64(extra: bytes, at: int, *numbers: int) -> list[int]:
    """The numbers of an entry; those that do not fit 32 bits come from its ZIP64 extra field."""
    field = b""
    offset = 0
    while LARGE in numbers and len(extra) - offset >= 4 and not field:
        kind, length = struct.unpack_from("<2H", extra, offset)
        field = extra[offset + 4 : offset + 4 + length] if kind == ZIP64 else b""
        offset += 4 + length
    values: list[int] = []
    for number in numbers:
        if number != LARGE:
            values.append(number)
            continue
        # The field lists only the numbers that are LARGE, in this order, 8 bytes each.
        if len(field) < 8:
            raise CheckpointError(f"byte {at}: a record's size or place is missing")
        values.append(int.from_bytes(field[:8], "little"))
        field = field[8:]
    return values


def _locate(
    file: BinaryIO, name: bytes, flags: int, begin: int, size: int, crc: int, end: int
) -> _Record:
    """The record of a directory's entry, after checking that its own header says the same.

    end: of the records, where the directory begins.
    """
    if begin + LOCAL.size > end:
        raise CheckpointError(f"{_text(name)} begins at byte {begin}, outside the records")
    header = LOCAL.unpack(_at(file, begin, LOCAL.size))
    signature, _, local_flags, method, _, _, _, packed, unpacked, name_length, extra_length = header
    start = begin + LOCAL.size + name_length + extra_length
    same_name = _at(file, begin + LOCAL.size, min(name_length, len(name) + 1)) == name
    # torch streams: sizes that it does not know when it writes a header follow the bytes.
    sizes = (0, size, LARGE) if flags & STREAMED else (size, LARGE)
    differs = method or local_flags != flags or not same_name or {packed, unpacked} - set(sizes)
    if signature != ZIP or differs:
        raise CheckpointError(
            f"byte {begin}: the header of {_text(name)} differs from the directory"
        )
    if start + size > end:
        raise CheckpointError(
            f"byte {start}: {_text(name)} has {size} bytes, {end - start} are left"
        )
    return _Record(_text(name), begin, start, size, crc)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _by_name(records: list[_Record]) -> dict[str, _Record]:
    """The records by their names below the common prefix, which must be safe and unique."""
    prefix = records[0].name.partition("/")[0] if records else ""
    by_name: dict[str, _Record] = {}
    lowercase: set[str] = set()
    for record in records:
        first, _, name = record.name.partition("/")
        parts = record.name.split("/")
        unsafe = not {"", ".", ".."}.isdisjoint(parts) or "\\" in name or "\0" in name
        if first != prefix or unsafe:
            raise CheckpointError(
                f"byte {record.begin}: {brief(record.name)} is not the name of a record of {prefix}"
            )
        if name.lower() in lowercase:  # torch looks names up without regard to case
            raise CheckpointError(f"byte {record.begin}: {brief(record.name)} is there twice")
        lowercase.add(name.lower())
        by_name[name] = record
    return by_name


def _read_pickle(file: BinaryIO, records: dict[str, _Record]) -> bytes:
    """The bytes of data.pkl, after checking the records that describe the archive."""
    if "constants.pkl" in records:
        raise CheckpointError(TORCHSCRIPT)
    # Checksums of small records that nothing reads are checked all the same: a damaged file is
    # reported wherever the damage is.
    for name, record in records.items():
        if record.size <= SMALL_LIMIT and not name.startswith("data/"):
            _read_small(file, records, name, SMALL_LIMIT)
    pickles = [name for name in records if name.split("/")[-1] == "data.pkl"]
    if pickles != ["data.pkl"]:
        raise CheckpointError(f"this is no torch file: {len(pickles)} records are a data.pkl")
    version = _read_small(file, records, "version", SMALL_LIMIT).strip()
    if version not in VERSIONS:
        raise CheckpointError(f"the archive's version {brief(_text(version))} is unknown")
    order = (
        _read_small(file, records, "byteorder", SMALL_LIMIT)
        if "byteorder" in records
        else b"little"
    )
    if order != b"little":
        raise CheckpointError(
            f"the numbers' byte order is {brief(_text(order))}; load the file with torch on a "
            f"little-endian machine, which most are, and save it there anew"
        )
    return _read_small(file, records, "data.pkl", PICKLE_LIMIT)


def _read_small(file: BinaryIO, records: dict[str, _Record], name: str, limit: int) -> bytes:
    if name not in records:
        raise CheckpointError(f"this is no torch file: there is no record {name}")
    record = records[name]
    if record.size > limit:
        raise CheckpointError(f"{name} has {record.size} bytes, more than {limit}")
    data = _at(file, record.start, record.size)
    _check(record, zlib.crc32(data))
    return data


def _check(record: _Record, crc: int) -> None:
    if record.crc and record.crc != crc:
        raise CheckpointError(
            f"byte {record.start}: {record.name} has the checksum {crc:#010x}, not "
            f"{record.crc:#010x} as the archive says; the file is damaged"
        )


def _at(file: BinaryIO, offset: int, size: int) -> bytes:
    if offset < 0:
        raise CheckpointError("the file is truncated")
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise CheckpointError(f"byte {offset}: the file ends before {size} more bytes")
    return data


def _state(root: Any) -> tuple[dict[str, View], list[str]]:
    """The dictionary of tensors in the saved object, and the names of everything else in it."""
    if type(root) is not Pairs:
        raise CheckpointError("this file holds no dictionary of tensors")
    keys = [key for key, _ in root if key in WRAPPERS]
    if len(keys) != len(set(keys)):
        raise CheckpointError(f"this file holds several models called {keys[0]}")
    wrapped = [(key, value) for key, value in root if key in WRAPPERS and _has_tensors(value)]
    if len(wrapped) > 1:
        names = " and ".join(key for key, _ in wrapped)
        raise CheckpointError(f"this file holds several models, {names}; save one of them alone")
    chosen = wrapped[0][1] if wrapped else root
    # Compared by identity, since comparing deeply shared structures could take for ever.
    unused = [key for key, value in root if wrapped and value is not chosen]
    no_tensors = [name for name, value in chosen if type(value) is not View]
    texts = {name for name in no_tensors if type(name) is str}
    state: dict[str, View] = {}
    for name, value in chosen:
        if type(value) is not View:
            continue
        if type(name) is not str or not name.isprintable():
            raise CheckpointError(
                f"data.pkl, byte {value.offset_in_pickle}: the tensor's name is no text"
            )
        if name in state or name in texts:
            raise CheckpointError(
                f"data.pkl, byte {value.offset_in_pickle}: {brief(name)} is there twice"
            )
        state[name] = value
    left_out = [
        brief(key)[1:-1] if type(key) is str else str(key) for key in [*unused, *no_tensors]
    ]
    if not state:
        raise CheckpointError(
            f"this file holds no tensors, but {', '.join(left_out[:LISTED]) or 'nothing'}"
        )
    if len(left_out) > LISTED:
        left_out = [*left_out[:LISTED], "…"]
    return state, left_out


def _has_tensors(value: Any) -> bool:
    return type(value) is Pairs and any(type(inner) is View for _, inner in value)


def _read_views(
    file: BinaryIO, records: dict[str, _Record], state: dict[str, View], views: list[View]
) -> dict[str, Tensor]:
    """The tensors of `state`, after checking all `views` of the file against their storages."""
    names = {view: brief(name) for name, view in state.items()}
    for view in views:
        name = names.get(view, f"the tensor of data.pkl, byte {view.offset_in_pickle},")
        _check_view(name, view, records)
    storages: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, view in state.items():
        key = view.storage.key
        if key not in storages:
            storages[key] = _read_storage(file, records[f"data/{key}"], view.storage)
        tensors[name] = _tensor(storages[key], view)
    return tensors


def _check_view(name: str, view: View, records: dict[str, _Record]) -> None:
    """Raise unless the elements that a view shows are inside its storage, and that in the file."""
    storage = view.storage
    record = records.get(f"data/{storage.key}")
    if record is None:
        raise CheckpointError(f"{name} refers to data/{storage.key}, which does not exist")
    if storage.count * storage.dtype.itemsize != record.size:
        raise CheckpointError(
            f"byte {record.start}: {name} is in {record.name} of {record.size} bytes, not of "
            f"{storage.count} {storage.dtype}"
        )
    numbers = (view.offset, *view.shape, *view.stride)
    if min(numbers) < 0:
        raise CheckpointError(f"{name} has {_geometry(view)}, which are no counts")
    count = math.prod(view.shape)
    reaches = ((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    # The last element's index. The stride of a size of 1 is not used, nor any if a size is 0, so
    # these may be anything that torch can hold.
    if max(numbers) >= 1 << 63 or (count and view.offset + sum(reaches) >= storage.count):
        raise CheckpointError(f"{name} has {_geometry(view)}, beyond its {storage.count} elements")
    # An expanded tensor (stride 0) would let a small file ask for any amount of memory.
    if count > storage.count:
        raise CheckpointError(
            f"{name} shows its {storage.count} elements as {count}; save .contiguous() of it"
        )


def _geometry(view: View) -> str:
    return f"the shape {view.shape} with steps of {view.stride} from {view.offset}"


def _read_storage(file: BinaryIO, record: _Record, storage: Storage) -> Tensor:
    data = read_bytes(file, record.start, record.size, record.name)
    _check(record, zlib.crc32(data.numpy()))  # pyright: ignore
    return data.view(storage.dtype)


def _tensor(storage: Tensor, view: View) -> Tensor:
    if not math.prod(view.shape):
        return torch.empty(view.shape, dtype=storage.dtype)
    return storage.as_strided(view.shape, view.stride, view.offset)
