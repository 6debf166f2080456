"""Ctrl-C and SIGTERM as a wish: the run ends behind the step it is in, with a checkpoint.

A shell knows a process that a signal ended by 128 and the signal's number: 130 for Ctrl-C, 143 for
SIGTERM; `packhorse train` ends so, and the same command goes on from there. A second signal does
not wait.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def wishes() -> Iterator[Callable[[], int]]:
    """A function that tells which signal came, 0 while none has; all is as before afterwards.

    Python delivers signals to the main thread alone; elsewhere none is caught.
    """
    came: list[int] = []

    def heed(number: int, frame: Any) -> None:
        if came:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        came.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, heed) for number in SIGNALS}
    try:
        yield lambda: came[0] if came else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
