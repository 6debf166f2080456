"""Adapters of models that engines run, also after models were changed and processes replaced."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import packhorse
from packhorse.reports import random_model

from .server import children, wait_for

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="fronts share memory by memfd, which is Linux's"
)
ADMIN = {"authorization": "Bearer sesame"}
TEXTS = ["w1 w2 w3", "w4 " * 20]
QUERY = "base_model.model.encoder.layer.0.attention.self.query"


def write_adapter(folder: Path, base: Path) -> Path:
    folder.mkdir()
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    torch.manual_seed(0)
    shapes = {f"{QUERY}.lora_A.weight": (2, width), f"{QUERY}.lora_B.weight": (width, 2)}
    save_file(
        {name: torch.randn(shape) for name, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return folder


def ask(server: Any, name: str) -> httpx.Response:
    body = {"model": name, "input": TEXTS}
    return httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=120)


def test_adapters_behind_fronts(start: Any, tmp_path: Path) -> None:
    folders = {
        name: random_model.write("tiny", tmp_path / name, seed=seed)
        for seed, name in enumerate(("base", "new"), 1)
    }
    adapter = write_adapter(tmp_path / "law", folders["base"])
    expected = {
        "base": packhorse.load(folders["base"], device="cpu").embed(TEXTS),
        "base:law": packhorse.load(folders["base"], device="cpu", adapter=adapter).embed(TEXTS),
        "new": packhorse.load(folders["new"], device="cpu").embed(TEXTS),
    }
    assert np.abs(expected["base"] - expected["base:law"]).max() > 1e-3
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("sesame")
    server = start(
        *("--fronts", "1", "--device", "cpu", "--admin-key-file", str(key)),
        *("--model", f"base={folders['base']}", "--adapter", f"law={adapter}"),
    ).wait_until_ready()

    def check(names: tuple[str, ...]) -> None:
        for name in names:
            answer = ask(server, name)
            assert answer.status_code == 200, answer.text
            rows = [row["embedding"] for row in answer.json()["data"]]
            np.testing.assert_allclose(rows, expected[name], atol=1e-5)

    check(("base", "base:law"))
    body = {"name": "new", "model": str(folders["new"])}
    added = httpx.post(f"{server.url}/admin/models", json=body, headers=ADMIN, timeout=120)
    assert added.status_code == 200, added.text
    check(("base", "base:law", "new"))
    (engine,) = children(server.popen.pid)["engine"]
    os.kill(engine, signal.SIGKILL)
    wait_for(lambda: engine not in children(server.popen.pid)["engine"])
    wait_for(lambda: ask(server, "new").status_code == 200)
    check(("base", "base:law", "new"))
    assert server.end(timeout=60) == 0
