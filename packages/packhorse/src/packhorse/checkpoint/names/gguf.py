"""Translate llama.cpp's names, those of GGUF files, to canonical names and back.

Its converter renames the tensors of all families in one way, drops poolers and pretraining heads,
and cuts RoBERTa's table of positions to those that are used. So an architecture `bert` is a BERT
whatever it was made of, except for DistilBERT, which has no token types. The names and keys are
those of `gguf-py/gguf/constants.py` and `tensor_mapping.py` in ggml-org/llama.cpp (commit b21e4de).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from packhorse.checkpoint.names.families import (
    FAMILIES,
    Family,
    family_of,
    modules_of,
    sources,
    table,
)
from packhorse.errors import CheckpointError

ARCHITECTURES = {  # and the family of each
    "bert": "bert",
    "nomic-bert": "nomic_bert",
    "modern-bert": "modernbert",
    "jina-bert-v2": "bert",
    "jina-bert-v3": "jina_embeddings_v3",
    "eurobert": "eurobert",
    "qwen3": "qwen3",
}
RMS = ("eurobert", "qwen3")  # whose norms have the epsilon of another key
CAUSAL = ("qwen3",)
POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "lasttoken"}
# Field of BertConfig → key after the architecture.
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "layers": "block_count",
    "heads": "attention.head_count",
    "max_positions": "context_length",
    "norm_eps": "attention.layer_norm_epsilon",
}
# llama.cpp's module → ours, and which part of it, where ours is several concatenated.
MODULES = {
    "token_embd": ("bert.embed.words", None),
    "token_types": ("bert.embed.types", None),
    "position_embd": ("bert.embed.positions", None),
    "token_embd_norm": ("bert.embed.norm", None),
    "attn_qkv": ("bert.layers.{}.attention.qkv", None),
    "attn_q": ("bert.layers.{}.attention.qkv", 0),
    "attn_k": ("bert.layers.{}.attention.qkv", 1),
    "attn_v": ("bert.layers.{}.attention.qkv", 2),
    "attn_output": ("bert.layers.{}.attention.out", None),
    "attn_output_norm": ("bert.layers.{}.attention_norm", None),
    "attn_norm": ("bert.layers.{}.attention_norm", None),
    "attn_q_norm": ("bert.layers.{}.attention.query_norm", None),
    "attn_k_norm": ("bert.layers.{}.attention.key_norm", None),
    "ffn_norm": ("bert.layers.{}.norm", None),
    "ffn_gate": ("bert.layers.{}.up.dense", 0),
    "ffn_up": ("bert.layers.{}.up.dense", 1),
    "ffn_down": ("bert.layers.{}.down", None),
    "layer_output_norm": ("bert.layers.{}.norm", None),
    "output_norm": ("bert.norm", None),
}
TENSOR = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)")


def config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration under the keys of the family in transformers; tensors: with a `shape`."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"its architecture {architecture!r} is not read; those that are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    content = metadata.get("general.type", "model")
    if not isinstance(content, str) or content != "model":
        raise CheckpointError(
            f"it holds {content!r}, and not a model; merge an adapter in PEFT's layout (--adapter)"
        )
    expects = architecture in CAUSAL
    if metadata.get(f"{architecture}.attention.causal", expects) is not expects:
        raise CheckpointError(
            "its attention is two-way"
            if expects
            else "its attention is causal: a language model, no encoder"
        )
    types = "token_types.weight" in tensors
    is_distilbert = architecture == "bert" and not types
    model_type = "distilbert" if is_distilbert else ARCHITECTURES[architecture]
    keys = FAMILIES[model_type].config
    raw: dict[str, Any] = {"model_type": model_type}
    sizes = SIZES | (
        {"norm_eps": "attention.layer_norm_rms_epsilon"} if architecture in RMS else {}
    )
    for field, key in sizes.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is None:
            raise CheckpointError(f"the key {architecture}.{key} is missing")
        if not isinstance(value, int | float):
            raise CheckpointError(f"the key {architecture}.{key} holds {value!r:.60}, no number")
        if field in keys:  # numbers are float32: 1e-12 shall not become 9.99999996e-13
            raw[keys[field]] = float(f"{value:.7g}") if isinstance(value, float) else value
    words = tensors.get("token_embd.weight")
    raw[keys["vocab_size"]] = words.shape[0] if words is not None else 0
    if types:
        raw["type_vocab_size"] = tensors["token_types.weight"].shape[0]
    if "position_embd.weight" in tensors:
        raw[keys["max_positions"]] = tensors["position_embd.weight"].shape[0]
    return raw | _settings(architecture, metadata)


def _settings(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that only this architecture has; absent ones as in llama.cpp."""

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    scaling = value("rope.scaling.type", "none")
    if not isinstance(scaling, str) or scaling != "none":
        raise CheckpointError(f"its rotary positions are scaled ({scaling}), which is not read")
    base = value("rope.freq_base", 10_000.0)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    if architecture == "modern-bert":
        return {
            "hidden_activation": value("hidden_activation", "gelu"),
            "local_attention": value("attention.sliding_window"),
            "global_attn_every_n_layers": value("attention.sliding_window_pattern", 3),
            "global_rope_theta": base,
            "local_rope_theta": value("rope.freq_base_swa", base),
        }
    if architecture == "jina-bert-v2":
        return {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    if architecture in ("nomic-bert", "jina-bert-v3"):
        return rope
    if architecture in RMS:
        heads = value("attention.head_count")
        width = value("attention.key_length", value("embedding_length", 0) // max(1, heads or 1))
        return rope | {
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "head_dim": width,
        }
    return {}


def pooling(metadata: Mapping[str, Any]) -> str | None:
    """The pooling as sentence-transformers calls it; None if the file does not say."""
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if not isinstance(number, int) or number not in POOLINGS:
        raise CheckpointError(
            f"its pooling is of type {number}, of a reranker, whose head is not read; pass the "
            f"model that it was made of"
        )
    return POOLINGS[number]


def from_gguf(
    tensors: dict[str, Tensor], raw: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by canonical name, and each one's name in the file; `tensors` is emptied."""
    family = family_of(raw)
    if len(modules_of(table(family).get("bert.layers.{}.up.dense", ""))) == 1:
        _join_gates(tensors)
    result: dict[str, Tensor] = {}
    called: dict[str, str] = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        modules = _canonical_names(name, family)
        # Queries, keys and values in one tensor, where the family has three.
        parts = tensor.chunk(len(modules)) if len(modules) > 1 else (tensor,)
        for canonical, part in zip(modules, parts, strict=False):
            if canonical in called:
                raise CheckpointError(f"{name} and {called[canonical]} are two names of one tensor")
            result[canonical] = part
            called[canonical] = name
    return result, called


def _join_gates(tensors: dict[str, Tensor]) -> None:
    """Gates and values as one matrix, as this family has them: its older files have two."""
    for name in [name for name in tensors if ".ffn_gate." in name]:
        values = tensors.get(name.replace("gate", "up"))
        gates = tensors[name]
        if values is not None and values.shape == gates.shape:
            tensors[name.replace("gate", "up")] = torch.cat([tensors.pop(name), values])


def _canonical_names(name: str, family: Family) -> tuple[str, ...]:
    """The canonical names of a tensor; its own if the family has no such module."""
    match = TENSOR.fullmatch(name)
    ours, part = MODULES.get(match[2], ("", None)) if match else ("", None)
    templates = table(family)
    if match is None or ours not in templates:
        return (name,)
    foreign = sources(f"{ours.format(match[1])}.{match[3]}", templates)
    return foreign if part is None or len(foreign) == 1 else (foreign[part],)


def tensor_name(raw: Mapping[str, Any], canonical: str) -> str:
    """The name in a GGUF file of a canonical tensor that it lacks, for messages."""
    family = family_of(raw)
    numbers = [
        number for match in re.finditer(r"\.(\d+)\.", canonical) for number in match.groups()
    ]
    layer = numbers[0] if numbers else ""
    kind = canonical.rpartition(".")[2]
    for module in MODULES:
        name = f"blk.{layer}.{module}.{kind}" if "{}" in MODULES[module][0] else f"{module}.{kind}"
        if canonical in _canonical_names(name, family) and canonical != name:
            return name
    return canonical
