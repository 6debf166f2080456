"""Fingerprints in files of results, and what `run`, `inspect` and `verify` say of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packhorse

Cli = Callable[..., Any]


@pytest.fixture
def model(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model with two prompts and no default; a test may change its files."""
    folder = tmp_path / "model"
    shutil.copytree(tiny("embed"), folder)
    settings = {"prompts": {"query": "good horse ", "document": "bad mule "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("the horse\nthe mule\nthe market\n")
    return path


def stored(path: Path) -> dict[str, Any]:
    """What a file of results says about the model that made them."""
    if path.suffix != ".parquet":
        return json.loads(Path(f"{path}.meta.json").read_text())
    parquet = pytest.importorskip("pyarrow.parquet")
    metadata = parquet.read_schema(path).metadata
    assert not Path(f"{path}.meta.json").exists()
    return {
        "model": metadata[b"packhorse.model"].decode(),
        "fingerprint": metadata[b"packhorse.fingerprint"].decode(),
        "fingerprint_parts": json.loads(metadata[b"packhorse.fingerprint_parts"]),
    }


@pytest.mark.parametrize("suffix", [".npy", ".jsonl", ".parquet"])
def test_a_file_carries_the_fingerprint(
    suffix: str, cli: Cli, model: Path, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"vectors{suffix}"
    command = ["run", "--task", "embed", "--input", texts, "-m", model]
    document = cli(*command, "--out", out, "--json").document
    encoder = packhorse.load(model, device="cpu")
    assert document["fingerprint"] == encoder.fingerprint
    assert stored(out) == {
        **({} if suffix == ".parquet" else {"dimensions": encoder.width}),
        "model": encoder.name,
        "fingerprint": encoder.fingerprint,
        "fingerprint_parts": encoder.fingerprint_parts().parts,
    }
    assert cli(*command, "--prompt", "query", "--out", out, "--overwrite").code == 0
    prompted = encoder.fingerprint_parts(prompt_name="query")
    assert stored(out)["fingerprint"] == str(prompted) != encoder.fingerprint
    assert stored(out)["fingerprint_parts"]["prompt"] == "good horse "


def test_readers_see_only_the_vectors(cli: Cli, model: Path, texts: Path, tmp_path: Path) -> None:
    import numpy as np

    parquet = pytest.importorskip("pyarrow.parquet")
    command = ["run", "--task", "embed", "--input", texts, "-m", model, "--out"]
    for suffix in (".npy", ".jsonl", ".parquet"):
        assert cli(*command, tmp_path / f"v{suffix}").code == 0
    vectors = np.load(tmp_path / "v.npy")
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [{"id", "text", "vector"}] * 3
    assert np.array_equal(np.array([line["vector"] for line in lines], np.float32), vectors)
    table = parquet.read_table(tmp_path / "v.parquet")
    assert table.column_names == ["id", "text", "vector"]
    assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), vectors)


def test_hidden_states_have_no_default_prompt(
    cli: Cli, model: Path, texts: Path, tmp_path: Path
) -> None:
    path = model / "config_sentence_transformers.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "default_prompt_name": "query"}))
    for task, prompt in (("embed", "good horse "), ("hidden", "")):
        out = tmp_path / f"{task}.jsonl"
        assert cli("run", "--task", task, "--input", texts, "-m", model, "--out", out).code == 0
        assert stored(out)["fingerprint_parts"]["prompt"] == prompt


def change_weights(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def change_vocabulary(model: Path) -> None:
    path = model / "vocab.txt"
    path.write_text(path.read_text().replace("horse\nmule\n", "mule\nhorse\n"))


def change_prompt(model: Path) -> None:
    path = model / "config_sentence_transformers.json"
    path.write_text(path.read_text().replace("good horse ", "good mule "))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (change_weights, "weights"),
        (change_vocabulary, "tokenizer"),
        (change_prompt, "prompt ('good horse ', now 'good mule ')"),
    ],
)
def test_another_model_does_not_resume(
    change: Callable[[Path], None], part: str, cli: Cli, model: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the horse\nthe mule\n\n")
    out = tmp_path / "v.npy"
    command = ["run", "--task", "embed", "--prompt", "query", "--input", texts, "-m", model]
    command += ["--chunk", "1", "--out", out]
    assert "the text is empty" in cli(*command).err
    change(model)
    refused = cli(*command, "--skip-empty")
    assert refused.code == 2
    assert f"was begun with another {part}" in refused.err
    assert "--overwrite" in refused.err


def test_a_copied_model_resumes(cli: Cli, model: Path, tmp_path: Path) -> None:
    """Its weights are recognized by their values, not by where the file is and when it changed."""
    texts = tmp_path / "texts.txt"
    texts.write_text("the horse\nthe mule\n\n")
    command = ["run", "--task", "embed", "--input", texts, "--chunk", "1"]
    command += ["--out", tmp_path / "v.npy"]
    assert "the text is empty" in cli(*command, "-m", model).err
    copy = tmp_path / "elsewhere" / model.name
    shutil.copytree(model, copy, copy_function=shutil.copyfile)
    shutil.rmtree(model)
    result = cli(*command, "-m", copy, "--skip-empty", "--json")
    assert result.document["resumed_after"] == 2


def test_inspect_and_verify(cli: Cli, model: Path, tmp_path: Path) -> None:
    encoder = packhorse.load(model, device="cpu")
    result = cli("inspect", model)
    assert f"fp32 {encoder.fingerprint}, bf16 " in result.out
    document = cli("inspect", model, "--json").document
    assert document["fingerprints"]["fp32"] == encoder.fingerprint
    narrow = packhorse.load(model, device="cpu", dtype="bf16")
    assert document["fingerprints"]["bf16"] == narrow.fingerprint
    parts = {k: v for k, v in encoder.fingerprint_parts().parts.items() if k != "dtype"}
    assert document["fingerprint_parts"] == parts

    second_folder = tmp_path / "other"
    shutil.copytree(model, second_folder)
    settings = json.loads((second_folder / "config_sentence_transformers.json").read_text())
    settings["default_prompt_name"] = "query"
    (second_folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    same = cli("verify", model, model, "--json")
    assert same.document["fingerprints"] == [encoder.fingerprint] * 2
    assert same.document["fingerprint_differs_in"] == []
    result = cli("verify", model, second_folder)
    assert result.code == 0
    assert "their fingerprints differ in: prompt" in result.err


def test_inspect_without_a_tokenizer(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "apart").mkdir()
    vocabulary = (model / "vocab.txt").rename(tmp_path / "apart" / "vocab.txt")
    assert cli("inspect", model, "--json").document["fingerprints"] == {}
    document = cli("inspect", model, "--vocab", vocabulary, "--json").document
    encoder = packhorse.load(model, vocab=vocabulary, device="cpu")
    assert document["fingerprints"]["fp32"] == encoder.fingerprint
