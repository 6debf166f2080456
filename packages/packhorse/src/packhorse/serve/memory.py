"""Memory that the C library keeps, given back to the system."""

from __future__ import annotations

import ctypes


def trim_memory() -> None:
    """Return free pages to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
