"""`packhorse train --push`: the model on a hub of this machine, and a hub that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..checkpoint.local_hub import Hub


def train(tiny: Path, folder: Path, push: str, **environment: str) -> subprocess.CompletedProcess:
    """A run of two steps as a process of its own: the hub's client reads its environment once."""
    rows = [{"anchor": f"good {n}", "positive": f"{n} good"} for n in ("horse", "mule", "cart")]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--task", "contrastive", "--model", str(tiny), "--train", str(folder / "pairs.jsonl")]
    words += ["--steps", "2", "--batch", "3", "--device", "cpu", "--out", str(folder / "run")]
    remaining = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HOME": str(folder / "hf"), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-m", "packhorse", "train", *words, "--push", push],
        env=remaining | settings | {"HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def vectors(name: str | Path, folder: Path, **environment: str) -> str:
    """The vector of a text as JSON, by a process that has an empty cache of the hub."""
    code = (
        "import json, sys, packhorse; encoder = packhorse.load(sys.argv[1], device='cpu'); "
        "print(json.dumps(encoder.embed(['good horse'])[0].tolist()))"
    )
    remaining = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HOME": str(folder / "other"), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    made = subprocess.run(
        [sys.executable, "-c", code, str(name)],
        env=remaining | settings | {"HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_a_model_is_pushed_and_opens_from_the_hub(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    hub = Hub({}, ())
    try:
        lost = train(tiny, tmp_path, "org/new", HF_ENDPOINT=hub.url, HF_TOKEN="wrong")
        assert lost.returncode == 2, lost.stderr
        model = tmp_path / "run" / "model"
        last = lost.stderr.strip().splitlines()[-1]
        assert f"{model} is written, but could not be pushed to org/new at {hub.url}" in last
        assert "Traceback" not in lost.stderr and not hub.files
        again = train(tiny, tmp_path, "org/new", HF_ENDPOINT=hub.url, HF_TOKEN="secret")
        assert again.returncode == 0, again.stderr
        assert "nothing is left to train" in again.stderr and f"{hub.url}/org/new" in again.stderr
        files = {str(p.relative_to(model)): p for p in model.rglob("*") if p.is_file()}
        assert hub.files.keys() == files.keys()
        assert all(hub.files[name] == path.read_bytes() for name, path in files.items())
        assert "org/new" in hub.repositories
        here, there = (vectors(name, tmp_path, HF_ENDPOINT=hub.url) for name in (model, "org/new"))
        assert here == there and len(json.loads(here)) == 32
        refused = train(tiny, tmp_path, "new", HF_ENDPOINT=hub.url)
        assert refused.returncode == 2 and "push is 'new'; name a repository" in refused.stderr
    finally:
        hub.close()
