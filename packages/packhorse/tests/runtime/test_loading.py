"""Loading a model: how much memory torch may spend on products it has prepared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.processor import features
from packhorse.runtime import loading

# Every batch is of another shape, as packed batches are. In a thread, as in a runner: torch keeps
# what it prepared for each thread apart.
MANY_SHAPES = """
import json, os, sys, threading
import numpy as np
import packhorse
from packhorse.model import freeze
freeze.LARGEST_PACKED = 0  # products of wide layers, which are oneDNN's
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
    limits = loading.prepared_limits()
    variables = {name: value for name, value in os.environ.items() if name not in limits}
    completed = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES, str(folder), str(shapes)],
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert completed.returncode == 0, completed.stderr
    figures = json.loads(completed.stdout)
    return figures["grown"], figures["said"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from packhorse.reports import random_model

    return random_model.write("tiny", tmp_path_factory.mktemp("model") / "tiny")


linux = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the system does not tell what a process holds"
)


@linux
def test_memory_does_not_grow_with_the_number_of_shapes(folder: Path) -> None:
    more, output = grown(folder, 400)
    assert output == [*loading.prepared_limits().values()]
    assert more < 128 << 20, f"{more >> 20} MiB more after 300 shapes"


@linux
@pytest.mark.slow
def test_without_the_limits_it_would(folder: Path) -> None:
    """The control: a user's own word stands, and with torch's own limits memory grows."""
    user_variables = dict.fromkeys(loading.prepared_limits(), "1024")
    more, output = grown(folder, 400, **user_variables)
    assert output == ["1024", "1024"]
    assert more > 192 << 20, f"{more >> 20} MiB more after 300 shapes"


@pytest.mark.parametrize("limit", [None, "9"])
def test_a_users_own_limit_stands(folder: Path, limit: str | None, monkeypatch) -> None:
    limits = loading.prepared_limits()
    for name in limits:
        monkeypatch.setenv(name, limit or "")
        if limit is None:
            monkeypatch.delenv(name)
    loading.load(folder)
    assert [os.environ[name] for name in limits] == [limit or own for own in limits.values()]


def prepared(folder: Path, **environment: str) -> int:
    """How many products sixteen groups of cores prepare for a list that was there before."""
    limits = loading.prepared_limits()
    variables = {name: value for name, value in os.environ.items() if name not in limits}
    completed = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("prepared_products.py")), str(folder)],
        env=variables | {"ONEDNN_VERBOSE": "profile_create"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.split("PASS")[2].count("cache_miss")


@pytest.mark.slow
@pytest.mark.skipif(not features().bf16, reason="without bf16 products are not oneDNN's")
def test_groups_of_cores_keep_each_others_products(folder: Path) -> None:
    assert prepared(folder) == 0
    assert prepared(folder, ONEDNN_PRIMITIVE_CACHE_CAPACITY="16") > 20, "the control"
