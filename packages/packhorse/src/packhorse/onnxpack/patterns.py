"""Find what packing has to change in a graph: positions, attentions, and pooling over tokens.

Nothing here depends on an exporter or on names of nodes. A table is the position table if the
indices observed at its lookup count 0, 1, 2 …; an attention is a Softmax over tokens per token (or
ONNX's own Attention); its mask is any value that is combined with the scores before the Softmax and
does not come from the words; a head is per sequence if its token axis disappears.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from packhorse.errors import CheckpointError
from packhorse.onnxpack.graph import EditableGraph, node_error
from packhorse.onnxpack.probe import SIZES, WORD, Observation

MASK_OPS = ("Add", "Sub", "Where")
PRODUCTS = ("MatMul", "MatMulInteger", "QLinearMatMul", "FusedMatMul", "Einsum")
# Operations of ONNX Runtime's optimizer, whose masks and scales mean something else.
FUSED = (
    "Attention",
    "DynamicQuantizeMatMul",
    "EmbedLayerNormalization",
    "MatMulIntegerToFloat",
    "MultiHeadAttention",
    "QAttention",
)
# Read a whole tensor at once, not token by token.
WHOLE_TENSOR_OPS = ("Shape", "Size", "DynamicQuantizeLinear")


@dataclass(frozen=True)
class EmbeddingTable:
    """A lookup of embeddings."""

    node: NodeProto
    shape: tuple[int, int]
    indices: np.ndarray  # as observed


@dataclass(frozen=True)
class EmbeddingTables:
    """The lookups by word and by position."""

    words: EmbeddingTable
    positions: EmbeddingTable
    offset: int  # row of the first position
    counted: bool  # positions depend on the words: RoBERTa does not count its padding
    constant: tuple[EmbeddingTable, ...]  # looked up by computed zeros: token types without input


class ScoreChange(NamedTuple):
    """A node that combines the attention scores with another value."""

    node: NodeProto
    scores: str  # its input


@dataclass(frozen=True)
class AttentionNodes:
    """One layer's attention: its inputs, and the nodes that packing changes."""

    node: NodeProto  # the Softmax, or ONNX's Attention
    scores: NodeProto  # the product of queries and keys
    context: NodeProto  # the product with the values
    sources: tuple[str, str, str]  # queries, keys, values
    masks: tuple[ScoreChange, ...] = ()
    biases: tuple[ScoreChange, ...] = ()  # of values that do not depend on the mask


def refuse_fused(graph: EditableGraph) -> None:
    """Raise for a model that ONNX Runtime has optimized and saved."""
    for node in graph.nodes:
        if node.domain == "com.microsoft" and node.op_type in FUSED:
            raise node_error(
                node,
                "was fused by ONNX Runtime; pack the model as it was exported, or write it anew: "
                "packhorse convert MODEL.onnx OUT --to onnx",
            )


def find_embeddings(
    graph: EditableGraph, observed: Observation, input_names: dict[str, str]
) -> EmbeddingTables:
    """The tables of words and positions; raises if positions are not looked up in a table."""
    tables = list(_tables(graph, observed))
    words = [table for table in tables if (table.indices == WORD).all()]
    if len(words) != 1:
        raise CheckpointError(
            f"{input_names['ids']} looks up {len(words)} tables of words, not one"
        )
    positions = [table for table in tables if _counts(table.indices)]
    if len(positions) != 1:
        raise CheckpointError(
            f"found {len(positions)} tables that are looked up by position instead of one; "
            f"relative and rotary positions, and positions that the exporter has computed in "
            f"advance, cannot be packed"
        )
    optional = [name for role, name in input_names.items() if role in ("types", "positions")]
    from_inputs = graph.follow(optional)
    constant = [
        table
        for table in tables
        if not table.indices.any() and table.node.input[1] not in from_inputs
    ]
    source = positions[0].node.input[1]
    counted = source in graph.follow([input_names["ids"]])
    first = int(positions[0].indices.reshape(-1)[0])
    return EmbeddingTables(words[0], positions[0], first, counted, tuple(constant))


def _tables(graph: EditableGraph, observed: Observation) -> Iterator[EmbeddingTable]:
    for node in graph.nodes:
        if node.op_type != "Gather" or not graph.is_constant(node.input[0]):
            continue
        stored = graph.stored.get(node.input[0])
        computed = observed.values.get(node.input[0])
        shape = () if computed is None else computed.shape
        if stored:
            shape = tuple(stored.dims)
        indices = observed.values.get(node.input[1])
        if len(shape) == 2 and indices is not None and observed.has_tokens(node.input[1]):
            yield EmbeddingTable(node, (int(shape[0]), int(shape[1])), indices)


def _counts(indices: np.ndarray) -> bool:
    """Do the indices count up by one over the tokens of a row?"""
    _, tokens = SIZES[0]  # rows and tokens of the batch that was observed
    return indices.shape[-1] == tokens and bool((np.diff(indices, axis=-1) == 1).all())


def find_attentions(
    graph: EditableGraph, observed: Observation, words: EmbeddingTable, mask: str | None
) -> list[AttentionNodes]:
    """All attentions, in the order of the graph."""
    hidden = graph.follow(words.node.output)
    masked = graph.follow([mask] if mask else [])
    attentions = []
    for node in graph.nodes:
        if node.op_type == "Attention":
            q, k, v = node.input[:3]
            attentions.append(AttentionNodes(node, node, node, (q, k, v)))
        elif (
            node.op_type == "Softmax" and _is_over_pairs(node, observed) and node.input[0] in hidden
        ):
            attentions.append(_around_softmax(node, graph, observed, hidden, masked))
    if not attentions:
        raise CheckpointError("the model has no attention that packing knows")
    return attentions


def _is_over_pairs(softmax: NodeProto, observed: Observation) -> bool:
    """Does its result have two token axes, for queries and keys?"""
    return sum(axis.token for axis in observed.axes.get(softmax.output[0], ())) > 1


def _around_softmax(
    softmax: NodeProto,
    graph: EditableGraph,
    observed: Observation,
    hidden: set[str],
    masked: set[str],
) -> AttentionNodes:
    """Go up from a Softmax to the product of queries and keys, and down to that with the values."""
    masks: list[ScoreChange] = []
    biases: list[ScoreChange] = []
    node = graph.producer[softmax.input[0]]
    while len(sources := [name for name in node.input if name in hidden]) == 1:
        added = [name for name in node.input if name != sources[0] and observed.has_tokens(name)]
        if added:
            changes = masks if any(name in masked for name in added) else biases
            changes.append(ScoreChange(node, sources[0]))
        node = graph.producer[sources[0]]
    for change in masks:
        if change.node.op_type not in MASK_OPS:
            raise node_error(
                change.node, "joins mask and scores in a way that packing does not support"
            )
    if len(sources) != 2 or node.op_type not in PRODUCTS:
        raise node_error(node, "is where the product of queries and keys was expected")
    context, values = _context(softmax, graph, hidden)
    queries, keys = sources
    return AttentionNodes(
        softmax, node, context, (queries, keys, values), tuple(masks), tuple(biases)
    )


def _context(softmax: NodeProto, graph: EditableGraph, hidden: set[str]) -> tuple[NodeProto, str]:
    """The product of the attention weights with the values, and the values."""
    weights = set(softmax.output)
    pending = list(softmax.output)
    while pending:
        for node in graph.readers[pending.pop(0)]:
            values = [name for name in node.input if name in hidden and name not in weights]
            if values and node.op_type in PRODUCTS:
                return node, values[0]
            if values:
                raise node_error(node, "is where the product with the values was expected")
            pending += [name for name in node.output if name not in weights]
            weights.update(node.output)
    raise node_error(softmax, "is used by no product with values")


def find_poolings(graph: EditableGraph, observed: Observation) -> list[tuple[NodeProto, str]]:
    """Nodes whose result has lost the token axis, with the input that had it."""
    poolings = []
    from_inputs = graph.follow(graph.inputs)  # without what depends only on their shapes
    for node in graph.live():
        if node.op_type in WHOLE_TENSOR_OPS or node.output[0] not in observed.axes:
            continue
        per_token = [
            name for name in node.input if name in from_inputs and observed.has_tokens(name)
        ]
        if per_token and not observed.has_tokens(node.output[0]):
            poolings.append((node, per_token[0]))
    return poolings


def takes_first(node: NodeProto, value: str, observed: Observation) -> bool:
    """Is its result the first token of `value`, by the observed numbers?"""
    if node.op_type not in ("Gather", "GatherND", "Slice"):
        return False
    first = observed.values[value][:, 0]
    result = observed.values[node.output[0]]
    return result.size == first.size and np.array_equal(result.reshape(first.shape), first)
