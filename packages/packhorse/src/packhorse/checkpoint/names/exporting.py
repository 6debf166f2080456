"""The way back: from our names to a family's own, for a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from packhorse.checkpoint.names.families import (
    ACTIVATION_KEYS,
    ACTIVATIONS,
    FAMILIES,
    PROBLEMS,
    Family,
    encoder_modules,
    family_of,
    source,
    sources,
    table,
)
from packhorse.model.config import BertConfig

# Not written back: of the file that was read, or a path to code.
FORGOTTEN = ("_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version")


def export(
    raw: Mapping[str, Any], config: BertConfig, state: Mapping[str, Tensor], heads: Collection[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A foreign configuration, on top of the one once read, and foreign tensors."""
    family = family_of(raw)
    words, scores = state["bert.embed.words.weight"], state.get("heads.mlm.decoder.weight")
    tied = scores is None or scores.data_ptr() == words.data_ptr()
    architecture = next(
        name for name, needed in family.architectures.items() if set(needed) <= set(heads)
    )
    foreign = {key: value for key, value in raw.items() if key not in FORGOTTEN}
    foreign |= _export_config(config, family)
    foreign |= {
        "model_type": next(kind for kind, known in FAMILIES.items() if known is family),
        "architectures": [architecture],
        "tie_word_embeddings": tied,
        "torch_dtype": str(words.dtype).removeprefix("torch."),
    }
    tensors = _export_tensors(state, family, tied)
    if not family.architectures[architecture]:  # an encoder alone has no prefix
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    return foreign, tensors


def export_labels(labels: Collection[str], problem: str) -> dict[str, Any]:
    """The foreign keys of labels and problem."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": _reverse(PROBLEMS)[problem],
    }


def prefixed(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was exported, an encoder alone under its prefix too."""
    family = family_of(raw)
    encoder = encoder_modules(family)
    return {
        family.prefix + name if name.split(".")[0] in encoder else name: tensor
        for name, tensor in tensors.items()
    }


def _export_config(config: BertConfig, family: Family) -> dict[str, Any]:
    foreign = {key: getattr(config, ours) for ours, key in family.config.items()}
    for ours in ACTIVATION_KEYS & family.config.keys():
        foreign[family.config[ours]] = _reverse(ACTIVATIONS)[getattr(config, ours)]
    if family.after_padding:
        foreign[family.config["max_positions"]] += config.position_offset
    if family.after_padding and family.padding is None:
        foreign["pad_token_id"] = config.position_offset - 1
    return foreign


def _export_tensors(state: Mapping[str, Tensor], family: Family, tied: bool) -> dict[str, Tensor]:
    templates, result = table(family, tied), {}
    for ours, tensor in state.items():
        parts = sources(ours, templates)
        result.update(zip(parts, tensor.chunk(len(parts)), strict=True))
    bias = source("heads.mlm.decoder.bias", family)
    if family.second_bias and bias in result:
        # Where the scores are not tied, transformers wants the bias under both names.
        result[family.second_bias] = result.pop(bias) if tied else result[bias].clone()
    return result


def _reverse(mapping: Mapping[str, str]) -> dict[str, str]:
    """Ours → theirs, the first of theirs where there are several."""
    return {ours: theirs for theirs, ours in reversed(list(mapping.items()))}
