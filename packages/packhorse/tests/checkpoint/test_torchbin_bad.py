"""torch files that lie, attack or are damaged: one error, or what torch itself would read."""

from __future__ import annotations

import io
import pickle
import random
import re
import struct
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.checkpoint import pickled, torchbin
from packhorse.checkpoint.safetensors import read_bytes
from packhorse.errors import CheckpointError

# ---- an archive, as wrong as need be -------------------------------------------------------------


@dataclass
class Record:
    """A member of an archive; `says` overrules what is said of it, `begin` also where it lies."""

    name: str
    data: bytes = b""
    says: dict[str, Any] = field(default_factory=dict)


def header(name: bytes, *numbers: int) -> bytes:
    return struct.pack("<4s3H4x3L2H", b"PK\3\4", 0, *numbers, len(name), 0) + name


def archive(records: list[Record], **end: Any) -> bytes:
    """A zip archive; `end` overrules its last bytes, `zip64` adds the large form of them."""
    content, directory = bytearray(), bytearray()
    for record in records:
        settings = {
            "flags": 0,
            "method": 0,
            "crc": zlib.crc32(record.data),
            "size": len(record.data),
            "begin": len(content),
            "attributes": 0,
            "extra": b"",
        } | record.says
        settings.setdefault("packed", settings["size"])
        name = record.name.encode("utf-8", "surrogateescape")
        local = settings.get("local", name)
        numbers = (settings["crc"], settings["packed"], settings["size"])
        kinds = (settings["flags"], settings["method"])
        if "begin" not in record.says:
            content += header(local, *kinds, *numbers) + record.data
        lengths = (len(name), len(settings["extra"]), 0, 0, 0)
        directory += struct.pack("<4s6H3L", b"PK\1\2", 0, 0, *kinds, 0, 0, *numbers)
        directory += struct.pack("<5H2L", *lengths, settings["attributes"], settings["begin"])
        directory += name + settings["extra"]
    place = end.get("place", len(content))
    count, size = end.get("count", len(records)), end.get("size", len(directory))
    content += directory
    if "zip64" in end:
        large = {"count": count, "size": size, "place": place, "at": len(content)} | end["zip64"]
        content += struct.pack("<4sQ2H2L", b"PK\6\6", 44, 45, 45, 0, large.get("disk", 0))
        content += struct.pack(
            "<4Q", large["count"], *(large[k] for k in ("count", "size", "place"))
        )
        content += struct.pack("<4sLQL", b"PK\6\7", 0, large["at"], 1)
    comment = end.get("comment", b"")
    numbers = (0, 0, count, count, size, place, len(comment))
    return bytes(content) + struct.pack("<4s4H2LH", b"PK\5\6", *numbers) + comment


def torch_file(program: bytes, *storages: bytes, **records: bytes) -> bytes:
    """What torch.save would write around a pickle and its storages."""
    entries = {"data.pkl": program, "byteorder": b"little"}
    entries |= {f"data/{n}": storage for n, storage in enumerate(storages)} | {"version": b"3\n"}
    return archive([Record(f"x/{name}", data) for name, data in (entries | records).items()])


# ---- a pickle, as wrong as need be ---------------------------------------------------------------


def op(value: Any) -> bytes:
    """The operations that push a number or a text."""
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return b"(" + b"".join(map(op, value)) + b"t"
    return pickle.dumps(value, 2)[2:-1]


ORDERED = b"ccollections\nOrderedDict\n)R"


def storage(count: Any = 4, key: Any = "0", kind: bytes = b"torch\nFloatStorage") -> bytes:
    return b"(" + op("storage") + b"c" + kind + b"\n" + op(key) + op("cpu") + op(count) + b"tQ"


def tensor(
    shape: Any = (4,),
    stride: Any = (1,),
    offset: Any = 0,
    rest: bytes = b"\x89" + ORDERED,
    **of: Any,
) -> bytes:
    """The operations that make a tensor, by default of 4 floats."""
    numbers = op(offset) + op(shape) + op(stride)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(**of) + numbers + rest + b"tR"


def program(body: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def state(*values: bytes, **named: bytes) -> bytes:
    """A state dict of the tensors `a`, `b`, …, or of those named."""
    items = dict(zip("abcdefgh", values, strict=False)) | named
    return program(b"}(" + b"".join(op(name) + value for name, value in items.items()) + b"u")


FLOATS = torch.tensor([0.5, -1.0, 2.0, 3e-5])
FOUR = FLOATS.numpy().tobytes()


def holding(*values: bytes, **named: bytes) -> bytes:
    return torch_file(state(*values, **named), FOUR)


def calling(name: bytes, arguments: bytes = b")") -> bytes:
    """A file that calls a name of Python, if it is let."""
    return holding(b"c" + name + b"\n" + arguments + b"R")


def deflated() -> bytes:
    """Two gigabytes of zeros, were they unpacked."""
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = packed.compress(bytes(1 << 20)) + packed.flush()
    says = {"method": 8, "size": 2 << 30, "packed": len(data)}
    return archive([Record("x/data.pkl", data, says), Record("x/version", b"3\n")])


def tar() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as file:
        file.addfile(tarfile.TarInfo("sys_info"))
    return target.getvalue()


def legacy() -> bytes:
    target = io.BytesIO()
    torch.save({"a": FLOATS}, target, _use_new_zipfile_serialization=False)
    return target.getvalue()


def saved(value: Callable[[], Any], protocol: int = 2) -> Callable[[], bytes]:
    """What torch.save writes, when it is asked for."""

    def save() -> bytes:
        target = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that quantization moves elsewhere
            torch.save(value(), target, pickle_protocol=protocol)
        return target.getvalue()

    return save


def records(**changes: Record) -> bytes:
    """A good archive with some of its records changed, more records after it."""
    good = {
        "pickle": Record("x/data.pkl", state(tensor())),
        "data": Record("x/data/0", FOUR),
        "version": Record("x/version", b"3\n"),
    }
    return archive(list((good | changes).values()))


def pickle_record(**says: Any) -> Record:
    return Record("x/data.pkl", state(tensor()), says)


def floats(**says: Any) -> Record:
    return Record("x/data/0", FOUR, says)


GOOD = holding(tensor())
GOOD_RECORDS = [pickle_record(), Record("x/version", b"3\n")]
NEST = Record("x/nest", header(b"x/data/0", 0, 0, zlib.crc32(FOUR), 16, 16) + FOUR)
MARKER = "packhorse-was-here"
LARGE = 0xFFFFFFFF
EXTRA = b"\7\0\0\0" * 16_000
MANY_MODELS = (op("model") + b"h\0") * 80_000
DEEP = b"]" * 100_000 + b"a" * 99_999
BAD: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    # Code.
    "os.system": (
        calling(b"os\nsystem", op((f"touch {MARKER}",))),
        r"byte \d+, GLOBAL, after 'a': 'os\.system' stands for Python code, which is never run",
    ),
    "eval": (calling(b"builtins\neval", op((f"open('{MARKER}', 'w')",))), r"'builtins\.eval'"),
    "eval of Python 2": (calling(b"__builtin__\neval"), r"'__builtin__\.eval'"),
    "torch's own loader": (calling(b"torch\nload", op(("x.bin",))), r"'torch\.load'"),
    "torch's import by name": (
        calling(b"torch._utils\n_import_dotted_name", op(("os.system",))),
        "_import_dotted_name' stands for Python code",
    ),
    "an attribute of a module": (calling(b"torch._utils\n_rebuild_tensor_v2.__globals__"), "GLOB"),
    "a name with a blank": (calling(b"collections OrderedDict\n"), "GLOBAL"),
    "a name that is no text": (calling(b"\xff\n\xff"), r"'\\\\xff\.\\\\xff' stands"),
    "a name from the stack": (
        torch_file(program(op("os") + op("system") + b"\x93" + op(("true",)) + b"R", 4)),
        r"STACK_GLOBAL: 'os\.system'",
    ),
    "a name of numbers": (torch_file(program(op(1) + op(2) + b"\x93", 4)), "STACK_GLOBAL.*no mod"),
    "INST": (torch_file(program(b"(" + op("true") + b"ios\nsystem\n")), "byte 12, INST"),
    "OBJ": (torch_file(program(b"(ctorch\nFloatStorage\no")), "byte 23, OBJ"),
    "NEWOBJ": (torch_file(program(b"ctorch\nFloatStorage\n)\x81")), "byte 23, NEWOBJ"),
    "NEWOBJ_EX": (torch_file(program(b"ctorch\nFloatStorage\n)}\x92", 4)), "NEWOBJ_EX"),
    "EXT1": (torch_file(program(b"\x82\x01")), "byte 2, EXT1"),
    "EXT4": (torch_file(program(b"\x84\x01\0\0\0")), "byte 2, EXT4"),
    "PERSID": (torch_file(program(b"P0\n")), "byte 2, PERSID"),
    "an out-of-band buffer": (torch_file(program(b"\x97", 5)), "NEXT_BUFFER"),
    "BUILD on a tensor": (holding(tensor() + b"}b"), "BUILD.*works on a tensor"),
    "BUILD on a dictionary": (torch_file(program(b"}}b")), "BUILD.*sets attributes"),
    "BUILD of other attributes": (
        torch_file(program(ORDERED + b"}" + op("keys") + b"Nsb")),
        "BUILD.*sets attributes",
    ),
    "BUILD of slots": (torch_file(program(ORDERED + b"N}\x86b")), "BUILD.*sets attributes"),
    "a call of a kind": (calling(b"torch\nFloatStorage"), "REDUCE.*a name is called"),
    "a call of a text": (holding(op("eval") + b")R"), "REDUCE, after 'a': a str is called"),
    "a call with a list": (calling(b"collections\nOrderedDict", b"]"), "called with a list"),
    "an OrderedDict of pairs": (calling(b"collections\nOrderedDict", b"]\x85"), "is created with"),
    "a module": (
        saved(lambda: torch.nn.Linear(2, 2)),
        r"modules\.linear\.Linear' stands",
    ),
    "a set": (saved(lambda: {"a": FLOATS, "b": {1}}), r"'\w+\.set' stands"),
    # Bombs.
    "a memo far away": (torch_file(program(b"Nr\xff\xff\xff\xff")), "LONG_BINPUT: memo 4294967295"),
    "a memo never written": (torch_file(program(b"h\x05")), "BINGET: memo 5 is empty"),
    "a memo that grows": (
        torch_file(program(b"]q\0" + b"(h\0h\0h\0h\0tq\0" * 100_000)),
        "more than 500000 operations",
    ),
    "a million laughs": (torch_file(program(b"N" * 7_000_000)), "more than 500000 operations"),
    "deep": (torch_file(program(DEEP)), "holds no dictionary"),
    "deep keys": (torch_file(program(b"}N" + b"\x85" * 90_000 + b"Ns")), "a tuple is a key"),
    "a long shape many times": (
        torch_file(
            program(b"(" + b"N" * 100_000 + b"tq\0(" + tensor().replace(op((4,)), b"h\0") * 9_000),
            FOUR,
        ),
        "100000 dimensions and 1 steps",
    ),
    "a long model many times": (
        torch_file(state(x=b"}q\0(" + b"NN" * 80_000 + b"u", model=b"h\0" + MANY_MODELS)),
        "several models called model",
    ),
    "many extra fields": (
        archive([Record(f"x/{n}", says={"size": LARGE, "extra": EXTRA}) for n in range(60)]),
        "size or place is missing",
    ),
    "a pickle without end": (torch_file(b"N" * (9 << 20)), "9437184 bytes, more than 8388608"),
    "many tensors": (
        torch_file(program(b"](" + tensor() + b"q\0" * 1 + tensor() * 10_000 + b"e"), FOUR),
        "more than 10000 tensors",
    ),
    "many records": (
        archive([Record(f"x/{n}") for n in range(10_200)]),
        "10200 records, described in .* are too many",
    ),
    "an endless text": (
        torch_file(program(b"X\xff\xff\xff\xff")),
        "BINUNICODE: the pickle ends",
    ),
    "an endless line": (
        torch_file(program(b"c" + b"9" * 5_000)),
        "GLOBAL: the pickle ends",
    ),
    "a name in escapes": (calling(b"collections\nOrdered\\x44ict"), r"Ordered\\\\x44ict' stands"),
    # Programs that go wrong.
    "no protocol": (torch_file(b"}."), "byte 0, EMPTY_DICT"),
    "protocol 1": (torch_file(program(b"}", 1)), "protocol 1 is unknown"),
    "protocol 9": (torch_file(program(b"}", 9)), "protocol 9 is unknown"),
    "a frame too long": (
        torch_file(program(b"\x95" + struct.pack("<Q", 1 << 62) + b"}", 4)),
        "FRAME: a frame of 4611686018427387904 bytes does not fit here",
    ),
    "a frame in a frame": (
        torch_file(program((b"\x95" + struct.pack("<Q", 9)) * 2 + b"}", 4)),
        "FRAME: a frame of 9 bytes does not fit here",
    ),
    "a frame too short": (
        torch_file(program(b"\x95" + struct.pack("<Q", 3) + op("a"), 4)),
        "BINUNICODE, after 'a': it crosses the end of its frame, byte 14",
    ),
    "two protocols": (torch_file(program(b"\x80\x02}")), "byte 2, PROTO"),
    "no end": (torch_file(program(b"}")[:-1]), "byte 2, EMPTY_DICT: the pickle ends"),
    "an early end": (torch_file(program(b"}.}")), "goes on after its end"),
    "nothing": (torch_file(program(b"")), "leaves not one value"),
    "two values": (torch_file(program(b"}}")), "leaves not one value"),
    "a mark left over": (torch_file(program(b"}(")), "leaves not one value"),
    "no pickle": (torch_file(b"\xff" * 9), "byte 0, 0xff: this operation"),
    "SETITEM on a tensor": (holding(tensor() + op("x") + b"Ns"), "SETITEM, .*works on a tensor"),
    "SETITEMS on a list": (torch_file(program(b"](NNu")), "SETITEMS: it works on a list"),
    "SETITEM on nothing": (torch_file(program(b"NNs")), "SETITEM: it pops more"),
    "SETITEMS of three": (torch_file(program(b"}(NNNu")), "a key has no value"),
    "APPEND on a dictionary": (torch_file(program(b"}Na")), "APPEND: it works on a dictionary"),
    "APPENDS on a tuple": (torch_file(program(b")(NNe")), "APPENDS: it works on a tuple"),
    "a tuple of what is not there": (torch_file(program(b"N\x86")), "TUPLE2: it pops more"),
    "a tuple across a mark": (torch_file(program(b"N(N\x86")), "TUPLE2: it pops more"),
    "no mark": (torch_file(program(b"Nt")), "TUPLE: there is no mark"),
    "a list as key": (torch_file(program(b"}]Ns")), "SETITEM: a list is a key"),
    # Tensors.
    "storage too small": (holding(tensor(count=5)), r"'a' is in x/data/0 of 16 bytes, not of 5"),
    "storage too large": (holding(tensor((2,), count=2)), "'a' is in x/data/0 of 16 bytes"),
    "storage of another dtype": (holding(tensor(kind=b"torch\nLongStorage")), "not of 4 torch.int"),
    "storage in two ways": (
        holding(tensor(), tensor((2,), kind=b"torch\nDoubleStorage", count=2)),
        "storage 0 is described in two ways",
    ),
    "no storage": (holding(tensor(key="7")), "'a' refers to data/7, which does not exist"),
    "storage elsewhere": (holding(tensor(key="../version")), "BINPERSID.*is no storage"),
    "storage by number": (holding(tensor(key=0)), "describes no storage"),
    "storage of -4": (holding(tensor(count=-4)), "of -4 elements is no storage"),
    "storage of True": (holding(tensor(count=True)), "describes no storage"),
    "a persistent text": (holding(op("0") + b"Q"), "describes no storage"),
    "something persistent": (
        holding(storage().replace(op("storage"), op("module"))),
        "'module' '0' of 4 elements is no storage",
    ),
    "negative stride": (holding(tensor(stride=(-1,), offset=3)), r"'a' .* steps of \(-1,\) .*no c"),
    "negative shape": (holding(tensor(shape=(-4,))), "'a' .* no counts"),
    "negative offset": (holding(tensor(offset=-1)), "'a' .* from -1, which are no counts"),
    "offset past the storage": (holding(tensor((1,), offset=4)), "'a' .* beyond its 4 elements"),
    "stride past the storage": (holding(tensor((2, 2), (3, 1))), "'a' .* beyond its 4 elements"),
    "huge shape of nothing": (holding(tensor((10**12,), (0,))), "'a' shows its 4 elements as 10"),
    "huge shape of much": (holding(tensor((1 << 40, 1 << 40), (0, 0))), "'a' shows its 4"),
    "numbers past 64 bits": (holding(tensor((1,), (1 << 63,))), "'a' .* beyond its 4"),
    "numbers past 600 bits": (holding(tensor((1, 0), (1 << 600, 1))), "'a' .* beyond its 4"),
    "strides of another rank": (holding(tensor((2, 2), (1,))), "'a': .*2 dimensions and 1 steps"),
    "nine dimensions": (holding(tensor((1,) * 9, (1,) * 9)), "9 dimensions"),
    "shape of floats": (holding(tensor(shape=(4.0,))), "has numbers that are no integers"),
    "shape is no tuple": (holding(tensor(shape=4)), "describes no tensor"),
    "shape of truths": (holding(tensor(shape=(True,))), "has numbers that are no integers"),
    "hooks": (
        holding(tensor(rest=b"\x89" + ORDERED + op("x") + b"Ns")),
        "tensor with hooks",
    ),
    "integers that are trained": (
        holding(tensor((2,), count=2, kind=b"torch\nLongStorage", rest=b"\x88" + ORDERED)),
        "integers that are trained",
    ),
    "a negated tensor": (
        saved(lambda: {"a": torch.ones(2).to(torch.cfloat).conj().imag}),
        "negated",
    ),
    "a parameter of a text": (
        holding(b"ctorch._utils\n_rebuild_parameter\n(" + op("x") + b"\x89" + ORDERED + b"tR"),
        "describes no parameter",
    ),
    "complex": (
        saved(lambda: {"a": torch.ones(2, dtype=torch.cfloat)}),
        "'a': .*complex numb",
    ),
    "sparse": (saved(lambda: {"a": torch.eye(2).to_sparse()}), "after 'a': .*a sparse tensor"),
    "quantized": (
        saved(lambda: {"a": torch.quantize_per_tensor(FLOATS, 0.1, 0, torch.qint8)}),
        "after 'a': .*a quantized tensor",
    ),
    "float8": (saved(lambda: {"a": FLOATS.to(torch.float8_e4m3fn)}), "after 'a': .*float8"),
    "an unsigned tensor": (saved(lambda: {"a": FLOATS.to(torch.uint16)}), "after 'a': .*unsigned"),
    "no values": (saved(lambda: {"a": torch.ones(2, device="meta")}), "without values"),
    "an expanded tensor": (
        saved(lambda: {"a": torch.ones(1).expand(9)}),
        r"'a' .*save \.contiguous\(\)",
    ),
    # Dictionaries.
    "a tensor alone": (saved(lambda: FLOATS), "no dictionary of tensors"),
    "a list of tensors": (saved(lambda: [FLOATS]), "no dictionary of tensors"),
    "no tensors": (saved(lambda: {"epoch": 3, "lr": 0.1}), "no tensors, but epoch, lr"),
    "an empty dictionary": (saved(dict), "no tensors, but nothing"),
    "two models": (
        saved(lambda: {"model": {"a": FLOATS}, "module": {"a": FLOATS}}),
        "several models, mod",
    ),
    "a number as name": (saved(lambda: {1: FLOATS}), r"byte \d+: the tensor's name is no text"),
    "a name of surrogates": (
        torch_file(program(b"}X\3\0\0\0\xed\xa0\x80" + tensor() + b"s"), FOUR),
        "BINUNICODE: the text is not UTF-8",
    ),
    "one name twice": (
        torch_file(program(b"}(" + (op("a") + tensor()) * 2 + b"u"), FOUR),
        r"byte \d+: 'a' is there twice",
    ),
    "one name twice, at last no tensor": (
        torch_file(program(b"}(" + op("a") + tensor() + op("a") + b"\x89u"), FOUR),
        r"byte \d+: 'a' is there twice",
    ),
    # Archives.
    "empty": (b"", "not a zip archive"),
    "legacy pickle": (
        legacy,
        r"before 1\.6.*torch\.load\('OLD\.bin', weights_only=True",
    ),
    "legacy tar": (tar(), "tar archive as torch wrote them in 2016"),
    "text": (b"hello, world " * 99, "not a zip archive"),
    "DEFLATE bomb": (deflated(), r"byte \d+: x/data\.pkl is compressed or encrypted"),
    "encrypted": (records(data=floats(flags=1)), "x/data/0 is compressed or encrypted"),
    "patched": (records(data=floats(flags=1 << 5)), "x/data/0 is compressed or encrypted"),
    "overlap": (
        archive([NEST, *GOOD_RECORDS, floats(begin=len(header(b"x/nest", *[0] * 5)))]),
        r"byte 36: x/data/0 overlaps x/nest",
    ),
    "overlap of two headers": (
        records(data=floats(begin=0)),
        "header of x/data/0 differs from the directory",
    ),
    "overlap of all": (
        records(data=Record("x/data/0", FOUR), more=Record("x/data/1", FOUR, {"begin": 0})),
        "header of x/data/1 differs from the directory",
    ),
    "a name twice": (records(more=floats()), "'x/data/0' is there twice"),
    "a name in two cases": (records(more=Record("x/DATA/0", FOUR)), "'x/DATA/0' is there twice"),
    "two pickles": (records(more=pickle_record()), r"'x/data\.pkl' is there twice"),
    "two pickles in folders": (
        records(more=Record("x/y/data.pkl", state(tensor()))),
        r"2 records are a data\.pkl",
    ),
    "two models in folders": (records(more=Record("y/data.pkl", b"")), "not the name of a rec"),
    "no data.pkl": (archive([Record("x/version", b"3\n")]), r"0 records are a data\.pkl"),
    "no records": (archive([]), "not a zip archive"),
    "no version": (archive([pickle_record(), floats()]), "no record version"),
    "version 11": (records(version=Record("x/version", b"11\n")), "version '11' is unknown"),
    "version of words": (records(version=Record("x/version", b"three")), "version 'three' is"),
    "big endian": (
        torch_file(state(tensor()), FOUR, byteorder=b"big"),
        "order is 'big'; load",
    ),
    "middle endian": (torch_file(state(tensor()), FOUR, byteorder=b"pdp"), "order is 'pdp'"),
    "a TorchScript program": (records(more=Record("x/constants.pkl", b"")), "TorchScript program"),
    "up": (records(more=Record("x/../../y", b"")), "is not the name of a record"),
    "up first": (records(pickle=Record("../data.pkl", b"")), "is not the name of a record"),
    "absolute": (records(more=Record("/etc/passwd", b"")), "is not the name of a record"),
    "backslash": (records(more=Record("x/..\\y", b"")), "is not the name of a record"),
    "NUL": (records(more=Record("x/a\0b", b"")), "is not the name of a record"),
    "no prefix": (archive([Record("data.pkl", state(tensor()))]), r"0 records are a data\.pkl"),
    "a folder": (records(data=floats(attributes=16)), "no record of a zip directory"),
    "header's name": (records(data=floats(local=b"x/data/1")), "header of x/data/0 differs"),
    "header's place": (records(data=floats(begin=1 << 31)), "begins at byte 2147483648, outside"),
    "more bytes than there are": (
        records(version=Record("x/version", b"3\n", {"size": 99})),
        "99 b",
    ),
    "size in two ways": (records(data=floats(packed=15)), "x/data/0 has 16 bytes in 15"),
    "a large size that is missing": (records(data=floats(size=(1 << 32) - 1)), "place is missing"),
    "a large size": (
        records(data=floats(size=LARGE, extra=struct.pack("<2H2Q", 1, 16, 1 << 60, 1 << 60))),
        "differs from the directory|has 1152921504606846976 bytes",
    ),
    "wrong checksum": (records(data=floats(crc=1)), "x/data/0 has the checksum 0x.*damaged"),
    "wrong checksum of the pickle": (records(pickle=pickle_record(crc=1)), r"data\.pkl has the ch"),
    "a comment": (
        archive([pickle_record()], comment=b"hi"),
        r"byte \d+: no zip directory ends here",
    ),
    "a record too many": (archive([pickle_record()], count=2), "directory is truncated"),
    "a directory elsewhere": (archive([pickle_record()], place=0), "directory does not end here"),
    "a directory too small": (archive([pickle_record()], size=1), "directory does not end here"),
    "large numbers that differ": (
        archive([pickle_record()], zip64={"count": 7}),
        "directory is described in two ways",
    ),
    "large numbers of another disk": (
        archive([pickle_record()], zip64={"disk": 1}),
        "no ZIP64 directory ends here",
    ),
    "large numbers elsewhere": (
        archive([pickle_record()], zip64={"at": 0}),
        "does not end where it says",
    ),
}


def refused(folder: Path, content: bytes) -> str:
    path = folder / "pytorch_model.bin"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        torchbin.read_tensors(folder, path.name)
    assert time.process_time() - start < 10  # not a speed claim: none may loop on and on
    message = str(caught.value)
    assert message.startswith(str(path)) and len(message) < 1_000
    return message


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    result = refused(tmp_path, content() if callable(content) else content)
    assert re.search(message, result), result
    assert not (tmp_path / MARKER).exists()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    # More than Python has read ahead: 128 KiB from 3.14 on.
    path.write_bytes(torch_file(state(tensor((250_000,), count=250_000)), bytes(1_000_000)))
    with path.open("rb") as file:
        record = torchbin._read_directory(file)["data/0"]
        path.write_bytes(path.read_bytes()[: record.start + 300_000])
        with pytest.raises(CheckpointError, match="'x/data/0' ends before its last byte"):
            torchbin._read_storage(file, record, pickled.Storage("0", FLOATS.dtype, 250_000))


def test_more_bytes_than_memory() -> None:
    """A file with a hole has them without taking room on disk."""
    with pytest.raises(CheckpointError, match="'a': there is no memory for its 11529215046068469"):
        read_bytes(io.BytesIO(), 0, 1 << 60, "a")


GROWN = """
import sys
from pathlib import Path
from packhorse.checkpoint import torchbin
from packhorse.errors import CheckpointError

def memory(kind):
    [line] = [line for line in open("/proc/self/status") if line.startswith(kind)]
    return int(line.split()[1]) << 10

folder = Path(sys.argv[1])
torchbin.read(folder, "good.bin")
for path in folder.glob("bomb-*"):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    try:
        torchbin.read(folder, path.name)
    except CheckpointError:
        pass
    print(path.name, path.stat().st_size, memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells how much memory was taken")
def test_bombs_take_little_memory(tmp_path: Path) -> None:
    entries = pickled.OPERATION_LIMIT - 9
    wide = "😀".encode()
    bombs = {
        "dictionaries": b"}" * entries,
        "texts": (b"X\4\0\0\0" + wide) * entries,
        "a text": b"X" + struct.pack("<I", 7 << 20) + wide + b"a" * ((7 << 20) - 4),
        "a line": b"c" + b"a" * 8_000_000 + b"\n\n",
    }
    (tmp_path / "good.bin").write_bytes(GOOD)
    for name, bomb in bombs.items():
        (tmp_path / f"bomb-{name}").write_bytes(torch_file(program(bomb)))
    command = [sys.executable, "-c", GROWN, str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.rsplit(" ", 2) for line in completed.stdout.splitlines()]
    assert len(rows) == len(bombs)
    assert all(int(grown) < int(size) + (64 << 20) for _, size, grown in rows), completed.stdout
    assert max(int(grown) for *_, grown in rows) > 10 << 20  # it is measured


# ---- what is read is what torch reads ------------------------------------------------------------


def select(loaded: Any) -> dict[str, torch.Tensor]:
    """The tensors that a user means, of what torch.load gives."""

    def tensors(value: Any) -> dict[str, torch.Tensor]:
        return {k: v for k, v in value.items() if isinstance(v, torch.Tensor)}

    inner = [v for k, v in loaded.items() if k in torchbin.WRAPPERS and isinstance(v, dict)]
    return next(filter(None, map(tensors, inner)), None) or tensors(loaded)


class Guarded(pickle.Unpickler):
    """Python's own reader, for the operations of protocol 4 that torch's guarded one lacks."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module} {name}" not in pickled.GLOBALS:
            raise pickle.UnpicklingError(name)
        return super().find_class(module, name)


def reference(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of protocols other than 2
        try:
            return torch.load(path, weights_only=True, map_location="cpu")
        except pickle.UnpicklingError as error:
            if not re.search("Unsupported operand 1(40|47|48|49)", str(error)):
                raise
            module = SimpleNamespace(Unpickler=Guarded, __name__="guarded")
            return torch.load(path, "cpu", module, weights_only=False)


def agrees(folder: Path, content: bytes) -> bool:
    """Refused, or read as torch reads it; True when it was read."""
    path = folder / "x.bin"
    path.write_bytes(content)
    try:
        result = torchbin.read_tensors(folder, "x.bin")
    except CheckpointError:
        return False
    want = select(reference(path))
    assert result.keys() == want.keys()
    for name, tensor in want.items():
        assert (result[name].dtype, result[name].shape) == (tensor.dtype, tensor.shape)
        pair = (result[name].contiguous().view(-1), tensor.detach().contiguous().view(-1))
        assert torch.equal(*(t.view(torch.uint8) for t in pair))
    return True


@pytest.fixture(scope="module")
def written() -> list[bytes]:
    """Files of torch.save: the seeds of the mutants."""
    shared = torch.arange(6.0).reshape(2, 3)
    layer = torch.nn.Linear(2, 3)
    values = [
        layer.state_dict(),
        {"a": shared, "b": shared.T, "c": torch.tensor([1, 2]), "d": torch.ones(2).bfloat16()},
        {"model": dict(layer.named_parameters()), "epoch": 3, "best": [0.5, None, (True, "x")]},
    ]
    return [saved(lambda v=v: v, protocol)() for v in values for protocol in (2, 2, 4)]


def test_the_builder_builds_what_torch_reads(tmp_path: Path) -> None:
    """The control of all that is bad above: without the fault each would be read."""
    assert agrees(tmp_path, GOOD) and agrees(tmp_path, records())
    assert agrees(
        tmp_path, holding(tensor((2, 2), (1, 2)), tensor((), (), 3), tensor((0, 9), (1, 1)))
    )
    assert agrees(tmp_path, records(data=floats(crc=0)))
    assert agrees(tmp_path, archive([*GOOD_RECORDS, floats()], zip64={}))
    assert agrees(tmp_path, torch_file(state(model=state(tensor())[2:-1], x=op(1)), FOUR))
    large = struct.pack("<2H2H2Q", 7, 0, 1, 16, 16, 16)
    assert agrees(tmp_path, records(data=floats(size=LARGE, extra=large)))


def test_truncations(written: list[bytes], tmp_path: Path) -> None:
    for content, step in ((GOOD, 1), (written[0], 13)):
        assert agrees(tmp_path, content)
        assert not any(agrees(tmp_path, content[:size]) for size in range(0, len(content), step))
        assert not any(agrees(tmp_path, content + bytes(more)) for more in (1, 22, 1_000))


def mutate(rng: random.Random, content: bytes) -> bytes:
    """One to three changes, of the kinds that readers stumble over."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, to = (rng.randrange(len(data)) for _ in "12")
        length = rng.choice((1, 1, 2, 4, 8, 30))
        match rng.randrange(8):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice(b"\0\1\x7f\x80\xff(tRQs.}])N\x85\x86\x88\x89")
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = rng.randbytes(length)
            case 4:
                data[to:to] = data[at : at + length]
            case 5:
                data[to : to + length] = data[at : at + length]
            case 6:
                data[at : at + length] = bytes(length)
            case 7:
                number = int.from_bytes(data[at : at + 4], "little") + rng.choice((-1, 1, 255))
                data[at : at + 4] = (number % (1 << 32)).to_bytes(4, "little")
        data = data or bytearray(1)
    return bytes(data)


def repacked(rng: random.Random, content: bytes) -> bytes:
    """A mutant of the pickle in an archive that is sound around it."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    entries["archive/data.pkl"] = mutate(rng, entries["archive/data.pkl"])
    return archive([Record(name, data) for name, data in entries.items()])


@pytest.mark.parametrize("times", [600, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", [mutate, repacked])
def test_mutants(change: Callable, times: int, written: list[bytes], tmp_path: Path) -> None:
    rng = random.Random(5)
    read = sum(agrees(tmp_path, change(rng, rng.choice(written))) for _ in range(times))
    assert 0 < read < times / 2  # some bytes mean nothing: padding, dates, a device's name


WORDS = [
    *(b"N", b"\x88", b"\x89", b"]", b"}", b")", b"(", b"t", b"\x85", b"\x86", b"\x87"),
    *(b"a", b"e", b"s", b"u", b"b", b"R", b"Q", b"q\0", b"h\0", b"q\1", b"h\1", b".", ORDERED),
    *(op("a"), op("b"), op("model"), op("_metadata"), op(1), op(-1), op(1.5), op((4,)), op((1,))),
    *(tensor(), tensor((2, 2), (2, 1)), tensor((2,), offset=2), storage(), b"s" * 2, b"(" * 2),
    *(b"ctorch._utils\n_rebuild_parameter\n", b"ccollections\nOrderedDict\n"),
    *(op("a") + tensor(), op("b") + tensor((3,)), b"u", b"s", b"}(" + op("c") + tensor()),
]


@settings(max_examples=300)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), end=st.sampled_from([b"s", b"u", b""]))
def test_programs_made_of_real_words(
    tmp_path_factory: pytest.TempPathFactory, words: list[bytes], end: bytes
) -> None:
    body = b"}(" + op("x") + tensor() + b"".join(words) + end
    agrees(tmp_path_factory.getbasetemp(), torch_file(program(body), FOUR))
