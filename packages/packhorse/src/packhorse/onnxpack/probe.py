"""Run a model on two small batches and see what every axis of every value is.

Whatever an exporter wrote, sizes tell: of two batches with different numbers of rows and of tokens,
an axis that grows with the rows is the batch's, one that grows with the tokens is theirs, one that
stays is a width. That is simpler than inferring shapes through the graph, and it holds for
exporters and quantisers nobody has seen yet. The price is running the model twice, unoptimised, on
a few tokens. The values of the first batch are kept: they tell which table is looked up by
position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from packhorse.errors import CheckpointError
from packhorse.onnxpack.engine import blaming, open_session
from packhorse.onnxpack.graph import Graph

SIZES = ((2, 5), (3, 7))  # rows and tokens of the two batches: no two ratios are the same
WORD = 5  # the token they are full of: neither padding nor a word of its own meaning
FILLING = {"ids": WORD, "types": 0, "mask": 1}
# How inputs are called, by those who export from transformers, TensorFlow and ourselves.
ROLES = {
    "ids": ("input_ids", "input_word_ids", "ids"),
    "mask": ("attention_mask", "input_mask", "mask"),
    "types": ("token_type_ids", "segment_ids", "input_type_ids"),
    "positions": ("position_ids",),
}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: does it grow with the rows, with the tokens, and times what."""

    batch: bool
    token: bool
    size: int


BATCH, TOKEN = Axis(True, False, 1), Axis(False, True, 1)
Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Observed:
    """What was seen: axes of each value, and what it was in the first batch."""

    axes: dict[str, Axes]
    values: dict[str, np.ndarray]

    def has_tokens(self, value: str) -> bool:
        """Does an axis of tokens survive in it?"""
        return any(axis.token for axis in self.axes.get(value, ()))

    def per_token(self, value: str) -> bool:
        """Is it [batch, tokens, widths …]?"""
        axes = self.axes.get(value, ())
        return axes[:2] == (BATCH, TOKEN) and not any(a.batch or a.token for a in axes[2:])

    def widths(self, value: str) -> list[int]:
        """The sizes after batch and tokens, or after the batch."""
        return [axis.size for axis in self.axes[value] if not (axis.batch or axis.token)]


def roles(names: Iterable[str]) -> dict[str, str]:
    """Which of these inputs is what, by its name."""
    found = {}
    for name in names:
        plain = name.split(":")[0].rpartition("/")[2].lower()
        role = next((role for role, names in ROLES.items() if plain in names), None)
        if role is None or role in found:
            known = ", ".join(names[0] for names in ROLES.values())
            raise CheckpointError(f"input {name!r} is none that packing knows ({known})")
        found[role] = name
    if "ids" not in found:
        raise CheckpointError("the model has no input called input_ids")
    return found


def observe(graph: Graph, called: Mapping[str, str]) -> Observed:
    """Run both batches; `called` are the names of the inputs."""
    session = open_session(_all_visible(graph.model), folder=graph.folder, plain=True)
    names = [output.name for output in session.get_outputs()]
    types = {given.name: given.type for given in session.get_inputs()}
    seen: list[dict[str, np.ndarray]] = []
    for rows, tokens in SIZES:
        feeds = {
            name: _batch(role, rows, tokens).astype(numpy_type(types[name]))
            for role, name in called.items()
        }
        fault = f"the model does not run on {rows} rows of {tokens} tokens (are its axes dynamic?)"
        with blaming(fault):
            found = zip(names, session.run(names, feeds), strict=True)
        tensors = {name: value for name, value in found if isinstance(value, np.ndarray)}
        seen.append(feeds | tensors)
    first, second = seen
    shapes = {name: (first[name].shape, second[name].shape) for name in first if name in second}
    axes = {name: _axes(*both) for name, both in shapes.items() if len(both[0]) == len(both[1])}
    return Observed(axes, first)


def _all_visible(model: ModelProto) -> bytes:
    """The model with every value as an output."""
    outputs = model.graph.output
    own = {output.name for output in outputs}
    names = [name for node in model.graph.node for name in node.output if name and name not in own]
    outputs.extend(ValueInfoProto(name=name) for name in names)
    try:
        return model.SerializeToString()
    finally:
        del outputs[len(own) :]


def _batch(role: str, rows: int, tokens: int) -> np.ndarray:
    if role == "positions":
        return np.tile(np.arange(tokens), (rows, 1))
    return np.full((rows, tokens), FILLING[role])


def numpy_type(ort_type: str) -> np.dtype:
    """Of what ONNX Runtime calls `tensor(int64)`."""
    name = ort_type.removeprefix("tensor(").removesuffix(")").upper()
    return helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(name))


def _axes(first: tuple[int, ...], second: tuple[int, ...]) -> Axes:
    return tuple(_axis(a, b) for a, b in zip(first, second, strict=True))


def _axis(first: int, second: int) -> Axis:
    """Sizes of one axis in the two batches; what fits no product of rows and tokens stays odd."""
    for batch in (False, True):
        for token in (False, True):
            units = [rows**batch * tokens**token for rows, tokens in SIZES]
            if first % units[0] == 0 and second == first // units[0] * units[1]:
                return Axis(batch, token, first // units[0])
    return Axis(True, True, -1)
