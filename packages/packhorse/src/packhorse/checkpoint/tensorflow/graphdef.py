"""Read TensorFlow's GraphDef: its nodes, their attributes, and all encodings of a tensor.

The message is read in place, by `wire`: of a node only name, operation and inputs become objects,
and the bytes of a tensor are read once, from the file into memory of its own. `check` walks a graph
to its last field first and refuses whatever protobuf would refuse, so that TensorFlow reads the
same as is read here; where protobuf would merge two copies of a field, or take the last of them,
the file is refused. Nothing recurses, so that deep nesting cannot exhaust the stack.

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

Span = tuple[int, int]  # bytes of the file: begin, end

# Bounds on time and memory: each field, node and dimension costs some, and the file chooses them.
DEPTH_LIMIT = 32  # nesting of messages; protobuf's own limit is 100
FIELD_LIMIT = 300_000  # in a whole graph; BERT-Large's has some 100,000
NODE_LIMIT = 400_000  # BERT-Large's training graph has some 100,000
RANK_LIMIT = 8  # dimensions of a TensorShapeProto
WINDOW = 1 << 18  # bytes of packed numbers that are decoded at a time

# Message → its length-delimited fields as number:content. `text` is UTF-8; `varints`, `4` and `8`
# are packed numbers of that encoding; other contents are messages. Plain bytes are not listed.
TEXT = "text"
VARINTS = "varints"
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

# DataType of types.proto → our dtype, and the field of TensorProto that lists its values.
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
INTEGERS = {3, 9}  # DT_INT32 and DT_INT64, which indices have
FLOATS = {number for number, (dtype, _) in DTYPES.items() if dtype.is_floating_point}
# Of these fields float_val and double_val have a fixed width; the others are varints.
FIXED = {5: wire.FIXED32, 6: wire.FIXED64}
QUANTIZED = {11, 12, 13, 15, 16}  # DT_QINT8 and the like


def check(data: wire.Buffer, begin: int, end: int, message: str = "GraphDef") -> None:
    """Raise for a message that protobuf would not parse, or that is too large or too deep."""
    remaining = FIELD_LIMIT
    pending = [(message, begin, end, 0)]
    while pending:
        message, begin, end, depth = pending.pop()
        if depth > DEPTH_LIMIT:
            raise CheckpointError(f"byte {begin}: messages nested more than {DEPTH_LIMIT} deep")
        contents = SCHEMA[message]
        at = begin
        for field in wire.fields(data, begin, end):
            remaining -= 1
            if remaining < 0:
                raise CheckpointError(f"byte {at}: more than {FIELD_LIMIT} fields")
            if field.begin - at != _head_size(field):
                raise CheckpointError(f"byte {at}: a field whose head is not written as usual")
            at = field.end
            content = contents.get(field.number)
            if content is None or field.kind != wire.BYTES:
                continue
            if content in SCHEMA:
                pending.append((content, field.begin, field.end, depth + 1))
            else:
                _check_bytes(data, field, content)


def _head_size(field: wire.Field) -> int:
    """Bytes of a field's tag and length in the shortest encoding.

    Longer encodings are refused, because protobuf accepts only some of them.
    """
    length = max(1, (field.value.bit_length() + 6) // 7) if field.kind == wire.BYTES else 0
    return (field.number.bit_length() + 9) // 7 + length


def _check_bytes(data: wire.Buffer, field: wire.Field, content: str) -> None:
    if content == TEXT:
        wire.text(data, field)
    elif content != VARINTS:
        if field.value % int(content):
            raise CheckpointError(
                f"byte {field.begin}: {field.value} bytes for numbers of {content}"
            )
    elif field.value < 64:  # most are this short, and numpy is slow on short arrays
        for _ in wire.varints(data, field.begin, field.end):
            pass
    else:
        for _ in _windows(lambda at, count: data[at : at + count], (field.begin, field.end)):
            pass


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A NodeDef of a graph, and its bytes."""

    name: str
    op: str
    inputs: tuple[str, ...]  # as written: `name`, `name:1`, `^name` for control
    begin: int
    end: int

    @property
    def sources(self) -> Iterator[str]:
        """The names of the nodes that its inputs come from."""
        return map(source, self.inputs)


def source(reference: str) -> str:
    """The node's name in an input, which is `name`, `name:1` or `^name`."""
    return reference.removeprefix("^").partition(":")[0]


def nodes(data: wire.Buffer, begin: int, end: int) -> dict[str, GraphNode]:
    """The nodes of a GraphDef by name, in the order of the file."""
    nodes: dict[str, GraphNode] = {}
    for field in wire.fields(data, begin, end):
        if field.number != 1 or field.kind != wire.BYTES:
            continue
        node = _node(data, field)
        if not node.name:
            raise CheckpointError(f"byte {field.begin}: a node without a name")
        if node.name in nodes:
            raise CheckpointError(f"byte {field.begin}: there are two nodes called {node.name!r}")
        nodes[node.name] = node
        if len(nodes) > NODE_LIMIT:
            raise CheckpointError(f"byte {field.begin}: more than {NODE_LIMIT} nodes")
    return nodes


def _node(data: wire.Buffer, message: wire.Field) -> GraphNode:
    name = op = ""
    inputs: list[str] = []
    for field in wire.fields(data, message.begin, message.end):
        if field.number == 1:
            name = wire.text(data, field)
        elif field.number == 2:
            op = wire.text(data, field)
        elif field.number == 3:
            inputs.append(wire.text(data, field))
    return GraphNode(name, op, tuple(inputs), message.begin, message.end)


def attributes(data: wire.Buffer, node: GraphNode) -> dict[str, Span]:
    """The bytes of a node's attributes (AttrValue), by name."""
    attributes: dict[str, Span] = {}
    for field in wire.fields(data, node.begin, node.end):
        if field.number == 5 and field.kind == wire.BYTES:
            entry = single(data, (field.begin, field.end), {1, 2})
            name = wire.text(data, entry[1]) if 1 in entry else ""
            if name in attributes:
                raise CheckpointError(f"byte {field.begin}: two attributes {name!r}")
            value = entry.get(2)
            attributes[name] = (value.begin, value.end) if value else (field.end, field.end)
    return attributes


def single(data: wire.Buffer, span: Span, numbers: set[int]) -> dict[int, wire.Field]:
    """The fields of these numbers; protobuf would merge two of the same, here they are refused."""
    fields: dict[int, wire.Field] = {}
    for field in wire.fields(data, *span):
        if field.number in numbers:
            if field.number in fields:
                raise CheckpointError(f"byte {field.begin}: field {field.number} is there twice")
            fields[field.number] = field
    return fields


def dtype_of(data: wire.Buffer, attribute: Span | None) -> int:
    """The DataType in an attribute (AttrValue.type, field 6); 0 if it holds anything else."""
    fields = single(data, attribute, {*range(1, 11)}) if attribute else {}
    if len(fields) != 1 or 6 not in fields or fields[6].kind != wire.VARINT:
        return 0
    return fields[6].value


@dataclass(frozen=True, slots=True)
class StoredConstant:
    """A TensorProto: dtype, shape, and where its values are in the file."""

    dtype: int  # DataType
    shape: tuple[int, ...]
    content: Span | None  # tensor_content, field 4
    values: tuple[Span | array[int], ...]  # of the dtype's field: packed ones in place, or bits
    begin: int

    @property
    def bytes(self) -> int:
        """Size of the tensor in memory."""
        return math.prod(self.shape) * DTYPES[self.dtype][0].itemsize

    @property
    def missing(self) -> int:
        """Bytes in memory beyond those in the file, where one value is repeated for many."""
        spans = [self.content] if self.content else [v for v in self.values if type(v) is tuple]
        return max(0, self.bytes - sum(end - begin for begin, end in spans))


def stored(data: wire.Buffer, attribute: Span, node_dtype: int) -> StoredConstant:
    """The TensorProto in the attribute `value` of a Const; `node_dtype`: its attribute `dtype`."""
    values = single(data, attribute, {*range(1, 11)})
    if len(values) != 1 or 8 not in values or values[8].kind != wire.BYTES:  # AttrValue.tensor
        raise CheckpointError(f"byte {attribute[0]}: the attribute 'value' holds no tensor")
    proto = (values[8].begin, values[8].end)
    fields = single(data, proto, {1, 2, 4})  # dtype, tensor_shape, tensor_content
    kinds = {1: wire.VARINT, 2: wire.BYTES, 4: wire.BYTES}
    if any(field.kind != kinds[number] for number, field in fields.items()):
        raise CheckpointError(f"byte {proto[0]}: a tensor's field of the wrong kind")
    dtype = fields[1].value if 1 in fields else 0
    if dtype != node_dtype:
        raise CheckpointError(
            f"byte {proto[0]}: a tensor of dtype {dtype}, the node says {node_dtype}"
        )
    content = fields.get(4)
    tensor = StoredConstant(
        dtype=dtype,
        shape=shape(data, fields.get(2)),
        # As in TensorFlow, a tensor_content without bytes counts as absent.
        content=(content.begin, content.end) if content and content.value else None,
        values=tuple(_values(data, proto, DTYPES[dtype][1])) if dtype in DTYPES else (),
        begin=proto[0],
    )
    if tensor.content and dtype in DTYPES and content and content.value != tensor.bytes:
        raise CheckpointError(
            f"byte {content.begin}: {content.value} bytes of content, the shape "
            f"{list(tensor.shape)} of {DTYPES[dtype][0]} takes {tensor.bytes}"
        )
    return tensor


def shape(data: wire.Buffer, field: wire.Field | None) -> tuple[int, ...]:
    """The sizes in a TensorShapeProto; raises if one is unknown (-1)."""
    sizes: list[int] = []
    for inner in wire.fields(data, field.begin, field.end) if field else ():
        if inner.number == 3 and inner.value:  # unknown_rank
            raise CheckpointError(f"byte {inner.begin}: a tensor of unknown rank")
        if inner.number == 2 and inner.kind == wire.BYTES:  # dim
            size = single(data, (inner.begin, inner.end), {1}).get(1)
            sizes.append(wire.signed(size.value) if size and size.kind == wire.VARINT else 0)
            if sizes[-1] < 0 or len(sizes) > RANK_LIMIT:
                raise CheckpointError(f"byte {inner.begin}: the shape {sizes} is not a tensor's")
    return tuple(sizes)


def _values(data: wire.Buffer, proto: Span, number: int) -> Iterator[Span | array[int]]:
    """The values in field `number` of a TensorProto: packed ones in place, others in runs."""
    run = array("Q")
    unpacked = FIXED.get(number, wire.VARINT)
    for field in wire.fields(data, *proto):
        if field.number != number:
            continue
        if field.kind == unpacked:
            run.append(field.value)
        elif field.kind == wire.BYTES:
            if run:
                yield run
                run = array("Q")
            yield field.begin, field.end
    if run:
        yield run


def read(file: BinaryIO, stored: StoredConstant) -> Tensor:
    """The tensor, in memory of its own.

    If there are fewer values than elements, the last value is repeated, as tensor.proto has it.
    """
    dtype, number = DTYPES[stored.dtype]
    tensor = torch.empty(stored.shape, dtype=dtype)
    bits = tensor.reshape(-1).view(_BITS[dtype.itemsize]).numpy()
    if stored.content:
        _read_into(file, stored.content[0], bits)
        return tensor
    at = 0
    for values in stored.values:
        for raw in _decoded(file, values, number, dtype.itemsize):
            chunk = raw if number in FIXED else _narrow(raw, dtype, stored.begin)
            if at + len(chunk) > len(bits):
                raise CheckpointError(f"byte {stored.begin}: more values than elements")
            bits[at : at + len(chunk)] = chunk
            at += len(chunk)
    bits[at:] = bits[at - 1] if at else 0
    return tensor


_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _read_into(file: BinaryIO, at: int, target: np.ndarray) -> None:
    file.seek(at)
    if target.nbytes and file.readinto(target.view(np.uint8)) != target.nbytes:  # pyright: ignore
        raise CheckpointError(f"byte {at}: the file ends within the tensor")


def _decoded(
    file: BinaryIO, values: Span | array[int], number: int, width: int
) -> Iterator[np.ndarray]:
    """The bits of listed values, in chunks; varints as all of their 64 bits."""

    def load(at: int, count: int) -> bytes:
        file.seek(at)
        return file.read(count)

    if isinstance(values, array):
        yield np.frombuffer(values, np.uint64).astype(f"u{width if number in FIXED else 8}")
    elif number in FIXED:
        for at in range(*values, WINDOW):
            chunk = np.empty(min(WINDOW, values[1] - at) // width, f"u{width}")
            _read_into(file, at, chunk)
            yield chunk
    else:
        yield from _windows(load, values)


def _narrow(values: np.ndarray, dtype: torch.dtype, at: int) -> np.ndarray:
    """Varints of 64 bits as the bits of a dtype; a value that does not fit is an error."""
    if dtype is torch.bool:
        return (values != 0).view(np.uint8)
    if dtype.is_floating_point or not dtype.is_signed:
        fits = values <= np.uint64((1 << 8 * dtype.itemsize) - 1)
    else:
        limits = torch.iinfo(dtype)
        signed = values.view(np.int64)
        fits = (signed >= limits.min) & (signed <= limits.max)
    if not fits.all():
        raise CheckpointError(f"byte {at}: a value that does not fit {dtype}")
    return values.astype(f"u{dtype.itemsize}")


def _windows(load: Callable[[int, int], wire.Buffer], span: Span) -> Iterator[np.ndarray]:
    """The packed varints in a span, a window at a time."""
    at, end = span
    while at < end:
        window = np.frombuffer(load(at, min(WINDOW, end - at)), np.uint8)
        # A varint has at most 10 bytes and ends with one below 0x80: the last such byte ends the
        # last number that is whole in this window; the rest begins the next window.
        last = np.flatnonzero(window[-10:] < 0x80)
        if not len(last):
            raise CheckpointError(f"byte {at}: a number that does not end")
        whole = len(window) - len(window[-10:]) + int(last[-1]) + 1
        if whole < len(window) and at + len(window) == end:
            raise CheckpointError(f"byte {at + whole}: a number that does not end")
        yield _varints(window[:whole], at)
        at += whole


def _varints(raw: np.ndarray, at: int) -> np.ndarray:
    ends = np.flatnonzero(raw < 0x80)
    begins = np.concatenate(([0], ends[:-1] + 1))
    widths = ends - begins + 1
    if widths.max() > 10 or (raw[ends[widths == 10]] > 1).any():
        raise CheckpointError(f"byte {at}: a number of more than 64 bits")
    values = np.zeros(len(ends), np.uint64)
    # Seven bits per byte, the lowest first; numbers that have ended drop out of `longer`.
    for byte in range(int(widths.max())):
        longer = np.flatnonzero(widths > byte)
        bits = (raw[begins[longer] + byte] & 0x7F).astype(np.uint64)
        values[longer] |= bits << np.uint64(7 * byte)
    return values
