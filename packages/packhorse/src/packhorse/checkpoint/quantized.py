"""Weights stored in int8, in the layout of compressed-tensors, which llm-compressor writes and vLLM
reads: `weight` holds integers, `weight_scale` [channels, 1] their step per output channel, and the
configuration names the scheme under `quantization_config`.

A file holds integers and what they stand for is loaded, so that every dtype runs such a model; in
int8 the same integers come out again, if the largest of a channel is 127, as it is in files written
here. Only linear layers of the encoder are written this way. Read are 8-bit integers with a scale
per channel or per tensor and without zero points; another scheme is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from packhorse.errors import CheckpointError
from packhorse.model.int8 import QuantizedWeight, quantize_weight

KEY = "quantization_config"
METHOD = "compressed-tensors"
FORMATS = ("int-quantized", "naive-quantized")  # one value per byte
SCALE = "_scale"  # after the name of a weight
LAYERS = "bert.layers."  # where weights are quantized, under our own names


def is_quantized(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration says that weights are stored in int8 as this module reads them."""
    stored: Any = raw.get(KEY)
    return isinstance(stored, dict) and dict[str, Any](stored).get("quant_method") == METHOD  # pyright: ignore[reportUnknownArgumentType]


def dequantize(raw: Mapping[str, Any], tensors: dict[str, Tensor]) -> set[str]:
    """Replace integers by the numbers they stand for, and return the names of these tensors."""
    if not is_quantized(raw):
        return set()
    dequantized: set[str] = set()
    form = raw[KEY].get("format")
    if form not in FORMATS:
        raise CheckpointError(
            f"{KEY}.format is {form!r}; of {METHOD}, {' and '.join(FORMATS)} are read"
        )
    for name in [name for name in tensors if name.endswith(f".weight{SCALE}")]:
        scale = tensors.pop(name)
        weight = name.removesuffix(SCALE)
        values = tensors.get(weight)
        if values is None or values.dtype != torch.int8 or values.ndim != 2:
            stored = "is missing" if values is None else f"holds {values.dtype}"
            raise CheckpointError(f"{name} is the scale of int8 numbers, but {weight} {stored}")
        if f"{weight}_zero_point" in tensors or f"{weight}_shape" in tensors:
            raise CheckpointError(f"{weight} has zero points or is packed, which is not read")
        if scale.numel() not in (1, len(values)) or not scale.is_floating_point():
            raise CheckpointError(
                f"{name} holds {list(scale.shape)} of {scale.dtype}; a scale per channel of "
                f"{list(values.shape)} is read"
            )
        by_channel = scale.float().reshape(-1).expand(len(values))
        tensors[weight] = QuantizedWeight(values, by_channel).dequantize()
        dequantized.add(weight)
    return dequantized


def kept_layers(sources: Mapping[str, Sequence[str]], dequantized: set[str]) -> tuple[str, ...]:
    """The linear layers below `LAYERS`, under our names, that a file does not hold in int8.

    `sources` are the names in the file of each tensor that could be.
    """
    floats = [name for name, parts in sources.items() if not dequantized.issuperset(parts)]
    return tuple(name.removeprefix(LAYERS).removesuffix(".weight") for name in floats)


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
    others = [name for name, x in tensors.items() if x.ndim == 2 and name not in names]
    eight_bits = {"num_bits": 8, "type": "int"}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {
            **eight_bits,
            "symmetric": False,
            "strategy": "token",
            "dynamic": True,
        },
    }
    scheme = {
        "quant_method": METHOD,
        "format": FORMATS[0],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [name.removesuffix(".weight") for name in others if name.endswith(".weight")],
    }
    return {**raw, KEY: scheme}, result


def quantizable(state: Mapping[str, Tensor], kept: Collection[str] = ()) -> list[str]:
    """The weights of linear layers that can be int8, but those of the layers `kept`."""
    floats = {f"{LAYERS}{name}.weight" for name in kept}
    return [
        name
        for name, tensor in state.items()
        if name.startswith(LAYERS) and name.endswith(".weight") and tensor.ndim == 2
        if name not in floats
    ]
