"""In the lane `haswell` no program sees more than AVX2: neither libraries nor a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        os.environ.get("PACKHORSE_TEST_LANE") != "haswell", reason="runs in the lane haswell"
    ),
]
LATER = {"__AVX512F__", "__AVX512BF16__", "__AVX512VNNI__", "__AVXVNNI__", "__AMX_TILE__"}
SEEN = """
from numpy._core._multiarray_umath import __cpu_features__ as numpy_features
import torch
print(numpy_features["AVX2"], numpy_features["AVX512F"], torch.backends.cpu.get_cpu_capability())
"""


def seen(environment: dict[str, str]) -> list[str]:
    """AVX2 and AVX-512 by numpy, and the capability by torch; nothing if the process ends."""
    command = [sys.executable, "-c", SEEN]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    ).stdout.split()


def test_libraries_see_avx2_and_nothing_later() -> None:
    assert seen(dict(os.environ)) == ["True", "False", "AVX2"]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    # The control: without the lane's library they see it, or fault if CPUID is replaced in them.
    if "cpuid_fault" not in flags:
        assert seen({**os.environ, "LD_PRELOAD": ""}) == []
    elif "avx512f" in flags:
        assert seen({**os.environ, "LD_PRELOAD": ""}) == ["True", "True", "AVX512"]


def test_a_compiler_does_not_use_what_is_hidden() -> None:
    command = [shutil.which("cc") or "cc", "-march=native", "-dM", "-E", "-x", "c", "/dev/null"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    macros = {line.split()[1] for line in listing.splitlines()}
    assert "__AVX2__" in macros
    assert not macros & LATER


def test_a_real_fault_still_ends_the_process() -> None:
    program = "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert completed.returncode < 0
    assert "Segmentation fault" in completed.stderr
