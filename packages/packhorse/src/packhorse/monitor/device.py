"""One device as the monitor shows it, whether CPU or GPU; None is what cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of this moment, in bytes, MHz, degrees Celsius and watts."""

    device: str  # "cpu", "gpu 0"
    name: str
    features: tuple[str, ...] = ()  # instruction sets that decide how fast a CPU encodes
    cores: int | None = None
    load: float | None = None  # of a CPU: processes that ran or waited to, mean of a minute
    utilisation: float | None = None  # of a GPU: 0 to 1
    memory_used: int | None = None
    memory_total: int | None = None
    clock: float | None = None
    temperature: float | None = None
    power: float | None = None
    bus: str | None = None  # where a GPU is plugged in
    pids: tuple[int, ...] = ()  # processes of ours that use it
    memory_by_pid: Mapping[int, int | None] = field(default_factory=dict)  # of every process
