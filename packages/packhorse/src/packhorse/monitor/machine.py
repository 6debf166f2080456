"""The CPU: what it is, what it can, how busy it is.

Linux tells all of it in files, read here as text: the first core's entry of /proc/cpuinfo (the file
is as long as the machine has cores), /proc/meminfo, and a sensor below /sys where one is that is
known to be the CPU's. Elsewhere psutil is asked, if it is installed. A virtual machine mostly has
no sensor, and then no temperature is shown rather than a wrong one.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packhorse.monitor.device import Device

PROC, SYS = Path("/proc"), Path("/sys")
# Our name of a feature, and the kernel's; one of them is enough.
FEATURES = {
    "avx2": {"avx2"},
    "avx512": {"avx512f"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "vnni": {"avx512_vnni", "avx_vnni"},
    "amx": {"amx_tile"},
    "sve": {"sve"},
}
SENSORS = {"coretemp", "k10temp", "zenpower", "cpu_thermal", "x86_pkg_temp", "cpu-thermal"}


def cpu(proc: Path = PROC, sys: Path = SYS) -> Device:
    """The processor and the machine's memory."""
    if not (proc / "meminfo").exists():
        return _by_psutil()
    told, memory = _first_core(proc / "cpuinfo"), _table(proc / "meminfo")
    flags = set((told.get("flags") or told.get("Features", "")).split())
    total, free = (_kilobytes(memory.get(name)) for name in ("MemTotal", "MemAvailable"))
    return Device(
        "cpu",
        told.get("model name") or platform.processor() or platform.machine(),
        features=tuple(name for name, any_of in FEATURES.items() if any_of & flags),
        cores=_cores(),
        load=_load(),
        memory_used=None if total is None or free is None else total - free,
        memory_total=total,
        clock=_number(told.get("cpu MHz")),
        temperature=_temperature(sys),
    )


def _by_psutil() -> Device:
    """What is known without a kernel that tells it in files."""
    name = platform.processor() or platform.machine()
    try:
        import psutil
    except ImportError:
        return Device("cpu", name, cores=_cores(), load=_load())
    memory, clock = psutil.virtual_memory(), None
    with contextlib.suppress(Exception):  # some systems have no way to tell
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
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):  # Windows has none
        return None


def _first_core(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                break
            name, _, value = line.partition(":")
            found[name.strip()] = value.strip()
    return found


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
    """The first sensor that is the CPU's, in degrees Celsius."""
    places: Mapping[str, tuple[str, str]] = {
        "class/hwmon/*": ("name", "temp1_input"),
        "class/thermal/thermal_zone*": ("type", "temp"),
    }
    for pattern, (name, value) in places.items():
        for place in sorted(sys.glob(pattern)):
            if _text(place / name).strip() in SENSORS:
                number = _number(_text(place / value))
                return None if number is None else number / 1000
    return None
