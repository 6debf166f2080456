"""Figures of the batches that a request ran in, for the headers of its response."""

from __future__ import annotations

from typing import NamedTuple


class PackInfo(NamedTuple):
    """The batches that a request ran in: means over its jobs, and the longest times."""

    fill: float = 1.0  # tokens of inputs / all tokens of the batch
    neighbors: float = 0.0  # other sequences in the batch
    queue_ms: float = 0.0
    compute_ms: float = 0.0

    def header(self) -> str:
        """Return the value of the header `x-packhorse-pack`, whose field names clients know."""
        return f"fill={self.fill:.3f};neighbours={self.neighbors:.0f};queue_ms={self.queue_ms:.1f}"
