"""Training begins from what TensorFlow left: weights, and LAMB's averages beside them.

Real TensorFlow writes a miniature with the names of MLPerf's model.ckpt-28252. The averages are
drawn at random, so each is known by its values wherever it ends up.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from packhorse.errors import CheckpointError, InputError
from packhorse.optim import LAMB, load_slots, parameter_groups
from packhorse.train.job import _starting_model
from packhorse.train.preparing import StartingModel, load_model
from packhorse.train.settings import TrainSettings

STEP = 28252
CONFIG: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What TensorFlow holds, and the prefix it saved it under."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tf = pytest.importorskip("tensorflow", reason="tensorflow-cpu is not installed")
    bert = _bert_in_tensorflow()
    built = bert.build(tf, CONFIG, ("mlm", "nsp"), slots="lamb", step=STEP)
    folder = tmp_path_factory.mktemp("mlperf")
    return built, bert.save(tf, built, folder / "model.ckpt", step=STEP)


def _bert_in_tensorflow() -> ModuleType:
    path = Path(__file__).parents[1] / "checkpoint" / "tensorflow_bert.py"
    spec = importlib.util.spec_from_file_location("tensorflow_bert", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def by_hand(values: dict[str, np.ndarray], suffix: str) -> dict[str, np.ndarray]:
    """Some variables as our parameters have them, without the tables of names."""

    def get(name: str) -> np.ndarray:
        return values[f"{name}{suffix}"]

    attention_scope = "bert/encoder/layer_1/attention/self"
    parts = [get(f"{attention_scope}/{part}/kernel").T for part in ("query", "key", "value")]
    biases = [get(f"{attention_scope}/{part}/bias") for part in ("query", "key", "value")]
    return {
        "bert.embed.words.weight": get("bert/embeddings/word_embeddings"),
        "bert.layers.1.attention.qkv.weight": np.concatenate(parts),
        "bert.layers.1.attention.qkv.bias": np.concatenate(biases),
        "bert.layers.0.up.dense.weight": get("bert/encoder/layer_0/intermediate/dense/kernel").T,
        "bert.layers.0.norm.weight": get("bert/encoder/layer_0/output/LayerNorm/gamma"),
        "heads.mlm.decoder.bias": get("cls/predictions/output_bias"),
        "heads.mlm.dense.weight": get("cls/predictions/transform/dense/kernel").T,
        "heads.nsp.dense.weight": get("cls/seq_relationship/output_weights"),
    }


def test_averages_go_the_way_of_their_weights(written: tuple[Any, Path]) -> None:
    built, prefix = written
    assert prefix.name == f"model.ckpt-{STEP}"
    start = load_model(prefix)
    assert start.step == STEP and set(start.checkpoint.model.heads) >= {"mlm", "nsp"}
    parameters = dict(start.checkpoint.model.named_parameters())
    for kind, suffix in {"m": "/LAMB", "v": "/LAMB_1"}.items():
        slots = start.slots[kind]
        assert slots.keys() == parameters.keys()
        assert all(slots[name].shape == parameters[name].shape for name in parameters)
        for name, want in by_hand(built.others, suffix).items():
            np.testing.assert_array_equal(slots[name].numpy(), want, name)
    for name, want in by_hand(built.weights, "").items():
        np.testing.assert_array_equal(parameters[name].detach().numpy(), want, name)


def test_every_average_lands_where_its_weight_does(
    written: tuple[Any, Path], tmp_path: Path
) -> None:
    """Written with the weights' own values, averages must equal the parameters, all of them."""
    built, prefix = written
    tensors = {**built.weights, "global_step": np.asarray(STEP, np.int64)}
    for name, value in built.weights.items():
        tensors |= {f"{name}/LAMB": value, f"{name}/LAMB_1": -value}
    start = load_model(_saved(tmp_path / "model.ckpt-1", prefix, tensors), gelu="erf")
    parameters = dict(start.checkpoint.model.named_parameters())
    assert all(start.slots["m"][name].equal(tensor) for name, tensor in parameters.items())
    assert all(start.slots["v"][name].equal(-tensor) for name, tensor in parameters.items())


def _saved(to: Path, like: Path, tensors: dict[str, np.ndarray]) -> Path:
    from packhorse.checkpoint.tensorflow import tf1

    tf1.write(to, {name: torch.from_numpy(np.array(x)) for name, x in tensors.items()})
    (to.parent / "bert_config.json").write_bytes((like.parent / "bert_config.json").read_bytes())
    return to


def one_step(start: StartingModel) -> tuple[LAMB, torch.Tensor]:
    model = start.checkpoint.model
    optimizer = LAMB(parameter_groups(model, 0.01), betas=(0.5, 0.5), bias_correction=False)
    load_slots(optimizer, model.named_parameters(), start.slots, start.step or 0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer, optimizer.state[model.bert.embed.words.weight]["m"]


def test_lamb_goes_on_from_there(written: tuple[Any, Path]) -> None:
    built, prefix = written
    optimizer, m = one_step(load_model(prefix))
    want = built.others["bert/embeddings/word_embeddings/LAMB"] / 2  # a step without a gradient
    np.testing.assert_array_equal(m.numpy(), want)
    assert {int(of["step"]) for of in optimizer.state.values()} == {STEP + 1}


def test_query_key_and_value_go_on_each_by_its_own_ratio(written: tuple[Any, Path]) -> None:
    """TensorFlow's variables and averages in float64, one variable at a time, against our step."""
    built, prefix = written
    variables = built.weights | built.others
    start = load_model(prefix)
    one_step(start)
    moved = start.checkpoint.model.get_parameter("bert.layers.1.attention.qkv.weight").detach()
    actual = moved.double().numpy().reshape(3, 16, 16)
    for part, weight in zip(("query", "key", "value"), actual, strict=True):
        name = f"bert/encoder/layer_1/attention/self/{part}/kernel"
        w, m, v = (np.float64(variables[f"{name}{slot}"]) for slot in ("", "/LAMB", "/LAMB_1"))
        direction = 0.5 * m / (np.sqrt(0.5 * v) + 1e-6) + 0.01 * w
        move = 1e-3 * np.linalg.norm(w) / np.linalg.norm(direction) * direction
        off = np.linalg.norm(weight.T - (w - move)) / np.linalg.norm(move)
        assert off < 1e-4, part


def test_a_padded_vocabulary_has_averages_of_zero(written: tuple[Any, Path]) -> None:
    _, prefix = written
    with pytest.warns(UserWarning, match="padded with zeros from 40 rows to 48"):
        start = load_model(prefix, vocab_size=48)
    _, m = one_step(start)
    assert m.shape == (48, 16) and not m[40:].any() and m[:40].all()
    assert start.slots["v"]["heads.mlm.decoder.bias"].shape == (48,)


def test_slots_are_left_out_where_asked(written: tuple[Any, Path]) -> None:
    start = load_model(written[1], slots=False)
    assert start.slots == {} and start.step == STEP
    assert any("optimizer state left out" in note for note in start.checkpoint.notes)


def test_a_checkpoint_without_all_averages_is_refused(
    written: tuple[Any, Path], tmp_path: Path
) -> None:
    built, prefix = written
    tensors_left = dict(built.weights | built.others)
    del tensors_left["bert/encoder/layer_0/attention/self/key/kernel/LAMB_1"]
    start = load_model(_saved(tmp_path / "model.ckpt-2", prefix, tensors_left), gelu="erf")
    with pytest.raises(InputError, match=r"'v' .* bert.layers.0.attention.qkv.weight"):
        one_step(start)


def test_other_formats_have_no_averages(minilm: Path) -> None:
    start = load_model(minilm)
    assert start.slots == {} and start.step is None and "embed" in start.checkpoint.model.heads


def test_what_is_not_there_is_reported_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"28252 .* MLCommons' .*language_model/tensorflow"):
        load_model(tmp_path / "bs64k_32k_ckpt" / "model.ckpt-28252")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "my-model")
    assert "MLPerf" not in str(caught.value)


def test_a_recipe_can_set_the_gelu(written: tuple[Any, Path], tmp_path: Path) -> None:
    built, prefix = written
    variables = {**built.weights, "teacher/kernel": np.zeros(3, np.float32)}
    bare = _saved(tmp_path / "model.ckpt-3", prefix, variables)
    settings = TrainSettings(model=str(bare), gelu="tanh", ignore=("teacher/*",))
    assert _starting_model(settings).checkpoint.model.bert.config.activation == "gelu_tanh"
