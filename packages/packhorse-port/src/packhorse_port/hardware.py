"""What a script asks of the machine: is there an IPU, which one, how much shall be logged.

There is none, and saying so is the honest answer: a script that asks has a branch for that. What
runs in its place is `packhorse.device.choose_device()`'s, a GPU if torch sees one.
"""

from __future__ import annotations

import logging

from packhorse.errors import InputError
from packhorse_port.notices import LOGGER

LEVELS = {
    "TRACE": logging.DEBUG,
    "TRACE_ALL": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": logging.CRITICAL + 1,
}


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """No: there is no IPU."""
    return False


def ipuHardwareVersion() -> int:
    """0, for no IPU; PopTorch answers 2 for a Mk2."""
    return 0


def setLogLevel(level: str | int) -> None:
    """How much `packhorse_port` logs, in PopTorch's words."""
    if isinstance(level, str) and level.upper() not in LEVELS:
        raise InputError(f"setLogLevel takes one of {', '.join(LEVELS)}, not {level!r}")
    number = LEVELS[level.upper()] if isinstance(level, str) else level
    logging.getLogger(LOGGER).setLevel(number)
