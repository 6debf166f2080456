"""The fingerprint of a model: equal wherever its vectors are, changed by whatever moves them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import packhorse
from packhorse import checkpoint
from packhorse.checkpoint import fingerprint
from packhorse.checkpoint.fingerprint import Fingerprint
from packhorse.errors import InputError
from packhorse.tokens import Tokenizer

Tiny = Callable[[str], Path]


# Weights and configuration of the models in tests/golden. Those like RoBERTa's are one model.
ROBERTA = ("00e1c36d1942e622", "82a87d69f6dfd404")
FAMILIES = {
    "bert": ("2b8de6e99f6825a1", "bb4de08fb37d0f8c"),
    "camembert": ROBERTA,
    "distilbert": ("eb6f4fd86ae25f7c", "2d357bbce4a6d84a"),
    "electra": ("d007aaeae4875d99", "c6faaaf298289b07"),
    "modernbert": ("5ced5563772e89ef", "498e92788c6bf33b"),
    "mpnet": ("9130bf6ade06f636", "ea66d6157a6c7ce8"),
    "roberta": ROBERTA,
    "xlmroberta": ROBERTA,
}


def parts_of(folder: Path, **options: Any) -> Fingerprint:
    return packhorse.load(folder, device="cpu", **options).fingerprint_parts()


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A sentence-transformers model that a test may change."""
    copy = tmp_path / "model"
    shutil.copytree(tiny("embed"), copy)
    write_layout(copy, "Pooling", "Normalize")
    return copy


def write_layout(folder: Path, *kinds: str, pooling: str = "mean", **settings: Any) -> None:
    """Write modules.json and the folders of modules, as sentence-transformers does."""
    modules = []
    for number, kind in enumerate(("Transformer", *kinds)):
        path = f"{number}_{kind}" if number else ""
        (folder / path).mkdir(exist_ok=True)
        modules.append(
            {
                "idx": number,
                "name": str(number),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
        )
        if kind == "Pooling":
            modes = {"word_embedding_dimension": 32, f"pooling_mode_{pooling}_tokens": True}
            if pooling == "cls":
                modes = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
            (folder / path / "config.json").write_text(json.dumps(modes))
        if kind == "Dense":
            dense = {"in_features": 32, "out_features": 8, "bias": False, **settings}
            (folder / path / "config.json").write_text(json.dumps(dense))
            weight = torch.arange(256.0).reshape(8, 32)
            save_file({"linear.weight": weight}, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **changes}))


def change_one_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("layer.1.output.dense.bias"))
    tensors[name][7] = torch.nextafter(tensors[name][7], torch.tensor(1.0))
    save_file(tensors, path, metadata={"format": "pt"})


def swap_two_words(folder: Path) -> None:
    path = folder / "vocab.txt"
    path.write_text(path.read_text().replace("horse\nmule\n", "mule\nhorse\n"))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weight": (change_one_weight, "weights"),
    "activation": (lambda folder: edit(folder / "config.json", hidden_act="relu"), "config"),
    "heads": (lambda folder: edit(folder / "config.json", num_attention_heads=2), "config"),
    "epsilon": (lambda folder: edit(folder / "config.json", layer_norm_eps=1e-6), "config"),
    "vocabulary": (swap_two_words, "tokenizer"),
    "lowercase": (
        lambda folder: edit(folder / "tokenizer_config.json", do_lower_case=False),
        "tokenizer",
    ),
    "length": (
        lambda folder: edit(folder / "sentence_bert_config.json", max_seq_length=17),
        "max_length",
    ),
    "pooling": (
        lambda folder: write_layout(folder, "Pooling", "Normalize", pooling="cls"),
        "pooling",
    ),
    "no normalization": (lambda folder: write_layout(folder, "Pooling"), "pooling"),
    "shortened": (
        lambda folder: edit(folder / "config_sentence_transformers.json", truncate_dim=16),
        "pooling",
    ),
    "prompt": (
        lambda folder: edit(
            folder / "config_sentence_transformers.json",
            prompts={"query": "search: "},
            default_prompt_name="query",
        ),
        "prompt",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_in_its_part(name: str, folder: Path) -> None:
    before = parts_of(folder)
    change, part = CHANGES[name]
    change(folder)
    after = parts_of(folder)
    assert before.differences(after) == [part]
    assert str(before) != str(after)


def test_what_changes_no_vector_changes_nothing(folder: Path) -> None:
    before = parts_of(folder)
    edit(folder / "config.json", hidden_dropout_prob=0.3, use_cache=False)
    edit(
        folder / "config_sentence_transformers.json",
        prompts={"query": "search: "},  # not the default
        similarity_fn_name="dot",
    )
    assert parts_of(folder) == before


def test_a_module_after_the_pooling(folder: Path) -> None:
    without = parts_of(folder)
    write_layout(folder, "Pooling", "Dense", "Normalize")
    dense = parts_of(folder)
    assert dense.pooling == "mean, dense 32 to 8 Tanh, normalize"
    assert without.differences(dense) == ["weights", "pooling"]
    write_layout(
        folder,
        "Pooling",
        "Dense",
        "Normalize",
        activation_function="torch.nn.modules.activation.ReLU",
    )
    assert dense.differences(parts_of(folder)) == ["pooling"]


def test_dtype_device_and_preparation(folder: Path, tmp_path: Path) -> None:
    """Weights are digested as they are stored: not as they are cast or frozen."""
    first = parts_of(folder)
    assert first == parts_of(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert first == parts_of(folder, kernel="reference")
    assert first == parts_of(folder, invariant=True)
    on_host, elsewhere = (checkpoint.load(folder, device=device) for device in ("cpu", "meta"))
    assert fingerprint.digests(on_host) == fingerprint.digests(elsewhere)
    narrow = parts_of(folder, dtype="bf16")
    assert first.differences(narrow) == ["dtype"]
    assert str(first) != str(narrow)


def test_a_processor_with_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without frozen layers, as on a processor or a build of torch that has no such products."""
    first = parts_of(folder)
    monkeypatch.setattr("packhorse.runtime.backend.can_freeze", lambda dtype: False)
    assert parts_of(folder) == first


def test_every_minor_version_has_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parts_of(folder)
    major, minor, *_ = packhorse.__version__.split(".")
    monkeypatch.setattr(fingerprint, "__version__", f"{major}.{minor}.99")
    assert parts_of(folder) == before
    monkeypatch.setattr(fingerprint, "__version__", f"{major}.{int(minor) + 1}.0")
    assert before.differences(parts_of(folder)) == ["version"]


@pytest.mark.parametrize("to", ["hf", "tf1", "onnx"])
def test_the_format_of_the_file_does_not_matter(to: str, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("mlm")
    loaded = checkpoint.load(source)
    written = checkpoint.write(tmp_path / to, loaded, to=to)
    assert checkpoint.load(written).format == {"hf": "safetensors"}.get(to, to)
    assert parts_of(written).differences(parts_of(source)) == []


def test_torch_files_and_narrow_files(folder: Path) -> None:
    """The same values as fp32 in safetensors and as bf16 in torch's format."""
    path = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file({name: tensor.float() for name, tensor in rounded.items()}, path)
    wide = parts_of(folder)
    path.unlink()
    torch.save(rounded, folder / "pytorch_model.bin")
    assert parts_of(folder) == wide


def test_both_files_of_a_tokenizer(minilm: Path, tmp_path: Path) -> None:
    """tokenizer.json and vocab.txt with the same rules give the same tokens."""
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copyfile(minilm / name, tmp_path / name)
    assert Tokenizer.load(tmp_path).digest == Tokenizer.load(minilm).digest
    edit(tmp_path / "tokenizer_config.json", do_lower_case=False)
    assert Tokenizer.load(tmp_path).digest != Tokenizer.load(minilm).digest


def test_stored_truncation_does_not_matter(minilm: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    shutil.copyfile(minilm / "tokenizer.json", path)
    rules = json.loads(path.read_text())
    assert rules["truncation"]
    edit(path, truncation=None, padding=None)
    assert Tokenizer.load(path).digest == Tokenizer.load(minilm).digest
    edit(path, normalizer={**rules["normalizer"], "lowercase": False})
    assert Tokenizer.load(path).digest != Tokenizer.load(minilm).digest


def test_a_snapshot_of_the_hub(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    first = parts_of(folder)
    home = tmp_path / "hub" / "models--org--tiny"
    blobs = home / "blobs"
    snapshot = home / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = packhorse.load("org/tiny", device="cpu")
    assert model.fingerprint_parts() == first


def test_every_model_has_the_prompts_of_queries_and_documents(folder: Path) -> None:
    """As in `encode_query` and `encode_document`: empty if the model has none of that name."""
    model = packhorse.load(folder, device="cpu")
    assert str(model.fingerprint_parts(prompt_name="query")) == model.fingerprint


def test_prompts(folder: Path) -> None:
    edit(
        folder / "config_sentence_transformers.json",
        prompts={"query": "search: ", "document": "text: "},
        default_prompt_name="query",
    )
    model = packhorse.load(folder, device="cpu")
    assert model.fingerprint == str(model.fingerprint_parts(prompt_name="query"))
    assert model.fingerprint == str(model.fingerprint_parts(prompt="search: "))
    document_parts = model.fingerprint_parts(prompt_name="document")
    assert model.fingerprint_parts().differences(document_parts) == ["prompt"]
    assert model.fingerprint_parts(prompt="").prompt == ""
    assert model.fingerprint_parts(max_length=9).max_length == 9
    assert replace(model, default_prompt=None).fingerprint == str(
        model.fingerprint_parts(prompt="")
    )
    with pytest.raises(InputError, match="has no prompt 'passage'"):
        model.fingerprint_parts(prompt_name="passage")


def test_the_fingerprint_of_minilm_is_known(minilm: Path) -> None:
    """Fingerprints that users stored stay valid: what changes this one breaks them all."""
    original = parts_of(minilm)
    assert original.parts == {
        "weights": "c0ca9dc2bb152745",
        "config": "2a7e3c57a4567926",
        "tokenizer": "ddb0f68b4de24bc6",
        "max_length": 256,
        "pooling": "mean, normalize",
        "prompt": "",
        "dtype": "fp32",
        "version": ".".join(packhorse.__version__.split(".")[:2]),
    }
    assert str(replace(original, version="0.1")) == "bca33b576fdb3362"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fingerprints_of_families_are_known(family: str) -> None:
    """Also where a module of ours gets another name, or the configuration another setting."""
    folder = Path(__file__).resolve().parents[1] / "golden" / family
    assert tuple(fingerprint.digests(checkpoint.load(folder)).values()) == FAMILIES[family]


def test_a_packed_graph(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from packhorse import onnxpack

    exported = checkpoint.write(tmp_path / "onnx", checkpoint.load(folder), to="onnx")
    for name in ("first", "second"):
        shutil.copytree(exported, tmp_path / name)
        onnxpack.pack(exported / "model.onnx", tmp_path / name / "packed.onnx", "mask")
    path = tmp_path / "first" / "packed.onnx"
    first = parts_of(path)
    assert parts_of(tmp_path / "second" / "packed.onnx") == first
    assert first.differences(parts_of(folder)) == ["weights", "config"]
    content = bytearray(path.read_bytes())
    weight = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"]
    position = content.find(weight[9].numpy().tobytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert parts_of(path).differences(first) == ["weights"]


def test_an_encoder_that_was_not_loaded(make_encoder: Any) -> None:
    with pytest.raises(InputError, match="not opened by packhorse"):
        _ = make_encoder().fingerprint
