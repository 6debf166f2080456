"""Fronts and engines in a container: two cores, a read-only root, 64 MB of shared memory.

Run by the lane `container` of `make test-machines`, which makes these surroundings.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

import packhorse
from packhorse.processor import usable_cores
from packhorse.reports import random_model

pytestmark = [
    pytest.mark.machine,
    pytest.mark.skipif(
        os.environ.get("PACKHORSE_TEST_LANE") != "container", reason="the lane `container` runs it"
    ),
]
SHARED = Path("/dev/shm")
TEXTS = ["w1 w2 w3", "w4 " * 20, "w5"]
LARGE = ["w1 w2 w3 w4 " * 100] * 80  # 8 MiB of states of all tokens, in JSON 24


def ask(port: int, path: str, texts: list[str]) -> list[list[float]]:
    body = json.dumps({"inputs": texts}).encode()
    headers = {"Content-Type": "application/json"}
    request = Request(f"http://127.0.0.1:{port}{path}", body, headers)
    with urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_the_surroundings_are_those_of_a_container() -> None:
    with pytest.raises(OSError) as refused:
        Path("/packhorse").touch()
    assert refused.value.errno == errno.EROFS
    room = os.statvfs(SHARED)
    assert room.f_blocks * room.f_frsize == 64 << 20
    assert usable_cores() == min(2, len(os.sched_getaffinity(0)))


def test_fronts_and_an_engine_serve_in_a_container(tmp_path: Path) -> None:
    folder = random_model.write("tiny", tmp_path / "tiny")
    words = ["serve", "--json", "--port", "0", "--fronts", "2", "--device", "cpu"]
    words += ["--model", f"tiny={folder}", "--max-queue-tokens", "2000000"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "packhorse", *words],
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        line = process.stdout.readline() if process.stdout else ""
        assert line, (tmp_path / "log").read_text()
        port = json.loads(line)["port"]
        expected = packhorse.load(folder, device="cpu").embed(TEXTS)
        np.testing.assert_allclose(ask(port, "/embed", TEXTS), expected, atol=1e-5)
        with ThreadPoolExecutor(10) as pool:  # more at once than there is room in /dev/shm
            for states in pool.map(lambda _: ask(port, "/embed_all", LARGE), range(10)):
                assert len(states) == len(LARGE)
        assert list(SHARED.iterdir()) == [], "something uses shared memory with a name"
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
    assert "Traceback" not in (tmp_path / "log").read_text()
