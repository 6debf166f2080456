"""What the processor can do; `PACKHORSE_CPU` pretends to less than is there.

Every choice that depends on the processor asks `features()`: which C is compiled, whether weights
are prepared in bf16 or fp32, what `dtype="auto"` tries. The answer is what this process may use:
what the machine has, less what torch was told not to use, less what `PACKHORSE_CPU` leaves out.

`PACKHORSE_CPU` is for tests, and for people who want the results or the speed of another machine.
It is a ladder; each rung has everything below it:

    avx2      AVX2 and FMA            Haswell, most laptops since, Zen 1 to 3
    avx512    AVX-512 F CD BW DQ VL   Skylake server
    vnni      AVX-512 VNNI            Cascade Lake, Ice Lake
    bf16      AVX-512 BF16            Cooper Lake, Zen 4
    amx       AMX tiles               Sapphire Rapids

ATen, oneDNN and MKL read their own switches once, when they first compute. So `limit` must run
before that: the command line and the package's public names call it, and `features` does where
neither did. Where it is too late, one warning says so. Child processes inherit the switches.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from dataclasses import dataclass, fields
from functools import cache

from packhorse.errors import InputError

VARIABLE = "PACKHORSE_CPU"


@dataclass(frozen=True, slots=True)
class Features:
    """The instruction sets that decide which code runs, and how fast."""

    avx2: bool = False
    avx512: bool = False  # F, BW, DQ and VL
    vnni: bool = False  # products of int8, 512 bits wide
    avx512_bf16: bool = False  # products of bf16 in vectors, VDPBF16PS
    amx: bool = False  # products of int8 and bf16 in tiles
    bf16: bool = False  # products of bf16 by any instruction, which oneDNN uses
    march: str = "native"  # what a C compiler is told of the processor

    def names(self) -> list[str]:
        """The features that are there."""
        return [field.name for field in fields(self) if getattr(self, field.name) is True]


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of the ladder."""

    adds: str  # the feature that the rung below lacks
    march: str  # what our C is compiled for; gcc and clang have known these names the longest
    aten: str
    onednn: str
    mkl: str

    @property
    def switches(self) -> dict[str, str]:
        """The environment variables that hold the libraries to it."""
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }


LADDER = {
    "avx2": Rung("avx2", "haswell", "avx2", "AVX2", "AVX2"),
    "avx512": Rung("avx512", "skylake-avx512", "avx512", "AVX512_CORE", "AVX512"),
    "vnni": Rung("vnni", "cascadelake", "avx512", "AVX512_CORE_VNNI", "AVX512_E1"),
    "bf16": Rung("avx512_bf16", "cooperlake", "avx512", "AVX512_CORE_BF16", "AVX512_E2"),
    "amx": Rung("amx", "native", "avx512", "AVX512_CORE_AMX", "AVX512_E4"),
}
# torch's own probes by instruction; not public, so one may be missing from some release.
PROBES = {
    "avx2": "_is_avx2_supported",
    "avx512": "_is_avx512_supported",
    "vnni": "_is_vnni_supported",
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx": "_is_amx_tile_supported",
}


def level() -> str | None:
    """The rung that `PACKHORSE_CPU` names, or None."""
    name = os.environ.get(VARIABLE) or None
    if name is None:
        return None
    if name not in LADDER:
        raise InputError(f"{VARIABLE} is {name!r}; choose one of {', '.join(LADDER)}, or unset it")
    if platform.machine() not in ("x86_64", "AMD64"):
        raise InputError(
            f"{VARIABLE} is {name!r}, which x86 processors have, and this one is "
            f"{platform.machine()}; unset it"
        )
    return name


def limit() -> None:
    """Hold torch's libraries to `PACKHORSE_CPU`; without it nothing is done. Loads no torch."""
    name = level()
    switches = LADDER[name].switches if name else {}
    if all(os.environ.get(key) == value for key, value in switches.items()):
        return
    os.environ.update(switches)
    if "torch" in sys.modules and not _in_time(str(name)):
        assignments = " ".join(f"{key}={value}" for key, value in switches.items())
        warnings.warn(
            f"{VARIABLE}={name} came too late for torch, which was loaded before; import torch "
            f"after the first use of packhorse, or start Python with {assignments}",
            RuntimeWarning,
            stacklevel=3,
        )


def _in_time(name: str) -> bool:
    """Whether switches set now had an effect: torch may be loaded and not have computed yet.

    Only the lowest rung can be told apart: nothing says how far oneDNN goes within AVX-512.
    """
    import torch

    return name == "avx2" and torch.backends.cpu.get_cpu_capability() != "AVX512"


def features() -> Features:
    """What this process may use of the processor."""
    return _features(level())


@cache
def _features(name: str | None) -> Features:
    limit()
    import torch

    has = {key: bool(getattr(torch.cpu, probe, bool)()) for key, probe in PROBES.items()}
    if has["avx512"] and torch.backends.cpu.get_cpu_capability() == "AVX2":
        name = "avx2"  # by ATen's own switch
    march = "native"
    if name is not None:
        march = LADDER[name].march if has[LADDER[name].adds] else "native"
        rungs = list(LADDER)
        for above in rungs[rungs.index(name) + 1 :]:
            has[LADDER[above].adds] = False
    # oneDNN also takes bf16 where the processor only converts it, which is slower than fp32. Off
    # x86 it takes bf16 only where the processor multiplies it.
    multiplies = has["avx512_bf16"] or has["amx"] or not has["avx2"]
    return Features(**has, bf16=multiplies and _onednn_takes_bf16(), march=march)


def _onednn_takes_bf16() -> bool:
    import torch

    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and ask is not None and bool(ask())
