"""What Triton compiles for us lies in the user's private folder, whatever the environment says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

SCRIPT = """
import torch
from packhorse import attention
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence
import numpy as np
sequences = [SyntheticSequence(np.arange(n), np.zeros(n, int)) for n in (5, 20)]
packed = Packed.build(sequences).to("cuda")
kernel = attention.kernel("fused")
qkv = torch.randn(25, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
kernel(qkv, kernel.plan(packed))
torch.cuda.synchronize()
"""


def test_the_fused_kernel_is_kept_in_a_private_folder(tmp_path: Path) -> None:
    shared, separate = tmp_path / "shared", tmp_path / "own"
    options = {"PACKHORSE_CACHE": str(separate), "TRITON_CACHE_DIR": str(shared)}
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    assert list((separate / "triton").iterdir()) and not shared.exists()
    assert (separate / "triton").stat().st_mode & 0o777 == 0o700
