"""`inspect`, `convert` and `verify`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize("to", ["hf", "tf1", "onnx"])
def test_convert_then_verify(cli, tiny, tmp_path: Path, to: str) -> None:
    if to == "onnx":
        pytest.importorskip("onnx")
    source = tiny("mlm")
    converted = cli("convert", source, tmp_path / "there", "--to", to, "--json")
    assert converted.code == 0, converted.err
    assert converted.document["to"] == to and "mlm" in converted.document["heads"]
    assert sorted(converted.document["files"]) == converted.document["files"]
    same = cli("verify", source, tmp_path / "there", "--json")
    assert same.code == 0, same.err
    assert same.document["same"] and not same.document["only_a"]
    assert all(tensor["equal"] for tensor in same.document["tensors"])
    assert {output["name"] for output in same.document["outputs"]} >= {"hidden", "mlm"}
    assert "the same model" in same.err


def test_verify_sees_one_bit(cli, tiny, tmp_path: Path) -> None:
    """The control: a single weight that is off is named, and the exit code says so."""
    source = tiny("embed")
    assert cli("convert", source, tmp_path / "other").code == 0
    weights = tmp_path / "other" / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("layer.1.output.dense.weight"))
    tensors[name][3, 4] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    result = cli("verify", source, tmp_path / "other", "--json")
    assert result.code == 1 and not result.document["same"]
    apart = [entry["name"] for entry in result.document["tensors"] if not entry["equal"]]
    assert apart == ["bert.layers.1.down.weight"]
    assert "not the same model: outputs of hidden" in result.err
    assert cli("verify", source, tmp_path / "other", "--tolerance", "100").code == 0


def test_verify_compares_heads_that_one_lacks(cli, tiny) -> None:
    result = cli("verify", tiny("embed"), tiny("mlm"))
    assert result.code == 1 and "are only in" in result.err


@pytest.mark.filterwarnings("always::UserWarning")
def test_verify_sees_other_shapes_and_other_words(cli, tiny, tmp_path: Path) -> None:
    source = tiny("embed")
    assert cli("convert", source, tmp_path / "short", "--max-positions", "32").code == 0
    result = cli("verify", source, tmp_path / "short")
    assert result.code == 1 and "other shapes (first bert.embed.positions.weight)" in result.err
    assert cli("convert", source, tmp_path / "words").code == 0
    vocabulary = tmp_path / "words" / "vocab.txt"
    words = vocabulary.read_text().splitlines()
    a, b = words.index("e"), words.index("s")
    words[a], words[b] = words[b], words[a]
    vocabulary.write_text("\n".join(words) + "\n")
    result = cli("verify", source, tmp_path / "words")
    assert result.code == 1 and "their tokenizers encode the texts differently" in result.err


def test_a_vocabulary_given_apart_keeps_its_settings(cli, tiny, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "vocab.txt").write_text((tiny("embed") / "vocab.txt").read_text())
    (apart / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    for number, vocab in enumerate((apart / "vocab.txt", apart)):
        target = tmp_path / f"out{number}"
        assert cli("convert", tiny("embed"), target, "--vocab", vocab).code == 0
        assert json.loads((target / "tokenizer_config.json").read_text())["do_lower_case"] is False


@pytest.mark.filterwarnings("always::UserWarning")
def test_a_table_smaller_than_the_vocabulary_is_reported(cli, tiny, tmp_path: Path) -> None:
    converted = cli("convert", tiny("embed"), tmp_path / "crop", "--vocab-size", "40")
    assert converted.code == 0 and "cannot be used with texts" in converted.err


def test_verify_on_ones_own_texts(cli, tiny, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the horse\na mule carries sacks to market\n")
    assert cli("verify", tiny("embed"), tiny("embed"), "--input", texts).code == 0
    assert cli("verify", tiny("embed"), tiny("embed"), "--input", tmp_path / "none.txt").code == 2


def test_convert_keeps_or_changes_the_dtype(cli, tiny, tmp_path: Path) -> None:
    assert cli("convert", tiny("embed"), tmp_path / "half", "--dtype", "bf16").code == 0
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert cli("convert", tmp_path / "half", tmp_path / "again", "--to", "tf1").code == 0
    result = cli("inspect", tmp_path / "again", "--json").document
    assert {facts["dtype"] for facts in result["tensors"]} == {"bfloat16"}


@pytest.mark.filterwarnings("always::UserWarning")
def test_convert_crops_only_when_asked_and_says_so(cli, tiny, tmp_path: Path) -> None:
    cropped = cli("convert", tiny("mlm"), tmp_path / "crop", "--max-positions", "32")
    assert cropped.code == 0 and "64" in cropped.err and "32" in cropped.err
    config = json.loads((tmp_path / "crop" / "config.json").read_text())
    assert config["max_position_embeddings"] == 32


def test_convert_writes_over_nothing(cli, tiny, tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    (target / "diary.txt").write_text("mine")
    refused = cli("convert", tiny("embed"), target)
    assert refused.code == 2 and "not empty" in refused.err
    assert [path.name for path in target.iterdir()] == ["diary.txt"]
    assert cli("convert", tiny("embed"), target, "--overwrite").code == 0


def test_inspect_shows_everything(cli, tiny) -> None:
    shown = cli("inspect", tiny("classify"))
    assert shown.code == 0
    for word in ("safetensors", "classify", "good, bad", "sha256", "crc32c", "hidden_size 32"):
        assert word in shown.out, word
    document = cli("inspect", tiny("classify"), "--json").document
    assert document["runs"] and document["family"] == "bert" and document["nonfinite"] == 0
    assert document["parameters"] == sum(facts["values"] for facts in document["tensors"])
    (file,) = document["files"]
    size = (tiny("classify") / "model.safetensors").stat().st_size
    assert file["bytes"] == size and len(file["sha256"]) == 64


def test_inspect_as_a_tree(cli, tiny) -> None:
    shown = cli("inspect", tiny("embed"), "--tree")
    assert shown.code == 0
    assert "└── " in shown.out and "word_embeddings" in shown.out and "[64, 32]" in shown.out


def test_inspect_says_why_a_model_does_not_run(cli, tiny, tmp_path: Path) -> None:
    tensors = load_file(tiny("embed") / "model.safetensors")
    tensors["stray"] = torch.full((2,), float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny("embed") / "config.json").read_text())
    result = cli("inspect", tmp_path, "--json")
    assert result.code == 0 and not result.document["runs"]
    assert "stray" in result.document["why_not"] and result.document["nonfinite"] == 2


def test_checksums_do_not_depend_on_the_format(cli, tiny, tmp_path: Path) -> None:
    assert cli("convert", tiny("embed"), tmp_path / "tf1", "--to", "tf1").code == 0
    name = "embeddings.word_embeddings.weight"
    first = cli("inspect", tiny("embed"), "--json").document["tensors"]
    second = cli("inspect", tmp_path / "tf1", "--json").document["tensors"]
    expected = next(facts["crc32c"] for facts in first if facts["name"].endswith(name))
    checksum = next(f["crc32c"] for f in second if f["name"] == "bert/embeddings/word_embeddings")
    assert expected == checksum


def test_run_takes_a_tensorflow_checkpoint_by_its_prefix(cli, tiny, tmp_path: Path) -> None:
    assert cli("convert", tiny("embed"), tmp_path / "tf1", "--to", "tf1").code == 0
    arguments = ("run", "the horse carries sacks", "--task", "embed", "--json")
    old = cli(*arguments, "--model", tmp_path / "tf1" / "bert_model.ckpt")
    new = cli(*arguments, "--model", tiny("embed"))
    assert old.code == new.code == 0
    assert old.document["results"][0]["vector"] == new.document["results"][0]["vector"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere/at/all"], "nowhere/at/all"),
        (["inspect", "{folder}"], "there are no weights"),
        (["convert", "{model}", "{folder}/x", "--to", "pdf"], "pdf"),
        (["convert", "{model}", "{folder}/x", "--config", "none.json"], "none.json: no such file"),
        (["verify", "{model}", "{folder}"], "there are no weights"),
        (["run", "x", "--model", "{folder}/model.ckpt"], "no prefix of a TensorFlow checkpoint"),
        (["run", "x", "--model", "{model}", "--heads", "5"], "says num_attention_heads 4"),
    ],
)
def test_mistakes_are_one_line(cli, tiny, tmp_path: Path, arguments: list[str], message) -> None:
    filled = [part.format(model=tiny("embed"), folder=tmp_path) for part in arguments]
    result = cli(*filled)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def bare(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TensorFlow checkpoint with Google's own configuration, and two variables too many."""
    from packhorse import checkpoint
    from packhorse.checkpoint.tensorflow import tf1

    folder = tmp_path_factory.mktemp("bare")
    source = checkpoint.write(folder / "source", checkpoint.load(tiny("mlm")), to="tf1")
    tensors = tf1.read(source / "bert_model.ckpt").tensors
    others = {"good_steps": torch.tensor(3), "queue/keys": torch.ones(2, 2)}
    tf1.write(folder / "bert_model.ckpt", tensors | others)
    raw = json.loads((source / "bert_config.json").read_text())
    for key in ("model_type", "architectures"):
        del raw[key]
    (folder / "bert_config.json").write_text(json.dumps(raw))
    (folder / "vocab.txt").write_bytes((source / "vocab.txt").read_bytes())
    return folder / "bert_model.ckpt"


@pytest.mark.filterwarnings("always::UserWarning")
def test_gelu_and_ignore(cli, bare: Path, tmp_path: Path) -> None:
    """The choice is asked for once, taken from the flag, printed and written down."""
    refused = cli("convert", bare, tmp_path / "refused")
    assert refused.code == 2 and "1 unknown (queue/keys)" in refused.err
    assert "--ignore PATTERN" in refused.err and not (tmp_path / "refused").exists()
    flags = ("--ignore", "queue/*")
    needed = cli("inspect", bare, *flags, "--ignore", "bert/encoder/*")
    assert "--ignore bert/encoder/* (ignore=) matches bert/encoder/layer_0" in needed.out
    inspected = cli("inspect", bare, *flags)
    assert inspected.code == 0 and inspected.err.count("--gelu tanh (gelu='tanh')") == 1
    assert "exact (erf): transformers reads it so" in inspected.out
    assert "training state skipped: good_steps" in inspected.err
    assert "ignored: 1 tensors (queue/keys)" in inspected.err
    result = cli("convert", bare, tmp_path / "hf", *flags, "--gelu", "tanh", "--json")
    assert result.code == 0 and "February 2019" not in result.err
    assert "GELU: approximated by tanh (gelu_new): --gelu (gelu=) says so" in result.err
    assert (result.document["gelu"], result.document["gelu_reason"]) == (
        "tanh",
        "--gelu (gelu=) says so",
    )
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["hidden_act"] == "gelu_new"
    same = cli("verify", bare, tmp_path / "hf", *flags, "--gelu", "tanh")
    assert same.code == 0, same.err
    changed = cli("verify", bare, tmp_path / "hf", *flags, "--gelu", "erf")
    assert changed.code == 1 and "outputs of" in changed.err
    ran = cli("run", "-m", bare, "--task", "fill", "the [MASK]", *flags, "--gelu", "tanh")
    assert ran.code == 0, ran.err
