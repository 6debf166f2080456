"""The CPU as the kernel's files tell it, and as far as it goes without them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from packhorse.monitor.machine import cpu

CORE = "processor : {}\nmodel name : A CPU\ncpu MHz : {}\nflags : fpu avx2 avx512f {}\n\n"
MEMORY = "MemTotal:  4194304 kB\nMemFree:  17 kB\nMemAvailable: 1048576 kB\n"


def files(root: Path, **texts: str) -> Path:
    for place, text in texts.items():
        path = root / place.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpu_facts_from_linux(tmp_path: Path) -> None:
    cores = CORE.format(0, 2500.5, "avx512_bf16 amx_tile") + CORE.format(1, 800, "avx512_vnni")
    proc = files(tmp_path / "proc", cpuinfo=cores, meminfo=MEMORY)
    device = cpu(proc, tmp_path)
    assert (device.device, device.name, device.clock) == ("cpu", "A CPU", 2500.5)
    assert device.features == ("avx2", "avx512", "bf16", "amx"), "the first core's"
    assert (device.memory_used, device.memory_total) == (3 << 30, 4 << 30)
    assert device.cores and device.load is not None
    assert device.temperature is device.utilisation is device.power is None


def test_an_arm_processor(tmp_path: Path) -> None:
    proc = files(tmp_path, cpuinfo="processor : 0\nFeatures : fp asimd sve bf16\n", meminfo=MEMORY)
    device = cpu(proc, tmp_path)
    assert device.features == ("bf16", "sve") and device.name and device.clock is None


@pytest.mark.parametrize(
    ("sensors", "degrees"),
    [
        ({"class__hwmon__hwmon0__name": "nvme\n", "class__hwmon__hwmon0__temp1_input": "1"}, None),
        (
            {
                "class__hwmon__hwmon1__name": "k10temp\n",
                "class__hwmon__hwmon1__temp1_input": "45500\n",
            },
            45.5,
        ),
        (
            {
                "class__thermal__thermal_zone0__type": "x86_pkg_temp",
                "class__thermal__thermal_zone0__temp": "61000",
            },
            61.0,
        ),
        ({"class__hwmon__hwmon1__name": "k10temp"}, None),
        (
            {
                "class__hwmon__hwmon1__name": "coretemp",
                "class__hwmon__hwmon1__temp1_input": "hot",
            },
            None,
        ),
    ],
)
def test_only_a_sensor_of_the_cpu(
    sensors: dict[str, str], degrees: float | None, tmp_path: Path
) -> None:
    proc = files(tmp_path / "proc", cpuinfo=CORE, meminfo=MEMORY)
    assert cpu(proc, files(tmp_path / "sys", **sensors)).temperature == degrees


def test_files_that_hold_nonsense(tmp_path: Path) -> None:
    for text in ("", ":\n::", "MemTotal: many kB\nMemAvailable:", "\x00\xff"):
        device = cpu(files(tmp_path, cpuinfo=text, meminfo=text), tmp_path)
        assert device.memory_total is device.clock is None and device.features == ()


def test_without_the_files_psutil_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    device = cpu(tmp_path, tmp_path)
    assert device.memory_total == psutil.virtual_memory().total and device.cores
    monkeypatch.setitem(sys.modules, "psutil", None)
    device = cpu(tmp_path, tmp_path)
    assert device.memory_total is None and device.cores and device.name
