"""Families with rotary positions, ALiBi, gates and decoders: results are those of transformers.

Random models of every class that transformers has, on their usual axes and off them. What it writes
has the names of the hub's files, so that a file of the hub is read by the same table.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import packhorse
from packhorse import attention, checkpoint
from packhorse.checkpoint import names
from packhorse.errors import CheckpointError, InputError
from packhorse.model.bert import Bert
from packhorse.model.config import BertConfig
from packhorse.packing.batch import Packed
from packhorse.runtime.proof import SyntheticSequence

KERNELS = [name for name in attention.KERNELS if name not in ("fused", "varlen", "mask")]
LENGTHS = (5, 40, 1, 9, 150, 33)
CPU = torch.device("cpu")
Raw = dict[str, Any]
HEADS: dict[str, dict[str, Any]] = {
    "Model": {},
    "ForMaskedLM": {"mlm": "logits"},
    "ForSequenceClassification": {"classify": "logits"},
    "ForTokenClassification": {"tokens": "logits"},
}
WAYS: tuple[Raw, ...] = ({"dtype": "bf16"}, {"invariant": True, "budget": 256})
PER_SEQUENCE = ("pooled", "classify")


@dataclass(frozen=True)
class Family:
    """Settings of a tiny model, and changes of config.json that must change its results."""

    name: str  # what the classes of transformers begin with
    endings: tuple[str, ...]
    settings: Raw = field(default_factory=dict[str, Any])
    others: tuple[Raw, ...] = ()  # the same off its usual place on the axes
    wrong: tuple[Raw, ...] = ()
    wide: bool = True  # transformers computes it in float64 throughout
    types: int = 0


FAMILIES = {
    "NomicBert": Family(
        "NomicBert",
        ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
        others=({"hidden_act": "gelu", "type_vocab_size": 2},),
        wrong=(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}},
            {"rotary_emb_interleaved": True},
            {"hidden_act": "gelu"},
        ),
        types=2,
    ),
    "Gte": Family(
        "Gte",
        ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
        others=({"hidden_act": "relu", "type_vocab_size": 0},),
        wrong=(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}},
            {"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_parameters": None},
            {"hidden_act": "silu"},
        ),
    ),
    "Qwen3": Family(
        "Qwen3",
        ("Model", "ForSequenceClassification", "ForTokenClassification"),
        settings={"num_key_value_heads": 2, "head_dim": 16},
        others=(
            {"num_key_value_heads": 4, "attention_bias": True, "rms_norm_eps": 1e-4},
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
            | {"layer_types": ["full_attention"] * 3},
        ),
        wrong=(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}},
            {"rms_norm_eps": 0.1},
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 100}
            | {"max_window_layers": 0},
        ),
        wide=False,
    ),
    "Gemma3Text": Family(
        "Gemma3Text",
        ("Model", "ForSequenceClassification"),
        settings={
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_bidirectional_attention": True,
        },
        others=({"use_bidirectional_attention": False, "hidden_activation": "silu"},),
        wrong=(
            {"sliding_window": 14},
            {"use_bidirectional_attention": False},
            {"layer_types": ["full_attention"] * 3},
            {"rms_norm_eps": 0.1},
        ),
        wide=False,
    ),
    "EuroBert": Family(
        "EuroBert",
        ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
        settings={"num_key_value_heads": 2},
        others=(
            {"mlp_bias": True, "attention_bias": True, "classifier_pooling": "mean"},
            {"num_key_value_heads": 4, "classifier_pooling": "bos", "tie_word_embeddings": True},
        ),
        wrong=(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}},
            {"rms_norm_eps": 0.1},
            {"hidden_act": "gelu"},
        ),
        wide=False,
    ),
    "JinaEmbeddingsV3": Family(
        "JinaEmbeddingsV3",
        ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
        others=({"hidden_act": "relu", "type_vocab_size": 2},),
        wrong=(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}},
            {"hidden_act": "silu"},
        ),
    ),
}
CASES = [(name, ending) for name, family in FAMILIES.items() for ending in family.endings]
SLOW = pytest.mark.slow


def quick(*endings: str) -> list[Any]:
    """The cases; only those of these classes run every time."""
    return [case if case[1] in endings else pytest.param(*case, marks=SLOW) for case in CASES]


def make(transformers: ModuleType, family: Family, ending: str, **settings: Any) -> Any:
    """A random model in evaluation mode."""
    usual: Raw = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 160,
        "pad_token_id": 1,
        **({"num_labels": 3} if "Classification" in ending else {}),
    }
    prefix = family.name
    config_class = getattr(transformers, f"{prefix}Config", None)
    if config_class is None:
        config_class = getattr(transformers, f"{prefix}TextConfig")
    config = config_class(**usual | family.settings | settings)
    torch.manual_seed(3)
    model = getattr(transformers, prefix + ending)(config).eval()
    with torch.no_grad():  # zeros and ones would hide a bias or a norm that went astray
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def edit(folder: Path, *gone: str, **settings: Any) -> Path:
    path = folder / "config.json"
    raw = {k: v for k, v in json.loads(path.read_text()).items() if k not in gone}
    path.write_text(json.dumps(raw | settings))
    return folder


def sequences(types: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[SyntheticSequence]:
    """Ids of all words but the padding word, by which a decoder's classifier finds the end."""
    random = np.random.default_rng(5)
    return [
        SyntheticSequence(random.integers(2, 50, n), random.integers(0, max(types, 1), n))
        for n in lengths
    ]


def run_padded(model: Any, output: str, types: int, per_sequence: bool) -> torch.Tensor:
    """The output of a padded batch, what is padding cut away, laid end to end."""
    entries = sequences(types)
    ids = torch.full((len(entries), max(LENGTHS)), 1)
    mask = torch.zeros_like(ids)
    kinds = torch.zeros_like(ids)
    for row, item in enumerate(entries):
        ids[row, : len(item.ids)] = torch.from_numpy(item.ids)
        kinds[row, : len(item.ids)] = torch.from_numpy(item.types)
        mask[row, : len(item.ids)] = 1
    options = {"token_type_ids": kinds} if types else {}
    result = model(input_ids=ids, attention_mask=mask, **options)[output]
    return result if per_sequence else result[mask.bool()]


def run_packed(model: Any, kernel: str, head: str, types: int = 0) -> torch.Tensor:
    model.bert.use(attention.kernel(kernel))
    return model(Packed.build(sequences(types)), head)[0]


@torch.inference_mode()
def same(
    model: Any,
    loaded: Any,
    family: Family,
    ending: str = "Model",
    kernels: tuple[str, ...] = ("bucketed",),
    tolerance: float = 1e-5,
) -> None:
    """Are all outputs of the packed model those of the padded one?"""
    outputs = {"hidden": "last_hidden_state"} if ending == "Model" else HEADS[ending]
    assert outputs.keys() - {"hidden"} <= loaded.heads.keys()
    dtype = next(loaded.parameters()).dtype
    for head, output in outputs.items():
        expected = run_padded(model, output, family.types, head in PER_SEQUENCE)
        for kernel in kernels:
            if attention.kernel(kernel).serves.refusal(CPU, dtype):
                continue
            result = run_packed(loaded, kernel, head, family.types)
            assert_close(result, expected.to(result.dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "ending"), quick("Model", "ForMaskedLM", "ForSequenceClassification")
)
def test_every_class(name: str, ending: str, transformers: ModuleType, tmp_path: Path) -> None:
    family = FAMILIES[name]
    for number, settings in enumerate(({}, *family.others)):
        model = make(transformers, family, ending, **settings)
        model.save_pretrained(tmp_path / str(number))
        loaded = checkpoint.load(tmp_path / str(number)).model
        kernels = tuple(KERNELS) if ending == "Model" else ("bucketed",)
        same(model, loaded, family, ending, kernels)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.wide])
def test_in_double_precision_too(name: str, transformers: ModuleType, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = make(transformers, family, "Model").double()
    model.save_pretrained(tmp_path)
    loaded = checkpoint.load(tmp_path, dtype=torch.float64).model
    same(model, loaded, family, kernels=("reference", "bucketed"), tolerance=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_comparison_can_fail(name: str, transformers: ModuleType, tmp_path: Path) -> None:
    """The controls: each setting that is read otherwise than it was written."""
    family = FAMILIES[name]
    model = make(transformers, family, "Model")
    model.save_pretrained(tmp_path)
    same(model, checkpoint.load(tmp_path).model, family)
    raw = json.loads((tmp_path / "config.json").read_text())
    for settings in family.wrong:
        loaded = checkpoint.load(tmp_path, config=raw | settings).model
        with pytest.raises(AssertionError):
            same(model, loaded, family)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kernel", ["native", "bucketed", "mask"])
def test_packed_is_as_alone(
    name: str, kernel: str, transformers: ModuleType, tmp_path: Path
) -> None:
    """And the control: in one sequence instead of four they are something else."""
    if refusal := attention.kernel(kernel).serves.refusal(CPU, torch.float32):
        pytest.skip(refusal)
    make(transformers, FAMILIES[name], "Model").save_pretrained(tmp_path)
    loaded = checkpoint.load(tmp_path, kernel=attention.kernel(kernel)).model
    entries = sequences(lengths=(30, 7, 100, 1))
    rows = kernel == "mask"
    packed = Packed.rows(entries, [[0, 2], [1, 3]], 140) if rows else Packed.build(entries)
    joined = SyntheticSequence(*(np.concatenate(parts) for parts in zip(*entries, strict=True)))
    with torch.inference_mode():
        together = packed.split(loaded(packed, "hidden")[0])
        loaded.bert.use(attention.kernel("reference"))
        for item, result in zip(entries, together, strict=True):
            assert_close(result, loaded(Packed.build([item]), "hidden")[0], atol=1e-5, rtol=1e-5)
        merged = loaded(Packed.build([joined]), "hidden")[0]
        assert not torch.allclose(merged[30:37], together[1], atol=1e-3)


@pytest.mark.parametrize(("name", "ending"), quick("ForSequenceClassification"))
def test_transformers_loads_what_we_write(
    name: str, ending: str, transformers: ModuleType, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    model = make(transformers, family, ending, **(family.others[0] if family.others else {}))
    model.save_pretrained(tmp_path / "theirs")
    loaded = checkpoint.load(tmp_path / "theirs")
    checkpoint.write(tmp_path / "ours", loaded)
    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    assert checkpoint.load(tmp_path / "ours").config == loaded.config
    same(again, loaded.model, family, ending)


# ---- what files of the hub say ----

NOMIC = {  # the keys of Nomic's own code, as its files on the hub have them
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 256,
    "n_layer": 3,
    "n_positions": 8192,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "tie_word_embeddings": True,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 50,
}


def test_the_keys_of_nomics_own_code(transformers: ModuleType, tmp_path: Path) -> None:
    """They mean what transformers' keys mean; a bare encoder and one called `bert.` load too."""
    family = FAMILIES["NomicBert"]
    model = make(transformers, family, "Model", intermediate_size=256)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(NOMIC))
    loaded = checkpoint.load(tmp_path)
    same(model, loaded.model, family)
    assert loaded.max_length == 8192
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    same(model, checkpoint.load(tmp_path).model, family)
    assert names.understand(NOMIC | {"n_inner": 200}).intermediate_size == 256
    refused = {
        "prenorm": True,
        "activation_function": "geglu",
        "rotary_emb_fraction": 0.5,
        "rotary_emb_scale_base": 512,
        "num_experts": 8,
        "rope_scaling": {"type": "yarn", "factor": 2.0},
    }
    for key, value in refused.items():
        with pytest.raises(CheckpointError, match=r"(is|are) not supported"):
            names.understand(NOMIC | {key: value})


def test_long_texts_stretch_the_angles(transformers: ModuleType, tmp_path: Path) -> None:
    """Each by its own length: a text is what it is alone, in transformers and beside others.

    A model of transformers remembers the longest text so far: each gets a new one.
    """
    family = FAMILIES["NomicBert"]
    table = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    model = make(transformers, family, "Model", rope_parameters=table, max_position_embeddings=32)
    model.save_pretrained(tmp_path)
    loaded = checkpoint.load(tmp_path)
    assert loaded.config.dynamic_stretch == 2 and loaded.config.trained_positions == 32
    own = NOMIC | {"rotary_scaling_factor": 2.0, "max_trained_positions": 32, "n_inner": 24}
    read = names.understand(own | {"intermediate_size": 24, "num_hidden_layers": 3})
    assert (read.dynamic_stretch, read.trained_positions) == (2, 32)
    entries = sequences()
    packed = Packed.build(entries)
    with torch.inference_mode():
        together = packed.split(loaded.model(packed, "hidden")[0])
        for item, result in zip(entries, together, strict=True):
            assert_close(result, alone(model, item), atol=1e-5, rtol=1e-5)
        model.config.rope_parameters["factor"] = 3.0  # the control
        assert not torch.allclose(together[4], alone(model, entries[4]), atol=1e-3)


def alone(model: Any, item: SyntheticSequence) -> torch.Tensor:
    again = type(model)(model.config).eval()
    again.load_state_dict(model.state_dict())
    return again(input_ids=torch.from_numpy(item.ids)[None]).last_hidden_state[0]


GTE = {  # as files of the hub have them
    "architectures": ["NewModel"],
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "intermediate_size": 24,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "model_type": "new",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "type_vocab_size": 1,
    "unpad_inputs": True,
    "use_memory_efficient_attention": True,
    "vocab_size": 50,
}


def test_the_keys_of_gtes_own_code(transformers: ModuleType, tmp_path: Path) -> None:
    """Without stretched angles they mean what transformers' keys mean."""
    family = FAMILIES["Gte"]
    model = make(transformers, family, "Model")
    model.save_pretrained(tmp_path)
    raw = GTE | {"rope_scaling": None, "rope_theta": 160_000}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"new.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    same(model, checkpoint.load(tmp_path).model, family)
    assert names.understand(GTE | {"type_vocab_size": 0}).type_vocab_size == 0
    assert names.understand(GTE).max_positions == 8192
    refused = {
        "logn_attention_scale": True,
        "layer_norm_type": "rms_norm",
        "position_embedding_type": "absolute",
        "rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6},
    }
    for key, value in refused.items():
        with pytest.raises(CheckpointError, match=r"(is|are) not supported"):
            names.understand(GTE | {key: value})


def test_gtes_stretched_angles_are_those_of_its_authors(tmp_path: Path) -> None:
    """Against the public code itself, run where it lies."""
    folder = os.environ.get("PACKHORSE_TEST_GTE")
    if not folder:
        pytest.skip("PACKHORSE_TEST_GTE names no folder with GTE's configuration.py, modeling.py")
    code = outside(Path(folder), "modeling")
    plain = {"unpad_inputs": False, "use_memory_efficient_attention": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that code was written for an older transformers
        config = sys.modules["outside_code.configuration"].NewConfig(**GTE | plain)
        config._attn_implementation, config.pad_token_id = "eager", None
        torch.manual_seed(3)
        model = code.NewModel(config).eval()
    # Of transformers' base class until release 5.
    model.get_extended_attention_mask = lambda mask, shape: (1.0 - mask[:, None, None]) * -1e9
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(GTE))
    same(model, checkpoint.load(tmp_path).model, FAMILIES["Gte"], kernels=tuple(KERNELS))
    for factor in (1.0, 7.0):  # the control
        raw = GTE | {"rope_scaling": {"type": "ntk", "factor": factor}}
        with pytest.raises(AssertionError):
            same(model, checkpoint.load(tmp_path, config=raw).model, FAMILIES["Gte"])


def outside(folder: Path, module: str) -> ModuleType:
    """A module of someone's code, which imports its neighbors, from the folder it lies in."""
    package = ModuleType("outside_code")
    package.__path__ = [str(folder)]
    sys.modules["outside_code"] = package
    return importlib.import_module(f"outside_code.{module}")


# ---- families without a class in transformers: references in float64 ----

JINA = {  # as files of the hub have them
    "_name_or_path": "jinaai/jina-bert-implementation",
    "architectures": ["JinaBertForMaskedLM"],
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "hidden_act": "gelu",
    "hidden_size": 48,
    "intermediate_size": 24,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "model_type": "bert",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "position_embedding_type": "alibi",
    "type_vocab_size": 2,
    "vocab_size": 50,
}


def save_random(raw: Raw, folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of random weights in float64 for a configuration; its tensors by name."""
    config = names.understand(raw)
    family = names.canonical(raw, {}).family
    table = names.table(family)
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in Bert(config, attention.kernel("reference")).state_dict().items():
        parts = names.sources(f"bert.{name}", table)
        for part in parts:
            size = (len(tensor) // len(parts), *tensor.shape[1:])
            tensors[part] = torch.randn(size, generator=generator, dtype=torch.float64) * 0.2
            if tensor.ndim == 1 and part.endswith("weight"):
                tensors[part] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


def jina_states(
    tensors: dict[str, torch.Tensor], item: SyntheticSequence, raw: Raw = JINA
) -> torch.Tensor:
    """The last hidden states of one text, step by step as the paper of Jina's models says it."""

    def part(name: str) -> torch.Tensor:
        return tensors[f"bert.{name}"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = tensors.get(f"bert.{name}.bias")
        y = x @ part(f"{name}.weight").T
        return y if bias is None else y + bias

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        y = (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, unbiased=False, keepdim=True) + 1e-12
        ).sqrt()
        return y * part(f"{name}.weight") + part(f"{name}.bias")

    heads, width = raw["num_attention_heads"], raw["hidden_size"] // raw["num_attention_heads"]
    x = part("embeddings.word_embeddings.weight")[torch.from_numpy(item.ids)]
    x = x + part("embeddings.token_type_embeddings.weight")[torch.from_numpy(item.types)]
    x = norm(x, "embeddings.LayerNorm")
    slopes = [2.0 ** (-8 * (n + 1) / 4) for n in range(4)] + [2.0**-1, 2.0**-3]  # of six heads
    distance = (torch.arange(len(x))[:, None] - torch.arange(len(x))).abs()
    for number in range(raw["num_hidden_layers"]):
        layer = f"encoder.layer.{number}."
        mixed = []
        for head, slope in enumerate(slopes[:heads]):
            columns = slice(head * width, (head + 1) * width)
            q, k, v = (
                linear(x, f"{layer}attention.self.{kind}")[:, columns]
                for kind in ("query", "key", "value")
            )
            scores = q @ k.T / width**0.5 - slope * distance
            mixed.append(scores.softmax(-1) @ v)
        attended = linear(torch.cat(mixed, -1), f"{layer}attention.output.dense")
        x = norm(x + attended, f"{layer}attention.output.LayerNorm")
        gated, others = linear(x, f"{layer}mlp.gated_layers").chunk(2, -1)
        result = linear(torch.nn.functional.gelu(gated) * others, f"{layer}mlp.wo")
        x = norm(x + result, f"{layer}mlp.layernorm")
    return x


@torch.inference_mode()
def test_jinas_slopes_reach_any_distance(tmp_path: Path) -> None:
    """In fp32 and float64, for texts far longer than a learned bias knows, alone and together."""
    tensors = save_random(JINA, tmp_path)
    entries = sequences(2, (5, 400, 1, 150))
    expected = torch.cat([jina_states(tensors, item) for item in entries])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        loaded = checkpoint.load(tmp_path, dtype=dtype)
        assert "mlm" not in loaded.model.heads and loaded.max_length == 8192
        for kernel in KERNELS:
            if attention.kernel(kernel).serves.refusal(CPU, dtype):
                continue
            loaded.model.bert.use(attention.kernel(kernel))
            states = loaded.model(Packed.build(entries), "hidden")[0]
            assert_close(states, expected.to(dtype), atol=tolerance, rtol=tolerance)
    flat = [SyntheticSequence(item.ids, item.types * 0) for item in entries]  # the control
    assert not torch.allclose(loaded.model(Packed.build(flat), "hidden")[0], expected, atol=1e-3)


def test_what_jinas_code_says(tmp_path: Path) -> None:
    assert names.understand(JINA | {"feed_forward_type": "reglu"}).activation == "relu"
    assert names.understand(JINA).alibi and not names.understand(JINA).classic
    save_random(JINA, tmp_path)
    write_tokenizer(tmp_path)
    checkpoint.write(tmp_path / "again", checkpoint.load(tmp_path))
    loaded = checkpoint.load(tmp_path / "again")
    assert loaded.config == names.understand(JINA)
    assert loaded.raw["model_type"] == "bert"
    vectors = packhorse.load(tmp_path, device="cpu").embed(["horse", "pack a horse"])
    for options in WAYS:
        others = packhorse.load(tmp_path, device="cpu", **options).embed(["horse", "pack a horse"])
        assert np.abs(others - vectors).max() < 0.1 * np.abs(vectors).max()
    for change in (
        {"feed_forward_type": "original"},
        {
            "auto_map": {
                "AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"
            }
        },
        {"architectures": ["BertModel"]},
    ):
        with pytest.raises(CheckpointError, match=r"is not supported|does not run here"):
            names.understand(JINA | change)


NEOBERT = {  # as files of the hub have them
    "architectures": ["NeoBERTLMHead"],
    "hidden_act": "SwiGLU",
    "hidden_size": 32,
    "intermediate_size": 36,
    "max_length": 4096,
    "model_type": "neobert",
    "norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 50,
}


@torch.inference_mode()
def test_neoberts_pairs_and_heads_are_those_of_its_authors(tmp_path: Path) -> None:
    """Against the public code itself, run where it lies; each text alone, and ours together."""
    folder = os.environ.get("PACKHORSE_TEST_NEOBERT")
    if not folder:
        pytest.skip("PACKHORSE_TEST_NEOBERT names no folder with NeoBERT's model.py, rotary.py")
    add_xformers()
    code = outside(Path(folder), "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that code was written for an older transformers
        config = code.NeoBERTConfig(**NEOBERT, flash_attention=False)
        torch.manual_seed(3)
        model = code.NeoBERTLMHead(config).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(NEOBERT))
    loaded = checkpoint.load(tmp_path).model
    entries = sequences()
    states: list[torch.Tensor] = []
    for kernel in KERNELS:
        if attention.kernel(kernel).serves.refusal(CPU, torch.float32):
            continue
        loaded.bert.use(attention.kernel(kernel))
        packed = Packed.build(entries)
        states, scores = (list(packed.split(x)) for x in loaded(packed, "hidden", "mlm"))
        for number, item in enumerate(entries):
            result = model(torch.from_numpy(item.ids)[None])
            assert_close(states[number], result["hidden_representation"][0], atol=1e-5, rtol=1e-5)
            assert_close(scores[number], result["logits"][0], atol=1e-5, rtol=1e-5)
    loaded.bert.get_submodule("layers.0.attention").__dict__["by_head"] = False  # the control
    wrong = loaded(Packed.build(entries), "hidden")[0]
    assert not torch.allclose(wrong, torch.cat(states), atol=1e-3)


def add_xformers() -> None:
    """What NeoBERT's code imports of xformers, where that is not installed."""
    if importlib.util.find_spec("xformers"):
        return

    class SwiGLU(torch.nn.Module):
        def __init__(self, inputs: int, between: int, outputs: int, bias: bool) -> None:
            super().__init__()
            self.w12 = torch.nn.Linear(inputs, 2 * between, bias)
            self.w3 = torch.nn.Linear(between, outputs, bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates, values = self.w12(x).chunk(2, -1)
            return self.w3(torch.nn.functional.silu(gates) * values)

    ops = ModuleType("xformers.ops")
    ops.SwiGLU = SwiGLU  # pyright: ignore[reportAttributeAccessIssue]
    ops.memory_efficient_attention = None  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {"xformers": ModuleType("xformers"), "xformers.ops": ops}


def test_what_neoberts_code_says(tmp_path: Path) -> None:
    config = names.understand(NEOBERT)
    assert config.intermediate_size == 24 and config.max_positions == 4096
    assert not config.classic and config.qkv_by_head and config.rotary_interleaved
    save_random(NEOBERT | {"architectures": ["NeoBERT"]}, tmp_path)
    write_tokenizer(tmp_path)
    loaded = checkpoint.load(tmp_path)
    checkpoint.write(tmp_path / "again", loaded)
    again = checkpoint.load(tmp_path / "again")
    assert again.config == loaded.config
    states = [model.model(Packed.build(sequences()), "hidden")[0] for model in (loaded, again)]
    assert torch.equal(*states)
    vectors = packhorse.load(tmp_path, device="cpu").embed(["horse", "pack a horse"])
    for options in WAYS:
        others = packhorse.load(tmp_path, device="cpu", **options).embed(["horse", "pack a horse"])
        assert np.abs(others - vectors).max() < 0.1 * np.abs(vectors).max()
    for change in ({"hidden_act": "gelu"}, {"rms_norm": False}, {"rope": False}, {"ngpt": True}):
        with pytest.raises(CheckpointError, match="is not supported"):
            names.understand(NEOBERT | change)


ADAPTED = ("embeddings.word_embeddings", "encoder.layers.1.mixer.Wqkv", "pooler.dense")


def add_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Give some weights of a model two adapters, as Jina's code stores them; the second, merged."""
    tensors = load_file(folder / "model.safetensors")
    tensors["pooler.dense.weight"] = torch.randn(32, 32)
    tensors["pooler.dense.bias"] = torch.randn(32)
    merged = dict(tensors)
    for name in ADAPTED:
        weight = tensors.pop(f"{name}.weight")
        rows, columns = weight.shape
        inner = {"A": (2, 4, columns), "B": (2, rows, 4)}
        if "embeddings" in name:
            inner = {"A": (2, rows, 4), "B": (2, 4, columns)}
        parts = {kind: torch.randn(size) * 0.3 for kind, size in inner.items()}
        stem = f"{name}.parametrizations.weight."
        tensors[f"{stem}original"] = weight
        tensors |= {f"{stem}0.lora_{kind}": part for kind, part in parts.items()}
        first, second = ("A", "B") if "embeddings" in name else ("B", "A")
        merged[f"{name}.weight"] = weight + 2 / 4 * (parts[first][1] @ parts[second][1])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return merged


def test_jinas_adapters_are_chosen_by_name(transformers: ModuleType, tmp_path: Path) -> None:
    """One is as if its products had been added to the weights of transformers' model."""
    family = FAMILIES["JinaEmbeddingsV3"]
    model = make(transformers, family, "Model", rope_parameters=ROPE)
    model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "adapted")
    merged = add_adapters(tmp_path / "adapted")
    hub = {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "position_embedding_type": "rotary",
        "rotary_emb_base": 9000.0,
        "lora_adaptations": ["retrieval.query", "text-matching"],
        "lora_alpha": 2,
        "lora_rank": 4,
    }
    edit(tmp_path / "adapted", "rope_parameters", **hub)
    plain = checkpoint.load(tmp_path / "adapted")
    assert "no adapter of retrieval.query, text-matching" in plain.notes[0]
    same(model, plain.model, family)
    save_file(merged, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    other = transformers.JinaEmbeddingsV3Model.from_pretrained(tmp_path / "plain").eval()
    loaded = checkpoint.load(tmp_path / "adapted", adapter="text-matching")
    same(other, loaded.model, family)
    with pytest.raises(AssertionError):  # the control
        same(other, checkpoint.load(tmp_path / "adapted", adapter="retrieval.query").model, family)
    checkpoint.write(tmp_path / "merged", loaded)
    again = checkpoint.load(tmp_path / "merged")
    same(other, again.model, family)
    assert not any("lora" in key for key in again.raw)
    with pytest.raises(InputError, match=r"it has retrieval\.query, text-m"):
        checkpoint.load(tmp_path / "adapted", adapter="classification")
    with pytest.raises(CheckpointError, match="classification"):  # no folder of an adapter
        checkpoint.load(tmp_path / "plain", adapter="classification")
    edit(tmp_path / "adapted", lora_adaptations=["one"])
    with pytest.raises(CheckpointError, match="not those of 1 tasks"):
        checkpoint.load(tmp_path / "adapted", adapter="one")
    edit(tmp_path / "adapted", lora_adaptations="one")
    with pytest.raises(CheckpointError, match="does not name the adapters"):
        checkpoint.load(tmp_path / "adapted")


ROPE = {"rope_type": "default", "rope_theta": 9000.0}


def test_a_folder_with_jinas_own_module(transformers: ModuleType, tmp_path: Path) -> None:
    """Its first module is code of the repository: read by its name, never imported."""
    model = make(transformers, FAMILIES["JinaEmbeddingsV3"], "Model")
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    kinds = {"": "custom_st.Transformer", "1_Pooling": "sentence_transformers.models.Pooling"}
    listed = [{"idx": 0, "name": "0", "path": path, "type": kind} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "custom_st.py").write_text("raise SystemExit('never run')")
    encoder = packhorse.load(tmp_path, device="cpu")
    plain = packhorse.load(model_alone(tmp_path), device="cpu")
    assert np.array_equal(encoder.embed(["horse"]), plain.embed(["horse"]))


def model_alone(folder: Path) -> Path:
    (folder / "modules.json").unlink()
    return folder


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
def test_a_decoder_leaves_its_scores_of_words_out(
    name: str, transformers: ModuleType, tmp_path: Path
) -> None:
    """Embedding models are often saved as what they were made of; `model.` may be left off too."""
    family = FAMILIES["Qwen3" if name == "Qwen3" else "Gemma3Text"]
    settings = {"tie_word_embeddings": False, "num_labels": 2}
    config = getattr(transformers, f"{family.name}Config")(
        **make(transformers, family, "Model").config.to_dict() | settings
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    loaded = checkpoint.load(tmp_path)
    same(model.model, loaded.model, family)
    assert list(loaded.model.heads) == ["embed"] and "lm_head.weight" in loaded.notes[-1]
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    same(model.model, checkpoint.load(tmp_path).model, family)


DECODER_REFUSALS: dict[str, dict[str, tuple[Any, str]]] = {
    "Qwen3": {
        "rope_scaling": ({"rope_type": "yarn", "factor": 4.0}, "rotary positions of .*factor"),
        "num_key_value_heads": (3, "3 heads of keys and values do not divide 4"),
        "hidden_act": ("mish", "'mish' is unknown"),
        "architectures": (["Qwen3ForQuestionAnswering"], "does not run here"),
    },
    "Gemma3Text": {
        "query_pre_attn_scalar": (32, "query_pre_attn_scalar 32 is not supported"),
        "attn_logit_softcapping": (50.0, "attn_logit_softcapping 50.0 is not supported"),
        "rope_parameters": (
            {"full_attention": {"rope_type": "linear", "factor": 8.0}},
            "rotary positions of .*linear",
        ),
    },
    "EuroBert": {"classifier_pooling": ("max", "classifier pooling 'max' is unknown")},
}


@pytest.mark.parametrize("name", DECODER_REFUSALS)
def test_what_would_change_a_decoders_numbers_is_refused(
    name: str, transformers: ModuleType, tmp_path: Path
) -> None:
    make(transformers, FAMILIES[name], "Model").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key, (value, message) in DECODER_REFUSALS[name].items():
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path, config=raw | {key: value})
    with pytest.raises(InputError, match="models cannot be written as 'onnx'"):
        checkpoint.write(tmp_path / "onnx", checkpoint.load(tmp_path), to="onnx")


# ---- whole folders ----

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefghijklmnopqrstuvwxyz", "horse", "pack"]


def write_tokenizer(folder: Path) -> None:
    """One that ends a text with a word of its own, as decoders' tokenizers do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    built = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    special = dict(cls_token="<s>", sep_token="</s>", pad_token="<pad>", mask_token="<mask>")
    PreTrainedTokenizerFast(
        tokenizer_object=built, unk_token="<unk>", model_max_length=128, **special
    ).save_pretrained(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_runs_in_every_way(name: str, transformers: ModuleType, tmp_path: Path) -> None:
    """Prepared for the processor, in bf16, with bits that do not depend on neighbors."""
    make(transformers, FAMILIES[name], "Model").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    texts = ["horse", "pack a horse " * 12, "b c d", "z " * 60]
    loaded = checkpoint.load(tmp_path)
    encoder = packhorse.load(tmp_path, device="cpu")
    expected = []
    for text in texts:
        packed = Packed.build(checkpoint.tokenizer(loaded).encode([text]))
        with torch.inference_mode():
            expected.append(loaded.model(packed, "hidden")[0].mean(0).numpy())
    np.testing.assert_allclose(encoder.embed(texts), expected, atol=1e-5)
    half = packhorse.load(tmp_path, device="cpu", dtype="bf16").embed(texts)
    assert np.abs(half - expected).max() < 0.1 * np.abs(expected).max()
    fixed = packhorse.load(tmp_path, device="cpu", invariant=True, budget=256)
    together = fixed.embed(texts)
    np.testing.assert_allclose(together, expected, atol=1e-5)
    for text, vector in zip(texts, together, strict=True):
        assert np.array_equal(fixed.embed([text])[0], vector)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_compiles(name: str, transformers: ModuleType, tmp_path: Path) -> None:
    make(transformers, FAMILIES[name], "Model").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    texts = ["horse", "pack a horse " * 12, "b c d", "z " * 60]
    expected = packhorse.load(tmp_path, device="cpu").embed(texts)
    compiled = packhorse.load(tmp_path, device="cpu", graphs=True).embed(texts)
    np.testing.assert_allclose(compiled, expected, atol=2e-5)


def write_decoder_tokenizer(folder: Path) -> None:
    """Bytes in pairs, as Qwen3's: no word begins a text, and the padding word ends it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<|endoftext|>", *letters, "or", "se"])}
    built = Tokenizer(models.BPE(words, [("o", "r"), ("s", "e")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>",
        pair="$A $B:1 <|endoftext|>:1",
        special_tokens=[("<|endoftext|>", 0)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=built,
        model_max_length=64,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        padding_side="left",
    ).save_pretrained(folder)


TEXTS = ["horse", "pack a horse " * 9, "b c d", "", "zebra, äöü and more"]
# As the folders on the hub have them: pooling, prompts and what comes after.
FOLDERS: dict[str, tuple[str, dict[str, str]]] = {
    "Qwen3": ("lasttoken", {"query": "Instruct: search\nQuery:", "document": ""}),
    "Gemma3Text": ("mean", {"query": "task: search result | query: ", "STS": "task: sts | "}),
    "EuroBert": ("mean", {}),
    "NomicBert": ("mean", {"query": "search_query: ", "document": "search_document: "}),
    "Gte": ("cls", {}),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("Qwen3", "Gemma3Text") else pytest.param(name, marks=SLOW)
        for name in FOLDERS
    ],
)
def test_vectors_are_those_of_sentence_transformers(
    name: str, transformers: ModuleType, tmp_path: Path
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    pooling, prompts = FOLDERS[name]
    home = tmp_path / "transformer"
    model = make(transformers, FAMILIES[name], "Model", vocab_size=260, pad_token_id=0)
    model.save_pretrained(home)
    write_decoder_tokenizer(home)
    torch.manual_seed(4)
    parts = [modules.Transformer(str(home)), modules.Pooling(32, pooling_mode=pooling)]
    if name == "Gemma3Text":
        linear = {"bias": False, "activation_function": torch.nn.Identity()}
        parts += [modules.Dense(32, 48, **linear), modules.Dense(48, 32, **linear)]
    parts.append(modules.Normalize())
    theirs = sentence_transformers.SentenceTransformer(
        modules=parts,
        prompts=prompts,
        device="cpu",
        truncate_dim=16 if name == "NomicBert" else None,
    )
    theirs.save(str(tmp_path / "saved"), create_model_card=False)
    ours = packhorse.load(tmp_path / "saved", device="cpu")
    plain = theirs.encode(TEXTS, prompt="", show_progress_bar=False)
    assert np.abs(ours.encode(TEXTS, prompt="") - plain).max() < 2e-6
    for prompt in prompts:
        expected = theirs.encode(TEXTS, prompt_name=prompt, show_progress_bar=False)
        assert np.abs(ours.encode(TEXTS, prompt_name=prompt) - expected).max() < 2e-6
    if prompts:  # the control
        assert np.abs(ours.encode(TEXTS, prompt_name="query") - plain).max() > 1e-3


def test_a_configuration_needs_nothing_but_its_fields() -> None:
    """A field that is off its default is what `BertConfig.classic` is about."""
    assert BertConfig(50, 32, 1, 4, 24).classic
    assert not names.understand(NOMIC).classic
