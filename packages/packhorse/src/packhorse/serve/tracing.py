"""Identify a request in responses, logs and traces: X-Request-Id and W3C Trace Context.

    ids = read_ids(scope["headers"])
    ids.request, ids.traceparent

A request id of the client is kept if it is one that can stand in a header and a log line as it is;
otherwise, and if there is none or more than one, a new one is made. `traceparent` is read as the
W3C recommendation says (https://www.w3.org/TR/trace-context/): the request becomes a new span of
the client's trace, or, if the header is missing or malformed, the first span of a new trace.

`CURRENT` holds the ids while a request is answered, for the log. A context variable and not an
argument: libraries log too, and functions deep inside have no other use for the ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

# Long enough for what proxies make. No blanks, quotes or backslashes: an id stands in log lines.
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
# version - trace id - parent id - flags. Versions after 00 may append fields, after another dash.
TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
FORBIDDEN_VERSION = b"ff"
SAMPLED = 1  # the only flag of version 00
REQUEST_ID_HEADER = b"x-request-id"
TRACEPARENT_HEADER = b"traceparent"

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The ids of one request in one process."""

    request: str
    trace: str  # 32 hexadecimal digits
    span: str  # 16 hexadecimal digits: the work of this process on the request
    parent: str = ""  # the client's span; empty in a new trace
    sampled: bool = False  # whether the client records this trace

    @property
    def traceparent(self) -> str:
        """The header that makes whoever reads it a child of this span."""
        return f"00-{self.trace}-{self.span}-{int(self.sampled):02x}"

    def facts(self) -> dict[str, str]:
        """Return the fields of a log line."""
        return {"request_id": self.request, "trace_id": self.trace, "span_id": self.span}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of a response, or of a request to another process."""
        return [
            (REQUEST_ID_HEADER, self.request.encode()),
            (TRACEPARENT_HEADER, self.traceparent.encode()),
        ]


CURRENT: ContextVar[RequestIds | None] = ContextVar("packhorse_request_ids", default=None)


def new_ids() -> RequestIds:
    """Return the ids of a request that brings none."""
    return read_ids(())


def read_ids(headers: Headers) -> RequestIds:
    """Return the ids of a request with these headers, whose names are in lower case."""
    request_ids: list[bytes] = []
    parents: list[bytes] = []
    for name, value in headers:
        if name == REQUEST_ID_HEADER:
            request_ids.append(value)
        elif name == TRACEPARENT_HEADER:
            parents.append(value)
    random = os.urandom(40).hex()  # one call to the system for all ids
    request = random[:32]
    if len(request_ids) == 1 and REQUEST_ID.fullmatch(request_ids[0]):
        request = request_ids[0].decode()
    # Several headers are ambiguous, and the recommendation lets nobody choose one of them.
    context = _parse(parents[0]) if len(parents) == 1 else None
    if context is None:
        return RequestIds(request, random[32:64], random[64:])
    trace, parent, sampled = context
    return RequestIds(request, trace, random[64:], parent, sampled)


def replace_ids(headers: Headers, ids: RequestIds) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a request with these ids instead of its own."""
    own = (REQUEST_ID_HEADER, TRACEPARENT_HEADER)
    return (*((name, value) for name, value in headers if name not in own), *ids.headers())


def _parse(header: bytes) -> tuple[str, str, bool] | None:
    """Return trace id, parent id and the flag `sampled`; None if the header is invalid."""
    match = TRACEPARENT.fullmatch(header.strip(b" \t"))
    if match is None:
        return None
    version, trace, parent, flags, rest = match.groups()
    if version == FORBIDDEN_VERSION or (version == b"00" and rest is not None):
        return None
    if not int(trace, 16) or not int(parent, 16):
        return None
    return trace.decode(), parent.decode(), bool(int(flags, 16) & SAMPLED)
