"""The positions of sequences in packed rows, as values that the graph itself computes.

Each value is added on first use, so that a graph gets only the inputs and operations it needs. In
mask mode the starts of sequences are an input; in repack mode sequences are laid end to end, so
everything follows from their lengths.

Shapes: R rows, C tokens per row, S sequences, L tokens of the longest sequence.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
from onnx import TensorProto, helper

from packhorse.onnxpack.graph import EditableGraph

# Names of the inputs that a graph gets; the mask only if it had none.
MASK = "attention_mask"
FIRST = "first_positions"
LENGTHS = "sequence_lengths"
UNPACK = "unpack_info"
# Far below any score, and finite, so that a row of only padding gives numbers.
LOW = {"float16": -3e4, "float32": -1e30, "float64": -1e30}


class PackedLayout:
    """Values of a graph that describe its packed rows.

    input_names: role → name of the graph's inputs; inputs that are added are entered here.
    """

    def __init__(
        self,
        graph: EditableGraph,
        mode: Literal["positions", "mask", "repack"],
        input_names: dict[str, str],
    ) -> None:
        self.graph = graph
        self.mode = mode
        self.input_names = input_names
        self.shifts: dict[str, str] = {}

    def _input(self, role: str, name: str) -> str:
        if role not in self.input_names:
            self.input_names[role] = self.graph.add_input(name)
        return self.input_names[role]

    @cached_property
    def numbers(self) -> str:
        """[R, C] in mask mode: the number of each token's sequence, 0 for padding."""
        return self.graph.op("Cast", self._input("mask", MASK), to=TensorProto.INT64)

    @cached_property
    def lengths(self) -> str:
        """[S]: tokens of each sequence."""
        return self._input("lengths", LENGTHS if self.mode == "mask" else UNPACK)

    @cached_property
    def tokens(self) -> str:
        """R × C, the number of all tokens."""
        return self.graph.op("Size", self.input_names["ids"])

    @cached_property
    def starts(self) -> str:
        """[S]: the index of each sequence's first token in the flattened rows."""
        graph = self.graph
        if self.mode == "mask":
            return self._input("first", FIRST)
        ends = graph.op("CumSum", self.lengths, graph.constant(0))
        starts = graph.op("Sub", ends, self.lengths)
        last = graph.op("Sub", self.tokens, graph.constant(1))
        # An empty sequence at the end would start after the last token; it may get any token.
        return graph.op("Where", graph.op("Less", starts, self.tokens), starts, last)

    @cached_property
    def longest(self) -> str:
        """L, the length of the longest sequence."""
        return self.graph.op("ReduceMax", self.lengths, keepdims=0)

    @cached_property
    def steps(self) -> str:
        """[L]: 0, 1, 2 …"""
        graph = self.graph
        return graph.op("Range", graph.constant(0), self.longest, graph.constant(1))

    @cached_property
    def filled(self) -> str:
        """[S, L]: is there a token, or only padding?"""
        column = self.graph.op("Reshape", self.lengths, self.graph.constant([-1, 1]))
        return self.graph.op("Less", self.steps, column)

    @cached_property
    def index(self) -> str:
        """[S, L]: the index of each token in the flattened rows.

        Padding gets its sequence's first token, so that a sequence never sees a neighbor's.
        """
        graph = self.graph
        steps = graph.op("Where", self.filled, self.steps, graph.constant(0))
        column = graph.op("Reshape", self.starts, graph.constant([-1, 1]))
        return graph.op("Add", column, steps)

    @cached_property
    def back(self) -> str:
        """[R, C] in repack mode: the index in [S × L] of each token; padding gets any index."""
        graph = self.graph
        coordinates = graph.op("NonZero", self.filled)
        row = graph.op("Gather", coordinates, graph.constant(0), axis=0)
        column = graph.op("Gather", coordinates, graph.constant(1), axis=0)
        indices = graph.op("Add", graph.op("Mul", row, self.longest), column)
        missing = graph.op("Sub", self.tokens, graph.op("Shape", indices))
        zero = helper.make_tensor("zero", TensorProto.INT64, [1], [0])
        padding = graph.op("ConstantOfShape", missing, value=zero)
        padded = graph.op("Concat", indices, padding, axis=0)
        return graph.op("Reshape", padded, graph.op("Shape", self.input_names["ids"]))

    @cached_property
    def real(self) -> str:
        """[R, C]: is it a token, not padding?"""
        graph = self.graph
        if self.mode == "mask":
            return graph.op("Greater", self.numbers, graph.constant(0))
        indices = graph.op("Range", graph.constant(0), self.tokens, graph.constant(1))
        real = graph.op("Less", indices, graph.op("ReduceSum", self.lengths, keepdims=0))
        return graph.op("Reshape", real, graph.op("Shape", self.input_names["ids"]))

    @cached_property
    def may_see(self) -> str:
        """[R, 1, C, C] or [S, 1, 1, L]: which keys a query may attend to."""
        graph = self.graph
        if self.mode == "repack":
            return graph.op("Reshape", self.filled, graph.constant([0, 1, 1, -1]))
        queries = graph.op("Reshape", self.numbers, graph.constant([0, 1, -1, 1]))
        keys = graph.op("Reshape", self.numbers, graph.constant([0, 1, 1, -1]))
        real = graph.op("Greater", keys, graph.constant(0))
        return graph.op("And", graph.op("Equal", queries, keys), real)

    def shift(self, dtype: np.dtype) -> str:
        """What to add to attention scores of this dtype."""
        if dtype.name not in self.shifts:
            low = self.graph.constant(LOW[dtype.name], dtype)
            zero = self.graph.constant(0, dtype)
            self.shifts[dtype.name] = self.graph.op("Where", self.may_see, zero, low)
        return self.shifts[dtype.name]

    def shift_per_query(self, dtype: np.dtype) -> str:
        """The same with a row per query, for ONNX's Attention, which does not broadcast."""
        if self.mode == "mask":
            return self.shift(dtype)
        graph = self.graph
        single = graph.constant([1])
        longest = graph.op("Reshape", self.longest, single)
        return graph.op("Expand", self.shift(dtype), graph.op("Concat", longest, single, axis=0))

    def first(self, value: str, widths: list[int]) -> str:
        """The first token of each sequence: [R, C, widths …] to [S, widths …]."""
        return self.graph.op("Gather", self._flatten(value, widths), self.starts)

    def unpack(self, value: str, widths: list[int]) -> str:
        """[R, C, widths …] to [S, L, widths …]."""
        return self.graph.op("Gather", self._flatten(value, widths), self.index)

    def repack(self, value: str, widths: list[int]) -> str:
        """[S, L, widths …] to [R, C, widths …]."""
        return self.graph.op("Gather", self._flatten(value, widths), self.back)

    def zeroed(self, value: str, widths: list[int], dtype: np.dtype) -> str:
        """[S, L, widths …] with zeros where there is no token."""
        graph = self.graph
        shape = graph.constant([0, -1, *(1 for _ in widths)])
        filled = graph.op("Reshape", self.filled, shape)
        return graph.op("Where", filled, value, graph.constant(0, dtype))

    def over_sequence(self, kind: str, value: str) -> str:
        """Reduce (`kind`) a float per token over its sequence, and zero: [R, C] to [R, C]."""
        graph = self.graph
        zero = graph.constant(0, np.float32)
        if self.mode == "positions":  # a row is a sequence, and its padding
            if "mask" in self.input_names:
                real = graph.op("Cast", self.input_names["mask"], to=TensorProto.BOOL)
                value = graph.op("Where", real, value, zero)
            return self.over_row(kind, value)
        if self.mode == "repack":
            unpacked = self.zeroed(self.unpack(value, []), [], np.dtype(np.float32))
            return self.repack(self.over_row(kind, unpacked), [])
        keys = graph.op("Reshape", value, graph.constant([0, 1, 1, -1]))
        visible = graph.op("Where", self.may_see, keys, zero)  # [R, 1, C, C]
        return graph.op("Reshape", graph.reduce(kind, visible, [3]), graph.constant([0, -1]))

    def over_row(self, kind: str, value: str) -> str:
        """Reduce a float per token over its row: [R, C] to [R, C]."""
        shape = self.graph.op("Shape", value)
        return self.graph.op("Expand", self.graph.reduce(kind, value, [1], keep=True), shape)

    def _flatten(self, value: str, widths: list[int]) -> str:
        return self.graph.op("Reshape", value, self.graph.constant([-1, *widths]))
