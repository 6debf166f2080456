"""Loading a model: how much memory torch may spend on products it has prepared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.runtime import loading

# Every batch is of another shape, as packed batches are. In a thread, as in a runner: torch keeps
# what it prepared for each thread apart.
MANY_SHAPES = """
import json, os, sys, threading
import numpy as np
import packhorse
encoder = packhorse.load(sys.argv[1], device="cpu")
encode = lambda tokens: encoder.embed([np.zeros(tokens, int)])
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096

def work():
    for tokens in range(1, 100):
        encode(tokens)
    before = resident()
    for tokens in range(100, int(sys.argv[2])):
        encode(tokens)
    names = "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    said = [os.environ.get(name) for name in names]
    print(json.dumps({"grown": resident() - before, "said": said}))

worker = threading.Thread(target=work)
worker.start()
worker.join()
"""


def grown(folder: Path, shapes: int, **environment: str) -> tuple[int, list[str]]:
    """Bytes that a process of its own grew by, and what its environment said in the end."""
    kept = {name: value for name, value in os.environ.items() if name not in loading.PREPARED}
    done = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES, str(folder), str(shapes)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    return figures["grown"], figures["said"]
