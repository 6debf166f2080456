"""Find in a graph what packing has to change: positions, attentions, and where tokens become one.

Nothing here knows an exporter or a node's name. A table is looked up by position when the indices
it was seen to get count 0, 1, 2 …; an attention is a Softmax over tokens for each token (or ONNX's
own Attention); its mask is whatever joins the scores on their way there without coming from the
words; a head answers once a sequence where the axis of tokens is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from packhorse.errors import CheckpointError
from packhorse.onnxpack.graph import Graph, refuse
from packhorse.onnxpack.probe import SIZES, WORD, Observed

JOINS_MASK = ("Add", "Sub", "Where")
PRODUCTS = ("MatMul", "MatMulInteger", "QLinearMatMul", "FusedMatMul", "Einsum")
# Made by ONNX Runtime's optimizer; their masks and scales have meanings of their own.
FUSED = (
    "Attention",
    "DynamicQuantizeMatMul",
    "EmbedLayerNormalization",
    "MatMulIntegerToFloat",
    "MultiHeadAttention",
    "QAttention",
)
WHOLE_TENSOR = ("Shape", "Size", "DynamicQuantizeLinear")  # look at tokens, but not at one by one


@dataclass(frozen=True)
class Table:
    """A lookup of embeddings."""

    node: NodeProto
    shape: tuple[int, int]
    indices: np.ndarray  # as they were seen


@dataclass(frozen=True)
class Embeddings:
    """The lookups by word and by position."""

    words: Table
    positions: Table
    offset: int  # the row of the first position
    counted: bool  # positions depend on the words: RoBERTa does not count its padding
    idle: tuple[Table, ...]  # looked up by zeros that are computed: types that are no input


class Joint(NamedTuple):
    """Where something joins the scores."""

    node: NodeProto
    scores: str  # before it


@dataclass(frozen=True)
class Attention:
    """One layer's attention: the values that go in, and the nodes that matter."""

    node: NodeProto  # the Softmax, or ONNX's Attention
    scores: NodeProto  # the product of queries and keys
    context: NodeProto  # the product with the values
    sources: tuple[str, str, str]  # queries, keys, values
    masks: tuple[Joint, ...] = ()
    biases: tuple[Joint, ...] = ()  # join the scores as well, but know nothing of the mask


def refuse_fused(graph: Graph) -> None:
    """Models that ONNX Runtime has optimised for itself are turned away."""
    for node in graph.nodes:
        if node.domain == "com.microsoft" and node.op_type in FUSED:
            raise refuse(node, "was fused by ONNX Runtime; pack the model as it was exported")


def find_embeddings(graph: Graph, seen: Observed, called: dict[str, str]) -> Embeddings:
    """The tables; refused where positions are not looked up in one."""
    tables = list(_tables(graph, seen))
    words = [table for table in tables if (table.indices == WORD).all()]
    if len(words) != 1:
        raise CheckpointError(f"{called['ids']} looks up {len(words)} tables of words, not one")
    positions = [table for table in tables if _counts(table.indices)]
    if len(positions) != 1:
        raise CheckpointError(
            f"found {len(positions)} tables that are looked up by position instead of one; "
            f"relative and rotary positions, and positions that the exporter has computed in "
            f"advance, cannot be packed"
        )
    given = graph.follow([called[role] for role in called if role in ("types", "positions")])
    idle = [
        table for table in tables if not table.indices.any() and table.node.input[1] not in given
    ]
    source = positions[0].node.input[1]
    counted = source in graph.follow([called["ids"]])
    first = int(positions[0].indices.reshape(-1)[0])
    return Embeddings(words[0], positions[0], first, counted, tuple(idle))


def _tables(graph: Graph, seen: Observed) -> Iterator[Table]:
    for node in graph.nodes:
        if node.op_type != "Gather" or not graph.is_constant(node.input[0]):
            continue
        stored = graph.stored.get(node.input[0])
        held = seen.values.get(node.input[0])
        shape = tuple(stored.dims) if stored else () if held is None else held.shape
        indices = seen.values.get(node.input[1])
        if len(shape) == 2 and indices is not None and seen.has_tokens(node.input[1]):
            yield Table(node, (int(shape[0]), int(shape[1])), indices)


def _counts(indices: np.ndarray) -> bool:
    """Does every row of it count up by one?"""
    return indices.shape[-1] == SIZES[0][1] and bool((np.diff(indices, axis=-1) == 1).all())


def find_attentions(
    graph: Graph, seen: Observed, words: Table, mask: str | None
) -> list[Attention]:
    """Every attention, in the order of the graph."""
    hidden = graph.follow(words.node.output)
    masked = graph.follow([mask] if mask else [])
    found = []
    for node in graph.nodes:
        if node.op_type == "Attention":
            q, k, v = node.input[:3]
            found.append(Attention(node, node, node, (q, k, v)))
        elif node.op_type == "Softmax" and _is_over_pairs(node, seen) and node.input[0] in hidden:
            found.append(_around(node, graph, seen, hidden, masked))
    if not found:
        raise CheckpointError("the model has no attention that packing knows")
    return found


def _is_over_pairs(softmax: NodeProto, seen: Observed) -> bool:
    return sum(axis.token for axis in seen.axes.get(softmax.output[0], ())) > 1


def _around(
    softmax: NodeProto, graph: Graph, seen: Observed, hidden: set[str], masked: set[str]
) -> Attention:
    """Up from a Softmax to the product of queries and keys, and down to that with the values."""
    masks, biases = [], []
    node = graph.maker[softmax.input[0]]
    while len(sources := [name for name in node.input if name in hidden]) == 1:
        others = [name for name in node.input if name != sources[0] and seen.has_tokens(name)]
        if others:
            joints = masks if any(name in masked for name in others) else biases
            joints.append(Joint(node, sources[0]))
        node = graph.maker[sources[0]]
    for joint in masks:
        if joint.node.op_type not in JOINS_MASK:
            raise refuse(joint.node, "joins mask and scores in a way that packing does not know")
    if len(sources) != 2 or node.op_type not in PRODUCTS:
        raise refuse(node, "stands where the product of queries and keys was expected")
    context, values = _context(softmax, graph, hidden)
    queries, keys = sources
    return Attention(softmax, node, context, (queries, keys, values), tuple(masks), tuple(biases))


def _context(softmax: NodeProto, graph: Graph, hidden: set[str]) -> tuple[NodeProto, str]:
    """The product of the shares with the values, and the values."""
    shares, open_ends = set(softmax.output), list(softmax.output)
    while open_ends:
        for node in graph.readers[open_ends.pop(0)]:
            values = [name for name in node.input if name in hidden and name not in shares]
            if values and node.op_type in PRODUCTS:
                return node, values[0]
            if values:
                raise refuse(node, "stands where the product with the values was expected")
            open_ends += [name for name in node.output if name not in shares]
            shares.update(node.output)
    raise refuse(softmax, "is used by no product with values")


def find_losses(graph: Graph, seen: Observed) -> list[tuple[NodeProto, str]]:
    """Nodes after which the axis of tokens is gone, with the value that had it."""
    found = []
    fed = graph.follow(graph.inputs)  # what depends on lengths alone is no head's
    for node in graph.live():
        if node.op_type in WHOLE_TENSOR or node.output[0] not in seen.axes:
            continue
        had = [name for name in node.input if name in fed and seen.has_tokens(name)]
        if had and not seen.has_tokens(node.output[0]):
            found.append((node, had[0]))
    return found


def takes_first(node: NodeProto, value: str, seen: Observed) -> bool:
    """Is its result the first token's part of `value`, as the numbers show?"""
    if node.op_type not in ("Gather", "GatherND", "Slice"):
        return False
    first, result = seen.values[value][:, 0], seen.values[node.output[0]]
    return result.size == first.size and np.array_equal(result.reshape(first.shape), first)
