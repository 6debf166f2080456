"""Formats told from files, configurations found or inferred, vocabularies given apart."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import packhorse
from packhorse import checkpoint
from packhorse.checkpoint import sources
from packhorse.errors import CheckpointError, InputError

CONFIG: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}


@pytest.fixture(scope="module")
def trained(tf: Any, tf_bert: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as training with TensorFlow leaves it; the prefix of its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    built = tf_bert.build(tf, slots="adam", step=7)
    return tf_bert.save(tf, built, folder / "model.ckpt", step=7)


@pytest.mark.parametrize(
    "way",
    ["prefix", "index", "data", "folder", "pointer"],
)
def test_every_way_to_name_a_tensorflow_checkpoint(trained: Path, way: str) -> None:
    path = {
        "prefix": trained,
        "index": trained.with_name(trained.name + ".index"),
        "data": trained.with_name(trained.name + ".data-00000-of-00001"),
        "folder": trained.parent,
        "pointer": trained.parent / "checkpoint",
    }[way]
    result = checkpoint.read(path)
    assert (result.format, result.step) == ("tf1", 7)
    loaded = checkpoint.load(path)
    assert loaded.config.heads == 4 and "mlm" in loaded.model.heads
    assert len(packhorse.load(path).embed(["abc"])) == 1


def test_slots_come_only_when_they_are_asked_for(trained: Path) -> None:
    assert checkpoint.read(trained).slots == {}
    slots = checkpoint.read(trained, slots=True).slots
    name = "bert/encoder/layer_1/output/dense/kernel"
    assert slots["m"].keys() == slots["v"].keys() and slots["m"][name].shape == (48, 32)


def test_the_configuration_and_the_vocabulary_may_lie_above(trained: Path, tmp_path: Path) -> None:
    inner = tmp_path / "weights"
    inner.mkdir()
    for path in trained.parent.glob(f"{trained.name}*"):
        shutil.copy(path, inner)
    for name in ("bert_config.json", "vocab.txt"):
        shutil.copy(trained.parent / name, tmp_path)
    assert packhorse.load(inner / trained.name).embed(["abc"]).shape == (1, 32)


def test_without_a_configuration_sizes_come_from_shapes(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    for path in trained.parent.glob(f"{trained.name}*"):
        shutil.copy(path, folder)
    prefix = folder / trained.name
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load(prefix)
    for settings in (
        "num_hidden_layers 2",
        "hidden_size 32",
        "vocab_size 80",
        "--heads",
        "--config",
    ):
        assert settings in str(refused.value)
    guessed = checkpoint.load(prefix, heads=4)
    reported = checkpoint.load(prefix, config=trained.parent / "bert_config.json")
    assert guessed.config == reported.config and guessed.vocabulary is None
    second = checkpoint.load(prefix, heads=8)
    assert second.config.heads == 8  # another model: heads do not show in the shapes
    with pytest.raises(CheckpointError, match="--vocab"):
        packhorse.load(prefix, heads=4)
    vocab = trained.parent / "vocab.txt"
    assert packhorse.load(prefix, heads=4, vocab=vocab).embed(["abc"]).shape == (1, 32)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"config": "none.json"}, "no such file"),
        ({"vocab": "none.txt"}, "no such file"),
        ({"heads": 0}, "at least 1"),
        ({"heads": 5}, r"--heads \(heads=\) is 5, but .*bert_config\.json says num_atten.* 4"),
        ({"heads": 8, "config": CONFIG}, "is 8, but the configuration says num_attention_heads 4"),
        ({"config": {"model_type": "gpt2"}}, "gpt2.*bert"),
    ],
)
def test_options_of_load_are_checked(
    trained: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises((InputError, CheckpointError), match=complaint):
        packhorse.load(trained, **options)


def test_heads_may_be_passed_beside_a_configuration(trained: Path) -> None:
    assert checkpoint.load(trained, heads=4).config == checkpoint.load(trained).config
    without = {key: value for key, value in CONFIG.items() if key != "num_attention_heads"}
    assert checkpoint.load(trained, config=without, heads=8).config.heads == 8
    shown = checkpoint.load(trained, config={"hidden_act": "relu"}, heads=4).config
    assert (shown.layers, shown.heads, shown.activation) == (2, 4, "relu")


def bare(trained: Path, folder: Path) -> Path:
    """The checkpoint alone, in a folder below."""
    folder.mkdir(parents=True)
    for path in trained.parent.glob(f"{trained.name}*"):
        shutil.copy(path, folder)
    return folder / trained.name


def test_the_configuration_at_fault_is_named(trained: Path, tmp_path: Path) -> None:
    """One that lies above may have nothing to do with the model."""
    prefix, above = bare(trained, tmp_path / "x"), tmp_path / "config.json"
    for text, complaint in {
        '{"port": 80}': "vocab_size is missing",
        '{"model_type": "gpt2"}': "model_type 'gpt2'",
        "{": "is not valid JSON",
        json.dumps(CONFIG | {"hidden_size": 64}): "do not fit the configuration",
        json.dumps(CONFIG | {"hidden_size": 33}): "do not divide",
    }.items():
        above.write_text(text)
        with pytest.raises(CheckpointError, match=complaint) as refused:
            checkpoint.load(prefix)
        assert str(refused.value).count(str(above)) == 1 and "--config" in str(refused.value)
        assert str(refused.value).startswith(f"{prefix}: ")
    above.write_text('{"port": 80}')
    with pytest.raises(CheckpointError, match="--heads"):
        checkpoint.load(prefix)
    reported = checkpoint.load(trained)
    assert checkpoint.load(prefix, heads=4).config == reported.config  # as that error promises
    options = tmp_path / "given.json"
    options.write_text('{"port": 80}')
    with pytest.raises(CheckpointError, match=rf"missing \(the configuration is {options}\)$"):
        checkpoint.load(prefix, config=options)


HEADS_OF_GOOGLE = {
    "cls/seq_relationship/output_bias": "[2]",
    "cls/seq_relationship/output_weights": "[2, 32]",
    "cls/predictions/output_bias": "[80]",
    "cls/predictions/transform/dense/bias": "[32]",
    "cls/predictions/transform/LayerNorm/gamma": "[32]",
    "bert/pooler/dense/bias": "[32]",
    "bert/pooler/dense/kernel": "[32, 32]",
}


@pytest.mark.parametrize("gone", HEADS_OF_GOOGLE)
def test_a_head_without_all_of_its_variables(trained: Path, tmp_path: Path, gone: str) -> None:
    """Google's configurations promise no head: one that is begun must be whole."""
    source, contents = sources.find(trained), checkpoint.read(trained)
    del contents.tensors[gone]
    missing = re.escape(f"1 missing ({gone} {HEADS_OF_GOOGLE[gone]})")
    with pytest.raises(CheckpointError, match=rf"configuration: {missing} \(the"):
        checkpoint.load(source, contents=contents)


def test_heads_left_out_are_noted(trained: Path) -> None:
    source, contents = sources.find(trained), checkpoint.read(trained)
    for kind in ("kernel", "bias"):
        del contents.tensors[f"bert/pooler/dense/{kind}"]
    loaded = checkpoint.load(source, contents=contents)
    assert "nsp" not in loaded.model.heads and "mlm" in loaded.model.heads
    remaining = ["cls/seq_relationship/output_bias", "cls/seq_relationship/output_weights"]
    assert loaded.notes[-1] == f"not used: 2 tensors ({', '.join(remaining)})"
    assert not [note for note in checkpoint.load(trained).notes if "not used" in note]


def test_two_variables_of_one_tensor(trained: Path) -> None:
    source, contents = sources.find(trained), checkpoint.read(trained)
    contents.tensors["bert/pooler/dense/weight"] = torch.zeros(32, 32)
    with pytest.raises(CheckpointError, match=r"dense/weight and .*dense/kernel are two names"):
        checkpoint.load(source, contents=contents)


def test_a_missing_variable_has_the_name_that_tensorflow_gives_it(
    tf: Any, tf_bert: Any, tmp_path: Path
) -> None:
    built = tf_bert.build(tf, {"num_hidden_layers": 1})
    prefix = tf_bert.save(tf, built, tmp_path / "model.ckpt")
    settings = json.loads((tmp_path / "bert_config.json").read_text())
    settings["num_hidden_layers"] = 2
    with pytest.raises(CheckpointError, match="bert/encoder/layer_1/attention/self/query/kernel"):
        checkpoint.load(prefix, config=settings)


def test_a_published_tensorflow_checkpoint(shared_data: Path) -> None:
    """A genuine one: 46 weights, their two slots, and the step."""
    folder = shared_data / "tf1" / "keras_bert_tiny"
    result = checkpoint.read(folder, slots=True)
    assert result.step == 20 and len(result.tensors) == 46
    assert [len(result.slots[kind]) for kind in ("m", "v")] == [46, 46]
    loaded = checkpoint.load(folder / "bert_model.ckpt")
    assert {"mlm", "nsp", "pooled"} <= set(loaded.model.heads)


def test_formats_by_content_not_by_name(save: Any, tmp_path: Path) -> None:
    model, folder = save("BertModel")
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "weights.xyz")
    shutil.copy(weights, tmp_path / "weights.bin")
    assert sources.find(tmp_path / "weights.xyz").format == "torch"
    assert sources.find(tmp_path / "weights.bin").format == "safetensors"
    options = {"config": folder / "config.json"}
    for name in ("weights.xyz", "weights.bin"):
        loaded = checkpoint.load(tmp_path / name, **options).model.state_dict()
        words = model.embeddings.word_embeddings.weight.detach()
        assert torch.equal(loaded["bert.embed.words.weight"], words)


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 64, bytes(range(256)), b"\x0a\xff"])
def test_what_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thing.bin"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"thing\.bin"):
        checkpoint.load(path)


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"safetensors.*\.bin.*\.index.*onnx.*\.pb"):
        checkpoint.load(tmp_path)


def test_a_saved_model_is_told_from_a_graph(tf: Any, tmp_path: Path) -> None:
    module = tf.Module()
    module.weight = tf.Variable([1.0, 2.0])
    tf.saved_model.save(module, str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match=r"variables/variables"):
        checkpoint.load(tmp_path / "saved")


def test_names_there_and_back() -> None:
    from packhorse.checkpoint.names import tf1

    names = [
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.LayerNorm.bias",
        "bert.encoder.layer.11.attention.self.query.weight",
        "bert.encoder.layer.0.output.LayerNorm.weight",
        "bert.pooler.dense.bias",
        "cls.predictions.transform.dense.weight",
        "electra.embeddings_project.weight",
        *tf1.HEADS.values(),
    ]
    for name in names:
        reference, transposed = tf1.variable_name(name)
        assert tf1.canonical_name(reference) == (name, transposed), name
    kernel = torch.from_numpy(np.arange(6).reshape(2, 3))
    scoped = {
        "import/bert/embeddings/word_embeddings": kernel,
        "import/bert/pooler/dense/kernel": kernel,
    }
    loaded, called = tf1.from_tensorflow(scoped, tf1.scope(scoped))
    assert loaded["bert.pooler.dense.weight"].shape == (3, 2)
    assert called["bert.pooler.dense.weight"] == "import/bert/pooler/dense/kernel"
