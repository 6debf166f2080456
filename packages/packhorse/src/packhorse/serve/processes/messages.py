"""What processes of the server say to each other.

On a *link* between a front and an engine, messages are records with a fixed header, many per
second: `Run` and `Cancel` go to the engine, `Done` and `Failed` come back. A socket delivers bytes
and not records, so one read may return many of them or a part of one: `Records` cuts them out.

On a *control* socket between the supervisor and another process, messages are JSON documents, few
of them, with descriptors of sockets and shared memory attached.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from packhorse import errors
from packhorse.errors import PackhorseError, RequestFailed
from packhorse.runtime.shares import Share, Ticket
from packhorse.serve.pack_info import PackInfo
from packhorse.serve.processes import arena

RUN = 1
CANCEL = 2
DONE = 3
FAILED = 4
NO_SHARE = 2  # in the place of a lane: the request has no share

READ_BYTES = 1 << 16
READY = "ready"  # a front's reply to the question whether it is
_HEADER = struct.Struct("<II")  # bytes of the record with this header, kind
_RUN = struct.Struct("<QHiIIQQQdB")
_REQUEST = struct.Struct("<Q")
_DONE = struct.Struct("<Qffffff")
_DONE_RECORD = struct.Struct("<IIQffffff")  # with its header
_INLINE_BYTES = 1 << 16  # a longer control message travels in shared memory
_MAX_DESCRIPTORS = 8


class Run(NamedTuple):
    """Run sequences, whose data is in a block of the link's arena; see `front` for its layout."""

    request: int
    model: int  # place among the engine's models
    only: int  # run per-token heads on tokens with this id alone; -1: on all
    sequences: int
    tokens: int
    offset: int  # of the block
    output: int  # offset of the part of the block for the results
    end: int  # of the block
    heads: str  # joined by commas
    ticket: Ticket = Ticket()

    def pack(self) -> bytes:
        """Return the record."""
        *numbers, heads, (share, deadline) = self
        lane = NO_SHARE if share is None else int(share.bulk)
        text = heads if share is None else f"{heads}\n{share.client}"
        body = _RUN.pack(*numbers, deadline, lane) + text.encode()
        return _HEADER.pack(_HEADER.size + len(body), RUN) + body

    @classmethod
    def unpack(cls, body: bytes) -> Run:
        """Read the record's body."""
        *numbers, deadline, lane = _RUN.unpack_from(body)
        heads, _, client = body[_RUN.size :].decode().partition("\n")
        share = None if lane == NO_SHARE else Share(client, bool(lane))
        return cls._make((*numbers, heads, Ticket(share, deadline)))


class Done(NamedTuple):
    """The results of a request are in its block."""

    request: int
    pack_info: PackInfo
    waiting_tokens: float  # in the engine's queue
    rate: float  # tokens per second at which these will run

    def pack(self) -> bytes:
        """Return the record."""
        return pack_done(*self)

    @classmethod
    def unpack(cls, body: bytes) -> Done:
        """Read the record's body."""
        request, fill, neighbors, queue_ms, compute_ms, waiting, rate = _DONE.unpack(body)
        return cls(request, PackInfo(fill, neighbors, queue_ms, compute_ms), waiting, rate)


def pack_done(request: int, pack_info: PackInfo, waiting_tokens: float, rate: float) -> bytes:
    """Return the record of a `Done` that nobody needs as an object."""
    return _DONE_RECORD.pack(_DONE_RECORD.size, DONE, request, *pack_info, waiting_tokens, rate)


def pack_cancel(request: int) -> bytes:
    """Return the record that cancels a request."""
    return _HEADER.pack(_HEADER.size + _REQUEST.size, CANCEL) + _REQUEST.pack(request)


def unpack_cancel(body: bytes) -> int:
    """Return the number of the request to cancel."""
    return _REQUEST.unpack(body)[0]


def pack_failed(request: int, error: BaseException, waiting_tokens: int, rate: float) -> bytes:
    """Return the record for a request that ended with an error."""
    retry_after = error.retry_after if isinstance(error, PackhorseError) else 0.0
    values = [type(error).__name__, str(error), waiting_tokens, rate, retry_after]
    text = json.dumps(values).encode()
    size = _HEADER.size + _REQUEST.size + len(text)
    return _HEADER.pack(size, FAILED) + _REQUEST.pack(request) + text


def unpack_failed(body: bytes) -> tuple[int, PackhorseError, float, float]:
    """Return the request, its error as one of our own classes, waiting tokens and rate."""
    (request,) = _REQUEST.unpack_from(body)
    name, message, waiting_tokens, rate, retry_after = json.loads(body[_REQUEST.size :])
    error = rebuild_error(name, message)
    error.retry_after = retry_after
    return request, error, waiting_tokens, rate


def rebuild_error(name: str, message: str) -> PackhorseError:
    """Return an error of another process as one of our own classes."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PackhorseError)):
        return RequestFailed(f"{name}: {message}")
    error = kind.__new__(kind)  # some classes make their message of other arguments
    Exception.__init__(error, message)
    return error


class Records:
    """Cuts records out of the bytes that a socket delivers."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the kind and the body of each record that is complete."""
        data = self._rest + data if self._rest else data
        records: list[tuple[int, bytes]] = []
        begin = 0
        while len(data) - begin >= _HEADER.size:
            size, kind = _HEADER.unpack_from(data, begin)
            if size < _HEADER.size:
                raise ValueError(f"a record of {size} bytes is smaller than its header")
            if len(data) - begin < size:
                break
            records.append((kind, data[begin + _HEADER.size : begin + size]))
            begin += size
        self._rest = data[begin:]
        return records


class Control:
    """One end of a control socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    @classmethod
    def pair(cls) -> tuple[Control, Control]:
        """Return two connected ends."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ends[0]), cls(ends[1])

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a document; the receiver gets copies of the descriptors.

        Never waits: if the receiver has not read for long, raises BlockingIOError, an OSError.
        """
        data = json.dumps(message).encode()
        if len(data) <= _INLINE_BYTES:
            return self._send(b"J" + data, descriptors)
        memory = arena.create(len(data))
        try:
            os.pwrite(memory, data, 0)
            self._send(b"M", [memory, *descriptors])
        finally:
            os.close(memory)

    def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        # Not socket.send_fds, which takes flags and ignores them.
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
        self.socket.sendmsg([data], [rights] if descriptors else [], socket.MSG_DONTWAIT)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return a document and descriptors; None if the other end was closed."""
        try:
            data, descriptors, *_ = socket.recv_fds(
                self.socket, _INLINE_BYTES + 1, _MAX_DESCRIPTORS
            )
        except ConnectionResetError:
            return None
        if not data:
            return None
        for descriptor in descriptors:  # compilers that this process starts must not hold them
            os.set_inheritable(descriptor, False)
        if data[:1] == b"M":
            memory = descriptors.pop(0)
            data = b"M" + os.pread(memory, os.fstat(memory).st_size, 0)
            os.close(memory)
        return json.loads(data[1:]), descriptors

    def close(self) -> None:
        """Close this end; the other receives None."""
        self.socket.close()
