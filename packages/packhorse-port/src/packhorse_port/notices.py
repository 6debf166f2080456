"""Notices: what a script asked for that has no effect or works differently here, logged once each.

    log_once("autoRoundNumIPUs", "autoRoundNumIPUs has no effect: one device runs the model")
    logged()      # [Notice(key, text, line)]: for the summary after a script

A script for another machine sets many things that this one does not have. Refusing them would stop
the script, silence would mislead, repeating them in a loop would bury everything else. So each is a
log record of `packhorse_port`, once per key and process, with the line of the script that asked for
it. Python shows records of this level on stderr if logging is not configured.

`print_summary` runs when a ported script has ended: what was provided, and which notices there
were. It goes to stderr, as lines or as one line of JSON: stdout belongs to the script.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from packhorse import errors
from packhorse_port.names import install_line

LOGGER = "packhorse_port"
# Frames in these folders, and of libraries that call us on the script's behalf, are skipped: the
# script's line is further out.
OWN_FOLDERS = tuple(
    str(Path(file).resolve().parent) + os.sep for file in (__file__, errors.__file__)
)
LIBRARIES = (
    "torch",
    "keras",
    "tensorflow",
    "contextlib",
    "functools",
    "importlib",
    "_frozen_importlib",
)


class Notice(NamedTuple):
    """One logged notice: its key, its text, and the script's line that caused it (or "")."""

    key: str
    text: str
    line: str


# Logging once needs a memory that outlives the calls; worker threads log too.
_logged: dict[str, Notice] = {}
_lock = threading.Lock()


def log_once(key: str, text: str, level: int = logging.WARNING) -> None:
    """Log `text` and keep it for `logged()`, unless `key` was logged before in this process."""
    with _lock:
        if key in _logged:
            return
        notice = Notice(key, text, script_line())
        _logged[key] = notice
    prefix = f"{notice.line}: " if notice.line else ""
    logging.getLogger(LOGGER).log(level, "%s%s", prefix, text)


def logged() -> list[Notice]:
    """All notices so far, in order."""
    with _lock:
        return list(_logged.values())


def reset() -> None:
    """Forget all notices, so that the next script gets them again."""
    with _lock:
        _logged.clear()


def script_line() -> str:
    """`script.py:12`: the innermost line outside our code and the libraries; "" if none."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not _is_skipped(module, frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_prefix() -> str:
    """`script.py:12: `, for the beginning of an error message; "" if there is no script."""
    line = script_line()
    return f"{line}: " if line else ""


class UsageError(errors.PackhorseError, ValueError, RuntimeError, AssertionError):
    """A mistake in a script. PopTorch raises one of these kinds, which a script may catch."""


def input_error(text: str) -> errors.InputError:
    """An error to raise, whose message begins with the script's line."""
    return errors.InputError(f"{line_prefix()}{text}")


def _is_skipped(module: str, path: str) -> bool:
    if module != "__main__" and module.split(".")[0] in LIBRARIES:
        return True
    # TensorFlow's AutoGraph runs a translated copy of the script's functions.
    is_translated = os.path.basename(path).startswith("__autograph_generated_file")
    return is_translated or path.startswith((*OWN_FOLDERS, "<frozen"))


# The summary. All that it needs is imported at the top: importing at exit makes Python forget that
# it was interrupted, and with that its exit code.

# Modules that a script may find provided: where they are implemented, and how to describe that.
PROVIDED = {
    "poptorch": ("packhorse_port", "packhorse_port"),
    "torchvision": ("packhorse_port.torchvision", "packhorse's datasets and transforms"),
    "tensorflow.python.ipu": ("packhorse_port.tensorflow", "packhorse_port.tensorflow"),
}


def summary() -> dict[str, Any]:
    """Modules that were provided, notices, and how to install a module that was missing."""
    last_error = getattr(sys, "last_value", None)
    missing = getattr(last_error, "name", None) if isinstance(last_error, ImportError) else None
    return {
        "provided": {
            name: description
            for name, (home, description) in PROVIDED.items()
            if name in sys.modules and home in sys.modules and _is_provided(name, home)
        },
        "notices": [notice._asdict() for notice in logged()],
        "missing": {missing: install_line(missing)} if missing else {},
    }


def _is_provided(name: str, home: str) -> bool:
    return name not in ("poptorch", "torchvision") or sys.modules[name] is sys.modules[home]


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The summary as text; empty if the script used nothing of ours."""
    lines = [f"{name} was {description}" for name, description in report["provided"].items()]
    keys = [
        notice["key"] + (f" ({notice['line']})" if notice["line"] else "")
        for notice in report["notices"]
    ]
    if keys:
        lines.append(f"different from an IPU, each logged above: {', '.join(keys)}")
    lines += [f"{name} is missing: {command}" for name, command in report["missing"].items()]
    return lines


def print_summary(process: int, as_json: bool) -> None:
    """Write the summary to stderr, in the process with this id only: a fork stays silent."""
    if os.getpid() != process:
        return
    report = summary()
    if as_json:
        text = json.dumps(report) + "\n"
    else:
        text = "".join(f"packhorse port: {line}\n" for line in summary_lines(report))
    with suppress(Exception):  # the script may have closed its stderr
        sys.stderr.write(text)
        sys.stderr.flush()
