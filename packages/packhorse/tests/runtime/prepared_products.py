"""Sixteen groups of cores run a list twice, with oneDNN's own account of what it prepares.

A program for test_loading.py: `prepared_products.py FOLDER`, with ONEDNN_VERBOSE=profile_create.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

import packhorse
from packhorse.runtime import cores

torch.set_num_threads(16)
cores._usable_cores = lambda: 16  # pyright: ignore[reportPrivateUsage]
cores.cores_to_bind = lambda *_: []
lengths = np.random.default_rng(0).integers(16, 128, 400)
encoder = packhorse.load(sys.argv[1], device="cpu", dtype="bf16")
for _ in range(2):
    print("PASS", flush=True)
    encoder.embed([np.zeros(length, int) for length in lengths])
