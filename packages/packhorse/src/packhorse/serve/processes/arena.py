"""Shared memory between a front and an engine, divided into blocks by the front alone.

The memory is an anonymous file (memfd), which needs no mount, has no name that others could open,
and disappears with the processes that hold it. Containers limit /dev/shm to 64 MB by default; this
is not limited by it. Pages take memory only once they are written, and large blocks give theirs
back when they are freed.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from contextlib import suppress

import numpy as np

ALIGNMENT = 64  # bytes; a cache line, so that blocks of two requests never share one
TRIM_BYTES = 1 << 20  # blocks from this size on return their pages when they are freed


def create(size: int) -> int:
    """Return the descriptor of new anonymous shared memory."""
    descriptor = os.memfd_create("packhorse", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


class Arena:
    """Shared memory as this process sees it; the front also allocates in it."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory and close the descriptor."""
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        os.close(descriptor)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self._memory = memoryview(self._map)
        self._free = [(0, self.size)]  # (begin, end), in order, never adjacent

    def array(self, offset: int, count: int, dtype: type[np.generic]) -> np.ndarray:
        """Return a view of `count` numbers at an offset."""
        size = count * np.dtype(dtype).itemsize
        return self.bytes[offset : offset + size].view(dtype)

    def write(self, offset: int, values: np.ndarray) -> None:
        """Copy an array to an offset, as float32.

        By `memoryview`: numpy would let go of the interpreter for more than 500 numbers, and then
        wait for other threads to get it back.
        """
        if values.dtype != np.float32 or not values.flags.c_contiguous:
            values = np.ascontiguousarray(values, np.float32)
        if values.size:
            self._memory[offset : offset + values.nbytes] = values.data.cast("B")

    def read(self, begin: int, end: int) -> bytes:
        """Return a copy of the bytes between two offsets."""
        return self._memory[begin:end].tobytes()

    def allocate(self, size: int) -> int | None:
        """Return the offset of a new block; None if there is no room."""
        size = _aligned(size)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                if end - begin == size:
                    del self._free[index]
                else:
                    self._free[index] = (begin + size, end)
                return begin
        return None

    def release(self, offset: int, size: int) -> None:
        """Free a block."""
        size = _aligned(size)
        if size >= TRIM_BYTES:
            page = mmap.PAGESIZE
            begin = -(-offset // page) * page
            end = (offset + size) // page * page
            with suppress(OSError):  # some sandboxes do not have it
                self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)
        begin = offset
        end = offset + size
        index = bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))

    @property
    def used(self) -> int:
        """Bytes in blocks."""
        return self.size - sum(end - begin for begin, end in self._free)


def _aligned(size: int) -> int:
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
