"""A device as the monitor shows it, and the CPU: its name, its features, how busy it is.

Linux has all of it in files, which are read as text: the first core's entry of /proc/cpuinfo (the
file repeats it for every core), /proc/meminfo, and a sensor below /sys that is known to be the
CPU's. On other systems psutil is used, if it is installed. A virtual machine mostly has no sensor;
then no temperature is shown rather than a wrong one.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROC = Path("/proc")
SYS = Path("/sys")
# Our name of a feature, and the kernel's names, of which one is enough.
FEATURES = {
    "avx2": {"avx2"},
    "avx512": {"avx512f"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "vnni": {"avx512_vnni", "avx_vnni"},
    "amx": {"amx_tile"},
    "sve": {"sve"},
}
SENSORS = {"coretemp", "k10temp", "zenpower", "cpu_thermal", "x86_pkg_temp", "cpu-thermal"}


@dataclass(frozen=True, slots=True)
class Device:
    """A CPU or GPU at one moment, in bytes, MHz, degrees Celsius and watts; None if unreadable."""

    device: str  # "cpu", "gpu 0"
    name: str
    features: tuple[str, ...] = ()  # instruction sets that decide how fast a CPU encodes
    cores: int | None = None
    load: float | None = None  # of a CPU: mean processes that ran or waited in the last minute
    utilisation: float | None = None  # of a GPU: 0 to 1
    memory_used: int | None = None
    memory_total: int | None = None
    clock: float | None = None
    temperature: float | None = None
    power: float | None = None
    bus: str | None = None  # PCI address of a GPU
    pids: tuple[int, ...] = ()  # packhorse processes that use it
    memory_by_pid: Mapping[int, int | None] = field(default_factory=dict)  # of every process


def cpu(proc: Path = PROC, sys: Path = SYS) -> Device:
    """Return the processor and the machine's memory."""
    if not (proc / "meminfo").exists():
        return _by_psutil()
    core = _first_core(proc / "cpuinfo")
    memory = _table(proc / "meminfo")
    flags = set((core.get("flags") or core.get("Features", "")).split())
    total, free = (_kilobytes(memory.get(name)) for name in ("MemTotal", "MemAvailable"))
    return Device(
        "cpu",
        core.get("model name") or platform.processor() or platform.machine(),
        features=tuple(name for name, any_of in FEATURES.items() if any_of & flags),
        cores=_cores(),
        load=_load(),
        memory_used=None if total is None or free is None else total - free,
        memory_total=total,
        clock=_number(core.get("cpu MHz")),
        temperature=_temperature(sys),
    )


def _by_psutil() -> Device:
    """Return what psutil knows, for systems other than Linux."""
    name = platform.processor() or platform.machine()
    try:
        import psutil
    except ImportError:
        return Device("cpu", name, cores=_cores(), load=_load())
    memory = psutil.virtual_memory()
    clock = None
    with contextlib.suppress(Exception):  # some systems do not report it
        clock = psutil.cpu_freq().current
    return Device(
        "cpu",
        name,
        cores=_cores(),
        load=_load(),
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        clock=clock,
    )


def _cores() -> int | None:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):  # Windows has none
        return None


def _first_core(path: Path) -> dict[str, str]:
    entry: dict[str, str] = {}
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                break
            name, _, value = line.partition(":")
            entry[name.strip()] = value.strip()
    return entry


def _table(path: Path) -> dict[str, str]:
    lines = _text(path).splitlines()
    return {name.strip(): value for name, _, value in (line.partition(":") for line in lines)}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _kilobytes(value: str | None) -> int | None:
    number = _number(value.split()[0] if value and value.split() else None)
    return None if number is None else int(number) << 10


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _temperature(sys: Path) -> float | None:
    """Return the first sensor of the CPU, in degrees Celsius."""
    sensors: Mapping[str, tuple[str, str]] = {
        "class/hwmon/*": ("name", "temp1_input"),
        "class/thermal/thermal_zone*": ("type", "temp"),
    }
    for pattern, (name, value) in sensors.items():
        for folder in sorted(sys.glob(pattern)):
            if _text(folder / name).strip() in SENSORS:
                number = _number(_text(folder / value))
                return None if number is None else number / 1000
    return None
