"""What a running executor tells `packhorse monitor`: host calls, samples, and how fast they go.

    tell, hush = voice(executor, "training", about={"model": "Net", "device": "cpu"})
    tell(rows)          # after each call
    hush()              # off the device; also when the executor is gone or the process ends

A script calls thousands of times a second, so a call only counts, in a microsecond; once a second
the counts are published (`status`). Each executor has a line of its own in the monitor.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from packhorse import status

PAUSE = 1.0  # seconds between two words
NUMBERS = itertools.count(1)

Tell = Callable[[int], None]
Hush = Callable[[], Any]

# Nothing to tell, nothing to end, no rows yet.
SILENCE: tuple[Tell, Hush, int] = (lambda rows: None, lambda: None, 0)


def voice(owner: object, does: str, about: Mapping[str, Any]) -> tuple[Tell, Hush]:
    """Something to tell each call's rows to, and something that ends it."""
    stack = ExitStack()
    say = stack.enter_context(status.publishing(f"port-{next(NUMBERS)}", about))
    calls = samples = before = 0
    last = time.monotonic()
    say({"does": f"{does}, first call", "calls": 0, "sequences": 0})

    def tell(rows: int) -> None:
        nonlocal calls, samples, before, last
        calls, samples, now = calls + 1, samples + rows, time.monotonic()
        if now - last < PAUSE:
            return
        speed = (calls - before) / (now - last)
        before, last = calls, now
        rates = {"calls_per_second": speed, "calls": calls, "sequences": samples}
        say({"does": f"{does}, {speed:,.3g} host calls/s", **rates})

    return tell, weakref.finalize(owner, stack.close)


def rows(leaves: Sequence[Any]) -> int:
    """Samples of a call: the first dimension of its first tensor."""
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
