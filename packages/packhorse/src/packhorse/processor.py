"""The features of the processor; `PACKHORSE_CPU` restricts them to those of an older one.

Every choice that depends on the processor asks `features()`: which C is compiled, or taken from the
wheel (`runs_variant`), whether weights are prepared in bf16 or fp32, what `dtype="auto"` tries. It
returns what this process may use: what the machine has, without what torch's own switches or
`PACKHORSE_CPU` exclude.

`PACKHORSE_CPU` is for tests, and for people who want the results or the speed of another machine.
Each level includes all levels above it in this list:

    avx2      AVX2 and FMA            Haswell, most laptops since, Zen 1 to 3
    avx512    AVX-512 F CD BW DQ VL   Skylake server
    vnni      AVX-512 VNNI            Cascade Lake, Ice Lake
    bf16      AVX-512 BF16            Cooper Lake, Zen 4
    amx       AMX tiles               Sapphire Rapids

ATen, oneDNN and MKL read their own switches once, when they first compute, so `limit` must run
before: the command line and the package's public names call it, and `features` does if neither did.
If it is too late, there is a warning. Child processes inherit the switches.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import warnings
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from packhorse.c_sources import VARIANTS
from packhorse.errors import InputError

VARIABLE = "PACKHORSE_CPU"


@dataclass(frozen=True, slots=True)
class Features:
    """The instruction sets that decide which code runs, and how fast."""

    avx2: bool = False
    avx512: bool = False  # F, BW, DQ and VL
    vnni: bool = False  # int8 products, 512 bits wide
    avx512_bf16: bool = False  # bf16 products in vectors, VDPBF16PS
    amx: bool = False  # int8 and bf16 products in tiles
    bf16: bool = False  # bf16 products by any instruction that oneDNN uses
    march: str = "native"  # the C compiler's -march

    def names(self) -> list[str]:
        """The names of the features that are present."""
        return [field.name for field in fields(self) if getattr(self, field.name) is True]


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """A value of `PACKHORSE_CPU`, and the switches of the libraries for it."""

    adds: str  # the feature that the level below does not have
    march: str  # what our C is compiled for; the names that old gcc and clang know too
    aten: str
    onednn: str
    mkl: str

    @property
    def switches(self) -> dict[str, str]:
        """The environment variables that restrict the libraries to this level."""
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }


CPU_LEVELS = {
    "avx2": CpuLevel("avx2", "haswell", "avx2", "AVX2", "AVX2"),
    "avx512": CpuLevel("avx512", "skylake-avx512", "avx512", "AVX512_CORE", "AVX512"),
    "vnni": CpuLevel("vnni", "cascadelake", "avx512", "AVX512_CORE_VNNI", "AVX512_E1"),
    "bf16": CpuLevel("avx512_bf16", "cooperlake", "avx512", "AVX512_CORE_BF16", "AVX512_E2"),
    "amx": CpuLevel("amx", "native", "avx512", "AVX512_CORE_AMX", "AVX512_E4"),
}
# torch's probes, by feature; they are not public, so a release may lack one.
PROBES = {
    "avx2": "_is_avx2_supported",
    "avx512": "_is_avx512_supported",
    "vnni": "_is_vnni_supported",
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx": "_is_amx_tile_supported",
}


def level() -> str | None:
    """The level that `PACKHORSE_CPU` names, or None."""
    name = os.environ.get(VARIABLE) or None
    if name is None:
        return None
    if name not in CPU_LEVELS:
        raise InputError(
            f"{VARIABLE} is {name!r}; choose one of {', '.join(CPU_LEVELS)}, or unset it"
        )
    if platform.machine() not in ("x86_64", "AMD64"):
        raise InputError(
            f"{VARIABLE} is {name!r}, which only x86 processors have, and this one is "
            f"{platform.machine()}; unset it"
        )
    return name


def limit() -> None:
    """Restrict torch's libraries to `PACKHORSE_CPU`, if it is set. Does not import torch."""
    name = level()
    switches = CPU_LEVELS[name].switches if name else {}
    if all(os.environ.get(key) == value for key, value in switches.items()):
        return
    os.environ.update(switches)
    if "torch" in sys.modules and not _took_effect(str(name)):
        assignments = " ".join(f"{key}={value}" for key, value in switches.items())
        warnings.warn(
            f"{VARIABLE}={name} came too late for torch, which was loaded before; import torch "
            f"after the first use of packhorse, or start Python with {assignments}",
            RuntimeWarning,
            stacklevel=3,
        )


def _took_effect(name: str) -> bool:
    """Did switches set just now have an effect? torch may be imported but not have computed yet.

    Only the lowest level can be checked: oneDNN does not tell which level of AVX-512 it uses.
    """
    import torch

    return name == "avx2" and torch.backends.cpu.get_cpu_capability() != "AVX512"


def features() -> Features:
    """The features of the processor that this process may use."""
    return _features(level())


@cache
def _features(name: str | None) -> Features:
    limit()
    import torch

    has = {key: bool(getattr(torch.cpu, probe, bool)()) for key, probe in PROBES.items()}
    if has["avx512"] and torch.backends.cpu.get_cpu_capability() == "AVX2":
        name = "avx2"  # the user has set ATen's own switch
    march = "native"
    if name is not None:
        march = CPU_LEVELS[name].march if has[CPU_LEVELS[name].adds] else "native"
        levels = list(CPU_LEVELS)
        for above in levels[levels.index(name) + 1 :]:
            has[CPU_LEVELS[above].adds] = False
    # On x86 oneDNN also accepts bf16 if the processor only converts it, which is slower than fp32.
    # Elsewhere it accepts bf16 only if the processor multiplies it.
    multiplies = has["avx512_bf16"] or has["amx"] or not has["avx2"]
    return Features(**has, bf16=multiplies and _onednn_accepts_bf16(), march=march)


def runs_variant(name: str) -> bool:
    """Return whether this process may run code of this variant, of `c_sources.VARIANTS`."""
    variant = VARIANTS[name]
    if not variant.is_for(platform.machine()):
        return False
    return not variant.needs or bool(getattr(features(), variant.needs))


def _onednn_accepts_bf16() -> bool:
    import torch

    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and probe is not None and bool(probe())


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may keep busy: its affinity, and its container's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = _quota(cgroups)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(cgroups: Path) -> float | None:
    """Return the cores that the process's control group may use; None if it has no limit.

    In a container the group's own files are at the root of the mount, which is all that is read.
    """
    try:
        if (cgroups / "cpu.max").is_file():  # version 2: "50000 100000", or "max 100000"
            quota, period = (cgroups / "cpu.max").read_text().split()
        else:
            quota = (cgroups / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroups / "cpu" / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None
