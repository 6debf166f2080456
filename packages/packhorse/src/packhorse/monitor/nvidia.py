"""NVIDIA's GPUs, through NVML, the library beneath nvidia-smi (package nvidia-ml-py).

Every question is asked for itself and may be refused: an old driver does not know it, a slice of a
GPU (MIG) has no utilisation, a container hides processes, a GPU may have fallen off the bus. What
is refused is None and the rest is shown.

NVML is opened once for as long as one watches: without a running GPU process the driver itself may
take a second to wake up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packhorse.errors import MissingExtra
from packhorse.monitor.device import Device

DRIVER = Path("/proc/driver/nvidia")  # there when a driver is loaded
LOST = "does not answer"


@contextmanager
def opened(library: Any | None = None) -> Iterator[tuple[Any | None, list[str]]]:
    """NVML, ready to be asked, or None; and what a user should know of that."""
    library, notes = (library, []) if library else _library()
    if library is not None and (refusal := _refusal(library)):
        library, notes = None, [refusal] if DRIVER.exists() else []
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


def _refusal(library: Any) -> str | None:
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return f"GPUs cannot be read: NVML says {error}"
    return None


def devices(library: Any) -> list[Device]:
    """Every GPU, in NVML's order, which is that of the bus."""
    count = _ask(library.nvmlDeviceGetCount, library) or 0
    return [_device(library, number) for number in range(count)]


def _device(library: Any, number: int) -> Device:
    handle = _ask(library.nvmlDeviceGetHandleByIndex, library, number)
    if handle is None:
        return Device(f"gpu {number}", LOST)

    def ask(name: str, *more: Any) -> Any:
        return _ask(getattr(library, f"nvmlDeviceGet{name}", None), library, handle, *more)

    memory, rates = ask("MemoryInfo"), ask("UtilizationRates")
    milliwatts, bus = ask("PowerUsage"), ask("PciInfo")
    using = {process.pid: process.usedGpuMemory for process in ask("ComputeRunningProcesses") or ()}
    return Device(
        f"gpu {number}",
        _words(ask("Name")) or LOST,
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        clock=ask("ClockInfo", library.NVML_CLOCK_SM),
        temperature=ask("Temperature", library.NVML_TEMPERATURE_GPU),
        power=None if milliwatts is None else milliwatts / 1000,
        bus=None if bus is None else _words(bus.busId),
        pids=tuple(sorted(using)),
        memory_by_pid=using,
    )


def _ask(question: Callable[..., Any] | None, library: Any, *about: Any) -> Any:
    """The answer, or None where there is none."""
    try:
        return question(*about) if question else None
    except library.NVMLError:
        return None


def _words(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
