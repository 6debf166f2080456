"""What is said when a ported script has ended: what it was given, and what differed from an IPU.

It goes to stderr, as lines or as one line of JSON: stdout belongs to the script alone. Each notice
was already said in full when its line was reached (`notices`), so the lines only recall them. All
that is needed is imported at the start: to evaluate code at the end makes Python forget that it was
interrupted, and its exit code with it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

from packhorse_port.names import install_line
from packhorse_port.notices import taken

PROVIDED = {
    "poptorch": ("packhorse_port", "packhorse_port"),
    "torchvision": ("packhorse_port.torchvision", "packhorse's datasets and transforms"),
    "tensorflow.python.ipu": ("packhorse_port.tensorflow", "packhorse_port.tensorflow"),
}


def summary() -> dict[str, Any]:
    """What was provided, what was said, and the extra that has a module that was missing."""
    missing = getattr(sys.last_value, "name", None) if _stopped_by(ImportError) else None
    return {
        "provided": {
            name: what
            for name, (home, what) in PROVIDED.items()
            if name in sys.modules and home in sys.modules and _is_ours(name, home)
        },
        "notices": [notice._asdict() for notice in taken()],
        "missing": {missing: install_line(missing)} if missing else {},
    }


def _is_ours(name: str, home: str) -> bool:
    return name not in ("poptorch", "torchvision") or sys.modules[name] is sys.modules[home]


def _stopped_by(kind: type[BaseException]) -> bool:
    return isinstance(getattr(sys, "last_value", None), kind)


def lines(found: dict[str, Any]) -> list[str]:
    """The summary to read; none where the script used nothing of ours."""
    told = [f"{name} was {what}" for name, what in found["provided"].items()]
    said = [
        each["key"] + (f" ({each['line']})" if each["line"] else "") for each in found["notices"]
    ]
    if said:
        told.append(f"other than on an IPU, each said above: {', '.join(said)}")
    return told + [f"{name} is missing: {how}" for name, how in found["missing"].items()]


def tell(process: int, as_json: bool) -> None:
    """Say it, if this is the process that was asked to."""
    if os.getpid() != process:
        return
    found = summary()
    text = json.dumps(found) + "\n" if as_json else ""
    text = text or "".join(f"packhorse port: {line}\n" for line in lines(found))
    with suppress(Exception):  # the script may have closed its stderr
        sys.stderr.write(text)
        sys.stderr.flush()
