"""TensorFlow's GraphDef: its nodes, their attributes, and every way in which a tensor is written.

Read where it lies, by `wire`: of a node only name, operation and inputs become objects, and the
bytes of a tensor are read once, from the file into memory of its own. `check` walks a graph to its
last field first and refuses whatever protobuf would refuse, so that nothing read here is read
otherwise by TensorFlow; where protobuf would merge two copies of a field, or take the last of them,
the file is refused. Nothing recurses.

Follows tensorflow/core/framework/{graph,node_def,attr_value,tensor,function}.proto of 2.21.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from packhorse import wire
from packhorse.errors import CheckpointError

Place = tuple[int, int]  # where something lies in the file: begin, end

DEPTH_LIMIT = 32  # messages in messages; protobuf's own is 100
FIELD_LIMIT = 300_000  # of a whole graph; that of BERT-Large has some 100,000
NODE_LIMIT = 400_000  # the training graph of BERT-Large has some 100,000
RANK_LIMIT = 8
WINDOW = 1 << 18  # bytes of packed numbers that are decoded at a time

# By message: what a field of bytes holds. `text` is UTF-8; packed numbers are varints or of 4 or 8
# bytes; the rest are messages. Plain bytes are not listed.
TEXT, NUMBERS, FOURS, EIGHTS = "text", "varints", "4", "8"
LAYOUT = """
GraphDef      1:NodeDef 2:Library 4:VersionDef 5:DebugInfo
NodeDef       1:text 2:text 3:text 4:text 5:Attr 6:Texts 7:FullType
Attr          1:text 2:AttrValue
AttrValue     1:List 7:Shape 8:TensorProto 9:text 10:NameAttrList
List          3:varints 4:4 5:varints 6:varints 7:Shape 8:TensorProto 9:NameAttrList
NameAttrList  1:text 2:Attr
Shape         2:Dim
Dim           2:text
TensorProto   2:Shape 5:4 6:8 7:varints 9:4 10:varints 11:varints 12:8 13:varints 14:Handle
TensorProto   15:Variant 16:varints 17:varints
Handle        1:text 2:text 3:text 5:text 6:HandleShape
HandleShape   2:Shape
Variant       1:text 3:TensorProto
FullType      2:FullType 3:text
Texts         1:text 2:text
VersionDef    3:varints
Library       1:Function 2:Texts 3:Texts
Function      1:OpDef 3:NodeDef 4:Texts 5:Attr 6:Texts 7:ArgAttr 8:Numbers
ArgAttr       2:Attrs
Attrs         1:Attr
Numbers
OpDef         1:text 2:ArgDef 3:ArgDef 4:AttrDef 5:text 6:text 8:Deprecation 20:text
ArgDef        1:text 2:text 4:text 5:text 6:text 7:HandleShape 17:FullType
AttrDef       1:text 2:text 3:AttrValue 4:text 7:AttrValue
Deprecation   2:text
DebugInfo     1:text 2:NamedTrace 4:Frame 5:NamedNumber 6:Trace
NamedTrace    1:text 2:Lines
NamedNumber   1:text
Frame         2:Line
Trace         2:Lines
Lines         1:Line 2:8
Line          4:text 5:text
"""
SCHEMA: dict[str, dict[int, str]] = {}
for _message, *_parts in map(str.split, LAYOUT.strip().splitlines()):
    SCHEMA.setdefault(_message, {}).update(
        (int(number), content) for number, content in (part.split(":") for part in _parts)
    )

# TensorFlow's number of a dtype → ours, and the field of TensorProto that lists its values.
DTYPES: dict[int, tuple[torch.dtype, int]] = {
    1: (torch.float32, 5),
    2: (torch.float64, 6),
    3: (torch.int32, 7),
    4: (torch.uint8, 7),
    5: (torch.int16, 7),
    6: (torch.int8, 7),
    9: (torch.int64, 10),
    10: (torch.bool, 11),
    14: (torch.bfloat16, 13),
    17: (torch.uint16, 7),
    19: (torch.float16, 13),
    22: (torch.uint32, 16),
    23: (torch.uint64, 17),
}
FLOATS = {number for number, (dtype, _) in DTYPES.items() if dtype.is_floating_point}
FIXED = {5: wire.FIXED32, 6: wire.FIXED64}  # fields of values that are not varints
QUANTISED = {11, 12, 13, 15, 16}


def check(data: wire.Buffer, begin: int, end: int, message: str = "GraphDef") -> None:
    """Refuse a message that protobuf would not parse, or that is too large or too deep."""
    left, todo = FIELD_LIMIT, [(message, begin, end, 0)]
    while todo:
        message, begin, end, depth = todo.pop()
        if depth > DEPTH_LIMIT:
            raise CheckpointError(f"byte {begin}: messages nested more than {DEPTH_LIMIT} deep")
        parts, at = SCHEMA[message], begin
        for field in wire.fields(data, begin, end):
            left -= 1
            if left < 0:
                raise CheckpointError(f"byte {at}: more than {FIELD_LIMIT} fields")
            if field.begin - at != _head(field):
                raise CheckpointError(f"byte {at}: a field whose head is not written as usual")
            inner, at = parts.get(field.number), field.end
            if inner is None or field.kind != wire.BYTES:
                continue
            if inner in SCHEMA:
                todo.append((inner, field.begin, field.end, depth + 1))
            else:
                _check_bytes(data, field, inner)


def _head(field: wire.Field) -> int:
    """How many bytes are before a field's value; protobuf does not take every longer way."""
    count = max(1, (field.value.bit_length() + 6) // 7) if field.kind == wire.BYTES else 0
    return (field.number.bit_length() + 9) // 7 + count


def _check_bytes(data: wire.Buffer, field: wire.Field, content: str) -> None:
    if content == TEXT:
        wire.text(data, field)
    elif content != NUMBERS:
        if field.value % int(content):
            raise CheckpointError(
                f"byte {field.begin}: {field.value} bytes for numbers of {content}"
            )
    elif field.value < 64:  # short ones are most; numpy would take its time
        for _ in wire.varints(data, field.begin, field.end):
            pass
    else:
        for _ in _windows(lambda at, count: data[at : at + count], (field.begin, field.end)):
            pass


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph, and where it lies."""

    name: str
    op: str
    inputs: tuple[str, ...]  # as written: `name`, `name:1`, `^name` for control
    begin: int
    end: int

    @property
    def sources(self) -> Iterator[str]:
        """The names of the nodes it takes from."""
        return map(source, self.inputs)


def source(written: str) -> str:
    """The node's name in an input: `name`, `name:1` or `^name`."""
    return written.removeprefix("^").partition(":")[0]


def nodes(data: wire.Buffer, begin: int, end: int) -> dict[str, Node]:
    """The nodes of a GraphDef by name, in their order."""
    found: dict[str, Node] = {}
    for field in wire.fields(data, begin, end):
        if field.number != 1 or field.kind != wire.BYTES:
            continue
        node = _node(data, field)
        if not node.name:
            raise CheckpointError(f"byte {field.begin}: a node without a name")
        if node.name in found:
            raise CheckpointError(f"byte {field.begin}: there are two nodes called {node.name!r}")
        found[node.name] = node
        if len(found) > NODE_LIMIT:
            raise CheckpointError(f"byte {field.begin}: more than {NODE_LIMIT} nodes")
    return found


def _node(data: wire.Buffer, place: wire.Field) -> Node:
    name = op = ""
    inputs = []
    for field in wire.fields(data, place.begin, place.end):
        if field.number == 1:
            name = wire.text(data, field)
        elif field.number == 2:
            op = wire.text(data, field)
        elif field.number == 3:
            inputs.append(wire.text(data, field))
    return Node(name, op, tuple(inputs), place.begin, place.end)


def attributes(data: wire.Buffer, node: Node) -> dict[str, Place]:
    """Where the attributes (AttrValue) of a node lie, by name."""
    found: dict[str, Place] = {}
    for field in wire.fields(data, node.begin, node.end):
        if field.number == 5 and field.kind == wire.BYTES:
            entry = single(data, (field.begin, field.end), {1, 2})
            name = wire.text(data, entry[1]) if 1 in entry else ""
            if name in found:
                raise CheckpointError(f"byte {field.begin}: two attributes {name!r}")
            value = entry.get(2)
            found[name] = (value.begin, value.end) if value else (field.end, field.end)
    return found


def single(data: wire.Buffer, place: Place, numbers: set[int]) -> dict[int, wire.Field]:
    """The fields of these numbers; protobuf merges two of the same, here they are refused."""
    found: dict[int, wire.Field] = {}
    for field in wire.fields(data, *place):
        if field.number in numbers:
            if field.number in found:
                raise CheckpointError(f"byte {field.begin}: field {field.number} is there twice")
            found[field.number] = field
    return found


def dtype_of(data: wire.Buffer, attribute: Place | None) -> int:
    """The dtype that an attribute of this kind says; 0 where it says none."""
    held = single(data, attribute, {*range(1, 11)}) if attribute else {}
    if len(held) != 1 or 6 not in held or held[6].kind != wire.VARINT:
        return 0
    return held[6].value


@dataclass(frozen=True, slots=True)
class Stored:
    """A TensorProto: what it is, and where its values are."""

    dtype: int
    shape: tuple[int, ...]
    content: Place | None
    values: tuple[Place | array[int], ...]  # packed numbers where they lie; others as bits
    begin: int

    @property
    def bytes(self) -> int:
        """Of the tensor in memory."""
        return math.prod(self.shape) * DTYPES[self.dtype][0].itemsize

    @property
    def missing(self) -> int:
        """Bytes that are not in the file: a value that stands for many is stored once."""
        pieces = [self.content] if self.content else [p for p in self.values if type(p) is tuple]
        return max(0, self.bytes - sum(end - begin for begin, end in pieces))


def stored(data: wire.Buffer, place: Place, said: int) -> Stored:
    """The TensorProto of a Const, from its attribute `value`; `said` is its attribute `dtype`."""
    held = single(data, place, {*range(1, 11)})
    if len(held) != 1 or 8 not in held or held[8].kind != wire.BYTES:
        raise CheckpointError(f"byte {place[0]}: the attribute 'value' holds no tensor")
    inner = (held[8].begin, held[8].end)
    parts = single(data, inner, {1, 2, 4})
    if any(part.kind != (wire.VARINT if n == 1 else wire.BYTES) for n, part in parts.items()):
        raise CheckpointError(f"byte {inner[0]}: a tensor's field of the wrong kind")
    dtype = parts[1].value if 1 in parts else 0
    if dtype != said:
        raise CheckpointError(f"byte {inner[0]}: a tensor of dtype {dtype}, the node says {said}")
    content = parts.get(4)
    found = Stored(
        dtype=dtype,
        shape=shape(data, parts.get(2)),
        # Like TensorFlow: no bytes of content are no content.
        content=(content.begin, content.end) if content and content.value else None,
        values=tuple(_values(data, inner, DTYPES[dtype][1])) if dtype in DTYPES else (),
        begin=inner[0],
    )
    if found.content and dtype in DTYPES and content and content.value != found.bytes:
        raise CheckpointError(
            f"byte {content.begin}: {content.value} bytes of content, the shape "
            f"{list(found.shape)} of {DTYPES[dtype][0]} takes {found.bytes}"
        )
    return found


def shape(data: wire.Buffer, field: wire.Field | None) -> tuple[int, ...]:
    """What a TensorShapeProto says, if it says all."""
    sizes = []
    for part in wire.fields(data, field.begin, field.end) if field else ():
        if part.number == 3 and part.value:
            raise CheckpointError(f"byte {part.begin}: a tensor of unknown rank")
        if part.number == 2 and part.kind == wire.BYTES:
            size = single(data, (part.begin, part.end), {1}).get(1)
            sizes.append(wire.signed(size.value) if size and size.kind == wire.VARINT else 0)
            if sizes[-1] < 0 or len(sizes) > RANK_LIMIT:
                raise CheckpointError(f"byte {part.begin}: the shape {sizes} is not a tensor's")
    return tuple(sizes)


def _values(data: wire.Buffer, place: Place, number: int) -> Iterator[Place | array[int]]:
    """The listed values: packed ones where they lie, others gathered in runs."""
    run = array("Q")
    wanted = FIXED.get(number, wire.VARINT)
    for field in wire.fields(data, *place):
        if field.number != number:
            continue
        if field.kind == wanted:
            run.append(field.value)
        elif field.kind == wire.BYTES:
            if run:
                yield run
                run = array("Q")
            yield field.begin, field.end
    if run:
        yield run


def read(file: BinaryIO, tensor: Stored) -> Tensor:
    """The tensor, in memory of its own; fewer values than elements: the last one is repeated."""
    dtype, number = DTYPES[tensor.dtype]
    made = torch.empty(tensor.shape, dtype=dtype)
    bits = made.reshape(-1).view(_BITS[dtype.itemsize]).numpy()
    if tensor.content:
        _read_into(file, tensor.content[0], bits)
        return made
    at = 0
    for piece in tensor.values:
        for raw in _decoded(file, piece, number, dtype.itemsize):
            some = raw if number in FIXED else _narrow(raw, dtype, tensor.begin)
            if at + len(some) > len(bits):
                raise CheckpointError(f"byte {tensor.begin}: more values than elements")
            bits[at : at + len(some)] = some
            at += len(some)
    bits[at:] = bits[at - 1] if at else 0
    return made


_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _read_into(file: BinaryIO, at: int, target: np.ndarray) -> None:
    file.seek(at)
    if target.nbytes and file.readinto(target.view(np.uint8)) != target.nbytes:  # pyright: ignore
        raise CheckpointError(f"byte {at}: the file ends within the tensor")


def _decoded(
    file: BinaryIO, piece: Place | array[int], number: int, width: int
) -> Iterator[np.ndarray]:
    """The bits of listed values, some at a time; varints with all of their 64."""

    def load(at: int, count: int) -> bytes:
        file.seek(at)
        return file.read(count)

    if isinstance(piece, array):
        yield np.frombuffer(piece, np.uint64).astype(f"u{width if number in FIXED else 8}")
    elif number in FIXED:
        for at in range(*piece, WINDOW):
            some = np.empty(min(WINDOW, piece[1] - at) // width, f"u{width}")
            _read_into(file, at, some)
            yield some
    else:
        yield from _windows(load, piece)


def _narrow(values: np.ndarray, dtype: torch.dtype, at: int) -> np.ndarray:
    """Varints of 64 bits as the bits of a dtype; what does not fit is refused, not cut."""
    if dtype is torch.bool:
        return (values != 0).view(np.uint8)
    if dtype.is_floating_point or not dtype.is_signed:
        fits = values <= np.uint64((1 << 8 * dtype.itemsize) - 1)
    else:
        limits, signed = torch.iinfo(dtype), values.view(np.int64)
        fits = (signed >= limits.min) & (signed <= limits.max)
    if not fits.all():
        raise CheckpointError(f"byte {at}: a value that does not fit {dtype}")
    return values.astype(f"u{dtype.itemsize}")


def _windows(load: Callable[[int, int], wire.Buffer], place: Place) -> Iterator[np.ndarray]:
    """The packed varints at a place, a window at a time."""
    at, end = place
    while at < end:
        some = np.frombuffer(load(at, min(WINDOW, end - at)), np.uint8)
        last = np.flatnonzero(some[-10:] < 0x80)
        if not len(last):
            raise CheckpointError(f"byte {at}: a number that does not end")
        whole = len(some) - len(some[-10:]) + int(last[-1]) + 1
        if whole < len(some) and at + len(some) == end:
            raise CheckpointError(f"byte {at + whole}: a number that does not end")
        yield _varints(some[:whole], at)
        at += whole


def _varints(raw: np.ndarray, at: int) -> np.ndarray:
    ends = np.flatnonzero(raw < 0x80)
    begins = np.concatenate(([0], ends[:-1] + 1))
    widths = ends - begins + 1
    if widths.max() > 10 or (raw[ends[widths == 10]] > 1).any():
        raise CheckpointError(f"byte {at}: a number of more than 64 bits")
    values = np.zeros(len(ends), np.uint64)
    for place in range(int(widths.max())):
        some = np.flatnonzero(widths > place)
        values[some] |= (raw[begins[some] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values
