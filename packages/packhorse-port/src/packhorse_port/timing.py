"""What an executor answers to questions about latency and cycles: the time its last call took."""

from __future__ import annotations

from packhorse.errors import InputError
from packhorse_port.notices import place

EVENTS = ("input", "input_complete", "output", "output_complete")


class Timed:
    """The times of the last call, by PopTorch's methods."""

    _times: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # of EVENTS

    def cycleCount(self) -> int:
        """Nanoseconds that the last call computed, one to a cycle."""
        if not self._times[2]:
            raise InputError(
                f"{place()}cycleCount() is that of the last call: call the model first"
            )
        return int((self._times[2] - self._times[1]) * 1e9)

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """When inputs and outputs of the last call were asked for and complete."""
        times = zip(EVENTS, self._times, strict=True)
        return {name: [[at] if at else []] for name, at in times}

    def _between(self, begin: int, end: int) -> tuple[float, float, float]:
        """Least, most, mean: the same, for a call is timed as one."""
        seconds = self._times[end] - self._times[begin]
        return (seconds, seconds, seconds)

    def getLatency(self) -> tuple[float, float, float]:
        """Seconds of the last call."""
        return self._between(0, 3)

    def getHostIpuLatency(self) -> tuple[float, float, float]:
        """Seconds of handing it the inputs."""
        return self._between(0, 1)

    def getComputeLatency(self) -> tuple[float, float, float]:
        """Seconds of computing."""
        return self._between(1, 2)

    def getIpuHostLatency(self) -> tuple[float, float, float]:
        """Seconds of fetching the outputs."""
        return self._between(2, 3)
