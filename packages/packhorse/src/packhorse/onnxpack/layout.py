"""Where sequences lie in packed rows, as values of the graph itself.

Each is made when it is asked for first, so that a graph gets only the inputs and operations it
needs. In mask mode the host says where sequences begin; in repack mode all follows from their
lengths, for there they lie end to end.

Shapes: R rows, C tokens a row, S sequences, L tokens of the longest.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
from onnx import TensorProto, helper

from packhorse.onnxpack.graph import Graph

# Inputs that a graph gets; the mask only where it had none.
MASK, FIRST = "attention_mask", "first_positions"
LENGTHS, UNPACK = "sequence_lengths", "unpack_info"
# Far below any score, and finite, so that a row of padding alone gives numbers.
LOW = {"float16": -3e4, "float32": -1e30, "float64": -1e30}


class Layout:
    """The values; `called` are the names of the graph's inputs and gets those that are added."""

    def __init__(
        self, graph: Graph, mode: Literal["positions", "mask", "repack"], called: dict[str, str]
    ) -> None:
        self.graph, self.mode, self.called = graph, mode, called
        self.shifts: dict[str, str] = {}

    def _input(self, role: str, name: str) -> str:
        if role not in self.called:
            self.called[role] = self.graph.add_input(name)
        return self.called[role]

    @cached_property
    def numbers(self) -> str:
        """Mask mode, [R, C]: the number of each token's sequence, 0 for padding."""
        return self.graph.op("Cast", self._input("mask", MASK), to=TensorProto.INT64)

    @cached_property
    def lengths(self) -> str:
        """[S]"""
        return self._input("lengths", LENGTHS if self.mode == "mask" else UNPACK)

    @cached_property
    def tokens(self) -> str:
        """R × C"""
        return self.graph.op("Size", self.called["ids"])

    @cached_property
    def starts(self) -> str:
        """[S]: the first token of each sequence in all rows laid end to end."""
        graph = self.graph
        if self.mode == "mask":
            return self._input("first", FIRST)
        ends = graph.op("CumSum", self.lengths, graph.constant(0))
        starts = graph.op("Sub", ends, self.lengths)
        last = graph.op("Sub", self.tokens, graph.constant(1))
        # An empty sequence may start after the last token; any token will do for it.
        return graph.op("Where", graph.op("Less", starts, self.tokens), starts, last)

    @cached_property
    def longest(self) -> str:
        """L"""
        return self.graph.op("ReduceMax", self.lengths, keepdims=0)

    @cached_property
    def steps(self) -> str:
        """[L]: 0, 1, 2 …"""
        graph = self.graph
        return graph.op("Range", graph.constant(0), self.longest, graph.constant(1))

    @cached_property
    def filled(self) -> str:
        """[S, L]: is there a token?"""
        column = self.graph.op("Reshape", self.lengths, self.graph.constant([-1, 1]))
        return self.graph.op("Less", self.steps, column)

    @cached_property
    def index(self) -> str:
        """[S, L]: which token; where there is none, the first, so that none is a neighbour's."""
        graph = self.graph
        steps = graph.op("Where", self.filled, self.steps, graph.constant(0))
        column = graph.op("Reshape", self.starts, graph.constant([-1, 1]))
        return graph.op("Add", column, steps)

    @cached_property
    def back(self) -> str:
        """Repack mode, [R, C]: where in [S × L] each token is; padding at the end takes any."""
        graph = self.graph
        places = graph.op("NonZero", self.filled)
        row, column = (graph.op("Gather", places, graph.constant(i), axis=0) for i in (0, 1))
        known = graph.op("Add", graph.op("Mul", row, self.longest), column)
        room = graph.op("Sub", self.tokens, graph.op("Shape", known))
        zero = helper.make_tensor("zero", TensorProto.INT64, [1], [0])
        padding = graph.op("ConstantOfShape", room, value=zero)
        every = graph.op("Concat", known, padding, axis=0)
        return graph.op("Reshape", every, graph.op("Shape", self.called["ids"]))

    @cached_property
    def real(self) -> str:
        """[R, C]: is a token no padding?"""
        graph = self.graph
        if self.mode == "mask":
            return graph.op("Greater", self.numbers, graph.constant(0))
        every = graph.op("Range", graph.constant(0), self.tokens, graph.constant(1))
        real = graph.op("Less", every, graph.op("ReduceSum", self.lengths, keepdims=0))
        return graph.op("Reshape", real, graph.op("Shape", self.called["ids"]))

    @cached_property
    def may_see(self) -> str:
        """Which keys a query may see: [R, 1, C, C], or [S, 1, 1, L]."""
        graph = self.graph
        if self.mode == "repack":
            return graph.op("Reshape", self.filled, graph.constant([0, 1, 1, -1]))
        queries = graph.op("Reshape", self.numbers, graph.constant([0, 1, -1, 1]))
        keys = graph.op("Reshape", self.numbers, graph.constant([0, 1, 1, -1]))
        real = graph.op("Greater", keys, graph.constant(0))
        return graph.op("And", graph.op("Equal", queries, keys), real)

    def shift(self, dtype: np.dtype) -> str:
        """What to add to scores of this type."""
        if dtype.name not in self.shifts:
            low = self.graph.constant(LOW[dtype.name], dtype)
            zero = self.graph.constant(0, dtype)
            self.shifts[dtype.name] = self.graph.op("Where", self.may_see, zero, low)
        return self.shifts[dtype.name]

    def shift_all(self, dtype: np.dtype) -> str:
        """The same with a row for each query, for those who do not broadcast."""
        if self.mode == "mask":
            return self.shift(dtype)
        graph, one = self.graph, self.graph.constant([1])
        longest = graph.op("Reshape", self.longest, one)
        return graph.op("Expand", self.shift(dtype), graph.op("Concat", longest, one, axis=0))

    def first(self, value: str, widths: list[int]) -> str:
        """The first token of each sequence: [R, C, widths …] to [S, widths …]."""
        return self.graph.op("Gather", self._flat(value, widths), self.starts)

    def unpack(self, value: str, widths: list[int]) -> str:
        """[R, C, widths …] to [S, L, widths …]."""
        return self.graph.op("Gather", self._flat(value, widths), self.index)

    def repack(self, value: str, widths: list[int]) -> str:
        """[S, L, widths …] to [R, C, widths …]."""
        return self.graph.op("Gather", self._flat(value, widths), self.back)

    def zeroed(self, value: str, widths: list[int], dtype: np.dtype) -> str:
        """[S, L, widths …] with zeros where there is no token."""
        graph = self.graph
        shape = graph.constant([0, -1, *(1 for _ in widths)])
        filled = graph.op("Reshape", self.filled, shape)
        return graph.op("Where", filled, value, graph.constant(0, dtype))

    def over_sequence(self, kind: str, value: str) -> str:
        """Reduce (`kind`) a float per token over its sequence and zero: [R, C] to [R, C]."""
        graph, zero = self.graph, self.graph.constant(0, np.float32)
        if self.mode == "positions":  # a row is a sequence, and its padding
            if "mask" in self.called:
                real = graph.op("Cast", self.called["mask"], to=TensorProto.BOOL)
                value = graph.op("Where", real, value, zero)
            return self.over_row(kind, value)
        if self.mode == "repack":
            unpacked = self.zeroed(self.unpack(value, []), [], np.dtype(np.float32))
            return self.repack(self.over_row(kind, unpacked), [])
        keys = graph.op("Reshape", value, graph.constant([0, 1, 1, -1]))
        own = graph.op("Where", self.may_see, keys, zero)  # [R, 1, C, C]
        return graph.op("Reshape", graph.reduce(kind, own, [3]), graph.constant([0, -1]))

    def over_row(self, kind: str, value: str) -> str:
        """Reduce a float per token over its row, [R, C] to [R, C]."""
        shape = self.graph.op("Shape", value)
        return self.graph.op("Expand", self.graph.reduce(kind, value, [1], keep=True), shape)

    def _flat(self, value: str, widths: list[int]) -> str:
        return self.graph.op("Reshape", value, self.graph.constant([-1, *widths]))
