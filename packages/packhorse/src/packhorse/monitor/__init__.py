"""The monitor: the devices of this machine and the packhorse processes that run, at one moment.

    with nvidia.opened() as (library, notes):
        snapshot = look(library)

A snapshot reads files of the kernel and of `packhorse.status` and queries NVML; it imports neither
torch nor numpy, so that it takes a fraction of a second and can be repeated by `watch`. What cannot
be read (no driver, no permission, a process that has just ended) is omitted or None, never an
error: a monitor is used when something is wrong. `notes` say what is missing and why.

`machine` reads the CPU, `nvidia` the GPUs, `processes` the processes; `history` draws past values.

Internal: the command `packhorse monitor` is public, these modules are not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from packhorse import status
from packhorse.errors import PackhorseError
from packhorse.monitor import machine, nvidia, processes
from packhorse.monitor.machine import Device
from packhorse.monitor.processes import Process


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All devices and processes at one moment."""

    time: float  # seconds since the epoch
    devices: tuple[Device, ...]
    processes: tuple[Process, ...]
    notes: tuple[str, ...] = ()


def look(library: Any | None, system: processes.System | None = None) -> Snapshot:
    """Return the devices and processes of this moment; `library` is NVML, if there is one."""
    notes: list[str] = []
    if system is None:
        system, notes = processes.system()
    published: list[status.PublishedStatus] = []
    try:
        published = status.read()
    except PackhorseError as error:
        notes = [*notes, str(error)]
    gpus = nvidia.devices(library) if library else []
    running = processes.find_processes(system, published, gpus)
    pids = {process.pid for process in running}
    gpus = [replace(gpu, pids=tuple(pid for pid in gpu.pids if pid in pids)) for gpu in gpus]
    return Snapshot(time.time(), (machine.cpu(), *gpus), tuple(running), tuple(notes))
