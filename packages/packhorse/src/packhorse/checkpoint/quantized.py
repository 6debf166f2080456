"""Weights stored in int8 or float8, in the layout of compressed-tensors, which llm-compressor
writes and vLLM reads: `weight` holds rounded numbers, `weight_scale` their step (int8: [channels,
1], one per output channel; float8: [1]), and the configuration names the scheme under
`quantization_config`. float8 has an `input_scale` too, of what the weight is multiplied by.

A file holds rounded numbers and what they stand for is loaded, so that every dtype runs such a
model; in the format of the file the same numbers come out again, if the largest of a channel or
weight is the format's largest, as it is in files written here. Only linear layers of the encoder
are written this way. Read are 8-bit integers and e4m3 with a scale per channel or per tensor and
without zero points; another scheme is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import CheckpointError
from packhorse.model.float8_inference import E4M3, round_weight, to_float8
from packhorse.model.int8 import QuantizedWeight, quantize_weight

KEY = "quantization_config"
METHOD = "compressed-tensors"
FORMATS = {  # one value per byte
    "int-quantized": torch.int8,
    "naive-quantized": torch.int8,
    "float-quantized": E4M3,
}
SCALE = "_scale"  # after the name of a weight
LAYERS = "bert.layers."  # where weights are quantized, under our own names


@dataclass(frozen=True, slots=True)
class RoundedTensors:
    """What a file holds in int8 or float8, by the names in it."""

    dtype: torch.dtype | None = None
    weights: set[str] = field(default_factory=set[str])
    inputs: dict[str, float] = field(default_factory=dict[str, float])  # scales of their inputs


def is_quantized(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration says that weights are rounded as this module reads them."""
    stored: Any = raw.get(KEY)
    return isinstance(stored, dict) and dict[str, Any](stored).get("quant_method") == METHOD  # pyright: ignore[reportUnknownArgumentType]


def dequantize(raw: Mapping[str, Any], tensors: dict[str, Tensor]) -> RoundedTensors:
    """Replace rounded numbers by what they stand for, and return which tensors these are."""
    if not is_quantized(raw):
        return RoundedTensors()
    form = raw[KEY].get("format")
    if form not in FORMATS:
        names = list(FORMATS)
        raise CheckpointError(
            f"{KEY}.format is {form!r}; of {METHOD}, {', '.join(names[:-1])} and {names[-1]} are "
            "read"
        )
    dtype = FORMATS[form]
    result = RoundedTensors(dtype)
    kind = "int8" if dtype == torch.int8 else "float8"
    for name in [name for name in tensors if name.endswith(f".weight{SCALE}")]:
        scale = tensors.pop(name)
        weight = name.removesuffix(SCALE)
        values = tensors.get(weight)
        if values is None or values.dtype != dtype or values.ndim != 2:
            stored = "is missing" if values is None else f"holds {values.dtype}"
            raise CheckpointError(f"{name} is the scale of {kind} numbers, but {weight} {stored}")
        if f"{weight}_zero_point" in tensors or f"{weight}_shape" in tensors:
            raise CheckpointError(f"{weight} has zero points or is packed, which is not read")
        if scale.numel() not in (1, len(values)) or not scale.is_floating_point():
            raise CheckpointError(
                f"{name} holds {list(scale.shape)} of {scale.dtype}; a scale per channel of "
                f"{list(values.shape)} is read"
            )
        by_channel = scale.float().reshape(-1).expand(len(values))
        tensors[weight] = QuantizedWeight(values, by_channel).dequantize()
        result.weights.add(weight)
        of_input = tensors.pop(input_scale(weight), None)
        if of_input is not None:
            result.inputs[weight] = _input_scale(weight, of_input)
    return result


def input_scale(weight: str) -> str:
    """The name of the scale of what a weight is multiplied by."""
    return weight.removesuffix("weight") + "input_scale"


def _input_scale(weight: str, scale: Tensor) -> float:
    is_number = scale.numel() == 1 and scale.is_floating_point()
    if not is_number or not 0 < float(scale) < math.inf:
        value = float(scale) if is_number else f"{list(scale.shape)} of {scale.dtype}"
        raise CheckpointError(
            f"{input_scale(weight)} holds {value}; one finite number above 0 is read"
        )
    return float(scale)


def kept_layers(sources: Mapping[str, Sequence[str]], stored: RoundedTensors) -> tuple[str, ...]:
    """The linear layers below `LAYERS`, under our names, that a file does not hold rounded.

    `sources` are the names in the file of each tensor that could be.
    """
    floats = [name for name, parts in sources.items() if not stored.weights.issuperset(parts)]
    return tuple(_layer(name) for name in floats)


def input_scales(sources: Mapping[str, Sequence[str]], stored: RoundedTensors) -> dict[str, float]:
    """The scales of inputs by linear layer below `LAYERS`; of joined weights the largest."""
    return {
        _layer(name): max(stored.inputs[part] for part in parts)
        for name, parts in sources.items()
        if parts and all(part in stored.inputs for part in parts)
    }


def _layer(name: str) -> str:
    return name.removeprefix(LAYERS).removesuffix(".weight")


def quantize(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], names: set[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Store the weights of these foreign names in int8; the rest stays as it is."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in names:
            result[name] = tensor
            continue
        quantized = quantize_weight(tensor)
        result[name] = quantized.values
        result[name + SCALE] = quantized.scale[:, None]
    inputs = {"symmetric": False, "strategy": "token", "dynamic": True}
    scheme = _scheme("int-quantized", "int", "channel", inputs, _others(tensors, names))
    return {**raw, KEY: scheme}, result


def to_e4m3(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], scales: Mapping[str, tuple[float, float]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Store weights in float8: of each foreign name the scale, and that of its input."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in scales:
            result[name] = tensor
            continue
        scale, of_input = scales[name]
        result[name] = to_float8(tensor, 1 / scale)
        result[name + SCALE] = torch.tensor([scale])
        result[input_scale(name)] = torch.tensor([of_input])
    inputs = {"symmetric": True, "strategy": "tensor", "dynamic": False}
    scheme = _scheme("float-quantized", "float", "tensor", inputs, _others(tensors, set(scales)))
    return {**raw, KEY: scheme}, result


def weight_scales(state: Mapping[str, Tensor], names: Collection[str]) -> dict[str, float]:
    """The float8 scales of these weights, under our own names."""
    return {name: round_weight(state[name]).scale for name in names}


def _others(tensors: Mapping[str, Tensor], names: set[str]) -> list[str]:
    others = [name for name, x in tensors.items() if x.ndim == 2 and name not in names]
    return [name.removesuffix(".weight") for name in others if name.endswith(".weight")]


def _scheme(
    form: str, kind: str, strategy: str, inputs: Mapping[str, Any], ignored: Sequence[str]
) -> dict[str, Any]:
    eight_bits = {"num_bits": 8, "type": kind}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "symmetric": True, "strategy": strategy, "dynamic": False},
        "input_activations": {**eight_bits, **inputs},
    }
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def quantizable(state: Mapping[str, Tensor], kept: Collection[str] = ()) -> list[str]:
    """The weights of linear layers that can be rounded, but those of the layers `kept`."""
    floats = {f"{LAYERS}{name}.weight" for name in kept}
    return [
        name
        for name, tensor in state.items()
        if name.startswith(LAYERS) and name.endswith(".weight") and tensor.ndim == 2
        if name not in floats
    ]
