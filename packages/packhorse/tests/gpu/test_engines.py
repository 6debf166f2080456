"""`--devices cuda:0,cuda:0`: two engines behind two fronts, as on two GPUs. Skipped without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.reports import random_model
from packhorse.runtime.loading import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TEXTS = [f"w{number} " * (1 + number % 40) for number in range(64)]
SECONDS = 120.0  # for an engine to be replaced


def ask(port: int, path: str, body: object = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def engine_processes(supervisor: int) -> list[int]:
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if parent == supervisor and b"engine" in words:
            found.append(int(folder.name))
    return found


def test_two_engines_on_a_gpu_share_the_work_and_one_is_replaced(tmp_path: Path) -> None:
    base = random_model.write("base", tmp_path / "base")
    expected = load(base, device="cuda", dtype="bf16").embed(TEXTS)
    words = ["--port", "0", "--fronts", "2", "--devices", "cuda:0,cuda:0", "--dtype", "bf16"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "packhorse", "serve", "--json", *words, "--model", str(base)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PACKHORSE_RUNTIME": str(tmp_path)},
        )
    assert server.stdout is not None
    with server.stdout:
        try:
            line = server.stdout.readline()
            assert line, (tmp_path / "log").read_text()
            port = json.loads(line)["port"]

            def embed(number: int) -> tuple[int, int, bytes]:
                first = number % 4
                return first, *ask(port, "/embed", {"inputs": TEXTS[first::4]})

            def check(answers: list[tuple[int, int, bytes]], refused: int) -> None:
                statuses = [status for _, status, _ in answers]
                assert statuses.count(200) >= len(answers) - refused, statuses
                for first, status, body in answers:
                    if status == 200:
                        vectors = np.array(json.loads(body))
                        assert float((vectors * expected[first::4]).sum(1).min()) > 0.999

            with ThreadPoolExecutor(8) as pool:
                check(list(pool.map(embed, range(64))), refused=0)
                engines = json.loads(ask(port, "/engine")[1])["models"]
                assert len(engines) == 2 and all(engine["batches"] for engine in engines)
                before = engine_processes(server.pid)
                assert len(before) == 2
                os.kill(before[0], signal.SIGKILL)
                check(list(pool.map(embed, range(64))), refused=8)  # what ran there
            until = time.monotonic() + SECONDS
            while len(json.loads(ask(port, "/engine")[1])["models"]) < 2:
                assert time.monotonic() < until, "the engine was not replaced"
                time.sleep(0.2)
            assert set(engine_processes(server.pid)) & set(before) == {before[1]}
        finally:
            server.terminate()
            code = server.wait(60)
    assert code == 0
