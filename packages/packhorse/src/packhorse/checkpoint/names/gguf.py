"""Translate llama.cpp's names, those of GGUF files, to canonical names and back.

Its converter renames the tensors of all families in one way, drops poolers and pretraining heads,
and cuts RoBERTa's table of positions to those that are used. So an architecture `bert` is a BERT
whatever it was made of, except for DistilBERT, which has no token types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from packhorse.checkpoint.names.families import FAMILIES, Family, family_of, sources, table
from packhorse.errors import CheckpointError

ARCHITECTURES = {"bert": "bert", "nomic-bert": "nomic_bert"}  # and the family of each
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
    "ffn_gate": ("bert.layers.{}.up.dense", 0),
    "ffn_up": ("bert.layers.{}.up.dense", 1),
    "ffn_down": ("bert.layers.{}.down", None),
    "layer_output_norm": ("bert.layers.{}.norm", None),
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
    if metadata.get(f"{architecture}.attention.causal", False) is not False:
        raise CheckpointError("its attention is causal: a language model, no encoder")
    types = "token_types.weight" in tensors
    is_distilbert = architecture == "bert" and not types
    model_type = "distilbert" if is_distilbert else ARCHITECTURES[architecture]
    keys = FAMILIES[model_type].config
    raw: dict[str, Any] = {"model_type": model_type}
    for field, key in SIZES.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is None:
            raise CheckpointError(f"the key {architecture}.{key} is missing")
        if field in keys:  # numbers are float32: 1e-12 shall not become 9.99999996e-13
            raw[keys[field]] = float(f"{value:.7g}") if isinstance(value, float) else value
    words = tensors.get("token_embd.weight")
    raw[keys["vocab_size"]] = words.shape[0] if words is not None else 0
    if types:
        raw["type_vocab_size"] = tensors["token_types.weight"].shape[0]
    if "position_embd.weight" in tensors:
        raw[keys["max_positions"]] = tensors["position_embd.weight"].shape[0]
    if architecture == "nomic-bert":
        base = metadata.get("nomic-bert.rope.freq_base", 10_000.0)
        raw |= {"rope_parameters": {"rope_type": "default", "rope_theta": base}}
    return raw


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
