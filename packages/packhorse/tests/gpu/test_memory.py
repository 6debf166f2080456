"""`--gpu-memory` on CUDA: a bound that holds, and what happens at it. Skipped without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse.errors import InputError
from packhorse.reports import random_model
from packhorse.runtime.loading import load
from packhorse.runtime.runner import PackRunner
from packhorse.serve import hosting
from packhorse.serve.settings import ServeSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GIB = 1 << 30


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write("base", tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def no_limit() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_the_largest_batch_decides_at_the_start(base: Path, no_limit: None) -> None:
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved() / GIB
    with pytest.raises(
        InputError, match=r"more than the .* GiB of --gpu-memory; raise it or lower"
    ):
        hosting.open_models(ServeSettings(model=(str(base),), gpu_memory=taken + 0.4))
    torch.cuda.empty_cache()
    # A batch of fewer tokens does fit.
    models = hosting.open_models(
        ServeSettings(model=(str(base),), gpu_memory=taken + 0.8, batch_tokens=2048)
    )
    assert torch.cuda.memory_reserved() <= (taken + 0.8) * GIB
    models.close()


def test_a_batch_without_memory_runs_in_halves(base: Path, no_limit: None) -> None:
    encoder = load(base, device="cuda", dtype="bf16")
    rng = np.random.default_rng(0)
    texts = [rng.integers(1000, 5000, 500) for _ in range(64)]
    alone = [encoder.embed([text])[0] for text in texts[:8]]  # type: ignore[list-item]
    with PackRunner(encoder, capacity=512, rows=64, timeout=0.5) as runner:
        torch.cuda.empty_cache()
        hosting.limit_gpu_memory(encoder.device, torch.cuda.memory_reserved() / GIB + 0.15)
        vectors = runner.run(texts)
        assert runner.stats().reruns > 0 and runner.stats().failed == 0
    for vector, exact in zip(vectors, alone, strict=False):
        assert float(vector @ exact) > 0.999


def start(base: Path, folder: Path) -> subprocess.Popen[str]:
    words = ["serve", "--json", "--port", "0", "--fronts", "1", "--gpu-memory", "3"]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "packhorse", *words, "--model", str(base)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PACKHORSE_RUNTIME": str(folder)},
        )


def test_two_servers_share_a_gpu(base: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [tmp_path_factory.mktemp("server") for _ in range(2)]
    servers = [start(base, folder) for folder in folders]
    try:
        ports: list[int] = []
        for server, folder in zip(servers, folders, strict=True):
            line = server.stdout.readline() if server.stdout else ""
            assert line, (folder / "log").read_text()
            ports.append(json.loads(line)["port"])

        def ask(number: int) -> np.ndarray:
            request = urllib.request.Request(
                f"http://127.0.0.1:{ports[number % 2]}/v1/embeddings",
                json.dumps({"input": [f"w{number // 2} " * 40] * 16}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                data = json.load(response)["data"]
            return np.array([item["embedding"] for item in data])

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(64)))
        for one, other in zip(answers[::2], answers[1::2], strict=True):
            assert float((one * other).sum(1).min()) > 0.999
        assert float((answers[0][0] * answers[2][0]).sum()) < 0.99999  # the control: another text
    finally:
        for server in servers:
            server.terminate()
        codes = [server.wait(60) for server in servers]
        for server in servers:
            if server.stdout:
                server.stdout.close()
    assert codes == [0, 0]
