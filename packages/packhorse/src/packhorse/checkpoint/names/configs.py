"""Foreign configurations: what their keys mean, and what the shapes of tensors say without one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from packhorse.checkpoint.names.families import (
    ACTIVATION_FIELDS,
    ACTIVATIONS,
    BERT,
    PREFIXES,
    PROBLEMS,
    Family,
    family_of,
)
from packhorse.errors import CheckpointError
from packhorse.json_types import is_list
from packhorse.model.config import BertConfig

# Key of the configuration → a tensor's name after any prefix, and the axis of that size.
INFERRED_SIZES = {
    "vocab_size": ("embeddings.word_embeddings.weight", 0),
    "hidden_size": ("embeddings.word_embeddings.weight", 1),
    "intermediate_size": ("encoder.layer.0.intermediate.dense.weight", 0),
    "max_position_embeddings": ("embeddings.position_embeddings.weight", 0),
    "type_vocab_size": ("embeddings.token_type_embeddings.weight", 0),
}
# Classes of other libraries, whose heads `sentence` knows by their files.
OTHERS = ("HF_ColBERT",)
LAYER = re.compile(r"(?:.*\.)?encoder\.layer\.(\d{1,4})\.")
# Modules that no BERT has: another family's prefix, and ELECTRA's projection.
NOT_BERT = PREFIXES - {BERT.prefix} | {"embeddings_project."}


def understand(raw: Mapping[str, Any]) -> BertConfig:
    """Our configuration, from a foreign one; raises if such a model does not run here."""
    family = family_of(raw)
    architectures(raw, family)
    keys = family.config
    raw = {**{key: raw[other] for key, other in family.aliases.items() if other in raw}, **raw}
    configured = {name: raw[key] for name, key in keys.items() if key in raw}
    for name in ("vocab_size", "hidden_size", "layers", "heads", "intermediate_size"):
        if name not in configured:
            raise CheckpointError(f"config: {keys[name]} is missing")
    for name in ("norm_eps", "dropout"):
        if name in configured and type(configured[name]) not in (int, float):
            raise CheckpointError(f"config: {keys[name]} {configured[name]!r} is not a number")
    values: dict[str, Any] = {
        "activation": "gelu",
        **family.defaults,
        **configured,
        **family.settings(raw),
    }
    for name in ACTIVATION_FIELDS & keys.keys() & values.keys():
        values[name] = _activation(keys[name], values[name])
    if family.heads_by_class:
        values["classify_activation"] = values["mlm_activation"]
    if family.after_padding:
        values |= _positions_after_padding(raw, family, values.get("max_positions", 512))
    return BertConfig(**values)


def _activation(key: str, name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(
            f"config: {key} {name!r} is unknown; there are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _positions_after_padding(raw: Mapping[str, Any], family: Family, rows: Any) -> dict[str, int]:
    """RoBERTa's positions: the table's rows up to the padding token's id are never used."""
    pad = raw.get("pad_token_id", 1) if family.padding is None else family.padding
    if type(pad) is not int or type(rows) is not int or not 0 <= pad < rows - 1:
        raise CheckpointError(
            f"config: pad_token_id {pad!r} leaves no position of "
            f"max_position_embeddings {rows!r}, which are numbered from there"
        )
    return {"position_offset": pad + 1, "max_positions": rows - pad - 1}


def architectures(raw: Mapping[str, Any], family: Family) -> list[str]:
    """The classes that a configuration names; raises unless all of them run here."""
    known = family.architectures
    named: Any = raw.get("architectures", [])
    classes = (named if is_list(named) else [named]) if named else []
    classes = [name for name in classes if name not in OTHERS]
    for name in classes:
        if not isinstance(name, str) or name not in known:
            raise CheckpointError(
                f"config: architecture {name!r} does not run here; "
                f"those that do: {', '.join(known)}"
            )
    return classes


def named_labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels that a configuration names; empty if it names none."""
    named: Any = raw.get("id2label")
    try:
        items = named.items() if named else ()
        numbered = sorted((int(number), str(label)) for number, label in items)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError("config: id2label does not map numbers to names") from error
    if [number for number, _ in numbered] != list(range(len(numbered))):
        raise CheckpointError("config: id2label does not number its labels from 0 without a gap")
    return tuple(label for _, label in numbered)


def problem(raw: Mapping[str, Any], labels: Collection[str]) -> str:
    """What a classifier's outputs mean; without `problem_type`, one output means regression."""
    problem_type = raw.get("problem_type")
    if problem_type is None:
        return "regression" if len(labels) == 1 else "single_label"
    if not isinstance(problem_type, str) or problem_type not in PROBLEMS:
        raise CheckpointError(
            f"config: problem_type {problem_type!r} is unknown; there are {', '.join(PROBLEMS)}"
        )
    return PROBLEMS[problem_type]


def infer(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The configuration of a BERT from the shapes of its tensors, without the number of heads.

    Empty if these are not the tensors of a BERT. RoBERTa and ELECTRA have the same shapes but other
    constants: they are recognized by their prefix or, where an encoder without heads leaves the
    prefix off, by having a single token type.
    """
    if any(f".{module}" in f".{name}" for name in tensors for module in NOT_BERT):
        return {}
    numbers = [int(match[1]) for name in tensors if (match := LAYER.match(name))]
    config: dict[str, Any] = {
        "model_type": "bert",
        "num_hidden_layers": max(numbers, default=-1) + 1,
    }
    for key, (ending, axis) in INFERRED_SIZES.items():
        shapes = [t.shape for name, t in tensors.items() if f".{name}".endswith(f".{ending}")]
        if len(shapes) != 1 or len(shapes[0]) != 2:
            return {}
        config[key] = shapes[0][axis]
    return config if numbers and config["type_vocab_size"] != 1 else {}
