"""Interpret the pickle inside a torch file as data: no name in it is ever looked up in Python.

A pickle is a program for a small stack machine, and Python's unpickler runs whatever it says. This
interpreter knows only the operations that describe dictionaries of tensors, and a literal table of
names (`GLOBALS`). A name stands for a function or a value of this module: no module is imported, no
attribute looked up. The results are descriptions (`Pairs`, `View`, `Storage`) that `torchbin`
checks and fills. Numbers and texts may have any value; their number is bounded. Nothing recurses,
and nothing but texts is hashed, so that time stays proportional to the bytes.

The operations and their arguments are documented in Python's `pickletools`, which here only
supplies the names of those that are refused; its own reader interprets escapes where the format has
none.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeGuard, cast

import torch

from packhorse.errors import CheckpointError

OPERATION_LIMIT = 500_000  # bounds time and stack; ten thousand parameters take 410,000
TENSOR_LIMIT = 10_000  # BERT-Large has 400, with Adam's state 1,200
RANK_LIMIT = 8  # dimensions of a tensor
PROTOCOLS = range(2, 6)  # torch writes 2, others on request; later ones add what is refused here
TEXT_SHOWN = 120  # characters of a file's text in a message
KEY_DIGITS = 20  # of a storage's key, which is a number


class Pairs(list[tuple[Any, Any]]):
    """A dictionary as the list of its items: keys of the file are never hashed."""

    __slots__ = ("ordered",)

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered


@dataclass(frozen=True, slots=True)
class Storage:
    """Numbers that one or more tensors share: the record `data/KEY` of the archive."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor: the elements of a storage that it shows."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_in_pickle: int  # for messages about tensors without a name


@dataclass(slots=True)
class _Machine:
    """The state of the interpreter."""

    data: bytes
    next: int = 0  # offset of the byte to read next
    operation: int = 0  # offset of the current operation
    frame_end: int = 0
    stack: list[Any] = field(default_factory=list[Any])
    marks: list[int] = field(default_factory=list[int])
    memo: list[Any] = field(default_factory=list[Any])
    storages: dict[str, Storage] = field(default_factory=dict[str, Storage])
    views: list[View] = field(default_factory=list[View])

    def take(self, count: int) -> bytes:
        """The next bytes of the pickle."""
        start = self.next
        self.next += count
        if self.next > len(self.data):
            raise CheckpointError("the pickle ends here")
        return self.data[start : self.next]

    def take_line(self) -> str:
        """The next bytes up to a newline, without it."""
        end = self.data.find(b"\n", self.next)
        if end < 0:
            raise CheckpointError("the pickle ends here")
        return self.take(end + 1 - self.next)[:-1].decode("ascii", "backslashreplace")

    def pop(self, count: int) -> list[Any]:
        """Values from the top of the stack, none of them below the last mark."""
        floor = self.marks[-1] if self.marks else 0
        start = len(self.stack) - count
        if start < floor:
            raise CheckpointError("it pops more values than the stack has")
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop_to_mark(self) -> list[Any]:
        """The values above the last mark, which is removed."""
        if not self.marks:
            raise CheckpointError("there is no mark")
        return self.pop(len(self.stack) - self.marks.pop())

    def top(self, kind: type) -> Any:
        """The value on top of the stack, which must be of this type and stays there."""
        [value] = self.pop(1)
        self.stack.append(value)
        if type(value) is not kind:
            raise CheckpointError(f"it works on {_describe(value)}")
        return value

    def near(self) -> str:
        """The last text on the stack, which is mostly the name of the current tensor."""
        texts = (v for v in reversed(self.stack) if type(v) is str and v != "storage")
        return f", after {brief(text)}" if (text := next(texts, None)) else ""


def brief(text: str) -> str:
    """A text of a file for a message: quoted and truncated."""
    return repr(text if len(text) <= TEXT_SHOWN else text[:TEXT_SHOWN] + "…")


def _is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    return type(value) is tuple


def _describe(value: Any) -> str:
    """The kind of a value for a message; the value itself may be huge."""
    kinds: dict[type[object], str] = {
        Pairs: "a dictionary",
        View: "a tensor",
        _Function: "a name",
        _StorageType: "a name",
    }
    kind = cast("type[object]", type(value))
    return kinds.get(kind, f"a {kind.__name__.lower()}")


def read(data: bytes) -> tuple[Any, list[View]]:
    """The object that a pickle describes, and all tensors in it."""
    machine = _Machine(data)
    name = "PROTO"
    try:
        for number in range(OPERATION_LIMIT):
            start = machine.next
            code = machine.take(1)[0]  # where there is none, the error is about the last operation
            machine.operation = start
            name = NAMES.get(code, f"{code:#04x}")
            if (name == "PROTO") != (number == 0) or name not in OPERATIONS:
                raise CheckpointError("this operation is not one that describes tensors")
            argument, run = OPERATIONS[name]
            run(machine, argument(machine) if argument else None)
            if machine.operation < machine.frame_end < machine.next:
                raise CheckpointError(f"it crosses the end of its frame, byte {machine.frame_end}")
            if name == "STOP":
                return _result(machine), machine.views
        raise CheckpointError(f"there are more than {OPERATION_LIMIT} operations")
    except CheckpointError as error:
        context = f"data.pkl, byte {machine.operation}, {name}{machine.near()}"
        raise CheckpointError(f"{context}: {error}") from None


def _result(machine: _Machine) -> Any:
    if len(machine.stack) != 1 or machine.marks:
        raise CheckpointError("the pickle leaves not one value but several, or none")
    if machine.next != len(machine.data):
        raise CheckpointError("the pickle goes on after its end")
    return machine.stack[0]


def _number(layout: str) -> Argument:
    reader = struct.Struct(layout)
    return lambda machine: reader.unpack(machine.take(reader.size))[0]


def _long(machine: _Machine) -> int:
    return int.from_bytes(machine.take(machine.take(1)[0]), "little", signed=True)


def _text(width: int) -> Argument:
    def read(machine: _Machine) -> str:
        try:
            return machine.take(int.from_bytes(machine.take(width), "little")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"the text is not UTF-8: {error.reason}") from None

    return read


def _lines(machine: _Machine) -> str:
    return f"{machine.take_line()} {machine.take_line()}"


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _constant(value: Any) -> Operation:
    return lambda machine, _: machine.stack.append(value)


def _protocol(machine: _Machine, version: int) -> None:
    if version not in PROTOCOLS:
        raise CheckpointError(f"protocol {version} is unknown")


def _frame(machine: _Machine, size: int) -> None:
    """Check the bounds of a frame, which says how much to read ahead.

    All of it is in memory already, but readers that do read ahead must see the same operations.
    """
    if machine.operation < machine.frame_end or machine.next + size > len(machine.data):
        raise CheckpointError(f"a frame of {size} bytes does not fit here")
    machine.frame_end = machine.next + size


def _mark(machine: _Machine, _: None) -> None:
    machine.marks.append(len(machine.stack))


def _tuple(count: int) -> Operation:
    return lambda machine, _: machine.stack.append(tuple(machine.pop(count)))


def _extend(machine: _Machine, items: list[Any]) -> None:
    machine.top(list).extend(items)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    target = machine.top(Pairs)
    keys = items[::2]
    values = items[1::2]
    if len(keys) != len(values):
        raise CheckpointError("a key has no value")
    for key in keys:
        if key is not None and type(key) not in (str, int, float, bool):
            raise CheckpointError(f"{_describe(key)} is a key")
    target.extend(zip(keys, values, strict=True))


_UNSET = object()


def _memoize(machine: _Machine, number: int | None) -> None:
    # A list, since the file could choose numbers that collide in a dictionary.
    number = len(machine.memo) if number is None else number
    if number >= OPERATION_LIMIT:
        raise CheckpointError(f"memo {number} is out of bounds")
    [value] = machine.pop(1)
    machine.stack.append(value)
    machine.memo.extend(repeat(_UNSET, number + 1 - len(machine.memo)))
    machine.memo[number] = value


def _recall(machine: _Machine, number: int) -> None:
    if number >= len(machine.memo) or machine.memo[number] is _UNSET:
        raise CheckpointError(f"memo {number} is empty")
    machine.stack.append(machine.memo[number])


def _global(machine: _Machine, name: str) -> None:
    if name not in GLOBALS:
        meaning = REFUSED.get(name, "Python code, which is never run")
        raise CheckpointError(
            f"{brief(name.replace(' ', '.'))} stands for {meaning}; save plain tensors alone, "
            f"as in torch.save(model.state_dict(), …)"
        )
    machine.stack.append(GLOBALS[name])


def _stack_global(machine: _Machine, _: None) -> None:
    module, name = machine.pop(2)
    if type(module) is not str or type(name) is not str:
        raise CheckpointError("it names no module and no name")
    _global(machine, f"{module} {name}")


def _reduce(machine: _Machine, _: None) -> None:
    function, arguments = machine.pop(2)
    if type(function) is not _Function or not _is_tuple(arguments):
        raise CheckpointError(f"{_describe(function)} is called with {_describe(arguments)}")
    machine.stack.append(function.call(machine, arguments))


def _build(machine: _Machine, _: None) -> None:
    """Ignore a state dict's `_metadata`, the versions of its modules; refuse other attributes."""
    [state] = machine.pop(1)
    target = machine.top(Pairs)
    if not target.ordered or type(state) is not Pairs or [k for k, _ in state] != ["_metadata"]:
        raise CheckpointError("it sets attributes")


def _storage(machine: _Machine, _: None) -> None:
    """A persistent id: ("storage", type, key, device, number of elements)."""
    [fields] = machine.pop(1)
    if not _is_tuple(fields) or [type(f) for f in fields] != [str, _StorageType, str, str, int]:
        raise CheckpointError("it describes no storage")
    tag, kind, key, _device, count = fields
    # The key becomes a part of a record's name, `data/KEY`.
    is_number = key.isascii() and key.isdigit() and len(key) <= KEY_DIGITS
    if tag != "storage" or not is_number or count < 0:
        raise CheckpointError(f"{brief(tag)} {brief(key)} of {count} elements is no storage")
    storage = machine.storages.setdefault(key, Storage(key, kind.dtype, count))
    if (storage.dtype, storage.count) != (kind.dtype, count):
        raise CheckpointError(f"storage {key} is described in two ways")
    machine.stack.append(storage)


def _ordered(machine: _Machine, arguments: tuple[Any, ...]) -> Pairs:
    if arguments:
        raise CheckpointError("an OrderedDict is created with arguments")
    return Pairs(ordered=True)


def _view(machine: _Machine, arguments: tuple[Any, ...]) -> View:
    """_rebuild_tensor_v2(storage, offset, shape, stride, requires_grad, hooks)."""
    if len(arguments) == 7:
        raise CheckpointError("a conjugated or negated tensor is not read; save .clone() of it")
    if [type(a) for a in arguments] != [Storage, int, tuple, tuple, bool, Pairs]:
        raise CheckpointError("it describes no tensor")
    storage, offset, shape, stride, requires_grad, hooks = arguments
    if hooks or (requires_grad and not storage.dtype.is_floating_point):
        raise CheckpointError("it describes a tensor with hooks, or integers that are trained")
    # Before its numbers are looked at, since one long tuple could be the shape of every tensor.
    if len(shape) != len(stride) or len(shape) > RANK_LIMIT:
        raise CheckpointError(f"the tensor has {len(shape)} dimensions and {len(stride)} steps")
    if any(type(number) is not int for number in (*shape, *stride)):
        raise CheckpointError("the tensor's shape or stride has numbers that are no integers")
    if len(machine.views) == TENSOR_LIMIT:
        raise CheckpointError(f"there are more than {TENSOR_LIMIT} tensors")
    view = View(storage, offset, shape, stride, machine.operation)
    machine.views.append(view)
    return view


def _parameter(machine: _Machine, arguments: tuple[Any, ...]) -> View:
    """_rebuild_parameter(tensor, requires_grad, hooks)."""
    if [type(a) for a in arguments] != [View, bool, Pairs] or arguments[2]:
        raise CheckpointError("it describes no parameter")
    if arguments[1] and not arguments[0].storage.dtype.is_floating_point:
        raise CheckpointError("it describes integers that are trained")
    return arguments[0]


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of this module that a name in a pickle stands for."""

    call: Callable[[_Machine, tuple[Any, ...]], Any]


@dataclass(frozen=True, slots=True)
class _StorageType:
    """A class of torch's storages, which stands for a dtype."""

    dtype: torch.dtype


# "module name" as in the pickle → its meaning here. Nothing else has one.
GLOBALS: dict[str, _Function | _StorageType] = {
    "collections OrderedDict": _Function(_ordered),
    "torch._utils _rebuild_tensor_v2": _Function(_view),
    "torch._utils _rebuild_parameter": _Function(_parameter),
    "torch DoubleStorage": _StorageType(torch.float64),
    "torch FloatStorage": _StorageType(torch.float32),
    "torch HalfStorage": _StorageType(torch.float16),
    "torch BFloat16Storage": _StorageType(torch.bfloat16),
    "torch LongStorage": _StorageType(torch.int64),
    "torch IntStorage": _StorageType(torch.int32),
    "torch ShortStorage": _StorageType(torch.int16),
    "torch CharStorage": _StorageType(torch.int8),
    "torch ByteStorage": _StorageType(torch.uint8),
    "torch BoolStorage": _StorageType(torch.bool),
}
REFUSED = {  # names that are refused, and their meaning for the message
    "torch._utils _rebuild_tensor_v3": "a tensor of float8 or of unsigned integers",
    "torch._utils _rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils _rebuild_qtensor": "a quantized tensor",
    "torch._utils _rebuild_meta_tensor_no_storage": "a tensor without values",
    "torch ComplexFloatStorage": "complex numbers",
    "torch ComplexDoubleStorage": "complex numbers",
    "torch QInt8Storage": "quantized numbers",
    "torch QUInt8Storage": "quantized numbers",
    "torch QInt32Storage": "quantized numbers",
}

NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
Argument = Callable[[_Machine], Any]
Operation = Callable[[_Machine, Any], None]
OPERATIONS: dict[str, tuple[Argument | None, Operation]] = {
    "PROTO": (_number("<B"), _protocol),
    "FRAME": (_number("<Q"), _frame),
    "STOP": (None, lambda machine, _: None),
    "NONE": (None, _constant(None)),
    "NEWTRUE": (None, _constant(True)),
    "NEWFALSE": (None, _constant(False)),
    "BININT": (_number("<i"), _push),
    "BININT1": (_number("<B"), _push),
    "BININT2": (_number("<H"), _push),
    "LONG1": (_long, _push),
    "BINFLOAT": (_number(">d"), _push),
    "BINUNICODE": (_text(4), _push),
    "SHORT_BINUNICODE": (_text(1), _push),
    "EMPTY_LIST": (None, lambda machine, _: machine.stack.append([])),
    "EMPTY_DICT": (None, lambda machine, _: machine.stack.append(Pairs(ordered=False))),
    "EMPTY_TUPLE": (None, _constant(())),
    "TUPLE1": (None, _tuple(1)),
    "TUPLE2": (None, _tuple(2)),
    "TUPLE3": (None, _tuple(3)),
    "TUPLE": (None, lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark()))),
    "MARK": (None, _mark),
    "APPEND": (None, lambda machine, _: _extend(machine, machine.pop(1))),
    "APPENDS": (None, lambda machine, _: _extend(machine, machine.pop_to_mark())),
    "SETITEM": (None, lambda machine, _: _set_items(machine, machine.pop(2))),
    "SETITEMS": (None, lambda machine, _: _set_items(machine, machine.pop_to_mark())),
    "BINPUT": (_number("<B"), _memoize),
    "LONG_BINPUT": (_number("<I"), _memoize),
    "MEMOIZE": (None, _memoize),
    "BINGET": (_number("<B"), _recall),
    "LONG_BINGET": (_number("<I"), _recall),
    "GLOBAL": (_lines, _global),
    "STACK_GLOBAL": (None, _stack_global),
    "REDUCE": (None, _reduce),
    "BUILD": (None, _build),
    "BINPERSID": (None, _storage),
}
