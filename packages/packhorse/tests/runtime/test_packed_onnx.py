"""A packed ONNX model behind the same door as any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import packhorse
from packhorse import checkpoint
from packhorse.errors import CheckpointError, InputError

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
engine = pytest.importorskip("packhorse.onnxpack.engine")
TEXTS = ["a man is eating food", "no", "the stock market crashed today " * 8]


@pytest.fixture(scope="module")
def packed(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from packhorse import onnxpack

    home = tmp_path_factory.mktemp("onnx")
    folder = checkpoint.write(home / "model", checkpoint.load(minilm), to="onnx")
    for mode in ("mask", "repack"):
        onnxpack.pack(folder / "model.onnx", folder / f"{mode}.onnx", mode)
    return folder


@pytest.mark.parametrize("mode", ["mask", "repack"])
def test_the_same_vectors(packed: Path, minilm: Path, mode: str) -> None:
    graph = packhorse.load(packed / f"{mode}.onnx")
    assert graph.kernel == mode and "ONNX Runtime" in graph.reason and "embed" in graph.heads
    assert graph.max_length == packhorse.load(minilm).max_length
    np.testing.assert_allclose(
        graph.embed(TEXTS), packhorse.load(minilm).embed(TEXTS), rtol=0, atol=1e-5
    )


def test_vectors_before_they_are_normalized(packed: Path, minilm: Path) -> None:
    graph, torch_encoder = packhorse.load(packed / "mask.onnx"), packhorse.load(minilm)
    raw = torch_encoder.embed(TEXTS, normalize=False)
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1)
    np.testing.assert_allclose(graph.embed(TEXTS, normalize=False), raw, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["mask", "repack"])
def test_behind_the_runner(packed: Path, mode: str) -> None:
    graph = packhorse.load(packed / f"{mode}.onnx")
    with packhorse.PackRunner(graph, capacity=64, rows=2, publish=False) as runner:
        vectors = runner.run(TEXTS)
    np.testing.assert_allclose(np.stack(vectors), graph.embed(TEXTS), rtol=0, atol=1e-5)


def test_beside_a_gpu_without_its_provider_it_runs_on_the_cpu(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACKHORSE_DEVICE")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(engine, "available", lambda: ["CPUExecutionProvider"])
    for unnamed in (None, "auto"):
        assert packhorse.load(packed / "mask.onnx", device=unnamed).device.type == "cpu"
    with pytest.raises(InputError, match=r"no provider for cuda .* install onnxruntime-gpu"):
        packhorse.load(packed / "mask.onnx", device="cuda")


def test_a_plain_graph_is_opened_as_weights(packed: Path) -> None:
    assert "ONNX" not in packhorse.load(packed / "model.onnx").reason


def test_without_a_vocabulary_the_error_asks_for_one(packed: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(packed / "mask.onnx", tmp_path / "alone.onnx"))
    with pytest.raises(CheckpointError, match="--vocab"):
        packhorse.load(alone)
    assert packhorse.load(alone, vocab=packed / "vocab.txt").embed(["x"]).shape == (1, 384)
