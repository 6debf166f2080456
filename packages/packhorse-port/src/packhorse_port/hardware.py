"""What a script asks of the machine: is there an IPU, which version, its errors, its log level.

There is none, and the functions say so: a script that asks has a branch for that. The device that
runs models is chosen by `packhorse.device.choose_device()`: a GPU if torch sees one.
"""

from __future__ import annotations

import logging

from packhorse.errors import PackhorseError
from packhorse_port.notices import LOGGER, UsageError

LEVELS = {
    "TRACE": logging.DEBUG,
    "TRACE_ALL": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": logging.CRITICAL + 1,
}

LEVEL_NUMBERS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}
logger = logging.getLogger(LOGGER)

# `except poptorch.Error` catches every error that Packhorse raises.
Error = PackhorseError


class RecoverableError(Error):
    """An IPU failed and can be reset; never raised here."""

    recovery_action = ""


class UnrecoverableError(Error):
    """An IPU failed for good; never raised here."""


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """False: there is no IPU."""
    return False


def ipuHardwareVersion() -> int:
    """0, for no IPU; PopTorch returns 2 for a Mk2."""
    return 0


def setLogLevel(level: str | int) -> None:
    """Set the level of the logger `packhorse_port`, by PopTorch's names or numbers, or Python's."""
    if isinstance(level, int):
        if level not in LEVEL_NUMBERS and level < logging.DEBUG:
            raise UsageError(f"Invalid log level integer: {level}; PopTorch has {LEVEL_NUMBERS}")
        level = LEVEL_NUMBERS.get(level, level)
    elif level.upper() not in LEVELS:
        *names, last = sorted(LEVEL_NUMBERS.values())
        raise UsageError(
            f"Unknown log level: {level}. Valid values are {', '.join(names)} and {last}"
        )
    logger.setLevel(level if isinstance(level, int) else LEVELS[level.upper()])
