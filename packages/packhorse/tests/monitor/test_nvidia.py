"""GPUs through an NVML of our own making, which answers, refuses, or does not know the question."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packhorse.monitor import nvidia

WHOLE = {
    "Name": "NVIDIA Test",
    "MemoryInfo": SimpleNamespace(used=3 << 30, total=80 << 30),
    "UtilizationRates": SimpleNamespace(gpu=87, memory=12),
    "PowerUsage": 412_300,
    "PciInfo": SimpleNamespace(busId=b"0000:01:00.0"),
    "ClockInfo": 1980,
    "Temperature": 45,
    "ComputeRunningProcesses": [
        SimpleNamespace(pid=7, usedGpuMemory=1 << 30),
        SimpleNamespace(pid=8, usedGpuMemory=None),
    ],
}


class Refused(Exception):
    """What NVML raises."""


class Library:
    """NVML's functions over a list of GPUs, each a dict of answers; None: every call raises."""

    NVMLError = Refused
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, gpus: list[dict[str, Any] | None] | None) -> None:
        self.gpus, self.calls = gpus, []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if self.gpus is None:
                raise Refused(name)
            if name == "nvmlDeviceGetCount":
                return len(self.gpus)
            if name == "nvmlDeviceGetHandleByIndex":
                return self._known(self.gpus[arguments[0]])
            if name.startswith("nvmlDeviceGet"):
                return self._known(arguments[0].get(name.removeprefix("nvmlDeviceGet")))
            return None

        return call

    def _known(self, answer: Any) -> Any:
        if answer is None:
            raise Refused("not supported")
        return answer


def test_all_facts_of_a_gpu() -> None:
    first, second = nvidia.devices(Library([WHOLE, WHOLE | {"Name": b"Old NVIDIA"}]))
    assert (first.device, first.name, second.device) == ("gpu 0", "NVIDIA Test", "gpu 1")
    assert (first.utilisation, first.memory_used, first.memory_total) == (0.87, 3 << 30, 80 << 30)
    assert (first.clock, first.temperature, first.power) == (1980, 45, 412.3)
    assert first.bus == "0000:01:00.0" and first.pids == (7, 8)
    assert first.memory_by_pid == {7: 1 << 30, 8: None}
    assert second.name == "Old NVIDIA", "older bindings answer in bytes"


@pytest.mark.parametrize("refused", WHOLE)
def test_what_is_refused_leaves_the_rest(refused: str) -> None:
    (whole,) = nvidia.devices(Library([WHOLE]))
    (partial_device,) = nvidia.devices(Library([{k: v for k, v in WHOLE.items() if k != refused}]))
    names = ("name", "utilisation", "memory_total", "clock", "temperature", "power", "bus", "pids")
    differ = [name for name in names if getattr(partial_device, name) != getattr(whole, name)]
    assert len(differ) == 1


def test_a_lost_gpu_is_shown_as_such() -> None:
    lost, whole = nvidia.devices(Library([None, WHOLE]))
    assert (lost.device, lost.name, lost.memory_total) == ("gpu 0", nvidia.LOST, None)
    assert whole.device == "gpu 1" and whole.memory_total


def test_a_library_that_raises_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path / "none")
    assert nvidia.devices(Library(None)) == []
    with nvidia.opened(Library(None)) as (library, notes):
        assert (library, notes) == (None, [])


def test_it_is_opened_and_closed_once() -> None:
    fake = Library([WHOLE])
    with pytest.raises(KeyError), nvidia.opened(fake) as (library, _):
        assert library is fake and fake.calls == ["nvmlInit"]
        raise KeyError
    assert fake.calls == ["nvmlInit", "nvmlShutdown"]


def test_a_driver_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a driver is loaded is there something to say."""
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path)
    with nvidia.opened(Library(None)) as (library, notes):
        assert library is None and "NVML failed: nvmlInit" in notes[0]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with nvidia.opened() as (library, notes):
        assert library is None and "packhorse[monitor]" in notes[0]
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path / "none")
    with nvidia.opened() as (library, notes):
        assert (library, notes) == (None, [])


def test_the_real_bindings_have_what_is_asked() -> None:
    """The double above answers whatever it is asked; the names must be NVML's own."""
    pynvml = pytest.importorskip("pynvml")
    fake = Library([WHOLE])
    with nvidia.opened(fake):
        nvidia.devices(fake)
    constants = ("NVML_CLOCK_SM", "NVML_TEMPERATURE_GPU", "NVMLError")
    assert [name for name in (*fake.calls, *constants) if not hasattr(pynvml, name)] == []
