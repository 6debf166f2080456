"""What was accepted without meaning here, or done otherwise than asked, said once each.

    say_once("autoRoundNumIPUs", "autoRoundNumIPUs has no effect: one device runs the model")
    taken()      # [Notice(key, text, line)]: for the summary after a script

A script for another machine sets many things that this one does not have. Refusing them would stop
the script, silence would deceive, repeating them in a loop would bury the rest; so each is a log
record of `packhorse_port`, once per key and process, with the line of the script that asked for it.
Python shows records of this level on stderr where no logging was set up. Saying a thing once needs
a memory that outlives the calls, which is this module's.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import NamedTuple

LOGGER = "packhorse_port"
OURS = str(Path(__file__).resolve().parents[1])
# Frames of libraries that call us on the script's behalf: the script's line is further out.
BETWEEN = (
    "torch",
    "keras",
    "tensorflow",
    "contextlib",
    "functools",
    "importlib",
    "_frozen_importlib",
)


class Notice(NamedTuple):
    """One thing said: its key, the sentence, and the script's line that led to it (or "")."""

    key: str
    text: str
    line: str


_said: dict[str, Notice] = {}
_lock = threading.Lock()


def say_once(key: str, text: str, level: int = logging.WARNING) -> None:
    """Log `text`, and keep it for `taken()`, unless `key` was said before in this process."""
    with _lock:
        if key in _said:
            return
        _said[key] = Notice(key, text, caller())
    place = f"{_said[key].line}: " if _said[key].line else ""
    logging.getLogger(LOGGER).log(level, "%s%s", place, text)


def taken() -> list[Notice]:
    """Everything said so far, in order."""
    with _lock:
        return list(_said.values())


def forget() -> None:
    """Begin again: the next script hears everything anew."""
    with _lock:
        _said.clear()


def caller() -> str:
    """`script.py:12`, the innermost line that is neither ours nor torch's; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not _between(module, frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def place() -> str:
    """`script.py:12: `, to begin an error with; "" where no script is to blame."""
    line = caller()
    return f"{line}: " if line else ""


def _between(module: str, path: str) -> bool:
    if module != "__main__" and module.split(".")[0] in BETWEEN:
        return True
    return path.startswith((OURS, "<frozen"))
