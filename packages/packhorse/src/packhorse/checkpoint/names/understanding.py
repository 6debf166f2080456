"""What a configuration alone tells of a model, before a tensor is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packhorse.checkpoint.names.families import ACTIVATION_KEYS, ACTIVATIONS, Family, family_of
from packhorse.errors import CheckpointError
from packhorse.model.config import BertConfig


def understand(raw: Mapping[str, Any]) -> BertConfig:
    """All that a configuration alone can tell; refuses a model that does not run here."""
    family = family_of(raw)
    architectures(raw, family)
    keys = family.config
    said = {ours: raw[key] for ours, key in keys.items() if key in raw}
    for ours in ("vocab_size", "hidden_size", "layers", "heads", "intermediate_size"):
        if ours not in said:
            raise CheckpointError(f"config: {keys[ours]} is missing")
    for ours in ("norm_eps", "dropout"):
        if ours in said and type(said[ours]) not in (int, float):
            raise CheckpointError(f"config: {keys[ours]} {said[ours]!r} is not a number")
    values = {"activation": "gelu", **family.defaults, **said, **family.axes(raw)}
    for ours in ACTIVATION_KEYS & keys.keys() & values.keys():
        values[ours] = _activation(keys[ours], values[ours])
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
    """Of the table's rows those up to the padding word's id are never a position."""
    pad = raw.get("pad_token_id", 1) if family.padding is None else family.padding
    if type(pad) is not int or type(rows) is not int or not 0 <= pad < rows - 1:
        raise CheckpointError(
            f"config: pad_token_id {pad!r} leaves no position of "
            f"max_position_embeddings {rows!r}, which are numbered from there"
        )
    return {"position_offset": pad + 1, "max_positions": rows - pad - 1}


def architectures(raw: Mapping[str, Any], family: Family) -> list[str]:
    """The classes that a configuration names, if all of them run here."""
    known = family.architectures
    said = raw.get("architectures") or []
    classes = said if isinstance(said, list) else [said]
    for name in classes:
        if not isinstance(name, str) or name not in known:
            raise CheckpointError(
                f"config: architecture {name!r} does not run here; "
                f"those that do: {', '.join(known)}"
            )
    return classes
