"""NVIDIA GPUs, through NVML, the library that nvidia-smi uses (package nvidia-ml-py).

Every query is separate and may fail: an old driver does not support it, a slice of a GPU (MIG) has
no utilization, a container hides processes, a GPU may have fallen off the bus. What fails is None
and the rest is shown.

NVML stays open while the monitor watches: without a running GPU process the driver may take a
second to initialize.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packhorse.errors import MissingExtra
from packhorse.monitor.machine import Device

DRIVER = Path("/proc/driver/nvidia")  # exists if a driver is loaded
LOST = "does not answer"


@contextmanager
def opened(library: Any | None = None) -> Iterator[tuple[Any | None, list[str]]]:
    """Initialize NVML; yield it, or None, and notes for the user."""
    notes: list[str] = []
    if not library:
        library, notes = _library()
    if library is not None:
        failure = _initialize(library)
        if failure:
            library = None
            notes = [failure] if DRIVER.exists() else []
    try:
        yield library, notes
    finally:
        if library is not None:
            with contextlib.suppress(library.NVMLError):
                library.nvmlShutdown()


def _library() -> tuple[Any | None, list[str]]:
    try:
        import pynvml
    except ImportError:
        return None, [str(MissingExtra("nvidia-ml-py", "monitor"))] if DRIVER.exists() else []
    return pynvml, []


def _initialize(library: Any) -> str | None:
    """Return why NVML cannot be used; None if it can."""
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return f"GPUs cannot be read, NVML failed: {error}"
    return None


def devices(library: Any) -> list[Device]:
    """Return all GPUs, in the order of the bus."""
    count = _query(library, library.nvmlDeviceGetCount) or 0
    return [_device(library, number) for number in range(count)]


def utilization(library: Any, number: int) -> float | None:
    """Return the share of the last moments in which this GPU ran a kernel; None if unknown."""
    handle = _query(library, library.nvmlDeviceGetHandleByIndex, number)
    if handle is None:
        return None
    rates = _query(library, library.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else rates.gpu / 100


def _device(library: Any, number: int) -> Device:
    handle = _query(library, library.nvmlDeviceGetHandleByIndex, number)
    if handle is None:
        return Device(f"gpu {number}", LOST)

    def query(name: str, *arguments: Any) -> Any:
        function = getattr(library, f"nvmlDeviceGet{name}", None)
        return _query(library, function, handle, *arguments)

    memory = query("MemoryInfo")
    rates = query("UtilizationRates")
    milliwatts = query("PowerUsage")
    bus = query("PciInfo")
    processes = query("ComputeRunningProcesses") or ()
    memory_by_pid = {process.pid: process.usedGpuMemory for process in processes}
    return Device(
        f"gpu {number}",
        _text(query("Name")) or LOST,
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        clock=query("ClockInfo", library.NVML_CLOCK_SM),
        temperature=query("Temperature", library.NVML_TEMPERATURE_GPU),
        power=None if milliwatts is None else milliwatts / 1000,
        bus=None if bus is None else _text(bus.busId),
        pids=tuple(sorted(memory_by_pid)),
        memory_by_pid=memory_by_pid,
    )


def _query(library: Any, function: Callable[..., Any] | None, *arguments: Any) -> Any:
    """Return the answer; None if the query failed or this NVML does not have it."""
    try:
        return function(*arguments) if function else None
    except library.NVMLError:
        return None


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
