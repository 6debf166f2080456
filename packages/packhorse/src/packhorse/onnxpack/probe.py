"""Run a model on two small batches to learn what every axis of every value is.

The batches have different numbers of rows and of tokens: an axis that grows with the rows is the
batch axis, one that grows with the tokens is the token axis, one that stays the same is a width.
That is simpler than inferring shapes through the graph, and works for any exporter and quantizer.
The price is running the model twice, unoptimized, on a few tokens. The values of the first batch
are kept: they show which table is looked up by position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from packhorse.errors import CheckpointError
from packhorse.onnxpack.engine import open_session, runtime_errors
from packhorse.onnxpack.graph import EditableGraph

# Rows and tokens of the two batches. The ratios 3/2, 7/5 and their product all differ, so that the
# growth of an axis shows which of the two it depends on.
SIZES = ((2, 5), (3, 7))
WORD = 5  # the token that fills them: neither padding nor another special token
FILLING = {"ids": WORD, "types": 0, "mask": 1}
# Role → names of the input in exports from transformers, TensorFlow and this package.
ROLES = {
    "ids": ("input_ids", "input_word_ids", "ids"),
    "mask": ("attention_mask", "input_mask", "mask"),
    "types": ("token_type_ids", "segment_ids", "input_type_ids"),
    "positions": ("position_ids",),
}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: does it grow with the rows, with the tokens, and its size per row and token."""

    batch: bool
    token: bool
    size: int


BATCH = Axis(True, False, 1)
TOKEN = Axis(False, True, 1)
Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Observation:
    """The axes of each value of a graph, and its numbers in the first batch."""

    axes: dict[str, Axes]
    values: dict[str, np.ndarray]

    def has_tokens(self, value: str) -> bool:
        """Does a value have a token axis?"""
        return any(axis.token for axis in self.axes.get(value, ()))

    def per_token(self, value: str) -> bool:
        """Is a value [batch, tokens, widths …]?"""
        axes = self.axes.get(value, ())
        return axes[:2] == (BATCH, TOKEN) and not any(a.batch or a.token for a in axes[2:])

    def widths(self, value: str) -> list[int]:
        """The sizes of a value's other axes."""
        return [axis.size for axis in self.axes[value] if not (axis.batch or axis.token)]


def roles(names: Iterable[str]) -> dict[str, str]:
    """Map roles to these inputs, by their names."""
    inputs = {}
    for name in names:
        plain = name.split(":")[0].rpartition("/")[2].lower()
        role = next((role for role, known in ROLES.items() if plain in known), None)
        if role is None or role in inputs:
            expected = ", ".join(known[0] for known in ROLES.values())
            raise CheckpointError(f"input {name!r} is not one that packing knows ({expected})")
        inputs[role] = name
    if "ids" not in inputs:
        raise CheckpointError("the model has no input called input_ids")
    return inputs


def observe(graph: EditableGraph, input_names: Mapping[str, str]) -> Observation:
    """Run both batches; `input_names` maps roles to the inputs' names."""
    session = open_session(_with_all_outputs(graph.model), folder=graph.folder, plain=True)
    names = [output.name for output in session.get_outputs()]
    types = {value.name: value.type for value in session.get_inputs()}
    batches: list[dict[str, np.ndarray]] = []
    for rows, tokens in SIZES:
        feeds = {
            name: _batch(role, rows, tokens).astype(numpy_type(types[name]))
            for role, name in input_names.items()
        }
        problem = f"the model does not run on {rows} rows of {tokens} tokens"
        with runtime_errors(f"{problem} (are its axes dynamic?)"):
            results = zip(names, session.run(names, feeds), strict=True)
        tensors = {name: value for name, value in results if isinstance(value, np.ndarray)}
        batches.append(feeds | tensors)
    first, second = batches
    shapes = {name: (first[name].shape, second[name].shape) for name in first if name in second}
    axes = {name: _axes(*pair) for name, pair in shapes.items() if len(pair[0]) == len(pair[1])}
    return Observation(axes, first)


def _with_all_outputs(model: ModelProto) -> bytes:
    """The model, serialized, with every value as an output."""
    outputs = model.graph.output
    existing = {output.name for output in outputs}
    values = [name for node in model.graph.node for name in node.output]
    names = [name for name in values if name and name not in existing]
    outputs.extend(ValueInfoProto(name=name) for name in names)
    try:
        return model.SerializeToString()
    finally:
        del outputs[len(existing) :]


def _batch(role: str, rows: int, tokens: int) -> np.ndarray:
    if role == "positions":
        return np.tile(np.arange(tokens), (rows, 1))
    return np.full((rows, tokens), FILLING[role])


def numpy_type(ort_type: str) -> np.dtype:
    """The numpy type of an ONNX Runtime type such as `tensor(int64)`."""
    name = ort_type.removeprefix("tensor(").removesuffix(")").upper()
    return helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(name))


def _axes(first: tuple[int, ...], second: tuple[int, ...]) -> Axes:
    return tuple(_axis(a, b) for a, b in zip(first, second, strict=True))


def _axis(first: int, second: int) -> Axis:
    """An axis by its sizes in the two batches; size -1 if it fits no product of rows and tokens."""
    for batch in (False, True):
        for token in (False, True):
            units = [rows**batch * tokens**token for rows, tokens in SIZES]
            if first % units[0] == 0 and second == first // units[0] * units[1]:
                return Axis(batch, token, first // units[0])
    return Axis(True, True, -1)
