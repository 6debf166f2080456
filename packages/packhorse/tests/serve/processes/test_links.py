"""Blocks of shared memory, records on a socket, and control messages with descriptors."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import InputError, MissingExtra, Overloaded, RequestFailed
from packhorse.serve.pack_info import PackInfo
from packhorse.serve.processes.arena import ALIGNMENT, Arena, create
from packhorse.serve.processes.messages import (
    CANCEL,
    DONE,
    FAILED,
    RUN,
    Control,
    Done,
    Records,
    Run,
    pack_cancel,
    pack_failed,
    unpack_cancel,
    unpack_failed,
)

SIZE = 1 << 16


@given(st.lists(st.tuples(st.booleans(), st.integers(1, SIZE // 3)), max_size=60))
def test_blocks_never_overlap_and_all_memory_comes_back(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(create(SIZE))
    blocks: dict[int, int] = {}
    for frees, size in steps:
        if frees and blocks:
            offset = next(iter(blocks))
            arena.release(offset, blocks.pop(offset))
        elif (offset := arena.allocate(size)) is not None:
            taken = [(begin, begin + length) for begin, length in blocks.items()]
            assert all(offset + size <= begin or offset >= end for begin, end in taken)
            assert offset % ALIGNMENT == 0 and offset + size <= SIZE
            blocks[offset] = size
    for offset, size in blocks.items():
        arena.release(offset, size)
    assert arena.used == 0 and arena.allocate(SIZE) == 0


def test_two_processes_see_the_same_memory_and_large_blocks_give_theirs_back() -> None:
    descriptor = create(8 << 20)
    ours = Arena(os.dup(descriptor))
    theirs = Arena(os.dup(descriptor))
    offset = ours.allocate(4 << 20)
    assert offset is not None
    ours.array(offset, 1 << 20, np.float32)[:] = 1.5
    assert theirs.array(offset, 1 << 20, np.float32).sum() == 1.5 * (1 << 20)
    assert os.fstat(descriptor).st_blocks * 512 >= 4 << 20
    ours.release(offset, 4 << 20)
    assert os.fstat(descriptor).st_blocks * 512 < 1 << 20
    os.close(descriptor)


@given(st.lists(st.integers(1, 400), max_size=40), st.integers(0, 2**62))
def test_records_arrive_whole_however_the_socket_cuts_them(cuts: list[int], number: int) -> None:
    run = Run(number, 3, -1, 2, 17, 64, 128, 256, "hidden,pooled")
    done = Done(number, PackInfo(0.5, 3.0, 1.25, 2.5), 100.0, 2.0)
    refused = pack_failed(number, Overloaded("full"), 7, 2.5)
    data = run.pack() + done.pack() + pack_cancel(number) + refused
    records = Records()
    received: list[tuple[int, bytes]] = []
    begin = 0
    for cut in [*cuts, len(data)]:
        received += records.feed(data[begin : begin + cut])
        begin += cut
    assert [kind for kind, _ in received] == [RUN, DONE, CANCEL, FAILED]
    assert Run.unpack(received[0][1]) == run
    assert Done.unpack(received[1][1]) == done
    assert unpack_cancel(received[2][1]) == number
    request, error, waiting, rate = unpack_failed(received[3][1])
    assert (request, type(error), str(error), waiting, rate) == (number, Overloaded, "full", 7, 2.5)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("bad"), InputError),
        (ValueError("odd"), RequestFailed),
        (MissingExtra("onnx", "onnx"), MissingExtra),
    ],
)
def test_an_error_of_ours_keeps_its_class(error: Exception, kind: type) -> None:
    (record,) = Records().feed(pack_failed(1, error, 0, 0.0))
    arrived = unpack_failed(record[1])[1]
    assert type(arrived) is kind and str(error) in str(arrived)


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_control_messages_carry_descriptors_and_may_be_large(size: int) -> None:
    ours, theirs = Control.pair()
    reading, writing = os.pipe()
    ours.send({"kind": "x", "text": "a" * size}, [writing])
    os.close(writing)
    received = theirs.receive()
    assert received is not None
    message, (descriptor,) = received
    assert message == {"kind": "x", "text": "a" * size}
    os.write(descriptor, b"through")
    assert os.read(reading, 10) == b"through"
    os.close(descriptor)
    os.close(reading)
    ours.close()
    assert theirs.receive() is None
    theirs.close()


def test_a_process_that_does_not_read_blocks_nobody() -> None:
    ours, theirs = Control.pair()
    with pytest.raises(BlockingIOError):
        for number in range(100_000):
            ours.send({"kind": "ask", "id": number})
    assert theirs.receive() == ({"kind": "ask", "id": 0}, [])
    ours.close()
    theirs.close()


def test_a_record_smaller_than_its_header_is_an_error() -> None:
    with pytest.raises(ValueError, match="smaller than its header"):
        Records().feed(bytes(16))
