"""Variables that are no part of a model: known ones are skipped, others where the user says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import checkpoint
from packhorse.errors import CheckpointError, InputError

STATE: dict[str, Any] = {
    "good_steps": np.int32(7),
    "loss_scale_optimizer/current_loss_scale": np.float32(32768),
    "loss_scale": np.float32(2),
    "beta1_power": np.float32(0.9),
    "global_step": np.int64(900),
}


@pytest.fixture(scope="module")
def weights(tf: ModuleType, tf_bert: ModuleType) -> dict[str, np.ndarray]:
    return tf_bert.build(tf, heads=("mlm",)).weights


@pytest.fixture
def save(tf: ModuleType, tf_bert: ModuleType, weights: dict, tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint that TensorFlow writes of the weights and others; no graph lies beside it."""

    def save(others: dict[str, Any]) -> Path:
        tensors = weights | others
        tf.raw_ops.SaveV2(
            prefix=str(tmp_path / "model.ckpt"),
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=[tf.constant(value) for value in tensors.values()],
        )
        raw = tf_bert.CONFIG | {"model_type": "bert"}
        (tmp_path / "bert_config.json").write_text(json.dumps(raw))
        return tmp_path / "model.ckpt"

    return save


def test_training_state_is_skipped_and_reported(save: Callable, weights: dict) -> None:
    loaded = checkpoint.load(save(STATE))
    message = (
        "training state skipped: good_steps, loss_scale, loss_scale_optimizer/current_loss_scale"
    )
    assert message in loaded.notes and "optimizer state left out: 1 beta1_power" in loaded.notes
    words = loaded.model.state_dict()["bert.embed.words.weight"].numpy()
    assert np.array_equal(words, weights["bert/embeddings/word_embeddings"])
    assert checkpoint.read(save(STATE)).step == 900


def test_a_weight_of_such_a_name_is_not(save: Callable) -> None:
    """Only scalars are state."""
    with pytest.raises(CheckpointError, match=r"1 unknown \(loss_scale\).*--ignore PATTERN"):
        checkpoint.load(save({"loss_scale": np.ones(3, np.float32)}))


def test_the_user_may_ignore_the_rest(save: Callable, weights: dict) -> None:
    teacher = {f"teacher/{name}": value + 1 for name, value in weights.items()}
    path = save(teacher | {"ema/rate": np.float32(0.9), "queue": np.ones((4, 4), np.float32)})
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match=r"2 unknown \((ema/rate, queue|queue, ema/rate)\)"):
        checkpoint.load(path, ignore=["teacher/*"])
    loaded = checkpoint.load(path, ignore=["teacher/*", "queue", "ema/*"])
    alone = checkpoint.load(save({}))
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    (note,) = (note for note in loaded.notes if note.startswith("ignored: "))
    assert f"{len(teacher) + 2} tensors" in note and "teacher/bert/" in note
    second = checkpoint.load(save(teacher), ignore=["bert/*", "cls/*"])
    words = second.model.state_dict()["bert.embed.words.weight"]
    assert torch.equal(words, alone.model.state_dict()["bert.embed.words.weight"] + 1)


NEEDED = [
    ("bert/encoder/layer_1/*", "bert/encoder/layer_1/"),
    ("bert/*", "bert/"),
    ("*/LayerNorm/beta", "/LayerNorm/beta"),
    ("cls/predictions/output_bias", "cls/predictions/output_bias"),
]


@pytest.mark.parametrize("options", [{}, {"heads": 4}], ids=["configured", "inferred"])
@pytest.mark.parametrize(("pattern", "named"), NEEDED)
def test_a_weight_that_is_needed_is_not_ignored(
    pattern: str, named: str, options: dict[str, Any], save: Callable
) -> None:
    path = save({})
    if options:  # the shapes must not make a smaller model of what is left
        path.with_name("bert_config.json").unlink()
    with pytest.raises((InputError, CheckpointError)) as raised:
        checkpoint.load(path, ignore=[pattern], gelu="erf", **options)
    assert f"--ignore {pattern} (ignore=) matches" in str(raised.value)
    assert named in str(raised.value) and "which the model needs" in str(raised.value)


def test_a_head_may_be_ignored_but_not_all(save: Callable) -> None:
    with pytest.raises(InputError, match=r"--ignore \* \(ignore=\) leaves no tensor"):
        checkpoint.load(save({}), ignore=["*"])
    loaded = checkpoint.load(save({}), ignore=["cls/*"])
    assert "mlm" in checkpoint.load(save({})).model.heads and "mlm" not in loaded.model.heads
