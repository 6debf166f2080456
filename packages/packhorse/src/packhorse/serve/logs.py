"""The server's log on stderr: lines for people, or one JSON object per line.

Neither texts nor API keys are ever logged. The line about a request has its route, status, sizes
and times. The line about an error has its class and stack frames but not its message, which may
repeat request content. Every line that is written while a request is answered has the request's
ids.
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import traceback
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import orjson

from packhorse.serve.settings import ServeSettings
from packhorse.serve.tracing import CURRENT

if TYPE_CHECKING:
    from packhorse.serve.metrics import RequestRecord

LOGGER = logging.getLogger("packhorse.serve")
REQUESTS = logging.getLogger("packhorse.serve.requests")


class JsonLines(logging.Formatter):
    """One JSON object per line; `extra={"facts": {…}}` adds its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for one log record."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "facts", {})
        if (ids := CURRENT.get()) is not None:
            line |= ids.facts()
        if record.exc_info and record.exc_info[1]:
            line["error"], line["frames"] = _describe(record.exc_info[1])
        return orjson.dumps(line, default=str).decode()


class PlainLines(logging.Formatter):
    """Lines of time, level and message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, without the stack frames of an error."""
        line = super().formatMessage(record)
        if (ids := CURRENT.get()) is None:
            return line
        return " ".join([line, *(f"{name}={value}" for name, value in ids.facts().items())])

    def formatException(self, ei: Any) -> str:
        """Return the stack frames and the class of an error, without its message."""
        kind, frames = _describe(ei[1])
        return "\n".join([*frames, kind])


def set_up(settings: ServeSettings) -> None:
    """Send the log of the server and of uvicorn to stderr, in the format of the settings.

    SIGUSR1 makes a process write there what each of its threads is doing, also one that hangs.
    """
    _write_stacks_on_signal()
    handler = logging.StreamHandler(sys.stderr)
    plain = PlainLines("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if settings.log_format == "json" else plain)
    for name, level in (("packhorse", settings.log_level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
    REQUESTS.disabled = not settings.log_requests


def _write_stacks_on_signal() -> None:
    if not hasattr(signal, "SIGUSR1"):
        return
    with suppress(OSError, ValueError):  # stderr is no file
        # The handler of a program that has one is called too; the default would end the process.
        faulthandler.register(signal.SIGUSR1, chain=callable(signal.getsignal(signal.SIGUSR1)))


def log_request(record: RequestRecord, route: str, status: int) -> None:
    """Log a request that has ended, if --log-requests is set."""
    if REQUESTS.disabled or not REQUESTS.isEnabledFor(logging.INFO):
        return
    facts: dict[str, Any] = {"route": route, "status": status}
    facts["ms"] = round(1e3 * (perf_counter() - record.started), 1)
    if record.model is not None:
        facts |= {"model": record.model.name, "inputs": record.inputs, "tokens": record.tokens}
    if record.api_key is not None:
        facts["key"] = record.key  # its name
    if record.bulk:
        facts["lane"] = "bulk"
    if record.pack:
        facts["pack"] = record.pack
    if record.error:
        facts["error"] = record.error
    message = " ".join(f"{name}={value}" for name, value in facts.items())
    REQUESTS.info(message, extra={"facts": facts})


def _describe(error: BaseException) -> tuple[str, list[str]]:
    """Return the class name of an error and the stack frames it came from; not its message."""
    frames = traceback.extract_tb(error.__traceback__)
    return type(error).__name__, [f"{f.filename}:{f.lineno} {f.name}" for f in frames]
