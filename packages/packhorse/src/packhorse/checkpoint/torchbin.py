"""torch's `.bin`, `.pt` and `.pth`: a zip archive of a pickle and of the storages it speaks of.

Nothing in such a file is run. The archive's directory is read here: records are stored, not
compressed, lie apart and inside the file, and have the checksum that was written. The pickle goes
through `pickled`, which only describes tensors; each description is checked against its storage
before anything is allocated, and storages are read straight into the memory that their tensors
share, as tied weights do. Optimizers and counters in the file are left where they are.

The archive is the part of PKWARE's APPNOTE that torch writes: one prefix, no comment, nothing
encrypted, ZIP64 where sizes ask for it. What is accepted is a part of what torch's own
`weights_only` accepts, and then the same tensors; there is no way from here to torch.load.
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

ZIP, PICKLE, TAR = b"PK\x03\x04", b"\x80", b"ustar"
TAR_AT = 257  # where a tar archive says what it is
TAR_FIRST = (b"sys_info", b"storages", b"tensors\0", b"pickle\0\0")  # a member of torch's
PICKLE_LIMIT = 8 << 20  # bytes; that of ten thousand tensors has 1 MB
SMALL = 4096  # bytes of a record that is no storage
RECORD_LIMIT = pickled.TENSOR_LIMIT + 100
DIRECTORY_LIMIT = 4 << 20  # bytes
VERSIONS = tuple(b"%d" % n for n in range(1, 11))  # of the archive; torch writes 3
WRAPPERS = ("model", "state_dict", "model_state_dict", "module")  # what training scripts use
TORCHSCRIPT = (
    "this is a TorchScript program, which is not run; save its tensors: "
    "torch.save(torch.jit.load(…).state_dict(), …)"
)

END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
CENTRAL = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")
ZIP64, LARGE = 1, 0xFFFFFFFF  # the extra field, and the number that refers to it
STREAMED, UTF8, FOLDER = 1 << 3, 1 << 11, 1 << 4


@dataclass(frozen=True, slots=True)
class _Record:
    """One member of the archive; its name is without the prefix that all share."""

    name: str
    begin: int  # its header
    start: int  # its bytes
    size: int
    crc: int  # 0: its writer computed none


def looks_like(start: bytes) -> bool:
    """Whether a file with these first 512 bytes is one of torch's, of today or from before."""
    old = start[:1] == PICKLE and start[1:2] in (b"\2", b"\3", b"\4", b"\5")
    return start.startswith(ZIP) or old or (start[TAR_AT:262] == TAR and start[:8] in TAR_FIRST)


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of one torch file."""
    return read(folder, name)[0]


def read(folder: Path, name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of one torch file, and notes on what else is in it."""
    with files.open_file(folder, name) as file:
        try:
            _refuse_old(file)
            records = _read_directory(file)
            root, views = pickled.read(_read_pickle(file, records))
            state, rest = _state(root)
            tensors = _read_views(file, records, state, views)
        except CheckpointError as error:
            raise CheckpointError(f"{folder / name}: {error}") from error.__cause__
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    return tensors, (f"{name}: left out {', '.join(rest)}",) if rest else ()


def _refuse_old(file: BinaryIO) -> None:
    start = file.read(TAR_AT + len(TAR))
    if start.startswith(PICKLE):
        # The file's own name stays out of the command: it could hold one for the shell.
        raise CheckpointError(
            "this is a pickle as torch wrote them before 1.6, which is not read; write it anew: "
            "python -c \"import torch; torch.save(torch.load('OLD.bin', weights_only=True, "
            "map_location='cpu'), 'NEW.bin')\""
        )
    if start[TAR_AT:] == TAR:
        raise CheckpointError(
            "this is a tar archive as torch wrote them in 2016, which only torch.load without "
            "protection reads; if you trust it, load it on a machine without secrets and save its "
            "tensors anew"
        )
    if not start.startswith(ZIP):
        raise CheckpointError("this is no torch file: it is not a zip archive")


def _read_directory(file: BinaryIO) -> dict[str, _Record]:
    """Every record by name."""
    place, size, count = _find_directory(file)
    text = _at(file, place, size)
    records, offset = [], 0
    for _ in range(count):
        record, length = _parse_record(text, offset, place + offset)
        records.append(_locate(file, *record, end=place))
        offset += length
    if offset != size:
        raise CheckpointError(f"byte {place + offset}: the directory has other records than said")
    records.sort(key=lambda record: record.begin)
    for one, two in pairwise(records):
        if one.start + one.size > two.begin:
            raise CheckpointError(f"byte {two.begin}: {two.name} lies on {one.name}")
    return _named(records)


def _find_directory(file: BinaryIO) -> tuple[int, int, int]:
    """Place, size and count of the directory, which lies before the archive's last bytes."""
    end = os.fstat(file.fileno()).st_size - END.size
    mark, *disks, here, count, size, place, comment = END.unpack(_at(file, end, END.size))
    if mark != b"PK\x05\x06" or comment or any(disks) or here != count:
        raise CheckpointError(f"byte {end}: no zip directory ends here; the file is truncated")
    locator = _at(file, end - LOCATOR.size, LOCATOR.size)
    if locator.startswith(b"PK\x06\x07"):
        end -= LOCATOR.size + END64.size
        if LOCATOR.unpack(locator)[1:] != (0, end, 1):
            raise CheckpointError(f"byte {end}: the zip directory does not end where it says")
        small, (count, size, place) = (count, size, place), _find_large(file, end)
        # The small numbers are cut off where the large ones do not fit them.
        if small != (min(count, 0xFFFF), min(size, LARGE), min(place, LARGE)):
            raise CheckpointError(f"byte {end}: the zip directory is described in two ways")
    if place + size != end:
        raise CheckpointError(f"byte {end}: the zip directory does not end here")
    if count > RECORD_LIMIT or size > DIRECTORY_LIMIT:
        raise CheckpointError(f"{count} records, described in {size} bytes, are too many")
    return place, size, count


def _find_large(file: BinaryIO, end: int) -> tuple[int, int, int]:
    """Count, size and place of a ZIP64 directory."""
    fields = END64.unpack(_at(file, end, END64.size))
    mark, length, _, _, *disks, here, count, size, place = fields
    if mark != b"PK\x06\x06" or length != END64.size - 12 or any(disks) or here != count:
        raise CheckpointError(f"byte {end}: no ZIP64 directory ends here")
    return count, size, place


def _parse_record(text: bytes, offset: int, place: int) -> tuple[tuple[Any, ...], int]:
    """Name, flags, header's place, size and checksum of a directory's entry; the entry's length."""
    if len(text) - offset < CENTRAL.size:
        raise CheckpointError(f"byte {place}: the zip directory is truncated")
    fields = CENTRAL.unpack_from(text, offset)
    mark, _, _, flags, method, _, _, crc, packed, size, names, extras, notes = fields[:13]
    disk, _, attributes, begin = fields[13:]
    start = offset + CENTRAL.size
    name, extra = text[start : start + names], text[start + names : start + names + extras]
    length = CENTRAL.size + names + extras + notes
    if mark != b"PK\x01\x02" or offset + length > len(text) or disk or attributes & FOLDER:
        raise CheckpointError(f"byte {place}: this is no record of a zip directory")
    if method and b"/code/" in name:
        raise CheckpointError(TORCHSCRIPT)
    if method or flags & ~(STREAMED | UTF8):
        raise CheckpointError(
            f"byte {place}: {_text(name)} is compressed or encrypted, which torch never does; "
            f"unpack the file and save its tensors with torch.save"
        )
    size, packed, begin = _large(extra, place, size, packed, begin)
    if size != packed:
        raise CheckpointError(f"byte {place}: {_text(name)} has {size} bytes in {packed}")
    return (name, flags, begin, size, crc), length


def _large(extra: bytes, place: int, *numbers: int) -> list[int]:
    """The numbers, those that do not fit their 4 bytes taken from the ZIP64 field."""
    field, at = b"", 0
    while LARGE in numbers and len(extra) - at >= 4 and not field:
        kind, length = struct.unpack_from("<2H", extra, at)
        field = extra[at + 4 : at + 4 + length] if kind == ZIP64 else b""
        at += 4 + length
    found = []
    for number in numbers:
        if number == LARGE:
            if len(field) < 8:
                raise CheckpointError(f"byte {place}: a record's size or place is missing")
            number, field = int.from_bytes(field[:8], "little"), field[8:]
        found.append(number)
    return found


def _locate(
    file: BinaryIO, name: bytes, flags: int, begin: int, size: int, crc: int, end: int
) -> _Record:
    """The record that a header describes as its directory's entry does."""
    if begin + LOCAL.size > end:
        raise CheckpointError(f"{_text(name)} begins at byte {begin}, outside the records")
    header = LOCAL.unpack(_at(file, begin, LOCAL.size))
    mark, _, here, method, _, _, _, packed, whole, names, extras = header
    start = begin + LOCAL.size + names + extras
    same = _at(file, begin + LOCAL.size, min(names, len(name) + 1)) == name
    # torch streams: what it does not know when it writes a header follows the bytes.
    sizes = (0, size, LARGE) if flags & STREAMED else (size, LARGE)
    if mark != ZIP or method or here != flags or not same or {packed, whole} - set(sizes):
        raise CheckpointError(f"byte {begin}: the header of {_text(name)} says something else")
    if start + size > end:
        raise CheckpointError(
            f"byte {start}: {_text(name)} has {size} bytes, {end - start} are left"
        )
    return _Record(_text(name), begin, start, size, crc)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _named(records: list[_Record]) -> dict[str, _Record]:
    """The records by what follows their common prefix; names are safe and none is there twice."""
    prefix = records[0].name.partition("/")[0] if records else ""
    found: dict[str, _Record] = {}
    seen: set[str] = set()
    for record in records:
        first, _, name = record.name.partition("/")
        parts = record.name.split("/")
        if first != prefix or not {"", ".", ".."}.isdisjoint(parts) or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"byte {record.begin}: {brief(record.name)} is not the name of a record of {prefix}"
            )
        if name.lower() in seen:  # torch looks names up without regard to case
            raise CheckpointError(f"byte {record.begin}: {brief(record.name)} is there twice")
        seen.add(name.lower())
        found[name] = record
    return found


def _read_pickle(file: BinaryIO, records: dict[str, _Record]) -> bytes:
    """The pickle, once the records around it say that it can be understood."""
    if "constants.pkl" in records:
        raise CheckpointError(TORCHSCRIPT)
    for name, record in records.items():
        if record.size <= SMALL and not name.startswith("data/"):
            _read_small(file, records, name, SMALL)
    pickles = [name for name in records if name.split("/")[-1] == "data.pkl"]
    if pickles != ["data.pkl"]:
        raise CheckpointError(f"this is no torch file: {len(pickles)} records are a data.pkl")
    version = _read_small(file, records, "version", SMALL).strip()
    if version not in VERSIONS:
        raise CheckpointError(f"the archive's version {brief(_text(version))} is unknown")
    order = _read_small(file, records, "byteorder", SMALL) if "byteorder" in records else b"little"
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


def _at(file: BinaryIO, place: int, size: int) -> bytes:
    if place < 0:
        raise CheckpointError("the file is truncated")
    file.seek(place)
    data = file.read(size)
    if len(data) != size:
        raise CheckpointError(f"byte {place}: the file ends before {size} more bytes")
    return data


def _state(root: Any) -> tuple[dict[str, View], list[str]]:
    """The dictionary of tensors in what was saved, and the names of all else."""
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
    # By identity: to compare a stranger's structures could take for ever.
    rest = [key for key, value in root if wrapped and value is not chosen]
    others = [name for name, value in chosen if type(value) is not View]
    texts = {name for name in others if type(name) is str}
    state: dict[str, View] = {}
    for name, value in chosen:
        if type(value) is not View:
            continue
        if type(name) is not str or not name.isprintable():
            raise CheckpointError(f"data.pkl, byte {value.place}: the tensor's name is no text")
        if name in state or name in texts:
            raise CheckpointError(f"data.pkl, byte {value.place}: {brief(name)} is there twice")
        state[name] = value
    left = [brief(key)[1:-1] if type(key) is str else str(key) for key in (*rest, *others)]
    if not state:
        raise CheckpointError(
            f"this file holds no tensors, but {', '.join(left[:20]) or 'nothing'}"
        )
    return state, [*left[:20], *(["…"] if len(left) > 20 else [])]


def _has_tensors(value: Any) -> bool:
    return type(value) is Pairs and any(type(inner) is View for _, inner in value)


def _read_views(
    file: BinaryIO, records: dict[str, _Record], state: dict[str, View], views: list[View]
) -> dict[str, Tensor]:
    """The tensors, once all that the file describes are found possible."""
    names = {view: brief(name) for name, view in state.items()}
    for view in views:
        name = names.get(view, f"the tensor of data.pkl, byte {view.place},")
        _refuse_impossible(name, view, records)
    storages: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, view in state.items():
        key = view.storage.key
        if key not in storages:
            storages[key] = _read_storage(file, records[f"data/{key}"], view.storage)
        tensors[name] = _tensor(storages[key], view)
    return tensors


def _refuse_impossible(name: str, view: View, records: dict[str, _Record]) -> None:
    storage, record = view.storage, records.get(f"data/{view.storage.key}")
    if record is None:
        raise CheckpointError(f"{name} lies in data/{storage.key}, which is not there")
    if storage.count * storage.dtype.itemsize != record.size:
        raise CheckpointError(
            f"byte {record.start}: {name} lies in {record.name} of {record.size} bytes, not of "
            f"{storage.count} {storage.dtype}"
        )
    numbers = (view.offset, *view.shape, *view.stride)
    if min(numbers) < 0:
        raise CheckpointError(f"{name} has {_geometry(view)}, which are no counts")
    count = math.prod(view.shape)
    steps = ((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    # Where a size is 1 its step can be anything that torch can hold; where one is 0, all can.
    if max(numbers) >= 1 << 63 or (count and view.offset + sum(steps) >= storage.count):
        raise CheckpointError(f"{name} has {_geometry(view)}, beyond its {storage.count} elements")
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
