"""LoRA adapters in PEFT's layout: PEFT's own models give the same results, and what is refused."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import packhorse
from packhorse import checkpoint
from packhorse.cli import main
from packhorse.errors import CheckpointError, InputError
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence
from packhorse.serve import hosting
from packhorse.serve.settings import ServeSettings

LENGTHS = (5, 24, 1, 9)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "horse"]
TEXTS = ["horse a b", "c", "x y z horse q"]
# Family, and the modules that are adapted.
FAMILIES = {
    "Bert": ["query", "value"],
    "Roberta": ["query", "key", "value", "dense"],
    "DistilBert": ["q_lin", "lin1", "lin2"],
    "ModernBert": ["Wqkv", "Wo", "Wi"],
    "DebertaV2": ["query_proj", "value_proj", "dense"],
    "Albert": ["query", "ffn"],
}
OWN: dict[str, dict[str, Any]] = {
    "DebertaV2": {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8},
    "ModernBert": dict.fromkeys(
        ("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 2
    ),
    "Albert": {"embedding_size": 16},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 16},
    "rank-stabilized": {"r": 4, "lora_alpha": 3, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"layer.0.attention.self.query": 2, "value": 3},
        "alpha_pattern": {r"layer\.1\..*query": 5},
    },
    "magnitudes": {"r": 2, "lora_alpha": 6, "use_dora": True},
    "biases": {"r": 4, "lora_alpha": 8, "bias": "all"},
    "saved modules": {"r": 4, "lora_alpha": 8, "modules_to_save": ["pooler"]},
    "some layers": {"r": 4, "lora_alpha": 8, "layers_to_transform": [1]},
    "embeddings": {"r": 4, "lora_alpha": 8, "target_modules": ["query", "position_embeddings"]},
}


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")


def make_base(transformers: ModuleType, folder: Path, family: str, ending: str) -> Any:
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "max_position_embeddings": 48,
        "pad_token_id": 0,
    }
    if family == "DistilBert":
        keys = {"hidden_size": "dim", "num_hidden_layers": "n_layers"}
        keys |= {"num_attention_heads": "n_heads", "intermediate_size": "hidden_dim"}
        sizes = {keys.get(key, key): value for key, value in sizes.items()}
    config = getattr(transformers, f"{family}Config")(**sizes | OWN.get(family, {}))
    torch.manual_seed(3)
    model = getattr(transformers, family + ending)(config).double().eval()
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return model


def train(model: Any) -> Any:
    """Random numbers in place of training: PEFT begins with zeros."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


Made = Callable[..., tuple[Path, Any]]


@pytest.fixture
def make(peft: ModuleType, transformers: ModuleType, tmp_path: Path) -> Made:
    """An adapter's folder, beside that of its base, and PEFT's model of the two."""

    def made(
        family: str = "Bert",
        ending: str = "Model",
        base: Any = None,
        name: str = "adapter",
        **settings: Any,
    ) -> tuple[Path, Any]:
        model = base or make_base(transformers, tmp_path / "base", family, ending)
        model.name_or_path = str(tmp_path / "base")
        usual = {"target_modules": FAMILIES[family], "r": 4, "lora_alpha": 16}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = peft.get_peft_model(model, peft.LoraConfig(**usual | settings))
            train(wrapped.double()).save_pretrained(tmp_path / name)
        return tmp_path / name, wrapped

    return made


def sequences() -> list[SyntheticSequence]:
    random = np.random.default_rng(5)
    return [SyntheticSequence(random.integers(5, 30, n), np.zeros(n, int)) for n in LENGTHS]


@torch.inference_mode()
def theirs(model: Any, output: str) -> torch.Tensor:
    """One sequence after another, without a padded place."""
    rows = [model(input_ids=torch.from_numpy(item.ids)[None])[output] for item in sequences()]
    return torch.cat([row[0] if row.ndim == 3 else row for row in rows])


@torch.inference_mode()
def ours(folder: Path, head: str, **options: Any) -> torch.Tensor:
    loaded = checkpoint.load(folder, dtype=torch.float64, **options)
    return loaded.model(Packed.build(sequences()), head)[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # DeBERTa's scale is fp32 in transformers, whatever the weights.
    assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", SETTINGS)
def test_every_setting_is_that_of_peft(case: str, make: Made, tmp_path: Path) -> None:
    folder, model = make(**SETTINGS[case])
    want = theirs(model, "last_hidden_state")
    assert_close(ours(folder, "hidden"), want, atol=1e-10, rtol=1e-10)
    assert_close(ours(tmp_path / "base", "hidden", adapter=folder), want, atol=1e-10, rtol=1e-10)
    with pytest.raises(AssertionError):  # the control: the base alone
        close(ours(tmp_path / "base", "hidden"), want)
    raw = json.loads((folder / "adapter_config.json").read_text())
    raw["lora_alpha"] *= 1.01  # and another scale
    raw["alpha_pattern"] = {}
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    with pytest.raises(AssertionError):
        close(ours(folder, "hidden"), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, make: Made) -> None:
    folder, model = make(family)
    close(ours(folder, "hidden"), theirs(model, "last_hidden_state"))


@pytest.mark.parametrize(
    ("family", "task", "ending", "head"),
    [
        ("Bert", "SEQ_CLS", "ForSequenceClassification", "classify"),
        ("Roberta", "SEQ_CLS", "ForSequenceClassification", "classify"),
        ("DebertaV2", "TOKEN_CLS", "ForTokenClassification", "tokens"),
    ],
)
def test_heads_that_the_base_has_not(
    family: str,
    task: str,
    ending: str,
    head: str,
    make: Made,
    transformers: ModuleType,
    tmp_path: Path,
) -> None:
    """A base for any task, and an adapter that brings the classifier."""
    make_base(transformers, tmp_path / "base", family, "Model")
    model = getattr(transformers, family + ending).from_pretrained(tmp_path / "base", num_labels=3)
    folder, wrapped = make(family, base=model, task_type=task)
    close(ours(folder, head), theirs(wrapped, "logits"))
    loaded = checkpoint.load(folder)
    assert loaded.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    checkpoint.write(tmp_path / "merged", loaded)
    again = getattr(transformers, family + ending).from_pretrained(tmp_path / "merged")
    close(theirs(again.double().eval(), "logits"), ours(folder, head))


def test_users_load_name_and_choose(make: Made, transformers: ModuleType, tmp_path: Path) -> None:
    base = make_base(transformers, tmp_path / "base", "Bert", "Model").float()
    first, _ = make(base=base, name="first")
    other = transformers.BertModel.from_pretrained(tmp_path / "base").float()
    second, _ = make(base=other, name="second", target_modules=["dense"], use_rslora=True)
    alone = [packhorse.load(folder, device="cpu").embed(TEXTS) for folder in (first, second)]
    plain = packhorse.load(tmp_path / "base", device="cpu", dtype="fp32").embed(TEXTS)
    folders = {"one": first, "two": second}
    encoder = packhorse.load(tmp_path / "base", device="cpu", adapters=folders)
    vectors = [encoder.adapted(name).embed(TEXTS) for name in folders]
    for ours, expected in zip([encoder.embed(TEXTS), *vectors], [plain, *alone], strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01 < np.abs(vectors[0] - plain).max()
    assert len({encoder.fingerprint, *(encoder.adapted(n).fingerprint for n in folders)}) == 3
    with pytest.raises(InputError, match="no adapter 'three'; there are: one, two"):
        encoder.adapted("three")


def test_behind_the_server(
    make: Made, transformers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make(base=make_base(transformers, tmp_path / "base", "Bert", "Model").float())
    expected = packhorse.load(folder, device="cpu").embed(TEXTS)
    monkeypatch.setenv("PACKHORSE_RUNTIME", str(tmp_path / "runtime"))
    usual: dict[str, Any] = {"model": (f"b={tmp_path / 'base'}",), "threads": 1}
    hosts = hosting.open_models(ServeSettings(**usual, adapter=(f"law={folder}",)))
    try:
        assert [model.name for model in hosts] == ["b", "b:law"]
        vectors = [np.stack(model.runner.run(TEXTS)) for model in hosts]
        np.testing.assert_allclose(hosts.find("b:law").encoder.embed(TEXTS), expected, atol=1e-6)
        np.testing.assert_allclose(vectors[1], expected, atol=1e-6)
        assert np.abs(vectors[0] - expected).max() > 0.01
    finally:
        hosts.close()
    for entry in ("law", f"c:law={folder}", f"b:={folder}"):
        with pytest.raises(InputError, match=r"--adapter .* is not NAME=FOLDER"):
            hosting.open_models(ServeSettings(**usual, adapter=(entry,)))


def test_from_the_shell(make: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, _ = make("Bert", "Model")
    assert main(["inspect", str(folder), "--json"]) == 0
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert said["runs"] and any("merged: the adapter adapter" in note for note in said["notes"])
    assert (
        main(["convert", str(tmp_path / "base"), str(tmp_path / "m"), "--adapter", str(folder)])
        == 0
    )
    capfd.readouterr()
    rows: list[Any] = []
    for place in (folder, tmp_path / "m"):
        assert main(["run", *TEXTS, "--model", str(place), "--task", "embed", "--json"]) == 0
        rows.append(json.loads(capfd.readouterr().out.splitlines()[-1])["results"])
    assert rows[0] == rows[1]
    assert main(["verify", str(folder), str(tmp_path / "m"), "--adapter", str(folder)]) == 2
    assert main(["verify", str(tmp_path / "m"), str(tmp_path / "m"), "--adapter", "org/name"]) == 2
    assert "does not say which of the two" in capfd.readouterr().err


# ---- without PEFT: files by hand ----


def write(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "../base"}
    (folder / "adapter_config.json").write_text(json.dumps(raw | settings))
    return folder


QUERY = "base_model.model.encoder.layer.1.attention.self.query"


def pair(module: str = QUERY, rank: int = 2, width: int = 32) -> dict[str, torch.Tensor]:
    a, b = torch.randn(rank, width), torch.randn(32, rank)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def test_a_merged_weight_is_the_sum(transformers: ModuleType, tmp_path: Path) -> None:
    make_base(transformers, tmp_path / "base", "Bert", "Model")
    tensors = pair()
    folder = write(tmp_path / "lora", tensors, base_model_name_or_path=str(tmp_path / "base"))
    before = load_file(tmp_path / "base" / "model.safetensors")
    loaded = checkpoint.load(folder, dtype=torch.float64)
    a, b = (tensors[f"{QUERY}.lora_{part}.weight"].double() for part in "AB")
    name = QUERY.removeprefix("base_model.model.")
    got = loaded.model.get_parameter("bert.layers.1.attention.qkv.weight")[:32]
    assert_close(got.data, before[f"{name}.weight"] + 2 * b @ a)
    assert loaded.notes == ("merged: the adapter lora, which changes 1 weights",)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported, only 'LORA'"),
    "another task": ({"task_type": "CAUSAL_LM"}, "task_type 'CAUSAL_LM' is not supported"),
    "other weights": ({"init_lora_weights": "pissa"}, "'pissa' changes the weights of the base"),
    "turned weights": ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
    "more layers": ({"layer_replication": [[0, 2]]}, "layer_replication .* is not supported"),
    "rank": ({"r": 3}, "query has rank 2, and adapter_config.json says 3"),
    "no rank": ({"r": "2"}, "rank_pattern gives .* '2', which is not a positive number"),
    "a pattern": ({"rank_pattern": {"(": 2}}, "which is no pattern"),
    "no patterns": ({"alpha_pattern": [1]}, "alpha_pattern .* does not map names to numbers"),
    "a repeated group": ({"rank_pattern": {"(a+)+": 2}}, "can take very long to match"),
    "many groups": ({"alpha_pattern": {"(a|a)" * 30: 2}}, "can take very long to match"),
    "many repetitions": ({"alpha_pattern": {".*" * 9 + "x": 2}}, "can take very long to match"),
    "many options": ({"alpha_pattern": {"a?" * 30 + "x": 2}}, "can take very long to match"),
    "magnitudes": ({"use_dora": True}, "use_dora and the magnitudes in the file do not agree"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_would_change_results(
    case: str, transformers: ModuleType, tmp_path: Path
) -> None:
    make_base(transformers, tmp_path / "base", "Bert", "Model")
    settings, message = REFUSED[case]
    folder = write(tmp_path / "lora", pair(), **settings)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path / "base", adapter=folder)


def test_an_adapter_of_itself_or_of_another_is_refused(tmp_path: Path) -> None:
    own, other = tmp_path / "lora", tmp_path / "other"
    write(own, pair(), base_model_name_or_path=str(own))
    write(other, pair(), base_model_name_or_path=str(own))
    for folder in (own, other):
        with pytest.raises(CheckpointError, match="lora is an adapter too, and has no weights"):
            checkpoint.load(folder)


def test_allowed_patterns_are_decided_soon(transformers: ModuleType, tmp_path: Path) -> None:
    """The worst that is let through: long names that nearly match, two repetitions."""
    make_base(transformers, tmp_path / "base", "Bert", "Model")
    module = "base_model.model." + "a." * 250
    folder = write(tmp_path / "lora", pair(module), rank_pattern={".*a.*b": 2})
    start = time.process_time()
    with pytest.raises(CheckpointError, match="which this model does not have"):
        checkpoint.load(tmp_path / "base", adapter=folder)
    assert time.process_time() - start < 60


def test_what_does_not_fit(transformers: ModuleType, tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_base(transformers, base, "Bert", "ForMaskedLM")
    cases = {
        "which this model does not have": pair(QUERY.replace("layer.1", "layer.7")),
        r"\[32, 16\], which here is \[32, 32\]": pair(width=16),
        "only one of the two matrices": {f"{QUERY}.lora_A.weight": torch.randn(2, 32)},
        "which have no product": pair() | {f"{QUERY}.lora_B.weight": torch.randn(32, 3)},
        "is no part of LoRA": {f"{QUERY}.lora_C.weight": torch.randn(2, 32)},
        "which does not fit this model": {"base_model.model.bert.more.weight": torch.ones(2)},
        "by which this model also scores words": {
            "base_model.model.bert.embeddings.word_embeddings.lora_embedding_A": torch.ones(
                2, len(WORDS)
            ),
            "base_model.model.bert.embeddings.word_embeddings.lora_embedding_B": torch.ones(32, 2),
        },
    }
    for number, (message, tensors) in enumerate(cases.items()):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(base, adapter=write(tmp_path / str(number), tensors))
    folder = write(tmp_path / "lost", pair(), base_model_name_or_path=str(tmp_path / "gone" / "x"))
    with pytest.raises(CheckpointError, match=r"is an adapter of .*gone.* --adapter"):
        checkpoint.load(folder)
    nameless = write(tmp_path / "nameless", pair(), base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match="names no base model"):
        checkpoint.load(nameless)
    with pytest.raises(CheckpointError, match="is no folder of an adapter"):
        checkpoint.load(base, adapter=base)
    both = write(tmp_path / "both", pair(), base_model_name_or_path=str(base))
    with pytest.raises(CheckpointError, match="is an adapter already"):
        checkpoint.load(both, adapter=both)
    (both / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="there are no weights; looked for: adapter_model"):
        checkpoint.load(both)


def test_a_sentence_transformers_folder_keeps_its_modules(
    transformers: ModuleType, tmp_path: Path
) -> None:
    """The adapter lies beside modules.json; the pooling is that of the adapter's folder."""
    make_base(transformers, tmp_path / "base", "Bert", "Model")
    folder = write(tmp_path / "st", pair(), base_model_name_or_path=str(tmp_path / "base"))
    kinds = ("Transformer", "Pooling")
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": "" if not n else "1_Pooling",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    pooling |= {"pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    loaded = checkpoint.load(folder)
    packed = Packed.build(sequences())
    with torch.inference_mode():
        hidden, vectors = loaded.model(packed, "hidden")[0], loaded.model(packed, "embed")[0]
    assert_close(vectors, packed.first(hidden))
