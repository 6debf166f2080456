"""The lane and the deadline of a request, from its headers.

`x-packhorse-lane: bulk` says that nobody waits for the answer. `x-packhorse-timeout` has the
seconds that the client waits; so have the headers that OpenAI's clients and Envoy send by
themselves. The shortest of them counts. A header of others that makes no sense is ignored, one of
ours is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from packhorse.serve.failures import Failure
from packhorse.serve.keys import LANES, ApiKey

LANE_HEADER = b"x-packhorse-lane"
TIMEOUT_HEADER = b"x-packhorse-timeout"
# Headers of others, and how many seconds their unit has.
TIMEOUT_HEADERS = {
    b"x-stainless-read-timeout": 1.0,  # OpenAI's Python client
    b"x-stainless-timeout": 1.0,  # its JavaScript client
    b"x-envoy-expected-rq-timeout-ms": 1e-3,
}


def is_bulk(headers: Mapping[bytes, bytes], key: ApiKey | None) -> bool | Failure:
    """Return whether a request is in the lane `bulk`, or why it cannot be in its lane."""
    marked = key is not None and key.bulk
    header = headers.get(LANE_HEADER)
    if header is None:
        return marked
    lane = header.decode("latin-1").strip().lower()
    if lane not in LANES:
        return Failure(400, f"x-packhorse-lane must be one of: {', '.join(LANES)}")
    if marked and lane == "interactive":
        return Failure(403, "the API key is one for the lane bulk; it cannot ask for interactive")
    return lane == "bulk"


def read_timeout(headers: Mapping[bytes, bytes]) -> float | Failure:
    """Return the seconds that the client waits for its answer; infinity if it does not say."""
    seconds = math.inf
    if TIMEOUT_HEADER in headers:
        seconds = _seconds(headers[TIMEOUT_HEADER])
        if seconds == math.inf:
            return Failure(400, "x-packhorse-timeout must be a number of seconds above 0")
    for name, unit in TIMEOUT_HEADERS.items():
        if name in headers:
            seconds = min(seconds, unit * _seconds(headers[name]))
    return seconds


def _seconds(header: bytes) -> float:
    """Return the positive number in a header; infinity if there is none."""
    try:
        seconds = float(header)
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf  # also if it is not a number
