"""Translate our names into a family's, for a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from packhorse.checkpoint.names.families import (
    ACTIVATION_FIELDS,
    ACTIVATIONS,
    PROBLEMS,
    Family,
    decoder_source,
    encoder_modules,
    family_of,
    sources,
    table,
)
from packhorse.model.config import BertConfig

# Not written back: they describe the file that was read, name a path to code, or are about
# adapters, of which one is part of the weights by now.
DROPPED_KEYS = (
    "_name_or_path",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "lora_adaptations",
    "lora_alpha",
    "lora_rank",
    "lora_dropout_p",
)


def export(
    raw: Mapping[str, Any], config: BertConfig, state: Mapping[str, Tensor], heads: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors under foreign names.

    raw: the configuration that was read; keys of it that are not understood here are kept.
    """
    family = family_of(raw)
    words = state["bert.embed.words.weight"]
    scores = state.get("heads.mlm.decoder.weight")
    tied = scores is None or scores.data_ptr() == words.data_ptr()
    architecture = next(
        name for name, needed in family.architectures.items() if set(needed) <= set(heads)
    )
    foreign = {key: value for key, value in raw.items() if key not in DROPPED_KEYS}
    foreign |= _export_config(config, family)
    foreign |= {
        "model_type": raw.get("model_type") or "bert",
        "architectures": [architecture],
        "tie_word_embeddings": tied,
        "torch_dtype": str(words.dtype).removeprefix("torch."),
    }
    tensors = _export_tensors(state, family, tied)
    if not family.architectures[architecture]:  # an encoder without heads has no prefix
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    return foreign, tensors


def export_labels(labels: Collection[str], problem: str) -> dict[str, Any]:
    """The keys of a configuration for labels and problem type."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": _reverse(PROBLEMS)[problem],
    }


def prefixed(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Exported tensors with the family's prefix, which an encoder without heads leaves off."""
    family = family_of(raw)
    encoder = encoder_modules(family)
    return {
        family.prefix + name if name.split(".")[0] in encoder else name: tensor
        for name, tensor in tensors.items()
    }


def _export_config(config: BertConfig, family: Family) -> dict[str, Any]:
    foreign = {key: getattr(config, name) for name, key in family.config.items()}
    for name in ACTIVATION_FIELDS & family.config.keys():
        foreign[family.config[name]] = _reverse(ACTIVATIONS)[getattr(config, name)]
    foreign |= family.exports(config)
    if family.after_padding:
        foreign[family.config["max_positions"]] += config.position_offset
    if family.after_padding and family.padding is None:
        foreign["pad_token_id"] = config.position_offset - 1
    return foreign


def _export_tensors(state: Mapping[str, Tensor], family: Family, tied: bool) -> dict[str, Tensor]:
    templates = table(family, tied)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = sources(name, templates)
        result.update(zip(parts, tensor.chunk(len(parts)), strict=True))
    bias = decoder_source("bias", family)
    if family.second_bias and bias in result:
        # Where the scores are not tied, transformers expects the bias under both names.
        result[family.second_bias] = result.pop(bias) if tied else result[bias].clone()
    return result


def _reverse(mapping: Mapping[str, str]) -> dict[str, str]:
    """Values to keys; the first key where several have one value."""
    return {value: key for key, value in reversed(list(mapping.items()))}
