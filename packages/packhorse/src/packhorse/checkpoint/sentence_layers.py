"""The modules that sentence-transformers puts behind its pooling, each in a folder of its own.

A folder has a `config.json` and, for dense layers and norms, a file of weights. What would make
other vectors than those computed here is refused by name. The activation of a dense layer is a
dotted name; it is looked up among torch's own and never imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from packhorse.checkpoint import files, hf
from packhorse.errors import CheckpointError
from packhorse.model.vectors import ACTIVATIONS, Dense, UnitLength, VectorNorm

KINDS = ("Dense", "LayerNorm", "Dropout", "Normalize")
WEIGHTED = ("Dense", "LayerNorm")  # those that have a file of weights
INSTEAD = "encode with sentence-transformers itself, or load a model without it"
LARGEST = 65_536  # numbers in a vector
# Where torch keeps its activations, and where it offers them.
TORCH = ("torch.nn.modules.activation", "torch.nn.modules.linear", "torch.nn")
# A module of sentence-transformers may read and write other features; here there is one.
FEATURE = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}
# Our names for what has weights, and those of sentence-transformers.
WEIGHTS = {
    "linear": "linear",
    "residual": "residual",
    "activation": "activation_function",
    "norm": "norm",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A module behind the pooling: what it is, its folder and what its config.json says."""

    kind: str
    folder: str
    inputs: int = 0  # 0: any
    outputs: int = 0
    bias: bool = True
    activation: str = "Identity"
    residual: bool = False
    dropout: float = 0.0

    def make(self) -> nn.Module:
        """The layer, without its weights."""
        if self.kind == "Dense":
            return Dense(self.inputs, self.outputs, self.bias, self.activation, self.residual)
        if self.kind == "LayerNorm":
            return VectorNorm(self.inputs)
        return nn.Dropout(self.dropout) if self.kind == "Dropout" else UnitLength()


def read(folder: Path, kind: str, path: str) -> Layer:
    """What the config.json of a module behind the pooling says."""
    home = files.inside(folder, path)
    raw = files.read_object(home, "config.json", optional=kind == "Normalize")
    if kind == "Dense":
        return _read_dense(home, path, raw)
    if kind == "Dropout":
        rate = raw.get("dropout", 0.2)
        if type(rate) not in (int, float) or not 0 <= rate <= 1:
            raise CheckpointError(f"{home}: dropout {rate!r} is no rate from 0 to 1")
        return Layer(kind, path, dropout=float(rate))
    if kind == "LayerNorm":
        width = _size(home, "dimension", raw.get("dimension"))
        return Layer(kind, path, inputs=width, outputs=width)
    insist(home, raw, FEATURE)
    return Layer(kind, path)


def _read_dense(home: Path, path: str, raw: Mapping[str, Any]) -> Layer:
    insist(home, raw, FEATURE)
    outputs = _size(home, "out_features", raw.get("out_features"))
    activation = _activation(home, raw.get("activation_function", f"{TORCH[0]}.Tanh"))
    residual = raw.get("use_residual", False) is True
    if activation == "GLU" and (residual or outputs % 2):
        raise CheckpointError(
            f"{home}: GLU halves its {outputs} numbers, which does not go with use_residual or an "
            "odd out_features"
        )
    return Layer(
        "Dense",
        path,
        inputs=_size(home, "in_features", raw.get("in_features")),
        outputs=outputs,
        bias=raw.get("bias", True) is not False,
        activation=activation,
        residual=residual,
    )


def _activation(home: Path, name: Any) -> str:
    """The class of torch that a dotted name stands for."""
    package, _, kind = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if package not in TORCH or kind not in ACTIVATIONS:
        raise CheckpointError(
            f"{home}: activation {name!r} does not run here; of torch's own there are "
            f"{', '.join(ACTIVATIONS)} (as {TORCH[0]}.Tanh)"
        )
    return kind


def _size(home: Path, key: str, value: Any) -> int:
    if type(value) is not int or not 0 < value <= LARGEST:
        raise CheckpointError(f"{home}: {key} is {value!r}, not a count from 1 to {LARGEST}")
    return value


def insist(home: Path, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a setting that says other than the only value that runs here."""
    for key, good in defaults.items():
        if (value := raw.get(key)) not in (None, good):
            raise CheckpointError(f"{home}: {key} {value!r} does not run here; {INSTEAD}")


def kind_of(layer: nn.Module) -> str:
    kinds = {Dense: "Dense", VectorNorm: "LayerNorm", nn.Dropout: "Dropout"}
    return kinds.get(type(layer), "Normalize")


def write(folder: Path, layer: nn.Module) -> None:
    settings: dict[str, Any] = {}
    if isinstance(layer, Dense):
        package = TORCH[1] if layer.activation_name == "Identity" else TORCH[0]
        settings = {
            "in_features": layer.inputs,
            "out_features": layer.outputs,
            "bias": layer.linear.bias is not None,
            "activation_function": f"{package}.{layer.activation_name}",
        }
        if layer.adds_input:
            settings["use_residual"] = True
    elif isinstance(layer, VectorNorm):
        settings = {"dimension": layer.norm.normalized_shape[0]}
    elif isinstance(layer, nn.Dropout):
        settings = {"dropout": layer.p}
    files.write_json(folder, "config.json", settings)
    state = {_theirs(name): tensor for name, tensor in layer.state_dict().items()}
    if state:
        hf.write_tensors(folder / hf.WEIGHTS, state)


def _theirs(name: str) -> str:
    part, _, rest = name.partition(".")
    return f"{WEIGHTS[part]}.{rest}"
