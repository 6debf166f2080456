"""Models stored in int8: the same integers come back, and compressed-tensors reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import packhorse
from packhorse import checkpoint
from packhorse.checkpoint import quantized
from packhorse.errors import CheckpointError, InputError
from packhorse.model.int8 import quantize_weight
from packhorse.reports import random_model
from packhorse.runtime.calibration import calibrate

TEXTS = ["the quick brown fox", "jumps over the lazy dog and on and on and on", "a"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write("tiny", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("int8") / "tiny"
    return checkpoint.write(target, checkpoint.load(source), products=torch.int8)


def changed(
    folder: Path, target: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
) -> Path:
    """A copy of a folder with a changed configuration or tensors."""
    shutil.copytree(folder, target)
    raw = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    change(raw, tensors)
    (target / "config.json").write_text(json.dumps(raw))
    save_file(tensors, target / "model.safetensors")
    return target


def test_linear_layers_of_the_encoder_are_integers(source: Path, folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    exact = {name: x for name, x in load_file(source / "model.safetensors").items()}
    integers = {name for name, x in stored.items() if x.dtype == torch.int8}
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    assert len(integers) == 6 * layers
    for name in integers:
        expected = quantize_weight(exact[name])
        assert torch.equal(stored[name], expected.values)
        assert torch.equal(stored[f"{name}_scale"], expected.scale[:, None])
    assert not [name for name in integers if "layer." not in name]
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert not {f"{name}.weight" for name in ignored} & integers


def test_what_was_written_loads_as_the_same_int8_model(source: Path, folder: Path) -> None:
    before = packhorse.load(source, device="cpu", dtype="int8")
    after = packhorse.load(folder, device="cpu")
    assert after.dtype == torch.int8
    for a, b in zip(before.hidden(TEXTS), after.hidden(TEXTS), strict=True):
        assert np.array_equal(a.states, b.states)
    floats = packhorse.load(folder, device="cpu", dtype="fp32")
    assert floats.dtype == torch.float32
    assert not np.array_equal(floats.hidden(TEXTS)[0].states, after.hidden(TEXTS)[0].states)


def test_layers_that_are_kept_stay_floats_in_the_file(source: Path, tmp_path: Path) -> None:
    kept = ("0.down", "1.attention.qkv")
    loaded = replace(checkpoint.load(source), kept=kept)
    target = checkpoint.write(tmp_path / "kept", loaded, products=torch.int8)
    again = checkpoint.load(target)
    assert again.quantized and set(again.kept) == set(kept)
    backend: Any = packhorse.load(target, device="cpu").backend
    layers = backend.model.bert.layers
    assert "Int8" not in type(layers[0].down).__name__
    assert "Int8" in type(layers[0].up).__name__


def test_what_was_quantized_converts_to_floats(folder: Path, tmp_path: Path) -> None:
    plain = checkpoint.write(tmp_path / "plain", checkpoint.load(folder))
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert checkpoint.load(plain).quantized is None
    a, b = checkpoint.load(folder).model.state_dict(), checkpoint.load(plain).model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_int8_is_written_for_hugging_face_alone(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="int8 is written as 'hf', not as 'onnx'"):
        checkpoint.write(tmp_path / "x", checkpoint.load(source), to="onnx", products=torch.int8)
    assert not (tmp_path / "x").exists()


def test_a_scale_per_tensor_is_read(folder: Path, tmp_path: Path) -> None:
    name = "encoder.layer.0.output.dense.weight"

    def one_scale(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in tensors if key.endswith(name))
        tensors[f"{key}_scale"] = torch.tensor([0.5])

    path = changed(folder, tmp_path / "one", one_scale)
    stored = load_file(path / "model.safetensors")
    values = next(x for key, x in stored.items() if key.endswith(name))
    state = checkpoint.load(path).model.state_dict()
    assert torch.equal(state["bert.layers.0.down.weight"], values * 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw, _: raw["quantization_config"].update(format="pack-quantized"),
            "format is 'pack-quantized'; of compressed-tensors, int-quantized",
        ),
        (
            lambda _, tensors: tensors.pop(next(k for k in tensors if k.endswith("dense.weight"))),
            "is the scale of int8 numbers, but .* is missing",
        ),
        (
            lambda _, tensors: tensors.update(
                {next(k for k in tensors if k.endswith("weight_scale")): torch.ones(3, 1)}
            ),
            "a scale per channel of",
        ),
        (
            lambda _, tensors: tensors.update(
                {
                    next(k for k in tensors if k.endswith("weight_scale")).replace(
                        "_scale", "_zero_point"
                    ): torch.ones(3, 1)
                }
            ),
            "has zero points or is packed",
        ),
    ],
)
def test_other_schemes_are_refused_by_name(
    folder: Path, tmp_path: Path, change: Any, message: str
) -> None:
    path = changed(folder, tmp_path / "changed", change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path)


def test_compressed_tensors_reads_what_was_written(folder: Path) -> None:
    """transformers decompresses it to the numbers that we compute with."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False)
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    with torch.no_grad():
        model(input_ids=ids)  # the first call decompresses
    ours = checkpoint.load(folder).model.state_dict()
    theirs = model.state_dict()["encoder.layer.0.output.dense.weight"]
    assert torch.equal(theirs.float(), ours["bert.layers.0.down.weight"])


def test_layers_are_kept_until_vectors_are_near_enough(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits that int8 cannot meet, the worst half of the layers is kept, and that is said."""
    from packhorse.runtime import quality, quantizing

    texts = [" ".join(["word", "text", "line"][: 1 + i % 3]) + f" {i}" for i in range(30)]
    load = partial(checkpoint.load, source)
    easy = quantizing.choose_layers(load, texts)
    assert easy.checkpoint.kept == () and easy.layers > 0
    monkeypatch.setattr(quality, "LEAST_MEAN", 1.1)
    steps: list[tuple[int, int]] = []
    hard = quantizing.choose_layers(load, texts, lambda done, total: steps.append((done, total)))
    assert not hard.quality.good
    numbers = {name.split(".")[0] for name in hard.checkpoint.kept}
    assert len(numbers) == int(quantizing.MOST_KEPT * hard.checkpoint.config.layers)
    assert hard.quality.cosine_mean >= easy.quality.cosine_mean
    assert steps[-1][0] == steps[-1][1]


def test_quantizable_are_the_linear_layers(source: Path) -> None:
    state = checkpoint.load(source).model.state_dict()
    names = quantized.quantizable(state, kept=["0.down"])
    assert "bert.layers.0.up.dense.weight" in names and "bert.layers.0.down.weight" not in names
    assert not [name for name in names if "norm" in name or "embed" in name]


@pytest.fixture(scope="module")
def float8_folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("float8") / "tiny"
    loaded = checkpoint.load(source)
    scales = calibrate(loaded, checkpoint.tokenizer(loaded), TEXTS, torch.device("cpu"))
    return checkpoint.write(target, replace(loaded, scales=scales), products=torch.float8_e4m3fn)


def test_float8_without_scales_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layers\.0\..*weight has no scale for float8; write"):
        checkpoint.write(tmp_path / "x", checkpoint.load(source), products=torch.float8_e4m3fn)
    assert not (tmp_path / "x").exists()


def test_float8_has_weights_and_inputs_with_a_scale_each(source: Path, float8_folder: Path) -> None:
    stored = load_file(float8_folder / "model.safetensors")
    rounded = {name for name, x in stored.items() if x.dtype == torch.float8_e4m3fn}
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    assert len(rounded) == 6 * layers
    for name in rounded:
        assert stored[f"{name}_scale"].shape == (1,)
        assert float(stored[name.removesuffix("weight") + "input_scale"]) > 0
    raw = json.loads((float8_folder / "config.json").read_text())["quantization_config"]
    assert raw["format"] == "float-quantized"
    inputs = raw["config_groups"]["group_0"]["input_activations"]
    assert inputs["dynamic"] is False and inputs["strategy"] == "tensor"


def test_what_was_written_loads_as_the_same_float8_model(source: Path, float8_folder: Path) -> None:
    """Scales and weights come back, so that results are equal to the bit, and on a CPU it is fp32
    unless float8 is named.
    """
    loaded = checkpoint.load(source)
    scales = calibrate(loaded, checkpoint.tokenizer(loaded), TEXTS, torch.device("cpu"))
    again = checkpoint.load(float8_folder)
    assert again.quantized == torch.float8_e4m3fn and again.kept == ()
    assert again.scales == pytest.approx(scales, rel=1e-6)
    assert packhorse.load(float8_folder, device="cpu").dtype == torch.float32
    after = packhorse.load(float8_folder, device="cpu", dtype="float8")
    twice = checkpoint.write(
        float8_folder.with_name("twice"), again, products=torch.float8_e4m3fn, overwrite=True
    )
    second = packhorse.load(twice, device="cpu", dtype="float8")
    for a, b in zip(after.hidden(TEXTS), second.hidden(TEXTS), strict=True):
        np.testing.assert_allclose(a.states, b.states, atol=1e-5)
    assert (
        after.fingerprint == packhorse.load(float8_folder, device="cpu", dtype="float8").fingerprint
    )


def test_scales_of_inputs_are_part_of_the_fingerprint(float8_folder: Path, tmp_path: Path) -> None:
    def wider(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("input_scale")]:
            tensors[name] = tensors[name] * 64

    path = changed(float8_folder, tmp_path / "wider", wider)
    one, two = (packhorse.load(p, device="cpu", dtype="float8") for p in (float8_folder, path))
    assert not np.array_equal(one.hidden(TEXTS)[0].states, two.hidden(TEXTS)[0].states)
    assert one.fingerprint != two.fingerprint


def test_layers_that_are_kept_stay_floats_in_float8_too(source: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load(source)
    scales = calibrate(loaded, checkpoint.tokenizer(loaded), TEXTS, torch.device("cpu"))
    kept = ("0.down", "1.attention.qkv")
    marked = replace(loaded, scales=scales, kept=kept)
    target = checkpoint.write(tmp_path / "kept", marked, products=torch.float8_e4m3fn)
    again = checkpoint.load(target)
    assert set(again.kept) == set(kept) and not set(again.scales) & set(kept)
    backend: Any = packhorse.load(target, device="cpu", dtype="float8").backend
    layers = backend.model.bert.layers
    assert "Float8" not in type(layers[0].down).__name__
    assert "Float8" in type(layers[1].down).__name__


def test_a_file_without_scales_of_inputs_is_calibrated(float8_folder: Path, tmp_path: Path) -> None:
    def dynamic(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("input_scale")]:
            del tensors[name]

    path = changed(float8_folder, tmp_path / "dynamic", dynamic)
    assert checkpoint.load(path).scales == {}
    own = packhorse.load(float8_folder, device="cpu", dtype="float8").hidden(TEXTS)[1].states
    built_in = packhorse.load(path, device="cpu", dtype="float8").hidden(TEXTS)[1].states
    cosines = (
        (own * built_in).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(built_in, axis=1)
    )
    assert cosines.min() > 0.99


WRONG_SCALES = (torch.tensor([0.0]), torch.tensor([torch.inf]), torch.ones(2), torch.tensor([1]))


@pytest.mark.parametrize("scale", WRONG_SCALES, ids=str)
def test_a_wrong_scale_of_an_input_is_refused(
    float8_folder: Path, tmp_path: Path, scale: torch.Tensor
) -> None:
    def wrong(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[next(name for name in tensors if name.endswith("input_scale"))] = scale

    path = changed(float8_folder, tmp_path / "wrong", wrong)
    with pytest.raises(CheckpointError, match=r"input_scale holds .* one finite number above 0"):
        checkpoint.load(path)


def test_compressed_tensors_reads_float8_too(float8_folder: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(float8_folder, add_pooling_layer=False)
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    with torch.no_grad():
        model(input_ids=ids)  # the first call decompresses
    ours = checkpoint.load(float8_folder).model.state_dict()
    theirs = model.state_dict()["encoder.layer.0.output.dense.weight"]
    torch.testing.assert_close(theirs.float(), ours["bert.layers.0.down.weight"], rtol=1e-6, atol=0)
