"""Find a GPU without torch, whose import would delay the processes that the supervisor starts."""

from __future__ import annotations

import ctypes
import os
import re
from importlib.util import find_spec
from pathlib import Path


def finds_gpu(name: str) -> bool:
    """Return True if `device.choose_device` surely chooses a GPU of NVIDIA; if False, ask that.

    Torch must be built for CUDA, and the driver must be new enough for it and have a device. The
    driver heeds CUDA_VISIBLE_DEVICES as it does when torch asks.
    """
    if name in ("", "auto"):
        name = os.environ.get("PACKHORSE_DEVICE") or "auto"
    version = _cuda_of_torch()
    if version is None or name not in ("auto", "cuda"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count, newest = ctypes.c_int(), ctypes.c_int()
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGetCount(ctypes.byref(count))
            or driver.cuDriverGetVersion(ctypes.byref(newest))  # 1000 * major + 10 * minor
        )
    except (OSError, AttributeError):
        return False
    return not failed and count.value > 0 and newest.value // 1000 >= version


def _cuda_of_torch() -> int | None:
    """Return the major version of CUDA that torch is built for; None if for none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)", text, re.MULTILINE)
    return int(version[1]) if version else None
