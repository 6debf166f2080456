"""The monitor against a real driver."""

from __future__ import annotations

import os

import pytest

from packhorse.monitor import look, nvidia

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_gpu_and_who_uses_it() -> None:
    pytest.importorskip("pynvml")
    held = torch.zeros(64 << 20, device="cuda")  # 256 MiB
    with nvidia.opened() as (library, notes):
        assert library is not None and notes == []
        seen = look(library)
    gpus = [device for device in seen.devices if device.device.startswith("gpu")]
    assert len(gpus) >= torch.cuda.device_count()
    assert torch.cuda.get_device_name(0) in {gpu.name for gpu in gpus}
    busy = max(gpus, key=lambda gpu: gpu.memory_used or 0)
    assert busy.memory_total and busy.memory_used and busy.memory_used >= held.nbytes
    assert busy.clock and busy.temperature and busy.power and busy.bus
    assert busy.utilisation is None or 0 <= busy.utilisation <= 1
    # A container may hide who uses it; who is told must be a process that runs.
    assert all(pid == os.getpid() or pid > 0 for pid in busy.memory_by_pid)
