"""What computes here, and what of ours runs on it: devices and packhorse processes at one moment.

    with nvidia.opened() as (library, notes):
        seen = look(library)

A look reads files of the kernel and of `packhorse.status` and asks NVML; it imports neither torch
nor numpy, so that it costs a fraction of a second and can be repeated by `watch`. What cannot be
read (no driver, no rights, a process that has just ended) is left out or None, never an error:
a monitor is what one turns to when something is wrong. What stands in the way of more is said in
`notes`.

`machine` knows the CPU, `nvidia` the GPUs, `processes` who runs, `history` how it went.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from packhorse import status
from packhorse.errors import PackhorseError
from packhorse.monitor import machine, nvidia, processes
from packhorse.monitor.device import Device
from packhorse.monitor.processes import Process


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything at one moment."""

    time: float  # seconds since the epoch
    devices: tuple[Device, ...]
    processes: tuple[Process, ...]
    notes: tuple[str, ...] = ()


def look(library: Any | None, system: processes.System | None = None) -> Seen:
    """The devices and processes of this moment; `library` is NVML, where there is one."""
    system, notes = (system, []) if system else processes.system()
    try:
        said = status.read()
    except PackhorseError as error:
        said, notes = [], [*notes, str(error)]
    gpus = nvidia.devices(library) if library else []
    found = processes.found(system, said, gpus)
    pids = {process.pid for process in found}
    gpus = [replace(gpu, pids=tuple(pid for pid in gpu.pids if pid in pids)) for gpu in gpus]
    return Seen(time.time(), (machine.cpu(), *gpus), tuple(found), tuple(notes))
