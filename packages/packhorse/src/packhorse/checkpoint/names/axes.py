"""Configurations of newer families: what is not one key and one number, read into our axes.

ModernBERT (Warner et al. 2024) says which layers are local and how its positions turn in two ways:
`global_attn_every_n_layers` and `global_rope_theta`, as its files on the hub do, or `layer_types`
and `rope_parameters`, as transformers 5 writes them; where both are there, the newer counts, as it
does there. Anything that would change a number and is not understood is refused, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packhorse.errors import CheckpointError

LAYER_TYPES = {"full_attention": False, "sliding_attention": True}  # is it local?
THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
OLD_THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
BIASES = {  # ours → theirs, and what it is where nothing is said
    "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "norm_bias": ("norm_bias", False),
    "head_bias": ("classifier_bias", False),
    "decoder_bias": ("decoder_bias", True),
}
# Keys of a rotary table that leave its angles as they are.
ROPE = {"rope_type", "type", "rope_theta"}


def modernbert(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Where a ModernBERT stands on the axes that have no key of their own."""
    local = _local_layers(raw)
    bases = {kind: _base(raw, kind) for kind in LAYER_TYPES}
    return {
        **{ours: _flag(raw, key, usual) for ours, (key, usual) in BIASES.items()},
        "local_layers": local,
        "window": _count(raw, "local_attention", 128, 2_000_000) // 2 if local else 0,
        "rotary_base": bases["full_attention"],
        "local_rotary_base": bases["sliding_attention"],
        "classify_pooling": raw.get("classifier_pooling", "cls"),
    }


def _local_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    layers, kinds = _count(raw, "num_hidden_layers", 0, 1000), raw.get("layer_types")
    if kinds is None:
        every = _count(raw, "global_attn_every_n_layers", 3, 1000)
        return tuple(number for number in range(layers) if number % every)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(f"config: layer_types does not name the kind of {layers} layers")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in LAYER_TYPES:
            raise CheckpointError(
                f"config: layer_types {kind!r} is unknown; there are {', '.join(LAYER_TYPES)}"
            )
    return tuple(number for number, kind in enumerate(kinds) if LAYER_TYPES[kind])


def _base(raw: Mapping[str, Any], kind: str) -> float:
    """Of the angles of one kind of layers; a table that is stretched is refused."""
    tables = raw.get("rope_parameters") or {}
    table = (tables.get(kind) if isinstance(tables, dict) else tables) or {}
    stretched = raw.get("rope_scaling") or not isinstance(table, dict) or set(table) - ROPE
    if stretched or {table.get("rope_type"), table.get("type")} - {None, "default"}:
        said = raw.get("rope_scaling") or table
        raise CheckpointError(f"config: rotary positions of {said!r} are not supported")
    base = table.get("rope_theta", raw.get(OLD_THETAS[kind], THETAS[kind]))
    if type(base) not in (int, float) or not 1 < base < 1e12:
        raise CheckpointError(f"config: {OLD_THETAS[kind]} {base!r} is not in (1, 1e12)")
    return float(base)


def _count(raw: Mapping[str, Any], key: str, usual: int, most: int) -> int:
    value = raw.get(key, usual)
    if type(value) is not int or not 1 <= value <= most:
        raise CheckpointError(f"config: {key} is {value!r}, not a count from 1 to {most}")
    return value


def _flag(raw: Mapping[str, Any], key: str, usual: bool) -> bool:
    value = raw.get(key, usual)
    if type(value) is not bool:
        raise CheckpointError(f"config: {key} {value!r} is neither true nor false")
    return value


def mpnet(raw: Mapping[str, Any]) -> dict[str, Any]:
    """MPNet's distances: its code counts 32 buckets whatever its configuration says."""
    buckets = raw.get("relative_attention_num_buckets", 32)
    if buckets != 32:
        raise CheckpointError(
            f"config: relative_attention_num_buckets {buckets!r} is not supported, only 32"
        )
    return {"distance_buckets": 32}
