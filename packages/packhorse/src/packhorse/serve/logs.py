"""What the server says of itself on stderr: lines for people, or one JSON object a line.

Neither texts nor keys are ever logged: a line about a request has its route, its status, sizes and
times, and an error is told by its kind and the place it happened, because the message of an error
may repeat what was sent.
"""

from __future__ import annotations

import logging
import sys
import traceback
from time import perf_counter
from typing import Any

import orjson

from packhorse.serve.metrics import Seen
from packhorse.serve.settings import Settings

LOGGER = logging.getLogger("packhorse.serve")
REQUESTS = logging.getLogger("packhorse.serve.requests")


class JsonLines(logging.Formatter):
    """A JSON object a line; `extra={"facts": {…}}` adds its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "facts", {})
        if record.exc_info and record.exc_info[1]:
            line["error"], line["frames"] = _told(record.exc_info[1])
        return orjson.dumps(line, default=str).decode()


class PlainLines(logging.Formatter):
    """Time, level, message."""

    def formatException(self, ei: Any) -> str:
        """The frames and the kind of error, without its message."""
        kind, frames = _told(ei[1])
        return "\n".join([*frames, kind])


def set_up(settings: Settings) -> None:
    """Send what the server and uvicorn have to say to stderr, in the form that was asked for."""
    handler = logging.StreamHandler(sys.stderr)
    plain = PlainLines("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if settings.log_format == "json" else plain)
    level = settings.log_level.upper()
    for name, least in (("packhorse", level), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
    REQUESTS.disabled = not settings.log_requests


def told(seen: Seen, route: str, status: int) -> None:
    """A line about a request that has ended, if these are asked for."""
    if REQUESTS.disabled or not REQUESTS.isEnabledFor(logging.INFO):
        return
    facts: dict[str, Any] = {"route": route, "status": status}
    facts["ms"] = round(1e3 * (perf_counter() - seen.begun), 1)
    if seen.host is not None:
        facts |= {"model": seen.host.name, "inputs": seen.inputs, "tokens": seen.tokens}
    facts |= {"pack": seen.pack} if seen.pack else {}
    facts |= {"error": seen.error} if seen.error else {}
    message = " ".join(f"{name}={value}" for name, value in facts.items())
    REQUESTS.info(message, extra={"facts": facts})


def _told(error: BaseException) -> tuple[str, list[str]]:
    """The kind of an error and where it happened; not its message."""
    frames = traceback.extract_tb(error.__traceback__)
    return type(error).__name__, [f"{f.filename}:{f.lineno} {f.name}" for f in frames]
